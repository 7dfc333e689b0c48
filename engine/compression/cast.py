"""`fp16` and `bf16`: gradients are averaged in 16 bit, half the bytes of fp32.

Phases: 1. divide and cast (local); 2. all-reduce, 2 bytes a parameter, overlapped with backward; 3. cast back (local).
Torch's own `bf16_compress_hook` is the same but refuses devices other than CUDA.
"""

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from .base import CommHook

__all__ = ["BF16", "FP16"]


class _Cast(CommHook):
    reduce_dtype: ClassVar[torch.dtype]

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradients = bucket.buffer()
        # Phase 1. Division before the sum keeps fp16 from overflowing.
        small = gradients.div(dist.get_world_size()).to(self.reduce_dtype)
        self.num_bytes += small.numel() * small.element_size()
        # Phase 2.
        work = dist.all_reduce(small, async_op=True)
        assert work is not None
        # Phase 3. Into the bucket itself, which spares an allocation.
        return work.get_future().then(lambda _: gradients.copy_(small))


class FP16(_Cast):
    """Average in float16: finer than bf16, but values over 65504 overflow."""

    name = "fp16"
    description = "all-reduce in float16: half the bytes"
    reduce_dtype = torch.float16


class BF16(_Cast):
    """Average in bfloat16: the range of fp32 with 8 bits of mantissa."""

    name = "bf16"
    description = "all-reduce in bfloat16: half the bytes, the range of fp32"
    reduce_dtype = torch.bfloat16
