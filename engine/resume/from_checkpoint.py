"""Makes `load_from_checkpoint` of modules and data modules open the engine's directories as it opens Lightning's files.

The module's hooks do not see the engine's own entry of a checkpoint, as when a trainer opens it.
"""

import io
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.core import saving

from ..checkpoint import is_directory, load_checkpoint
from ..checkpoint.single_file import OURS

__all__: list[str] = []

_load_file = saving.pl_load  # Lightning: `_load_from_checkpoint` opens every path with it


def _load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    checkpoint = _opened(path, map_location, weights_only)
    if isinstance(checkpoint, dict):
        checkpoint.pop(OURS, None)
    return checkpoint


def _opened(path: Any, map_location: Any, weights_only: bool | None) -> Any:
    if not isinstance(path, (str, Path)) or not is_directory(path):
        return _load_file(path, map_location, weights_only)
    checkpoint = load_checkpoint(path, weights_only=weights_only)
    if map_location is None or map_location is saving._default_map_location:
        return checkpoint  # on the CPU, where it was opened
    if isinstance(map_location, (str, torch.device)):
        return move_data_to_device(checkpoint, torch.device(map_location))
    stream = io.BytesIO()
    torch.save(checkpoint, stream)
    stream.seek(0)
    return torch.load(stream, map_location=map_location, weights_only=weights_only is not False)


saving.pl_load = _load  # type: ignore[assignment]
