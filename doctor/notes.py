"""The file to which a rank writes its intervals."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TextIO

from lightning.pytorch.loggers import TensorBoardLogger

from polyphase.engine.phases import PHASES

from .figures import Figures
from .interval import Interval, RankInfo
from .records import MAX_INTERVALS, Run, compact, write_rank
from .verdict import judge

__all__ = ["Boards", "Notes"]


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


# --- writes `Doctor`'s per-rank shares, memory, rates and verdict to TensorBoard
# Rank 0 uses the user's own `TensorBoardLogger`. Its writer supports what `log_metrics` does not: a layout of charts
# (the tab "Custom Scalars") and texts.


_NUM_RANKS = 16
"""Number of ranks with their own curves (the first ones); `polyphase doctor` shows all ranks."""


class Boards:
    """The TensorBoards of a run, on rank 0.

    Args:
        loggers: the trainer's loggers.
        world_size: number of ranks.
    """

    def __init__(self, loggers: Sequence[Any], world_size: int) -> None:
        self._boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._num_ranks = min(world_size, _NUM_RANKS) if world_size > 1 else 0
        self._has_layout = False

    def shares(self, by_rank: Sequence[Mapping[str, float]], step: int) -> None:
        """Writes the shares of an interval.

        Args:
            by_rank: shares of each rank by phase.
            step: the optimizer step at the end of the interval.
        """
        self._lay_out()
        shares = {
            f"doctor/rank_{rank}/{phase}": share
            for rank, phases in enumerate(by_rank[: self._num_ranks])
            for phase, share in phases.items()
        }
        if shares:
            for board in self._boards:
                board.log_metrics(shares, step=step)

    def verdict(self, run: Run, step: int) -> None:
        """Writes the verdict, and at each interval the memory of each rank and the rates of its device."""
        self._lay_out()
        text = "\n".join(_markdown(run))
        for board in self._boards:
            for rank in sorted(run.intervals)[: max(self._num_ranks, 1)]:
                for interval in run.intervals[rank]:
                    memory = {"rss_mb": interval.rss_mb, "device_mb": interval.device_mb}
                    numbers = {f"doctor/{name}/rank_{rank}": mb for name, mb in memory.items() if mb is not None}
                    rates = Figures({rank: run.ranks[rank]}, {rank: interval}).rates(rank) if interval.num_steps else {}
                    numbers |= {f"doctor/{name}/rank_{rank}": rate for name, rate in rates.items()}
                    board.log_metrics(numbers, step=interval.step)
            board.experiment.add_text("doctor/verdict", text, global_step=step)

    def _lay_out(self) -> None:
        if self._has_layout:
            return
        self._has_layout = True
        charts = {"shares of the time, mean over ranks": [f"doctor/{phase}" for phase in PHASES]}
        for rank in range(self._num_ranks):
            charts[f"shares of the time, rank {rank}"] = [f"doctor/rank_{rank}/{phase}" for phase in PHASES]
        charts["share of the peak FLOP/s, by rank (MFU)"] = ["doctor/mfu/rank_[0-9]+"]
        charts["samples a second, by rank"] = ["doctor/samples_per_s/rank_[0-9]+"]
        charts["memory of the ranks, MB"] = ["doctor/rss_mb/rank_[0-9]+", "doctor/device_mb/rank_[0-9]+"]
        layout = {"Doctor": {name: ["Multiline", _patterns(tags)] for name, tags in charts.items()}}
        for board in self._boards:
            board.experiment.add_custom_scalars(layout)


def _patterns(tags: Sequence[str]) -> list[str]:
    # TensorBoard treats tags as regular expressions: without anchors, doctor/copy would match doctor/copy_of.
    return [f"^{tag}$" for tag in tags]


def _markdown(run: Run) -> list[str]:
    verdict = judge(run)
    lines = [verdict.lines()[0].removeprefix("doctor: "), ""]
    lines += [f"*{caveat}*" for caveat in verdict.caveats]
    for number, finding in enumerate(verdict.findings, start=1):
        gain = "" if finding.gain is None else f" (up to {finding.gain:.0%} less time)"
        lines += [f"{number}. **{finding.cause}**{gain}: {finding.evidence}", f"    - remedy: {finding.remedy}"]
    return lines if verdict.findings or verdict.caveats else [*lines, "nothing stands out"]
