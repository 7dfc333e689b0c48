"""The index of a checkpoint's tensors, `tensors.json`, from which torch.distributed.checkpoint's metadata is built.

The index is not trusted: dtypes must be in a list, and chunks must lie within their tensor and file, must not overlap,
and must cover the tensor. So no more memory is allocated than the files can fill.
"""

import itertools
import json
import math
from collections import Counter
from operator import add, gt
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..typed import MOST
from .manifest import CheckpointError

__all__ = ["Chunk", "StoredTensor", "check_index", "index_bytes", "parse_index", "to_index", "to_metadata"]

_DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
_MOST_DIMS = 64
_MOST_CUT_DIMS = 6
"""A layout has four axes; each of them cuts a tensor along one dimension."""


class Chunk(NamedTuple):
    """A block of a tensor, and the location of its bytes."""

    offsets: tuple[int, ...]
    """The start of the block in the tensor, by dimension."""
    sizes: tuple[int, ...]
    file: str
    start: int
    """The position of its first byte in the file."""
    num_bytes: int


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[Chunk]


Index = dict[str, StoredTensor]


def to_index(metadata: Metadata, places: dict[MetadataIndex, tuple[str, int, int]]) -> Index:
    """Returns the index of the tensors of a save.

    Args:
        metadata: torch's save plan.
        places: file, first byte and number of bytes of each chunk.
    """
    index: Index = {}
    for key, about in metadata.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata), "only tensors are saved"
        blocks = [(chunk, places[MetadataIndex(key, chunk.offsets)]) for chunk in about.chunks]
        chunks = [Chunk(tuple(block.offsets), tuple(block.sizes), *place) for block, place in blocks]
        index[key] = StoredTensor(about.properties.dtype, tuple(about.size), chunks)
    return index


def index_bytes(index: Index) -> bytes:
    """Returns the content of `tensors.json`."""
    names = sorted({chunk.file for tensor in index.values() for chunk in tensor.chunks})
    files = {name: number for number, name in enumerate(names)}
    tensors = {
        key: {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "size": tensor.size,
            "chunks": [
                (chunk.offsets, chunk.sizes, files[chunk.file], chunk.start, chunk.num_bytes) for chunk in tensor.chunks
            ],
        }
        for key, tensor in index.items()
    }
    return json.dumps({"files": names, "tensors": tensors}, separators=(",", ":")).encode()


def parse_index(content: bytes) -> Index:
    """Parses `tensors.json`; returns the tensors by key.

    Raises:
        CheckpointError: the content is invalid.
    """
    try:
        fields = json.loads(content)
        files = fields["files"]
        return {key: _tensor(about, files) for key, about in fields["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as damage:
        reason = damage if str(damage) and not isinstance(damage, RecursionError) else type(damage).__name__
        raise CheckpointError(f"tensors.json makes no sense ({reason})") from None


def _tensor(about: dict[str, Any], files: list[str]) -> StoredTensor:
    chunks = [
        Chunk(_whole_numbers(offsets), _whole_numbers(sizes), files[number], *_whole_numbers([start, num_bytes]))
        for offsets, sizes, number, start, num_bytes in about["chunks"]
    ]
    return StoredTensor(_DTYPES[about["dtype"]], _whole_numbers(about["size"]), chunks)


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """Converts a list of whole numbers, such as a shape, to a tuple.

    Raises:
        ValueError: `values` is not such a list.
    """
    # The message omits the values: an index of 256 MB may have nested ones whose text fills the memory.
    if type(values) not in (list, tuple) or len(values) > _MOST_DIMS:
        raise ValueError(f"{type(values).__name__} in place of a shape")
    if not {int}.issuperset(map(type, values)) or (values and not 0 <= min(values) <= max(values) <= MOST):
        raise ValueError("a shape has an item that is not a whole number")
    return tuple(values)


def check_index(index: Index, files: dict[str, tuple[int, int]]) -> None:
    """Checks that an index is consistent and agrees with the sizes of the files.

    Args:
        index: the tensors by key.
        files: sizes and checksums from the manifest.

    Raises:
        CheckpointError: the message names the invalid tensor.
    """
    for key, tensor in index.items():
        if problem := _problem(tensor, files):
            raise CheckpointError(f"the tensor {key} {problem}")


def _problem(tensor: StoredTensor, files: dict[str, tuple[int, int]]) -> str | None:
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size):
            return "has a chunk with a different number of dimensions"
        if any(map(gt, map(add, chunk.offsets, chunk.sizes), tensor.size)):
            return "has a chunk that lies outside of it"
        if chunk.file not in files:
            return f"is listed in {chunk.file!r}, which the manifest does not list"
        needed = math.prod(chunk.sizes) * tensor.dtype.itemsize
        if chunk.num_bytes != needed:
            return f"has a chunk of {chunk.num_bytes} bytes instead of {needed}"
        if chunk.start + chunk.num_bytes > files[chunk.file][0]:
            return f"has a chunk behind the end of {chunk.file}"
    covered, whole = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
    if covered != whole:
        return f"has chunks of {covered} elements in all, and should have {whole}"
    return _do_not_fit(tensor) if len(tensor.chunks) > 1 else None


def _do_not_fit(tensor: StoredTensor) -> str | None:
    """Returns what is wrong with chunks that lie in the tensor and have as many elements: whether some overlap.

    They fill it exactly if their corners cancel, those of the tensor excepted: a corner counts once, or minus once if
    an odd number of its coordinates are ends. So the work grows with the number of chunks, not with its square.
    """
    cut = [dim for dim, n in enumerate(tensor.size) if any(chunk.sizes[dim] != n for chunk in tensor.chunks)]
    if len(cut) > _MOST_CUT_DIMS:
        return f"has chunks along {len(cut)} dimensions; at most {_MOST_CUT_DIMS} are supported"
    if not cut:
        return "has chunks that overlap" if len(tensor.chunks) > 1 and 0 not in tensor.size else None
    corners: Counter[tuple[int, ...]] = Counter()
    whole = Chunk((0,) * len(tensor.size), tensor.size, "", 0, 0)
    for chunk, sign in ((whole, -1), *((chunk, 1) for chunk in tensor.chunks)):
        sides = [(chunk.offsets[dim], chunk.offsets[dim] + chunk.sizes[dim]) for dim in cut]
        for ends in itertools.product((0, 1), repeat=len(cut)):
            corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return "has chunks that overlap" if any(corners.values()) else None


def to_metadata(index: Index) -> Metadata:
    """Converts the index to torch.distributed.checkpoint's metadata."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(tensor.dtype),
                torch.Size(tensor.size),
                [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in tensor.chunks],
            )
            for key, tensor in index.items()
        },
        storage_data={
            MetadataIndex(key, chunk.offsets): chunk for key, tensor in index.items() for chunk in tensor.chunks
        },
    )
