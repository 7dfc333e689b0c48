"""`polyphase stacks`: shows the stacks of all ranks of a running job, without stopping it.

Ranks of this host are queried through a file (see `stack_files`), which their watchdog answers within two seconds; a
rank of this host queries the ranks of other hosts. A rank that does not answer in time is stopped, or C code holds its
Python lock: it is sent a signal, on which `faulthandler` writes its stacks without the lock.
"""

import argparse
import dataclasses
import itertools
import json
import linecache
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any

import psutil

from ..flags import choose
from ..foreign import for_terminal
from .tracebacks import is_installed, package_of

__all__ = [
    "SIGNAL",
    "Entry",
    "NativeError",
    "RunningRank",
    "ask",
    "find",
    "lines",
    "main",
    "remove_ended",
    "runtime_folder",
]

# Registers the running ranks of this user on this host in small files, so that `polyphase stacks` can query them.
#
# The files are in ``/tmp/polyphase-<uid>``, a folder with mode 700 that belongs to the user, so other users can't read
# or write them. A rank has three files, named ``<pid>-<number>``:
#
# - ``.json``: its description (`RunningRank`), from the start of its run to its end;
# - ``.ask``: the number of a question; the rank's watchdog reads it within a second and removes it;
# - ``.answer-<number>``: its answer, and ``.answer-<number>-<rank>`` answers of ranks on other hosts.
#
# If a rank does not answer, the signal SIGURG makes Python's `faulthandler` write its stacks to ``<pid>.stack``; this
# needs neither Python's lock nor a running thread. SIGURG is ignored by default, so it is harmless for a process that
# receives it too late.

SCHEMA = 1
SIGNAL = getattr(signal, "SIGURG", None)
"""The signal on which a process writes its stacks; None if the system does not have it."""
_NAME = re.compile(r"(\d+)-(\d+)\.json")
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunningRank:
    """One rank of a running job."""

    schema: int = SCHEMA
    root: str
    """Absolute path or URL of the run's `default_root_dir`."""
    logs: str | None
    """Absolute path of the run's folder of logs, on rank 0; None without such a logger, and on other ranks."""
    job: str
    """Id of the job, the same on all its ranks."""
    rank: int
    world_size: int
    host: str
    space: str
    """Namespace of the process ids."""
    pid: int
    created: float
    """Start time of the process in seconds since 1970, because process ids are reused."""
    thread: int
    """Identifier of the thread that runs it."""
    signal: int | None
    """The signal on which it writes its stacks; None if it does not."""

    @property
    def lives(self) -> bool:
        """Whether its process still exists."""
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.created and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


@dataclasses.dataclass(frozen=True)
class Entry:
    """The files of a running rank.

    Args:
        base: common beginning of the files' paths.
        rank: the rank.
    """

    base: str
    rank: RunningRank

    @classmethod
    def new(cls, folder: str, rank: RunningRank) -> "Entry":
        """Creates the entry of a rank and writes its ``.json`` file."""
        entry = cls(os.path.join(folder, f"{rank.pid}-{next(_numbers)}"), rank)
        entry.write(".json", dataclasses.asdict(rank))
        return entry

    @property
    def stack_file(self) -> str:
        """Path of the file that `faulthandler` writes."""
        return f"{self.base.rpartition('-')[0]}.stack"

    def write(self, ending: str, content: Any) -> None:
        """Writes a file atomically."""
        path = f"{self.base}{ending}"
        with open(f"{path}.part", "w", encoding="utf-8", opener=_opener) as file:
            json.dump(content, file)
        os.replace(f"{path}.part", path)

    def take(self, ending: str) -> Any:
        """Returns the content of a file and removes it; None if it does not exist."""
        path = f"{self.base}{ending}"
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except (OSError, ValueError):
            return None
        with suppress(OSError):
            os.remove(path)
        return content

    def remove(self) -> None:
        """Removes all files except the `faulthandler` file, which belongs to the process."""
        folder, name = os.path.split(self.base)
        with suppress(OSError):
            for file_name in os.listdir(folder):
                if file_name.startswith(f"{name}."):
                    with suppress(OSError):
                        os.remove(os.path.join(folder, file_name))


def runtime_folder(*, creates: bool) -> str | None:
    """Returns the folder of this user's running ranks; None if it does not exist or is accessible to other users.

    Args:
        creates: create the folder.
    """
    parent = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()  # not TMPDIR, which job schedulers change
    folder = os.path.join(parent, f"polyphase-{os.getuid()}")
    with suppress(OSError):
        if creates:
            with suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        info = os.lstat(folder)
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o077:
            return folder
    return None


def remove_ended(folder: str) -> None:
    """Removes the files of processes that ended without removing them."""
    for entry in _entries(folder):
        if entry.rank.space == _own_space() and not entry.rank.lives:
            entry.remove()
            with suppress(OSError):
                os.remove(entry.stack_file)


def _own_space() -> str:
    """Returns this process's id namespace: containers with the same host name each number their processes from 1."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _running_ranks() -> list[Entry]:
    """Returns this user's ranks on this host whose processes exist; for nested engines the innermost one."""
    folder = runtime_folder(creates=False)
    entries = [] if folder is None else _entries(folder)
    visible = [entry for entry in entries if entry.rank.space == _own_space() and entry.rank.lives]
    innermost = {entry.rank.pid: entry for entry in sorted(visible, key=_number)}
    return sorted(innermost.values(), key=lambda entry: (entry.rank.job, entry.rank.rank))


def _number(entry: Entry) -> int:
    return int(entry.base.rpartition("-")[2])


def _entries(folder: str) -> list[Entry]:
    names = {field.name for field in dataclasses.fields(RunningRank)}
    entries = []
    for name in os.listdir(folder):
        if _NAME.fullmatch(name):
            path = os.path.join(folder, name)
            with suppress(OSError, ValueError, TypeError):
                with open(path, encoding="utf-8") as file:
                    content = json.load(file)
                rank = RunningRank(**{key: value for key, value in content.items() if key in names})
                entries.append(Entry(path.removesuffix(".json"), rank))
    return entries


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)


HELP = """\
usage: polyphase stacks RUN_DIR [--all-threads] [--all-frames] [--native] [--json] [--timeout S]

Says where each rank of a run that is under way is: its phase and step, the collective that it waits
in, and its Python stack. The run goes on. Ranks with the same stack are shown as one.

  RUN_DIR        the run's default_root_dir, or its folder of logs, such as lightning_logs/version_3;
                 or a folder of runs, for the one that was started last
  --all-threads  all threads of each rank, not only the one that trains
  --all-frames   those of libraries and of the engine as well
  --native       frames of C and C++ as well, by py-spy (pip install py-spy), which stops each process
                 of this host for some milliseconds; ptrace must be allowed
  --json         for programs
  --timeout S    seconds to wait for an answer (default: 5); a rank that doesn't answer is then sent
                 SIGURG, on which it writes its stacks though something keeps Python's lock

It has to run on a host of the job, as the user of the job: nobody else can ask. The exit code is 1
where a rank has not answered.
"""

_TICK_S = 0.05
_DUMP_S = 2.0
"""Time limit for a process to write its stacks."""
_THREAD = re.compile(r"^(Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_CALL = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


class _Unanswered(str):
    """The reason why a rank has no stacks."""

    __slots__ = ()


def main(words: Sequence[str]) -> int:
    """Runs ``polyphase stacks`` with its arguments; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    parser = argparse.ArgumentParser(prog="polyphase stacks", add_help=False, allow_abbrev=False)
    parser.add_argument("run_dir")
    parser.add_argument("--timeout", default="5")
    flags = ("--all-threads", "--all-frames", "--native", "--json")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    try:
        for word in words:
            if word.startswith("-"):
                choose("flag of stacks", word.partition("=")[0], (*flags, "--timeout"))
        arguments = parser.parse_args(words)
        timeout_s = _seconds(arguments.timeout)
        py_spy = _find_py_spy() if arguments.native else None
        entries = find(arguments.run_dir, _running_ranks())
    except ValueError as error:
        print(f"polyphase: error: {error}", file=sys.stderr)
        return 2
    answers = ask(entries, timeout_s)
    if py_spy is not None:
        _add_native(answers, entries, py_spy)
    if arguments.json:
        print(json.dumps({rank: _plain(answer) for rank, answer in sorted(answers.items())}, indent=2))
    else:
        _show(answers, all_threads=arguments.all_threads, all_frames=arguments.all_frames or arguments.native)
    return int(any(isinstance(answer, _Unanswered) for answer in answers.values()))


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < 3600:
            return float(text)
    raise ValueError(f"--timeout must be a number of seconds above 0, but got {text!r}.")


def find(run_dir: str, running: Sequence[Entry]) -> list[Entry]:
    """Returns the entries in `running` that belong to the run in a folder; of several runs the latest.

    Raises:
        ValueError: no run uses the folder.
    """
    path = run_dir if "://" in run_dir else os.path.abspath(run_dir)
    nearest: list[Entry] = []
    for fits in (lambda e: e.rank.logs == path, lambda e: e.rank.root == path, lambda e: _is_around(e, path)):
        nearest = nearest or [entry for entry in running if fits(entry)]
    if not nearest:
        runs = sorted({entry.rank.logs or entry.rank.root for entry in running if entry.rank.rank == 0})
        hint = (
            f"; under way on this host: {', '.join(runs)}"
            if runs
            else "; none of this user's is under way on this host"
        )
        raise ValueError(f"no run that is under way writes to {run_dir!r}{hint}.")
    job = max(nearest, key=lambda entry: entry.rank.created).rank.job
    return [entry for entry in running if entry.rank.job == job]


def _is_around(entry: Entry, path: str) -> bool:
    """Whether one of the run's folders is inside `path`, or `path` is inside one of them."""
    folders = [folder.rstrip("/") for folder in (entry.rank.logs, entry.rank.root) if folder is not None]
    inside = path.rstrip("/") + "/"
    return any(f"{folder}/".startswith(inside) or inside.startswith(f"{folder}/") for folder in folders)


def ask(entries: Sequence[Entry], timeout_s: float) -> dict[int, dict[str, Any] | _Unanswered]:
    """Queries the ranks of a run; returns the answers by rank.

    Args:
        entries: the run's ranks on this host.
        timeout_s: time limit for the answers.
    """
    number = uuid.uuid4().hex
    answers: dict[int, dict[str, Any] | _Unanswered] = {}
    for entry in entries:
        entry.write(".ask", number)
    missing, deadline = {entry.rank.rank: entry for entry in entries}, time.monotonic() + timeout_s
    while missing and time.monotonic() < deadline:
        for rank, entry in list(missing.items()):
            if (answer := entry.take(f".answer-{number}")) is not None:
                answers[rank] = answer
                del missing[rank]
            elif not entry.rank.lives:
                answers[rank] = _Unanswered("its process has ended")
                del missing[rank]
        time.sleep(_TICK_S)
    for rank, entry in missing.items():
        entry.take(".ask")
        answers[rank] = _dump(entry)
    _await_elsewhere(entries, answers, number, deadline)
    for rank in range(entries[0].rank.world_size):
        answers.setdefault(rank, _Unanswered("it is not on this host, and has not answered"))
    return answers


def _await_elsewhere(
    entries: Sequence[Entry], answers: dict[int, dict[str, Any] | _Unanswered], number: str, deadline: float
) -> None:
    """Adds answers of ranks on other hosts; each rank of this host that answered collects them."""
    received = [answer for answer in answers.values() if isinstance(answer, dict)]
    missing = {rank for answer in received for rank in answer.get("elsewhere", ())} - answers.keys()
    while missing and time.monotonic() < deadline:
        for rank in list(missing):
            for entry in entries:
                answer = entry.take(f".answer-{number}-{rank}")
                if answer is not None:
                    answers[rank] = answer
                    missing.discard(rank)
        time.sleep(_TICK_S)


def _dump(entry: Entry) -> dict[str, Any] | _Unanswered:
    """Makes a process that does not answer write its stacks."""
    rank = entry.rank
    state = ""
    with suppress(psutil.Error):
        state = psutil.Process(rank.pid).status()
    if not rank.lives:
        return _Unanswered("its process has ended")
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return _Unanswered(f"process {rank.pid} is stopped (SIGSTOP, or a debugger): kill -CONT {rank.pid}")
    if rank.signal is None:
        return _Unanswered("it does not answer, and its program has a use of its own for SIGURG")
    text = _written_on_signal(entry, rank.signal)
    threads = _parse_dump(text, rank.thread)
    if not threads:
        return _Unanswered(
            f"process {rank.pid} (state: {state}) does not answer, and writes nothing on a signal either"
        )
    return {
        "rank": rank.rank,
        "host": rank.host,
        "pid": rank.pid,
        "threads": threads,
        "note": "does not answer: some C code may keep Python's lock, or the machine is busy. By faulthandler",
    }


def _written_on_signal(entry: Entry, number: int) -> str:
    """Makes a process write its stacks, and returns them when the file is complete."""
    try:
        before = size = os.path.getsize(entry.stack_file)
        os.kill(entry.rank.pid, signal.Signals(number))
        deadline = time.monotonic() + _DUMP_S
        while time.monotonic() < deadline:
            time.sleep(2 * _TICK_S)
            now = os.path.getsize(entry.stack_file)
            if now == size > before:
                break
            size = now
        with open(entry.stack_file, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _parse_dump(text: str, first: int) -> list[dict[str, Any]]:
    """Parses the threads in a dump of `faulthandler`, in the form of a rank's own answer.

    Args:
        text: the text of one dump.
        first: identifier of the thread that runs the rank.
    """
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if (header := _THREAD.match(line)) is not None:
            thread = int(header[2], 16)
            threads.append({"name": header[3] or f"thread {thread:#x}", "runs": thread == first, "calls": []})
        elif (call := _CALL.match(line)) is not None and threads:
            threads[-1]["calls"].append([call[1], int(call[2]), call[3]])
    return sorted(threads, key=lambda thread: not thread["runs"])


def _add_native(answers: dict[int, Any], entries: Sequence[Entry], py_spy: str) -> None:
    """Replaces the stacks of this host's ranks by py-spy's."""
    for entry in entries:
        rank = entry.rank
        answer = answers[rank.rank] if isinstance(answers[rank.rank], dict) else {}
        try:
            threads = _native_threads(py_spy, rank.pid, rank.thread)
        except NativeError as error:
            if answer:
                answer["note"] = f"without native frames: {error}"
            continue
        answers[rank.rank] = {"rank": rank.rank, "host": rank.host, "pid": rank.pid, **answer, "threads": threads}


def _plain(answer: dict[str, Any] | _Unanswered) -> dict[str, Any]:
    return {"error": str(answer)} if isinstance(answer, _Unanswered) else answer


# --- frames of C and C++, by py-spy
# Reads C and C++ frames of a process with py-spy, if it is installed.


_TIMEOUT_S = 60.0
"""Time limit of py-spy, which takes seconds to read the symbols of torch's libraries."""


class NativeError(RuntimeError):
    """py-spy could not inspect a process."""


def _find_py_spy() -> str:
    """Returns the path of py-spy.

    Raises:
        ValueError: it is not installed.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    path = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
    if path is None:
        raise ValueError("--native needs py-spy, which is not installed: pip install py-spy.")
    return path


def _native_threads(py_spy: str, pid: int, first: int) -> list[dict[str, Any]]:
    """Returns the stacks of a process's threads, in the form of a rank's own answer.

    Args:
        py_spy: path of py-spy.
        pid: id of the process.
        first: identifier of the thread that runs the rank.

    Raises:
        NativeError: py-spy is not permitted to inspect the process, or takes too long.
    """
    try:
        command = [py_spy, "dump", "--native", "--json", "--pid", str(pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
        threads = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        output = (error.stderr or "").strip().splitlines()
        raise NativeError(f"py-spy: {output[-1] if output else f'exit code {error.returncode}'}") from error
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"py-spy: {error}") from error
    threads = [
        {
            "name": thread.get("thread_name") or f"thread {thread['thread_id']:#x}",
            "runs": thread["thread_id"] == first,
            "calls": [
                [f.get("filename") or f.get("module") or "", f.get("line") or 0, f["name"]] for f in thread["frames"]
            ],
        }
        for thread in threads
    ]
    return sorted(threads, key=lambda thread: not thread["runs"])


# --- stacks as text
# Formats the stacks of a run's ranks as text; ranks with the same stack are grouped.


_KEPT = 2
"""Number of innermost calls that are always shown."""


def _show(answers: Mapping[int, Any], *, all_threads: bool, all_frames: bool) -> None:
    """Prints the result of `lines`."""
    for line in lines(answers, all_threads=all_threads, all_frames=all_frames):
        print(for_terminal(line, has_lines=True))  # a call and its source


def lines(answers: Mapping[int, Any], *, all_threads: bool = False, all_frames: bool = False) -> list[str]:
    """Returns one line about the position of each rank, then each different stack with the ranks that have it.

    Args:
        answers: answers by rank; a text gives the reason for a missing answer.
        all_threads: show all threads, not only the training thread.
        all_frames: show all frames of libraries and of the engine, not only the innermost ones.
    """
    shown_lines = [_place(rank, answer) for rank, answer in sorted(answers.items())]
    by_stack: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        if not isinstance(answer, str):
            by_stack.setdefault(_stacks(answer, all_threads, all_frames), []).append(rank)
    for stack, ranks in by_stack.items():
        shown_lines += ["", f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:", stack]
    return shown_lines


def _place(rank: int, answer: Any) -> str:
    if isinstance(answer, str):
        return f"rank {rank}: no stacks: {answer}"
    note = f" ({answer['note']})" if answer.get("note") else ""
    where = f"rank {rank} on {answer['host']}, process {answer['pid']}"
    return f"{where}: {_describe(answer)}{note}" if "phase" in answer else f"{where}{note}"


def _describe(answer: Mapping[str, Any]) -> str:
    """Describes the position of a rank: phase, step, and whether it waits for other ranks."""
    pending = answer.get("pending")
    doing = f", waits for other ranks in {pending}" if pending else ""
    line = f", at {answer['line']}" if answer.get("line") else ""
    return f"phase {answer['phase']!r} of step {answer['step']}, batch {answer['batch']}{doing}{line}"


def _stacks(answer: Mapping[str, Any], all_threads: bool, all_frames: bool) -> str:
    threads = answer["threads"]
    # If the training thread is unknown (py-spy uses other names, or it has ended), all threads are shown.
    shown = threads if all_threads or not any(thread["runs"] for thread in threads) else threads[:1]
    shown_lines = []
    for thread in shown:
        if len(shown) > 1:
            shown_lines.append(f"  thread {thread['name']}:")
        shown_lines += _calls(thread["calls"], all_frames) or ["  (no Python frame)"]
    return "\n".join(shown_lines)


def _calls(calls: Sequence[Any], all_frames: bool) -> list[str]:
    """Formats calls like a traceback, with the innermost call last."""
    shown_lines = []
    shown = {number for number, call in enumerate(calls) if all_frames or number < _KEPT or not _is_library(call[0])}
    for is_shown, group in groupby(reversed(range(len(calls))), lambda number: number in shown):
        numbers = list(group)
        if is_shown:
            shown_lines += [line for number in numbers for line in _call(*calls[number])]
        else:
            shown_lines.append(f"  ... {len(numbers)} calls of libraries and of the engine (--all-frames)")
    return shown_lines


def _call(file: str, line: int, name: str) -> list[str]:
    if not line:
        return [f"  {name} ({file})"]
    text = linecache.getline(file, line).strip()
    return [f'  File "{file}", line {line}, in {name}', *([f"    {text}"] if text else [])]


def _is_library(file: str) -> bool:
    return not file.endswith(".py") or is_installed(file) or package_of(file) is not None
