"""Rules about the health of training: gradients, loss scale, replicas, learning rate. They cost no time, so no gain."""

from collections.abc import Sequence
from statistics import median

from ..figures import Figures
from .finding import Finding, at

__all__ = ["dead_parameters", "gradient_spikes", "loss_scale_falls", "lr_stands_still", "replicas_differ"]

_MIN_LOOKS = 5
"""Number of gradient norms below which none counts as a spike."""
_SHOWN = 4


def replicas_differ(figures: Figures, threshold: float) -> Finding | None:
    """Ranks that must have equal weights have different ones."""
    checksums: dict[int, dict[int, float]] = {}
    for rank, intervals in figures.series.items():
        for interval in intervals:
            if interval.checksum is not None:
                checksums.setdefault(interval.checksum_step, {})[rank] = interval.checksum
    for step, by_rank in sorted(checksums.items()):
        middle = median(by_rank.values())
        off = {rank: abs(value - middle) / max(abs(middle), 1e-30) for rank, value in by_rank.items()}
        # With two ranks it is unknown which one is right.
        ranks = tuple(rank for rank in off if not off[rank] <= threshold) if len(by_rank) > 2 else ()
        spread = max(off.values())
        if not spread <= threshold:
            who = f"rank {ranks[0]} has" if ranks else "ranks have"
            return Finding(
                cause="replicas_differ",
                ranks=ranks,
                host=figures.ranks[ranks[0]].host if ranks else None,
                evidence=f"after step {step} {who} other weights: checksums differ by {spread:.2g} of their value",
                numbers={"step": step, "difference": spread},
                remedy="callbacks=[ReplicaGuard()], which names the parameter; `polyphase verify` finds the step",
            )
    return None


def gradient_spikes(figures: Figures, threshold: float) -> Finding | None:
    """A norm of the gradients is many times the usual one."""
    worst: tuple[float, int, int] | None = None
    for rank, intervals in figures.series.items():
        norms = [(interval.grad_norm, interval.step) for interval in intervals if interval.grad_norm is not None]
        if len(norms) < _MIN_LOOKS:
            continue
        usual = median(norm for norm, _ in norms)
        norm, step = max(norms)
        # Norms usually fall from their first values when training begins.
        is_first = step == norms[0][1]
        if usual > 0.0 and norm >= threshold * usual and not is_first:
            worst = max(worst or (0.0, 0, 0), (norm / usual, -rank, step))
    if worst is None:
        return None
    times, rank, step = worst[0], -worst[1], worst[2]
    return Finding(
        cause="gradient_spikes",
        evidence=f"by step {step} the norm of the gradients on rank {rank} was {times:.3g} times its median",
        numbers={"times": times, "step": step},
        remedy="gradient_clip_val=1.0; a lower learning rate or a longer warm-up; look at the batches of that step",
    )


def loss_scale_falls(figures: Figures, threshold: float) -> Finding | None:
    """The loss scale of float16 falls and does not recover: gradients overflow repeatedly."""
    for rank, intervals in figures.series.items():
        scales = [interval.loss_scale for interval in intervals if interval.loss_scale is not None]
        if len(scales) > 1 and max(scales) >= threshold * scales[-1]:
            return Finding(
                cause="loss_scale_falls",
                evidence=f"the loss scale fell from {max(scales):g} to {scales[-1]:g}: each time a step was left out",
                numbers={"from": max(scales), "to": scales[-1]},
                remedy="precision='bf16-mixed', which needs no scale; or look for a loss or gradient that overflows",
                **at(figures, rank, False),
            )
    return None


def dead_parameters(figures: Figures, threshold: float) -> Finding | None:
    """Parameters have no gradient."""
    dead: list[Sequence[str]] = []
    num_looks = []
    for intervals in figures.series.values():
        looks = [interval.without_gradient for interval in intervals if interval.without_gradient is not None]
        num_looks.append(len(looks))
        dead.append([name for name in (looks[0] if looks else []) if all(name in look for look in looks)])
    if not dead or min(num_looks) < threshold:
        return None
    is_cut = figures.info.layout.get("pp", 1) > 1  # a rank has only the parameters of its stage
    names = [name for name in dict.fromkeys(n for part in dead for n in part) if is_cut or all(name in p for p in dead)]
    if not names:
        return None
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return Finding(
        cause="dead_parameters",
        evidence=f"{', '.join(names[:_SHOWN])}{more} had no gradient in all {min(num_looks)} steps that were looked at",
        numbers={"parameters": len(names), "looks": min(num_looks)},
        remedy="`requires_grad_(False)` where that is meant; else look for a detach(), or a branch that is not used",
    )


def lr_stands_still(figures: Figures, threshold: float) -> Finding | None:
    """A scheduler is not stepped with the optimizer, though it should be."""
    rank = min(figures.series, default=0)
    every = figures.ranks[rank].lr_interval_steps if figures.series else None
    counted = [interval for interval in figures.series.get(rank, ()) if interval.lr_steps is not None]
    if every is None or len(counted) < 2:
        return None
    last = counted[-1]
    since = next(interval for interval in counted if interval.lr_steps == last.lr_steps)
    missed = (last.step - since.step) // every
    if missed < threshold:
        return None
    return Finding(
        cause="lr_stands_still",
        evidence=f"the learning rate scheduler was not stepped for {last.step - since.step} steps: it is {last.lr:g}",
        numbers={"steps": last.step - since.step, "lr": last.lr or 0.0},
        remedy="with manual optimization call `self.lr_schedulers().step()`; else look at interval and frequency",
    )
