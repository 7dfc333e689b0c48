"""The random state of one process: Python's, numpy's, torch's and its device's, as plain values."""

import random
from typing import Any

import numpy as np
import torch

from ..seeds import mixed

__all__ = ["draw_alone", "get_random_state", "seed_all", "set_random_state"]


def get_random_state() -> dict[str, Any]:
    """What `set_random_state` takes; loads with ``weights_only=True``."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), *rest],  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Goes on where `get_random_state` was called."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def draw_alone(rank: int) -> None:
    """Has this rank draw other random numbers than the others from now on, the same in each run that is seeded.

    Rank 0 goes on as it is. The others start from what all have in common, if they were seeded alike.
    """
    if rank == 0:
        return
    with torch.random.fork_rng(devices=[]):
        common = int(torch.randint(2**62, ()))
    seed_all(common, rank)


def seed_all(*numbers: int) -> None:
    """Seeds all generators by some whole numbers."""
    seed = mixed(*numbers)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
