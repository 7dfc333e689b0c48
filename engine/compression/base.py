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
        self.names: dict[Tensor, str] = {}

    def attach(self, model: DistributedDataParallel) -> None:
        """Registers the hook on `model`, whatever its device."""
        self.names = {parameter: name for name, parameter in model.module.named_parameters()}
        model.register_comm_hook(state=None, hook=self._run)

    def state_dict(self) -> dict[str, Any]:
        """What the method remembers from step to step, by the names of parameters; empty if nothing.

        Under ``"residuals"`` is what each rank has not sent yet; everything else is the same on all ranks.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most methods remember nothing
        """Goes on with a `state_dict` of the same method; ``"residuals"`` are this rank's."""

    @abstractmethod
    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The future of the averaged bucket, of the shape and dtype of ``bucket.buffer()`` (flat)."""

    def _run(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        self.num_calls += 1
        return self.reduce(bucket)
