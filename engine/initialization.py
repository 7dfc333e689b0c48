"""Weights of safetensors files; each rank reads its part when the strategy has decided which part that is.

`read_weights` builds a module without memory for its parameters, checks the names and shapes of the files against it,
and records where each tensor is stored. A strategy splits the module on the meta device, and then calls `read_stored`:
each rank reads only its own slices, one tensor after the other. So a rank never has more of the weights in memory than
its part of the module and one tensor. Each rank reads tensors that are not split as a whole.
"""

import dataclasses
import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from .attachments import carry_over, swap
from .checkpoint.strided_shards import Blocks
from .distributed.buckets import local_part
from .flags import did_you_mean
from .foreign import open_plain, problem, read_plain

__all__ = [
    "check_shapes",
    "check_stored",
    "has_meta_tensors",
    "make_room",
    "materialize",
    "read_stored",
    "read_weights",
]

_MARKS = "_stored_tensors"
"""Attribute of a module: where its own tensors are stored, by their keys."""
# Room for two million tensors at some 100 bytes each; a damaged file does not fill the memory.
_INDEX_MOST_BYTES = 1 << 28
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
    """Builds a module whose weights are read from safetensors files when a run begins; each rank reads its own part.

    Until then its parameters are on the meta device: they have shapes and no values. They keep the dtype that they were
    built with, whatever the dtype in the files. For a model of transformers, keys may have any name that transformers
    can convert.

    Args:
        folder: with one ``.safetensors`` file, or several and their ``.safetensors.index.json``; or the path of a file.
        build: builds the module, such as ``lambda: AutoModelForCausalLM.from_config(config)``. `torch.empty` allocates
            no memory in it; everything else, such as tables of positions, is computed as usual.
        prefix: prefix of the keys in the files, before the module's own names. Keys without it belong to other modules.
        ignore: patterns (``*.inv_freq``) of keys that are not read.

    Raises:
        ValueError: the files, their keys or their shapes do not match the module.
    """
    stored = {key: place for key, place in _places(Path(folder)) if not any(fnmatch(key, glob) for glob in ignore)}
    stored = {key.removeprefix(prefix): place for key, place in stored.items() if key.startswith(prefix)}
    with _WithoutMemory():
        module = build()
    names = _names_of_transformers(module, stored, dict(_state(module)))
    stored = {name: place for key, place in stored.items() if (name := names.get(key, key)) is not None}
    places = _matched(module, stored, f"{folder}{f' (prefix {prefix!r})' if prefix else ''}")
    for submodule in module.modules():
        if marks := {key: places[tensor] for key, tensor in _own_tensors(submodule) if tensor in places}:
            setattr(submodule, _MARKS, marks)
    check_stored(module)
    return module


class _WithoutMemory(TorchFunctionMode):
    """In this context, `torch.empty` returns tensors without memory: for parameters; buffers are computed."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty and kwargs.get("out") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def check_stored(module: nn.Module) -> None:
    """Checks a module with tensors that are still to be read: all other tensors must have values.

    Raises:
        ValueError: another tensor is on the meta device.
    """
    if not any(_MARKS in vars(submodule) for submodule in module.modules()):
        return
    for name, submodule in module.named_modules():
        for key, tensor in _own_tensors(submodule):
            if tensor.is_meta and not _is_stored(submodule, key):
                raise ValueError(
                    f"{f'{name}.{key}'.lstrip('.')} of {type(submodule).__name__} is on the meta device, and there is"
                    " no file to read it from: give it memory and its first value (`part.to_empty(device='cpu')` and"
                    " its initialisation). Compute a buffer from torch.zeros, torch.arange or the like; peft puts"
                    " adapters on the device of the layer that they belong to."
                )


def _is_stored(submodule: nn.Module, key: str) -> bool:
    """Whether the tensor `key` of `submodule` itself is still to be read."""
    return key in vars(submodule).get(_MARKS, ())


def read_stored(module: nn.Module, device: torch.device | str = "cpu", leave: Collection[Tensor] = ()) -> None:
    """Reads the tensors of `module` that are still to be read; of a DTensor, this rank's part.

    Args:
        module: changed in place; its tensors stay the same objects.
        device: where they get memory; tensors with memory keep it.
        leave: tensors that are never read, since another rank holds them.
    """
    read: set[Tensor] = set()
    left = set(leave)
    for submodule in module.modules():
        marks: Mapping[str, _Place] = vars(submodule).pop(_MARKS, {})
        for key, tensor in _own_tensors(submodule):
            if key in marks and tensor not in read | left:
                _read(tensor, marks[key], device)
                read.add(tensor)
    if not read:
        return
    for unit in (submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)):
        # torch: as in `_apply`, which moves modules.
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()


def make_room(module: nn.Module) -> None:
    """Gives CPU memory to tensors that are still to be read, and forgets where they are stored: they get new values."""
    for submodule in module.modules():
        marks = vars(submodule).pop(_MARKS, {})
        for key, tensor in _own_tensors(submodule):
            if key in marks:
                _allocate(tensor, "cpu")


def _allocate(tensor: Tensor, device: torch.device | str) -> None:
    local = local_part(tensor)
    if not local.is_meta:
        return
    fresh: Tensor = torch.empty(local.shape, dtype=local.dtype, device=device)
    if isinstance(tensor, DTensor):  # torch: `from_local` would move offloaded tensors from the CPU
        fresh = DTensor(fresh, tensor._spec, requires_grad=False)
    is_parameter = isinstance(tensor, nn.Parameter)
    swap(tensor, nn.Parameter(fresh, tensor.requires_grad) if is_parameter else fresh)


def _read(tensor: Tensor, place: _Place, device: torch.device | str) -> None:
    _allocate(tensor, device)
    # Opened for each tensor: pages that were read stay in memory until the file is closed.
    with torch.no_grad(), safe_open(place.path, framework="pt") as file:
        if not place.shape:
            local_part(tensor).copy_(file.get_tensor(place.key))
            return
        stored = file.get_slice(place.key)
        for offset, piece in _pieces(tensor):
            piece.copy_(stored[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))])


def _pieces(tensor: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The blocks of the whole tensor that this rank has: the offset of each, and its memory."""
    if not isinstance(tensor, DTensor):
        yield (0,) * tensor.dim(), tensor
        return
    pieces = Blocks(tensor)
    for chunk in pieces.__create_chunk_list__():
        yield tuple(chunk.offsets), pieces.at(chunk.offsets)


def _own_tensors(submodule: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for table in (submodule._parameters, submodule._buffers):
        yield from ((key, tensor) for key, tensor in table.items() if tensor is not None)


def _matched(module: nn.Module, stored: Mapping[str, _Place], source: str) -> dict[Tensor, _Place]:
    """Maps each tensor of the module's state to its place in the files; a shared tensor needs only one of its names.

    Raises:
        ValueError: a tensor is not stored, a key is not in the module, or a shape differs.
    """
    kind = type(module).__name__
    state = dict(_state(module))
    places: dict[Tensor, _Place] = {}
    for name in (name for name in stored if name in state):
        places.setdefault(state[name], stored[name])
    missing = [name for name, tensor in state.items() if tensor not in places]
    computed = {name for name, _ in module.named_buffers()}  # files of newer versions do not have them
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
            f"{source} does not have the weights of {kind}: it has {' It has '.join(problems[:6])}{more} Set `prefix`"
            " to what keys begin with before the module's names, and `ignore` to the keys that are not to be read; the"
            " module's own loader, such as from_pretrained, may be able to convert them."
        )
    return places


def _state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, submodule in module.named_modules(remove_duplicate=False):
        for key, tensor in _own_tensors(submodule):
            if key not in submodule._non_persistent_buffers_set:  # torch: Module._non_persistent_buffers_set
                yield f"{name}.{key}".lstrip("."), tensor


def _places(folder: Path) -> Iterator[tuple[str, _Place]]:
    """All keys of the files, and where each is stored.

    Raises:
        ValueError: there are no files, it is not clear which ones to read, or one is damaged.
    """
    for path, names in _files(folder).items():
        try:
            with open_plain(str(path)):  # which safetensors does not ask, and would wait for a pipe's writer
                pass
            with safe_open(path, framework="pt") as file:
                keys = list(file.keys())
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in keys}
        except (SafetensorError, OSError, ValueError) as error:
            raise ValueError(f"{path} can't be read as a safetensors file: {error}") from error
        for key in keys if names is None else sorted(names):
            if key not in shapes:
                raise ValueError(f"{path} has no {key!r}, though the index beside it says so.{did_you_mean(key, keys)}")
            yield key, _Place(str(path.resolve()), key, shapes[key])


def _files(folder: Path) -> dict[Path, set[str] | None]:
    """The files, and the keys of each that the index names; None without an index: all keys."""
    if folder.is_file():
        return {folder: None}
    candidates: list[Path] = []
    # transformers' names first: beside these files, a folder may have those of other libraries.
    for pattern in ("model.safetensors.index.json", "model.safetensors", "*.safetensors.index.json", "*.safetensors"):
        candidates = candidates or sorted(folder.glob(pattern))
    if len(candidates) != 1:
        names_found = ", ".join(file.name for file in candidates) or "no .safetensors file"
        raise ValueError(
            f"{folder} has {names_found}: give a folder with one such file, or one index of several, or the file."
        )
    (path,) = candidates
    if path.suffix == ".safetensors":
        return {path: None}
    try:
        index = json.loads(read_plain(str(path), _INDEX_MOST_BYTES))  # often a link, in a cache
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} can't be read: {error}") from None
    names: Any = index.get("weight_map") if isinstance(index, dict) else None
    if problem(names, dict[str, str], "weight_map"):
        raise ValueError(f"{path} has no 'weight_map' of keys and files: it is no index of safetensors files.")
    of_file: dict[Path, set[str] | None] = {}
    for key, file_name in names.items():
        if os.path.basename(file_name) != file_name:
            raise ValueError(f"{path} names {file_name!r}: its files must be in the same folder.")
        of_file.setdefault(folder / file_name, set()).add(key)  # type: ignore[union-attr]
    return of_file


# --- names in files of transformers' models
# The names that transformers gives to tensors of a file when it reads them into one of its models.
#
# Files of older versions and of other authors have other names (`LayerNorm.gamma`, `language_model.model.` for
# `model.language_model.`), and names of a base model lack a prefix, or have an additional one. transformers has a table
# of them for each model (`transformers.conversion_mapping`). This module follows it for renamed tensors only: where
# transformers merges several tensors into one (the experts of a Mixtral), each rank would have to read all of them.


def _names_of_transformers(module: nn.Module, keys: Collection[str], state: Collection[str]) -> dict[str, str | None]:
    """Maps each key in a file to its name in `module`, or None if transformers ignores it; {} for other modules.

    Args:
        module: a model of transformers, or any other.
        keys: all keys of the files.
        state: the names in the state of `module`.

    Raises:
        ValueError: transformers merges several tensors into one, or gives two the same name.
    """
    library: Any = sys.modules.get("transformers")
    if library is None or not isinstance(module, library.PreTrainedModel):
        return {}
    try:
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    except (ImportError, AttributeError):  # before version 5
        return {}
    merging = library.core_model_loading.WeightConverter
    unexpected = getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()  # transformers: PreTrainedModel
    names: dict[str, str | None] = {}
    renames = [entry for entry in mapping if not isinstance(entry, merging)]
    for key in sorted(keys):  # in the order of transformers: the conversion of a name may depend on an earlier one
        name = key
        for transform in renames:
            name, _ = transform.rename_source_key(name)
        name = _with_prefix(name, module.base_model_prefix, state)
        names[key] = name if name in state else key
        if name not in state and key not in state:
            _check_not_merged(module, key, name, [entry for entry in mapping if isinstance(entry, merging)])
            names[key] = None if any(re.search(pattern, name) for pattern in unexpected) else name
    _check_unique(module, names)
    return names


def _with_prefix(name: str, prefix: str, state: Collection[str]) -> str:
    """Adds the base model's prefix to a name, or takes it away, if that makes it a name of the module."""
    without = name.removeprefix(f"{prefix}.")
    if not prefix or name in state:
        return name
    return next((other for other in (without, f"{prefix}.{name}") if other in state), name)


def _check_not_merged(module: nn.Module, key: str, name: str, converters: Collection[Any]) -> None:
    for converter in converters:
        target, pattern = converter.rename_source_key(name)
        if pattern is not None:
            kind = type(module).__name__
            raise ValueError(
                f"transformers merges {key!r} and others into {target!r} of {kind} (pattern {pattern!r}), which a rank"
                " can't do for its part alone. Write the weights once with the module's own names, and read"
                f" those: {kind}.from_pretrained(folder).save_pretrained(other, save_original_format=False)."
            )


def _check_unique(module: nn.Module, names: Mapping[str, str | None]) -> None:
    seen: dict[str, str] = {}
    for key, name in names.items():
        if name is not None and seen.setdefault(name, key) != key:
            raise ValueError(
                f"{seen[name]!r} and {key!r} are both {name!r} of {type(module).__name__}: leave one of them out by"
                " `ignore`."
            )


# Gives a module that was built on the meta device the weights that it would have got on the CPU.
#
# A module's constructor builds its children first and then draws its own weights; calling `reset_parameters` in that
# same order, children before parents, draws the same numbers from the same seed. (A module that copies finished
# children, as `nn.TransformerEncoder` does, has identical layers; here each is drawn separately.) The caller gets each
# sub-module as soon as it is complete, so that a strategy can shard it before the next one takes memory.


def has_meta_tensors(module: nn.Module) -> bool:
    """Whether any parameter or buffer of `module` has a shape but no memory."""
    return any(tensor.is_meta for tensor in _tensors(module, recurse=True))


def check_shapes(module: nn.Module) -> None:
    """Checks that lazy modules have run.

    Raises:
        ValueError: a parameter or buffer of `module` gets its shape from the first batch, which ranks would draw apart.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            owner = type(module.get_submodule(name.rpartition(".")[0])).__name__
            raise ValueError(
                f"{name} of {type(module).__name__}, a parameter of {owner}, gets its shape from the first batch, but"
                " all ranks need it before: call the module on a batch in its constructor, such as"
                " self(torch.zeros(1, 28, 28)), or give the layer its sizes, or choose strategy='single'."
            )


def materialize(
    module: nn.Module,
    on_complete: Callable[[nn.Module], None] = lambda _: None,
    *,
    draws: bool = True,
    replace: Callable[[Tensor, Tensor], None] = carry_over,
) -> None:
    """Gives every meta tensor of `module` memory on the CPU and its first value; tied tensors stay tied.

    Tensors that are to be read from files (`read_weights`) stay on the meta device. A tensor that several modules share
    gets its value from the first of them, or from a common parent.

    Args:
        module: changed in place; tensors that are not on the meta device keep their values.
        on_complete: called with each sub-module, children before parents, when it has its weights.
        replace: called with each tensor on the meta device, and the one that replaces it.
        draws: whether values are drawn; otherwise another rank has them, and the values here are arbitrary.

    Raises:
        ValueError: a sub-module holds meta tensors and its ``reset_parameters()`` is missing or leaves one out.
    """
    check_stored(module)
    real: dict[Tensor, Tensor] = {}  # by meta tensor, so that a shared tensor is created once

    def visit(name: str, submodule: nn.Module) -> bool:
        num_before = len(real)
        was_meta = [visit(f"{name}.{child}" if name else child, sub) for child, sub in submodule.named_children()]
        own_name = f"{name or type(submodule).__name__} ({type(submodule).__name__})"
        shared = _give_memory(submodule, real, replace)
        if shared is not None or any(was_meta):
            if draws:
                _reset(submodule, own_name, must=shared is not None, real=real)
            for table, key, tensor in shared or ():
                table[key] = tensor  # its own draw is discarded, as in a constructor
        on_complete(submodule)
        _forget_replaced(submodule, real, num_before)
        return shared is not None or any(was_meta)

    visit("", module)


_Slot = tuple[dict[str, Any], str, Tensor]


def _give_memory(
    submodule: nn.Module, real: dict[Tensor, Tensor], replace: Callable[[Tensor, Tensor], None]
) -> list[_Slot] | None:
    """Replaces the module's own meta tensors, by NaN where possible: it shows later which tensor got no value.

    Returns:
        None if it has no meta tensors; otherwise the slots of tensors that another module has materialized before.
    """
    shared: list[_Slot] = []
    has_meta = False
    tables: tuple[dict[str, Any], ...] = (submodule._parameters, submodule._buffers)
    for table in tables:
        for key, tensor in table.items():
            if tensor is None or not tensor.is_meta or _is_stored(submodule, key):
                continue
            has_meta = True
            empty = torch.full_like(tensor, torch.nan if tensor.is_floating_point() else 0, device="cpu")
            fresh = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            if tensor in real:
                shared.append((table, key, real[tensor]))
            else:
                real[tensor] = fresh
                replace(tensor, fresh)
            table[key] = fresh
    return shared if has_meta else None


def _forget_replaced(submodule: nn.Module, real: dict[Tensor, Tensor], num_before: int) -> None:
    """Drops tensors that were created within `submodule` and that shards have replaced."""
    held = {id(tensor) for tensor in _tensors(submodule, recurse=True)}
    for meta in list(islice(reversed(real), len(real) - num_before)):
        if id(real[meta]) not in held:
            del real[meta]


def _reset(submodule: nn.Module, name: str, *, must: bool, real: dict[Tensor, Tensor]) -> None:
    reset = getattr(submodule, "reset_parameters", None) or getattr(submodule, "_reset_parameters", None)
    remedy = "to give its tensors their first values: mend that, or build the module on the CPU."
    if not callable(reset):
        if must:
            raise ValueError(f"{name} was built on the meta device and has no method reset_parameters() {remedy}")
        return
    materialized = {id(tensor) for tensor in real.values()}
    own = {id(tensor) for tensor in _tensors(submodule, recurse=False)}
    loaded = [(t, t.detach().clone()) for t in _tensors(submodule, recurse=True) if id(t) not in materialized | own]
    with torch.no_grad():
        reset()
        for tensor, value in loaded:  # a parent's reset must not change loaded values, such as pretrained weights
            tensor.copy_(value)
    for key, tensor in (*submodule.named_parameters(recurse=False), *submodule.named_buffers(recurse=False)):
        if must and tensor.isnan().any():
            raise ValueError(
                f"{name} was built on the meta device, and its reset_parameters() leaves out {key!r} {remedy}"
            )


def _tensors(module: nn.Module, recurse: bool) -> Iterator[Tensor]:
    yield from module.parameters(recurse=recurse)
    yield from module.buffers(recurse=recurse)
