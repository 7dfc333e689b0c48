"""Pickles torch.Generator for workers that are spawned.

torch pickles its state as a tensor in shared memory, which is freed before the worker opens it: with a loader that has
a `generator`, or a StatefulDataLoader with `shuffle=True`, the worker ends with "unable to resize file".
"""

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import torch

__all__ = ["pickle_generators"]


def pickle_generators() -> None:
    """Makes multiprocessing pickle generators with their states as bytes."""
    ForkingPickler.register(torch.Generator, _reduce)


def _reduce(generator: torch.Generator) -> tuple[Callable[..., torch.Generator], tuple[str, bytes]]:
    return _rebuild, (str(generator.device), generator.get_state().numpy().tobytes())


def _rebuild(device: str, state: bytes) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    return generator
