"""The screen on which a progress bar is drawn: the bottom of a terminal, an output of a notebook's cell, or none.

Several processes write to one terminal: rank 0 with its bar, other ranks, workers of loaders, C++ libraries. So no
process can track the cursor. The bar is drawn below the cursor, which then returns to an empty line above the bar. The
next line of any process is printed there, and the bar is drawn again below it. Python's streams erase the old bar
first, on every rank (`guard`). The cursor stays visible and no terminal mode is changed, so a killed process leaves the
terminal usable.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from rich.console import Console

__all__ = [
    "BottomLines",
    "CellOutput",
    "PlainOutput",
    "Screen",
    "WholeLines",
    "can_draw",
    "screen_of",
]

_ERASE = "\r\x1b[J"
"""Escape codes that move to the start of the line and erase from there to the end of the screen."""
_REDRAW_S = 1.0
"""Seconds between two drawings if nothing else causes one."""
_MOST_ROWS = 200
"""Rows above the bar of a notebook's output, which is sent as a whole at each drawing."""

_Render = Callable[[], Sequence[str]]
"""Returns the current rows, each narrower than the terminal."""


class Screen:
    """An output that a progress bar can draw on; without more it has permanent rows only."""

    is_live = False
    """Whether `show` draws anything."""
    period_s = 0.0
    """Shortest time between two drawings, in seconds."""

    def guard(self, *, is_drawn_here: bool) -> None:
        """Starts to keep this process's printed lines separate from the bar and from lines of other processes.

        Args:
            is_drawn_here: whether this process draws the bar.
        """

    def release(self) -> None:
        """Undoes `guard`."""

    def show(self, render: _Render) -> None:
        """Replaces the drawing; `render` may be called again by another thread."""

    def keep(self, rows: Sequence[str]) -> None:
        """Replaces the drawing by permanent rows; later output appears below them."""
        raise NotImplementedError

    def add(self, row: str) -> None:
        """Writes a permanent row above the drawing, which stays."""
        self.keep([row])

    def clear(self) -> None:
        """Removes the drawing."""
        self.keep(())


class PlainOutput(Screen):
    """A file, or a terminal without escape codes: only permanent rows are printed.

    Args:
        file: the file to print to.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def keep(self, rows: Sequence[str]) -> None:
        """Prints the rows."""
        if rows:
            print(*rows, sep="\n", file=self._file, flush=True)


class CellOutput(Screen):
    """One output of a notebook's cell, which is updated in place; it needs no widgets and works in forked processes."""

    is_live = True
    period_s = 0.5  # each drawing is a message to the browser

    def __init__(self) -> None:
        self._handle: Any = None
        self._above: list[str] = []
        self._lines = WholeLines()

    def guard(self, *, is_drawn_here: bool) -> None:
        """Sends whole lines only: in forked processes the kernel would send each part of a line separately."""
        self._lines.guard(terminals_only=False)

    def release(self) -> None:
        """Restores the streams."""
        self._lines.release()

    def show(self, render: _Render) -> None:
        """Replaces the drawing."""
        self._display(render())

    def keep(self, rows: Sequence[str]) -> None:
        """Keeps the rows; the next drawing starts a new output."""
        if rows or self._handle is not None:
            self._display(rows)
        self._handle, self._above = None, []

    def add(self, row: str) -> None:
        """Keeps the row in the output, above the drawing; an output with many rows is left as it is for a new one."""
        self._above.append(row)
        if len(self._above) == _MOST_ROWS:
            self.keep(())

    def clear(self) -> None:
        """Empties the output, which is used again by the next drawing."""
        if self._handle is not None:
            self._display(())

    def _display(self, rows: Sequence[str]) -> None:
        from IPython.display import display

        content = {"text/plain": "\n".join([*self._above, *rows])}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class BottomLines(Screen):
    """The last lines of a terminal that other processes write to as well.

    Args:
        file: the terminal.
    """

    is_live = True
    period_s = 0.0

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rows: Sequence[str] = ()
        self._is_drawn_here = True
        self._lines = WholeLines(_ERASE, self._draw, lambda: bool(self._rows) or not self._is_drawn_here)
        self._redrawing: _Redrawing | None = None

    def guard(self, *, is_drawn_here: bool = True) -> None:
        """Makes the lines of this process erase the bar first, whichever rank has drawn it."""
        self._is_drawn_here = is_drawn_here
        self._lines.guard(terminals_only=True)

    def release(self) -> None:
        """Restores the streams."""
        self._lines.release()

    def show(self, render: _Render) -> None:
        """Replaces the drawing, and repeats it regularly, since lines of other ranks erase it."""
        self.guard()
        self._draw_anew(render)
        if self._redrawing is None:
            self._redrawing = _Redrawing(partial(self._draw_anew, render))

    def keep(self, rows: Sequence[str]) -> None:
        """Replaces the drawing by permanent rows; later output appears below them."""
        if self._redrawing is not None:
            self._redrawing.stop()
            self._redrawing = None
        with self._lines.lock:
            erased, self._rows = _ERASE if self._rows else "", ()
            self._write(erased + "".join(f"{row}\n" for row in rows))

    def add(self, row: str) -> None:
        """Writes a permanent row, and draws anew below it."""
        with self._lines.lock:
            self._write(f"{_ERASE if self._rows else ''}{row}\n")
            self._draw()

    def _draw_anew(self, render: _Render) -> None:
        with self._lines.lock:
            self._rows = render()
            self._draw()

    def _draw(self) -> None:
        if self._rows:
            # The rows are narrower than the terminal: none is wrapped.
            self._write(_ERASE + "".join(f"\n{row}" for row in self._rows) + f"\x1b[{len(self._rows)}A\r")

    def _write(self, text: str) -> None:
        """Writes with one system call, so that output of other processes can't be mixed in."""
        with suppress(OSError):  # a closed terminal must not end training
            self._file.flush()
            os.write(self._file.fileno(), text.encode(self._file.encoding, errors="replace"))


class _Redrawing:
    """A thread that redraws the bar regularly, since lines of other ranks erase it, and to update the times."""

    def __init__(self, redraw: Callable[[], None]) -> None:
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(redraw,), name="progress-bar", daemon=True)
        self._thread.start()

    def _run(self, redraw: Callable[[], None]) -> None:
        while not self._is_stopped.wait(_REDRAW_S):
            redraw()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join(_REDRAW_S)


def can_draw() -> bool:
    """Whether a bar can be drawn on this process's output: a notebook, or a terminal with escape codes."""
    console = Console()
    return console.is_jupyter or (_is_terminal(sys.stdout) and not console.is_dumb_terminal)


def screen_of(console: Console) -> Screen:
    """Chooses the screen for a bar on this console."""
    if console.is_jupyter:
        return CellOutput()
    file: Any = console.file
    # With FORCE_COLOR (as in many CI systems) Rich treats a file as a terminal; that asks for colours, not for a bar.
    is_drawn = console.is_terminal and _is_terminal(file) and not console.is_dumb_terminal
    return BottomLines(file) if is_drawn else PlainOutput(file)


# --- `WholeLines`: makes the standard streams write whole lines, so that lines of several processes don't mix


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
            if _is_terminal(stream) or not terminals_only:
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


def _is_terminal(file: Any) -> bool:
    """Whether a file is a terminal of any kind."""
    try:
        return bool(file.isatty())
    except (AttributeError, ValueError):  # no such method; a closed file
        return False
