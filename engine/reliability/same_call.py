"""Calls that all ranks must make alike: asked of the others through the job's store, before collectives mix them up."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from ..distributed.job_store import FIRST_FAILURE, Fields, JobStore
from ..distributed.waits import waiting
from .rendezvous import current_job

__all__ = ["SameCall"]

_POLL_S = (0.0002, 0.05)
"""The seconds between two reads of the other ranks' answers: at first, and later."""
_BEAT_S = 1.0

_numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""The number of the next one of each kind, the same on all ranks, since they all run the same code."""


class SameCall:
    """Waits until all ranks are about to make the same call.

    Args:
        kind: of the calls; a part of the keys in the store.
        fields: the types of a call's parts.
        wait: what the wait is called in reports.
        timeout_s: how long to wait for the others.
        check: raises an error if one of them has ended; called while this rank waits for them.
    """

    def __init__(
        self, kind: str, fields: Fields, wait: str, timeout_s: float, check: Callable[[], None] | None = None
    ) -> None:
        self._name = f"polyphase/{kind}/{next(_numbers[kind])}"
        self._fields: Fields = {**fields, "rank": int}
        self._wait_name, self._timeout_s, self._check = wait, timeout_s, check
        self._job: JobStore | None = None
        self._num_questions = 0

    def ask(
        self,
        call: dict[str, Any],
        differs: Callable[[int, dict[str, Any] | None, int | None], str],
        ahead: Callable[[], list[int]],
    ) -> None:
        """Waits until all ranks have asked with this call.

        Args:
            call: of this rank.
            differs: describes the difference, given this rank, the call of another one, None if it is not known, and
                that rank, None if it is several.
            ahead: returns the ranks that have gone on without asking, as far as is known; called once a second, by the
                rank that has asked first.

        Raises:
            RuntimeError: another rank makes another call, or makes none in time.
        """
        with waiting(self._wait_name):
            job = self._connected()
            key = f"{self._name}/{self._num_questions}"
            first = job.record_first(key, {"rank": job.rank, **call}, self._fields)
            first_rank = first.pop("rank")
            if first != call:
                raise RuntimeError(differs(job.rank, first, first_rank))
            job.count(f"{key}/ranks", 1)
            self._wait(job, f"{key}/ranks", differs, ahead if first_rank == job.rank else lambda: [])
            if job.rank == 0 and self._num_questions > 0:  # all ranks have read the answer to the previous question
                for old in ("", "/ranks"):
                    job.line.ask("delete_key", f"{self._name}/{self._num_questions - 1}{old}")
            self._num_questions += 1

    def _wait(self, job: JobStore, ranks: str, differs: Callable[..., str], ahead: Callable[[], list[int]]) -> None:
        pause_s, began = _POLL_S[0], time.monotonic()
        looks_at = began + _BEAT_S
        while job.count(ranks) < job.num_ranks:
            time.sleep(pause_s)
            if self._check is not None:
                self._check()
            pause_s = min(2 * pause_s, _POLL_S[1])
            if pause_s == _POLL_S[1] and (failure := self._failure(job)) is not None:
                raise RuntimeError(f"stopped, because rank {failure['rank']} failed: {failure['message']}")
            now = time.monotonic()
            if now < looks_at:
                continue
            looks_at = now + _BEAT_S
            others = [rank for rank in ahead() if rank != job.rank]
            if others and job.count(ranks) < job.num_ranks:
                raise RuntimeError(differs(job.rank, None, min(others)))
            if now - began > self._timeout_s:
                raise RuntimeError(
                    f"{differs(job.rank, None, None)} The others have not come within {self._timeout_s:.0f} s."
                )

    def _failure(self, job: JobStore) -> dict[str, Any] | None:
        """Returns the failure of another rank, for which this one stops."""
        failure = job.first_failure() if job.has(FIRST_FAILURE) else None
        # After a hang the watchdog looks where this rank waits, and ends it there.
        return None if failure is None or failure["kind"] == "hang" else failure

    def _connected(self) -> JobStore:
        if self._job is None:
            job = current_job()
            assert job is not None
            self._job = job.clone()  # a waiting thread blocks all others on the same connection
        return self._job
