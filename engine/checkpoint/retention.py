"""Lists the checkpoints of a folder and removes old ones."""

import os
from typing import Literal, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from ..flags import check_count
from .checked_io import resolve
from .errors import CheckpointError, NewerFormatError
from .folder_index import FolderIndex
from .manifest import MANIFEST, Manifest, is_file_of_ours, is_reserved, is_set_aside, read_manifest
from .publish import LEFTOVERS, check_files, final_path_of, is_held, is_leftover, lock, remove, repair
from .single_file import is_archive, manifest_text, wrong_in

__all__ = ["Entry", "list_entries", "prune"]


class Entry(NamedTuple):
    """A directory or a single-file checkpoint in a folder of checkpoints."""

    path: str
    kind: Literal["checkpoint", "damaged", "newer", "unfinished", "other"]
    """Newer: its format is newer than this version supports. Unfinished: a save or a removal was interrupted, or is
    still in progress."""
    manifest: Manifest | None = None
    """The checkpoint's manifest; None if the entry is not a checkpoint."""
    problem: str = ""
    """The reason why the entry is not a checkpoint."""
    newer_sequence: int | None = None
    """The `Manifest.sequence` of a checkpoint with a newer format, if it is readable."""

    @property
    def name(self) -> str:
        """The last component of the path."""
        return os.path.basename(self.path)


class _Pruned(NamedTuple):
    """The result of `prune`: the changes that were made, or would be made in a dry run."""

    removed: list[str]
    kept: list[str]
    renamed: list[str]
    """Complete checkpoints that got their final names, because their process was killed before the rename."""
    notes: list[str]
    """Messages about damaged or unfinished checkpoints, with the reason why they were not removed."""


def list_entries(folder: str | os.PathLike[str], index: FolderIndex | None = None) -> list[Entry]:
    """Lists a folder's checkpoints, newest first, then directories and `.ckpt` files that are not checkpoints.

    Args:
        folder: local or an fsspec URL.
        index: knows checkpoints that are then not opened; their manifests have no files, layout, versions and loggers.
    """
    fs, root = resolve(folder)
    fs.invalidate_cache(root)
    is_local = isinstance(fs, LocalFileSystem)
    places, entries = [], []
    for place in sorted(fs.ls(root, detail=False)):
        name = os.path.basename(place.rstrip("/"))
        if is_local and os.path.islink(place):
            continue  # the link `last` points at a checkpoint that is listed itself
        path = place if is_local else fs.unstrip_protocol(place)
        if is_set_aside(name):
            entries.append(Entry(path, "other", problem="was moved aside, since it is damaged"))
        elif not is_reserved(name) or name.startswith(LEFTOVERS):
            places.append((place, path))
    of_index = {} if index is None else index.manifests([place for place, _ in places])
    for place, path in places:
        if place in of_index:
            entries.append(Entry(path, "checkpoint", of_index[place]))
        elif fs.isdir(place):
            entries.append(_entry(fs, place, path))
        elif (entry := _entry_of_file(path)) is not None:
            entries.append(entry)
    return sorted(entries, key=_age, reverse=True)


def _entry_of_file(path: str) -> Entry | None:
    """Returns the entry of our file or of a damaged `.ckpt`; None for others, such as an intact Lightning file."""
    if is_leftover(path):
        return Entry(path, "unfinished", problem="is being saved, or was when its process was killed")
    if not is_archive(path):
        return None
    if manifest_text(path) is None:
        wrong = wrong_in(path) if path.endswith(".ckpt") else []
        return Entry(path, "damaged", problem=f"can't be opened: {'; '.join(wrong)}") if wrong else None
    try:
        return Entry(path, "checkpoint", read_manifest(path))
    except NewerFormatError as newer:
        return Entry(path, "newer", problem=f"can't be opened: {newer}", newer_sequence=newer.sequence)
    except CheckpointError as damage:
        return Entry(path, "damaged", problem=f"can't be opened: {damage}")


def _age(entry: Entry) -> tuple[float, ...]:
    return (-1,) if entry.manifest is None else entry.manifest.order


def _entry(fs: AbstractFileSystem, fs_path: str, path: str) -> Entry:
    is_temporary = os.path.basename(path).startswith(LEFTOVERS)
    if is_temporary and (not isinstance(fs, LocalFileSystem) or is_leftover(path)):
        try:
            read_manifest(path)
        except NewerFormatError as newer:
            return Entry(path, "newer", problem=f"can't be opened: {newer}", newer_sequence=newer.sequence)
        except CheckpointError:
            pass  # an interrupted save has no valid manifest
        problem = "is being saved or removed, or was when its process was killed"
        return Entry(path, "unfinished", problem=problem)
    try:
        files = [os.path.basename(file.rstrip("/")) for file in fs.ls(fs_path, detail=False)]
        if MANIFEST in files:
            return Entry(path, "checkpoint", read_manifest(path))
    except NewerFormatError as newer:
        return Entry(path, "newer", problem=f"can't be opened: {newer}", newer_sequence=newer.sequence)
    except CheckpointError as damage:
        return Entry(path, "damaged", problem=f"can't be opened: {damage}")
    except OSError as error:
        return Entry(path, "damaged", problem=f"can't be read: {error.strerror or error}")
    if files and all(is_file_of_ours(file) for file in files):
        return Entry(path, "unfinished", problem=f"was never finished, or only half removed: it has no {MANIFEST}")
    return Entry(path, "other", problem=f"is no checkpoint: it has no {MANIFEST}")


def prune(
    folder: str | os.PathLike[str], *, keep_last: int, keep_every: int | None = None, dry_run: bool = False
) -> _Pruned:
    """Removes old checkpoints of a folder, and unfinished ones; holds the folder's lock meanwhile.

    The newest undamaged checkpoint, the target of the link ``last``, and everything that is not a checkpoint are always
    kept.

    Args:
        folder: local or an fsspec URL.
        keep_last: number of the newest checkpoints to keep.
        keep_every: also keep checkpoints whose step is a multiple of this; None to disable.
        dry_run: change nothing, and only return what would change.

    Raises:
        ValueError: a number below 1.
        CheckpointError: a run saves there, or another command prunes it.
    """
    check_count("--keep-last", keep_last)
    if keep_every is not None:
        check_count("--keep-every", keep_every)
    release = lock(folder)
    try:
        return _prune(folder, keep_last, keep_every, dry_run)
    finally:
        release()


def _prune(folder: str | os.PathLike[str], keep_last: int, keep_every: int | None, dry_run: bool) -> _Pruned:
    removed, renamed, notes = _prune_unfinished(folder, dry_run)
    entries = list_entries(folder)
    manifests = {entry.path: entry.manifest for entry in entries if entry.manifest is not None}
    notes += [f"{entry.path} {entry.problem}" for entry in entries if entry.kind in ("damaged", "newer", "other")]
    kept = set(list(manifests)[:keep_last])
    kept |= {path for path, manifest in manifests.items() if keep_every and manifest.step % keep_every == 0}
    last = os.path.basename(os.path.realpath(os.path.join(folder, "last")))
    kept |= {path for path in manifests if os.path.basename(path) == last}
    kept |= _newest_valid(manifests, notes)
    superfluous = [path for path in manifests if path not in kept]
    for path in superfluous:
        if not dry_run:
            remove(path)
    return _Pruned([*superfluous, *removed], [path for path in manifests if path in kept], renamed, notes)


def _newest_valid(manifests: dict[str, Manifest], notes: list[str]) -> set[str]:
    """Returns the newest undamaged checkpoint; all of them if all are damaged, since parts may be recoverable."""
    for path, manifest in manifests.items():
        wrong = check_files(path, manifest)
        if not wrong:
            return {path}
        notes.append(f"{path} is damaged: {'; '.join(wrong)}")
    return set(manifests)


def _prune_unfinished(folder: str | os.PathLike[str], dry_run: bool) -> tuple[list[str], list[str], list[str]]:
    """Removes unfinished checkpoints; returns the removed paths, the renamed paths, and notes on the kept ones."""
    unfinished = [entry.path for entry in list_entries(folder) if entry.kind == "unfinished"]
    if not unfinished:
        return [], [], []
    if not isinstance(resolve(folder)[0], LocalFileSystem):
        # Object stores have no locks: a run may still be writing it.
        return [], [], [f"{path} is unfinished: if no run saves there, remove it yourself" for path in unfinished]
    final_paths, notes = {}, []
    for path in unfinished:
        if is_held(path):
            notes.append(f"{path} is being saved, and left alone")
            continue
        try:
            final_paths[path] = final_path_of(path)
        except NewerFormatError as newer:
            notes.append(f"{path} is unfinished, and left for the newer version that wrote it: {newer}")
    if not dry_run:
        repair(folder)
        for path in final_paths:
            remove(path)  # those that `repair` does not recognise
    removed = [path for path, final in final_paths.items() if not final]
    return removed, sorted(filter(None, {*final_paths.values()})), notes
