"""Exports a checkpoint: as a Lightning checkpoint, or the weights alone, as a file or in Hugging Face's layout.

What is written has a temporary name until it is complete, is synced and renamed. Of the weights alone, one tensor at a
time is in memory, whatever layout has saved them. `torch.distributed.checkpoint.HuggingFaceStorageWriter` writes the
same layout, but copies all of a rank's shards to the host first, and does not take shards of several blocks.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor, nn

from ..flags import choose
from .adapters import Adapters, Weights, as_peft, merged
from .checked_io import Files, resolve, sync
from .dcp_storage import SAFETENSORS, bytes_of, header_bytes
from .errors import CheckpointError
from .opening import weights_of
from .saver import load_checkpoint
from .single_file import OURS, SUFFIXES
from .state_tree import NAMES
from .whole import whole_checkpoint

__all__ = ["check_target", "configuration_of", "export"]

_SHARD_BYTES = 5_000_000_000
"""The largest size of a file in Hugging Face's layout, unless one tensor is larger; that of `save_pretrained`."""

_Choice = Callable[[dict[str, Any]], dict[str, Any]]
"""Which state of the module is meant, of a checkpoint's content."""


def export(
    path: str,
    to: str,
    *,
    overwrite: bool = False,
    weights_only: bool = True,
    huggingface: str | None = None,
    configuration: Mapping[str, str] | None = None,
    shard_bytes: int = _SHARD_BYTES,
    adapters: Adapters | None = None,
    peft: tuple[str, str | None] | None = None,
    weights: str | None = None,
) -> list[str]:
    """Verifies all files of the checkpoint `path` and writes its content.

    Args:
        path: the checkpoint, a directory or file, local or an fsspec URL.
        to: the file to write, local or an fsspec URL; its extension selects the format, see `SUFFIXES`.
        overwrite: replace an existing file.
        weights_only: as for `torch.load`.
        huggingface: name of the sub-module whose weights are written for `from_pretrained`, "" for the whole module;
            `to` is a local folder then.
        configuration: contents of other files of that folder, by name.
        shard_bytes: the largest size of a file in that folder.
        adapters: those of the module, if the checkpoint does not say it; they are merged into its weights.
        peft: instead of the weights, write the adapters to the new local folder `to`, which peft reads: name of the
            sub-module to which they belong, and that of the model that was fine-tuned, if it has one.
        weights: ``"average"``: those that `WeightAveraging` has averaged; ``"current"``: those that training goes on
            from; None: those of the checkpoint's ``state_dict``, which are the average if there is one.

    Returns:
        Names of the entries in the module's state that are not tensors; what is written does not contain them.

    Raises:
        CheckpointError: `path` is not a checkpoint, is damaged, or has no weights.
        ValueError: the extension is unknown, the target exists already, or no weights have that name.
    """
    is_folder = peft is not None or huggingface is not None
    suffix = "" if is_folder else choose("ending", os.path.splitext(to)[1], SUFFIXES)
    if weights is not None:
        choose("weights", weights, ("average", "current"))
        if suffix == ".ckpt":
            raise ValueError(f"a .ckpt file gets all that is in the checkpoint: leave out weights={weights!r}.")
    chosen = partial(_state, path, weights)
    fs, target = check_target(to, overwrite=overwrite, is_folder=is_folder)
    if peft is not None:
        tensors, _, adapters = _weights(path, weights_only, adapters, chosen)
        if adapters is None:
            raise ValueError(f"{path} has no adapters: they are in checkpoints of a run with finetune='lora'.")
        of_adapters, texts = as_peft(tensors, adapters, *peft)
        with _writing(fs, target) as folder:
            os.mkdir(folder)
            _write_tensors(os.path.join(folder, "adapter_model.safetensors"), of_adapters)
            for name, text in texts.items():
                _write_text(folder, name, text)
        return []
    if huggingface is not None:
        tensors, left_out = _merged(path, weights_only, adapters, chosen)
        prefix = f"{huggingface}." if huggingface else ""
        named = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix)}
        if not named:
            roots = sorted({name.partition(".")[0] for name in tensors})
            raise ValueError(f"no weights of {path} are below {huggingface!r}: they are below {', '.join(roots)}.")
        with _writing(fs, target) as folder:
            os.mkdir(folder)
            _write_layout(folder, {name: tensors[key] for name, key in named.items()}, shard_bytes)
            for name, text in (configuration or {}).items():
                _write_text(folder, name, text)
        return [name for name in left_out if name.startswith(prefix)]
    if suffix == ".ckpt":
        content = load_checkpoint(path, weights_only=weights_only)
        # The same place as in the engine's own files.
        content.setdefault(OURS, {})[NAMES] = content.pop(NAMES)
        with _writing(fs, target) as name:
            _save(content, name)
        return []
    tensors, left_out = _merged(path, weights_only, adapters, chosen)
    with _writing(fs, target) as name:
        if suffix == ".safetensors":
            _write_tensors(name, tensors)
        else:
            _save({key: read() for key, (_, read) in tensors.items()}, name)
    return left_out


def check_target(to: str, *, overwrite: bool, is_folder: bool = False) -> tuple[AbstractFileSystem, str]:
    """Returns the file system and path of what is to be written.

    Raises:
        ValueError: it is a folder where a file is written, a URL where a folder is, or exists already.
    """
    fs, target = resolve(to)
    if is_folder and not isinstance(fs, LocalFileSystem):
        raise ValueError(f"{to} is a URL: the folder for from_pretrained must be local.")
    if is_folder and fs.exists(target):
        # Whatever else is in it would be lost, so there is no flag for it.
        raise ValueError(f"{to} is there already: give the name of a new folder.")
    if not is_folder and fs.isdir(target):
        raise ValueError(f"{to} is a folder: give the name of a file.")
    if fs.exists(target) and not overwrite:
        raise ValueError(f"{to} is there already: give another name, or overwrite=True (--overwrite) to replace it.")
    return fs, target


def configuration_of(model: nn.Module) -> dict[str, str]:
    """Returns the files that `save_pretrained` of transformers would write beside the weights; none for others."""
    files = {}
    for name in ("config", "generation_config"):
        part: Any = getattr(model, name, None)
        if not hasattr(part, "to_json_string"):
            continue
        fields = json.loads(part.to_json_string())
        if name == "config":
            # The class that `fully_shard` makes of the model's own is torch's.
            classes = (kind.__name__ for kind in type(model).__mro__ if not kind.__module__.startswith("torch."))
            dtype = next((weight.dtype for weight in model.parameters() if weight.is_floating_point()), None)
            fields |= {"architectures": [next(classes)], "dtype": str(dtype).removeprefix("torch.")}
        files[f"{name}.json"] = json.dumps(fields, indent=2)
    return files


def _state(path: str, wanted: str | None, content: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of the module that is meant: its current weights, or their average.

    Raises:
        CheckpointError: there are no weights.
        ValueError: there is no average.
    """
    if "state_dict" not in content:
        raise CheckpointError(f"The checkpoint {path} has no weights: it has {', '.join(sorted(content))}.")
    # Lightning: a `WeightAveraging` has put the average into "state_dict", and the weights there.
    current: dict[str, Any] | None = content.get("current_model_state")
    if wanted == "average" and current is None:
        raise ValueError(
            f"{path} has no average of weights: checkpoints of a run with WeightAveraging or EMAWeightAveraging have"
            " one. The average of StochasticWeightAveraging is what `engine.export` writes after the last epoch."
        )
    return content["state_dict"] if wanted != "current" or current is None else current


def _merged(path: str, weights_only: bool, adapters: Adapters | None, chosen: _Choice) -> tuple[Weights, list[str]]:
    """Returns the weights without adapters, and the names of entries that are no tensors."""
    weights, left_out, adapters = _weights(path, weights_only, adapters, chosen)
    return weights if adapters is None else merged(weights, adapters), left_out


def _weights(
    path: str, weights_only: bool, adapters: Adapters | None, chosen: _Choice
) -> tuple[Weights, list[str], Adapters | None]:
    """Returns the weights, none of which has been read, the names of entries that are no tensors, and the adapters."""
    fs, fs_path = resolve(path)
    if fs.isfile(fs_path):
        content = whole_checkpoint(path, weights_only, lazily=True)
        # Tensors of a file may share their memory, of which each is a part.
        state = chosen(content)
        read: Any = {key: (value, value.clone) for key, value in state.items() if isinstance(value, Tensor)}
    else:
        content, read = weights_of(path, weights_only, chosen)
        state = chosen(content)
    weights = {name: (value.to("meta"), function) for name, (value, function) in read.items()}
    adapters = adapters or Adapters.of(content.get("callbacks"))
    return weights, [name for name in state if name not in weights], adapters


def _save(content: dict[str, Any], name: str) -> None:
    with Files(os.path.dirname(name)).writing(os.path.basename(name), notes_sum=False) as stream:
        torch.save(content, stream)


def _write_layout(folder: str, weights: Weights, shard_bytes: int) -> None:
    """Writes ``model.safetensors``, or several files and their index."""
    parts: list[Weights] = [{}]
    num_bytes = 0
    for name, (form, read) in weights.items():
        if parts[-1] and num_bytes + form.nbytes > shard_bytes:
            parts.append({})
            num_bytes = 0
        parts[-1][name] = form, read
        num_bytes += form.nbytes
    if len(parts) == 1:
        _write_tensors(os.path.join(folder, "model.safetensors"), weights)
        return
    files = {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}
    for file, part in files.items():
        _write_tensors(os.path.join(folder, file), part)
    total = sum(form.nbytes for form, _ in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": {name: file for file in files for name in files[file]}}
    _write_text(folder, "model.safetensors.index.json", json.dumps(index, indent=2))


def _write_text(folder: str, name: str, text: str) -> None:
    with Files(folder).writing(name, notes_sum=False) as stream:
        stream.write(text.encode())


def _write_tensors(path: str, weights: Weights) -> None:
    """Writes a safetensors file, tensor by tensor; those of wide dtypes come first, so that all are aligned."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers opens no other
    names = sorted(weights, key=lambda name: weights[name][0].itemsize, reverse=True)
    end = 0
    for name in names:
        form = weights[name][0]
        if form.dtype not in SAFETENSORS:
            raise ValueError(f"safetensors has no {form.dtype}, the dtype of {name}: export to .pt or .ckpt.")
        start, end = end, end + form.nbytes
        entries[name] = {"dtype": SAFETENSORS[form.dtype], "shape": [*form.shape], "data_offsets": [start, end]}
    with Files(os.path.dirname(path)).writing(os.path.basename(path), notes_sum=False) as stream:
        stream.write(header_bytes(entries))
        for name in names:
            stream.write(bytes_of([weights[name][1]()]))


@contextmanager
def _writing(fs: AbstractFileSystem, target: str) -> Iterator[str]:
    """Gives a temporary name, and moves what was written there to `target`."""
    is_local = isinstance(fs, LocalFileSystem)
    folder, name = os.path.split(target.rstrip("/"))
    if is_local:
        os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".exporting-", dir=folder if is_local else None) as temporary:
        written = os.path.join(temporary, name)
        yield written
        if not is_local:
            fs.put_file(written, target)
            return
        os.replace(written, target)
    sync(folder)
