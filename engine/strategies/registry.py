"""The table of strategies: one row each. `polyphase strategies` prints it, the flags are checked against it.

It is read without torch: a row refers to its class by name, and the class is imported when a strategy is created.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal

from ..compression.registry import ROWS as HOOKS
from ..compression.registry import HookRow
from ..flags import choose
from ..precision import OF_BLOCKS, PRECISIONS
from ..registration import STRATEGY_GROUP, Reference, check_new_name, load_plugin
from .options import (
    CPOptions,
    DDPCPOptions,
    DDPOptions,
    DiLoCoOptions,
    FSDPCPOptions,
    FSDPOptions,
    FSDPTPOptions,
    HSDPCPOptions,
    HSDPOptions,
    HSDPTPOptions,
    LocalSGDOptions,
    NoOptions,
    PPDDPOptions,
    PPFSDPOptions,
    PPOptions,
    PSOptions,
    TPOptions,
)

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

__all__ = [
    "LIGHTNINGS_OWN",
    "STRATEGIES",
    "StrategySpec",
    "always",
    "find_strategy",
    "import_all",
    "never",
    "register_strategy",
]


def _no_compression(name: str, hook: HookRow) -> bool:
    """No compression: gradients can only be sent uncompressed."""
    return False


def _every_compression(name: str, hook: HookRow) -> bool:
    """Every compression, including those that are registered later."""
    return True


def _compressions_of_shards(name: str, hook: HookRow) -> bool:
    """Compressions that can work on a reduce-scatter of shards."""
    return hook.reduces_shards


def _all_but_auto(name: str, hook: HookRow) -> bool:
    """Every compression except `auto`, which compares the length of equal steps."""
    return name != "auto"


def always(options: Any) -> bool:
    """Whatever the options are."""
    return True


def never(options: Any) -> bool:
    """Not with any options."""
    return False


def _unless_cut(options: Any) -> bool:
    """Unless the options name a number of micro-batches, which take less memory on one device, too."""
    return options.microbatches in (None, 1)


_OF_ANY_MODULE = tuple(name for name in PRECISIONS if name not in OF_BLOCKS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySpec:
    """The properties of a strategy."""

    description: str
    """A few words, for one line of the terminal."""
    traffic: str
    """The collectives of a step, all of them: see `tests/engine/loop/test_costs_integration.py`."""
    choose_when: str = ""
    """When to choose it."""
    options: type
    """Frozen dataclass of the options after the colon."""
    make: "Callable[..., Strategy] | None"
    """Makes the strategy from the options, the launcher's suffix and the comm hook; None for one process on one device,
    which uses Lightning's own strategy."""
    make_for_several: "Callable[..., Strategy] | None" = None
    """Makes the strategy for one process on several devices, from the type and number of devices, the number of nodes
    and `sync_batchnorm`."""
    is_single_alone: Callable[[Any], bool] = never
    """Takes the options; returns whether one process on one device trains as under `single`, since the strategy would
    only divide what one process has as a whole. A compression and offload='parameters' need the strategy itself."""
    note: str = ""
    """A note that is printed once when the strategy is chosen."""
    takes_compression: Callable[[str, HookRow], bool] = _no_compression
    """Takes the name and row of a compression; returns whether the strategy can use it."""
    why_not: str = ""
    """Why it does not support the other compressions."""
    precisions: tuple[str, ...] = _OF_ANY_MODULE
    """Names of the supported precisions."""
    why_not_precision: str = "those of blocks work with single, ddp, zero1, fsdp and hsdp"
    """Why it does not support the other precisions."""

    @property
    def compressions(self) -> tuple[str, ...]:
        """Names of the supported compressions, without `none`."""
        return tuple(name for name, hook in HOOKS.items() if self.takes_compression(name, hook))


def _from(path: str) -> Reference:
    return Reference(path, __package__ or "")


_GATHERS = (
    "per micro-batch: an all-gather of each unit in forward, and in backward but for the last unit; per optimizer step:"
    " a reduce-scatter of each"
)
_EVERY_H = "every H optimizer steps: an all-reduce of each bucket of changes of weights, and of BatchNorm's statistics"
_UNEVEN = "auto compares the length of equal steps; here only every H-th step sends anything"
_SHARDED = (
    "each rank would have to keep the unsent residual of a whole unsharded model; hsdp supports all of them, between"
    " its groups"
)
_SPLIT = (
    "per micro-batch: an all-reduce of the activations for each MLP, each attention and the embedding, and an"
    " all-gather of the logits in forward; in backward an all-reduce for each MLP, each attention and the output layer"
)
_EXCHANGED = (
    "per micro-batch: for each attention 4 all-to-alls of its activations in forward, and 4 in backward; per optimizer"
    " step: an all-reduce of the gradient of each parameter"
)
_EVERY_REPLICA = "per optimizer step: an all-reduce of the gradients of each unit"
_NOT_SPLIT = "a compression works on whole parameters, but here each rank has parts of them"


STRATEGIES: dict[str, StrategySpec] = {
    "single": StrategySpec(
        description="one process, one device",
        traffic="none",
        choose_when="to debug, and for models that one device trains fast enough",
        precisions=tuple(PRECISIONS),
        options=NoOptions,
        make=None,
        why_not="one process sends no gradients",
    ),
    "dp": StrategySpec(
        description="one process that splits each batch over its GPUs, for old scripts",
        traffic="per micro-batch, between the GPUs: all parameters from the first one, all gradients to it",
        choose_when="a script for torch.nn.DataParallel is to run unchanged; otherwise ddp is faster",
        options=NoOptions,
        make=None,
        make_for_several=_from(".dp:make_dp"),
        note=(
            "strategy 'dp' copies all parameters to every GPU in each micro-batch, and runs them by threads of one"
            " process. 'ddp' is faster: Engine(strategy='ddp', devices=N), with the loader's batch_size divided by N."
        ),
        why_not="one process sends no gradients",
    ),
    "ddp": StrategySpec(
        description="a full copy of the module per device, gradients averaged",
        traffic="per optimizer step: an all-reduce of each bucket of gradients",
        choose_when="the model, its gradients and its optimizer's state fit on one device: the first choice",
        precisions=tuple(PRECISIONS),
        options=DDPOptions,
        make=_from(".ddp:DDP"),
        takes_compression=_every_compression,
    ),
    "zero1": StrategySpec(
        description="as ddp, with each optimizer's state divided among the devices (ZeRO, stage 1)",
        traffic="per optimizer step: as ddp, then a broadcast of each bucket of updated parameters by their owner",
        choose_when="as ddp, if the optimizer's state does not fit on one device",
        precisions=tuple(PRECISIONS),
        options=DDPOptions,
        make=_from(".zero1:Zero1"),
        takes_compression=_every_compression,
    ),
    "fsdp": StrategySpec(
        description="parameters, gradients and optimizer state in shards over all devices (FSDP2)",
        traffic=_GATHERS,
        choose_when="the model in training does not fit on one device, and the devices are connected fast",
        precisions=tuple(PRECISIONS),
        options=FSDPOptions,
        make=_from(".fsdp:FSDP"),
        is_single_alone=always,
        takes_compression=_compressions_of_shards,
        why_not=_SHARDED,
    ),
    "hsdp": StrategySpec(
        description="shards within groups of devices, gradients averaged over the groups (2-D mesh)",
        traffic=f"{_GATHERS}, then an all-reduce of its shards",
        choose_when="as fsdp on several nodes: shards within a node, averages between them",
        precisions=tuple(PRECISIONS),
        options=HSDPOptions,
        make=_from(".fsdp:FSDP"),
        is_single_alone=always,
        takes_compression=_every_compression,
    ),
    "pp": StrategySpec(
        description="blocks in stages, micro-batches in all of them at once (pipeline)",
        traffic="per batch: activations to the next stage and their gradients back, in micro-batches, and a broadcast"
        " of logged values; per optimizer step: an all-reduce of the gradients that stages share",
        choose_when="the model does not fit on one device, and the connection is slow",
        options=PPOptions,
        make=_from(".pipeline:Pipeline"),
        is_single_alone=_unless_cut,
        why_not="stages send activations, and each has its own gradients",
    ),
    "pp+ddp": StrategySpec(
        description="several pipelines, gradients averaged over them (2-D mesh)",
        traffic="as pp; per optimizer step: an all-reduce of each bucket of a stage's gradients",
        choose_when="as pp, with more devices, for more samples at once",
        options=PPDDPOptions,
        make=_from(".pipeline:Pipeline"),
        is_single_alone=_unless_cut,
        why_not="the residuals of a hook would be stored by stage, and no other strategy could load them",
    ),
    "pp+fsdp": StrategySpec(
        description="a pipeline of stages in shards (FSDP2, 2-D mesh)",
        traffic="as pp; per batch: an all-gather of each unit of a stage and a reduce-scatter",
        choose_when="as pp, if a stage does not fit on one device",
        options=PPFSDPOptions,
        make=_from(".pipeline:Pipeline"),
        is_single_alone=_unless_cut,
        why_not=_SHARDED,
    ),
    "local_sgd": StrategySpec(
        description="a full copy of the module per device, trained alone for H steps, then averaged",
        traffic=_EVERY_H,
        choose_when="the connection is too slow for ddp with compression; the result is another than ddp's",
        options=LocalSGDOptions,
        make=_from(".local_sgd:LocalSGD"),
        takes_compression=_all_but_auto,
        why_not=_UNEVEN,
    ),
    "diloco": StrategySpec(
        description="as local_sgd, with an outer SGD with Nesterov momentum on the average change",
        traffic=_EVERY_H,
        choose_when="as local_sgd, with hundreds of steps between exchanges, between data centres",
        options=DiLoCoOptions,
        make=_from(".local_sgd:LocalSGD"),
        takes_compression=_all_but_auto,
        why_not=_UNEVEN,
    ),
    "tp": StrategySpec(
        description="each layer split over devices that have the same samples, by a plan (DTensor)",
        traffic=_SPLIT,
        choose_when="single layers are too large or too slow for one device, and the devices are connected very fast",
        options=TPOptions,
        make=_from(".tensor:TensorParallel"),
        is_single_alone=always,
        why_not=_NOT_SPLIT,
    ),
    "fsdp+tp": StrategySpec(
        description="layers split within groups of devices, the parts in shards over the groups (2-D mesh)",
        traffic=f"as tp within a group, as fsdp between the groups: {_GATHERS}",
        choose_when="as tp within a node, with a model that does not fit on one node",
        options=FSDPTPOptions,
        make=_from(".tensor:TensorParallel"),
        is_single_alone=always,
        why_not=_NOT_SPLIT,
    ),
    "hsdp+tp": StrategySpec(
        description="as fsdp+tp, with gradients averaged over several of them (3-D mesh)",
        traffic="as fsdp+tp, then an all-reduce of the shards of each unit",
        choose_when="as fsdp+tp, on so many nodes that sharding over all of them is slow",
        options=HSDPTPOptions,
        make=_from(".tensor:TensorParallel"),
        is_single_alone=always,
        why_not=_NOT_SPLIT,
    ),
    "cp": StrategySpec(
        description="each sequence split over devices that have the same samples (DTensor)",
        traffic=_EXCHANGED,
        choose_when="the activations of one sequence do not fit on one device",
        options=CPOptions,
        make=_from(".tensor:ContextParallel"),
        is_single_alone=always,
        why_not=_NOT_SPLIT,
    ),
    "ddp+cp": StrategySpec(
        description="groups that split their sequences, gradients averaged over the groups (2-D mesh)",
        traffic=f"as cp within a group; {_EVERY_REPLICA}",
        choose_when="as cp, with more devices, for more samples at once",
        options=DDPCPOptions,
        make=_from(".tensor:ContextParallel"),
        is_single_alone=always,
        why_not=_NOT_SPLIT,
    ),
    "fsdp+cp": StrategySpec(
        description="sequences split within groups of devices, parameters in shards over these (2-D mesh)",
        traffic=f"as cp within a group, as fsdp between the groups: {_GATHERS}",
        choose_when="as cp, with a model that does not fit on one device",
        options=FSDPCPOptions,
        make=_from(".tensor:ContextParallel"),
        is_single_alone=always,
        why_not=_NOT_SPLIT,
    ),
    "hsdp+cp": StrategySpec(
        description="as fsdp+cp, with gradients averaged over several of them (3-D mesh)",
        traffic="as fsdp+cp, then an all-reduce of the shards of each unit",
        choose_when="as fsdp+cp, on several nodes",
        options=HSDPCPOptions,
        make=_from(".tensor:ContextParallel"),
        is_single_alone=always,
        why_not=_NOT_SPLIT,
    ),
    "ps": StrategySpec(
        description="asynchronous parameter server: ranks push gradients, and don't wait for each other",
        traffic="per optimizer step: gradients to the servers of other ranks, and their parameters back",
        choose_when="devices or connections differ much in speed; with staleness the result is another than ddp's",
        options=PSOptions,
        make=_from(".ps:PS"),
        why_not="its servers take gradients as they are",
    ),
}
"""Strategies by the name of their flag."""

LIGHTNINGS_OWN = (
    "deepspeed",
    "deepspeed_stage_1",
    "deepspeed_stage_2",
    "deepspeed_stage_2_offload",
    "deepspeed_stage_3",
    "deepspeed_stage_3_offload",
    "deepspeed_stage_3_offload_nvme",
    "fsdp_cpu_offload",
    "single_device",
    "single_tpu",
    "single_xla",
    "xla",
    "xla_debug",
)
"""Names of Lightning's registry that the flag also accepts; a test compares them with the registry."""


def find_strategy(name: str) -> StrategySpec | None:
    """Returns the row of a flag's name, from this or an installed package; None if there is none."""
    if name not in STRATEGIES:
        load_plugin(STRATEGY_GROUP, name)
    return STRATEGIES.get(name)


def import_all() -> None:
    """Imports the classes of all rows.

    Modules that torch.distributed.fsdp imports bind the default process group, if it exists, into defaults of
    functions, and such runs end in an abort. So all of them are imported before the group is created.
    """
    for row in list(STRATEGIES.values()):
        for make in (row.make, row.make_for_several):
            if isinstance(make, Reference):
                make.load()


def register_strategy(
    name: str,
    make: "Callable[[Any, str, Any], Strategy]",
    *,
    description: str,
    options: type = NoOptions,
    compressions: Collection[str] | Literal["all"] = (),
    precisions: Collection[str] = _OF_ANY_MODULE,
    traffic: str = "not stated",
    choose_when: str = "",
) -> None:
    """Registers your own strategy as a value of the flag `strategy`, with options: ``Engine(strategy="mine:key=1")``.

    `make` is called with the options, the launcher's suffix (``""``, ``"spawn"``, ``"fork"`` or ``"notebook"``) and the
    comm hook (None without compression), and returns a Lightning `Strategy`. A class whose constructor takes these
    three is such a function. Subclasses of `polyphase.engine.strategies.ddp.DDP` have all features of the engine. Any
    other strategy of Lightning runs as well, without the engine's additions; a subclass of `EngineStrategy` has those
    that it overrides.

    Call it in the script or in the module of the model, which every process runs. An installed package names the module
    of the call as an entry point, see `polyphase.engine.registration`.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class MineOptions(DDPOptions):
        ...     key: int = 1
        ...
        >>> class Mine(DDP):
        ...     def __init__(self, options, launcher="", comm_hook=None):
        ...         super().__init__(options, launcher, comm_hook)
        ...
        >>> register_strategy("mine", Mine, options=MineOptions, description="ddp, my way", compressions="all")
        >>> Engine(strategy="mine:key=2,bucket_cap_mb=10", devices=2)

    Args:
        name: name of the flag: small letters, digits and ``_``; ``+`` between parts.
        make: see above.
        description: a few words for the line of `polyphase strategies`.
        options: a dataclass; each field has a default and the type ``int``, ``float``, ``bool`` or ``str``, one of them
            or None, or a ``Literal`` of texts. The options after the colon of a flag are checked against it.
        compressions: names of the supported compressions, or ``"all"``, which includes later ones. `make` gets the hook
            and must use it.
        precisions: names of the supported precisions.
        traffic: the collectives of a step, for `polyphase strategies NAME`.
        choose_when: when to choose it, for the same.

    Raises:
        TypeError: `make` can't be called, or `options` is no dataclass with defaults.
        ValueError: the name is in use or invalid, or a compression or precision is unknown.
    """
    if not callable(make):
        raise TypeError(f"register_strategy needs a class or function that makes the strategy, but got {make!r}.")
    if not isinstance(description, str) or not description:
        raise TypeError(f"register_strategy needs a description, a few words, but got {description!r}.")
    _check_options(name, options)
    taken = {key: row.make or row.make_for_several for key, row in STRATEGIES.items()}
    check_new_name("strategy", name, make, taken, reserved=("auto", "single", *LIGHTNINGS_OWN))
    for kind, names, allowed in (
        ("compression", () if compressions == "all" else compressions, HOOKS),
        ("precision", precisions, PRECISIONS),
    ):
        for word in [names] if isinstance(names, str) else names:
            choose(kind, word, allowed)
    named = tuple(compressions)
    STRATEGIES[name] = StrategySpec(
        description=description,
        traffic=traffic,
        choose_when=choose_when,
        options=options,
        make=make,
        takes_compression=_every_compression if compressions == "all" else lambda hook_name, _: hook_name in named,
        why_not=f"{name} was registered without it",
        precisions=tuple(precisions),
        why_not_precision=f"{name} was registered without it",
    )


def _check_options(name: str, options: Any) -> None:
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise TypeError(f"the options of strategy {name!r} must be a dataclass, but got {options!r}.")
    for field in dataclasses.fields(options):
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise TypeError(f"the option {field.name!r} of strategy {name!r} needs a default.")
