"""Publishes checkpoints (directories and single files) atomically: complete and verified, or not at all.

Phases of a save:
1. `begin` creates a staging directory beside the final path; its files are fsynced as they are written;
2. `publish` writes `MANIFEST.json` last, with the size and checksum of every other file;
3. it renames the directory to the final name, and then `update_link` sets the `last` link.

A directory without a valid manifest does not count as a checkpoint. Object stores have no rename: there the files are
written under the final name, and the manifest makes them a checkpoint. `writing_file` stages and renames a single file
in the same way. Paths are local paths or fsspec URLs.
"""

import errno
import fcntl
import os
import re
import stat
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import IO, Any

from fsspec.implementations.local import LocalFileSystem

from ..foreign import NotAPlainFileError, for_terminal, open_plain
from .checked_io import Files, naming, resolve, sync
from .errors import CheckpointError, NewerFormatError
from .manifest import (
    MANIFEST,
    Manifest,
    PathStatus,
    check_may_replace,
    is_directory,
    is_file_of_ours,
    manifest_bytes,
    path_status,
    read_manifest,
)
from .single_file import HEAD, wrong_in

__all__ = [
    "LEFTOVERS",
    "begin",
    "check_files",
    "discard",
    "final_path_of",
    "is_held",
    "is_leftover",
    "lock",
    "publish",
    "remove",
    "repair",
    "set_aside",
    "update_link",
    "writing_file",
]

_NUM_AT_ONCE = 2
"""The number of files that are checked at once: as many as a rank writes at once."""

_STAGING = ".saving-"
_REPLACED = ".replaced-"
_LINK = ".link-"
LEFTOVERS = (_STAGING, _REPLACED)
"""Name prefixes of temporary directories, which exist only while a checkpoint is saved or removed."""
_LEFTOVER = re.compile(r"\.(saving|replaced)-[0-9a-f]{1,12}")
_LEFT_LINK = re.compile(r"\.link-[0-9a-f]{12}")


def begin(path: str | os.PathLike[str]) -> str:
    """Creates the staging directory for the checkpoint `path`; called by one rank.

    Raises:
        CheckpointError: `path` exists and is not ours, or another run has locked the folder.
    """
    status = check_may_replace(path)
    fs, final = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        if (note := _make_way(path, status)) is not None:
            warnings.warn(note, stacklevel=2)
        return fs.unstrip_protocol(final)
    _keep_lock(_parent(final))
    staging = f"{_parent(final)}/{_STAGING}{_random_name()}"
    os.makedirs(staging)
    _releases[staging] = held(staging)
    return staging


def publish(staging: str, path: str | os.PathLike[str], manifest: Manifest) -> str | None:
    """Publishes the directory `staging` as the checkpoint `path`, replacing an older one atomically.

    A damaged checkpoint of that name is moved aside.

    Returns:
        A note for the user, or None.

    Raises:
        CheckpointError: `path` exists and is not ours.
    """
    files = Files(staging)
    with files.writing(MANIFEST) as stream:
        stream.write(manifest_bytes(manifest))
    if not files.is_local:
        return None
    sync(staging)
    note = _give_name(staging, resolve(path)[1])
    _release(staging)
    return note


@contextmanager
def writing_file(path: str | os.PathLike[str]) -> Iterator[tuple[Any, list[str]]]:
    """Opens a stream that writes the single-file checkpoint `path`; the file gets its name once it is complete.

    Yields the stream, and a list to which notes for the user are added.

    Raises:
        CheckpointError: `path` exists and is not ours, or another run has locked the folder.
    """
    status = check_may_replace(path)
    fs, final = resolve(path)
    notes: list[str] = []
    if not isinstance(fs, LocalFileSystem):
        if fs.isdir(final):
            note = _make_way(path, status)
            notes += [] if note is None else [note]
        with fs.transaction, fs.open(final, "wb") as stream:
            yield stream, notes
        return
    folder, staging = _parent(final), f"{_STAGING}{_random_name()}"
    os.makedirs(folder, exist_ok=True)
    _keep_lock(folder)
    try:
        with Files(folder).writing(staging, notes_sum=False, names=final) as stream:
            _releases[staging] = held(f"{folder}/{staging}")
            yield stream, notes
        note = _give_name(f"{folder}/{staging}", final)
    except BaseException:
        if os.path.exists(f"{folder}/{staging}"):
            os.remove(f"{folder}/{staging}")
        raise
    finally:
        _release(staging)
    notes += [] if note is None else [note]


_releases: dict[str, Callable[[], None]] = {}
"""Ends the hold on what this process writes, by its temporary name."""


def _release(staging: str) -> None:
    if (release := _releases.pop(staging, None)) is not None:
        release()


def _give_name(staging: str, final: str) -> str | None:
    """Renames `staging` to `final`; an older checkpoint stays until then. Returns a note for the user, or None."""
    replaced = note = None
    status = check_may_replace(final)
    if os.path.islink(final) or os.path.isfile(final):
        if os.path.isdir(staging):  # unlike a file, a directory can't replace a link by a rename
            os.remove(final)
    elif status.kind == "damaged":
        aside, note = _aside(final)
        os.rename(final, aside)
    elif os.path.isdir(final) and os.listdir(final):
        # A rename can't replace a non-empty directory, so two renames are needed; `repair` recovers a crash in between.
        replaced = f"{_parent(final)}/{_REPLACED}{_random_name()}"
        os.rename(final, replaced)
    os.replace(staging, final)
    sync(_parent(final))
    if replaced is not None:
        remove(replaced)
    return note


def _make_way(path: str | os.PathLike[str], status: PathStatus) -> str | None:
    """Frees a URL: a damaged checkpoint is moved aside, another one removed. Returns a note for the user, or None."""
    fs, final = resolve(path)
    if status.kind != "damaged" or not fs.exists(f"{final}/{MANIFEST}"):  # without one, it is unfinished
        remove(path)
        return None
    aside, note = _aside(fs.unstrip_protocol(final))
    fs.mv(final, resolve(aside)[1], recursive=True)
    return note


def _aside(final: str) -> tuple[str, str]:
    """Returns a free name for the damaged checkpoint `final`, and a note for the user."""
    aside = f"{final}.damaged-{_random_name()}"
    return aside, for_terminal(f"{final} was damaged: it was renamed to {aside}, and a new checkpoint has its name.")


def set_aside(path: str) -> str | None:
    """Renames a checkpoint that is damaged, so that no run opens, counts or replaces it; returns a note for the user.

    Nothing is renamed on an object store, or in a folder that can't be written to or that another run has locked.
    """
    fs, final = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        return None
    aside, _ = _aside(final)
    try:
        _keep_lock(_parent(final))
        os.rename(final, aside)
    except (CheckpointError, OSError):
        return None
    return for_terminal(f"{path} is damaged: it was renamed to {aside}.")


def update_link(path: str | os.PathLike[str], name: str = "last") -> str | None:
    """Makes the link `name` in a local checkpoint's folder point to it; a file or directory of that name stays.

    Returns:
        A note for the user, or None.
    """
    fs, final = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        return None
    link = f"{_parent(final)}/{name}"
    if os.path.lexists(link) and not os.path.islink(link):
        return f"{link} is no link, so it is left unchanged and does not point at {final}."
    fresh = f"{_parent(final)}/{_LINK}{_random_name()}"
    os.symlink(os.path.basename(final), fresh)
    os.replace(fresh, link)
    return None


def discard(staging: str) -> None:
    """Removes the leftovers of a failed save."""
    fs, folder = resolve(staging)
    _release(folder)
    if fs.exists(folder):
        fs.rm(folder, recursive=True)


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint, its manifest first, so that a partly removed checkpoint does not count as one.

    A path that is not one of our checkpoints is kept, with a warning; so are foreign files inside a checkpoint.
    """
    fs, folder = resolve(path)
    status = path_status(path)
    if isinstance(fs, LocalFileSystem) and os.path.islink(folder):
        os.remove(folder)
        return
    if not fs.exists(folder):
        return
    if status.kind == "foreign":
        warnings.warn(for_terminal(f"{path} is {status.about}: it is not removed."), stacklevel=2)
        _remove_among_others(path, status.extras)
        return
    if not fs.isdir(folder):
        fs.rm_file(folder)
        return
    if fs.exists(f"{folder}/{MANIFEST}"):
        fs.rm_file(f"{folder}/{MANIFEST}")
    if isinstance(fs, LocalFileSystem):
        # Renamed first, so that `repair` can finish the removal if the process is killed during it.
        leftover = f"{_parent(folder)}/{_STAGING}{_random_name()}"
        os.rename(folder, leftover)
        folder = leftover
    fs.rm(folder, recursive=True)


def _remove_among_others(path: str | os.PathLike[str], extras: tuple[str, ...]) -> None:
    """Removes the files of a checkpoint, but not the foreign `extras`; does nothing if `path` is not a checkpoint."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return
    files = Files(path)
    files.fs.rm_file(files.join(MANIFEST))
    for name in manifest.files.keys() - {*extras}:
        if files.fs.exists(files.join(name)):
            files.fs.rm_file(files.join(name))


def check_files(path: str | os.PathLike[str], manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Reads the files of a checkpoint once and lists the faults; other files beside them are ignored.

    Args:
        path: the directory, or the single file.
        manifest: the checkpoint's manifest.
        share: (r, W) to check every W-th file (or record) from the r-th on, so that W ranks share the work.
    """
    files = Files(path)
    if not is_directory(path) and files.fs.isfile(files.path):
        return wrong_in(path, share)
    names = sorted(manifest.files)[share[0] :: share[1]]
    with ThreadPoolExecutor(_NUM_AT_ONCE) as threads:
        return list(filter(None, threads.map(lambda name: files.check(name, *manifest.files[name]), names)))


def is_leftover(path: str) -> bool:
    """Whether a local path is left over from a killed save or removal, judged by its name and its content."""
    if not _LEFTOVER.fullmatch(os.path.basename(path)) or os.path.islink(path):
        return False
    try:
        if os.path.isfile(path):
            with open_plain(path) as stream:
                return HEAD.startswith(stream.read(len(HEAD)))
        if not os.path.isdir(path):
            return False
        with os.scandir(path) as entries:
            return all(
                (entry.name == MANIFEST or is_file_of_ours(entry.name)) and entry.is_file(follow_symlinks=False)
                for entry in entries
            )
    except (OSError, NotAPlainFileError):  # another user's
        return False


def repair(folder: str | os.PathLike[str]) -> list[str]:
    """Cleans up after a process that was killed while it saved into `folder`; called by the only writer.

    A complete checkpoint that was not yet renamed gets its final name; unfinished ones are removed.

    Returns:
        The paths that were restored.
    """
    fs, root = resolve(folder)
    restored: list[str] = []
    if not isinstance(fs, LocalFileSystem) or not os.path.isdir(root):
        return restored
    for entry in os.listdir(root):
        if _LEFT_LINK.fullmatch(entry) and os.path.islink(f"{root}/{entry}"):  # killed before the rename
            os.remove(f"{root}/{entry}")
    leftovers = [f"{root}/{entry}" for entry in sorted(os.listdir(root)) if is_leftover(f"{root}/{entry}")]
    leftovers = [path for path in leftovers if not is_held(path)]
    # Staged checkpoints first: they are newer than the checkpoints that they replace.
    for path in sorted(leftovers, key=lambda path: os.path.basename(path).startswith(_REPLACED)):
        try:
            final = final_path_of(path)
        except NewerFormatError:
            continue  # left for the newer version that wrote it
        if final is None:
            discard(path)
        else:
            os.rename(path, final)
            restored.append(final)
    return restored


def final_path_of(leftover: str) -> str | None:
    """Returns the final path of a leftover that is complete; None if it is incomplete or the path is taken.

    Args:
        leftover: a local path whose name begins with one of `LEFTOVERS`.

    Raises:
        NewerFormatError: a newer version wrote it.
    """
    try:
        manifest = read_manifest(leftover)
    except NewerFormatError:
        raise
    except CheckpointError:
        return None
    final = f"{_parent(leftover)}/{manifest.name}"
    return None if os.path.lexists(final) or check_files(leftover, manifest) else final


def _parent(path: str) -> str:
    return os.path.dirname(path)


def _random_name() -> str:
    return uuid.uuid4().hex[:12]


# --- a lock on a folder, so that only one run at a time saves into it. However the process ends, the lock is released
# It is a lock of `flock`, which belongs to the open file: closing other handles on ``.lock`` does not release it, as it
# would release a record lock. On NFS, Linux turns it into a lock at the server: it holds between machines too, unless
# the folder is mounted with ``nolock`` or ``local_lock``; then it holds between the processes of each machine alone. A
# machine that loses its server for longer than the server's lease (90 s) loses the lock.
#
# Runs without snapshots lock no folder. So whatever is being written under a temporary name is `held` itself.


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


def _keep_lock(folder: str) -> None:
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
    stream = os.fdopen(handle, "r+", errors="replace")
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
