"""The beginning of an optimizer step, to which the loop returns if the step has to be made again.

A step is made again after a rank ran out of memory (`out_of_memory.py`) and after the loss of a rank (`rank_loss.py`).
Weights and optimizer state have not changed by then, so they need no copies.
"""

from collections.abc import Callable
from typing import Any

from ..checkpoint import get_random_state, set_random_state
from ..strategies.step_guard import StepSnapshot

__all__ = ["StepStart"]

Divide = Callable[[int], int]
"""Divides the rest of the epoch among ranks and micro-batches anew, from the number of this rank's batches that are
done. Returns the number of new ones that hold as many samples."""


class StepStart:
    """The state that a step changes before the optimizer steps: buffers, metrics, progress and random numbers.

    Args:
        trainer: between two steps.
        loop: its loop of an epoch.
    """

    def __init__(self, trainer: Any, loop: Any) -> None:
        self._trainer, self._loop = trainer, loop
        loop.automatic_optimization.loss_weighting.reset()
        self._snapshot = StepSnapshot(trainer.lightning_module, loop._results)
        self._first_loop_iter = trainer._logger_connector._first_loop_iter
        self._num_ready = loop.batch_progress.total.ready, loop.batch_progress.current.ready
        optim_progress = loop.automatic_optimization.optim_progress
        self._optim_progress = optim_progress.state_dict()
        self.num_steps = optim_progress.optimizer.step.total.completed
        """The number of optimizer steps until this one."""

    @property
    def num_samples(self) -> int:
        """The samples of this step that this rank has begun with; each batch counts as a full one."""
        _, micro_batch_size, _ = self._trainer.batch_sizes
        return (self._loop.batch_progress.current.ready - self._num_ready[1]) * micro_batch_size

    def divide(self, divide: Divide) -> None:
        """Divides the rest of the epoch anew, from this step on; draws no random number."""
        loop, numbers = self._loop, get_random_state()
        total, current = self._num_ready
        done = divide(current)
        for tracker, value in (
            (loop.batch_progress.total, total - current + done),
            (loop.batch_progress.current, done),
        ):
            for field in vars(tracker):
                setattr(tracker, field, value)
        loop.batch_progress.is_last_batch = False
        loop.count_batches_at_step(done)
        self._num_ready = total - current + done, done
        set_random_state(numbers)  # a loader's new iterator draws a seed

    def return_to(self, divide: Divide) -> None:
        """Restores the state, and divides the rest of the epoch anew, from this step on."""
        trainer, loop = self._trainer, self._loop
        trainer._logger_connector.end_batch()
        self.divide(divide)
        self._snapshot.undo()
        trainer._logger_connector._first_loop_iter = self._first_loop_iter
        loop.automatic_optimization.optim_progress.load_state_dict(self._optim_progress)
