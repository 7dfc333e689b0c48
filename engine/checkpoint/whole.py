"""A checkpoint that is one file, on its way to and from the ranks: see `single_file` for its form."""

import os
import pickle
from collections.abc import Callable
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from .files import resolve
from .manifest import CheckpointError
from .not_plain import NotPlainError, not_plain
from .pieces import reading_plan
from .single_file import OURS, is_archive, wrong_in
from .store import writing_file
from .tree import NAMES, all_by_name, join, like, mapped, numbered, split

__all__ = ["names_in", "part_of", "read_file", "refusal_of", "whole_checkpoint", "whole_tensors", "write_file"]


_NOT_OURS = ".safetensors"
"""The ending of paths that torch.load takes for files of safetensors; of a stream it looks at the content."""


def write_file(checkpoint: dict[str, Any], path: str) -> None:
    """Writes a checkpoint as one file, which is whole or not there.

    Raises:
        CheckpointError: something that is not ours stands at `path`.
    """
    with writing_file(path) as (stream, notes):
        torch.save(checkpoint, stream)
    for note in notes:
        rank_zero_warn(note)


def read_file(path: str | os.PathLike[str], weights_only: bool | None = None, *, lazily: bool = False) -> Any:
    """Reads a file of `torch.save` and returns its content, on the CPU.

    Args:
        path: local or a URL.
        weights_only: as for `torch.load`.
        lazily: read a tensor when it is looked at; while any of them lives, the file must not be written to.

    Raises:
        NotPlainError: there are objects in it that `weights_only` does not allow.
    """
    fs, place = resolve(path)
    try:
        if lazily and isinstance(fs, LocalFileSystem) and not place.endswith(_NOT_OURS):
            return torch.load(place, map_location="cpu", weights_only=weights_only, mmap=True)
        with fs.open(place, "rb") as stream:
            return torch.load(stream, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as refused:
        raise NotPlainError.of(path, refused) from None


def refusal_of(path: str) -> str | None:
    """Returns a warning about a local file that opens with ``weights_only=False`` only, else None; reads no tensor."""
    fs, place = resolve(path)
    if not isinstance(fs, LocalFileSystem) or place.endswith(_NOT_OURS) or not is_archive(place):
        return None
    try:
        torch.load(place, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as refused:
        return not_plain(refused)
    return None


def whole_checkpoint(path: str, weights_only: bool | None, *, lazily: bool = False) -> dict[str, Any]:
    """A file as `Saver.load` gives a directory: all of it is checked, and optimizers' parameters go by their names.

    Raises:
        CheckpointError: it is damaged, or holds objects that `weights_only` does not allow.
    """
    if wrong := wrong_in(path):
        raise CheckpointError(f"The checkpoint {path} is damaged: {'; '.join(wrong)}.")
    try:
        checkpoint = read_file(path, weights_only, lazily=lazily)
    except (RuntimeError, EOFError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, CheckpointError) or weights_only is False:
            raise
        raise CheckpointError(f"The checkpoint {path} is damaged: {str(error).splitlines()[0][:300]}") from error
    if type(checkpoint) is not dict:
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(checkpoint).__name__}.")
    return _by_names(checkpoint, names_in(checkpoint) or [])


def whole_tensors(path: str) -> tuple[dict[str, Any], list[Any], dict[str, Tensor]]:
    """Opens a file, its tensors not read yet: returns all but them, what each rank said, and the tensors by their keys.

    Raises:
        CheckpointError: it is damaged, or would run code if it was opened.
    """
    checkpoint = whole_checkpoint(path, True, lazily=True)
    ranks = checkpoint[OURS].pop("ranks", [])
    tensors, rest = split(checkpoint)
    return rest, ranks or [{}], tensors


def names_in(checkpoint: dict[str, Any]) -> list[list[str]] | None:
    """The names of each optimizer's parameters; None in a file that does not say them, such as one of Lightning's."""
    ours = checkpoint.get(OURS)
    names = ours.get(NAMES) if isinstance(ours, dict) else None
    return names if names is not None and len(names) == len(checkpoint.get("optimizer_states", [])) else None


def _by_names(checkpoint: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    if names:
        checkpoint["optimizer_states"] = all_by_name(checkpoint["optimizer_states"], names)
    return checkpoint


def part_of(
    checkpoint: dict[str, Any], template: Callable[[str], Tensor | None], *, rank: int, needs_optimizers: bool
) -> dict[str, Any]:
    """Reads the part that one of several ranks needs of a file that was opened lazily, in the form of `numbered`.

    Args:
        checkpoint: as `read_file` gives it, of a file of ours; it is taken apart.
        template: as for `Saver.load`.
        rank: this one.
        needs_optimizers: whether it goes on with their state.
    """
    names = names_in(checkpoint) or []
    if not needs_optimizers:
        checkpoint.pop("optimizer_states", None)
        names = []
    ranks = checkpoint[OURS].pop("ranks", [])
    tensors, rest = split(_by_names(checkpoint, names))
    parts = {}
    for key, tensor in tensors.items():
        given = template(key)
        parts[key] = given if given is not None and given.is_meta else like(given, tensor.size(), tensor.dtype)
    _fill({key: part for key, part in parts.items() if not part.is_meta}, tensors)
    taken = join(mapped(torch.clone, rest), parts)
    # What the others said is read by whoever deals it anew; else it stays in the file.
    taken[OURS]["ranks"] = [mapped(torch.clone, said) if i == rank else said for i, said in enumerate(ranks)]
    return numbered(taken)


def _fill(parts: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    """Copies to each part what it is of the whole tensor, planned as for a directory."""
    metadata = Metadata({key: _one_chunk(whole[key]) for key in parts})
    planner, plan = reading_plan(parts, metadata)
    for item in plan.items:
        block = whole[item.storage_index.fqn]
        for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            block = block.narrow(dim, offset, length)
        target = planner.resolve_tensor(item).detach()
        target.copy_(block)
        planner.commit_tensor(item, target)


def _one_chunk(tensor: Tensor) -> TensorStorageMetadata:
    chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
    return TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.size(), [chunk])
