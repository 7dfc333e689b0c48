"""Makes `load_from_checkpoint` of modules and data modules open the engine's directories as it opens Lightning's files.

The module's hooks do not see the engine's own entry of a checkpoint, as when a trainer opens it.
"""

import io
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.core import saving

from ..checkpoint import CheckpointError, is_directory, load_checkpoint
from ..checkpoint.manifest import damage
from ..checkpoint.single_file import OURS
from ..checkpoint.whole import load_archive, read_file

__all__: list[str] = []

_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", *saving.CHECKPOINT_PAST_HPARAMS_KEYS)


def _load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    checkpoint = _opened(path, map_location, weights_only)
    if weights_only is not False and isinstance(checkpoint, dict):
        for name in ("state_dict", *_HYPER_PARAMETERS):
            if not isinstance(checkpoint.get(name, {}), dict):
                raise damage(path, f"its {name} is a {type(checkpoint[name]).__name__} in place of a dict")
            if name in _HYPER_PARAMETERS and name in checkpoint:
                _refuse_imports(checkpoint[name], path)
    if isinstance(checkpoint, dict):
        checkpoint.pop(OURS, None)
    return checkpoint


def _refuse_imports(values: dict[str, Any], path: Any) -> None:
    """Checks that hyper-parameters from which Lightning instantiates a module name no code that it would import.

    Which of these classes it instantiates, the annotations of the module's arguments say.

    Raises:
        CheckpointError: names what is not imported yet, or no function of Lightning's.
    """
    if "_instantiator" not in values:
        return  # they are passed as they are
    if values["_instantiator"] not in saving._ALLOWED_INSTANTIATORS:
        raise CheckpointError(f"The checkpoint {path} asks for {values['_instantiator']!r:.100}, which is not called.")
    for name in _texts({key: value for key, value in values.items() if key != "_instantiator"}):
        parts = name.split(".")
        if len(parts) < 2 or not all(map(str.isidentifier, parts)) or _is_imported(parts):
            continue
        if parts[0] in sys.modules or find_spec(parts[0]) is not None:
            raise CheckpointError(
                f"The hyper-parameters of the checkpoint {path} name {name}, which is not imported: a checkpoint"
                " imports nothing. Import its module first, or pass weights_only=False if you trust the file."
            )


def _is_imported(parts: list[str]) -> bool:
    """Whether a class, or a method of one, can be looked up without an import."""
    for end in (len(parts) - 1, len(parts) - 2):
        owner: Any = sys.modules.get(".".join(parts[:end]))
        for part in parts[end:]:
            owner = vars(owner).get(part) if hasattr(owner, "__dict__") else None
        if owner is not None:
            return True
    return False


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


def _opened(path: Any, map_location: Any, weights_only: bool | None) -> Any:
    if not isinstance(path, (str, Path)):  # an open file
        return load_archive(path, getattr(path, "name", "file"), weights_only, map_location=map_location)
    if str(path).startswith("http"):  # Lightning's default there is to run the code in a file
        return read_file(_downloaded(str(path)), weights_only is not False, map_location=map_location)
    if not is_directory(path):
        return read_file(path, weights_only, map_location=map_location)
    checkpoint = load_checkpoint(path, weights_only=weights_only)
    if map_location is None or map_location is saving._default_map_location:
        return checkpoint  # on the CPU, where it was opened
    if isinstance(map_location, (str, torch.device)):
        return move_data_to_device(checkpoint, torch.device(map_location))
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    return torch.load(stream, map_location=map_location, weights_only=weights_only is not False)


def _downloaded(url: str) -> str:
    """Returns the path of the local copy of a file, which a later call takes again, as torch.hub and Lightning do."""
    folder = os.path.join(torch.hub.get_dir(), "checkpoints")
    path = os.path.join(folder, os.path.basename(urlparse(url).path))
    if not os.path.isfile(path):
        os.makedirs(folder, exist_ok=True)
        torch.hub.download_url_to_file(url, path)
    return path


saving.pl_load = _load  # type: ignore[assignment]  # Lightning: `_load_from_checkpoint` opens every path with it
