"""Functions in processes of their own: what one of them breaks, or waits for without end, is lost to no other.

`elsewhere` runs one and returns its outcome; this file run as a module is what it starts. A strategy of several
devices starts this same command again for each rank; the first one's outcome counts.
"""

import contextlib
import faulthandler
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import device

__all__ = ["ROOT", "Outcome", "Process", "elsewhere", "two_ranks"]

ROOT = Path(__file__).parents[2]
LINES = 25
"""Of what a process has printed, kept where it failed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a function that ran in a process of its own."""

    status: str
    """``"ok"``, ``"failed"``, ``"timed out"`` or ``"not run"``."""
    seconds: float
    value: Any = None
    """What it returned."""
    reason: str = ""
    """Why it is not ok."""
    output: str = ""
    """All that was printed."""


class Process:
    """A function that runs in a process of its own.

    By default a fork of this one, which must not have used the device: what is imported once serves all. With
    `forks` off a new interpreter.

    Args:
        place: ``"module:function"``.
        arguments: of the function; such as JSON has.
        environment: variables beside those of this process.
    """

    forks = True

    def __init__(self, place: str, *arguments: Any, environment: Mapping[str, str] | None = None) -> None:
        # No TemporaryDirectory, whose copy in a fork would remove it when that ends.
        self._folder = here = Path(tempfile.mkdtemp(prefix="polyphase-gpu-"))
        self._result, self._printed = here / "result.json", here / "printed"
        mode = "smoke" if device.smoke() else "full"
        command = [device.kind(), mode, place, json.dumps(arguments), str(self._result)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        variables = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", **(environment or {})}
        (here / "run").mkdir()
        self.began = time.monotonic()
        start = self._fork if self.forks else self._spawn
        self._pid = start(command, here / "run", variables)

    def _spawn(self, command: list[str], folder: Path, variables: Mapping[str, str]) -> int:
        with self._printed.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.gpu.child", *command], stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=folder, env={**os.environ, **variables},
            )  # fmt: skip
        process.returncode = 0  # subprocess: it is waited for below, as forks are
        return process.pid

    def _fork(self, command: list[str], folder: Path, variables: Mapping[str, str]) -> int:
        sys.stdout.flush()
        if (pid := os.fork()) != 0:
            return pid
        code = 1
        try:
            os.setsid()
            printed = os.open(self._printed, os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(printed, 1)
            os.dup2(printed, 2)
            # A fork within a fork drops its parent's, which must not close these files.
            sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
            os.chdir(folder)
            os.environ.update(variables)
            # A strategy of several devices starts this command again, once for each of the other ranks.
            main = sys.modules["__main__"]
            main.__spec__ = importlib.import_module("benchmarks.gpu.child").__spec__
            sys.argv = [str(Path(__file__)), *command]
            code = main_of(command)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def end(self, limit_s: float) -> Outcome:
        """Waits until it ends, at most `limit_s` after it began; then takes all of its processes away."""
        deadline, is_late = self.began + limit_s, False
        while (ended := os.waitpid(self._pid, os.WNOHANG)) == (0, 0):
            if is_late := time.monotonic() >= deadline:
                break
            time.sleep(0.02)
        if is_late:
            os.kill(self._pid, signal.SIGABRT)  # prints where all threads are
            time.sleep(1.0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)  # the ranks that it has started as well
        if is_late:
            ended = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(ended[1])
        seconds = time.monotonic() - self.began
        output = self._printed.read_text(errors="replace")
        result = json.loads(self._result.read_text()) if self._result.exists() else {}
        shutil.rmtree(self._folder, ignore_errors=True)
        return _outcome(code, is_late, limit_s, seconds, result, output)


def _outcome(code: int, is_late: bool, limit_s: float, seconds: float, result: dict[str, Any], output: str) -> Outcome:
    status, reason = result.get("status", "failed"), result.get("reason", "")
    if is_late:
        status, reason = "timed out", f"no end after {limit_s:.0f} s"
    elif not result:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        status, reason = "failed", f"the process ended by {how}"
    elif status == "ok" and code != 0:
        status, reason = "failed", f"the process ended by exit code {code} after the function had returned"
    return Outcome(status=status, seconds=seconds, value=result.get("value"), reason=reason, output=output)


def elsewhere(place: str, *arguments: Any, limit_s: float, environment: Mapping[str, str] | None = None) -> Outcome:
    """Runs a function in a process of its own; see `Process`."""
    return Process(place, *arguments, environment=environment).end(limit_s)


def two_ranks(place: str, *arguments: Any, limit_s: float) -> list[Outcome]:
    """Runs a function twice at the same time, as two machines that share this one's first device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [Process(place, *arguments, environment={**meeting, "NODE_RANK": str(rank)}) for rank in range(2)]
    return [rank.end(limit_s) for rank in ranks]


def last_lines(output: str) -> str:
    """The end of what was printed; of a process that was ended, where its threads were, the innermost call first."""
    printed, fatal, stacks = output.strip().partition("Fatal Python error")
    if fatal:
        return "\n".join((fatal + stacks).splitlines()[:LINES])
    return "\n".join(printed.splitlines()[-LINES:])


def main_of(command: Sequence[str]) -> int:
    """Runs a function and writes what became of it; the exit code."""
    accelerator, mode, place, given, path = command
    faulthandler.enable(sys.stderr)
    outcome: dict[str, Any]
    try:
        device.choose(accelerator, smoke=mode == "smoke")
        module, _, name = place.partition(":")
        value = getattr(importlib.import_module(module), name)(*json.loads(given))
        outcome = {"status": "ok", "value": value}
    except device.NotRunError as error:
        outcome = {"status": "not run", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        outcome = {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    if os.environ.get("LOCAL_RANK", "0") == "0":
        written = Path(f"{path}.new")
        written.write_text(json.dumps(outcome))
        written.rename(path)
    return outcome["status"] == "failed"


if __name__ == "__main__":
    # By its name as others import it, so that there is one NotRunError.
    sys.exit(importlib.import_module("benchmarks.gpu.child").main_of(sys.argv[1:]))
