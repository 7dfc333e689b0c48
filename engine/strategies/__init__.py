"""Ways of running: one file each, a table of them, and what they share. Coupled to Lightning 2.6's private names."""

from .failure import FailFast
from .materialize import has_meta_tensors
from .precision import PRECISIONS
from .registry import STRATEGIES
from .select import Parts, select

__all__ = ["PRECISIONS", "STRATEGIES", "FailFast", "Parts", "has_meta_tensors", "select"]
