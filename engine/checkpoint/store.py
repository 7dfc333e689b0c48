"""Checkpoint directories: whole and verified, or not there.

Phases of a save:
1. `begin`: a staging directory beside the final name, whose files are fsynced as they are written;
2. `publish`: `MANIFEST.json`, the last file, with the size and checksum of every other one;
3. a rename to the final name, and then the `last` link.

Whatever has no valid manifest does not exist. Object stores know no rename: there the files go under the final name,
and the manifest alone makes them a checkpoint. Paths are local ones or fsspec URLs.
"""

import dataclasses
import fcntl
import json
import os
import time
import uuid
import zlib
from collections.abc import Callable
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ..flags import did_you_mean
from .files import Files, resolve, sync

__all__ = [
    "LEFTOVERS",
    "MANIFEST",
    "CheckpointError",
    "Manifest",
    "begin",
    "check_files",
    "discard",
    "find",
    "home_of",
    "is_checkpoint",
    "lock",
    "point",
    "publish",
    "read_manifest",
    "remove",
    "repair",
]

MANIFEST = "MANIFEST.json"
FORMAT = 1
"""Version of the directory's format; a larger one is refused."""

_LOCK = ".lock"
_STAGING = ".saving-"
_REPLACED = ".replaced-"
_LINK = ".link-"
LEFTOVERS = (_STAGING, _REPLACED)
"""What the names of directories begin with that are only there while a checkpoint is saved or removed."""


class CheckpointError(ValueError):
    """A checkpoint can't be opened: it is none, or damaged, or does not fit; the message says which."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What `MANIFEST.json` says."""

    name: str
    """Name under which the directory was published."""
    step: int
    """Optimizer steps done."""
    epoch: int
    time: float
    """Seconds since the epoch of UNIX."""
    layout: dict[str, int]
    """Sizes of the mesh axes larger than one."""
    world_size: int
    versions: dict[str, str]
    files: dict[str, tuple[int, int]]
    """Size in bytes and CRC-32 of each file, by its name."""
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(size for size, _ in self.files.values())


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory that was published."""
    fs, folder = resolve(path)
    return fs.exists(f"{folder}/{MANIFEST}")


def begin(path: str | os.PathLike[str]) -> str:
    """Creates the directory to write to, for a checkpoint that will be `path`; called by one rank."""
    fs, final = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        remove(path)
        return fs.unstrip_protocol(final)
    staging = f"{_parent(final)}/{_STAGING}{uuid.uuid4().hex[:12]}"
    os.makedirs(staging)
    return staging


def publish(staging: str, path: str | os.PathLike[str], manifest: Manifest) -> None:
    """Makes what is in `staging` the checkpoint `path`; an older one of that name is there until the new one is."""
    files = Files(staging)
    content = dataclasses.asdict(manifest)
    content["crc32"] = _crc_of(content)
    with files.writing(MANIFEST) as stream:
        stream.write(json.dumps(content, indent=1).encode())
    if not files.is_local:
        return
    sync(staging)
    _, final = resolve(path)
    replaced = None
    if os.path.isdir(final) and not os.path.islink(final):
        # A directory that is not empty can't be renamed onto; between the two renames `repair` finds the way back.
        replaced = f"{_parent(final)}/{_REPLACED}{uuid.uuid4().hex[:12]}"
        os.rename(final, replaced)
    elif os.path.lexists(final):
        os.remove(final)
    os.rename(staging, final)
    sync(_parent(final))
    if replaced is not None:
        remove(replaced)


def point(path: str | os.PathLike[str], name: str = "last") -> None:
    """Makes the link `name` beside a local checkpoint point at it."""
    fs, final = resolve(path)
    if isinstance(fs, LocalFileSystem):
        link = f"{_parent(final)}/{name}"
        fresh = f"{_parent(final)}/{_LINK}{uuid.uuid4().hex[:12]}"
        os.symlink(os.path.basename(final), fresh)
        os.replace(fresh, link)


def discard(staging: str) -> None:
    """Removes what a failed save has left."""
    fs, folder = resolve(staging)
    if fs.exists(folder):
        fs.rm(folder, recursive=True)


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint: first its manifest, so that no half of it is ever taken for one."""
    fs, folder = resolve(path)
    if isinstance(fs, LocalFileSystem) and os.path.islink(folder):
        os.remove(folder)
        return
    if not fs.exists(folder):
        return
    if fs.exists(f"{folder}/{MANIFEST}"):
        fs.rm_file(f"{folder}/{MANIFEST}")
    if isinstance(fs, LocalFileSystem):
        # Under a name that `repair` knows, should the process be killed in the middle of it.
        leftover = f"{_parent(folder)}/{_STAGING}{uuid.uuid4().hex[:12]}"
        os.rename(folder, leftover)
        folder = leftover
    fs.rm(folder, recursive=True)


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint; its files are not looked at, see `check_files`.

    Raises:
        CheckpointError: there is none, it is damaged, or it was written by a newer version.
    """
    fs, folder = resolve(path)
    if not fs.exists(folder):
        raise CheckpointError(f"There is no checkpoint at {path}.{_nearest(fs.unstrip_protocol(folder))}")
    if not fs.exists(f"{folder}/{MANIFEST}"):
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {MANIFEST}, so it was never finished or is something else."
        )
    try:
        content = json.loads(fs.cat_file(f"{folder}/{MANIFEST}"))
        crc = content.pop("crc32")
        if crc != _crc_of(content):
            raise ValueError("its checksum differs")
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"The checkpoint {path} has format {content['format']}, this version of Polyphase opens formats up to"
                f" {FORMAT}: install Polyphase {content['versions']['polyphase']} or newer."
            )
        content["files"] = {name: (size, crc) for name, (size, crc) in content["files"].items()}
        return Manifest(**content)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as damage:
        raise CheckpointError(f"The checkpoint {path} is damaged: {MANIFEST} can't be trusted ({damage}).") from None


def check_files(path: str | os.PathLike[str], manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the files of a checkpoint; each is read once.

    Args:
        path: of the directory.
        manifest: of that directory.
        share: (r, W) to look at each W-th file only, from the r-th on: W ranks share the work.
    """
    files = Files(path)
    mine = sorted(manifest.files)[share[0] :: share[1]]
    wrong = [problem for name in mine if (problem := files.check(name, *manifest.files[name]))]
    if share[0] == 0:
        present = {os.path.basename(entry) for entry in files.fs.ls(files.path, detail=False)}
        wrong += [f"{name} does not belong there" for name in sorted(present - {*manifest.files, MANIFEST})]
    return wrong


def find(folder: str | os.PathLike[str]) -> list[tuple[str, Manifest]]:
    """All checkpoints in a folder whose manifest is valid, the newest first; their files are not looked at."""
    fs, root = resolve(folder)
    if not fs.isdir(root):
        return []
    fs.invalidate_cache(root)
    found = []
    for entry in fs.ls(root, detail=False):
        if isinstance(fs, LocalFileSystem) and os.path.islink(entry):
            continue  # `last`, which is one of the others
        path = entry if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(entry)
        try:
            if fs.isdir(entry) and is_checkpoint(path):
                found.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda each: (each[1].step, each[1].time), reverse=True)


def repair(folder: str | os.PathLike[str]) -> list[str]:
    """Cleans up after a process that was killed while it saved into `folder`; called by the only writer.

    A checkpoint that was published but not renamed gets its name; what was never finished is removed.

    Returns:
        The paths that came back.
    """
    fs, root = resolve(folder)
    back: list[str] = []
    if not isinstance(fs, LocalFileSystem) or not os.path.isdir(root):
        return back
    for entry in os.listdir(root):
        if entry.startswith(_LINK):  # killed before it got its name
            os.remove(f"{root}/{entry}")
    left = [f"{root}/{entry}" for entry in sorted(os.listdir(root)) if entry.startswith(LEFTOVERS)]
    # Staged ones first: they are newer than what they were to replace.
    for path in sorted(left, key=lambda path: os.path.basename(path).startswith(_REPLACED)):
        final = home_of(path)
        if final is None:
            discard(path)
        else:
            os.rename(path, final)
            back.append(final)
    return back


def home_of(leftover: str) -> str | None:
    """The path that a directory of a killed process shall get; None if it is of no use.

    Args:
        leftover: a local path whose name begins with one of `LEFTOVERS`.
    """
    try:
        manifest = read_manifest(leftover)
    except CheckpointError:
        return None
    final = f"{_parent(leftover)}/{manifest.name}"
    return None if os.path.lexists(final) or check_files(leftover, manifest) else final


def lock(folder: str | os.PathLike[str]) -> Callable[[], None]:
    """Holds `folder` for this process, until the function returned is called or the process ends, however it ends.

    Raises:
        CheckpointError: another process holds it.
    """
    fs, root = resolve(folder)
    if not isinstance(fs, LocalFileSystem):
        return lambda: None  # object stores have no locks
    os.makedirs(root, exist_ok=True)
    handle = open(f"{root}/{_LOCK}", "a+")  # noqa: SIM115 - held until released
    try:
        # A record lock: children that inherit the file (a loader's workers, say) do not hold it.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # how systems say that another process has it
        handle.seek(0)
        holder = handle.read().strip() or "another process"
        handle.close()
        raise CheckpointError(
            f"{folder} is in use: {holder} writes its checkpoints there. Give each run a folder of its own, or end the"
            " other one first."
        ) from None
    handle.truncate(0)
    handle.write(f"process {os.getpid()} on {os.uname().nodename}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
    handle.flush()
    return handle.close


def _parent(path: str) -> str:
    return os.path.dirname(path)


def _crc_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _nearest(path: str) -> str:
    """Names the checkpoint beside a path that does not exist which is called most like it, and the newest one."""
    parent, name = os.path.split(path)
    beside = [os.path.basename(found) for found, _ in find(parent)]
    if not beside:
        return ""
    return f"{did_you_mean(name, beside, str)} The newest one in {parent.removeprefix('file://')} is {beside[0]}."
