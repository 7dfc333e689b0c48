"""Rules about the time between steps: hooks, loggers, saves, validation."""

from collections import defaultdict
from collections.abc import Mapping

from ..figures import Figures
from .finding import Finding, at, ms, who

__all__ = ["checkpoint_stall", "slow_callback", "slow_logging", "slow_validation"]

_OBSERVER = "Doctor"
"""Callback that is never reported as slow: the user has asked for it, and in a short trial its share is large."""
_SAVERS = ("ModelCheckpoint", "Snapshot", "OnExceptionCheckpoint")
"""Callbacks whose time counts as the checkpoints' time."""
_MIN_SAVES = 3
"""Number of saves below which there is no finding: each run ends with one."""


def slow_callback(figures: Figures, threshold: float) -> Finding | None:
    """Hooks of one class take long."""
    by_class = {rank: _by_class(figures.totals[rank].by_hook) for rank in figures.totals}
    names = {name for classes in by_class.values() for name in classes} - {"others", _OBSERVER, *_SAVERS}
    if not names:
        return None

    def share(name: str, rank: int) -> float:
        # On accelerators hooks may overlap with the device's computing.
        return min(by_class[rank][name] / max(figures.totals[rank].wall_s, 1e-12), figures.share("callbacks", rank))

    name = max(names, key=lambda candidate: max(share(candidate, rank) for rank in by_class))
    outlier = figures.outlier(lambda rank: share(name, rank))
    if outlier.value < threshold:
        return None
    is_one = len(figures.totals) > 1 and outlier.excess > outlier.value / 2
    hooks = figures.totals[outlier.rank].by_hook
    hook = max(
        (candidate for candidate in hooks if candidate.startswith(f"{name}.")), key=lambda candidate: hooks[candidate]
    )
    per_step = hooks[hook] / max(figures.totals[outlier.rank].num_steps, 1)
    whose = "" if len(figures.totals) == 1 else f" on {who(figures, outlier.rank, is_one)}"
    return Finding(
        cause="slow_callback",
        evidence=f"{hook} takes {ms(per_step)} a step{whose}, {outlier.value:.0%} of the time",
        numbers={"share": outlier.value, "others": outlier.others, "step_ms": 1e3 * per_step},
        remedy=f"call {name} less often, or have it do its work in a thread of its own",
        gain=outlier.value,
        **at(figures, outlier.rank, is_one),
    )


def _by_class(by_hook: Mapping[str, float]) -> dict[str, float]:
    classes: dict[str, float] = defaultdict(float)
    for hook, seconds in by_hook.items():
        classes[hook.rpartition(".")[0] or hook] += seconds
    return classes


def slow_logging(figures: Figures, threshold: float) -> Finding | None:
    """The loggers take long."""
    outlier = figures.outlier(lambda rank: figures.share("logging", rank))
    if outlier.value < threshold:
        return None
    loggers = " and ".join(figures.ranks[outlier.rank].loggers) or "the loggers"
    return Finding(
        cause="slow_logging",
        evidence=f"rank {outlier.rank} spends {outlier.value:.0%} of the time in {loggers}",
        numbers={"share": outlier.value, "others": outlier.others},
        remedy="log_every_n_steps=50 or more, or a logger that writes in the background",
        gain=outlier.value,
        **at(figures, outlier.rank, len(figures.totals) > 1 and outlier.excess > outlier.value / 2),
    )


def checkpoint_stall(figures: Figures, threshold: float) -> Finding | None:
    """Training stands still while checkpoints are written."""

    def seconds(rank: int) -> float:
        classes = _by_class(figures.totals[rank].by_hook)
        return figures.totals[rank].seconds.get("checkpoint", 0.0) + sum(classes[name] for name in _SAVERS)

    outlier = figures.outlier(lambda rank: seconds(rank) / max(figures.totals[rank].wall_s, 1e-12))
    total = figures.totals[outlier.rank]
    if outlier.value < threshold or total.num_saves < _MIN_SAVES:
        return None
    each_s = seconds(outlier.rank) / total.num_saves
    return Finding(
        cause="checkpoint_stall",
        evidence=f"{total.num_saves} saves stop training for {each_s:.3g} s each, {outlier.value:.0%} of the time",
        numbers={"share": outlier.value, "num_saves": total.num_saves, "each_s": each_s},
        remedy="callbacks=[Snapshot()], which writes in the background; or save less often, or on a faster disk",
        gain=outlier.value,
        **at(figures, outlier.rank, len(figures.totals) > 1 and outlier.excess > outlier.value / 2),
    )


def slow_validation(figures: Figures, threshold: float) -> Finding | None:
    """Validation takes much of the run."""
    shares = [figures.share("validation", rank) for rank in figures.totals]
    share = sum(shares) / len(shares)
    if share < threshold:
        return None
    return Finding(
        cause="slow_validation",
        evidence=f"validation takes {share:.0%} of the time",
        numbers={"share": share},
        remedy="check_val_every_n_epoch or val_check_interval larger, limit_val_batches smaller, a larger batch in it",
        gain=share,
    )
