"""The random state of one process: Python's, numpy's, torch's and its device's, as plain values."""

import ctypes
import random
from typing import Any

import numpy as np
import torch

from ..devices import in_use
from ..seeds import mixed

__all__ = ["draw_alone", "get_random_state", "of_host", "seed_all", "set_random_state"]

_TWISTER_BYTES = 624 * 4 + 4
"""Size of the state of `np.random.MT19937` in memory: 624 words, and the position among them."""
_numpys: tuple[bytes, list[Any]] = b"", []
"""NumPy's state when it was last read: in memory, and as plain values."""


def get_random_state() -> dict[str, Any]:
    """Returns the states of the random generators for `set_random_state`; loads with ``weights_only=True``."""
    state = {"python": random.getstate(), "numpy": _of_numpy(), "torch": torch.get_rng_state()}
    if (used := in_use()) is not None:
        kind, module = used
        state[kind] = module.get_rng_state()
    return state


def of_host(state: dict[str, Any]) -> dict[str, Any]:
    """The part of a state of `get_random_state` that is no accelerator's."""
    return {name: state[name] for name in ("python", "numpy", "torch")}


def _of_numpy() -> list[Any]:
    """Returns NumPy's state; not read again (50 us, in each accumulation window) where nobody has drawn from it."""
    global _numpys
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    is_twister = type(generator) is np.random.MT19937
    raw = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES) if is_twister else b""
    before, state = _numpys
    # A second normal number, kept from a draw before, is handed out without a draw.
    if raw != before or not raw or state[3]:
        name, keys, *rest = np.random.get_state(legacy=True)
        state = [name, keys.tolist(), *rest]  # type: ignore[union-attr]
        _numpys = raw, state
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the random generators to a state of `get_random_state`."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type in state:
        torch.get_device_module(kind).set_rng_state(state[kind.type])


def draw_alone(rank: int) -> None:
    """Makes this rank draw other random numbers than the others from now on, the same in each run that is seeded.

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
