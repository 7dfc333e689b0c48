"""The table of strategies: one row each. `polyphase strategies` prints it, the flags are checked against it."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import Strategy

from ..compression import COMM_HOOKS, CommHook
from .ddp import DDP, DDPOptions
from .dp import make_dp
from .fsdp import FSDP, FSDPOptions, HSDPOptions
from .local_sgd import DiLoCoOptions, LocalSGD, LocalSGDOptions
from .pipeline import Pipeline, PPDDPOptions, PPFSDPOptions, PPOptions
from .precision import PRECISIONS
from .ps import PS, PSOptions
from .tensor import FSDPTPOptions, HSDPTPOptions, TensorParallel, TPOptions
from .zero1 import Zero1

__all__ = ["STRATEGIES", "NoOptions", "Row"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOptions:
    """For a strategy that has none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One way of running, and what it can do."""

    description: str
    traffic: str
    """The collectives of a step: these and no more, see `tests/engine/loop/test_costs_integration.py`."""
    options: type
    """Frozen dataclass of what may follow the colon."""
    make: Callable[[Any, str, CommHook | None], Strategy] | None
    """From the options, the launcher's suffix and the comm hook; None for one process on one device, where Lightning's
    own strategy serves."""
    make_for_several: Callable[..., Strategy] | None = None
    """For one process on several devices: from their type, their number, that of nodes, and `sync_batchnorm`."""
    note: str = ""
    """Said once, when it is chosen."""
    compressions: tuple[str, ...] = ()
    """Names of the compressions it can do, `none` aside."""
    why_not: str = ""
    """Why it can't do the others."""
    precisions: tuple[str, ...] = tuple(PRECISIONS)
    """Names of the precisions it can do."""
    why_not_precision: str = ""
    """Why it can't do the others."""


_GATHERS = (
    "per micro-batch: an all-gather of each unit in forward, and in backward but for the last unit; per optimizer step:"
    " a reduce-scatter of each"
)
_EVERY_H = "every H optimizer steps: an all-reduce of each bucket of changes of weights, and of BatchNorm's statistics"
_UNEVEN = "auto chooses by the length of steps that are all alike; here only every H-th sends anything"
_SHARDED = (
    "each rank would have to remember what it has not sent of a whole unsharded model; hsdp does all of them, between"
    " its groups"
)
_UNSCALED = tuple(name for name in PRECISIONS if name != "16-mixed")
_NO_SCALE = "the stages would have to agree on the loss scale and on which steps overflow"
_SPLIT = (
    "per micro-batch: an all-reduce of the activations for each MLP, each attention and the embedding, and an"
    " all-gather of the logits in forward; in backward an all-reduce for each MLP, each attention and the output layer"
)
_NOT_SPLIT = "a compression works on whole parameters, and here each rank has parts of them"


STRATEGIES: dict[str, Row] = {
    "single": Row(
        description="one process, one device",
        traffic="none",
        options=NoOptions,
        make=None,
        why_not="one process sends no gradients",
    ),
    "dp": Row(
        description="one process that gives each GPU a part of every batch, for old scripts; on one device as single",
        traffic="per micro-batch, between the GPUs: all parameters from the first one, all gradients to it",
        options=NoOptions,
        make=None,
        make_for_several=make_dp,
        note=(
            "strategy 'dp' copies all parameters to every GPU in each micro-batch, and runs them by threads of one"
            " process. 'ddp' is faster: Engine(strategy='ddp', devices=N), with the loader's batch_size divided by N."
        ),
        why_not="one process sends no gradients",
    ),
    "ddp": Row(
        description="a full copy of the module per device, gradients averaged",
        traffic="per optimizer step: an all-reduce of each bucket of gradients",
        options=DDPOptions,
        make=DDP,
        compressions=tuple(COMM_HOOKS),
    ),
    "zero1": Row(
        description="as ddp, with each optimizer's state dealt to the devices (ZeRO, stage 1)",
        traffic="per optimizer step: as ddp, then a broadcast of each bucket of updated parameters by their owner",
        options=DDPOptions,
        make=Zero1,
        compressions=tuple(COMM_HOOKS),
    ),
    "fsdp": Row(
        description="parameters, gradients and optimizer state in shards over all devices (FSDP2)",
        traffic=_GATHERS,
        options=FSDPOptions,
        make=FSDP,
        compressions=tuple(name for name, hook in COMM_HOOKS.items() if hook.reduces_shards),
        why_not=_SHARDED,
    ),
    "hsdp": Row(
        description="shards within groups of devices, gradients averaged over the groups (2-D mesh)",
        traffic=f"{_GATHERS}, then an all-reduce of its shards",
        options=HSDPOptions,
        make=FSDP,
        compressions=tuple(COMM_HOOKS),
    ),
    "pp": Row(
        description="blocks in stages, micro-batches in all of them at once (pipeline)",
        traffic="per batch: activations to the next stage and their gradients back, in micro-batches, and a broadcast"
        " of what was logged; per optimizer step: an all-reduce of what is tied between stages",
        options=PPOptions,
        make=Pipeline,
        why_not="stages hand over activations, and each has its own gradients",
        precisions=_UNSCALED,
        why_not_precision=_NO_SCALE,
    ),
    "pp+ddp": Row(
        description="several pipelines, gradients averaged over them (2-D mesh)",
        traffic="as pp; per optimizer step: an all-reduce of each bucket of a stage's gradients",
        options=PPDDPOptions,
        make=Pipeline,
        why_not="what a hook has not sent yet would be kept by stage, which no other strategy could take over",
        precisions=_UNSCALED,
        why_not_precision=_NO_SCALE,
    ),
    "pp+fsdp": Row(
        description="a pipeline of stages in shards (FSDP2, 2-D mesh)",
        traffic="as pp; per batch: an all-gather of each unit of a stage and a reduce-scatter",
        options=PPFSDPOptions,
        make=Pipeline,
        why_not=_SHARDED,
        precisions=_UNSCALED,
        why_not_precision=_NO_SCALE,
    ),
    "local_sgd": Row(
        description="a full copy of the module per device, trained alone for H steps, then averaged",
        traffic=_EVERY_H,
        options=LocalSGDOptions,
        make=LocalSGD,
        compressions=tuple(name for name in COMM_HOOKS if name != "auto"),
        why_not=_UNEVEN,
    ),
    "diloco": Row(
        description="as local_sgd, with an outer SGD with Nesterov momentum on the average change",
        traffic=_EVERY_H,
        options=DiLoCoOptions,
        make=LocalSGD,
        compressions=tuple(name for name in COMM_HOOKS if name != "auto"),
        why_not=_UNEVEN,
    ),
    "tp": Row(
        description="each layer split over devices that have the same samples, by a plan (DTensor)",
        traffic=_SPLIT,
        options=TPOptions,
        make=TensorParallel,
        why_not=_NOT_SPLIT,
    ),
    "fsdp+tp": Row(
        description="layers split within groups of devices, the parts in shards over the groups (2-D mesh)",
        traffic=f"as tp within a group, as fsdp between the groups: {_GATHERS}",
        options=FSDPTPOptions,
        make=TensorParallel,
        why_not=_NOT_SPLIT,
    ),
    "hsdp+tp": Row(
        description="as fsdp+tp, with gradients averaged over several of them (3-D mesh)",
        traffic="as fsdp+tp, then an all-reduce of the shards of each unit",
        options=HSDPTPOptions,
        make=TensorParallel,
        why_not=_NOT_SPLIT,
    ),
    "ps": Row(
        description="asynchronous parameter server: ranks push gradients, and don't wait for each other",
        traffic="per optimizer step: gradients to the servers of other ranks, and their parameters back",
        options=PSOptions,
        make=PS,
        why_not="its servers take gradients as they are",
        precisions=tuple(name for name in PRECISIONS if name != "16-mixed"),
        why_not_precision="one worker's overflow would have to undo what others have pushed",
    ),
}
"""Strategies by the name of their flag."""
