"""Checks the flags `global_batch_size` and `micro_batch_size`."""

from typing import Any, Literal

from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader

from ..flags import check_count

__all__ = ["check_batch_sizes", "check_loader"]


def check_batch_sizes(
    global_batch_size: int | None,
    micro_batch_size: int | Literal["auto"] | None,
    *,
    num_ranks: int,
    accumulate_grad_batches: int,
) -> None:
    """Checks the flags against each other, before any process starts.

    Raises:
        ValueError: they can't be honoured together.
    """
    if global_batch_size is None:
        if micro_batch_size is not None:
            raise ValueError(
                f"micro_batch_size={micro_batch_size!r} says how a global batch is cut: give global_batch_size as well,"
                " or set the DataLoader's batch_size."
            )
        return
    check_count("global_batch_size", global_batch_size)
    if isinstance(micro_batch_size, str) and micro_batch_size != "auto":
        raise ValueError(f"micro_batch_size must be a whole number, 'auto' or None, but got {micro_batch_size!r}.")
    if micro_batch_size not in (None, "auto"):
        check_count("micro_batch_size", micro_batch_size, most=global_batch_size)
    if accumulate_grad_batches != 1:
        raise ValueError(
            f"global_batch_size={global_batch_size} and accumulate_grad_batches={accumulate_grad_batches} both say how"
            " many micro-batches a step has: leave the latter out. To cut a rank's share smaller, give"
            " micro_batch_size."
        )
    if global_batch_size < num_ranks:
        raise ValueError(
            f"global_batch_size={global_batch_size} is smaller than the number of ranks, {num_ranks}: some would have"
            f" nothing to do. Give at least {num_ranks}, or fewer devices."
        )


def check_loader(loader: Any, global_batch_size: int, micro_batch_size: int | str | None) -> None:
    """Checks that global batches can be made of the batches of `loader`.

    Raises:
        ValueError: they can't; the message says what to change.
    """
    flag = f"global_batch_size={global_batch_size}"
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"{flag} needs a DataLoader to take the samples from, but training data is a {type(loader).__name__}: give"
            " a DataLoader, or set the batch size yourself and leave the flag out."
        )
    if has_iterable_dataset(loader) or sized_len(loader.dataset) is None:
        raise ValueError(
            f"{flag} needs a data set whose samples can be chosen by index, but {type(loader.dataset).__name__} is a"
            " stream: leave the flag out, and set batch_size and accumulate_grad_batches for the number of ranks; a"
            " `training_step` that returns a weight beside its loss makes all samples count equally."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            f"{flag} can't be made of a DataLoader with batch_size=None, whose samples may be batches already: give it"
            " a batch_size, or leave the flag out and return a weight from `training_step`."
        )
    order = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if any(hasattr(sampler, "num_replicas") for sampler in (order, loader.batch_sampler)):
        raise ValueError(
            f"{flag} and the DataLoader's own {type(order).__name__} would both split the samples over the ranks:"
            " leave the sampler out (use shuffle=True), or the flag."
        )
    size = getattr(loader.batch_sampler, "batch_size", None)
    if micro_batch_size is None and isinstance(size, int) and size > global_batch_size:
        raise ValueError(
            f"the DataLoader's batch_size={size} is larger than {flag}: one rank alone would have more samples than"
            " all of them together. Make it smaller; it is the largest micro-batch."
        )
