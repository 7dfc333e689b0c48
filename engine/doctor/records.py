"""The notes of a rank: a line of JSON that says what it is, and one for each interval of optimizer steps.

The file is ``<run>/doctor/rank_<r>.jsonl``; docs/doctor.md has the schema. It is bounded: a rank that has
`MAX_INTERVALS` of them joins neighbours, so that a long run is noted more coarsely, and no second of it is lost.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..phases import PHASES

__all__ = [
    "MAX_INTERVALS",
    "NUM_HOOKS",
    "SCHEMA",
    "Interval",
    "RankInfo",
    "Run",
    "compact",
    "read_run",
    "slowest_hooks",
    "write_rank",
]

SCHEMA = 1
MAX_INTERVALS = 512
"""Lines of a rank at most, beside the first; each has about 1 KB."""
NUM_HOOKS = 8
"""Hooks that a line names at most, the slowest first; the others are added up as "others"."""


@dataclasses.dataclass(kw_only=True)
class RankInfo:
    """Line 1 of a rank: where and how it runs."""

    schema: int = SCHEMA
    rank: int
    world_size: int
    host: str
    device: str = "cpu"
    """Its type: ``"cpu"``, ``"cuda"``, ..."""
    strategy: str = "single"
    layout: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of the mesh by axis: pp, replicate, shard, tp."""
    local_ranks: int = 1
    """Ranks on this host."""
    num_threads: int = 1
    """torch's threads for one operator."""
    num_cpus: float = 1.0
    """CPUs that this process may use, by its affinity and its container's quota."""
    num_workers: int | None = None
    """Worker processes of the training loader; None where it is no DataLoader."""
    pins_memory: bool | None = None
    accumulate_grad_batches: int = 1
    compression: str = "none"
    loggers: list[str] = dataclasses.field(default_factory=list)
    started_at: float = 0.0
    """Seconds since 1970."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class Interval:
    """A further line of a rank: the sums of some optimizer steps that follow each other."""

    step: int
    """The optimizer step at its end."""
    num_steps: int
    wall_s: float
    seconds: dict[str, float]
    """Seconds of each phase; they add up to `wall_s`."""
    is_warmup: bool = False
    """Whether it is of the first steps, in which kernels are chosen and code is compiled: rules leave it out."""
    slowest_step_s: float = 0.0
    by_hook: dict[str, float] = dataclasses.field(default_factory=dict)
    num_saves: int = 0
    num_batches: int = 0
    num_fillers: int = 0
    """Batches that only kept this rank in step with the others."""
    num_samples: int | None = None
    """None where a batch does not show how many it has."""
    cpu_s: float | None = None
    """CPU time of the thread that trains, in forward and backward; from a sample of them."""
    runqueue_s: float | None = None
    """Time there in which it was ready to run, and another one had its CPU; None where the system does not say."""
    padding: float | None = None
    """Share of the tokens that are padding, by an ``attention_mask``, in the batches that were looked at."""
    reads: dict[str, int] = dataclasses.field(default_factory=dict)
    """Reads of the device in one `training_step` that was watched, by ``"item() at file.py:12 in training_step"``."""
    rss_mb: float | None = None
    device_mb: float | None = None
    """Largest memory that torch had on the device."""

    def joined(self, later: "Interval") -> "Interval":
        """Returns both as one."""
        steps = (self.num_steps, later.num_steps)
        return Interval(
            step=later.step,
            num_steps=sum(steps),
            wall_s=self.wall_s + later.wall_s,
            seconds={phase: self.seconds.get(phase, 0.0) + later.seconds.get(phase, 0.0) for phase in PHASES},
            is_warmup=self.is_warmup and later.is_warmup,
            slowest_step_s=max(self.slowest_step_s, later.slowest_step_s),
            by_hook=slowest_hooks(self.by_hook, later.by_hook),
            num_saves=self.num_saves + later.num_saves,
            num_batches=self.num_batches + later.num_batches,
            num_fillers=self.num_fillers + later.num_fillers,
            num_samples=_sum(self.num_samples, later.num_samples),
            cpu_s=_sum(self.cpu_s, later.cpu_s),
            runqueue_s=_sum(self.runqueue_s, later.runqueue_s),
            padding=_mean(self.padding, later.padding),
            reads={**self.reads, **later.reads},
            rss_mb=_largest(self.rss_mb, later.rss_mb),
            device_mb=_largest(self.device_mb, later.device_mb),
        )

    def line(self) -> str:
        """Returns it as JSON, without what is empty; seconds to the microsecond."""
        values = {k: v for k, v in vars(self).items() if v is not None and v != {} and v is not False}
        return json.dumps({"kind": "interval", **_rounded(values)}, separators=(",", ":"))


def slowest_hooks(*by_hook: Mapping[str, float]) -> dict[str, float]:
    """Sums by hook of the `NUM_HOOKS` slowest, and the sum of the others."""
    names = dict.fromkeys(name for part in by_hook for name in part if name != "others")
    sums = {name: sum(part.get(name, 0.0) for part in by_hook) for name in names}
    kept = sorted(sums, key=lambda name: -sums[name])[:NUM_HOOKS]
    others = sum(part.get("others", 0.0) for part in by_hook) + sum(sums[name] for name in sums if name not in kept)
    return {name: sums[name] for name in kept if sums[name] > 0.0} | ({"others": others} if others > 0.0 else {})


def compact(intervals: list[Interval]) -> list[Interval]:
    """Joins each two neighbours; the warm-up stays by itself."""
    warmup = [each for each in intervals if each.is_warmup]
    rest = intervals[len(warmup) :]
    pairs = zip(rest[::2], rest[1::2], strict=False)
    return [*warmup, *(first.joined(second) for first, second in pairs), *(rest[-1:] if len(rest) % 2 else [])]


@dataclasses.dataclass
class Run:
    """All notes of the ranks of a run.

    Args:
        ranks: by rank.
        intervals: of each rank, in order.
    """

    ranks: dict[int, RankInfo]
    intervals: dict[int, list[Interval]]

    @property
    def missing(self) -> list[int]:
        """Ranks that have noted nothing, or whose files are elsewhere."""
        sizes = [info.world_size for info in self.ranks.values()]
        return [rank for rank in range(max(sizes, default=0)) if rank not in self.ranks]


def write_rank(path: str, info: RankInfo, intervals: Iterable[Interval]) -> None:
    """Writes all that a rank has noted, beside `path` and then in its place."""
    beside = f"{path}.new"
    with open(beside, "w") as file:
        file.write(json.dumps({"kind": "rank", **vars(info)}) + "\n")
        file.writelines(f"{interval.line()}\n" for interval in intervals)
    os.replace(beside, path)


def read_run(folder: str) -> Run:
    """Reads what the ranks of a run have noted.

    Args:
        folder: of the run, or the one named ``doctor`` in it.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: a file is of another schema, or is none of these.
    """
    places = [os.path.join(folder, "doctor"), folder]
    for place in places:
        names = sorted(os.listdir(place)) if os.path.isdir(place) else []
        names = [name for name in names if name.startswith("rank_") and name.endswith(".jsonl")]
        if names:
            return _run(_read_rank(os.path.join(place, name)) for name in names)
    raise FileNotFoundError(
        f"there is no doctor/rank_0.jsonl in {folder!r}: a run writes it into its folder of logs with"
        " callbacks=[Doctor()], or --callbacks+=Doctor."
    )


def _run(parts: Iterable[tuple[RankInfo, list[Interval]]]) -> Run:
    by_rank = {info.rank: (info, intervals) for info, intervals in parts}
    ranks = sorted(by_rank)
    return Run({rank: by_rank[rank][0] for rank in ranks}, {rank: by_rank[rank][1] for rank in ranks})


def _read_rank(path: str) -> tuple[RankInfo, list[Interval]]:
    with open(path) as file:
        lines = file.read().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            if number == len(lines) > 1:
                break  # the rank ended while it wrote
            raise ValueError(f"line {number} of {path!r} is no JSON.") from None
    if not records or records[0].get("kind") != "rank":
        raise ValueError(f"{path!r} does not begin with what a rank says of itself.")
    if records[0].get("schema") != SCHEMA:
        raise ValueError(f"{path!r} is of schema {records[0].get('schema')}, and this version reads {SCHEMA}.")
    return _of(RankInfo, records[0]), [_of(Interval, record) for record in records[1:]]


def _of(kind: Any, record: dict[str, Any]) -> Any:
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in record.items() if name in names})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return {key: _rounded(each) for key, each in value.items()} if isinstance(value, dict) else value


def _sum(first: Any, second: Any) -> Any:
    return None if first is None or second is None else first + second


def _present(*values: float | None) -> Sequence[float]:
    return [value for value in values if value is not None]


def _mean(*values: float | None) -> float | None:
    present = _present(*values)
    return sum(present) / len(present) if present else None


def _largest(*values: float | None) -> float | None:
    return max(_present(*values), default=None)
