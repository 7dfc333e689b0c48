"""Rules about the accelerator of a rank: reads that wait for it, its memory, its clock."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

from ..figures import Figures
from .finding import Finding, at, ms

__all__ = [
    "dead_parameters",
    "device_reads",
    "full_memory",
    "gradient_spikes",
    "large_logits",
    "loss_scale_falls",
    "lr_stands_still",
    "replicas_differ",
    "throttled_device",
    "unfused_optimizer",
    "unused_memory",
]

_LIMITED_CLOCK = 0.9
"""A device at its power limit counts as throttled if its clock is below this share of the others': all devices reach
the limit sometimes."""
_UNFUSED_COST = 0.6
"""Share of an unfused step that fusing saves: AdamW by foreach moves the bytes of the parameters 18 times, and in one
kernel 7 times (parameter, gradient and two moments are read, and all but the gradient are written)."""
_LOW_MFU = 0.3
"""Share of the peak rate below which a device may have too little work at a time."""


def device_reads(figures: Figures, threshold: float) -> Finding | None:
    """`training_step` reads from the device, and waits for it."""
    counts = {rank: sum(total.reads.values()) for rank, total in figures.totals.items()}
    rank = max(counts, key=lambda candidate: counts[candidate])
    if counts[rank] < threshold or figures.ranks[rank].device == "cpu":
        return None
    reads = figures.totals[rank].reads
    worst = max(reads, key=lambda candidate: reads[candidate])
    return Finding(
        cause="device_reads",
        evidence=f"training_step reads from the device {counts[rank]} times: {worst}",
        numbers={"reads": counts[rank]},
        remedy="keep it a tensor (`detach()`), and hand that to self.log, which reads when somebody looks",
    )


def unfused_optimizer(figures: Figures, threshold: float) -> Finding | None:
    """The optimizer steps in many kernels, each of which reads and writes all parameters."""
    rank = max(figures.totals, key=lambda candidate: figures.share("optimizer", candidate))
    info, share, seconds = (
        figures.ranks[rank],
        figures.share("optimizer", rank),
        figures.step_seconds("optimizer", rank),
    )
    if info.device == "cpu" or info.unfused_optimizer is None or share < threshold:
        return None
    return Finding(
        cause="unfused_optimizer",
        evidence=f"{info.unfused_optimizer} takes {ms(seconds)} of a step of {ms(figures.step_s)}, and would take about"
        f" {ms((1 - _UNFUSED_COST) * seconds)} in one kernel",
        numbers={"share": share, "seconds": seconds},
        remedy="fused=True for the optimizer: the same update, rounded differently",
        gain=_UNFUSED_COST * share,
    )


def full_memory(figures: Figures, threshold: float) -> Finding | None:
    """The memory of a device is nearly full: a longer batch, or a little fragmentation, ends the run."""
    used = _memory_shares(figures)
    retries = {rank: total.num_alloc_retries or 0 for rank, total in figures.totals.items()}
    rank = max(retries, key=lambda candidate: (retries[candidate], used.get(candidate, 0.0)))
    if rank not in used or (used[rank] < threshold and not retries[rank]):
        return None
    is_one = len(used) > 1 and all(
        share < threshold and not retries[candidate] for candidate, share in used.items() if candidate != rank
    )
    parts = sorted(figures.totals[rank].model_mb.items(), key=lambda part: -part[1])
    breakdown = f": {', '.join(f'{kind} {mb:,.0f} MB' for kind, mb in parts)}" if parts else ""
    again = f"; {retries[rank]} times torch had to free what it kept in reserve" if retries[rank] else ""
    total_mb, capacity_mb = figures.totals[rank].device_mb or 0.0, figures.ranks[rank].device_capacity_mb or 0.0
    return Finding(
        cause="full_memory",
        evidence=f"rank {rank} has had {used[rank]:.0%} of its device's memory allocated: {total_mb:,.0f} of"
        f" {capacity_mb:,.0f} MB{breakdown}{again}",
        numbers={"share": used[rank], "mb": total_mb, "retries": retries[rank]},
        remedy="a smaller micro-batch with accumulate_grad_batches; activation_checkpointing; or fsdp",
        **at(figures, rank, is_one),
    )


def large_logits(figures: Figures, threshold: float) -> Finding | None:
    """The logits of a large vocabulary take much of the memory; a loss in chunks makes none."""
    sizes = {rank: (total.logits_mb or 0.0, total.device_mb) for rank, total in figures.totals.items()}
    shares = {rank: mb / peak_mb for rank, (mb, peak_mb) in sizes.items() if peak_mb}
    rank = max(shares, key=lambda candidate: shares[candidate], default=None)
    if rank is None or shares[rank] < threshold:
        return None
    return Finding(
        cause="large_logits",
        evidence=f"the loss has {sizes[rank][0]:,.0f} MB of logits, {shares[rank]:.0%} of the most memory that was"
        " allocated, and as much again for their gradient",
        numbers={"share": shares[rank], "mb": sizes[rank][0]},
        remedy="torch.nn.functional.linear_cross_entropy, which goes through the tokens in chunks (howto/memory.md)",
    )


def unused_memory(figures: Figures, threshold: float) -> Finding | None:
    """Much memory of the devices is free while they compute far below their peak: a larger micro-batch fits."""
    used = _memory_shares(figures)
    rates = [figures.mfu(rank) for rank in figures.totals]
    mfu = max((rate for rate in rates if rate is not None), default=1.0)
    if not used or max(used.values()) >= threshold or mfu >= _LOW_MFU:
        return None
    return Finding(
        cause="unused_memory",
        evidence=f"at most {max(used.values()):.0%} of a device's memory was allocated, at {mfu:.0%} of the peak rate",
        numbers={"share": max(used.values()), "mfu": mfu},
        remedy="a larger micro-batch, with accumulate_grad_batches as much smaller; without activation_checkpointing",
    )


def throttled_device(figures: Figures, threshold: float) -> Finding | None:
    """A device holds its clock down, for heat or power."""
    clocks = {rank: total.clock_share for rank, total in figures.totals.items() if total.num_looks}
    shares = {rank: _throttled_share(figures, clocks, rank) for rank in clocks}
    if not shares or max(shares.values()) < threshold:
        return None
    ranks = tuple(rank for rank in shares if shares[rank] >= threshold)
    worst = max(ranks, key=lambda rank: (shares[rank], -(clocks[rank] or 0.0)))
    total, clock = figures.totals[worst], clocks[worst] or 0.0
    others = [other for rank, other in clocks.items() if rank not in ranks and other]
    usual = median(others) if others else 1.0
    is_heat = total.throttled.get("heat", 0) >= threshold * (total.num_looks or 1)
    host = figures.ranks[worst].host
    reason = "heat" if is_heat else max(total.throttled, key=lambda candidate: total.throttled[candidate])
    watts = "" if total.power_w is None else f", {total.power_w:.0f} W"
    degrees = "" if total.temperature_c is None else f", {total.temperature_c:.0f} degrees Celsius"
    beside = f"that of the others at {usual:.0%}" if others else "which all of them do"
    look = "cooling and airflow" if is_heat else "power supply and power limit (nvidia-smi -q -d POWER)"
    return Finding(
        cause="throttled_device",
        ranks=ranks if others else (),
        host=host,
        evidence=f"the device of rank {worst} ({host}) holds its clock at {clock:.0%} of the highest for {reason}, at"
        f" {shares[worst]:.0%} of the looks{degrees}{watts}; {beside}",
        numbers={"share": shares[worst], "clock_share": clock, "others": usual},
        remedy=f"look at {look} on {host}; or leave that device out",
        gain=figures.share("compute", worst) * max(0.0, 1.0 - clock / usual),
    )


def _memory_shares(figures: Figures) -> dict[int, float]:
    """Returns the largest allocated share of each device's memory, for devices where it is known."""
    sizes = {rank: (total.device_mb, figures.ranks[rank].device_capacity_mb) for rank, total in figures.totals.items()}
    return {rank: used / capacity for rank, (used, capacity) in sizes.items() if used and capacity}


def _throttled_share(figures: Figures, clocks: Mapping[int, float | None], rank: int) -> float:
    """Returns the share of the looks at which a device was throttled; a power limit counts if it slows it down."""
    total = figures.totals[rank]
    looks = [total.throttled.get("heat", 0), total.throttled.get("power brake", 0)]
    others = [clock for other, clock in clocks.items() if other != rank and clock]
    if others and (clocks[rank] or 0.0) < _LIMITED_CLOCK * median(others):
        looks.append(total.throttled.get("power limit", 0))
    return max(looks) / max(total.num_looks or 1, 1)


# --- rules about the health of training: gradients, loss scale, replicas, learning rate. They cost no time, so no gain


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
    num_ranks = Counter(name for of_rank in dead for name in of_rank)
    names = [name for name, number in num_ranks.items() if is_cut or number == len(dead)]
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
