"""Storage of a checkpoint's tensors: torch.distributed.checkpoint plans it, `Files` writes and reads plain bytes.

Each rank writes two files in the format of safetensors, which other tools can read, too. Rank 0 writes the index
`tensors.json`, which has the file and the position of each chunk. No file is a pickle.
"""

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import add, gt
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import SavePlan, SavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from ..foreign import MOST, NotAPlainFileError
from .checked_io import Files
from .errors import CheckpointError
from .manifest import TENSORS, Manifest
from .strided_shards import reading_plan

__all__ = [
    "SAFETENSORS",
    "Chunk",
    "StoredTensor",
    "Writer",
    "bytes_of",
    "check_index",
    "header_bytes",
    "read_index",
    "read_into",
    "tensors_in",
    "write_whole",
]


# --- the index of a checkpoint's tensors, `tensors.json`, from which torch.distributed.checkpoint's metadata is built
# The index is not trusted: dtypes must be in a list, and chunks must lie within their tensor and file, must not
# overlap, and must cover the tensor. So no more memory is allocated than the files can fill.


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


def _to_index(metadata: Metadata, places: dict[MetadataIndex, tuple[str, int, int]]) -> Index:
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


def _index_bytes(index: Index) -> bytes:
    """Returns the content of `tensors.json`."""
    names = sorted({file for _, _, chunks in index.values() for _, _, file, _, _ in chunks})
    files = {name: number for number, name in enumerate(names)}
    tensors = {}
    for key, (dtype, size, chunks) in index.items():
        listed = []
        for offsets, sizes, file, start, num_bytes in chunks:
            listed.append((offsets, sizes, files[file], start, num_bytes))
        tensors[key] = {"dtype": str(dtype).removeprefix("torch."), "size": size, "chunks": listed}
    return json.dumps({"files": names, "tensors": tensors}, separators=(",", ":")).encode()


def _parse_index(content: bytes) -> Index:
    """Parses `tensors.json`; returns the tensors by key.

    Raises:
        CheckpointError: the content is invalid.
    """
    try:
        fields = json.loads(content)
        files, tensors = fields["files"], fields["tensors"]
        chunks = [chunk for about in tensors.values() for chunk in about["chunks"]]
        numbers = [about["size"] for about in tensors.values()]
        for offsets, sizes, number, start, num_bytes in chunks:
            numbers += offsets, sizes, [number, start, num_bytes]
        _check_whole_numbers(numbers)
        return {
            key: StoredTensor(
                _DTYPES[about["dtype"]],
                tuple(about["size"]),
                [
                    Chunk(tuple(offsets), tuple(sizes), files[number], start, num_bytes)
                    for offsets, sizes, number, start, num_bytes in about["chunks"]
                ],
            )
            for key, about in tensors.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as damage:
        reason = damage if str(damage) and not isinstance(damage, RecursionError) else type(damage).__name__
        raise CheckpointError(f"tensors.json makes no sense ({reason})") from None


def _check_whole_numbers(values: list[Any]) -> None:
    """Checks lists of whole numbers, such as shapes: all together, since there are many.

    Raises:
        ValueError: one is not such a list.
    """
    # The messages omit the values: an index of 256 MB may have nested ones whose text fills the memory.
    if not {list}.issuperset(map(type, values)) or max(map(len, values), default=0) > _MOST_DIMS:
        raise ValueError("a value in place of a shape")
    numbers = [*itertools.chain.from_iterable(values)]
    if not {int}.issuperset(map(type, numbers)) or (numbers and not 0 <= min(numbers) <= max(numbers) <= MOST):
        raise ValueError("a shape has an item that is not a whole number")


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
    covered, whole = 0, math.prod(tensor.size)
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.size):
            return "has a chunk with a different number of dimensions"
        if any(map(gt, map(add, chunk.offsets, chunk.sizes), tensor.size)):
            return "has a chunk that lies outside of it"
        if chunk.file not in files:
            return f"is listed in {chunk.file!r}, which the manifest does not list"
        num_elements = math.prod(chunk.sizes)
        covered += num_elements
        needed = num_elements * tensor.dtype.itemsize
        if chunk.num_bytes != needed:
            return f"has a chunk of {chunk.num_bytes} bytes instead of {needed}"
        if chunk.start + chunk.num_bytes > files[chunk.file][0]:
            return f"has a chunk behind the end of {chunk.file}"
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


def _to_metadata(index: Index) -> Metadata:
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


_INDEX_MOST_BYTES = 1 << 28
"""Some four million chunks."""
_NUM_FILES = 2
"""The number of files of each rank: one is written while the other's checksum is computed or the disk is busy."""
_GROUP_BYTES = 1 << 20
"""The most bytes of small tensors that are written together."""

SAFETENSORS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.complex64: "C64"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
}
"""Names of dtypes in safetensors; tensors of other dtypes are stored as bytes."""


_Place = tuple[str, int, int]
"""File, first byte and number of bytes of a chunk."""


class _LocalChunks(NamedTuple):
    """The chunks of tensors that this rank writes, as lists: an object for each would cost a call."""

    keys: list[str]
    offsets: list[tuple[int, ...]]
    tensors: list[Tensor]
    are_whole: list[bool]


class Writer(StorageWriter):
    """Writes this rank's shards into `files`."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.index: Index = {}
        """The tensors of all ranks, on the rank that writes the index."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Implements `StorageWriter.reset`: there is nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Implements `StorageWriter.set_up_storage_writer`: there is nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Implements `StorageWriter.prepare_local_plan`: returns the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Numbers the ranks, for the names of their files."""
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes all chunks of a plan.

        Raises:
            OSError: a file could not be written.
        """
        chunks = _LocalChunks([], [], [], [])
        for item in plan.items:
            assert item.type != WriteItemType.BYTE_IO, "only tensors are saved"
            assert item.tensor_data is not None
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            chunks.keys.append(item.index.fqn)
            chunks.offsets.append(item.index.offset or torch.Size())
            chunks.tensors.append(tensor)
            chunks.are_whole.append(item.tensor_data.chunk.sizes == item.tensor_data.size)
        places = _write_chunks(self._files, plan.storage_data, chunks)
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [WriteResult(item.index, place[2], place) for item, place in zip(plan.items, places, strict=True)]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index of the tensors; called on one rank, when all ranks have written their files."""
        locations = {result.index: result.storage_data for of_rank in results for result in of_rank}
        self.index = _to_index(metadata, locations)
        _write_index(self._files, self.index)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Implements `StorageWriter.validate_checkpoint_id`: any id is valid, since none is used."""
        return True


def read_index(files: Files, manifest: Manifest) -> Index:
    """Reads the index of the tensors and checks it against the manifest.

    Raises:
        CheckpointError: the index can't be parsed, or contradicts the manifest.
    """
    try:
        content = files.read(TENSORS, most_bytes=_INDEX_MOST_BYTES)
    except NotAPlainFileError as error:
        raise CheckpointError(str(error)) from None
    index = _parse_index(content)
    check_index(index, manifest.files)
    return index


def tensors_in(files: Files, manifest: Manifest) -> dict[str, TensorStorageMetadata]:
    """Returns the shape and dtype of each tensor in a checkpoint, by its key."""
    return _to_metadata(read_index(files, manifest)).state_dict_metadata  # type: ignore[return-value]


# --- writing


def write_whole(files: Files, tensors: dict[str, Tensor]) -> Index:
    """Writes tensors that this process has whole, and their index: what torch.distributed.checkpoint would plan.

    Without a plan, which takes longer for small tensors than all else, while the interpreter is held.

    Raises:
        CheckpointError: the index would be larger than any reader opens.
        OSError: a file could not be written.
    """
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
    sizes = [tuple(part.shape) for part in parts]
    assert sizes == [tensor.shape for tensor in tensors.values()], "whole"
    offsets = [(0,) * len(size) for size in sizes]
    places = _write_chunks(files, 0, _LocalChunks([*tensors], offsets, parts, [True] * len(parts)))
    index = {
        key: StoredTensor(part.dtype, size, [Chunk(offset, size, *place)])
        for key, part, offset, size, place in zip(tensors, parts, offsets, sizes, places, strict=True)
    }
    _write_index(files, index)
    return index


def _write_index(files: Files, index: Index) -> None:
    content = _index_bytes(index)
    if len(content) > _INDEX_MOST_BYTES:
        raise CheckpointError(f"its {TENSORS} would have {len(content)} bytes, and no reader opens more than 2**28")
    with files.writing(TENSORS) as stream:
        stream.write(content)


def _write_chunks(files: Files, rank: int, chunks: _LocalChunks) -> list[_Place]:
    """Writes chunks into the files of a rank; returns the place of each."""
    places: dict[int, _Place] = {}
    sizes = [tensor.nbytes for tensor in chunks.tensors]

    def write(name: str, numbers: list[int]) -> None:
        header = _header(chunks, sizes, numbers)
        position = len(header)
        with files.writing(name) as stream:
            stream.write(header)
            for group in _in_groups(sizes, numbers):
                stream.write(bytes_of([chunks.tensors[number] for number in group]))
        for number in numbers:
            places[number] = name, position, sizes[number]
            position += sizes[number]

    contents = _by_file(chunks.tensors, sizes)
    with ThreadPoolExecutor(_NUM_FILES) as threads:
        list(threads.map(write, [f"shard-{rank}-{i}.safetensors" for i in range(len(contents))], contents))
    return [places[number] for number in range(len(sizes))]


def _in_groups(sizes: list[int], numbers: list[int]) -> Iterator[list[int]]:
    """Yields the numbers of small tensors that are written together, since there may be thousands; or a large one's."""
    group: list[int] = []
    num_bytes = 0
    for number in numbers:
        if group and num_bytes + sizes[number] > _GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(number)
        num_bytes += sizes[number]
    if group:
        yield group


def bytes_of(tensors: list[Tensor]) -> memoryview:
    """Returns the content of tensors, one after the other; applies conjugations and negations that were deferred."""
    # In each line there is no call in Python: the training needs the interpreter meanwhile.
    plain = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in plain]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).numpy().data


def _by_file(tensors: list[Tensor], num_bytes: list[int]) -> list[list[int]]:
    """Deals the numbers of chunks to files of about one size; the widest dtypes come first, so that all are aligned."""
    contents: list[list[int]] = [[] for _ in range(_NUM_FILES)]
    sizes, widths = [0] * _NUM_FILES, [tensor.itemsize for tensor in tensors]
    for number in sorted(range(len(tensors)), key=num_bytes.__getitem__, reverse=True):
        smallest = sizes.index(min(sizes))
        contents[smallest].append(number)
        sizes[smallest] += num_bytes[number]
    return [sorted(content, key=widths.__getitem__, reverse=True) for content in contents if content]


def _header(chunks: _LocalChunks, sizes: list[int], numbers: list[int]) -> bytes:
    """Returns the header of one file of a rank; a part of a tensor is listed with its offsets."""
    entries: dict[str, Any] = {}
    position = 0
    for number in numbers:
        key, tensor = chunks.keys[number], chunks.tensors[number]
        if not chunks.are_whole[number] or key in entries:
            key += "@" + ",".join(map(str, chunks.offsets[number]))
        name = SAFETENSORS.get(tensor.dtype)
        end = position + sizes[number]
        shape = [*tensor.shape] if name else [sizes[number]]
        entries[key] = {"dtype": name or "U8", "shape": shape, "data_offsets": [position, end]}
        position = end
    return header_bytes(entries)


def header_bytes(entries: dict[str, Any]) -> bytes:
    """Returns the header of a safetensors file: its size in 8 bytes, and JSON, padded to a multiple of 8."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# --- reading


def read_into(tensors: dict[str, Tensor], files: Files, index: Index) -> None:
    """Fills tensors, by key, from the files: several files at once, each in the order of its bytes.

    Of a DTensor, only this rank's part is read.
    """
    metadata = _to_metadata(index)
    planner, plan = reading_plan(tensors, metadata)
    requests: dict[str, list[tuple[Chunk, ReadItem]]] = {}
    for item in plan.items:
        chunk = metadata.storage_data[item.storage_index]
        requests.setdefault(chunk.file, []).append((chunk, item))

    def read(name: str) -> None:
        with files.reading(name) as stream:
            for chunk, item in sorted(requests[name], key=lambda pair: pair[0].start):
                target = planner.resolve_tensor(item).detach()
                block, offsets = _rows(stream, chunk, index[item.storage_index.fqn].dtype, item, target)
                if block is not target:
                    for dim, (offset, length) in enumerate(zip(offsets, item.lengths, strict=True)):
                        block = block.narrow(dim, offset, length)
                    assert target.size() == block.size(), "as planned"
                    target.copy_(block)
                planner.commit_tensor(item, target)

    with ThreadPoolExecutor(_NUM_FILES) as threads:
        list(threads.map(read, requests))


def _rows(stream: Any, chunk: Chunk, dtype: torch.dtype, item: ReadItem, target: Tensor) -> tuple[Tensor, list[int]]:
    """Reads the rows (entries of dim 0) of a chunk that are planned; returns them and the block's offsets in them.

    They are read into `target` and that is returned, if it takes all of them: the largest tensor is not there twice.
    """
    offsets, sizes = list(item.storage_offsets), list(chunk.sizes)
    start = chunk.start
    if sizes:
        row_bytes = math.prod(sizes[1:]) * dtype.itemsize
        start += offsets[0] * row_bytes
        sizes[0], offsets[0] = item.lengths[0], 0
    num_bytes = math.prod(sizes) * dtype.itemsize
    if not num_bytes:
        return torch.empty(sizes, dtype=dtype), offsets
    takes_all = target.dtype == dtype and list(target.size()) == sizes
    is_in_place = takes_all and target.device.type == "cpu" and target.is_contiguous()
    rows = target if is_in_place else torch.empty(sizes, dtype=dtype)
    stream.seek(start)
    _fill(stream, bytes_of([rows]), chunk.file)
    return rows, offsets


def _fill(stream: Any, buffer: memoryview, name: str) -> None:
    while len(buffer):
        count = stream.readinto(buffer)
        if not count:
            raise CheckpointError(f"{name} ends too early")
        buffer = buffer[count:]
