"""How a process ends that can't be taken down: its threads may be in calls that never return."""

import os
import sys
import threading
from contextlib import suppress
from typing import NoReturn

__all__ = ["exit_at_once"]

_FLUSH_S = 1.0


def exit_at_once() -> NoReturn:
    """Ends this process with exit code 1; what it has printed is written, where that takes no longer than a second."""
    # By a thread, as another one that writes to a pipe which nobody empties holds the stream's lock for ever.
    flush = threading.Thread(target=_flush, daemon=True)
    try:
        flush.start()
        flush.join(_FLUSH_S)
    except RuntimeError:  # Python 3.12 and later start none while they shut down
        _flush()
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
