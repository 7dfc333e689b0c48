"""Parameters, gradients and optimizer state cut into shards: `fsdp` and `hsdp`."""

from .strategy import FSDP

__all__ = ["FSDP"]
