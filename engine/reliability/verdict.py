"""The verdict on a run that is ended: its culprit, the failure report, and the end of all ranks.

The rank that has recorded the failure gathers the other ranks' positions with their stacks, names the culprit, writes
the report, prints the verdict and publishes it. The culprit is the rank that has ended or not connected; otherwise the
rank that does not answer; otherwise the one with the least progress; otherwise the one that does not wait for others;
otherwise the one that has not called the collective which others wait in.

Each rank looks at its thread once, so that its position and its stack are of the same moment. The stacks of culprits
are printed without the frames of libraries; each other rank has a line. The report has everything.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..environment import shows_all_frames
from .failure import print_rank
from .flight_recorder import late_ranks
from .heartbeat import Heartbeat, describe
from .lost_hosts import HOST_LOST, blame
from .rank_registry import LEFT, RankRegistry, in_words
from .report import Report
from .tracebacks import shorten

__all__ = ["Verdict", "behind"]

_ANSWER_S = 3.0
"""The time in which the ranks must publish their stacks. A rank cannot if Python's lock is held for all this time."""

_MOST_SENTENCES, _MOST_STACKS, _MOST_CALL_LINES, _MOST_PLACES = 2, 2, 10, 8
"""The numbers of culprits in the verdict and of their stacks, of lines of each of these, and of other ranks' lines: a
screen shows all of them together."""


class Verdict:
    """Passes the verdict on one run, as one rank.

    Args:
        heartbeat: the position of this process.
        folder: folder of the failure reports.
        positions: returns the positions of all ranks that are known here, by rank; `Watchdog.positions_of_all`.
    """

    def __init__(self, heartbeat: Heartbeat, folder: str, positions: Callable[..., dict[int, dict[str, Any]]]) -> None:
        self._heartbeat, self._folder, self._positions = heartbeat, folder, positions

    def pass_alone(self, kind: str, message: str, culprits: list[int]) -> None:
        """Writes the report of a rank that the others can't read; see `Watchdog._end`."""
        self._write(kind, message, culprits or [self._heartbeat.rank], self._positions(with_stack=True))

    def pass_on_all(self, peers: RankRegistry, kind: str, message: str, known_culprits: list[int]) -> None:
        """Writes the report, publishes the verdict, and waits until the other ranks have read it.

        Args:
            peers: all ranks.
            kind: kind of the failure.
            message: about it.
            known_culprits: ranks that have ended, are lost or not connected; empty if there are none.
        """
        reports = self._positions(with_stack=True)
        peers.publish("answer", reports[peers.rank])
        present = [
            rank
            for rank in range(peers.world_size)
            if rank not in known_culprits and reports.get(rank, {}).get("phase") != LEFT
        ]
        answers = _gathered(peers, "answer", present)
        reports = {rank: {**reports.get(rank, {}), **answers.get(rank, {})} for rank in {*reports, *answers}}
        unresponsive = [rank for rank in present if rank not in answers]
        culprits = known_culprits or unresponsive or behind({rank: reports[rank] for rank in present})
        silence = ", and it does not answer" if unresponsive and not known_culprits else ""
        text = self._write(kind, message, culprits, reports, silence)
        peers.publish("verdict", {"text": text})
        for rank in filter(peers.is_local, unresponsive):  # it can't read the verdict
            peers.kill(rank)
        with suppress(RuntimeError):  # the rank that hosts the store may have read the verdict and ended
            _gathered(peers, "heard", [rank for rank in answers if rank != peers.rank])

    def _write(
        self, kind: str, message: str, culprits: list[int], reports: dict[int, dict[str, Any]], silence: str = ""
    ) -> str:
        """Writes the failure report; prints and returns the verdict."""
        rank = self._heartbeat.rank
        message = f"{message}{_where(kind, reports, culprits)}{silence}"
        failure = {"rank": culprits[0], "kind": kind, "by": rank, "message": message}
        report = Report(self._folder, failure, reports, self._heartbeat.resume_from, run_id=self._heartbeat.run_id)
        collectives = "".join(f" Collectives: {sentence}." for sentence in report.collectives[:_MOST_SENTENCES])
        text = f"{kind}, {blame(failure)}.{collectives} The failure report, with all frames: {report.write()}"
        print_rank(rank, "\n".join([text, *_stacks(reports, culprits), *_lines(reports, culprits)]))
        return text


def _where(kind: str, reports: dict[int, dict[str, Any]], ranks: list[int]) -> str:
    if kind == HOST_LOST:  # their last known positions are not their present ones
        return ""
    more = f"; so may {in_words(ranks[_MOST_SENTENCES:])}" if len(ranks) > _MOST_SENTENCES else ""
    return "".join(f"; rank {rank} {describe(reports.get(rank))}" for rank in ranks[:_MOST_SENTENCES]) + more


def _stacks(reports: dict[int, dict[str, Any]], culprits: list[int]) -> list[str]:
    """Returns the lines of the culprits' stacks, without frames of libraries; those that are equal once."""
    by_stack: dict[str, list[int]] = {}
    for rank in culprits:
        if stack := reports.get(rank, {}).get("stack"):
            stack = stack if shows_all_frames() else shorten(stack, keeps_innermost=False)
            by_stack.setdefault(stack.rstrip(), []).append(rank)
    lines = []
    for stack, ranks in list(by_stack.items())[:_MOST_STACKS]:
        calls = stack.splitlines()
        if not shows_all_frames() and len(calls) > _MOST_CALL_LINES:  # the innermost calls are at the end
            calls = [f"  ... {len(calls) - _MOST_CALL_LINES} lines", *calls[-_MOST_CALL_LINES:]]
        lines += [f"The stack of {in_words(ranks)}:", *calls]
    return lines


def _lines(reports: dict[int, dict[str, Any]], culprits: list[int]) -> list[str]:
    """Returns a line for each rank that is no culprit; one for all that are at the same place."""
    by_place: dict[str, list[int]] = {}
    for rank in sorted(reports.keys() - set(culprits)):
        if reports[rank]["phase"] != LEFT:
            by_place.setdefault(describe(reports[rank]), []).append(rank)
    lines = [f"{in_words(ranks)}: {place}" for place, ranks in by_place.items()]
    more = len(lines) - _MOST_PLACES
    return lines if more <= 0 else [*lines[:_MOST_PLACES], f"... {more} more places of ranks are in the report"]


def _gathered(peers: RankRegistry, kind: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """Returns the reports of those of `ranks` that publish one in time."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        answers = peers.read(kind, ranks)
        if len(answers) == len(ranks) or time.monotonic() > deadline:
            return answers
        time.sleep(0.1)


def behind(ranks: dict[int, dict[str, Any]]) -> list[int]:
    """Returns the ranks with the least progress; of these the ones that do not wait, or are late, if there are some."""
    progress = {rank: (r["batch"], r["evaluated"], r["step"]) for rank, r in ranks.items()}
    last = [rank for rank in ranks if progress[rank] == min(progress.values())]
    busy = [rank for rank in last if ranks[rank]["pending"] is None]
    late = late_ranks({rank: ranks[rank].get("collectives") for rank in last})
    return busy or late or last
