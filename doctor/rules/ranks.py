"""Rules about ranks that compute longer than others, and about waits between ranks."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from polyphase.engine.strategies.registry import STRATEGIES

from ..figures import Figures, Outlier
from ..interval import RankInfo
from .finding import COSTLY_COMPRESSION, RATIO, Finding, at, ms, option, who
from .network import UNDERUSED, compression_cost, link_use

__all__ = [
    "checkpoint_stall",
    "exposed_communication",
    "few_micro_batches",
    "slow_callback",
    "slow_logging",
    "slow_rank",
    "slow_validation",
    "unequal_stages",
    "varying_steps",
]

_SYNCS_A_STEP = 1.5
"""Number of averaged backwards per optimizer step from which on some are unnecessary."""
_SMALL_BUCKET_MB = 1.0
"""The size of torch's first bucket."""
_TIMES_ON_CPUS = 3
"""Factor on the threshold of exposed communication on CPUs: there collectives also wait for a CPU in a healthy run."""
_SMALL_MESSAGE_MB, _MANY_CALLS = 1.0, 8
"""Mean size of small collectives, which end before a link reaches its rate, and their number in a step."""
_MICRO_BATCHES_A_STAGE = 2
"""The default number of micro-batches of `pp`, for each stage."""


def slow_rank(figures: Figures, threshold: float) -> Finding | None:
    """One rank computes longer than the others: it has more samples, lacks a CPU, or is slow itself."""
    if len(figures.totals) < 2 or figures.info.layout.get("pp", 1) > 1:
        return None
    outlier = figures.outlier(lambda rank: figures.step_seconds("compute", rank))
    share = outlier.excess / max(figures.step_s, 1e-12)
    if share < threshold or outlier.value < RATIO * outlier.others:
        return None
    host = figures.ranks[outlier.rank].host
    evidence = (
        f"rank {outlier.rank} ({host}) computes for {ms(outlier.value)} a step, the others for {ms(outlier.others)}"
    )
    cause, why, remedy = _why_slow(figures, outlier)
    numbers = {"step_ms": 1e3 * outlier.value, "others_ms": 1e3 * outlier.others, "share": share}
    return Finding(
        cause=cause, ranks=(outlier.rank,), host=host, evidence=f"{evidence}; {why}", numbers=numbers, remedy=remedy,
        gain=share,
    )  # fmt: skip


def _why_slow(figures: Figures, outlier: Outlier) -> tuple[str, str, str]:
    """Returns the cause's name, the evidence, and the remedy."""
    rank = outlier.rank
    samples = figures.outlier(lambda other: figures.totals[other].num_samples or 0)
    if (
        samples.rank == rank
        and samples.others
        and samples.excess / samples.others * outlier.others > outlier.excess / 2
    ):
        why = f"it has {samples.value / samples.others:.2g} times as many samples"
        return "uneven_data", why, "deal the samples evenly: leave the distributed sampler to the engine"
    queued = _excess_per_step(figures, (rank,), lambda other: figures.totals[other].runqueue_s)
    busy = _excess_per_step(figures, (rank,), lambda other: figures.totals[other].cpu_s)
    if queued is not None and queued > outlier.excess / 2:
        return _busy_neighbour(queued, figures.ranks[rank].host)
    if busy is not None and busy < outlier.excess / 2 and figures.ranks[rank].device == "cpu":
        why = f"its thread computes for {ms(max(busy, 0.0))} more than the others, and else waits for something"
        return "slow_rank", why, "look for reads of files, locks and sleeps in `training_step` on this rank"
    remedy = f"compare clock, temperature and other users of the device on {figures.ranks[rank].host}; or leave it out"
    return "slow_rank", "with as many samples", remedy


def _busy_neighbour(queued_s: float, host: str) -> tuple[str, str, str]:
    why = f"for {ms(queued_s)} more than the others it is ready, and other processes have its CPU"
    return "busy_neighbour", why, f"end what else computes on {host}, or give each rank CPUs of its own (taskset)"


def _excess_per_step(figures: Figures, ranks: Sequence[int], seconds: Callable[[int], float | None]) -> float | None:
    """Returns the excess seconds per step of `ranks` over the others, by medians; None if unknown."""
    if any(seconds(rank) is None for rank in figures.totals):
        return None
    per_step = {rank: (seconds(rank) or 0.0) / max(figures.totals[rank].num_steps, 1) for rank in figures.totals}
    return median(per_step[rank] for rank in ranks) - median(per_step[rank] for rank in per_step if rank not in ranks)


def unequal_stages(figures: Figures, threshold: float) -> Finding | None:
    """A stage of the pipeline computes longer than the others."""
    num_stages = figures.info.layout.get("pp", 1)
    if num_stages < 2 or figures.info.world_size != len(figures.totals):
        return None
    per_stage = figures.info.world_size // num_stages
    stages = {
        stage: [figures.step_seconds("compute", rank) for rank in figures.totals if rank // per_stage == stage]
        for stage in range(num_stages)
    }
    means = {stage: sum(values) / max(len(values), 1) for stage, values in stages.items()}
    mean = sum(means.values()) / num_stages
    slowest = max(means, key=lambda stage: means[stage])
    share = (means[slowest] - mean) / max(figures.step_s, 1e-12)
    if share < threshold or means[slowest] < RATIO * mean:
        return None
    ranks = tuple(rank for rank in figures.totals if rank // per_stage == slowest)
    by_stage = ", ".join(ms(means[stage]) for stage in range(num_stages))
    host = figures.ranks[ranks[0]].host
    cause = "unequal_stages"
    evidence = f"stage {slowest} computes for {ms(means[slowest])} a step, the mean is {ms(mean)} ({by_stage})"
    remedy = f"move layers away from stage {slowest}: `pipeline_stages()` of the module says where it is cut"
    queued = _excess_per_step(figures, ranks, lambda rank: figures.totals[rank].runqueue_s)
    excess = means[slowest] - median(means[stage] for stage in means if stage != slowest)
    if queued is not None and queued > excess / 2:
        cause, why, remedy = _busy_neighbour(queued, host)
        evidence += f"; {why}"
    numbers = {"step_ms": 1e3 * means[slowest], "mean_ms": 1e3 * mean, "stage": slowest, "share": share}
    # A step takes the slowest stage's time for all micro-batches, and the other stages' time for one. Equal stages
    # shorten the former by the excess over the mean, and lengthen the latter by one micro-batch's part of it.
    num_micro_batches = _num_micro_batches(figures)
    gain = share * (1.0 - 1.0 / num_micro_batches)
    return Finding(cause=cause, ranks=ranks, host=host, evidence=evidence, numbers=numbers, remedy=remedy, gain=gain)


def _num_micro_batches(figures: Figures) -> int:
    return int(option(figures.info, "microbatches") or _MICRO_BATCHES_A_STAGE * figures.info.layout.get("pp", 1))


def few_micro_batches(figures: Figures, threshold: float) -> Finding | None:
    """The stages of a pipeline wait for each other at both ends of a batch, for a large part of its time."""
    if figures.info.layout.get("pp", 1) < 2:
        return None
    share = sum(figures.share("bubble", rank) for rank in figures.totals) / len(figures.totals)
    if share < threshold:
        return None
    number = _num_micro_batches(figures)
    return Finding(
        cause="few_micro_batches",
        evidence=f"with {number} micro-batches all stages wait for each other for {share:.0%} of the time",
        numbers={"share": share, "micro_batches": number},
        remedy=f"pp:microbatches={2 * number}, which halves that; or schedule=zero-bubble",
        gain=share / 2,
    )


def exposed_communication(figures: Figures, threshold: float) -> Finding | None:
    """Collectives do not overlap with computing."""
    if len(figures.totals) < 2:
        return None
    shares = [figures.share("communication", rank) for rank in figures.totals]
    share = sum(shares) / len(shares)
    if share < threshold * _times_on_cpus(figures):
        return None
    if compression_cost(figures).get("share", 0.0) >= COSTLY_COMPRESSION:
        return None  # another cause, with its own finding
    more = _why_exposed(figures, share)
    if more is not None:
        return more
    info = figures.info
    remedy = _less_communication(info)
    use = link_use(figures)
    evidence = f"collectives that nothing hides take {share:.0%} of the time, without waiting for slower ranks"
    if use:
        evidence += f"; they send {use['used_mb_per_s']:,.3g} MB/s, and a large one {use['mb_per_s']:,.3g}"
    cause, gain = "exposed_communication", share
    if use and use["use"] < UNDERUSED:
        cause, gain = "underused_link", share * (1.0 - use["use"])
        few = "fewer and larger collectives: one for values that are reduced one by one"
        remedy = f"{few if use['call_mb'] < _SMALL_MESSAGE_MB else 'look what else sends there'}; or {remedy}"
    if info.device == "cpu" and info.local_ranks > (num_cpus := figures.host_cpus(info.host)):
        remedy = f"no more ranks on a host than CPUs: {info.local_ranks} share {num_cpus:g} here; or {remedy}"
    return Finding(
        cause=cause,
        evidence=evidence,
        numbers={"share": share, **use},
        remedy=remedy,
        gain=gain,
    )


_REMEDIES = {
    "fsdp": "precision='bf16-mixed', which gathers weights in 16 bits; or hsdp, which gathers within a node",
    "hsdp": "precision='bf16-mixed', which gathers weights in 16 bits",
    "tp": "fewer ranks along tp, and fsdp or ddp for the others",
    "cp": "fewer ranks along cp, and fsdp or ddp for the others",
    "pp": "more micro-batches: pp:microbatches=...",
    "local_sgd": "local_sgd:overlap_steps=N, an exchange beside training; or a larger sync_every",
    "diloco": "diloco:overlap_steps=N, an exchange beside training; or a larger sync_every",
    "ps": "a larger ps:staleness",
}
"""Ways to send less by strategy, besides `compression`."""


def _less_communication(info: RankInfo) -> str:
    name = info.strategy.partition(":")[0]
    first, _, second = name.partition("+")
    # tp and cp send activations in each layer: more, and more often, than what averages gradients beside them.
    axis = second if second in ("tp", "cp") else first
    remedies = [_REMEDIES[axis]] if axis in _REMEDIES else []
    if name in STRATEGIES and "auto" in STRATEGIES[name].compressions:
        remedies.append("compression='bf16' or 'auto' (`polyphase bench-comm` measures which one pays)")
    if axis in ("ddp", "zero1", "fsdp", "hsdp"):
        remedies.append(f"accumulate_grad_batches={2 * info.accumulate_grad_batches}, which sends half as often")
    return "; or ".join(remedies) or "a larger batch"


def _times_on_cpus(figures: Figures) -> float:
    """Returns the factor on the threshold: above 1 on CPUs, larger still if a host has more ranks than CPUs."""
    info = figures.info
    if info.device != "cpu":
        return 1.0
    return _TIMES_ON_CPUS * max(1.0, info.local_ranks / max(figures.host_cpus(info.host), 1.0))


def _why_exposed(figures: Figures, share: float) -> Finding | None:
    """Returns a more precise cause, if there is one: unnecessary averages, small buckets or units."""
    total = figures.totals[min(figures.totals)]
    if total.num_syncs is not None and total.num_syncs >= _SYNCS_A_STEP * total.num_steps:
        syncs = total.num_syncs / max(total.num_steps, 1)
        return Finding(
            cause="sync_while_accumulating",
            evidence=f"gradients are averaged {syncs:.3g} times for each optimizer step, for {share:.0%} of the time",
            numbers={"share": share, "syncs": syncs},
            remedy="`with self.trainer.model.no_sync():` around all backwards of a step but the last; or"
            f" automatic optimization with accumulate_grad_batches={round(syncs)}",
            gain=share * (1.0 - 1.0 / syncs),
        )
    size_mb = option(figures.info, "bucket_cap_mb")
    if size_mb is not None and float(size_mb) < _SMALL_BUCKET_MB:
        return Finding(
            cause="small_buckets",
            evidence=f"averaging gradients in buckets of {float(size_mb):g} MiB takes {share:.0%} of the time",
            numbers={"share": share, "bucket_mb": float(size_mb)},
            remedy="leave out bucket_cap_mb, which is 25 by default: few large collectives cost less than many",
            gain=share,
        )
    return _small_units(figures, share)


def _small_units(figures: Figures, share: float) -> Finding | None:
    """The units that `fsdp` and `hsdp` gather separately are small."""
    use, gathers = link_use(figures), figures.totals[min(figures.totals)].collectives.get("all_gather", {})
    calls = gathers.get("calls", 0.0)
    size_mb = gathers.get("sent_mb", 0.0) / max(calls, 1e-12)
    is_sharded = figures.info.strategy.startswith(("fsdp", "hsdp"))
    is_small = calls >= _MANY_CALLS and size_mb < _SMALL_MESSAGE_MB and use.get("use", 0.0) < UNDERUSED
    if not is_sharded or not is_small:
        return None
    return Finding(
        cause="small_units",
        evidence=f"units are gathered {calls:.3g} times a step for {size_mb:.2g} MB each, and collectives that nothing"
        f" hides take {share:.0%} of the time",
        numbers={"share": share, "calls": calls, "mb": size_mb, **use},
        remedy="larger units: `shard_units()` of the module returns those that are gathered as one; or ddp, where the"
        " weights fit",
        gain=share * (1.0 - use.get("use", 0.0)),
    )


def varying_steps(figures: Figures, threshold: float) -> Finding | None:
    """Ranks wait for each other in turn, and no single rank is slow."""
    shares = [figures.share("waiting", rank) for rank in figures.totals]
    share = min(shares)
    if len(shares) < 2 or share < threshold:
        return None
    return Finding(
        cause="varying_steps",
        evidence=f"every rank waits for the others in turn, for at least {share:.0%} of the time",
        numbers={"share": share},
        remedy="make steps alike: batches of one length (LengthBucketing), the same work on all ranks",
        gain=share,
    )


# --- rules about the time between steps: hooks, loggers, saves, validation


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
    line = figures.ranks[outlier.rank].hooks.get(hook)
    place = "" if line is None else f" ({line})"
    return Finding(
        cause="slow_callback",
        evidence=f"{hook}{place} takes {ms(per_step)} a step{whose}, {outlier.value:.0%} of the time",
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
