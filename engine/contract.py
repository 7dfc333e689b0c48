"""The contract between the strategies and the rest of the engine: the engine's own strategies, Lightning's and users'.

`Capabilities` are the facts about a strategy by which the rest decides, `EngineStrategy` has what the rest calls.
`adapt` answers for every strategy, so that no code besides this and the strategies looks at a strategy's class, or
probes its attributes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.fx import GraphModule

from .distributed.object_group import WORLD, ObjectGroup
from .flags import Layout

if TYPE_CHECKING:
    from .compression import CommHook, CountingGroup
    from .strategies.step_guard import StepGuard

__all__ = ["Capabilities", "EngineStrategy", "adapt", "lists_devices", "without_sync"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Facts that hold for a strategy from its construction on; the defaults are those of a stock Lightning strategy.

    A field `unsupported_...` is None if the strategy supports it, and otherwise the clause of a message that says why
    not.
    """

    engine_checkpoints: bool = False
    """Whether the engine writes its checkpoints; if not, Lightning or the strategy writes them in another format."""
    state_is_sharded: bool = False
    """Whether ranks hold parts of tensors or of the module; state that is not gathered is saved as a directory."""
    gathers_state: bool = True
    """Whether rank 0 can gather all of the state."""
    optimizer_state_partitioned: bool = False
    """Whether a rank's module or optimizers lack tensors that another rank has: see `keeps_state_of`."""
    splits_module: bool = False
    """Whether it calls `before_split` with the whole module before it splits it."""
    replicas_stay_equal: bool = False
    """Whether ranks must have equal weights where nothing is split, as long as `expects_parity`."""
    evaluates_in_inference_mode: bool = True
    """Whether evaluation may use `torch.inference_mode`: no inference tensor remains that training would write to."""
    runs_own_schedule: bool = False
    """Whether `run_schedule` runs forward and backward of a batch; the gradients are zeroed before."""
    can_offload: frozenset[str] = frozenset()
    """The values of the flag `offload` that it can honour."""
    has_between_passes: bool = False
    """Whether it has a context `between_passes`, in which hooks between forward and backward are called."""
    recomputes_blocks: bool = False
    """Whether the strategy applies `recompute` to the blocks itself."""
    keeps_step: bool = True
    """Whether ranks always wait for each other at least every few steps, so that the run needs all ranks."""
    steps_alone: bool = False
    """Whether ranks step without averaging gradients for a part of the run: no step has a global batch then."""
    averages_whole_gradients: bool = False
    """Whether each rank steps with the averages of whole gradients, as long as `averages_gradients`."""
    unsupported_counting: str | None = "is not the engine's own"
    """Why the bytes that are sent for gradients and parameters can't be counted."""
    unsupported_repeat: str | None = "a strategy that is not the engine's own"
    """Why a step can't be repeated after one rank has run out of memory."""
    unsupported_rank_loss: str | None = "is not the engine's own"
    """Why training can't go on in the same processes without a rank whose process has ended."""


class EngineStrategy:
    """Mixin of a Lightning `Strategy`: its capabilities, and the methods and attributes that the engine uses in a run.

    The defaults are right for a strategy that does only what Lightning requires; other strategies override some of
    them. The base of the engine's own strategies is `DistributedStrategy`.
    """

    capabilities = Capabilities()
    """The facts that hold for a whole run."""
    root_device: Any
    cluster_environment: Any = None
    """Starts the processes, and knows how they were started; None with one process."""

    @functools.cached_property
    def layout(self) -> Layout:
        """Sizes of the device mesh by axis, known when the strategy has its devices: all processes are replicas."""
        return Layout(replicate=getattr(self, "world_size", 1))

    # --- before training

    def check_module(self, module: nn.Module) -> None:
        """Called before any process starts; raises ValueError if the strategy can't run `module`."""

    def check_run(self, *, compiles: bool, callbacks: Sequence[Callback]) -> None:
        """Called before any process starts; raises ValueError if it can't compile, or can't run with the callbacks."""

    def check_loader(self, dataloader: Any) -> None:
        """Raises ValueError if a loader does not fit; also called for the loaders of modules and data modules."""

    before_split: Callable[[Any], None] | None = None
    """Called on all ranks with the whole module before it is split for training; None: nothing is called."""
    compile: Callable[..., Any] | None = None
    """Compiles a function; None for no compilation."""
    offloads_parameters = False
    """Whether parameters, gradients and optimizer state are kept in host memory: see the flag `offload`."""
    compiles_units = False
    """Whether units are compiled rather than whole steps; known once the module is set up."""

    def check_graph(self, graph: GraphModule) -> None:
        """Called with each graph before it is compiled; raises RuntimeError if it would compute something else."""

    recompute: Callable[[nn.Module], None] | None = None
    """Makes a block recompute its activations in backward; None: no block does."""

    # --- communication

    data_ranks: ObjectGroup = WORLD
    """The group of the ranks with different samples, for collectives of plain values."""

    @property
    def data_size(self) -> int:
        """The number of ranks with different samples; valid before they are connected, too."""
        return (getattr(self, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)

    @property
    def data_rank(self) -> int:
        """The index of this rank's samples, 0 to `data_size` - 1; ranks with the same samples have the same index."""
        return (getattr(self, "distributed_sampler_kwargs", None) or {}).get("rank", 0)

    comm_hook: "CommHook | None" = None
    """The comm hook that sends gradients; None: torch sends them."""
    counts_traffic = False
    """Whether the bytes of gradients and parameters are counted even without a comm hook."""

    @property
    def active_hook(self) -> "CommHook | None":
        """The comm hook that averages and counts gradients; None if torch averages them uncounted."""
        return None

    @property
    def wires(self) -> "list[CountingGroup]":
        """The groups that count what they send; empty before training."""
        return []

    def check_reduction(self) -> None:
        """Raises an error that says why the last backward has not averaged all gradients, if the strategy knows it."""

    averages_gradients = True
    """Whether the gradients of the current step are averaged over all ranks; if not, each rank uses its own."""

    needs_same_training = False
    """Whether ranks that train other parameters than the others mix up gradients, or leave shards of a weight behind,
    and the strategy itself does not see it."""

    def frozen_since_forward(self) -> list[Tensor]:
        """Parameters that a hook has frozen since forward, and that have to be without a gradient after backward."""
        return []

    @property
    def expects_parity(self) -> bool:
        """Whether the run should have computed the result of one process; asked when it is over."""
        return self.averages_gradients

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Begins a sum over the ranks with different samples; returns a function that waits for the sum.

        Args:
            make: returns this rank's summand, a tensor that nothing else uses.
            needs_device: whether the summand depends on work that an accelerator has not finished.
        """
        raise NotImplementedError

    def agree(self, flag: Tensor) -> Tensor:
        """Returns the maximum of a 0-d tensor over the ranks that step together, without a wait of the host."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag

    step_guard: "StepGuard | None" = None
    """Leaves out steps that are not finite, while training runs; None: none is left out."""

    def may_leave_out(self) -> None:
        """Called before any process starts if steps may be left out."""
        if self.comm_hook is not None:
            self.comm_hook.may_leave_out = True

    may_repeat_steps = False
    """Whether a step is repeated in smaller micro-batches if a rank runs out of memory."""
    averages_buffers = False
    """Whether buffers that differ between ranks are averaged in training, beside those of norm layers."""
    option_to_average_buffers: str | None = None
    """The flag with the option that averages them; None without one."""

    def sync_weights(self) -> None:
        """Gives all ranks the same weights, if they may differ between steps; all ranks call it after the same step."""

    def end_evaluation(self) -> None:
        """Called after the last batch of an evaluation, before the hooks at its end."""

    @property
    def passes_step_on(self) -> bool:
        """Whether `optimizer_step` only calls the precision plugin's; the answer holds until the epoch ends."""
        return False

    # --- checkpoints

    hands_out_shards = False
    """Whether a save gets the optimizer state as each rank holds it; if not, rank 0 gathers it."""
    saving_ranks: ObjectGroup | None = None
    """The ranks that coordinate a save if rank 0 holds everything; None: all ranks, each with its part, over gloo."""

    def consolidated_weights(self) -> AbstractContextManager[None]:
        """Context of a save on all ranks: the module has the weights that the run would end with."""
        return nullcontext()

    def saved_state(self, module: nn.Module) -> dict[str, Any]:
        """Returns the module's state dict for a save; tensors that another rank saves are on the meta device."""
        return module.state_dict()

    def keeps_state_of(self, parameter: Tensor) -> bool:
        """Whether this rank's optimizers have, or get from a checkpoint, the state of a parameter."""
        return True

    def shared_state(self) -> dict[str, Any]:
        """Returns the state that the strategy resumes from beside weights and optimizers, the same on all ranks."""
        return {}

    def state_of_rank(self) -> dict[str, Any]:
        """Returns the state that only this rank resumes from; called within `consolidated_weights`."""
        return {}

    def load_state(self, shared: dict[str, Any], of_rank: dict[str, Any]) -> None:
        """Restores a checkpoint's `shared_state` and `state_of_rank`, after everything else was restored.

        Args:
            shared: the `shared_state` of the strategy that saved it, which may be another strategy.
            of_rank: the `state_of_rank`; empty if another layout saved it.
        """

    @property
    def held_bytes(self) -> int:
        """The bytes of the model that the strategy holds beside the module and its optimizers."""
        return 0

    # --- failures

    @property
    def place_in_units(self) -> dict[str, Any] | None:
        """The unit that this rank gathered last, for reports; None without units."""
        return None

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Ranks whose processes have ended while the run continues without them."""
        return frozenset()

    def can_lose(self, rank: int) -> bool:
        """Whether the run can continue without a rank."""
        return False

    @property
    def can_exit_alone(self) -> bool:
        """Whether the other ranks continue if this rank fails now."""
        return False

    def go_on_without(self, ranks: list[int]) -> bool:
        """Continues without ranks whose processes have ended, if possible; called by the watchdog's thread."""
        return False

    survives_losses = False
    """Whether the other ranks regroup when the process of one has ended: see `loop/rank_loss.py`."""
    returns_to_snapshot: str | None = None
    """Why these then go on from the newest snapshot; None: they make the step again in which the rank was lost."""
    repeats: Callable[[Callable[[], Any]], Any] | None = None
    """Calls a function of collectives, after which nothing has changed yet, again if a rank is lost meanwhile: then all
    ranks that are left have its results, or none. None: no rank may be lost."""
    steps_apart = False
    """Whether the ranks may be at different steps now."""
    weight_of_step: Callable[[], tuple[Any, int | None]] | None = None
    """Returns the number of samples of the last step of automatic optimization, of this rank and of all; or the sum of
    this rank's weights from `training_step`, and None. None before the first epoch."""

    def loss_in_words(self, num_steps: int) -> str:
        """Says what was lost with a rank, after a number of steps, that no other has; empty if nothing was."""
        return ""

    def end_step_of_others(self) -> None:
        """Does what follows a step that others have made, and whose result this rank has from them."""

    def most_ranks(self, num_ranks: int) -> int:
        """Returns the largest number of ranks, up to `num_ranks`, for which the flag has a layout; 0 without one."""
        return num_ranks

    def make_whole(self) -> None:
        """Undoes what `setup` has done to the module, after `teardown`, for a `setup` by fewer ranks."""

    def leave_groups(self) -> None:
        """Ends the process groups of a rank whose step has failed, so that the collectives of all others raise."""
        raise NotImplementedError

    def regroup(self, devices: Sequence[Any], rank: int, store: dist.Store) -> None:
        """Connects the ranks that are left, as ranks 0 to n - 1, and has them average gradients.

        Args:
            devices: the devices of those that are left.
            rank: the number of this one from now on.
            store: a store that only they use.
        """
        raise NotImplementedError


class _LightningAdapter(EngineStrategy):
    """Adapts a strategy of Lightning or of a user; attributes that are set on it have no effect.

    Args:
        strategy: Lightning's or a user's; None: no strategy, one process.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def __repr__(self) -> str:
        return repr(type(self._strategy).__name__)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """The defaults; the engine also saves for strategies that save in Lightning's default way."""
        strategy = self._strategy
        saves_plainly = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and (
            type(strategy).save_checkpoint is Strategy.save_checkpoint
        )
        return Capabilities(
            engine_checkpoints=saves_plainly,
            can_offload=frozenset({"activations"} if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) else ()),
            averages_whole_gradients=isinstance(strategy, DDPStrategy),
            unsupported_repeat=type(strategy).__name__,
        )

    @property
    def layout(self) -> Layout:
        """All processes are replicas."""
        return Layout(replicate=getattr(self._strategy, "world_size", 1))  # Lightning: as in Trainer.world_size

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """The arguments of a distributed sampler; None if one process has all samples."""
        return getattr(self._strategy, "distributed_sampler_kwargs", None)

    @property
    def root_device(self) -> Any:
        """The device that this process computes on; None if it is unknown."""
        return getattr(self._strategy, "root_device", None)

    @property
    def cluster_environment(self) -> Any:
        """See `EngineStrategy`."""
        return getattr(self._strategy, "cluster_environment", None)

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """See `EngineStrategy`: the sum over all ranks, which is computed at once."""
        total = make()
        dist.all_reduce(total)
        return lambda: total


def adapt(strategy: Any) -> EngineStrategy:
    """Returns `strategy` itself if it is an `EngineStrategy`, and an adapter of it otherwise."""
    return strategy if isinstance(strategy, EngineStrategy) else _LightningAdapter(strategy)


def without_sync(strategy: Strategy) -> AbstractContextManager[None]:
    """Context of an inner micro-batch of an accumulation window: gradients are not averaged."""
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()


def lists_devices(strategy: Strategy | str) -> bool:
    """Whether a strategy object determines itself on which devices it runs."""
    return bool(getattr(strategy, "parallel_devices", None))
