"""What a comm hook is here: a DDP comm hook on any device that counts what it sends.

See https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html. A method is its own file and one line in the registry.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

__all__ = ["CommHook"]


class CommHook(ABC):
    """Turns a bucket of local gradients into the average over all ranks.

    Attributes:
        num_calls: buckets reduced so far.
        num_bytes: bytes this rank has handed to collectives so far. (A ring all-reduce puts up to twice that on the
            wire.)
    """

    name: ClassVar[str]
    description: ClassVar[str]
    reduce_dtype: ClassVar[torch.dtype | None] = None
    """The dtype to reduce gradients in, for sharded strategies: set where that alone is the method."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_bytes = 0

    def attach(self, model: DistributedDataParallel) -> None:
        """Registers the hook on `model`, whatever its device."""
        model.register_comm_hook(state=None, hook=self._run)

    @abstractmethod
    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The future of the averaged bucket, of the shape and dtype of ``bucket.buffer()`` (flat)."""

    def _run(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        self.num_calls += 1
        return self.reduce(bucket)
