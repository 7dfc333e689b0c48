"""Stages of a module, one after the other: `pp`, `pp+ddp` and `pp+fsdp`."""

from .strategy import Pipeline

__all__ = ["Pipeline"]
