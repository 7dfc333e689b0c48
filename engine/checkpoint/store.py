"""Checkpoints, directories and single files: whole and verified, or not there.

Phases of a save:
1. `begin`: a staging directory beside the final name, whose files are fsynced as they are written;
2. `publish`: `MANIFEST.json`, the last file, with the size and checksum of every other one;
3. a rename to the final name, and then the `last` link.

Whatever has no valid manifest does not exist. Object stores know no rename: there the files go under the final name,
and the manifest alone makes them a checkpoint. A single file is staged and renamed in the same way, by `writing_file`.
Paths are local ones or fsspec URLs.
"""

import os
import re
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from .files import Files, resolve, sync
from .locks import keep_lock, lock
from .manifest import (
    MANIFEST,
    README,
    CheckpointError,
    Manifest,
    NewerFormatError,
    is_checkpoint,
    is_directory,
    is_file_of_ours,
    manifest_bytes,
    read_manifest,
)
from .ownership import check_may_replace, standing_at
from .single_file import HEAD, wrong_in

__all__ = [
    "LEFTOVERS",
    "MANIFEST",
    "CheckpointError",
    "Manifest",
    "NewerFormatError",
    "begin",
    "check_files",
    "check_may_replace",
    "discard",
    "find",
    "home_of",
    "is_checkpoint",
    "is_directory",
    "is_leftover",
    "lock",
    "point",
    "publish",
    "read_manifest",
    "remove",
    "repair",
    "writing_file",
]

_STAGING = ".saving-"
_REPLACED = ".replaced-"
_LINK = ".link-"
LEFTOVERS = (_STAGING, _REPLACED)
"""Prefixes of the names of directories that are only there while a checkpoint is saved or removed."""
_LEFTOVER = re.compile(r"\.(saving|replaced)-[0-9a-f]{1,12}")
_LEFT_LINK = re.compile(r"\.link-[0-9a-f]{12}")


def begin(path: str | os.PathLike[str]) -> str:
    """Creates the directory to write to, for a checkpoint that will be `path`; called by one rank.

    Raises:
        CheckpointError: something that is not ours stands there, or another run has taken the folder.
    """
    check_may_replace(path)
    fs, final = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        remove(path)
        return fs.unstrip_protocol(final)
    keep_lock(_parent(final))
    staging = f"{_parent(final)}/{_STAGING}{_random_name()}"
    os.makedirs(staging)
    return staging


def publish(staging: str, path: str | os.PathLike[str], manifest: Manifest) -> str | None:
    """Makes what is in `staging` the checkpoint `path`; an older one of that name is there until the new one is.

    A damaged one of that name is moved aside.

    Returns:
        What the user should know of it; None for nothing.

    Raises:
        CheckpointError: something that is not ours stands there.
    """
    files = Files(staging)
    with files.writing(MANIFEST) as stream:
        stream.write(manifest_bytes(manifest))
    if not files.is_local:
        return None
    sync(staging)
    return _give_name(staging, resolve(path)[1])


@contextmanager
def writing_file(path: str | os.PathLike[str]) -> Iterator[tuple[Any, list[str]]]:
    """A stream to write the checkpoint `path` to, which has its name when all is written, and is not there before.

    With it comes a list, to which is added what the user should know of it.

    Raises:
        CheckpointError: something that is not ours stands there, or another run has taken the folder.
    """
    check_may_replace(path)
    fs, final = resolve(path)
    notes: list[str] = []
    if not isinstance(fs, LocalFileSystem):
        if fs.isdir(final):
            remove(path)
        with fs.transaction, fs.open(final, "wb") as stream:
            yield stream, notes
        return
    folder, staging = _parent(final), f"{_STAGING}{_random_name()}"
    os.makedirs(folder, exist_ok=True)
    keep_lock(folder)
    try:
        with Files(folder).writing(staging) as stream:
            yield stream, notes
        note = _give_name(f"{folder}/{staging}", final)
    except BaseException:
        if os.path.exists(f"{folder}/{staging}"):
            os.remove(f"{folder}/{staging}")
        raise
    notes += [] if note is None else [note]


def _give_name(staging: str, final: str) -> str | None:
    """Renames what was written; what had the name is there until then. Returns what the user should know of it."""
    replaced = note = None
    check_may_replace(final)
    if os.path.islink(final) or os.path.isfile(final):
        if os.path.isdir(staging):  # which, other than a file, can't be renamed onto it
            os.remove(final)
    elif standing_at(final).kind == "damaged":
        aside = f"{final}.damaged-{_random_name()}"
        os.rename(final, aside)
        note = f"{final} was damaged: it is called {aside} now, and a new one has its name."
    elif os.path.isdir(final) and os.listdir(final):
        # A directory that is not empty can't be renamed onto; between the two renames `repair` finds the way back.
        replaced = f"{_parent(final)}/{_REPLACED}{_random_name()}"
        os.rename(final, replaced)
    os.replace(staging, final)
    sync(_parent(final))
    if replaced is not None:
        remove(replaced)
    return note


def point(path: str | os.PathLike[str], name: str = "last") -> str | None:
    """Makes the link `name` beside a local checkpoint point at it; what has that name and is no link stays.

    Returns:
        What the user should know of it; None for nothing.
    """
    fs, final = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        return None
    link = f"{_parent(final)}/{name}"
    if os.path.lexists(link) and not os.path.islink(link):
        return f"{link} is no link, and stays as it is: it does not point at {final}."
    fresh = f"{_parent(final)}/{_LINK}{_random_name()}"
    os.symlink(os.path.basename(final), fresh)
    os.replace(fresh, link)
    return None


def discard(staging: str) -> None:
    """Removes what a failed save has left."""
    fs, folder = resolve(staging)
    if fs.exists(folder):
        fs.rm(folder, recursive=True)


def remove(path: str | os.PathLike[str]) -> None:
    """Removes a checkpoint: first its manifest, so that no half of it is ever taken for one.

    What is no checkpoint of ours stays, with a warning; so do files of others within one.
    """
    fs, folder = resolve(path)
    standing = standing_at(path)
    if isinstance(fs, LocalFileSystem) and os.path.islink(folder):
        os.remove(folder)
        return
    if not fs.exists(folder):
        return
    if standing.kind == "foreign":
        warnings.warn(f"{path} is {standing.about}: that is not removed.", stacklevel=2)
        _remove_among_others(path, standing.extras)
        return
    if not fs.isdir(folder):
        fs.rm_file(folder)
        return
    if fs.exists(f"{folder}/{MANIFEST}"):
        fs.rm_file(f"{folder}/{MANIFEST}")
    if isinstance(fs, LocalFileSystem):
        # Under a name that `repair` knows, should the process be killed in the middle of it.
        leftover = f"{_parent(folder)}/{_STAGING}{_random_name()}"
        os.rename(folder, leftover)
        folder = leftover
    fs.rm(folder, recursive=True)


def _remove_among_others(path: str | os.PathLike[str], extras: tuple[str, ...]) -> None:
    """Removes the files of a checkpoint, and not the `extras` beside them; does nothing if that is no checkpoint."""
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
    """Lists what is wrong with the files of a checkpoint, or with its only one; each is read once.

    Args:
        path: of the directory, or the file.
        manifest: of that.
        share: (r, W) to look at each W-th file only, or record, from the r-th on: W ranks share the work.
    """
    files = Files(path)
    if not is_directory(path) and files.fs.isfile(files.path):
        return wrong_in(path, share)
    mine = sorted(manifest.files)[share[0] :: share[1]]
    wrong = [problem for name in mine if (problem := files.check(name, *manifest.files[name]))]
    if share[0] == 0:
        present = {os.path.basename(entry.rstrip("/")) for entry in files.fs.ls(files.path, detail=False)}
        wrong += [f"{name} does not belong there" for name in sorted(present - {*manifest.files, MANIFEST, README})]
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
            if is_checkpoint(path):
                found.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(found, key=lambda each: each[1].order, reverse=True)


def is_leftover(path: str) -> bool:
    """Whether a local path is what a save or a removal has left that was killed: by its name and all it holds."""
    if not _LEFTOVER.fullmatch(os.path.basename(path)) or os.path.islink(path):
        return False
    if os.path.isfile(path):
        with open(path, "rb") as stream:
            return HEAD.startswith(stream.read(len(HEAD)))
    if not os.path.isdir(path):
        return False
    with os.scandir(path) as entries:
        return all(
            (entry.name == MANIFEST or is_file_of_ours(entry.name)) and entry.is_file(follow_symlinks=False)
            for entry in entries
        )


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
        if _LEFT_LINK.fullmatch(entry) and os.path.islink(f"{root}/{entry}"):  # killed before it got its name
            os.remove(f"{root}/{entry}")
    left = [f"{root}/{entry}" for entry in sorted(os.listdir(root)) if is_leftover(f"{root}/{entry}")]
    # Staged ones first: they are newer than what they were to replace.
    for path in sorted(left, key=lambda path: os.path.basename(path).startswith(_REPLACED)):
        try:
            final = home_of(path)
        except NewerFormatError:
            continue  # the version that wrote it knows what to do
        if final is None:
            discard(path)
        else:
            os.rename(path, final)
            back.append(final)
    return back


def home_of(leftover: str) -> str | None:
    """The path that a directory or file of a killed process shall get; None if it is of no use.

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
