"""Finds the rank on which a fault, such as a NaN, has begun, before it has spread to the other ranks.

1. Each rank that has a fault writes its step and name into the job's store.
2. It waits until all ranks have done so, or 3 s have passed. The ranks check at the same step, with no collective in
   between, so they write at about the same time.
3. The earliest fault is returned; of several, that of the lowest rank.
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
    """Returns the first fault of all ranks: the one with the smallest step, order and rank.

    Args:
        own_fault: of this rank: ``rank``, ``step``, ``name``, and ``order``, its order within a step.
    """
    job = current_job()
    if job is None or job.num_ranks == 1:
        return own_fault
    keys = [f"polyphase/nonfinite/{rank}" for rank in range(job.num_ranks)]
    faults = [own_fault]
    with suppress(RuntimeError):  # the store's process has ended
        job.write(keys[own_fault["rank"]], own_fault)
        deadline = time.monotonic() + _PATIENCE_S
        while len(faults) < len(keys) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            faults = list(job.read_all(keys, _FIELDS).values()) or faults
    return min(faults, key=lambda fault: (fault["step"], fault["order"], fault["rank"]))
