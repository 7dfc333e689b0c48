"""Warns once of buffers that each rank updates by its own samples: rank 0's would be evaluated and saved."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from ..strategies import adapt, differing_buffers

__all__ = ["BufferCheck"]


class BufferCheck:
    """Compares the floating-point buffers of the ranks after a run's first step, and after each epoch until it warns.

    Costs a gather between hosts, and a read of the device, each time; nothing for a module without such buffers.

    Args:
        trainer: the trainer of the module.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._has_warned = False
        self.is_first_step_due = True
        """Whether no step of this run was looked at."""

    def begin_run(self) -> None:
        """Begins a run, whose first step is looked at."""
        self._has_warned, self.is_first_step_due = False, True

    def after_first_step(self) -> None:
        """Compares the buffers after a run's first step."""
        self.is_first_step_due = False
        self.compare()

    def compare(self) -> None:
        """Compares the buffers; all ranks call it after the same step."""
        trainer = self._trainer
        strategy = adapt(trainer.strategy)
        if self._has_warned or trainer.data_size == 1 or strategy.averages_buffers:
            return
        if not strategy.capabilities.keeps_step:  # the ranks are at different steps
            return
        names = differing_buffers(trainer.lightning_module, trainer.data_ranks)
        if trainer.data_size != trainer.world_size:  # pipeline stages have different buffers
            names = sorted({name for of_rank in trainer.all_ranks.all_gather_object(names) for name in of_rank})
        if not names:
            return
        self._has_warned = True
        option = strategy.option_to_average_buffers
        remedy = f", or set {option}, which averages such buffers after each step" if option is not None else ""
        rank_zero_warn(
            f"Under {strategy!r} the ranks have different values of {', '.join(map(repr, names))}: the module updates"
            " these buffers by the samples of its own rank, and rank 0's values are evaluated and saved, so the result"
            " is not that of one process. Reduce what they are made of over the ranks in the module"
            f" (torch.distributed.all_reduce){remedy}."
        )
