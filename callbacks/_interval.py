"""The base class of the monitors: it decides when to log, sums over the ranks, and writes on rank 0."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from polyphase.engine.flags import check_count

__all__ = ["IntervalCallback", "steps_or_none", "sum_over_ranks"]


class IntervalCallback(Callback):
    """Calls `measure` at the logged optimizer steps, on every rank, and writes rank 0's result.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.

    Attributes:
        last: the last figures, by name, on every rank; empty until the first interval of a `fit` is over.

    Raises:
        ValueError: `every_n_steps` is no positive whole number.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = steps_or_none(every_n_steps)
        self.last: dict[str, float] = {}
        self._logged_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first interval."""
        self.last = {}
        self._logged_step = trainer.global_step

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Returns the figures of the interval that ends now, by name; may use collectives."""
        raise NotImplementedError

    def is_due(self, trainer: Trainer, step: int) -> bool:
        """Whether an interval ends with the optimizer step of this number."""
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        # Whole intervals are compared, not the remainder: with several optimizers `global_step` moves by more than one.
        return every != 0 and step // every != self._logged_step // every

    def log_if_due(self, trainer: Trainer) -> None:
        """Measures when an interval of optimizer steps is over; to be called after each batch."""
        step = trainer.global_step
        if not self.is_due(trainer, step):
            return
        self._logged_step = step
        self.last = self.measure(trainer)
        if trainer.is_global_zero and self.last:
            # Lightning: the step that the module's own values are logged with; a resumed run drops those after it.
            batch_step = trainer.fit_loop.epoch_loop._batches_that_stepped
            # TensorBoard's takes milliseconds now and then, when its thread has the interpreter: the loggers' time.
            heartbeat: Any = getattr(trainer, "heartbeat", None)  # stock trainers have none
            with nullcontext() if heartbeat is None else heartbeat.within("log"):
                for logger in trainer.loggers:
                    logger.log_metrics(self.last, step=batch_step)


def steps_or_none(every_n_steps: int | None) -> int | None:
    """Returns a number of steps, or None, which stands for the trainer's `log_every_n_steps`.

    Raises:
        ValueError: it is no whole number of at least 1.
    """
    try:
        return None if every_n_steps is None else check_count("every_n_steps", every_n_steps)
    except ValueError as error:
        raise ValueError(f"{error} None: the trainer's log_every_n_steps.") from None


def sum_over_ranks(trainer: Trainer, values: Sequence[float]) -> list[float]:
    """Returns each value's sum over all ranks, on every rank: one all-reduce of 8 bytes a value.

    Blocks the host until the device is done. (Lightning's `reduce` puts a barrier before it.)
    """
    device = trainer.strategy.root_device
    # float64 counts exactly up to 2^53; mps has none.
    packed = torch.tensor(values, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
    return cast(Tensor, trainer.strategy.reduce(packed, reduce_op="sum")).tolist()
