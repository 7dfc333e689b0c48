"""A lock on a folder, so that only one run at a time saves into it. However the process ends, the lock is released.

It is a lock of `flock`, which belongs to the open file: closing other handles on ``.lock`` does not release it, as it
would release a record lock. On NFS, Linux turns it into a lock at the server: it holds between machines too, unless the
folder is mounted with ``nolock`` or ``local_lock``; then it holds between the processes of each machine alone. A
machine that loses its server for longer than the server's lease (90 s) loses the lock.

Runs without snapshots lock no folder. So whatever is being written under a temporary name is `held` itself.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from fsspec.implementations.local import LocalFileSystem

from .checked_io import naming, resolve
from .manifest import CheckpointError

__all__ = ["held", "is_held", "keep_lock", "lock"]

_LOCK = ".lock"
_HOLDER_PREFIX = "process "
"""The first characters of every lock file of Polyphase."""

_held: dict[str, IO[str]] = {}
"""The locks of this process by folder."""
_written: set[int] = set()
"""The handles of what this process writes."""


def _let_go() -> None:
    """Closes a forked child's copies of the locks, which would keep them when this process has ended."""
    for stream in _held.values():
        stream.close()
    for handle in _written:
        os.close(handle)
    _held.clear()
    _written.clear()


def held(path: str) -> Callable[[], None]:
    """Marks a local file or directory as being written, until the returned function is called or the process ends."""
    handle, process = os.open(path, os.O_RDONLY | os.O_CLOEXEC), os.getpid()
    with suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    _written.add(handle)

    def release() -> None:
        if os.getpid() == process and handle in _written:
            _written.remove(handle)
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    return release


def is_held(path: str) -> bool:
    """Whether a process is writing a local file or directory."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(handle)
    return False


os.register_at_fork(after_in_child=_let_go)


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
    if root in _held:
        raise _in_use(folder, "another engine of this process")
    _held[root] = _take(root, folder)
    process = os.getpid()

    def release() -> None:
        if os.getpid() == process and (held := _held.pop(root, None)) is not None:
            fcntl.flock(held, fcntl.LOCK_UN)  # a child that was just forked may not have closed its copy yet
            held.close()

    return release


def keep_lock(folder: str) -> None:
    """Takes a lock of this process again if its local folder was removed in the meantime.

    Raises:
        CheckpointError: another process took the lock first.
    """
    root = os.path.realpath(folder)
    held = _held.get(root)
    if held is None:
        return
    try:
        current, locked = os.stat(f"{root}/{_LOCK}"), os.fstat(held.fileno())
        if (current.st_dev, current.st_ino) == (locked.st_dev, locked.st_ino):
            return
    except FileNotFoundError:
        os.makedirs(root, exist_ok=True)
    _held[root] = _take(root, folder)
    held.close()


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
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        stream.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise CheckpointError(
                f"{folder} can't be locked ({error.strerror}), so another run could save there, too: choose a folder on"
                " a file system with locks (Lustre has them if it is mounted with -o flock)."
            ) from error
        raise _in_use(folder, holder.strip() or "another process") from None
    if holder and not holder.startswith(_HOLDER_PREFIX):
        stream.close()
        raise _not_ours(root)
    with naming(f"{root}/{_LOCK}"):
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
