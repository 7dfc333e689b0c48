"""A terminal for tests: a command runs in a pseudo-terminal, and what a person would see is read back by pyte."""

import fcntl
import os
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

import pyte

from tests import warm
from tests.distributed import ROOT

_QUIET_S = 0.2
"""A screen is read once nothing was printed for so long."""
_FOLDER = "TERMINAL_MARKS"
# The child takes the pseudo-terminal as its own, so that Ctrl-C in there reaches it and its children.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
# So does a warm interpreter, by opening it: the first one that the leader of a session opens is its own.
_OPEN_TERMINAL = f"""
import os, runpy, sys
_, terminal, *sys.argv = sys.argv
terminal = os.open(terminal, os.O_RDWR)
for number in range(3):
    os.dup2(terminal, number)
sys.stdout.reconfigure(line_buffering=True)
sys.path[:1] = [os.path.dirname(sys.argv[0]), {str(ROOT)!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Shown(NamedTuple):
    """What a command showed, ended by itself or at its deadline (`returncode` is then -9)."""

    returncode: int
    rows: list[str]
    """Every row, those scrolled away included, without spaces at its end."""
    marks: dict[str, list[str]]
    """The screen, without empty rows at its end, whenever `mark` was called, by its name."""
    raw: str
    """All that was written, escape codes included."""
    is_left_usable: bool
    """Whether the cursor is visible, and the terminal echoes, makes signals and so on as it did."""


class Emulator:
    """A pseudo-terminal of a size, and pyte, which reads it.

    Args:
        columns: its width.
        rows: its height.
    """

    def __init__(self, columns: int = 80, rows: int = 30) -> None:
        self.master, self.slave = os.openpty()
        self.raw = b""
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000)
        self._stream = pyte.ByteStream(self._screen)
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int = 30) -> None:
        """As a person who pulls at the window."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._screen.resize(rows, columns)

    def type(self, keys: str) -> None:
        """As from the keyboard."""
        os.write(self.master, keys.encode())

    def read(self, wait_s: float) -> bool:
        """Takes in what was printed; whether anything was."""
        if not select.select([self.master], [], [], wait_s)[0]:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux: nobody has the terminal open any more
            return False
        self.raw += data
        self._stream.feed(data)
        return bool(data)

    @property
    def rows(self) -> list[str]:
        """The screen, without empty rows at its end."""
        rows = [row.rstrip() for row in self._screen.display]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    @property
    def transcript(self) -> list[str]:
        """What was scrolled away, and the screen."""
        columns = range(self._screen.columns)
        history = ["".join(row[column].data for column in columns).rstrip() for row in self._screen.history.top]
        return [*history, *self.rows]

    @property
    def is_cursor_hidden(self) -> bool:
        """Whether a program has hidden it."""
        return self._screen.cursor.hidden


class Terminal(Emulator):
    """Runs commands, which `mark`s in them stop to be looked at.

    Args:
        columns: its width.
        rows: its height.
        at: what to do at a mark once the screen was read, by the mark's name.
    """

    def __init__(
        self, columns: int = 80, rows: int = 30, at: Mapping[str, Callable[["Terminal"], None]] | None = None
    ) -> None:
        super().__init__(columns, rows)
        self._at = dict(at or {})
        self._marks: dict[str, list[str]] = {}

    def run(
        self,
        arguments: Sequence[str | Path],
        *,
        folder: Path,
        timeout_s: float = 120,
        environment: Mapping[str, str] | None = None,
        is_script: bool = False,
    ) -> Shown:
        """Runs a command to its end, in `folder`; once.

        One that is a script's, without an interpreter, has a warm one (`tests.warm`); those that it starts are cold.
        """
        marks = folder / "marks"
        marks.mkdir()
        settings = termios.tcgetattr(self.slave)
        defaults = {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", _FOLDER: str(marks)}
        if is_script:
            words, stream = [warm.python(), "-c", _OPEN_TERMINAL, os.ttyname(self.slave)], subprocess.DEVNULL
        else:
            words, stream = [sys.executable, "-c", _TAKE_TERMINAL], self.slave
            defaults["PYTHONPATH"] = str(ROOT)
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")}
        process = subprocess.Popen(
            [*words, *map(str, arguments)],
            stdin=stream,
            stdout=stream,
            stderr=stream,
            cwd=folder,
            env={**inherited, **defaults, **(environment or {})},
            start_new_session=True,
        )
        try:
            self._watch(process, marks, time.monotonic() + timeout_s)
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # all that it started as well
            process.wait()
            warm.kill_rest(process.pid)
            is_as_before = termios.tcgetattr(self.slave) == settings
            os.close(self.slave)
            while self.read(0):
                pass
            os.close(self.master)
        raw = self.raw.decode(errors="replace")
        is_usable = is_as_before and not self.is_cursor_hidden
        return Shown(process.returncode, self.transcript, self._marks, raw, is_usable)

    def _watch(self, process: "subprocess.Popen[bytes]", marks: Path, deadline: float) -> None:
        while process.poll() is None and time.monotonic() < deadline:
            if self.read(_QUIET_S):
                continue
            for path in sorted(marks.iterdir()):
                self._marks[path.name] = self.rows
                self._at.get(path.name, _nothing)(self)
                path.unlink()


class Window(Emulator):
    """A terminal for what runs in this process, on `file`."""

    def __init__(self, columns: int = 80, rows: int = 30) -> None:
        super().__init__(columns, rows)
        self.file = os.fdopen(self.slave, "w", buffering=1, encoding="utf-8")
        self._is_closed = False
        self._titles = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def look(self) -> list[str]:
        """All rows, once all that was printed has arrived."""
        self._titles += 1
        self.file.flush()
        os.write(self.slave, f"\x1b]2;{self._titles}\x07".encode())  # leaves no trace on the screen
        deadline = time.monotonic() + 10
        while self._screen.title != str(self._titles) and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.transcript

    def close(self) -> None:
        """Ends the reading."""
        self._is_closed = True
        self._thread.join()
        self.file.close()
        os.close(self.master)

    def _watch(self) -> None:
        while not self._is_closed:
            self.read(0.05)


def on_window(test: Callable[..., None]) -> Callable[..., None]:
    """A test that prints to its `window`; no fixture can do that, as pytest replaces the streams after all fixtures."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with redirect_stdout(kwargs["window"].file):
            test(*args, **kwargs)

    return run


def mark(name: str, timeout_s: float = 60) -> None:
    """Called by the command: it goes on when the screen was read. For one process, and once a name."""
    path = Path(os.environ[_FOLDER]) / name
    path.touch()
    deadline = time.monotonic() + timeout_s
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def _nothing(_: Terminal) -> None:
    pass


def main(expected: str, *command: str) -> int:
    """Runs a command of the repository as a person does, and prints all that was on the screen.

    ``python -m tests.terminal "test accuracy 0.9" make demo``

    Args:
        expected: begins one row, and one only.
        command: the command and its arguments.

    Returns:
        The command's exit code; 1 if that is 0 but the screen or the terminal is not as it should be.
    """
    with tempfile.TemporaryDirectory() as folder:
        shown = Terminal(100).run(["env", f"--chdir={ROOT}", *command], folder=Path(folder), timeout_s=600)
    print("\n".join(shown.rows))
    num_found = sum(row.startswith(expected) for row in shown.rows)
    if num_found != 1:
        print(f"{num_found} rows begin with {expected!r}; expected one.", file=sys.stderr)
    return shown.returncode or int(num_found != 1 or not shown.is_left_usable)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
