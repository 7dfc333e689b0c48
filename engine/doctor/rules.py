"""The rules of the verdict: a table of causes with their thresholds, and one pure function for each."""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median

from .figures import Figures, Outlier

__all__ = ["MIN_STEPS", "RULES", "Finding", "Rule"]

MIN_STEPS = 10
"""Optimizer steps below which nothing is judged."""

_RATIO = 1.2
"""How many times as long a rank must compute as the others to be called slow."""
_SAVERS = ("ModelCheckpoint", "Snapshot", "OnExceptionCheckpoint")
"""Callbacks whose time, beside that of saving itself, is the checkpoints'."""
_MIN_SAVES = 3
"""Saves below which nothing is said of them: each run ends with one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause of lost time."""

    cause: str
    """A name of `RULES`, or of a more precise one of its kind."""
    ranks: tuple[int, ...] = ()
    """The ranks at which it lies; empty where it is all of them alike."""
    host: str | None = None
    """The host of the first of them."""
    evidence: str
    numbers: Mapping[str, float]
    remedy: str
    gain: float | None = None
    """The part, 0 to 1, of the time that goes if the cause goes: at most that, since others may hide behind it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A row of the table."""

    cause: str
    threshold: float
    of: str
    """The quantity that is compared with the threshold."""
    find: Callable[[Figures, float], Finding | None]


def _one_or_all(figures: Figures, phase: str, threshold: float) -> tuple[Outlier, bool] | None:
    """Whether a phase takes more than `threshold` of one rank's time beyond the others', or of all ranks' time."""
    found = figures.outlier(lambda rank: figures.share(phase, rank))
    if found.value < threshold:
        return None
    is_one = len(figures.totals) > 1 and found.excess >= max(threshold, found.value / 2)
    return (found, is_one) if is_one or found.others >= threshold or len(figures.totals) == 1 else None


def _at(figures: Figures, rank: int, is_one: bool) -> dict:
    return {"ranks": (rank,), "host": figures.ranks[rank].host} if is_one else {}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _who(figures: Figures, rank: int, is_one: bool) -> str:
    if len(figures.totals) == 1:
        return "the run"
    return f"rank {rank} ({figures.ranks[rank].host})" if is_one else "every rank"


def slow_loader(figures: Figures, threshold: float) -> Finding | None:
    """The data loader of one rank, or of all, is late."""
    found = _one_or_all(figures, "data_wait", threshold)
    if found is None:
        return None
    outlier, is_one = found
    here = figures.step_seconds("data_wait", outlier.rank)
    evidence = f"{_who(figures, outlier.rank, is_one)} waits {_ms(here)} of each step for its data loader"
    if is_one:
        evidence += f", the others {_ms(outlier.others * figures.step_s)}"
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
    numbers = {"share": outlier.value, "others": outlier.others, "step_ms": 1e3 * here}
    return Finding(
        cause="slow_loader", evidence=evidence, numbers=numbers, remedy=remedy, gain=gain,
        **_at(figures, outlier.rank, is_one),
    )  # fmt: skip


def slow_copy(figures: Figures, threshold: float) -> Finding | None:
    """Batches go to the device slowly."""
    found = _one_or_all(figures, "copy", threshold)
    if found is None:
        return None
    outlier, is_one = found
    info = figures.ranks[outlier.rank]
    remedy = "a lighter `on_after_batch_transfer`; move what it does into the data loader's workers"
    if info.device != "cpu" and not info.pins_memory:
        remedy = "DataLoader(pin_memory=True)"
    who = _who(figures, outlier.rank, is_one)
    evidence = f"{who} spends {outlier.value:.0%} of the time on copying batches to the device"
    numbers = {"share": outlier.value, "others": outlier.others}
    at = _at(figures, outlier.rank, is_one)
    return Finding(cause="slow_copy", evidence=evidence, numbers=numbers, remedy=remedy, gain=outlier.value, **at)


def slow_rank(figures: Figures, threshold: float) -> Finding | None:
    """One rank computes longer than the others, by more samples, for want of a CPU, or for itself."""
    if len(figures.totals) < 2 or figures.info.layout.get("pp", 1) > 1:
        return None
    found = figures.outlier(lambda rank: figures.step_seconds("compute", rank))
    share = found.excess / max(figures.step_s, 1e-12)
    if share < threshold or found.value < _RATIO * found.others:
        return None
    host = figures.ranks[found.rank].host
    evidence = f"rank {found.rank} ({host}) computes for {_ms(found.value)} a step, the others for {_ms(found.others)}"
    cause, why, remedy = _why_slow(figures, found)
    numbers = {"step_ms": 1e3 * found.value, "others_ms": 1e3 * found.others, "share": share}
    return Finding(
        cause=cause, ranks=(found.rank,), host=host, evidence=f"{evidence}; {why}", numbers=numbers, remedy=remedy,
        gain=share,
    )  # fmt: skip


def _why_slow(figures: Figures, found: Outlier) -> tuple[str, str, str]:
    """Returns the cause's name, what shows it, and what mends it."""
    rank = found.rank
    samples = figures.outlier(lambda each: figures.totals[each].num_samples or 0)
    if samples.rank == rank and samples.others and samples.excess / samples.others * found.others > found.excess / 2:
        why = f"it has {samples.value / samples.others:.2g} times as many samples"
        return "uneven_data", why, "deal the samples evenly: leave the distributed sampler to the engine"
    queued = _excess_per_step(figures, rank, lambda each: figures.totals[each].runqueue_s)
    busy = _excess_per_step(figures, rank, lambda each: figures.totals[each].cpu_s)
    if queued is not None and queued > found.excess / 2:
        why = f"for {_ms(queued)} more than the others it is ready, and other processes have its CPU"
        remedy = f"end what else computes on {figures.ranks[rank].host}, or give each rank CPUs of its own (taskset)"
        return "busy_neighbour", why, remedy
    if busy is not None and busy < found.excess / 2 and figures.ranks[rank].device == "cpu":
        why = f"its thread computes for {_ms(max(busy, 0.0))} more than the others, and else waits for something"
        return "slow_rank", why, "look for reads of files, locks and sleeps in `training_step` on this rank"
    remedy = f"compare clock, temperature and other users of the device on {figures.ranks[rank].host}; or leave it out"
    return "slow_rank", "with as many samples", remedy


def _excess_per_step(figures: Figures, rank: int, seconds: Callable[[int], float | None]) -> float | None:
    """Returns by how many seconds a step `rank` has more than the median of the others; None if not known."""
    if any(seconds(each) is None for each in figures.totals):
        return None
    per_step = {each: (seconds(each) or 0.0) / max(figures.totals[each].num_steps, 1) for each in figures.totals}
    return per_step[rank] - median(value for each, value in per_step.items() if each != rank)


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
    if share < threshold or means[slowest] < _RATIO * mean:
        return None
    ranks = tuple(rank for rank in figures.totals if rank // per_stage == slowest)
    each = ", ".join(_ms(means[stage]) for stage in range(num_stages))
    return Finding(
        cause="unequal_stages",
        ranks=ranks,
        host=figures.ranks[ranks[0]].host,
        evidence=f"stage {slowest} computes for {_ms(means[slowest])} a step, the mean is {_ms(mean)} ({each})",
        numbers={"step_ms": 1e3 * means[slowest], "mean_ms": 1e3 * mean, "stage": slowest, "share": share},
        remedy=f"move layers away from stage {slowest}: `pipeline_stages()` of the module says where it is cut",
        gain=share,
    )


def slow_callback(figures: Figures, threshold: float) -> Finding | None:
    """Hooks of one class take long."""
    by_class = {rank: _by_class(figures.totals[rank].by_hook) for rank in figures.totals}
    names = {name for classes in by_class.values() for name in classes} - {"others", *_SAVERS}
    if not names:
        return None

    def share(name: str, rank: int) -> float:
        # On accelerators hooks may be hidden behind what the device computes.
        return min(by_class[rank][name] / max(figures.totals[rank].wall_s, 1e-12), figures.share("callbacks", rank))

    name = max(names, key=lambda each: max(share(each, rank) for rank in by_class))
    found = figures.outlier(lambda rank: share(name, rank))
    if found.value < threshold:
        return None
    is_one = len(figures.totals) > 1 and found.excess > found.value / 2
    hooks = figures.totals[found.rank].by_hook
    hook = max((each for each in hooks if each.startswith(f"{name}.")), key=lambda each: hooks[each])
    per_step = hooks[hook] / max(figures.totals[found.rank].num_steps, 1)
    who = "" if len(figures.totals) == 1 else f" on {_who(figures, found.rank, is_one)}"
    return Finding(
        cause="slow_callback",
        evidence=f"{hook} takes {_ms(per_step)} a step{who}, {found.value:.0%} of the time",
        numbers={"share": found.value, "others": found.others, "step_ms": 1e3 * per_step},
        remedy=f"call {name} less often, or have it do its work in a thread of its own",
        gain=found.value,
        **_at(figures, found.rank, is_one),
    )


def _by_class(by_hook: Mapping[str, float]) -> dict[str, float]:
    classes: dict[str, float] = defaultdict(float)
    for hook, seconds in by_hook.items():
        classes[hook.rpartition(".")[0] or hook] += seconds
    return classes


def slow_logging(figures: Figures, threshold: float) -> Finding | None:
    """The loggers take long."""
    found = figures.outlier(lambda rank: figures.share("logging", rank))
    if found.value < threshold:
        return None
    loggers = " and ".join(figures.ranks[found.rank].loggers) or "the loggers"
    return Finding(
        cause="slow_logging",
        evidence=f"rank {found.rank} spends {found.value:.0%} of the time in {loggers}",
        numbers={"share": found.value, "others": found.others},
        remedy="log_every_n_steps=50 or more, or a logger that writes in the background",
        gain=found.value,
        **_at(figures, found.rank, len(figures.totals) > 1 and found.excess > found.value / 2),
    )


def checkpoint_stall(figures: Figures, threshold: float) -> Finding | None:
    """Training stands still while checkpoints are written."""

    def seconds(rank: int) -> float:
        classes = _by_class(figures.totals[rank].by_hook)
        return figures.totals[rank].seconds.get("checkpoint", 0.0) + sum(classes[name] for name in _SAVERS)

    found = figures.outlier(lambda rank: seconds(rank) / max(figures.totals[rank].wall_s, 1e-12))
    total = figures.totals[found.rank]
    if found.value < threshold or total.num_saves < _MIN_SAVES:
        return None
    each_s = seconds(found.rank) / total.num_saves
    return Finding(
        cause="checkpoint_stall",
        evidence=f"{total.num_saves} saves stop training for {each_s:.3g} s each, {found.value:.0%} of the time",
        numbers={"share": found.value, "num_saves": total.num_saves, "each_s": each_s},
        remedy="callbacks=[Snapshot()], which writes in the background; or save less often, or on a faster disk",
        gain=found.value,
        **_at(figures, found.rank, len(figures.totals) > 1 and found.excess > found.value / 2),
    )


def exposed_communication(figures: Figures, threshold: float) -> Finding | None:
    """Collectives are not hidden behind computing."""
    if len(figures.totals) < 2:
        return None
    shares = [figures.share("communication", rank) for rank in figures.totals]
    share = sum(shares) / len(shares)
    if share < threshold:
        return None
    info = figures.info
    remedy = {
        "ddp": "compression='bf16' or 'auto' (`polyphase wire` measures which one pays)",
        "zero1": "compression='bf16' or 'auto' (`polyphase wire` measures which one pays)",
        "fsdp": "precision='bf16-mixed', which gathers weights in 16 bits; or hsdp, which gathers within a node",
        "hsdp": "precision='bf16-mixed', which gathers weights in 16 bits; or compression='bf16'",
        "tp": "fewer ranks along tp, and fsdp or ddp for the others",
        "pp": "more micro-batches: pp:microbatches=...",
        "local_sgd": "a larger local_sgd:every",
        "diloco": "a larger diloco:every",
        "ps": "compression, or a larger ps:staleness",
    }.get(info.strategy.partition(":")[0].partition("+")[0], "a larger batch")
    if info.strategy.startswith(("ddp", "zero1", "fsdp", "hsdp")):
        remedy += f"; or accumulate_grad_batches={2 * info.accumulate_grad_batches}, which sends half as often"
    return Finding(
        cause="exposed_communication",
        evidence=f"collectives that nothing hides take {share:.0%} of the time, without waiting for slower ranks",
        numbers={"share": share},
        remedy=remedy,
        gain=share,
    )


def device_reads(figures: Figures, threshold: float) -> Finding | None:
    """`training_step` reads from the device, and so waits for it."""
    counts = {rank: sum(total.reads.values()) for rank, total in figures.totals.items()}
    rank = max(counts, key=lambda each: counts[each])
    if counts[rank] < threshold or figures.ranks[rank].device == "cpu":
        return None
    reads = figures.totals[rank].reads
    worst = max(reads, key=lambda each: reads[each])
    return Finding(
        cause="device_reads",
        evidence=f"training_step reads from the device {counts[rank]} times: {worst}",
        numbers={"reads": counts[rank]},
        remedy="keep it a tensor (`detach()`), and hand that to self.log, which reads when somebody looks",
    )


def thread_oversubscription(figures: Figures, threshold: float) -> Finding | None:
    """The ranks of a host have more threads than it has CPUs, and wait for these."""
    info = figures.info
    wanted = info.num_threads * info.local_ranks
    queued = [(t.runqueue_s or 0.0) / max(t.wall_s, 1e-12) for t in figures.totals.values()]
    share = sum(queued) / len(queued)
    if info.device != "cpu" or info.num_threads == 1 or wanted <= info.num_cpus or share < threshold:
        return None
    fitting = max(1, int(info.num_cpus / max(info.local_ranks, 1)))
    return Finding(
        cause="thread_oversubscription",
        host=info.host,
        evidence=f"{info.local_ranks} ranks of {info.num_threads} threads share {info.num_cpus:g} CPUs, and have none"
        f" for {share:.0%} of the time",
        numbers={"threads": wanted, "cpus": info.num_cpus, "share": share},
        remedy=f"OMP_NUM_THREADS={fitting}",
        gain=share,
    )


def padding(figures: Figures, threshold: float) -> Finding | None:
    """Batches are padded much."""
    known = [total.padding for total in figures.totals.values() if total.padding is not None]
    share = sum(known) / len(known) if known else 0.0
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
    found = figures.outlier(lambda r: figures.totals[r].num_fillers / max(figures.totals[r].num_batches, 1))
    if found.value < threshold:
        return None
    return Finding(
        cause="uneven_data",
        evidence=f"{found.value:.0%} of the batches of rank {found.rank} only keep it in step with the others",
        numbers={"share": found.value},
        remedy="split the data evenly over the ranks; or uneven='drop', which ends the epoch with the shortest",
        gain=found.value,
        **_at(figures, found.rank, True),
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


def varying_steps(figures: Figures, threshold: float) -> Finding | None:
    """Ranks wait for each other in turn, and none of them is slow by itself."""
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


RULES = (
    Rule(cause="slow_loader", threshold=0.10, find=slow_loader,
         of="share of the time in data wait: of one rank beyond the others, or of all"),
    Rule(cause="slow_copy", threshold=0.10, find=slow_copy, of="share of the time in copies to the device"),
    Rule(cause="slow_rank", threshold=0.15, find=slow_rank,
         of="share of a step that one rank computes longer than the median of the others, and 1.2 times as long;"
            " called uneven_data or busy_neighbour where samples or the run queue explain it"),
    Rule(cause="unequal_stages", threshold=0.10, find=unequal_stages,
         of="share of a step that the slowest pipeline stage computes longer than the mean, and 1.2 times as long"),
    Rule(cause="slow_callback", threshold=0.05, find=slow_callback, of="share of the time in one class's hooks"),
    Rule(cause="slow_logging", threshold=0.05, find=slow_logging, of="share of the time in loggers"),
    Rule(cause="checkpoint_stall", threshold=0.05, find=checkpoint_stall, of="share of the time in saves"),
    Rule(cause="exposed_communication", threshold=0.15, find=exposed_communication,
         of="share of the time in exposed communication, mean over ranks"),
    Rule(cause="device_reads", threshold=1, find=device_reads,
         of="reads of an accelerator in the `training_step` that was watched"),
    Rule(cause="thread_oversubscription", threshold=0.10, find=thread_oversubscription,
         of="share of the time without a CPU, where threads outnumber CPUs"),
    Rule(cause="padding", threshold=0.20, find=padding, of="share of padding among the tokens"),
    Rule(cause="uneven_data", threshold=0.05, find=uneven_data, of="share of filler batches on a rank"),
    Rule(cause="slow_validation", threshold=0.30, find=slow_validation, of="share of the time in validation"),
    Rule(cause="varying_steps", threshold=0.15, find=varying_steps,
         of="share of the time in which even the rank that waits least waits for the others"),
)  # fmt: skip
"""All causes; docs/doctor.md has the same table."""
