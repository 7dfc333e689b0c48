"""Updates the number of batches of an epoch in Lightning's loops, after a resumed epoch or another batch size."""

from typing import Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import sized_len

# Lightning: the number of batches of a loader under `limit_train_batches`.
from .._compat.lightning import _parse_num_batches

__all__ = ["lengths_of", "set_lengths", "set_limits"]


def lengths_of(combined: CombinedLoader) -> list[int | None]:
    """Returns the number of batches of each loader; None for a loader without a length."""
    return [sized_len(loader) for loader in combined.flattened]


# Lightning: FitLoop.setup_data, when it asks for the lengths.
def set_limits(trainer: Any) -> None:
    """Sets the number of batches to read of each training loader."""
    combined = trainer.fit_loop._combined_loader
    combined.limits = [
        _parse_num_batches(RunningStage.TRAINING, float("inf") if n is None else n, trainer.limit_train_batches)
        for n in lengths_of(combined)
    ]
    if combined._iterator is not None:  # Lightning: the iterator, not the loader, limits the epoch
        combined._iterator.limits = combined.limits


def set_lengths(trainer: Any) -> None:
    """Sets the number of batches of the epoch, and the number after which a validation is due."""
    fit_loop = trainer.fit_loop
    whole = sized_len(fit_loop._combined_loader)
    fit_loop.max_batches = float("inf") if whole is None else whole
    if isinstance(trainer.val_check_batch, int) and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))
