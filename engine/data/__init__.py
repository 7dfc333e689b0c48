"""Splits the user's order of samples over the ranks, and tracks the position of a run in this order."""

from .length_bucketing import LengthBucketing
from .packing import PackSequences, block_diagonal_mask, cu_seqlens

__all__ = ["LengthBucketing", "PackSequences", "block_diagonal_mask", "cu_seqlens"]
