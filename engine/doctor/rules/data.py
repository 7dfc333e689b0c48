"""Rules about data: loaders, copies to the device, padding, uneven shares."""

from ..figures import Figures
from .finding import Finding, at, ms, one_or_all, who

__all__ = ["padding", "slow_copy", "slow_loader", "uneven_data"]


def slow_loader(figures: Figures, threshold: float) -> Finding | None:
    """The data loader of one rank, or of all, is late."""
    outlier_or_all = one_or_all(figures, "data_wait", threshold)
    if outlier_or_all is None:
        return None
    outlier, is_one = outlier_or_all
    seconds = figures.step_seconds("data_wait", outlier.rank)
    evidence = f"{who(figures, outlier.rank, is_one)} waits {ms(seconds)} of each step for its data loader"
    if is_one:
        evidence += f", the others {ms(outlier.others * figures.step_s)}"
    info = figures.ranks[outlier.rank]
    spare = max(1, min(8, int(info.num_cpus / max(info.local_ranks, 1)) - 1))
    if info.num_workers is None:
        remedy = "have the data made ahead by worker processes: a torch DataLoader with num_workers"
    elif info.num_workers == 0:
        remedy = f"DataLoader(num_workers={spare}, persistent_workers=True)"
    else:
        remedy = f"DataLoader(num_workers={2 * info.num_workers}, prefetch_factor=4), or a faster transform"
    if is_one:
        remedy += f"; if the others' data are as slow to read, look at the disk and network of {info.host}"
    gain = outlier.excess if is_one else outlier.others or outlier.value
    numbers = {"share": outlier.value, "others": outlier.others, "step_ms": 1e3 * seconds}
    return Finding(
        cause="slow_loader", evidence=evidence, numbers=numbers, remedy=remedy, gain=gain,
        **at(figures, outlier.rank, is_one),
    )  # fmt: skip


def slow_copy(figures: Figures, threshold: float) -> Finding | None:
    """Batches go to the device slowly."""
    outlier_or_all = one_or_all(figures, "copy", threshold)
    if outlier_or_all is None:
        return None
    outlier, is_one = outlier_or_all
    info = figures.ranks[outlier.rank]
    remedy = "a lighter `on_after_batch_transfer`; move what it does into the data loader's workers"
    if info.device != "cpu" and not info.pins_memory:
        remedy = "DataLoader(pin_memory=True)"
    name = who(figures, outlier.rank, is_one)
    evidence = f"{name} spends {outlier.value:.0%} of the time on copying batches to the device"
    numbers = {"share": outlier.value, "others": outlier.others}
    where = at(figures, outlier.rank, is_one)
    return Finding(cause="slow_copy", evidence=evidence, numbers=numbers, remedy=remedy, gain=outlier.value, **where)


def padding(figures: Figures, threshold: float) -> Finding | None:
    """Batches are padded much."""
    shares = [total.padding for total in figures.totals.values() if total.padding is not None]
    share = sum(shares) / len(shares) if shares else 0.0
    if share < threshold:
        return None
    return Finding(
        cause="padding",
        evidence=f"{share:.0%} of the tokens are padding",
        numbers={"share": share},
        remedy="LengthBucketing, or packed sequences: see docs/howto/sequences-of-many-lengths.md",
        gain=share * sum(figures.share("compute", rank) for rank in figures.totals) / len(figures.totals),
    )


def uneven_data(figures: Figures, threshold: float) -> Finding | None:
    """Ranks run out of data before others."""
    outlier = figures.outlier(lambda r: figures.totals[r].num_fillers / max(figures.totals[r].num_batches, 1))
    if outlier.value < threshold:
        return None
    return Finding(
        cause="uneven_data",
        evidence=f"{outlier.value:.0%} of the batches of rank {outlier.rank} only keep it in step with the others",
        numbers={"share": outlier.value},
        remedy="split the data evenly over the ranks; or uneven='drop', which ends the epoch with the shortest",
        gain=outlier.value,
        **at(figures, outlier.rank, True),
    )
