"""Layers split over ranks: `tp`, `fsdp+tp` and `hsdp+tp`."""

from .plan import make_plan
from .strategy import TensorParallel

__all__ = ["TensorParallel", "make_plan"]
