"""The place where a progress bar is drawn: lines at the bottom of a terminal, an output of a notebook's cell, or none.

Several processes write to one terminal: rank 0 with its bar, the other ranks, the workers of loaders, libraries in C++.
So nobody keeps count of where the cursor is. The bar is drawn below the cursor, which then goes back to an empty line
above it; whoever prints a line next prints it there, and the bar is drawn again below. Python's streams erase the old
bar first, on every rank (`guard`). The cursor stays visible and no mode of the terminal is changed, so that a process
that is killed leaves nothing to repair.
"""

import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TextIO

from rich.console import Console

from ._streams import WholeLines, is_terminal

__all__ = ["BottomLines", "CellOutput", "PlainOutput", "Screen", "can_draw", "screen_of"]

_ERASE = "\r\x1b[J"
"""The escape codes that go to the beginning of the line and erase all from there to the end of the screen."""
_REDRAW_S = 1.0
"""Time between two drawings where nothing else asks for one."""

Render = Callable[[], Sequence[str]]
"""Gives the rows as they are now, each narrower than the terminal."""


class Screen(Protocol):
    """A place that a progress bar can draw on."""

    is_live: bool
    """Whether `show` shows anything."""
    period_s: float
    """Time from one drawing to the next, at least."""

    def guard(self, *, is_drawn_here: bool) -> None:
        """Keeps the lines that this process prints apart from the bar and the lines of other processes, from now on.

        Args:
            is_drawn_here: whether it is this process that draws the bar.
        """

    def release(self) -> None:
        """Leaves what this process prints as it was before `guard`."""

    def show(self, render: Render) -> None:
        """Replaces what was drawn; `render` may be called again by another thread."""

    def keep(self, rows: Sequence[str]) -> None:
        """Replaces what was drawn by rows that stay; what is printed or shown next comes below."""

    def clear(self) -> None:
        """Takes away what was drawn."""


class PlainOutput:
    """A file, or a terminal without escape codes: only rows that stay are printed.

    Args:
        file: where.
    """

    is_live = False
    period_s = 0.0

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def guard(self, *, is_drawn_here: bool) -> None:
        """Does nothing."""

    def release(self) -> None:
        """Does nothing."""

    def show(self, render: Render) -> None:
        """Prints nothing."""

    def keep(self, rows: Sequence[str]) -> None:
        """Prints the rows."""
        print(*rows, sep="\n", file=self._file, flush=True)

    def clear(self) -> None:
        """Does nothing."""


class CellOutput:
    """One output of a notebook's cell, which is replaced; it needs no widgets, and works in forked processes."""

    is_live = True
    period_s = 0.5  # each drawing is a message to the browser

    def __init__(self) -> None:
        self._handle: Any = None
        self._lines = WholeLines()

    def guard(self, *, is_drawn_here: bool) -> None:
        """Sends whole lines only: in forked processes the kernel sends each part of a line by itself."""
        self._lines.guard(terminals_only=False)

    def release(self) -> None:
        """Leaves the streams as they were."""
        self._lines.release()

    def show(self, render: Render) -> None:
        """Replaces what was drawn."""
        self._display(render())

    def keep(self, rows: Sequence[str]) -> None:
        """The next drawing is another output."""
        self._display(rows)
        self._handle = None

    def clear(self) -> None:
        """Leaves an empty output, to be drawn on again."""
        if self._handle is not None:
            self._display(())

    def _display(self, rows: Sequence[str]) -> None:
        from IPython import get_ipython
        from IPython.display import display

        content = {"text/plain": "\n".join(rows)}
        if self._handle is None:
            kernel = getattr(get_ipython(), "kernel", None)
            if kernel is not None:
                # Its session drops what forked processes display until somebody has printed; then it does the same.
                kernel.session.check_pid = False
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)


class BottomLines:
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
        """Makes the lines that this process prints erase the bar from now on, whichever rank has drawn it."""
        self._is_drawn_here = is_drawn_here
        self._lines.guard(terminals_only=True)

    def release(self) -> None:
        """Leaves the streams as they were."""
        self._lines.release()

    def show(self, render: Render) -> None:
        """Replaces what was drawn; draws it again once in a while, as another rank's lines erase it."""
        self.guard()
        self._draw_anew(render)
        if self._redrawing is None:
            self._redrawing = _Redrawing(partial(self._draw_anew, render))

    def keep(self, rows: Sequence[str]) -> None:
        """Replaces what was drawn by rows that stay; what is printed or shown next comes below."""
        if self._redrawing is not None:
            self._redrawing.stop()
            self._redrawing = None
        with self._lines.lock:
            erased, self._rows = _ERASE if self._rows else "", ()
            self._write(erased + "".join(f"{row}\n" for row in rows))

    def clear(self) -> None:
        """Takes away what was drawn."""
        self.keep(())

    def _draw_anew(self, render: Render) -> None:
        with self._lines.lock:
            self._rows = render()
            self._draw()

    def _draw(self) -> None:
        if self._rows:
            # The rows are narrower than the terminal: none is wrapped.
            self._write(_ERASE + "".join(f"\n{row}" for row in self._rows) + f"\x1b[{len(self._rows)}A\r")

    def _write(self, text: str) -> None:
        """Writes in one call of the system, as the terminal lets no other process's text into that."""
        with suppress(OSError):  # a terminal that was closed ends no training
            self._file.flush()
            os.write(self._file.fileno(), text.encode(self._file.encoding, errors="replace"))


class _Redrawing:
    """A thread that draws every now and then: another rank's lines erase the bar, and time goes by."""

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
    """Whether a bar can be drawn on what this process prints to: a notebook, or a terminal with escape codes."""
    console = Console()
    return console.is_jupyter or (is_terminal(sys.stdout) and not console.is_dumb_terminal)


def screen_of(console: Console) -> Screen:
    """Chooses the place that a bar draws on for this console."""
    if console.is_jupyter:
        return CellOutput()
    file: Any = console.file
    # Rich takes a file for a terminal where FORCE_COLOR is set, as on many a CI: a wish for colours, not for a bar.
    is_drawn = console.is_terminal and is_terminal(file) and not console.is_dumb_terminal
    return BottomLines(file) if is_drawn else PlainOutput(file)
