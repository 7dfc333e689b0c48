"""Registers the running ranks of this user on this host in small files, so that `polyphase stacks` can query them.

The files are in ``/tmp/polyphase-<uid>``, a folder with mode 700 that belongs to the user, so other users can't read or
write them. A rank has three files, named ``<pid>-<number>``:

- ``.json``: its description (`RunningRank`), from the start of its run to its end;
- ``.ask``: the number of a question; the rank's watchdog reads it within a second and removes it;
- ``.answer-<number>``: its answer, and ``.answer-<number>-<rank>`` answers of ranks on other hosts.

If a rank does not answer, the signal SIGURG makes Python's `faulthandler` write its stacks to ``<pid>.stack``; this
needs neither Python's lock nor a running thread. SIGURG is ignored by default, so it is harmless for a process that
receives it too late.
"""

import dataclasses
import itertools
import json
import os
import re
import signal
import stat
import tempfile
from contextlib import suppress
from typing import Any

import psutil

__all__ = ["SIGNAL", "Entry", "RunningRank", "own_space", "remove_ended", "running_ranks", "runtime_folder"]

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
        if entry.rank.space == own_space() and not entry.rank.lives:
            entry.remove()
            with suppress(OSError):
                os.remove(entry.stack_file)


def own_space() -> str:
    """Returns this process's id namespace: containers with the same host name each number their processes from 1."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def running_ranks() -> list[Entry]:
    """Returns this user's ranks on this host whose processes exist; for nested engines the innermost one."""
    folder = runtime_folder(creates=False)
    entries = [] if folder is None else _entries(folder)
    visible = [entry for entry in entries if entry.rank.space == own_space() and entry.rank.lives]
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
