"""A lock on a folder, so that only one run at a time saves into it. However the process ends, the lock is released."""

import fcntl
import os
import stat
import time
from collections.abc import Callable
from typing import IO, NamedTuple

from fsspec.implementations.local import LocalFileSystem

from .checked_io import resolve
from .manifest import CheckpointError

__all__ = ["keep_lock", "lock"]

_LOCK = ".lock"
_HOLDER_PREFIX = "process "
"""The first characters of every lock file of Polyphase."""


class _Held(NamedTuple):
    stream: IO[str]
    process: int


_held: dict[str, _Held] = {}
"""The locks of this process by folder. POSIX grants a process its own lock again, and releases it when any handle on
the file is closed, so the file must not be opened twice."""


def lock(folder: str | os.PathLike[str]) -> Callable[[], None]:
    """Locks `folder` until the returned function is called or the process ends.

    Raises:
        CheckpointError: another process, or another engine of this process, holds the lock; or ``.lock`` is not ours.
    """
    fs, root = resolve(folder)
    if not isinstance(fs, LocalFileSystem):
        return lambda: None  # object stores have no locks
    os.makedirs(root, exist_ok=True)
    root = os.path.realpath(root)
    if root in _held and _held[root].process == os.getpid():
        raise _in_use(folder, "another engine of this process")
    _held[root] = _Held(_take(root, folder), os.getpid())

    def release() -> None:
        held = _held.get(root)
        if held is not None and held.process == os.getpid():
            del _held[root]
            held.stream.close()

    return release


def keep_lock(folder: str) -> None:
    """Takes a lock of this process again if its local folder was removed in the meantime.

    Raises:
        CheckpointError: another process took the lock first.
    """
    root = os.path.realpath(folder)
    held = _held.get(root)
    if held is None or held.process != os.getpid():
        return
    try:
        current, locked = os.stat(f"{root}/{_LOCK}"), os.fstat(held.stream.fileno())
        if (current.st_dev, current.st_ino) == (locked.st_dev, locked.st_ino):
            return
    except FileNotFoundError:
        os.makedirs(root, exist_ok=True)
    _held[root] = _Held(_take(root, folder), os.getpid())
    held.stream.close()


def _take(root: str, folder: str | os.PathLike[str]) -> IO[str]:
    try:
        handle = os.open(
            f"{root}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666
        )
    except OSError as error:
        if os.path.islink(f"{root}/{_LOCK}") or os.path.isdir(f"{root}/{_LOCK}"):
            raise _not_ours(root) from None
        raise error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise _not_ours(root)
    stream = os.fdopen(handle, "r+")
    holder = stream.read(1000)
    try:
        # A record lock: child processes that inherit the file (workers of a loader, say) do not hold it.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # either means that another process holds the lock
        stream.close()
        raise _in_use(folder, holder.strip() or "another process") from None
    if holder and not holder.startswith(_HOLDER_PREFIX):
        stream.close()
        raise _not_ours(root)
    stream.seek(0)
    stream.truncate(0)
    stream.write(
        f"{_HOLDER_PREFIX}{os.getpid()} on {os.uname().nodename}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    )
    stream.flush()
    return stream


def _in_use(folder: str | os.PathLike[str], holder: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is in use: {holder} writes its checkpoints there. Use a different folder for each run, or stop the"
        " other run first."
    )


def _not_ours(root: str) -> CheckpointError:
    return CheckpointError(
        f"{root}/{_LOCK} is not a lock file of Polyphase, so it is not changed: move it away, or choose another folder."
    )
