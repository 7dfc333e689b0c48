"""Ranks with the same samples share layers (`tp`, `fsdp+tp`, `hsdp+tp`) or sequences (`cp`, `fsdp+cp`, ...)."""

from .context import ContextParallel
from .plan import make_plan
from .strategy import TensorParallel

__all__ = ["ContextParallel", "TensorParallel", "make_plan"]
