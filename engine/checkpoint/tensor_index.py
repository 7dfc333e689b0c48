"""The index of a checkpoint's tensors: `tensors.json`, of which torch.distributed.checkpoint's metadata is made.

Nothing of it is believed: dtypes come from a list, chunks lie within their tensor and their file, do not overlap, and
cover all of it. So no memory is asked for that the files could not fill.
"""

import json
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .manifest import CheckpointError

__all__ = ["DTYPES", "Chunk", "StoredTensor", "check_index", "index_bytes", "parse_index", "to_metadata"]

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
_MOST = (1 << 62) - 1
_MOST_DIMS = 64


class Chunk(NamedTuple):
    """A block of a tensor, and where its bytes are."""

    offsets: tuple[int, ...]
    """The position in the tensor at which the block begins, by dimension."""
    sizes: tuple[int, ...]
    file: str
    start: int
    """The position of its first byte in the file."""
    num_bytes: int
    """The size in the file: in format 1 of a file within the file."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: list[Chunk]


Index = dict[str, StoredTensor]


def index_bytes(metadata: Metadata, places: dict[MetadataIndex, tuple[str, int, int]]) -> bytes:
    """The content of the file.

    Args:
        metadata: as torch has planned it.
        places: file, first byte and number of bytes of each chunk.
    """
    files = {name: number for number, name in enumerate(sorted({place[0] for place in places.values()}))}
    tensors: dict[str, Any] = {}
    for key, about in metadata.state_dict_metadata.items():
        assert isinstance(about, TensorStorageMetadata), "only tensors are saved"
        chunks = []
        for chunk in about.chunks:
            name, start, num_bytes = places[MetadataIndex(key, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), files[name], start, num_bytes])
        dtype = str(about.properties.dtype).removeprefix("torch.")
        tensors[key] = {"dtype": dtype, "size": list(about.size), "chunks": chunks}
    return json.dumps({"files": list(files), "tensors": tensors}, separators=(",", ":")).encode()


def parse_index(content: bytes) -> Index:
    """The tensors by their keys.

    Raises:
        CheckpointError: the content makes no sense.
    """
    try:
        said = json.loads(content)
        files = said["files"]
        return {key: _tensor(about, files) for key, about in said["tensors"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as damage:
        reason = damage if str(damage) and not isinstance(damage, RecursionError) else type(damage).__name__
        raise CheckpointError(f"tensors.json makes no sense ({reason})") from None


def _tensor(about: dict[str, Any], files: list[str]) -> StoredTensor:
    chunks = [
        Chunk(whole_numbers(offsets), whole_numbers(sizes), files[number], *whole_numbers([start, num_bytes]))
        for offsets, sizes, number, start, num_bytes in about["chunks"]
    ]
    return StoredTensor(DTYPES[about["dtype"]], whole_numbers(about["size"]), chunks)


def whole_numbers(values: Any) -> tuple[int, ...]:
    """A shape or the like.

    Raises:
        ValueError: it is none.
    """
    # Without the values in the message: of a few bytes a pickle can make a nest whose text fills the memory.
    if type(values) not in (list, tuple) or len(values) > _MOST_DIMS:
        raise ValueError(f"{type(values).__name__} in place of a shape")
    if not all(type(value) is int and 0 <= value <= _MOST for value in values):
        raise ValueError("a shape has what is no whole number")
    return tuple(values)


def check_index(index: Index, files: dict[str, tuple[int, int]], *, is_packed: bool = False) -> None:
    """Checks what an index says against itself and the sizes of the files.

    Args:
        index: by key.
        files: the manifest's.
        is_packed: chunks are files within files, which are larger than the tensor's bytes.

    Raises:
        CheckpointError: names the tensor.
    """
    for key, tensor in index.items():
        if problem := _problem(tensor, files, is_packed):
            raise CheckpointError(f"the tensor {key} {problem}")


def _problem(tensor: StoredTensor, files: dict[str, tuple[int, int]], is_packed: bool) -> str | None:
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size):
            return "has a chunk of another number of dimensions"
        if any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)):
            return "has a chunk that lies outside of it"
        if chunk.file not in files:
            return f"is said to be in {chunk.file!r}, which the manifest does not list"
        needed = math.prod(chunk.sizes) * tensor.dtype.itemsize
        if chunk.num_bytes < needed or (chunk.num_bytes != needed and not is_packed):
            return f"has a chunk of {chunk.num_bytes} bytes instead of {needed}"
        if chunk.start + chunk.num_bytes > files[chunk.file][0]:
            return f"has a chunk behind the end of {chunk.file}"
    covered, whole = sum(math.prod(chunk.sizes) for chunk in tensor.chunks), math.prod(tensor.size)
    if covered != whole:
        return f"has chunks of {covered} elements in all, and should have {whole}"
    return "has chunks that overlap" if _overlap(tensor.chunks) else None


def _overlap(chunks: list[Chunk]) -> bool:
    if len(chunks) < 2 or not chunks[0].offsets:
        return len(chunks) > 1
    starts = np.array([chunk.offsets for chunk in chunks])
    ends = starts + np.array([chunk.sizes for chunk in chunks])
    return any(
        bool(((starts[i] < ends[i + 1 :]) & (ends[i] > starts[i + 1 :])).all(axis=1).any()) for i in range(len(chunks))
    )


def to_metadata(index: Index) -> Metadata:
    """Returns the index as the metadata with which torch.distributed.checkpoint plans."""
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
