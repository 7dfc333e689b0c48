"""Tensors of which a rank has several blocks: q, k and v in one matrix, each of them split.

torch.distributed.checkpoint takes the part of a DTensor that a rank has for one block. A tensor that knows its blocks
is allowed to say so itself (`_Checkpointable`, which torch's own tensors of several blocks follow).
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

__all__ = ["Pieces", "SavePlanner", "reading_plan"]


class Pieces:
    """The blocks of a DTensor that this rank has, as views of its memory."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        mesh, placements = tensor.device_mesh, tensor.placements
        runs = [_runs(_mine(size, dim, mesh, placements)) for dim, size in enumerate(tensor.shape)]
        local = tensor.to_local()
        self._blocks: dict[torch.Size, Tensor] = {}
        for block in itertools.product(*runs):
            piece = local
            for dim, (_, start, length) in enumerate(block):
                piece = piece.narrow(dim, start, length)
            self._blocks[torch.Size(offset for offset, _, _ in block)] = piece

    def at(self, offset: torch.Size | None) -> Tensor:
        """The block that begins at `offset` of the whole tensor."""
        assert offset is not None
        return self._blocks[offset]

    # torch: torch.distributed._checkpointable._Checkpointable
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, piece.shape) for offset, piece in self._blocks.items()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(self._tensor.to_local()),
                    size=self._tensor.size(),
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]


class SavePlanner(DefaultSavePlanner):
    """Torch's planner, which here writes each block of a tensor of which this rank has several."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Called with what is to be saved."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _in_pieces(self.state_dict)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the value to be written."""
        found = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, Pieces) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """Torch's planner, which here reads each block of a tensor of which this rank has several."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Called with the tensors that are to be read."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _in_pieces(self.state_dict)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the tensor to read into."""
        found = self.state_dict[index.fqn]
        return found.at(index.offset) if isinstance(found, Pieces) else super().lookup_tensor(index)


def reading_plan(tensors: dict[str, Tensor], metadata: Metadata) -> tuple[DefaultLoadPlanner, LoadPlan]:
    """Plans what a rank reads on its own, as `torch.distributed.checkpoint.load` does, which warns that it is alone.

    Args:
        tensors: to be filled, by their keys.
        metadata: of what is stored.
    """
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    return planner, planner.finish_plan(plan)


def _in_pieces(tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: Pieces(value) if _is_strided(value) else value for key, value in tensors.items()}


def _is_strided(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and any(hasattr(placement, "split_factor") for placement in tensor.placements)


def _mine(size: int, dim: int, mesh: Any, placements: Any) -> Tensor:
    """Returns the indices along `dim` that this rank has, in the order of its memory."""
    indices = torch.arange(size)
    for axis, placement in enumerate(placements):
        if getattr(placement, "dim", None) == dim:
            # torch: _StridedShard cuts each of `split_factor` parts.
            parts = indices.chunk(getattr(placement, "split_factor", 1))
            cut = [part.chunk(mesh.size(axis)) for part in parts]
            rank = mesh.get_local_rank(axis)
            indices = torch.cat([pieces[rank] for pieces in cut if rank < len(pieces)] or [indices[:0]])
    return indices


def _runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Returns (index, place in memory, length) of each run of successive indices."""
    if not len(indices):
        return []
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(indices)]
    return [(int(indices[start]), start, end - start) for start, end in zip(starts, ends, strict=True)]
