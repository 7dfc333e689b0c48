"""Whether what stands at a path is certainly a checkpoint of ours: nothing else is ever replaced or removed.

It holds for files and for directories alike. A file is ours if it is a checkpoint in Lightning's form, a directory if
its manifest is in order and it holds nothing that the manifest does not list.
"""

import os
import zipfile
from typing import Literal, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from .files import resolve
from .manifest import MANIFEST, README, CheckpointError, is_file_of_ours, read_manifest

__all__ = ["Standing", "check_may_replace", "is_torch_file", "standing_at"]

_LIGHTNING = b"pytorch-lightning_version"
"""A key that every checkpoint of Lightning's has; it stands in the pickle as it is."""
_PICKLE_MOST_BYTES = 1 << 30
_NAMED = 3
"""The number of foreign files that a message names, at most."""


class Standing(NamedTuple):
    """The kind of file or directory at a path, and whether it is one of ours."""

    kind: Literal["free", "ours", "damaged", "foreign"]
    """Damaged: files that only a save writes, without a manifest in order. They may be moved away, not deleted."""
    about: str = ""
    """A description of it, if it is foreign."""
    extras: tuple[str, ...] = ()
    """Names of the entries of a directory that are not ours."""


def standing_at(path: str | os.PathLike[str]) -> Standing:
    """Finds out whether `path`, local or a URL, is free, ours or foreign; nothing in it is unpickled or changed."""
    fs, place = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        return _of_folder(fs, place, path) if fs.isdir(place) else _of_remote_file(fs, place)
    if os.path.islink(place):
        target = os.path.realpath(place)
        standing = standing_at(target)
        if standing.kind == "foreign":
            return Standing("foreign", f"a link to {target}, which is {standing.about}")
        return Standing("ours")
    if os.path.isdir(place):
        return _of_folder(fs, place, path)
    if not os.path.lexists(place):
        return Standing("free")
    if os.path.isfile(place) and not os.path.getsize(place):
        return Standing("free")  # there is nothing in it to lose
    return Standing("ours") if _is_checkpoint_file(place) else Standing("foreign", "a file that is no checkpoint")


def check_may_replace(path: str | os.PathLike[str]) -> None:
    """Raises where a checkpoint can't be saved as `path`, for what stands there is not certainly one of ours.

    Raises:
        CheckpointError: names what stands there.
    """
    standing = standing_at(path)
    if standing.kind == "foreign":
        raise CheckpointError(
            f"{path} is {standing.about}: nothing is saved there, for that would delete it. Give another name, or move"
            " it away."
        )


def _of_folder(fs: AbstractFileSystem, place: str, path: str | os.PathLike[str]) -> Standing:
    fs.invalidate_cache(place)
    entries = fs.ls(place, detail=True)
    kinds = {os.path.basename(entry["name"].rstrip("/")): _kind_of(entry) for entry in entries}
    if not kinds:
        return Standing("free")
    odd = [name for name, kind in kinds.items() if kind != "file"]
    try:
        listed = {*read_manifest(path).files, MANIFEST, README}
        extras = tuple(sorted({name for name in kinds if name not in listed} | {*odd}))
        kind: Literal["ours", "damaged"] = "ours"
    except CheckpointError:
        extras = tuple(sorted({name for name in kinds if name != MANIFEST and not is_file_of_ours(name)}))
        kind = "damaged"
    if not extras:
        return Standing(kind)
    named = ", ".join(extras[:_NAMED]) + (f" and {len(extras) - _NAMED} more" if len(extras) > _NAMED else "")
    what = "a checkpoint" if kind == "ours" else "a folder"
    return Standing("foreign", f"{what} that holds {named}, which no checkpoint has", extras)


def _kind_of(entry: dict[str, str]) -> str:
    return "link" if entry.get("islink") else entry["type"]


def _of_remote_file(fs: AbstractFileSystem, place: str) -> Standing:
    if not fs.exists(place):
        return Standing("free")
    with fs.open(place, "rb") as stream:
        is_ours = _has_lightnings_key(stream)
    return Standing("ours") if is_ours else Standing("foreign", "a file that is no checkpoint")


def _is_checkpoint_file(place: str) -> bool:
    if not os.path.isfile(place):
        return False
    with open(place, "rb") as stream:
        return _has_lightnings_key(stream)


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a local file of `torch.save`, with whatever in it."""
    if not os.path.isfile(path) or os.path.islink(path):
        return False
    with open(path, "rb") as stream:
        return _holds(stream, b"")


def _has_lightnings_key(stream: object) -> bool:
    return _holds(stream, _LIGHTNING)


def _holds(stream: object, text: bytes) -> bool:
    """Whether a stream is a file of `torch.save`, whose pickle, which is not opened, has `text` in it."""
    try:
        with zipfile.ZipFile(stream) as archive:  # type: ignore[call-overload]
            pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
            return len(pickles) == 1 and pickles[0].file_size <= _PICKLE_MOST_BYTES and text in archive.read(pickles[0])
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError):
        return False
