"""`none`, and `fp16` and `bf16`: gradients are averaged as they are, or in 16 bit, half the bytes of fp32.

Phases: 1. divide and cast (local); 2. all-reduce, 2 bytes a parameter; 3. cast back (local). Torch's own
`bf16_compress_hook` is the same but supports CUDA only. Rounding errors are not kept as residuals.
"""

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from .base import CommHook
from .counting_group import Bucket, CountingGroup

__all__ = ["BF16", "FP16", "AllReduceHook"]


class _Cast(CommHook):
    dtype: ClassVar[torch.dtype]
    reduces_shards = True

    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        # Phase 1. Division before the sum keeps fp16 from overflowing.
        small = bucket.gradients.div(wire.size).to(self.dtype)
        # Phases 2 and 3.
        bucket.gradients.copy_(wire.all_reduce(small))

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: CountingGroup) -> None:
        small = whole.div(wire.size).to(self.dtype)
        part = shard.new_empty(shard.shape, dtype=self.dtype)
        wire.reduce_scatter_into(part, small, dist.ReduceOp.SUM)
        shard.copy_(part)


class FP16(_Cast):
    """Averages in float16: more precise than bf16, but values over 65504 overflow."""

    name = "fp16"
    description = "all-reduce in float16: half the bytes"
    dtype = torch.float16


class BF16(_Cast):
    """Averages in bfloat16: the range of fp32 with 8 bits of mantissa."""

    name = "bf16"
    description = "all-reduce in bfloat16: half the bytes, the range of fp32"
    dtype = torch.bfloat16


class AllReduceHook(CommHook):
    """Averages gradients with an all-reduce in their own dtype."""

    name = "none"
    description = "gradients as they are"

    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        """Divides first, as DDP does without a hook."""
        wire.all_reduce(bucket.gradients.div_(wire.size))
