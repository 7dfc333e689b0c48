"""Writes and reads single-file checkpoints and gives each rank its part; `single_file` describes the format."""

import io
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, TypedStorage, UntypedStorage, nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ..foreign import open_plain
from .checked_io import resolve
from .content import check_state
from .errors import CheckpointError, damage
from .manifest import parse_manifest
from .pickle_cost import check_cost
from .publish import writing_file
from .single_file import HEAD, MANIFEST_KEY, OURS, pickle_in, wrong_in
from .state_tree import NAMES, all_by_name, excess, join, like, mapped, split, structure_of, to_lightning
from .strided_shards import reading_plan

__all__ = [
    "PICKLE",
    "NotPlainError",
    "check_file_state",
    "load_archive",
    "names_in",
    "not_plain",
    "part_of",
    "read_file",
    "refusal_of",
    "structures_in",
    "whole_checkpoint",
    "whole_tensors",
    "write_file",
]


_NOT_OURS = ".safetensors"
"""Extension of the paths that torch.load opens as safetensors files; of a stream it checks the content instead."""

_EDITED = ("state_dict", "hyper_parameters", "datamodule_hyper_parameters")
"""The entries of a file that people edit before a run: modules name what does not fit them."""

_MANY_VALUES = 100_000
_MANY_BYTES = 1 << 26
"""Values that even a small file may describe: lists that are in it several times, tensors that repeat elements."""


class _Pickler(pickle.Pickler):
    """The base of torch's pickler: asks in one call for each object whether it is a storage, and not in three.

    The states of Python's and NumPy's generators are 1,249 objects.
    """

    def __init_subclass__(cls) -> None:
        torchs: Any = cls.persistent_id

        def persistent_id(pickler: Any, value: Any) -> Any:
            return torchs(pickler, value) if isinstance(value, (UntypedStorage, TypedStorage)) else None

        cls.persistent_id = persistent_id  # type: ignore[method-assign]


PICKLE: Any = SimpleNamespace(__name__=__name__, Pickler=_Pickler)
"""The `pickle_module` of `torch.save`."""


def write_file(checkpoint: dict[str, Any], path: str) -> int:
    """Writes a checkpoint as one file, atomically; returns its size in bytes.

    Raises:
        CheckpointError: `path` exists and is not ours.
    """
    with writing_file(path) as (stream, notes):
        torch.save(checkpoint, stream, pickle_module=PICKLE)
        num_bytes = int(stream.tell())
    for note in notes:
        rank_zero_warn(note)
    return num_bytes


def read_file(
    path: str | os.PathLike[str], weights_only: bool | None = None, *, lazily: bool = False, map_location: Any = "cpu"
) -> Any:
    """Reads a file of `torch.save`, of the engine's or of Lightning's, and does not check its content.

    Args:
        path: local or a URL.
        weights_only: as for `torch.load`.
        lazily: map the file and read tensors at first access; the file must not change while any of them exists.
        map_location: as for `torch.load`.

    Raises:
        CheckpointError: it is no checkpoint, or its content is damaged.
        NotPlainError: the file has objects that `weights_only` does not allow.
    """
    fs, fs_path = resolve(path)
    is_local = isinstance(fs, LocalFileSystem)
    with open_plain(fs_path) if is_local else fs.open(fs_path, "rb") as stream:
        is_mapped = lazily and is_local and not fs_path.endswith(_NOT_OURS)
        mapped_path = fs_path if is_mapped else None
        return load_archive(stream, path, weights_only, mapped_path=mapped_path, map_location=map_location)


def check_file_state(checkpoint: Any, path: object, *, takes_edits: bool = False) -> None:
    """Checks the content of a checkpoint that is one file, of the engine's or of Lightning's.

    Args:
        checkpoint: the content.
        path: the file's name, for messages.
        takes_edits: warn of a file that was opened, changed and saved again, and remove the engine's own entry, which
            does not belong to what is in it now: it is as a file of Lightning's then.

    Raises:
        CheckpointError: the first field that is wrong, and what it should be.
    """
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path} is no checkpoint: it holds a {type(checkpoint).__name__}.")
    own = checkpoint.get(OURS)
    own = own if type(own) is dict else {}
    edited: list[str] = []
    if MANIFEST_KEY in own:  # stock Lightning's files and exported ones have none
        # The first that is read: the state of a newer version may have another form.
        saved = parse_manifest(str(own[MANIFEST_KEY]).encode(errors="surrogatepass"), str(path)).structures
        present = structures_in(checkpoint)
        edited = [name for name in {**saved, **present} if saved.get(name) != present.get(name)]
    if edited and takes_edits:
        own = {}
        del checkpoint[OURS]
    try:
        check_state(checkpoint, own.get("ranks"), None)
    except CheckpointError as error:
        raise damage(path, str(error)) from None
    if edited and takes_edits:
        rank_zero_warn(
            f"{path} was changed after it was saved ({', '.join(edited)}): it is read as a file of Lightning's, without"
            " the random state and the place in the data that the engine had saved with it."
        )
    elif edited:
        raise damage(path, f"{edited[0]} has other entries, or entries of other types, than were saved")


def structures_in(checkpoint: dict[str, Any]) -> dict[str, int]:
    """Returns `structure_of` each entry of a file from which a run continues, for the file's manifest."""
    parts = {str(name): value for name, value in checkpoint.items() if name not in _EDITED}
    if OURS in parts:
        parts[OURS] = {name: value for name, value in parts[OURS].items() if name != MANIFEST_KEY}
    return {name: structure_of(value) for name, value in parts.items()}


def load_archive(
    stream: Any,
    path: object,
    weights_only: bool | None,
    *,
    mapped_path: str | None = None,
    map_location: Any = "cpu",
) -> Any:
    """Loads an open file of `torch.save`: memory and time are bounded by its size.

    Args:
        stream: the file, at any position.
        path: its name, for error messages.
        weights_only: as for `torch.load`.
        mapped_path: the local path of the file, to map it instead of reading its tensors.
        map_location: as for `torch.load`.

    Raises:
        CheckpointError: it describes more than it holds.
        NotPlainError: it has objects that `weights_only` does not allow.
    """
    name = os.path.basename(str(path))
    size = pickled_bytes = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    try:
        pickled = stream  # older files of torch.save are no archive
        if stream.read(len(HEAD)) == HEAD:
            pickled = io.BytesIO(pickle_in(stream))
            pickled_bytes = pickled.getbuffer().nbytes
        pickled.seek(0)
        if weights_only is not False:
            check_cost(pickled, pickled_bytes)
    except (zipfile.BadZipFile, ValueError) as error:
        raise damage(path, f"{name} can't be read: {error}") from None
    stream.seek(0)
    try:
        source = stream if mapped_path is None else mapped_path
        value = torch.load(source, map_location=map_location, weights_only=weights_only, mmap=mapped_path is not None)
        wrong = excess(value, max(_MANY_VALUES, 4 * pickled_bytes), size + _MANY_BYTES)
    except pickle.UnpicklingError as refused:
        raise NotPlainError.for_path(path, refused) from None
    except Exception as error:  # torch's unpickler raises many types for invalid content
        if weights_only is False or isinstance(error, OSError):
            raise
        reason = next(iter(str(error).splitlines()), "")[:300]
        raise damage(path, f"{type(error).__name__}: {reason}") from error
    if wrong:
        raise damage(path, f"{name} {wrong}")
    return value


def refusal_of(checkpoint: dict[str, Any]) -> str | None:
    """Returns a warning if a file of `checkpoint` opens with ``weights_only=False`` only, else None."""
    content = io.BytesIO()
    # Plain tensors always open, and to open them all takes longer than to write them.
    torch.serialization.save(mapped(_unless_plain, checkpoint), content)  # `torch.save` may be counted
    content.seek(0)
    try:
        torch.load(content, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as refused:
        return not_plain(refused)
    return None


def _unless_plain(tensor: Tensor) -> Tensor | None:
    return None if type(tensor) in (Tensor, nn.Parameter) and not vars(tensor) else tensor


def whole_checkpoint(path: str, weights_only: bool | None, *, lazily: bool = False) -> dict[str, Any]:
    """Checks and reads a file in the form of `AsyncCheckpointer.load`, with optimizer state by parameter name.

    Raises:
        CheckpointError: the file is damaged, or has objects that `weights_only` does not allow.
    """
    if wrong := wrong_in(path):
        raise damage(path, "; ".join(wrong))
    checkpoint = read_file(path, weights_only, lazily=lazily)
    check_file_state(checkpoint, path)
    return _by_names(checkpoint, names_in(checkpoint) or [])


def whole_tensors(path: str) -> tuple[dict[str, Any], list[Any], dict[str, Tensor]]:
    """Opens a file without reading its tensors; returns the rest, each rank's own state, and the tensors by key.

    Raises:
        CheckpointError: the file is damaged, or could run code when opened.
    """
    checkpoint = whole_checkpoint(path, True, lazily=True)
    ranks = checkpoint.get(OURS, {}).pop("ranks", [])
    tensors, rest = split(checkpoint)
    return rest, ranks or [{}], tensors


def names_in(checkpoint: dict[str, Any]) -> list[list[str]] | None:
    """Returns the parameter names of each optimizer; None if the file has no names, like a stock Lightning file."""
    names = checkpoint.get(OURS, {}).get(NAMES)
    return names if names is not None and len(names) == len(checkpoint.get("optimizer_states", [])) else None


def _by_names(checkpoint: dict[str, Any], names: list[list[str]]) -> dict[str, Any]:
    if names:
        checkpoint["optimizer_states"] = all_by_name(checkpoint["optimizer_states"], names)
    return checkpoint


def part_of(
    checkpoint: dict[str, Any], template: Callable[[str], Tensor | None], *, rank: int, needs_optimizers: bool
) -> dict[str, Any]:
    """Reads one rank's part of a lazily opened file, in the form of `to_lightning`.

    Args:
        checkpoint: result of `read_file` for one of our files; it is modified.
        template: as for `AsyncCheckpointer.load`.
        rank: this rank.
        needs_optimizers: whether to read the optimizers' state.
    """
    names = names_in(checkpoint) or []
    if not needs_optimizers:
        checkpoint.pop("optimizer_states", None)
        names = []
    ranks = checkpoint[OURS].pop("ranks", [])
    tensors, rest = split(_by_names(checkpoint, names))
    parts = {}
    for key, tensor in tensors.items():
        target = template(key)
        parts[key] = target if target is not None and target.is_meta else like(target, tensor.size(), tensor.dtype)
    _fill({key: tensor_part for key, tensor_part in parts.items() if not tensor_part.is_meta}, tensors)
    taken = join(mapped(torch.clone, rest), parts)
    # The state of other ranks stays lazy: it is read only where it is redistributed.
    taken[OURS]["ranks"] = [mapped(torch.clone, state) if i == rank else state for i, state in enumerate(ranks)]
    return to_lightning(taken)


def _fill(parts: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    """Copies to each part its slice of the whole tensor, planned as for a directory."""
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


# --- errors and warnings for checkpoints that could run code when they are opened


class NotPlainError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint is undamaged, but opening it could run code. It derives from our error type and from torch's."""

    file = ""
    """The name of the file in the directory that is one."""

    @classmethod
    def for_path(cls, path: object, refused: Exception) -> "NotPlainError":
        """Returns the error for the checkpoint `path` that torch refused to open."""
        return cls(
            f"The checkpoint {path} holds objects that are no plain values: {_first_line(refused)} If you trust it,"
            " pass weights_only=False, or name the classes: torch.serialization.add_safe_globals([...])."
        )


def not_plain(refused: Exception) -> str:
    """Returns the warning for a saved checkpoint that torch will refuse to open."""
    return (
        "The checkpoint holds objects that are no plain values, so it will open with weights_only=False only, or after"
        f" torch.serialization.add_safe_globals([...]): {_first_line(refused)}"
    )


def _first_line(error: Exception) -> str:
    """Returns the line of torch's message that names the refused object, without torch's advice."""
    refusal = re.search(
        r"(Unsupported|Trying to load unsupported|Can only create) [^\n]*?(?= was not|\n|$)", str(error)
    )
    return f"{(refusal[0] if refusal else str(error).splitlines()[0]).rstrip('.')}."
