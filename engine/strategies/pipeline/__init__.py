"""Stages of a module, one after the other: `pp`, `pp+ddp` and `pp+fsdp`."""

from .options import PPDDPOptions, PPFSDPOptions, PPOptions
from .strategy import Pipeline

__all__ = ["PPDDPOptions", "PPFSDPOptions", "PPOptions", "Pipeline"]
