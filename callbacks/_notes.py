"""The file to which a rank writes its intervals."""

import os
from contextlib import suppress
from typing import TextIO

from polyphase.engine.doctor import MAX_INTERVALS, Interval, RankInfo, compact, write_rank

__all__ = ["Notes"]


class Notes:
    """Appends a line for each interval, and merges neighbouring intervals when there are too many.

    Args:
        folder: folder of the file ``rank_<r>.jsonl``; the file of an earlier run is renamed to
            ``rank_<r>.jsonl.before``. None: nothing is written before `open`.
        info: information about this rank.
    """

    def __init__(self, folder: str | None, info: RankInfo) -> None:
        self.info = info
        self.intervals: list[Interval] = []
        self._path: str | None = None
        self._file: TextIO | None = None
        self.open(folder)

    @property
    def has_file(self) -> bool:
        """Whether the intervals are written to a file."""
        return self._path is not None

    def open(self, folder: str | None) -> None:
        """Opens the file in `folder` and writes all intervals so far; later ones follow. Does nothing for None."""
        if folder is not None:
            self._path = os.path.join(folder, f"rank_{self.info.rank}.jsonl")
            os.makedirs(folder, exist_ok=True)
            with suppress(FileNotFoundError):
                os.replace(self._path, f"{self._path}.before")
            self._write_all()

    def add(self, interval: Interval) -> None:
        """Adds an interval."""
        self.intervals.append(interval)
        if len(self.intervals) > MAX_INTERVALS:
            self.intervals = compact(self.intervals)
            self._write_all()
        elif self._file is not None:
            self._file.write(f"{interval.line()}\n")
            self._file.flush()

    def write(self, intervals: list[Interval]) -> None:
        """Replaces the content of the file by `intervals`, and closes it."""
        self.intervals = intervals
        self._write_all()
        self.close()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_all(self) -> None:
        if self._path is not None:
            self.close()
            write_rank(self._path, self.info, self.intervals)
            self._file = open(self._path, "a")  # noqa: SIM115  # stays open until `close`
