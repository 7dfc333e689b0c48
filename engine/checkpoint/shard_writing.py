"""Writes the tensors of a checkpoint: each rank its own shards, by `torch.distributed.checkpoint`, or rank 0 all."""

import torch.distributed.checkpoint as dcp
from torch import Tensor

from ..distributed.object_group import ObjectGroup
from .checked_io import Files
from .dcp_storage import Writer, write_whole
from .manifest import CheckpointError
from .strided_shards import SavePlanner

__all__ = ["write_shards", "writes_shards"]


def writes_shards(group: ObjectGroup) -> bool:
    """Whether each rank writes its own shards; otherwise rank 0 has all tensors whole and writes them."""
    return group.size == 1 or group.process_group is not None


def write_shards(tensors: dict[str, Tensor], files: Files, group: ObjectGroup) -> None:
    """Writes this rank's tensors to the files of a new checkpoint; all ranks of `group` call it.

    Raises:
        CheckpointError: on all ranks, if one of them could not write.
    """
    if group.process_group is None:
        try:
            write_whole(files, tensors)
        except OSError as error:
            raise CheckpointError(f"rank 0 could not write: {type(error).__name__}: {error}") from error
        return
    planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(tensors, storage_writer=Writer(files), planner=planner, process_group=group.process_group)
    except dcp.api.CheckpointException as failed:  # a BaseException with a traceback in its text
        reasons = [
            f"rank {rank} could not write: {type(error).__name__}: {error}"
            for rank, (error, _) in sorted(failed.failures.items())
        ]
        raise CheckpointError("; ".join(reasons)) from failed
