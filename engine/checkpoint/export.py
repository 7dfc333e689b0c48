"""One file out of a checkpoint: what stock Lightning opens, or the weights alone.

Written beside its final name, synced and renamed, so that it is whole or not there. One process holds all of it in
memory.
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
from .endings import SUFFIXES
from .files import Files, resolve, sync
from .manifest import CheckpointError
from .saver import Saver
from .single_file import OURS
from .tree import NAMES, mapped, numbered
from .whole import whole_checkpoint

__all__ = ["export"]

_NOT_WEIGHTS = ("optimizer_states", "lr_schedulers", "loops", "callbacks")


def export(path: str, to: str, *, overwrite: bool = False, weights_only: bool = True) -> list[str]:
    """Writes the checkpoint `path`, all of whose files are checked first, to one file.

    Args:
        path: of the directory or file, local or an fsspec URL.
        to: name of the file, local or an fsspec URL; what is written goes by its ending, see `SUFFIXES`.
        overwrite: a file of that name may be replaced.
        weights_only: as for `torch.load`.

    Returns:
        Names in the module's state that are no tensors, which the file therefore does not have.

    Raises:
        CheckpointError: `path` is no checkpoint, or damaged, or has no weights.
        ValueError: another ending, or the file is there already.
    """
    suffix = choose("ending", os.path.splitext(to)[1], SUFFIXES)
    fs, target = resolve(to)
    if fs.isdir(target):
        raise ValueError(f"{to} is a folder: give the name of a file.")
    if fs.exists(target) and not overwrite:
        raise ValueError(f"{to} is there already: give another name, or --overwrite to replace it.")
    if suffix == ".ckpt":
        content = numbered(_load(path, weights_only))
        # As in the files that the engine writes itself.
        content.setdefault(OURS, {})[NAMES] = content.pop(NAMES)
        _write(fs, target, lambda name: _save(content, name))
        return []
    content = _load(path, weights_only, leave_out=_NOT_WEIGHTS)
    if "state_dict" not in content:
        raise CheckpointError(f"The checkpoint {path} has no weights: it has {', '.join(sorted(content))}.")
    # Each was read into memory of its own: none shares its storage with another, which the format can't express.
    weights = {name: value for name, value in content["state_dict"].items() if isinstance(value, Tensor)}
    save = _save_weights if suffix == ".safetensors" else _save
    _write(fs, target, lambda name: save(weights, name))
    return [name for name in content["state_dict"] if name not in weights]


def _load(path: str, weights_only: bool, leave_out: tuple[str, ...] = ()) -> dict[str, Any]:
    fs, place = resolve(path)
    if fs.isfile(place):
        content = whole_checkpoint(path, weights_only)
        if leave_out:  # tensors of a file may share their memory
            return {key: mapped(torch.clone, value) for key, value in content.items() if key not in leave_out}
        return content
    return Saver().load(path, weights_only=weights_only, alone=True, leave_out=leave_out)


def _save(content: dict[str, Any], name: str) -> None:
    with Files(os.path.dirname(name)).writing(os.path.basename(name)) as stream:
        torch.save(content, stream)


def _save_weights(weights: dict[str, Tensor], name: str) -> None:
    with open(name, "wb"):
        mode = os.stat(name).st_mode  # as for any new file; safetensors makes one that nobody else may read
    try:
        safetensors.torch.save_file(weights, name, metadata={"format": "pt"})
        os.chmod(name, mode)
    except safetensors.SafetensorError as error:
        raise OSError(str(error)) from None
    sync(name)


def _write(fs: AbstractFileSystem, target: str, write: Callable[[str], Any]) -> None:
    """Calls `write` with the name of a new file, and then makes that file the target."""
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
