"""Which streams can be read shard by shard, and by several ranks together.

The contract of a data set: `num_shards` (or `n_shards`), a method ``shard(num_shards, index)``, and the class attribute
``shards_in_order = True``: iterating the data set yields the samples of ``shard(num_shards, 0)``, then those of
``shard(num_shards, 1)``, and so on. Hugging Face's streams satisfy it unless they mix shards, see `why_not_shardable`.
"""

from typing import Any

from .replayed import iterables_of
from .stateful import is_hugging_face_dataset

__all__ = ["ends_with_one_source", "num_shards_of", "why_not_dealable", "why_not_shardable"]

_IN_ORDER = (
    "ExamplesIterable",
    "ArrowExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "MappedExamplesIterable",
    "FilteredExamplesIterable",
    "SelectColumnsIterable",
    "FormattedExamplesIterable",
)
"""Hugging Face: iterables that yield several shards one after the other, each shard as they yield it alone."""


def num_shards_of(dataset: Any) -> int | None:
    """Returns the number of shards of a data set; None if it has no such attribute."""
    number = getattr(dataset, "num_shards", getattr(dataset, "n_shards", None))
    return number if isinstance(number, int) else None


def why_not_shardable(dataset: Any) -> str | None:
    """Returns why a data set can't be read shard by shard; None if it can."""
    name = type(dataset).__name__
    if hasattr(dataset, "__len__"):
        return f"{name} has a `__len__`, which would be wrong for an epoch that is redistributed"
    if not callable(getattr(dataset, "shard", None)) or not num_shards_of(dataset):
        return f"{name} has no `num_shards` and `shard(num_shards, index)`"
    if not is_hugging_face_dataset(dataset):
        says_so = getattr(dataset, "shards_in_order", False)
        return None if says_so else f"{name} doesn't say `shards_in_order = True`"
    if dataset._distributed is not None:  # Hugging Face: set by split_dataset_by_node
        return "`split_dataset_by_node` has given each rank its own part, but the engine splits the data itself"
    if getattr(dataset._formatting, "is_table", False):
        return "it yields tables of several samples"
    iterable = dataset._ex_iterable
    while iterable is not None:
        if type(iterable).__name__ not in _IN_ORDER:
            return f"its shards are mixed, or cut, by Hugging Face's {type(iterable).__name__}"
        for flag in ("batched", "with_indices", "drop_last_batch"):
            if getattr(iterable, flag, False):
                return f"its `map` or `filter` with {flag}=True depends on where shards begin"
        iterable = getattr(iterable, "ex_iterable", None)
    return None


def why_not_dealable(dataset: Any) -> str | None:
    """Returns why ranks that share a data set's shards would together read other samples than one rank; or None.

    Hugging Face divides the number of `take` and `skip` by the number of ranks, and each rank counts in its own
    shards; the same holds for the indices of a `filter`.
    """
    for iterable in iterables_of(dataset):
        name = type(iterable).__name__
        if name in ("TakeExamplesIterable", "SkipExamplesIterable") and getattr(iterable, "split_when_sharding", True):
            return "take" if name.startswith("Take") else "skip"
        if name == "FilteredExamplesIterable" and getattr(iterable, "with_indices", False):
            return "filter(..., with_indices=True)"
    return None


def ends_with_one_source(dataset: Any) -> bool:
    """Whether a data set mixes sources until the first source, or the last one, has ended.

    Each rank mixes its own shards. So the ranks together read other samples, or repeat other samples, than one process.
    """
    strategies = {getattr(iterable, "stopping_strategy", None) for iterable in iterables_of(dataset)}
    return not strategies.isdisjoint(("first_exhausted", "all_exhausted"))  # Hugging Face: interleave_datasets
