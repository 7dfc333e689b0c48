"""`Capabilities`: the facts about a strategy by which the rest of the engine decides; see `interface.py`."""

import dataclasses

__all__ = ["Capabilities"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Facts that hold for a strategy from its construction on; the defaults are those of a stock Lightning strategy.

    A field `unsupported_...` is None where the strategy can do it, else the clause that says why not.
    """

    engine_checkpoints: bool = False
    """Whether the engine writes its checkpoints; if not, Lightning or the strategy does, in a format of its own."""
    state_is_sharded: bool = False
    """Whether ranks hold parts of tensors or of the module; what is not gathered is saved as a directory."""
    gathers_state: bool = True
    """Whether rank 0 can be handed all of the state."""
    optimizer_state_partitioned: bool = False
    """Whether a rank's module or optimizers lack tensors that another rank has: see `keeps_state_of`."""
    splits_module: bool = False
    """Whether it calls `before_split` with the whole module before it splits it."""
    replicas_stay_equal: bool = False
    """Whether ranks must have the same weights of what is not split, as long as `expects_parity`."""
    evaluates_in_inference_mode: bool = True
    """Whether a forward under `torch.inference_mode` leaves nothing behind that training would write to."""
    runs_own_schedule: bool = False
    """Whether `run_schedule` runs forward and backward of a batch, after the gradients are zeroed."""
    recomputes_blocks: bool = False
    """Whether it applies `recompute` to the blocks by itself."""
    keeps_step: bool = True
    """Whether ranks wait for each other every few steps anyhow, and none of them may be lost."""
    steps_alone: bool = False
    """Whether ranks average their gradients in a part of the run at most: a global batch is no single step's then."""
    averages_on_request: bool = False
    """Whether `manual_backward` alone averages gradients, and a tensor's own `backward` leaves those of the rank: while
    the strategy averages any, see `EngineStrategy.averages_gradients`."""
    unsupported_counting: str | None = "is not the engine's own"
    """Counting the bytes that are sent for gradients and parameters."""
    unsupported_repeat: str | None = "a strategy that is not the engine's own"
    """Repeating a step for which one rank lacked memory."""
    unsupported_join: str | None = "whose ranks take part in each other's forward passes"
    """Taking part in a micro-batch without running the module."""
