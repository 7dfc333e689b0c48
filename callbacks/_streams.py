"""`WholeLines`: what this process prints is handed on in whole lines, so that several processes' lines don't mix."""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

__all__ = ["WholeLines", "is_terminal"]


class WholeLines:
    """The process's streams, each write of which is one or more whole lines while they are guarded.

    The streams' own `write` is replaced, as loggers and others hold on to the streams themselves. Processes that are
    forked, such as the workers of loaders, inherit it.

    Args:
        before: is written before the lines, in the same write.
        after: is called after it, in the process that made this object only.
        is_needed: whether it matters now; else all is passed on as it comes. Not asked in forked processes.
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
        self.lock = threading.RLock()  # a signal's handler may print in the middle of something
        """Held while lines are written."""

    def guard(self, *, terminals_only: bool) -> None:
        """Makes the streams take whole lines from now on; half a line waits for its end.

        Args:
            terminals_only: leave streams alone that go to a file.
        """
        for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
            if stream is None or id(stream) in self._guarded or not hasattr(stream, "__dict__"):
                continue
            if is_terminal(stream) or not terminals_only:
                self._guarded[id(stream)] = guarded = _Guarded(stream, stream.write, vars(stream).get("write"))
                guarded.writer = partial(self._write, guarded)
                stream.write = guarded.writer  # type: ignore[method-assign]

    def release(self) -> None:
        """Leaves the streams as they were; half a line is written."""
        with self.lock:
            while self._guarded:
                _, guarded = self._guarded.popitem()
                guarded.release()

    def _write(self, guarded: "_Guarded", text: str) -> int:
        is_forked = os.getpid() != self._pid
        if is_forked and not guarded.is_forked:  # a worker of a loader, say; its parent may have held the lock
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
    """A stream that prints whole lines only."""

    stream: TextIO
    write: Callable[[str], int]
    """The stream's `write` as it was."""
    replaced: Callable[[str], int] | None
    """The stream's own `write`, if other code had set one before; None: the class's."""
    writer: Callable[[str], int] | None = None
    held: str = ""
    """Half a line, until the rest comes."""
    is_released: bool = False
    is_forked: bool = False

    def release(self) -> None:
        self.is_released = True
        if vars(self.stream).get("write") is self.writer:  # else another one has wrapped ours, which now passes all on
            if self.replaced is None:
                del self.stream.write
            else:
                self.stream.write = self.replaced  # type: ignore[method-assign]
        if self.held:
            held, self.held = self.held, ""
            self.write(held)
            self.stream.flush()


def is_terminal(file: Any) -> bool:
    """Whether it is a terminal of whatever kind."""
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):  # no such method; a closed file
        return False
