"""Checkpoints: directories that are whole or not there, and open under every strategy.

Each name is imported when it is first asked for: what reads manifests alone needs no torch.
"""

from typing import TYPE_CHECKING

from ..lazy import import_on_access

if TYPE_CHECKING:
    from .files import absolute
    from .rng import draw_alone, get_random_state, of_host, set_random_state
    from .saver import Saver, load_checkpoint
    from .store import (
        CheckpointError,
        Manifest,
        NewerFormatError,
        find,
        is_checkpoint,
        is_directory,
        lock,
        read_manifest,
        repair,
    )
    from .tree import NAMES, by_name, by_number, numbered

__all__ = [
    "NAMES",
    "CheckpointError",
    "Manifest",
    "NewerFormatError",
    "Saver",
    "absolute",
    "by_name",
    "by_number",
    "draw_alone",
    "find",
    "get_random_state",
    "is_checkpoint",
    "is_directory",
    "load_checkpoint",
    "lock",
    "numbered",
    "of_host",
    "read_manifest",
    "repair",
    "set_random_state",
]

__getattr__ = import_on_access(
    __name__,
    {
        "NAMES": "tree",
        "CheckpointError": "store",
        "Manifest": "store",
        "NewerFormatError": "store",
        "Saver": "saver",
        "absolute": "files",
        "by_name": "tree",
        "by_number": "tree",
        "draw_alone": "rng",
        "find": "store",
        "get_random_state": "rng",
        "is_checkpoint": "store",
        "is_directory": "store",
        "load_checkpoint": "saver",
        "lock": "store",
        "numbered": "tree",
        "read_manifest": "store",
        "repair": "store",
        "of_host": "rng",
        "set_random_state": "rng",
    },
)
