"""The epoch of a data set: its attribute `epoch`, which a hook, a callback or the data set itself sets."""

from typing import Any

__all__ = ["epoch_of", "epoch_setter", "set_epoch"]


def epoch_of(dataset: Any) -> int | None:
    """Returns the attribute `epoch` of a data set; None without one."""
    epoch = getattr(dataset, "epoch", None)
    return epoch if isinstance(epoch, int) else None


def epoch_setter(dataset: Any) -> str:
    """Names, for a message, how the epoch of a data set is set."""
    return "set_epoch" if callable(getattr(dataset, "set_epoch", None)) else "its attribute `epoch`"


def set_epoch(dataset: Any, epoch: int | None) -> None:
    """Sets the epoch of a data set, a number that `epoch_of` returned."""
    if epoch is None or epoch_of(dataset) in (None, epoch):
        return
    if callable(getattr(dataset, "set_epoch", None)):
        dataset.set_epoch(epoch)
        return
    try:
        dataset.epoch = epoch
    except AttributeError:  # a property that something else decides
        raise ValueError(
            f"{type(dataset).__name__}.epoch was {epoch} when the checkpoint was saved, and can't be set to it now:"
            " give the data set a `set_epoch(epoch)`, or load only the weights to begin an epoch."
        ) from None
