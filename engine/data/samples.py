"""The samples of a batch: how many there are, some of them as a batch of its own, and several batches as one.

A batch is a nested value of lists, tuples, mappings and dataclasses. A sample of it is a row of each tensor and array,
an item of a list with one value for each sample (texts, dicts, objects, tensors of different shapes), and all that the
samples share: numbers, tensors without dims, tuples of values with another length.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["NoSamplesError", "join_batches", "num_samples", "take_samples", "tensors_in"]

_PLAIN = (str, bytes, bool, int, float, complex, type(None))


class NoSamplesError(ValueError):
    """A batch can't be cut into samples, or joined with others; the message is the part of it that can't."""


def num_samples(batch: Any) -> int | None:
    """Returns the number of samples in a batch: of the first tensor with dims, or list with a record for each sample.

    Without either it is the length of its lists of texts or numbers. None if these differ, or there are none: a list of
    tuples may hold a tuple for each sample, or one for each part of all samples.
    """
    if (size := next(_lengths(batch), None)) is not None:
        return size
    if isinstance(batch, list) and any(isinstance(item, (list, tuple)) for item in batch):
        return None
    lengths = set(_lengths_of_lists(batch))
    return lengths.pop() if len(lengths) == 1 else None


def _lengths(value: Any) -> Iterator[int]:
    if isinstance(value, (Tensor, np.ndarray)):
        if value.ndim:
            yield len(value)
    elif _is_of_records(value):
        yield len(value)
    else:
        for part in _parts(value):
            yield from _lengths(part)


def _lengths_of_lists(value: Any) -> Iterator[int]:
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, _PLAIN) for item in value):
        if isinstance(value, list) or all(isinstance(item, (str, bytes)) for item in value):  # no shape
            yield len(value)
        return
    for part in _parts(value):
        yield from _lengths_of_lists(part)


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    return [getattr(value, field.name) for field in dataclasses.fields(value)] if _has_parts(value) else ()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors of a batch."""
    if isinstance(value, Tensor):
        yield value
    for part in _parts(value):
        yield from tensors_in(part)


def _is_of_records(value: Any) -> bool:
    """Whether a value is a list of dicts, dataclasses or other objects, such as a `collate_fn` leaves that does not."""
    others = (Tensor, np.ndarray, list, tuple, *_PLAIN)
    return isinstance(value, list) and bool(value) and not any(isinstance(item, others) for item in value)


def take_samples(batch: Any, size: int, rows: slice) -> Any:
    """Returns a batch of some samples.

    Args:
        batch: the batch.
        size: its number of samples.
        rows: which of them.

    Raises:
        NoSamplesError: a part of it has another number of samples, or can't be cut.
    """
    if isinstance(batch, (Tensor, np.ndarray)):
        is_dense = not isinstance(batch, Tensor) or batch.layout == torch.strided
        if batch.ndim and (len(batch) != size or not is_dense):
            raise NoSamplesError(f"a tensor {list(batch.shape)}")
        return batch[rows] if batch.ndim else batch
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        if _has_item_for_each(batch, size):
            return batch[rows]
        if isinstance(batch, list) and batch and all(isinstance(item, _PLAIN) for item in batch):
            raise NoSamplesError(f"a list of {len(batch)} values")
    if _has_parts(batch):
        return _mapped(lambda part: take_samples(part, size, rows), batch)
    if any(_has_samples(member, size) for member in getattr(batch, "__dict__", {}).values()):
        what = "tensors" if any(map(_any_tensor, vars(batch).values())) else "values"
        raise NoSamplesError(f"a {type(batch).__name__}, whose {what} it can't cut")
    return batch


def _has_parts(batch: Any) -> bool:
    return isinstance(batch, (list, tuple, Mapping)) or (
        dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    )


def _mapped(function: Callable[..., Any], *batches: Any) -> Any:
    """Returns a batch like the first one, each part of which is what `function` returns for those of all of them."""
    first = batches[0]
    if isinstance(first, (list, tuple)):
        members = [function(*parts) for parts in zip(*batches, strict=True)]
        return type(first)(*members) if hasattr(first, "_fields") else type(first)(members)
    copied: Any = copy.copy(first)  # keeps a default_factory, and other attributes of its class
    if isinstance(first, Mapping):
        named = {key: function(*(batch[key] for batch in batches)) for key in first}
        if not isinstance(first, MutableMapping):
            return type(first)(named)  # type: ignore[call-arg]
        copied.update(named)
        return copied
    for field in dataclasses.fields(first):
        object.__setattr__(copied, field.name, function(*(getattr(batch, field.name) for batch in batches)))
    return copied


def _has_item_for_each(values: Any, size: int) -> bool:
    """Whether a list or tuple has an item for each sample, rather than parts with items for each."""
    if len(values) != size:
        return False
    if not _any_tensor(values):
        if size > 1 and all(isinstance(item, (list, tuple)) and len(item) == size for item in values):
            raise NoSamplesError(f"a list of {size} lists of {size} values, of which either may be the samples")
        return True
    if isinstance(values, tuple):
        return False
    # Its items may be parts, each with a row for each sample.
    has_rows = [isinstance(item, (Tensor, np.ndarray)) and item.ndim > 0 and len(item) == size for item in values]
    are_tensors = all(isinstance(item, (Tensor, np.ndarray)) for item in values)
    return not all(has_rows) if are_tensors else _is_of_records(values)


def _any_tensor(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or any(map(_any_tensor, _parts(value)))


def _has_samples(value: Any, size: int) -> bool:
    """Whether an attribute of an object has tensors, or a value for each sample."""
    return _any_tensor(value) or (isinstance(value, list) and len(value) == size > 1)


def join_batches(batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Returns one batch with the samples of several.

    Args:
        batches: they have the same structure.
        sizes: the number of samples of each.

    Raises:
        NoSamplesError: a part of them can't be joined.
    """
    first = batches[0]
    if len({type(batch) for batch in batches}) > 1:
        raise NoSamplesError(f"a {type(first).__name__} beside another type")
    if isinstance(first, Tensor):
        if not first.dim():
            if any(not torch.equal(first, batch) for batch in batches):
                raise NoSamplesError("a tensor without dims, which differs")
            return first
        rows = {len(batch) / size for batch, size in zip(batches, sizes, strict=True)}
        shapes = {batch.shape[1:] for batch in batches}
        if len(rows) > 1 or len(shapes) > 1 or first.layout != torch.strided:  # rows of a sample
            raise NoSamplesError(f"a tensor {list(first.shape)}")
        return torch.cat(list(batches))
    if isinstance(first, np.ndarray):
        return np.concatenate(batches)
    if isinstance(first, (list, tuple)) and not hasattr(first, "_fields"):
        if all(_has_item_for_each(batch, size) for batch, size in zip(batches, sizes, strict=True)):
            return type(first)(item for batch in batches for item in batch)
        if len({len(batch) for batch in batches}) > 1:
            raise NoSamplesError(f"a list of {len(first)} values")
    if isinstance(first, Mapping) and any(batch.keys() != first.keys() for batch in batches):
        raise NoSamplesError(f"a {type(first).__name__} with other keys")
    if _has_parts(first):
        return _mapped(lambda *parts: join_batches(parts, sizes), *batches)
    if not isinstance(first, _PLAIN) or any(batch != first for batch in batches):
        raise NoSamplesError(f"a {type(first).__name__}, which the samples do not share")
    return first
