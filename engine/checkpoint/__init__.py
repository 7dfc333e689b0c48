"""Checkpoints: saved completely or not at all, and readable under every strategy.

Names are imported at first access, so code that only reads manifests does not import torch.
"""

from typing import TYPE_CHECKING

from ..registration import import_on_access

if TYPE_CHECKING:
    from .checked_io import absolute
    from .errors import CheckpointError, NewerFormatError
    from .manifest import Manifest, find, is_checkpoint, is_directory, read_manifest
    from .publish import lock, repair
    from .rng import get_random_state, host_state, seed_rank_stream, set_random_state
    from .saver import AsyncCheckpointer, load_checkpoint
    from .state_tree import NAMES, by_name, by_number, to_lightning

__all__ = [
    "NAMES",
    "AsyncCheckpointer",
    "CheckpointError",
    "Manifest",
    "NewerFormatError",
    "absolute",
    "by_name",
    "by_number",
    "find",
    "get_random_state",
    "host_state",
    "is_checkpoint",
    "is_directory",
    "load_checkpoint",
    "lock",
    "read_manifest",
    "repair",
    "seed_rank_stream",
    "set_random_state",
    "to_lightning",
]

__getattr__ = import_on_access(
    __name__,
    {
        "NAMES": "state_tree",
        "CheckpointError": "errors",
        "Manifest": "manifest",
        "NewerFormatError": "errors",
        "AsyncCheckpointer": "saver",
        "absolute": "checked_io",
        "by_name": "state_tree",
        "by_number": "state_tree",
        "seed_rank_stream": "rng",
        "find": "manifest",
        "get_random_state": "rng",
        "is_checkpoint": "manifest",
        "is_directory": "manifest",
        "load_checkpoint": "saver",
        "lock": "publish",
        "to_lightning": "state_tree",
        "read_manifest": "manifest",
        "repair": "publish",
        "host_state": "rng",
        "set_random_state": "rng",
    },
)
