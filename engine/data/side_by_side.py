"""Refuses loaders that several ranks read side by side (a `CombinedLoader`) with uneven shares.

A step then has one loss, computed from one batch of each loader. The ranks' losses are averaged. A weight applies to
the whole loss, not to the part of one loader. Suppose that two ranks have different numbers of samples of one loader,
and equal numbers of another one: then some samples would count for more than in one process. So in each step all ranks
need the same number of samples of each loader. (The losses of a single loader, and of evaluation loaders that are read
one after the other, are weighted by their numbers of samples.)
"""

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import sized_len
from torch.utils.data import DataLoader

from .beside_others import SHARE_EVENLY, not_beside_others
from .epoch_position import order_of
from .even_batches import even_batches_of
from .global_batches import GlobalBatches
from .global_order import GlobalOrder
from .streams import UnevenEvalLoader
from .uneven import UnevenTrainLoader

__all__ = ["check_evaluated_side_by_side", "check_trained_side_by_side"]


def check_trained_side_by_side(combined: CombinedLoader, num_ranks: int) -> None:
    """Checks that the ranks have equal shares of each training loader, in all steps of the epoch.

    Lengths of streams and sizes of a batch sampler's batches are unknown before they are read: the loaders check them
    while they are read.

    Args:
        combined: the prepared loaders, with their limits.
        num_ranks: number of ranks with different samples.

    Raises:
        ValueError: the last step of a loader can't be shared evenly.
    """
    loaders = combined.flattened
    if num_ranks == 1 or len(loaders) == 1:
        return
    # Lightning: CombinedLoader's mode.
    num_steps, cycles = _num_steps(combined), combined._mode == "max_size_cycle"
    for number, loader in enumerate(loaders):
        if not isinstance(loader, DataLoader):
            continue
        name = f"Training loader {number + 1} of {len(loaders)}, over a {type(loader.dataset).__name__},"
        if isinstance(loader, UnevenTrainLoader):
            loader.name_beside_others = name
            known_lengths = [length for length in loader.lengths if length is not None]
            is_known = len(known_lengths) == len(loader.lengths) and loader.policy != "drop"
            if is_known and min(known_lengths) < min(max(known_lengths), num_steps):
                raise not_beside_others(name, f"has {known_lengths} batches on the ranks", SHARE_EVENLY)
            continue
        order = order_of(loader)
        if order is None or order.num_replicas != num_ranks:
            continue
        if loader.batch_sampler is order:  # of the user's own batches, whose sizes are known when they are drawn
            order.name_beside_others, order.num_even_batches = name, num_steps
        length = len(loader)
        left = [len(order.sampler) - order.start] if num_steps >= length else []  # type: ignore[arg-type]
        left += [len(order.sampler)] if cycles and num_steps > length else []  # type: ignore[arg-type]
        for num_left in left:
            _check_last_step(loader, order, num_left, num_ranks, name)


def _check_last_step(loader: DataLoader, order: GlobalOrder, num_left: int, num_ranks: int, name: str) -> None:
    """Checks that the ranks have equal shares of the last step of a pass over `num_left` items of an order.

    Raises:
        ValueError: the shares differ.
    """
    if order.drop_last or num_left % num_ranks == 0:
        return
    batches = loader.batch_sampler
    window, unit = (batches.size, "samples") if isinstance(batches, GlobalBatches) else (num_ranks, "batches")
    remedy = f"Give it drop_last=True, or a number of {unit} that {num_ranks} divides"
    if order.start:
        remedy = "Resume with the former number of ranks, or at the end of an epoch, or load only the weights"
    raise not_beside_others(name, f"has {num_left % window} {unit} for its last step", remedy)


def _num_steps(combined: CombinedLoader) -> float:
    """Returns the number of steps of an epoch; infinite if it is unknown."""
    limits = combined.limits or [float("inf")] * len(combined.flattened)
    lengths = [float("inf") if (length := sized_len(loader)) is None else length for loader in combined.flattened]
    read = [min(length, limit) for length, limit in zip(lengths, limits, strict=True)]
    return min(read) if combined._mode == "min_size" else max(read)


def check_evaluated_side_by_side(combined: CombinedLoader) -> None:
    """Checks that no rank has to evaluate another rank's sample to fill up its part of a batch of several loaders.

    For streams, whose lengths are unknown, it only warns.

    Args:
        combined: the prepared loaders, which are read side by side, with their limits.

    Raises:
        ValueError: the last batch of a loader has fewer samples than there are ranks, and the loaders differ in this.
    """
    loaders = combined.flattened
    if len(loaders) > 1 and any(isinstance(loader, UnevenEvalLoader) for loader in loaders):
        rank_zero_warn(
            "Streams are evaluated side by side with other loaders: a rank that has finished one of them repeats its"
            " last batch, so that these samples may count twice. Read the loaders one after the other (a list of"
            " loaders, or CombinedLoader's mode 'sequential') for exact figures."
        )
    evens = [batches for loader in loaders if (batches := even_batches_of(loader)) is not None]
    # If the loaders are alike, all parts of the last batch are padding on the same ranks, which then evaluate nothing.
    are_alike = len(evens) == len(loaders) and len({(len(batches), batches.num_real) for batches in evens}) == 1
    num_steps = _num_steps(combined)
    for batches in evens:
        if batches.has_padding and len(batches) <= num_steps and not are_alike:
            raise ValueError(
                f"One of {len(loaders)} loaders that are evaluated side by side has fewer samples for its last batch"
                f" than the {batches.num_replicas} ranks: some would be evaluated twice. Give it another batch size,"
                " or a number of samples that the ranks can share, or read the loaders one after the other (a list"
                " of loaders, or CombinedLoader's mode 'sequential')."
            )
