"""`WholeLines`: makes the standard streams write whole lines, so that lines of several processes don't mix."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

__all__ = ["WholeLines", "is_terminal"]


class WholeLines:
    """Makes each write to the standard streams one or more whole lines, between `guard` and `release`.

    The `write` method of the stream objects is replaced, because loggers keep references to these objects. Forked
    processes, such as workers of loaders, inherit it.

    Args:
        before: text written before the lines, in the same write.
        after: called after each write, only in the process that created this object.
        is_needed: returns whether lines must be whole now; otherwise text passes unchanged. Not called in forked
            processes.
    """

    def __init__(
        self,
        before: str = "",
        after: Callable[[], None] = lambda: None,
        is_needed: Callable[[], bool] = lambda: True,
    ) -> None:
        self._before = before
        self._after = after
        self._is_needed = is_needed
        self._guarded: dict[int, _Guarded] = {}
        self._pid = os.getpid()
        self.lock = threading.RLock()  # reentrant: a signal handler may print during a write
        """Held while lines are written."""

    def guard(self, *, terminals_only: bool) -> None:
        """Starts to write whole lines only; an incomplete line is held until its end arrives.

        Args:
            terminals_only: do not change streams that write to a file.
        """
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is None or id(stream) in self._guarded or not hasattr(stream, "__dict__"):
                continue
            if is_terminal(stream) or not terminals_only:
                self._guarded[id(stream)] = guarded = _Guarded(stream, stream.write, vars(stream).get("write"))
                guarded.writer = partial(self._write, guarded)
                stream.write = guarded.writer  # type: ignore[method-assign]

    def release(self) -> None:
        """Restores the streams; an incomplete line is written."""
        with self.lock:
            while self._guarded:
                _, guarded = self._guarded.popitem()
                guarded.release()

    def _write(self, guarded: "_Guarded", text: str) -> int:
        is_forked = os.getpid() != self._pid
        if is_forked and not guarded.is_forked:  # the parent of a forked worker may have held the lock
            guarded.is_forked, guarded.held = True, ""
            self.lock = threading.RLock()
        with self.lock:
            if guarded.is_released or not (is_forked or self._is_needed()):
                held, guarded.held = guarded.held, ""
                return guarded.write(held + text)
            lines, newline, guarded.held = (guarded.held + text).rpartition("\n")
            if newline:
                guarded.write(self._before + lines + newline)
                guarded.stream.flush()
                if not is_forked:
                    self._after()
        return len(text)


@dataclass(eq=False)
class _Guarded:
    """A stream that writes whole lines only."""

    stream: TextIO
    write: Callable[[str], int]
    """The stream's original `write`."""
    replaced: Callable[[str], int] | None
    """The `write` attribute that other code had set on the stream before; None if it was the class's method."""
    writer: Callable[[str], int] | None = None
    held: str = ""
    """An incomplete line, until its end arrives."""
    is_released: bool = False
    is_forked: bool = False

    def release(self) -> None:
        self.is_released = True
        if vars(self.stream).get("write") is self.writer:  # otherwise other code wraps ours, which now passes text on
            if self.replaced is None:
                del self.stream.write
            else:
                self.stream.write = self.replaced  # type: ignore[method-assign]
        if self.held:
            held, self.held = self.held, ""
            self.write(held)
            self.stream.flush()


def is_terminal(file: Any) -> bool:
    """Whether a file is a terminal of any kind."""
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):  # no such method; a closed file
        return False
