"""Collectives of plain values through the job's store, of which all ranks get the result, or none.

A process that ends amid a collective of torch's leaves some ranks with the result and others without. What was written
to the store stays there, so the ranks that are left can tell which of the two it was.
"""

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from .job_store import Fields, JobStore, signed, verified
from .waits import waiting

__all__ = ["Agreement", "LostRankError"]

_TICK_S = 0.005
_OUTCOME: Fields = {"all": bool}


class LostRankError(RuntimeError):
    """Another rank has ended, as this one has noticed by itself."""


class Agreement:
    """Gathers values of ranks that call it in the same order; blocks until all have called it, or one has ended.

    Args:
        job: has the store.
        name: of the keys; another object needs another name.
        ranks: the ranks, by the numbers of the beginning.
        own: this rank.
        lost: returns those of the ranks whose processes have ended.
        has_failed: returns whether the run is over.
    """

    def __init__(
        self,
        job: JobStore,
        name: str,
        ranks: Sequence[int],
        own: int,
        lost: Callable[[], list[int]],
        has_failed: Callable[[], bool],
    ) -> None:
        self._job, self._name, self._ranks, self._own = job, name, list(ranks), own
        self._lost, self._has_failed = lost, has_failed
        self._number = 0

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, on all of them, or raises an error on all of them.

        Phases: 1. each rank writes its value; 2. the first that sees the values of all, or that a rank has ended before
        it has written its own, records which; 3. all read that record, and the values.

        Raises:
            LostRankError: a rank has ended.
        """
        job, former = self._job, self._number
        self._number += 1
        keys = [self._key(self._number, rank) for rank in self._ranks]
        outcome_key, own = self._key(self._number, "all"), self._key(self._number, self._own)
        job.line.ask("set", own, signed(own, pickle.dumps(value)))
        with waiting("the agreement between two steps"):
            while (outcome := job.read(outcome_key, _OUTCOME)) is None:
                if job.has(*keys):
                    job.record_first(outcome_key, {"all": True}, _OUTCOME)
                elif self._lost():
                    job.record_first(outcome_key, {"all": False}, _OUTCOME)
                elif self._has_failed():
                    raise RuntimeError("The connection was closed: another rank has failed.")
                else:
                    time.sleep(_TICK_S)
        if not outcome["all"]:
            raise LostRankError
        contents = [verified(key, content) for key, content in zip(keys, job.line.ask("multi_get", keys), strict=True)]
        job.line.ask("delete_key", self._key(former, self._own))  # all have read it: they have written the next one
        return [pickle.loads(content or b"") for content in contents]  # noqa: S301 - signed by a rank of this job

    def _key(self, number: int, name: int | str) -> str:
        return f"{self._name}/{number}/{name}"
