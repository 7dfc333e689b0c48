"""A folder of checkpoints: what is in it, and what of it may go."""

import os
from typing import Literal, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from ..flags import check_count
from .files import resolve
from .locks import lock
from .manifest import MANIFEST, CheckpointError, Manifest, NewerFormatError, is_file_of_ours, read_manifest
from .single_file import is_archive, manifest_text, wrong_in
from .store import LEFTOVERS, check_files, home_of, is_leftover, remove, repair

__all__ = ["Entry", "Pruned", "prune", "survey"]


class Entry(NamedTuple):
    """A directory, or a checkpoint that is one file, in a folder of checkpoints."""

    path: str
    kind: Literal["checkpoint", "damaged", "newer", "unfinished", "other"]
    """Newer: of a format that this version does not know. Unfinished is what a save or a removal has left that did not
    end, or has not ended yet."""
    manifest: Manifest | None = None
    """The checkpoint's manifest; None if it is no checkpoint."""
    problem: str = ""
    """The reason that it is no checkpoint."""
    newer_sequence: int | None = None
    """The place in the order of saves of a checkpoint of a newer format, if it says so."""

    @property
    def name(self) -> str:
        """The last part of the path, without the folder."""
        return os.path.basename(self.path)


class Pruned(NamedTuple):
    """The result of `prune`: what it did, or would do."""

    removed: list[str]
    kept: list[str]
    renamed: list[str]
    """Checkpoints that were whole, but had not got their names when their process was killed."""
    notes: list[str]
    """Messages about checkpoints that are damaged or unfinished, and why they were left alone."""


def survey(folder: str | os.PathLike[str]) -> list[Entry]:
    """Lists a folder's checkpoints, the newest first, and then directories and `.ckpt` files that are none."""
    fs, root = resolve(folder)
    fs.invalidate_cache(root)
    found = []
    for place in sorted(fs.ls(root, detail=False)):
        is_local = isinstance(fs, LocalFileSystem)
        path = place if is_local else fs.unstrip_protocol(place)
        if is_local and os.path.islink(place):  # `last`, which is one of the others
            continue
        if fs.isdir(place):
            found.append(_entry(fs, place, path))
        elif (entry := _entry_of_file(path)) is not None:
            found.append(entry)
    return sorted(found, key=_age, reverse=True)


def _entry_of_file(path: str) -> Entry | None:
    """The entry of a file of ours, or a damaged `.ckpt`; None for any other, such as an intact one of Lightning's."""
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


def _entry(fs: AbstractFileSystem, place: str, path: str) -> Entry:
    if os.path.basename(path).startswith(LEFTOVERS) and (not isinstance(fs, LocalFileSystem) or is_leftover(path)):
        try:
            read_manifest(path)
        except NewerFormatError as newer:
            return Entry(path, "newer", problem=f"can't be opened: {newer}", newer_sequence=newer.sequence)
        except CheckpointError:
            pass  # as of any save that did not end
        problem = "is being saved or removed, or was when its process was killed"
        return Entry(path, "unfinished", problem=problem)
    try:
        files = [os.path.basename(file.rstrip("/")) for file in fs.ls(place, detail=False)]
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
) -> Pruned:
    """Removes the checkpoints of a folder but some; and what was never finished, if no run holds the folder.

    Also kept are the newest one whose files are all in order, the one that ``last`` points at, and whatever is no
    checkpoint.

    Args:
        folder: local or an fsspec URL.
        keep_last: number of the newest ones to keep.
        keep_every: keep those of multiples of this step; None for none.
        dry_run: only tell what would be done.

    Raises:
        ValueError: a number below 1.
    """
    check_count("--keep-last", keep_last)
    if keep_every is not None:
        check_count("--keep-every", keep_every)
    removed, renamed, notes = _prune_unfinished(folder, dry_run)
    entries = survey(folder)
    found = {entry.path: entry.manifest for entry in entries if entry.manifest is not None}
    notes += [f"{each.path} {each.problem}" for each in entries if each.kind in ("damaged", "newer", "other")]
    kept = set(list(found)[:keep_last])
    kept |= {path for path, manifest in found.items() if keep_every and manifest.step % keep_every == 0}
    last = os.path.basename(os.path.realpath(os.path.join(folder, "last")))
    kept |= {path for path in found if os.path.basename(path) == last}
    kept |= _newest_valid(found, notes)
    superfluous = [path for path in found if path not in kept]
    for path in superfluous:
        if not dry_run:
            remove(path)
    return Pruned([*superfluous, *removed], [path for path in found if path in kept], renamed, notes)


def _newest_valid(found: dict[str, Manifest], notes: list[str]) -> set[str]:
    """The newest one whose files are in order; all of them if none is, for who knows what can be saved of them."""
    for path, manifest in found.items():
        wrong = check_files(path, manifest)
        if not wrong:
            return {path}
        notes.append(f"{path} is damaged: {'; '.join(wrong)}")
    return set(found)


def _prune_unfinished(folder: str | os.PathLike[str], dry_run: bool) -> tuple[list[str], list[str], list[str]]:
    """Removes what was never finished; returns what was removed, what got its name, and why the others were left."""
    left = [entry.path for entry in survey(folder) if entry.kind == "unfinished"]
    if not left:
        return [], [], []
    if not isinstance(resolve(folder)[0], LocalFileSystem):
        # Without locks nobody knows whether a run is about to finish it.
        return [], [], [f"{path} is unfinished: if no run saves there, remove it yourself" for path in left]
    try:
        release = lock(folder)
    except CheckpointError as held:
        return [], [], [f"{path} is unfinished, and left alone: {held}" for path in left]
    try:
        homes = {path: home_of(path) for path in left}
        if not dry_run:
            repair(folder)
            for path in left:
                remove(path)  # those that are not `repair`'s
    finally:
        release()
    return [path for path in left if not homes[path]], sorted({home for home in homes.values() if home}), []
