"""Pipeline parallelism: `pp`, `pp+ddp` and `pp+fsdp`."""

from .strategy import Pipeline

__all__ = ["Pipeline"]
