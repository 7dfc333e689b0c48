"""When one rank raises: that rank is named first, every other one is let go, nobody hangs.

Ranks that still train are blocked in a collective which the failed one will never join, and Lightning's exception
callbacks (a checkpoint on exception, say) would join in with barriers of their own. So, before anything else happens, a
rank that raises

1. writes its rank and error into the job's key-value store (out of band, no collective), where the first one wins;
2. prints its traceback, if it is that first one; and
3. ends its process group, which makes the peers' pending collectives raise and turns later barriers into no-ops.

A rank that finds another's name in the store says so and waits for its launcher to end it, so that the job's exit is
the culprit's. A peer that doesn't notice (a GPU waits in a collective) is ended by the launcher, as each of them does
when one of its processes fails.
"""

import contextlib
import signal
import sys
import time
import traceback

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["announce"]

_KEY = "polyphase/first_failure"
_GRACE_S = 2.0
"""How long a rank that stops because of another waits for its launcher to see the other's exit first."""


def announce(exception: BaseException, *, print_traceback: bool = True) -> None:
    """Says which rank failed first and ends this process's group; does nothing where no group runs.

    Args:
        exception: what this rank raised.
        print_traceback: False where the launcher carries the traceback to the user itself.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    if isinstance(exception, SIGTERMException):  # no failure: all ranks agreed to stop here
        return
    rank = dist.get_rank()
    first = _first_failure(rank, exception)
    culprit, _, message = first.partition("|")
    if int(culprit) != rank:
        print(f"[rank {rank}] stops because rank {culprit} failed first: {message}", file=sys.stderr, flush=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the trainer's handler would only note that we are to end
        time.sleep(_GRACE_S)
    elif print_traceback:
        text = "".join(traceback.format_exception(type(exception), exception, exception.__traceback__))
        print(f"[rank {rank}] failed and ends the run:\n{text}", file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):  # a group whose connections are gone already may refuse to shut down
        dist.destroy_process_group()


def _first_failure(rank: int, exception: BaseException) -> str:
    """``rank|error`` of the first rank that failed; our own where the store can't be reached any more."""
    mine = f"{rank}|{type(exception).__name__}: {exception}"[:1000]
    try:
        store = dist.distributed_c10d._get_default_store()
        return store.compare_set(_KEY, "", mine).decode(errors="replace")
    except RuntimeError:
        return mine
