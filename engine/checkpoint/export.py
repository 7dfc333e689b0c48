"""Exports a checkpoint as one file: a Lightning checkpoint, or the weights alone.

The file is written under a temporary name, synced and renamed, so it is never incomplete. One process holds the whole
content in memory.
"""

import os
import tempfile
from collections.abc import Callable
from typing import Any

import safetensors.torch
import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from ..flags import choose
from .checked_io import Files, resolve, sync
from .errors import CheckpointError
from .saver import AsyncCheckpointer
from .single_file import OURS, SUFFIXES
from .state_tree import NAMES, mapped, to_lightning
from .whole import whole_checkpoint

__all__ = ["check_target", "export"]

_NOT_WEIGHTS = ("optimizer_states", "lr_schedulers", "loops", "callbacks")


def export(path: str, to: str, *, overwrite: bool = False, weights_only: bool = True) -> list[str]:
    """Verifies all files of the checkpoint `path` and writes its content to one file.

    Args:
        path: the checkpoint, a directory or file, local or an fsspec URL.
        to: the file to write, local or an fsspec URL; its extension selects the format, see `SUFFIXES`.
        overwrite: replace an existing file.
        weights_only: as for `torch.load`.

    Returns:
        Names of the entries in the module's state that are not tensors; the file does not contain them.

    Raises:
        CheckpointError: `path` is not a checkpoint, is damaged, or has no weights.
        ValueError: the extension is unknown, or the file exists already.
    """
    suffix = choose("ending", os.path.splitext(to)[1], SUFFIXES)
    fs, target = check_target(to, overwrite=overwrite)
    if suffix == ".ckpt":
        content = to_lightning(_load(path, weights_only))
        # The same place as in the engine's own files.
        content.setdefault(OURS, {})[NAMES] = content.pop(NAMES)
        _write(fs, target, lambda name: _save(content, name))
        return []
    content = _load(path, weights_only, leave_out=_NOT_WEIGHTS)
    if "state_dict" not in content:
        raise CheckpointError(f"The checkpoint {path} has no weights: it has {', '.join(sorted(content))}.")
    # The tensors share no storage (safetensors can't express that): each was read into its own memory.
    weights = {name: value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    save = _save_weights if suffix == ".safetensors" else _save
    _write(fs, target, lambda name: save(weights, name))
    return [name for name in content["state_dict"] if name not in weights]


def check_target(to: str, *, overwrite: bool) -> tuple[AbstractFileSystem, str]:
    """Returns the file system and path of the file to write.

    Raises:
        ValueError: it is a folder, or exists already.
    """
    fs, target = resolve(to)
    if fs.isdir(target):
        raise ValueError(f"{to} is a folder: give the name of a file.")
    if fs.exists(target) and not overwrite:
        raise ValueError(f"{to} is there already: give another name, or overwrite=True (--overwrite) to replace it.")
    return fs, target


def _load(path: str, weights_only: bool, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    fs, fs_path = resolve(path)
    if fs.isfile(fs_path):
        content = whole_checkpoint(path, weights_only)
        if leave_out:  # tensors of a file may share their memory
            return {key: mapped(torch.clone, value) for key, value in content.items() if key not in leave_out}
        return content
    return AsyncCheckpointer().load(path, weights_only=weights_only, alone=True, leave_out=leave_out)


def _save(content: dict[str, Any], name: str) -> None:
    with Files(os.path.dirname(name)).writing(os.path.basename(name), notes_sum=False) as stream:
        torch.save(content, stream)


def _save_weights(weights: dict[str, Tensor], name: str) -> None:
    with open(name, "wb"):
        mode = os.stat(name).st_mode  # keep the default mode; safetensors creates files that only the owner can read
    try:
        safetensors.torch.save_file(weights, name, metadata={"format": "pt"})
        os.chmod(name, mode)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None
    sync(name)


def _write(fs: AbstractFileSystem, target: str, write: Callable[[str], Any]) -> None:
    """Calls `write` with a temporary file name, then moves that file to `target`."""
    is_local = isinstance(fs, LocalFileSystem)
    folder, name = os.path.split(target)
    if is_local:
        os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder if is_local else None) as temporary:
        written = os.path.join(temporary, name)
        write(written)
        if not is_local:
            fs.put_file(written, target)
            return
        os.replace(written, target)
    sync(folder)
