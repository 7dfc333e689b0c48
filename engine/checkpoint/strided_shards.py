"""Strided shards: a rank has several blocks of one tensor, for example its parts of q, k and v in one matrix.

torch.distributed.checkpoint treats the local tensor of a DTensor as one block. An object that implements torch's
protocol `_Checkpointable` can list its blocks itself; `Blocks` does so.
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

__all__ = ["Blocks", "SavePlanner", "reading_plan"]


class Blocks:
    """The blocks of a DTensor that this rank has, as views of its local tensor."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        mesh, placements = tensor.device_mesh, tensor.placements
        runs = [_runs(_local_indices(size, dim, mesh, placements)) for dim, size in enumerate(tensor.shape)]
        local = tensor.to_local()
        self._blocks: dict[torch.Size, Tensor] = {}
        for runs_of_block in itertools.product(*runs):
            block = local
            for dim, (_, start, length) in enumerate(runs_of_block):
                block = block.narrow(dim, start, length)
            self._blocks[torch.Size(offset for offset, _, _ in runs_of_block)] = block

    def at(self, offset: torch.Size | None) -> Tensor:
        """Returns the block that begins at `offset` of the whole tensor."""
        assert offset is not None
        return self._blocks[offset]

    # torch: torch.distributed._checkpointable._Checkpointable
    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offset, block.shape) for offset, block in self._blocks.items()]

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
    """torch's planner of a save, which plans each block of a strided shard by itself."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Sets the values to save, by key."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = _in_blocks(self.state_dict)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Returns the value to be written."""
        value = self.state_dict[index.fqn]
        return value.at(index.offset) if isinstance(value, Blocks) else super().lookup_object(index)


class _LoadPlanner(DefaultLoadPlanner):
    """torch's planner of a load, which plans each block of a strided shard by itself."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Sets the tensors to read into, by key."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.state_dict = _in_blocks(self.state_dict)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Returns the tensor to read into."""
        tensor = self.state_dict[index.fqn]
        return tensor.at(index.offset) if isinstance(tensor, Blocks) else super().lookup_tensor(index)


def reading_plan(tensors: dict[str, Tensor], metadata: Metadata) -> tuple[DefaultLoadPlanner, LoadPlan]:
    """Plans the reads of one rank, as `torch.distributed.checkpoint.load` does, without its warning about one rank.

    Args:
        tensors: the tensors to fill, by key.
        metadata: metadata of the stored tensors.
    """
    planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    return planner, planner.finish_plan(plan)


def _in_blocks(tensors: dict[str, Any]) -> dict[str, Any]:
    return {key: Blocks(value) if _is_strided(value) else value for key, value in tensors.items()}


def _is_strided(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and any(hasattr(placement, "split_factor") for placement in tensor.placements)


def _local_indices(size: int, dim: int, mesh: Any, placements: Any) -> Tensor:
    """Returns this rank's indices along `dim`, which has length `size`, in the order of its local tensor."""
    indices = torch.arange(size)
    for axis, placement in enumerate(placements):
        if getattr(placement, "dim", None) == dim:
            # torch: _StridedShard splits each of `split_factor` parts over the ranks of the axis.
            parts = indices.chunk(getattr(placement, "split_factor", 1))
            splits = [run.chunk(mesh.size(axis)) for run in parts]
            rank = mesh.get_local_rank(axis)
            indices = torch.cat([split[rank] for split in splits if rank < len(split)] or [indices[:0]])
    return indices


def _runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Returns (first index, its position in `indices`, length) of each run of successive indices."""
    if not len(indices):
        return []
    breaks = (indices.diff() != 1).nonzero().flatten() + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(indices)]
    return [(int(indices[start]), start, end - start) for start, end in zip(starts, ends, strict=True)]
