"""Buffers that a module updates by the samples of its own rank: running means, codebooks, counts.

Every rank has its own values then, and rank 0's are the ones that are evaluated and saved. `differing_buffers` finds
them, when it is asked. The option `average_buffers` of `ddp`, `zero1` and `fsdp` averages those of
floating-point numbers after each step of an optimizer: an all-reduce of 4 bytes per value in fp32, which blocks. A rank
counts by its samples of the batch, so one that runs a filler counts for nothing.

Statistics of torch's norms are left out: `sync_batchnorm=True` has them computed over all ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from .._compat.torch import _NormBase
from ..distributed.buckets import copy, flatten, in_buckets, unflatten
from ..distributed.object_group import ObjectGroup

__all__ = ["BufferAverage", "differing_buffers", "updated_buffers"]

_BUCKET_MB = 25.0
"""As DDP's buckets."""


def updated_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the floating-point buffers that a module may update by its rank's samples, by name."""
    return {name: buffer for name, buffer in _buffers(module).items() if buffer.is_floating_point()}


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        if not isinstance(part, _NormBase)
        for name, buffer in part.named_buffers(recurse=False)
        if not (buffer.is_meta or buffer.is_complex() or buffer.is_sparse or isinstance(buffer, DTensor))
    }


def differing_buffers(module: nn.Module, ranks: ObjectGroup) -> list[str]:
    """Returns the names of the buffers whose values differ between ranks; all ranks call it together.

    Two sums of each are read from the device, and gathered between hosts.
    """
    buffers = _buffers(module)
    if not buffers:
        return []
    sums = [torch.stack([part.sum(), part.square().sum()]) for part in (b.detach().float() for b in buffers.values())]
    by_rank = ranks.all_gather_object(
        dict(zip(buffers, map(str, torch.stack([s.to(sums[0].device) for s in sums]).tolist()), strict=True))
    )
    return [name for name in buffers if len({of_rank.get(name) for of_rank in by_rank}) > 1]


class BufferAverage:
    """Averages buffers over the ranks after each step of an optimizer.

    Args:
        trainer: the trainer of the module.
        group: the process group of the ranks with different samples; None: all ranks.
    """

    def __init__(self, trainer: Trainer, group: Any) -> None:
        self._trainer: Any = trainer
        self._group = group
        # Of several optimizers that step together the last one ends the step.
        ends = trainer.optimizers[-1:] if trainer.lightning_module.automatic_optimization else trainer.optimizers
        self._handles: list[RemovableHandle] = [optimizer.register_step_post_hook(self._average) for optimizer in ends]

    def close(self) -> None:
        """Removes the hooks of the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _share(self) -> float:
        """Returns this rank's share of the samples of the current batch."""
        samples = self._trainer._data_connector.sizes.samples(self._trainer.fit_loop.epoch_loop.batch_idx)
        return float(samples.local / samples.total)

    @torch.no_grad()
    def _average(self, *_: Any) -> None:
        share = self._share()
        buffers = list(updated_buffers(self._trainer.lightning_module).values())
        for bucket in in_buckets(buffers, _BUCKET_MB) if buffers else ():
            flat = flatten(bucket)
            flat = flat.mul_(share) if share else torch.zeros_like(flat)  # a filler's values may be infinite
            dist.all_reduce(flat, group=self._group)
            copy(unflatten(flat, bucket), bucket)
