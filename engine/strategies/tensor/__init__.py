"""Layers split over ranks: `tp`, `fsdp+tp` and `hsdp+tp`."""

from .plan import make_plan
from .strategy import FSDPTPOptions, HSDPTPOptions, TensorParallel, TPOptions

__all__ = ["FSDPTPOptions", "HSDPTPOptions", "TPOptions", "TensorParallel", "make_plan"]
