"""Ways of running: one file each, a table of them, and what they share. Coupled to Lightning 2.6's private names."""

from .failure import announce
from .launch import LayoutStrategy
from .materialize import has_meta_tensors
from .precision import PRECISIONS
from .registry import STRATEGIES
from .select import Parts, select

__all__ = ["PRECISIONS", "STRATEGIES", "LayoutStrategy", "Parts", "announce", "has_meta_tensors", "select"]
