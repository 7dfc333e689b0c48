"""The verdict on a run that is ended: its culprit, the failure report, and the end of all ranks.

The rank that has recorded the failure gathers the other ranks' stacks, names the culprit, writes the report and
publishes the verdict. The culprit is the rank that has ended or not connected; otherwise the rank that does not answer;
otherwise the one with the least progress; otherwise the one that does not wait for others.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .failure import print_rank
from .heartbeat import Heartbeat, describe
from .lost_hosts import HOST_LOST, blame
from .rank_registry import LEFT, RankRegistry
from .report import Report

__all__ = ["Verdict", "behind"]

_ANSWER_S = 3.0
"""The time in which the ranks must publish their stacks. A rank cannot if Python's lock is held for all this time."""


class Verdict:
    """Passes the verdict on one run, as one rank.

    Args:
        heartbeat: the position of this process.
        folder: folder of the failure reports.
        positions: returns the positions of all ranks that are known here, by rank.
    """

    def __init__(self, heartbeat: Heartbeat, folder: str, positions: Callable[[], dict[int, dict[str, Any]]]) -> None:
        self._heartbeat, self._folder, self._positions = heartbeat, folder, positions

    def print_stack(self) -> None:
        """Prints the position and the stack of this rank."""
        report = self._heartbeat.report(with_stack=True)
        print_rank(self._heartbeat.rank, f"{describe(report)}:\n{report['stack']}")

    def publish_stack(self, peers: RankRegistry) -> None:
        """Prints the stack of this rank, and publishes it for the rank that passes the verdict."""
        self.print_stack()
        peers.publish("answer", self._heartbeat.report(with_stack=True))

    def pass_alone(self, kind: str, message: str, culprits: list[int]) -> None:
        """Writes the report of a rank that the others can't read; see `Watchdog._end`."""
        self.print_stack()
        reports = self._positions()
        culprits = culprits or [self._heartbeat.rank]
        self.write(kind, culprits[0], f"{message}{_where(kind, reports, culprits)}", reports)

    def pass_on_all(self, peers: RankRegistry, kind: str, message: str, known_culprits: list[int]) -> None:
        """Writes the report, publishes the verdict, and waits until the other ranks have read it.

        Args:
            peers: all ranks.
            kind: kind of the failure.
            message: about it.
            known_culprits: ranks that have ended, are lost or not connected; empty if there are none.
        """
        self.publish_stack(peers)
        reports = self._positions()
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
        text = self.write(kind, culprits[0], f"{message}{_where(kind, reports, culprits)}{silence}", reports)
        peers.publish("verdict", {"text": text})
        for rank in filter(peers.is_local, unresponsive):  # it can't read the verdict
            peers.kill(rank)
        with suppress(RuntimeError):  # the rank that hosts the store may have read the verdict and ended
            _gathered(peers, "heard", [rank for rank in answers if rank != peers.rank])

    def write(self, kind: str, culprit: int, message: str, reports: dict[int, dict[str, Any]]) -> str:
        """Writes the failure report; prints and returns the verdict."""
        rank = self._heartbeat.rank
        failure = {"rank": culprit, "kind": kind, "by": rank, "message": message}
        report = Report(self._folder, failure, reports, self._heartbeat.resume_from, run_id=self._heartbeat.run_id)
        collectives = "".join(f" Collectives: {sentence}." for sentence in report.collectives)
        text = f"{kind}, {blame(failure)}.{collectives} The failure report is {report.write()}"
        print_rank(rank, text)
        return text


def _where(kind: str, reports: dict[int, dict[str, Any]], ranks: list[int]) -> str:
    if kind == HOST_LOST:  # their last known positions are not their present ones
        return ""
    return "".join(f"; rank {rank} {describe(reports.get(rank))}" for rank in ranks)


def _gathered(peers: RankRegistry, kind: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """Returns the reports of those of `ranks` that publish one in time."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        answers = peers.read(kind, ranks)
        if len(answers) == len(ranks) or time.monotonic() > deadline:
            return answers
        time.sleep(0.1)


def behind(ranks: dict[int, dict[str, Any]]) -> list[int]:
    """Returns the ranks with the least progress; of these, the ones that do not wait, if there are some."""
    progress = {rank: (r["batch"], r["evaluated"], r["step"]) for rank, r in ranks.items()}
    last = [rank for rank in ranks if progress[rank] == min(progress.values())]
    return [rank for rank in last if ranks[rank]["pending"] is None] or last
