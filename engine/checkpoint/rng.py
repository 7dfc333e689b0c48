"""Saves and restores the random state of a process (Python, NumPy, torch and accelerators) as plain values."""

import ctypes
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..devices import in_use

__all__ = [
    "derive_seed",
    "get_random_state",
    "host_state",
    "include_devices",
    "is_same_state",
    "seed_all",
    "seed_rank_stream",
    "set_random_state",
]

_TWISTER_BYTES = 624 * 4 + 4
"""Size of the state of `np.random.MT19937` in memory: 624 words and a position."""

_numpy_cache: tuple[bytes, list[Any]] = b"", []
"""NumPy's state when it was last read, as raw memory and as plain values."""

_further_devices: tuple[torch.device, ...] = ()
"""Accelerators of this process, other than the current one, whose generators are saved as well."""


def include_devices(devices: Sequence[torch.device]) -> None:
    """Includes the generators of all these devices in later states; the first device is the current one."""
    global _further_devices
    _further_devices = tuple(device for device in devices[1:] if device.type != "cpu")


def get_random_state() -> dict[str, Any]:
    """Returns the states of the random generators, for `set_random_state`; they load with ``weights_only=True``."""
    state = host_state()
    if (used := in_use()) is not None:
        kind, module = used
        state[kind] = module.get_rng_state()
        for device in _further_devices:
            state[str(device)] = module.get_rng_state(device)
    return state


def host_state() -> dict[str, Any]:
    """Returns the part of `get_random_state` without accelerators."""
    return {"python": random.getstate(), "numpy": _numpy_state(), "torch": torch.get_rng_state()}


def _numpy_state() -> list[Any]:
    """Returns NumPy's state; cached until a number is drawn, as a read takes 50 us in each accumulation window."""
    global _numpy_cache
    generator: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    is_twister = type(generator) is np.random.MT19937
    raw = ctypes.string_at(generator.ctypes.state_address, _TWISTER_BYTES) if is_twister else b""
    before, state = _numpy_cache
    # NumPy may hold a second normal number (`has_gauss`), which it returns without changing the raw state.
    if raw != before or not raw or state[3]:
        name, keys, *rest = np.random.get_state(legacy=True)
        state = [name, keys.tolist(), *rest]  # type: ignore[union-attr]
        _numpy_cache = raw, state
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Sets the random generators to a state that `get_random_state` has returned."""
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    kind = torch.accelerator.current_accelerator()
    if kind is not None and kind.type in state:
        module = torch.get_device_module(kind)
        module.set_rng_state(state[kind.type])
        for device in _further_devices:
            if str(device) in state:
                module.set_rng_state(state[str(device)], device)


def seed_rank_stream(rank: int) -> None:
    """Gives this rank its own stream of random numbers, which is the same in each run with the same seed.

    Rank 0 keeps its stream. The other ranks derive theirs from the common state, if all ranks had the same seed.
    """
    if rank == 0:
        return
    with torch.random.fork_rng(devices=[]):
        common = int(torch.randint(2**62, ()))
    seed_all(common, rank)


def seed_all(*numbers: int) -> None:
    """Seeds all generators with a seed derived from `numbers`."""
    seed = derive_seed(*numbers)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        # `torch.manual_seed` records the call stack for each kind of device that may be initialised later. This takes
        # 0.7 ms, in each micro-batch of a pipeline stage.
        torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def derive_seed(*numbers: int) -> int:
    """A seed for a tuple of whole numbers, in [0, 2^63): seeds of neighbouring tuples are unrelated."""
    return hash(numbers) % 2**63  # a hash of whole numbers is the same in every process


def is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of generators are equal."""
    if isinstance(state, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(state, other)
    if isinstance(state, dict) and isinstance(other, dict):
        if state.keys() != other.keys():
            return False
        # A loop, since it is called for each batch of a stream; and NumPy's state stays the same object.
        for name, value in state.items():
            if value is not other[name] and not is_same_state(value, other[name]):
                return False
        return True
    return bool(state == other)
