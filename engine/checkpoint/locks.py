"""One run at a time saves into a folder: a lock that ends with its process, however that ends."""

import fcntl
import os
import stat
import time
from collections.abc import Callable
from typing import IO, NamedTuple

from fsspec.implementations.local import LocalFileSystem

from .files import resolve
from .manifest import CheckpointError

__all__ = ["keep_lock", "lock"]

_LOCK = ".lock"
_SAYS = "process "
"""The first word in each lock file of ours."""


class _Held(NamedTuple):
    stream: IO[str]
    process: int


_held: dict[str, _Held] = {}
"""The locks of this process by folder. The system gives a process its own lock a second time, and takes it away when
any of its handles on the file is closed, so nobody may open it twice."""


def lock(folder: str | os.PathLike[str]) -> Callable[[], None]:
    """Holds `folder` for this process, until the function returned is called or the process ends, however it ends.

    Raises:
        CheckpointError: another process, or another engine of this one, holds it; or ``.lock`` is not ours.
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
    """Takes a lock anew that this process holds on a local folder, if somebody has removed the folder meanwhile.

    Raises:
        CheckpointError: another process was faster.
    """
    root = os.path.realpath(folder)
    held = _held.get(root)
    if held is None or held.process != os.getpid():
        return
    try:
        there, ours = os.stat(f"{root}/{_LOCK}"), os.fstat(held.stream.fileno())
        if (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino):
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
    said = stream.read(1000)
    try:
        # A record lock: children that inherit the file (a loader's workers, say) do not hold it.
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # how systems say that another process has it
        stream.close()
        raise _in_use(folder, said.strip() or "another process") from None
    if said and not said.startswith(_SAYS):
        stream.close()
        raise _not_ours(root)
    stream.seek(0)
    stream.truncate(0)
    stream.write(f"{_SAYS}{os.getpid()} on {os.uname().nodename}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    stream.flush()
    return stream


def _in_use(folder: str | os.PathLike[str], holder: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} is in use: {holder} writes its checkpoints there. Give each run a folder of its own, or end the"
        " other one first."
    )


def _not_ours(root: str) -> CheckpointError:
    return CheckpointError(
        f"{root}/{_LOCK} is no lock of Polyphase's, and is left as it is: move it away, or give another folder."
    )
