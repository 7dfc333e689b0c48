"""The interface by which the rest of the engine asks any strategy: the engine's own, Lightning's or a user's.

`capabilities_of` and `adapt` answer for every strategy, so that no code outside of this folder looks at a strategy's
class, or probes its attributes.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn

from ..distributed.object_group import WORLD, ObjectGroup
from ..flags import Layout
from .capabilities import Capabilities

if TYPE_CHECKING:
    from ..compression import CommHook, CountingGroup

__all__ = ["EngineStrategy", "adapt", "capabilities_of", "lists_devices", "without_sync"]


class EngineStrategy:
    """Mixin of a Lightning `Strategy`: its capabilities, and what the engine calls and reads as it runs.

    All answers are those of a strategy that does nothing beyond what Lightning asks of it. A strategy overrides those
    that differ; the base of the engine's own is `DistributedStrategy`.
    """

    capabilities = Capabilities()
    """The facts that hold for a whole run."""
    root_device: Any
    cluster_environment: Any = None
    """Knows how the processes were started; None with one process."""

    @functools.cached_property
    def layout(self) -> Layout:
        """Sizes of the device mesh by axis, known when the strategy has its devices: all processes are replicas."""
        return Layout(replicate=getattr(self, "world_size", 1))

    # --- before training

    def check_module(self, module: nn.Module) -> None:
        """Called before any process starts; raises ValueError if `module` can't be run in this way."""

    def check_run(self, *, compiles: bool, callbacks: Sequence[Callback]) -> None:
        """Called before any process starts; raises ValueError if it can't be compiled, or has unfit callbacks."""

    def check_loader(self, dataloader: Any) -> None:
        """Raises ValueError if a loader does not fit; also called for the loaders of modules and data modules."""

    before_split: Callable[[Any], None] | None = None
    """Called on all ranks with the whole module before it is split for training; None: nothing is called."""
    compile: Callable[..., Any] | None = None
    """Compiles a function; None for no compilation."""
    compiles_units = False
    """Whether units are compiled rather than whole steps; known once the module is set up."""
    recompute: Callable[[nn.Module], None] | None = None
    """Makes a block recompute its activations in backward; None: no block does."""

    # --- communication

    data_ranks: ObjectGroup = WORLD
    """The group of the ranks that have samples of their own, for collectives of plain values."""

    @property
    def data_size(self) -> int:
        """The number of ranks that have samples of their own, connected or not."""
        return (getattr(self, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1)

    @property
    def data_rank(self) -> int:
        """The index of this rank among the ranks that have samples of their own."""
        return (getattr(self, "distributed_sampler_kwargs", None) or {}).get("rank", 0)

    comm_hook: "CommHook | None" = None
    """The comm hook that sends gradients; None: torch sends them."""
    counts_traffic = False
    """Whether the bytes of gradients and parameters are counted even without a comm hook."""

    @property
    def averaging(self) -> "CommHook | None":
        """The comm hook that averages and counts gradients; None if torch averages them uncounted."""
        return None

    @property
    def wires(self) -> "list[CountingGroup]":
        """The groups that count what they send; empty before training."""
        return []

    averages_gradients = True
    """Whether the gradients of the current step are averaged over all ranks; if not, each rank steps by its own."""

    @property
    def expects_parity(self) -> bool:
        """Whether a run that is over should have computed the result of one process."""
        return self.averages_gradients

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Begins a sum over the ranks that have samples of their own; returns a function that waits for the sum.

        Args:
            make: returns this rank's summand, a tensor that nothing else uses.
            needs_device: whether the summand depends on work that an accelerator has not finished.
        """
        raise NotImplementedError

    def sync_weights(self) -> None:
        """Gives all ranks the same weights, if they may differ between steps; all ranks call it after the same step."""

    def end_evaluation(self) -> None:
        """Called after the last batch of an evaluation, before the hooks at its end."""

    @property
    def passes_step_on(self) -> bool:
        """Whether `optimizer_step` does nothing but to call that of the precision plugin, until the epoch ends."""
        return False

    # --- checkpoints

    hands_out_shards = False
    """Whether optimizer state is to be handed out as each rank holds it, rather than gathered on rank 0."""
    saving_ranks: ObjectGroup | None = None
    """The ranks that agree on a checkpoint of which rank 0 has all; None: a gloo group in which each has its part."""

    def consolidated_weights(self) -> AbstractContextManager[None]:
        """Context of a save on all ranks: the module has the weights that the run would end with."""
        return nullcontext()

    def saved_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the module's state dict for a save; tensors that another rank saves are on the meta device."""
        return state

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
        """Goes on with a checkpoint's `shared_state` and `state_of_rank`, after all else was restored.

        Args:
            shared: what the strategy that saved it shared, which may be of another kind.
            of_rank: empty if another layout did, too.
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
        """Ranks whose processes have ended, and without which the run continues."""
        return frozenset()

    def can_lose(self, rank: int) -> bool:
        """Whether the run can continue without a rank."""
        return False

    @property
    def can_exit_alone(self) -> bool:
        """Whether the other ranks continue if this rank fails now."""
        return False

    def go_on_without(self, ranks: list[int]) -> bool:
        """Goes on without ranks whose processes have ended, if it can; called by the watchdog's thread."""
        return False


class _LightningAdapter(EngineStrategy):
    """Answers for a strategy of Lightning's, or of a user's; attributes that are set on it have no effect.

    Args:
        strategy: Lightning's own or a user's; None: there is none, one process runs by itself.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    def __repr__(self) -> str:
        return repr(type(self._strategy).__name__)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """Defaults, but for those that save as Lightning does by itself: the engine saves for them."""
        strategy = self._strategy
        saves_plainly = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) and (
            type(strategy).save_checkpoint is Strategy.save_checkpoint
        )
        return Capabilities(
            engine_checkpoints=saves_plainly,
            averages_on_request=isinstance(strategy, DDPStrategy),
            unsupported_repeat=type(strategy).__name__,
        )

    @property
    def layout(self) -> Layout:
        """All processes are replicas."""
        return Layout(replicate=getattr(self._strategy, "world_size", 1))  # Lightning: as Trainer.world_size has it

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """The arguments by which a distributed sampler deals out samples; None where one process has all."""
        return getattr(self._strategy, "distributed_sampler_kwargs", None)

    @property
    def root_device(self) -> Any:
        """The device that this process computes on; None if it is not known."""
        return getattr(self._strategy, "root_device", None)

    @property
    def cluster_environment(self) -> Any:
        """See `EngineStrategy`."""
        return getattr(self._strategy, "cluster_environment", None)

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """See `EngineStrategy`: over all ranks, and at once."""
        total = make()
        dist.all_reduce(total)
        return lambda: total


def adapt(strategy: Any) -> EngineStrategy:
    """Returns `strategy` itself if it is an `EngineStrategy`, and an adapter of it otherwise."""
    return strategy if isinstance(strategy, EngineStrategy) else _LightningAdapter(strategy)


def capabilities_of(strategy: Any) -> Capabilities:
    """The capabilities of any strategy: those that it declares, or those of Lightning's own."""
    return adapt(strategy).capabilities


def without_sync(strategy: Strategy) -> AbstractContextManager[None]:
    """Context of an inner micro-batch of an accumulation window: gradients are not averaged."""
    return strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()


def lists_devices(strategy: Strategy | str) -> bool:
    """Whether a strategy's object says by itself on which devices it runs."""
    return bool(getattr(strategy, "parallel_devices", None))
