"""`Capabilities`: the facts about a strategy by which the rest of the engine decides; see `interface.py`."""

import dataclasses

__all__ = ["Capabilities"]


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
