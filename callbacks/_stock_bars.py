"""`train_progress_bar` and its like: what scripts read from the bars of Lightning's `TQDMProgressBar`."""

import dataclasses
from typing import Any

__all__ = ["BarState", "StockBars", "num_train_batches"]


@dataclasses.dataclass(frozen=True)
class BarState:
    """The progress of a stage, by the names that tqdm has for it."""

    desc: str
    """Name of the stage: Epoch, Validation, Testing or Predicting."""
    n: int
    """Batches done."""
    total: float
    """Batches in all; infinity where nobody knows."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this bar has desc, n and total, but no {name!r}: it is no tqdm bar. For one of those,"
            " Engine(callbacks=[TQDMProgressBar()]) (lightning.pytorch.callbacks)."
        )


class StockBars:
    """Adds to a progress bar what `TQDMProgressBar` lets others read; computed when asked for.

    Evaluation counts the batches of all its loaders together.
    """

    trainer: Any

    @property
    def train_progress_bar(self) -> BarState:
        """The progress of the latest epoch of training, which may be over."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return BarState("Epoch", done, num_train_batches(self.trainer, done))

    @property
    def val_progress_bar(self) -> BarState:
        """The progress of the latest validation: that of `validate` if this was called last, else that of `fit`."""
        trainer = self.trainer
        is_alone = trainer.state.fn == "validate"
        loop = trainer.validate_loop if is_alone else trainer.fit_loop.epoch_loop.val_loop
        return BarState("Validation", loop.batch_progress.current.ready, _total(loop.max_batches))

    @property
    def test_progress_bar(self) -> BarState:
        """The progress of the latest test, which may be over."""
        loop = self.trainer.test_loop
        return BarState("Testing", loop.batch_progress.current.ready, _total(loop.max_batches))

    @property
    def predict_progress_bar(self) -> BarState:
        """The progress of the latest prediction, which may be over."""
        loop = self.trainer.predict_loop
        return BarState("Predicting", loop.batch_progress.current.ready, _total(loop.max_batches))


def num_train_batches(trainer: Any, done: int) -> float:
    """Number of batches in this epoch, up to where `max_steps` ends it; infinity if the length is not known."""
    num_batches = trainer.num_training_batches
    if trainer.max_steps is None or trainer.max_steps < 0:
        return num_batches
    per_step = trainer.accumulate_grad_batches
    return min(num_batches, done - done % per_step + per_step * max(0, trainer.max_steps - trainer.global_step))


def _total(batches: Any) -> float:
    return sum(batches) if isinstance(batches, list) else batches
