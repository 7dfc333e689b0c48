"""`train_progress_bar` and similar attributes, which scripts read from Lightning's `TQDMProgressBar`."""

import dataclasses
from typing import Any

__all__ = ["StockBars", "num_train_batches"]


@dataclasses.dataclass(frozen=True)
class _BarState:
    """The progress of a stage, with tqdm's attribute names."""

    desc: str
    """Name of the stage: Epoch, Validation, Testing or Predicting."""
    n: int
    """Number of batches done."""
    total: float
    """Total number of batches; infinity if unknown."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"this bar has desc, n and total, but no {name!r}: it is no tqdm bar. To use one, pass"
            " Engine(callbacks=[TQDMProgressBar()]) (lightning.pytorch.callbacks)."
        )


class StockBars:
    """Adds the attributes of `TQDMProgressBar` to a progress bar; they are computed at access.

    In evaluation the batches of all loaders are counted together.
    """

    trainer: Any

    @property
    def train_progress_bar(self) -> _BarState:
        """The progress of the latest training epoch, which may have ended."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return _BarState("Epoch", done, num_train_batches(self.trainer, done))

    @property
    def val_progress_bar(self) -> _BarState:
        """The progress of the latest validation: of `validate` if that was called last, otherwise of `fit`."""
        trainer = self.trainer
        is_alone = trainer.state.fn == "validate"
        loop = trainer.validate_loop if is_alone else trainer.fit_loop.epoch_loop.val_loop
        return _BarState("Validation", loop.batch_progress.current.ready, _total(loop.max_batches))

    @property
    def test_progress_bar(self) -> _BarState:
        """The progress of the latest test, which may have ended."""
        loop = self.trainer.test_loop
        return _BarState("Testing", loop.batch_progress.current.ready, _total(loop.max_batches))

    @property
    def predict_progress_bar(self) -> _BarState:
        """The progress of the latest prediction, which may have ended."""
        loop = self.trainer.predict_loop
        return _BarState("Predicting", loop.batch_progress.current.ready, _total(loop.max_batches))


def num_train_batches(trainer: Any, done: int) -> float:
    """Returns the number of batches in this epoch, limited by `max_steps`; infinity if unknown."""
    num_batches = trainer.num_training_batches
    if trainer.max_steps is None or trainer.max_steps < 0:
        return num_batches
    per_step = trainer.accumulate_grad_batches
    return min(num_batches, done - done % per_step + per_step * max(0, trainer.max_steps - trainer.global_step))


def _total(batches: Any) -> float:
    return sum(batches) if isinstance(batches, list) else batches
