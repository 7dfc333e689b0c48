"""The records of a rank: a line of JSON about the rank, and one line for each interval of optimizer steps.

The file is ``<run>/doctor/rank_<r>.jsonl``; docs/reference/doctor.md shows its fields. Its size is limited: at
`MAX_INTERVALS` intervals, neighbours are merged, so that a long run has longer intervals and no time is lost.
"""

import dataclasses
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from types import UnionType
from typing import Annotated, Any, TextIO, Union, get_args, get_origin, get_type_hints

from polyphase.engine.foreign import Range, for_terminal, open_new, problem, read_plain
from polyphase.engine.phases import PHASES

from .interval import SCHEMA, Interval, RankInfo

__all__ = [
    "MAX_INTERVALS",
    "Notes",
    "Run",
    "compact",
    "newest",
    "read_run",
    "write_rank",
]

MAX_INTERVALS = 512
"""Largest number of lines of a rank, without the first; each has about 1 KB."""

# Others may have written the file: neither its size nor a number in it makes the reader take more memory.
_MOST_BYTES = 1 << 23
_MOST_RANKS = 1 << 20
_MOST = 1e18
"""Larger numbers in a file are no measurements."""


def _has_only_phases(seconds: dict[str, Any]) -> str | None:
    return None if seconds.keys() <= {*PHASES} else "has an unknown phase"


def _is_measured(number: float) -> str | None:
    """A norm or a loss may be infinite, or no number."""
    return None if abs(number) <= _MOST or not math.isfinite(number) else f"is {number!r}"


_SECONDS = Annotated[int | float, Range(-_MOST, _MOST)]
_NUMBER = Annotated[int | float, _is_measured]
_OF_RANK: dict[str, Any] = {
    "rank": Annotated[int, Range(0, _MOST_RANKS)],
    "world_size": Annotated[int, Range(1, _MOST_RANKS)],
    "local_ranks": Annotated[int, Range(1, _MOST_RANKS)],
}
_OF_INTERVAL: dict[str, Any] = {
    "num_steps": Annotated[int, Range(0, _MOST)],
    "wall_s": Annotated[int | float, Range(1e-9, _MOST)],
    "seconds": Annotated[dict[str, _SECONDS], _has_only_phases],
}


def compact(intervals: list[Interval], most: int) -> list[Interval]:
    """Merges pairs of neighbouring intervals until there are at most `most`; the warm-up stays separate."""
    warmup = [interval for interval in intervals if interval.is_warmup]
    rest = intervals[len(warmup) :]
    while len(warmup) + len(rest) > max(most, len(warmup) + 1):
        last = rest[-1:] if len(rest) % 2 else []
        rest = [*(first.joined(second) for first, second in zip(rest[::2], rest[1::2], strict=False)), *last]
    return [*warmup, *rest]


@dataclasses.dataclass
class Run:
    """All records of a run.

    Args:
        ranks: information about each rank.
        intervals: the intervals of each rank, in order.
    """

    ranks: dict[int, RankInfo]
    intervals: dict[int, list[Interval]]

    @property
    def missing(self) -> list[int]:
        """Ranks without records here; their files may be on other hosts."""
        sizes = [info.world_size for info in self.ranks.values()]
        return [rank for rank in range(max(sizes, default=0)) if rank not in self.ranks]


def write_rank(path: str, info: RankInfo, intervals: Iterable[Interval]) -> None:
    """Writes all records of a rank to a temporary file, and renames it to `path`."""
    beside = f"{path}.new"
    with open_new(beside) as file:
        file.write(json.dumps({"kind": "rank", **vars(info)}) + "\n")
        file.writelines(f"{interval.line()}\n" for interval in intervals)
    os.replace(beside, path)


class Notes:
    """Appends a line for each interval, and merges neighbouring intervals when there are too many.

    Args:
        folder: folder of the file ``rank_<r>.jsonl``; the file of an earlier run is renamed to
            ``rank_<r>.jsonl.before``. None: nothing is written.
        info: information about this rank.
    """

    def __init__(self, folder: str | None, info: RankInfo) -> None:
        self.info = info
        self.intervals: list[Interval] = []
        self._path: str | None = None
        self._file: TextIO | None = None
        if folder is not None:
            self._path = os.path.join(folder, f"rank_{self.info.rank}.jsonl")
            with self._writing():
                os.makedirs(folder, exist_ok=True)
                with suppress(FileNotFoundError):
                    os.replace(self._path, f"{self._path}.before")
                self._write_all()

    def add(self, interval: Interval) -> None:
        """Adds an interval."""
        self.intervals.append(interval)
        is_compact = len(self.intervals) > MAX_INTERVALS
        if is_compact:
            self.intervals = compact(self.intervals, MAX_INTERVALS)
        with self._writing():
            if is_compact:
                self._write_all()
            elif self._file is not None:
                self._file.write(f"{interval.line()}\n")
                self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Ends the notes in the file with a warning, and not the run, if the disk is full."""
        try:
            yield
        except OSError as error:
            warnings.warn(
                f"{self._path} is not written any more: {error.strerror or error}. Training continues, and the doctor's"
                " notes stay in memory. Make room for the next run, or choose another default_root_dir.",
                stacklevel=2,
            )
            file, self._file, self._path = self._file, None, None
            if file is not None:
                with suppress(OSError):  # it tries once more to write
                    file.close()

    def _write_all(self) -> None:
        if self._path is not None:
            self.close()
            write_rank(self._path, self.info, self.intervals)
            self._file = open(self._path, "a")  # noqa: SIM115  # stays open until `close`


def read_run(folder: str) -> Run:
    """Reads the records of a run.

    Args:
        folder: folder of the run, or its subfolder ``doctor``.

    Raises:
        FileNotFoundError: there are no records.
        ValueError: a file has another schema or another format.
    """
    folders = [os.path.join(folder, "doctor"), folder]
    for path in folders:
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        names = [name for name in names if name.startswith("rank_") and name.endswith(".jsonl")]
        names = [name for name in names if os.path.exists(os.path.join(path, name))]  # no link to nothing
        if names:
            return _run(_read_rank(os.path.join(path, name)) for name in names)
    raise FileNotFoundError(
        f"there is no doctor/rank_0.jsonl in {folder!r}: a run writes it into its folder of logs with"
        " callbacks=[Doctor()], or --callbacks+=Doctor."
    )


def newest(folder: str) -> str:
    """Returns the folder of the latest run in or below `folder`; `folder` itself if there is none."""
    run_folders = []
    for path, folders, files in os.walk(folder):
        if "rank_0.jsonl" in files and os.path.exists(os.path.join(path, "rank_0.jsonl")):  # no link to nothing
            run_folders.append(path)
        depth = os.path.relpath(path, folder).count(os.sep)
        folders[:] = [] if depth > 2 else sorted(folders)
    return max(run_folders, key=lambda path: os.path.getmtime(os.path.join(path, "rank_0.jsonl")), default=folder)


def _run(parts: Iterable[tuple[RankInfo, list[Interval]]]) -> Run:
    by_rank = {info.rank: (info, intervals) for info, intervals in parts}
    ranks = sorted(by_rank)
    return Run({rank: by_rank[rank][0] for rank in ranks}, {rank: by_rank[rank][1] for rank in ranks})


def _read_rank(path: str) -> tuple[RankInfo, list[Interval]]:
    lines = read_plain(path, _MOST_BYTES).decode(errors="replace").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            if number == len(lines) > 1:
                break  # the rank ended while it wrote
            raise ValueError(f"line {number} of {path!r} is no JSON.") from None
    if not records or type(records[0]) is not dict or records[0].get("kind") != "rank":
        raise ValueError(f"{path!r} does not begin with what a rank says of itself.")
    if records[0].get("schema") != SCHEMA:
        raise ValueError(f"{path!r} is of schema {records[0].get('schema')!r:.50}, and this version reads {SCHEMA}.")
    return _of(RankInfo, records[0], path, 1), [_of(Interval, r, path, n) for n, r in enumerate(records[1:], start=2)]


def _of(kind: Any, record: Any, path: str, number: int) -> Any:
    """Returns a line of a file as an object, whose fields have their types and ranges."""
    wrong = problem(record, dict[str, Any], "it")
    fields = {} if wrong else {field.name: field for field in dataclasses.fields(kind) if field.name in record}
    types = _types(kind)
    for name in fields:
        wrong = wrong or problem(record[name], types[name], name)
    missing = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]
    wrong = wrong or next((f"it has no {name}" for name in missing if name not in record), None)
    if wrong:
        raise ValueError(f"line {number} of {path!r} is no record of the doctor's: {wrong}.")
    return kind(**{name: _shown(record[name]) for name in fields})


def _shown(value: Any) -> Any:
    """Returns a nested value whose texts are no commands for a terminal."""
    if isinstance(value, dict):
        return {for_terminal(key): _shown(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return for_terminal(value) if isinstance(value, str) else value


@cache
def _types(kind: Any) -> dict[str, Any]:
    """Returns the type of each field: a number may be whole, is finite, and is not negative where it counts."""
    types = {name: _with_ranges(hint) for name, hint in get_type_hints(kind).items()}
    own = _OF_RANK if kind is RankInfo else _OF_INTERVAL
    return {**types, **own}


def _with_ranges(hint: Any) -> Any:
    if hint is float:
        return _NUMBER
    if hint is int:
        return Annotated[int, Range(-_MOST, _MOST)]
    parts = tuple(map(_with_ranges, get_args(hint)))
    origin = Union if get_origin(hint) is UnionType else get_origin(hint)
    return origin[parts] if parts else hint
