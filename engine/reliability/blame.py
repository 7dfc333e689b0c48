"""Finds the rank on which a fault began, such as a NaN, that spreads to the other ranks and is found there, too.

1. Each rank that has found something writes where into the job's store, out of band;
2. it waits until all ranks have, or a few seconds have passed: the ranks look at the same step, so those that find
   something do so at about the same time, and no collective lies between;
3. the earliest one counts, and of several the lowest rank.
"""

import time
from contextlib import suppress
from typing import Any

from .rendezvous import current_job

__all__ = ["earliest"]

_PATIENCE_S = 3.0
_TICK_S = 0.02
_FIELDS = {"rank": int, "step": int, "name": str, "order": int}


def earliest(own_fault: dict[str, Any]) -> dict[str, Any]:
    """Returns the first finding of any rank: the one with the smallest step, order and rank.

    Args:
        own_fault: this rank's finding: rank, step, name, and its order within a step.
    """
    job = current_job()
    if job is None or job.num_ranks == 1:
        return own_fault
    keys = [f"polyphase/nonfinite/{rank}" for rank in range(job.num_ranks)]
    faults = [own_fault]
    with suppress(RuntimeError):  # the store's host is gone
        job.write(keys[own_fault["rank"]], own_fault)
        deadline = time.monotonic() + _PATIENCE_S
        while len(faults) < len(keys) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            faults = list(job.read_all(keys, _FIELDS).values()) or faults
    return min(faults, key=lambda fault: (fault["step"], fault["order"], fault["rank"]))
