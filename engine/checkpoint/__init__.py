"""Checkpoints: directories that are whole or not there, and open under every strategy."""

from .files import absolute
from .rng import draw_alone, get_random_state, set_random_state
from .saver import Saver, load_checkpoint
from .store import CheckpointError, Manifest, NewerFormatError, find, is_checkpoint, lock, read_manifest, repair
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
    "load_checkpoint",
    "lock",
    "numbered",
    "read_manifest",
    "repair",
    "set_random_state",
]
