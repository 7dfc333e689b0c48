"""Weights of safetensors files, which each rank reads when the strategy has said which part of them it holds.

`read_weights` builds a module without memory for its parameters, checks the names and shapes of the files against it,
and marks each tensor with its place. A strategy splits the module as it is, on the meta device, and then calls
`read_stored`: of each tensor a rank reads its own slices alone, one after the other. So a rank never has more of the
weights in memory than its part of the module and one tensor. What is not split is read whole by each rank.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from ..checkpoint.strided_shards import Blocks
from ..flags import did_you_mean
from .stored_names import names_of_transformers

__all__ = ["check_stored", "is_stored", "make_room", "read_stored", "read_weights"]

_MARKS = "_stored_tensors"
"""Attribute of a module: where the tensors that itself holds are stored, by their keys."""
_Module = TypeVar("_Module", bound=nn.Module)


@dataclasses.dataclass(frozen=True)
class _Place:
    """The place of a tensor in a file."""

    path: str
    key: str
    shape: tuple[int, ...]


def read_weights(
    folder: str | Path, build: Callable[[], _Module], *, prefix: str = "", ignore: Collection[str] = ()
) -> _Module:
    """Builds a module whose weights are read from safetensors files, by each rank its own part, when a run begins.

    Until then its parameters are on the meta device: they have shapes and no values. They keep the dtype that they are
    built with, whatever that of the files. Of a model of transformers, keys may have any name that it knows to convert.

    Args:
        folder: that has one ``.safetensors`` file, or several and their ``.safetensors.index.json``; or such a file.
        build: makes the module, such as ``lambda: AutoModelForCausalLM.from_config(config)``. Memory that it asks for
            by `torch.empty` is not given; all else, such as tables of positions, it computes as ever.
        prefix: what keys in the files begin with before the module's own names. Other keys are other modules'.
        ignore: patterns (``*.inv_freq``) of keys that are not read.

    Raises:
        ValueError: files, or keys or shapes in them, that don't go with the module.
    """
    stored = {key: place for key, place in _places(Path(folder)) if not any(fnmatch(key, each) for each in ignore)}
    stored = {key.removeprefix(prefix): place for key, place in stored.items() if key.startswith(prefix)}
    with _WithoutMemory():
        module = build()
    names = names_of_transformers(module, stored, dict(_state(module)))
    stored = {name: place for key, place in stored.items() if (name := names.get(key, key)) is not None}
    places = _matched(module, stored, f"{folder}{f' (prefix {prefix!r})' if prefix else ''}")
    for part in module.modules():
        if marks := {key: places[tensor] for key, tensor in _own_tensors(part) if tensor in places}:
            setattr(part, _MARKS, marks)
    check_stored(module)
    return module


class _WithoutMemory(TorchFunctionMode):
    """Has `torch.empty` make tensors without memory: parameters wait for their values in it, buffers are computed."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def check_stored(module: nn.Module) -> None:
    """Checks a module of which some tensors are to be read: all others have values.

    Raises:
        ValueError: one is on the meta device.
    """
    if not any(_MARKS in vars(part) for part in module.modules()):
        return
    for name, part in module.named_modules():
        for key, tensor in _own_tensors(part):
            if tensor.is_meta and not is_stored(part, key):
                raise ValueError(
                    f"{f'{name}.{key}'.lstrip('.')} of {type(part).__name__} is on the meta device, and there is no"
                    " file to read it from: give it memory and its first value (`part.to_empty(device='cpu')` and its"
                    " initialisation). A buffer is to be computed from torch.zeros, torch.arange or the like; peft puts"
                    " adapters on the device of the layer that they belong to."
                )


def is_stored(part: nn.Module, key: str) -> bool:
    """Whether the tensor that `part` itself holds as `key` is still to be read."""
    return key in vars(part).get(_MARKS, ())


def read_stored(module: nn.Module, device: torch.device | str = "cpu", leave: Collection[Tensor] = ()) -> None:
    """Reads what is still to be read of the tensors of `module`: of a DTensor the part of this rank.

    Args:
        module: changed in place; its tensors stay the same objects.
        device: on which they get memory; those that have some keep it.
        leave: tensors that are not read, now or later, since another rank holds them.
    """
    read: set[Tensor] = set()
    left = set(leave)
    for part in module.modules():
        marks: Mapping[str, _Place] = vars(part).pop(_MARKS, {})
        for key, tensor in _own_tensors(part):
            if key in marks and tensor not in read | left:
                _read(tensor, marks[key], device)
                read.add(tensor)
    for unit in (part for part in module.modules() if read and isinstance(part, FSDPModule)):
        # torch: as its own `_apply` does, which moves modules.
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()


def make_room(module: nn.Module) -> None:
    """Gives memory to what is still to be read, on the CPU, and forgets where it is: other values are put there."""
    for part in module.modules():
        marks = vars(part).pop(_MARKS, {})
        for key, tensor in _own_tensors(part):
            if key in marks:
                _allocate(tensor, "cpu")


def _allocate(tensor: Tensor, device: torch.device | str) -> None:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not local.is_meta:
        return
    fresh: Tensor = torch.empty(local.shape, dtype=local.dtype, device=device)
    if isinstance(tensor, DTensor):  # torch: `from_local` would move what is offloaded to the CPU
        fresh = DTensor(fresh, tensor._spec, requires_grad=False)
    is_parameter = isinstance(tensor, nn.Parameter)
    swap_tensors(tensor, nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh)


def _read(tensor: Tensor, place: _Place, device: torch.device | str) -> None:
    _allocate(tensor, device)
    # Opened anew each time: what is read stays mapped, and in memory, until the file is closed.
    with torch.no_grad(), safe_open(place.path, framework="pt") as file:
        if not place.shape:
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).copy_(file.get_tensor(place.key))
            return
        stored = file.get_slice(place.key)
        for offset, piece in _pieces(tensor):
            piece.copy_(stored[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))])


def _pieces(tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The blocks of the whole tensor that this rank has: where each begins, and its memory."""
    if not isinstance(tensor, DTensor):
        yield (0,) * tensor.dim(), tensor
        return
    pieces = Blocks(tensor)
    for chunk in pieces.__create_chunk_list__():
        yield tuple(chunk.offsets), pieces.at(chunk.offsets)


def _own_tensors(part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (part._parameters, part._buffers):
        yield from ((key, tensor) for key, tensor in table.items() if tensor is not None)


def _matched(module: nn.Module, stored: Mapping[str, _Place], source: str) -> dict[Tensor, _Place]:
    """Maps each tensor of the module's state to its place; one that several modules share needs one of its names.

    Raises:
        ValueError: tensors that are stored nowhere, keys that the module does not have, or other shapes.
    """
    kind = type(module).__name__
    state = dict(_state(module))
    places: dict[Tensor, _Place] = {}
    for name in (name for name in stored if name in state):
        places.setdefault(state[name], stored[name])
    missing = [name for name, tensor in state.items() if tensor not in places]
    computed = {name for name, _ in module.named_buffers()}  # kept in no file by now
    unexpected = [name for name in stored if name not in state and name not in computed]
    problems = [f"no weights for {name!r}.{did_you_mean(name, unexpected)}" for name in missing]
    problems += [f"{name!r}, which {kind} does not have.{did_you_mean(name, state)}" for name in unexpected]
    problems += [
        f"{place.key!r} of shape {list(place.shape)}, where {kind} has {list(tensor.shape)}."
        for tensor, place in places.items()
        if tuple(tensor.shape) != place.shape
    ]
    if problems:
        more = f" And {len(problems) - 6} more." if len(problems) > 6 else ""
        raise ValueError(
            f"{source} does not have the weights of {kind}: it has {' It has '.join(problems[:6])}{more} `prefix` is"
            " what keys begin with before the module's names, `ignore` names keys that are not to be read; a loader of"
            " the module's own, such as from_pretrained, may know how to convert them."
        )
    return places


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, part in module.named_modules(remove_duplicate=False):
        for key, tensor in _own_tensors(part):
            if key not in part._non_persistent_buffers_set:  # torch: Module._non_persistent_buffers_set
                yield f"{name}.{key}".lstrip("."), tensor


def _places(folder: Path) -> Iterator[tuple[str, _Place]]:
    """All keys of the files, and where they are.

    Raises:
        ValueError: there are no such files, or it is not clear which, or one is damaged.
    """
    for path, wanted in _files(folder).items():
        try:
            with safe_open(path, framework="pt") as file:
                keys = list(file.keys())
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} can't be read as a safetensors file: {error}") from error
        for key in keys if wanted is None else sorted(wanted):
            if key not in shapes:
                raise ValueError(f"{path} has no {key!r}, though the index beside it says so.{did_you_mean(key, keys)}")
            yield key, _Place(str(path.resolve()), key, shapes[key])


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files, and which keys of each the index names; None: all, since there is no index."""
    if folder.is_file():
        return {folder: None}
    indices = sorted(folder.glob("*.safetensors.index.json"))
    files = sorted(folder.glob("*.safetensors"))
    name = "model.safetensors"
    if any(index.name == f"{name}.index.json" for index in indices):
        indices = [folder / f"{name}.index.json"]
    elif any(file.name == name for file in files):
        indices, files = [], [folder / name]
    found = indices or files
    if len(found) != 1:
        said = ", ".join(each.name for each in found) or "no .safetensors file"
        raise ValueError(
            f"{folder} has {said}: give a folder with one such file, or one index of several, or the file."
        )
    if not indices:
        return {files[0]: None}
    of_file: dict[Path, set[str] | None] = {}
    index = json.loads(indices[0].read_text())
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict):
        raise ValueError(f"{indices[0]} has no 'weight_map' of keys and files: it is no index of safetensors files.")
    for key, file_name in names.items():
        if os.path.basename(file_name) != file_name:
            raise ValueError(f"{indices[0]} names {file_name!r}: its files must be in the same folder.")
        of_file.setdefault(folder / file_name, set()).add(key)  # type: ignore[union-attr]
    return of_file
