"""Decides whether a path is certainly one of our checkpoints: nothing else is ever replaced or removed.

A file is ours if it is a checkpoint in Lightning's format. A directory is ours if its manifest is valid and it contains
only files that the manifest lists.
"""

import os
import zipfile
from typing import Literal, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from ..foreign import open_plain
from .checked_io import resolve
from .manifest import MANIFEST, README, CheckpointError, is_file_of_ours, read_manifest
from .single_file import pickle_in

__all__ = ["PathStatus", "check_may_replace", "is_torch_file", "path_status"]

_LIGHTNING = b"pytorch-lightning_version"
"""A key of every Lightning checkpoint; the pickle contains it as plain text."""
_MOST_NAMED = 3
"""The largest number of foreign files that a message names."""


class PathStatus(NamedTuple):
    """The kind of the file or directory at a path, and whether it is ours."""

    kind: Literal["free", "ours", "damaged", "foreign"]
    """Damaged: a directory with only our files, but no valid manifest; a save of that name moves it aside."""
    about: str = ""
    """A description, if it is foreign."""
    extras: tuple[str, ...] = ()
    """Names of foreign entries in a directory."""


def path_status(path: str | os.PathLike[str]) -> PathStatus:
    """Returns whether `path` (local or a URL) is free, ours or foreign; unpickles and changes nothing."""
    fs, fs_path = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        return _of_folder(fs, fs_path, path) if fs.isdir(fs_path) else _of_remote_file(fs, fs_path)
    if os.path.islink(fs_path):
        target = os.path.realpath(fs_path)
        status = path_status(target)
        if status.kind == "foreign":
            return PathStatus("foreign", f"a link to {target}, which is {status.about}")
        return PathStatus("ours")
    if os.path.isdir(fs_path):
        return _of_folder(fs, fs_path, path)
    if not os.path.lexists(fs_path):
        return PathStatus("free")
    if os.path.isfile(fs_path) and not os.path.getsize(fs_path):
        return PathStatus("free")  # an empty file has nothing to lose
    return PathStatus("ours") if _is_checkpoint_file(fs_path) else PathStatus("foreign", "a file that is no checkpoint")


def check_may_replace(path: str | os.PathLike[str]) -> PathStatus:
    """Raises an error if saving as `path` would replace something that is not certainly one of our checkpoints.

    Returns:
        The status of `path`, which is not foreign.

    Raises:
        CheckpointError: describes the file or directory at `path`.
    """
    status = path_status(path)
    if status.kind == "foreign":
        raise CheckpointError(
            f"{path} is {status.about}: nothing is saved there, because that would delete it. Choose another name, or"
            " move it away."
        )
    return status


def _of_folder(fs: AbstractFileSystem, fs_path: str, path: str | os.PathLike[str]) -> PathStatus:
    fs.invalidate_cache(fs_path)
    entries = fs.ls(fs_path, detail=True)
    kinds = {os.path.basename(entry["name"].rstrip("/")): _kind_of(entry) for entry in entries}
    if not kinds:
        return PathStatus("free")
    odd = [name for name, kind in kinds.items() if kind != "file"]
    try:
        listed = {*read_manifest(path).files, MANIFEST, README}
        extras = tuple(sorted({name for name in kinds if name not in listed} | {*odd}))
        kind: Literal["ours", "damaged"] = "ours"
    except CheckpointError:
        extras = tuple(sorted({name for name in kinds if name != MANIFEST and not is_file_of_ours(name)}))
        kind = "damaged"
    if not extras:
        return PathStatus(kind)
    num_more = len(extras) - _MOST_NAMED
    names = ", ".join(extras[:_MOST_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")
    noun = "a checkpoint" if kind == "ours" else "a folder"
    return PathStatus("foreign", f"{noun} that holds {names}, which no checkpoint has", extras)


def _kind_of(entry: dict[str, str]) -> str:
    return "link" if entry.get("islink") else entry["type"]


def _of_remote_file(fs: AbstractFileSystem, fs_path: str) -> PathStatus:
    if not fs.exists(fs_path):
        return PathStatus("free")
    with fs.open(fs_path, "rb") as stream:
        is_ours = _has_lightnings_key(stream)
    return PathStatus("ours") if is_ours else PathStatus("foreign", "a file that is no checkpoint")


def _is_checkpoint_file(fs_path: str) -> bool:
    if not os.path.isfile(fs_path):
        return False
    with open_plain(fs_path) as stream:
        return _has_lightnings_key(stream)


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a local file of `torch.save`, with any content."""
    if not os.path.isfile(path) or os.path.islink(path):
        return False
    with open_plain(os.fspath(path)) as stream:
        return _holds(stream, b"")


def _has_lightnings_key(stream: object) -> bool:
    return _holds(stream, _LIGHTNING)


def _holds(stream: object, text: bytes) -> bool:
    """Whether a stream is a file of `torch.save` whose pickle contains `text`; the pickle is not loaded."""
    try:
        return text in pickle_in(stream)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError):
        return False
