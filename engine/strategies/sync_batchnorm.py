"""`sync_batchnorm=True` on the CPU: torch's `SyncBatchNorm` refuses any device but accelerators.

Phases of a training forward: 1. all-reduce the sum and count of each channel; 2. all-reduce the sum of squared
deviations from that mean; 3. normalise (local). Backward repeats both. Bytes per layer and direction: 4 x (2 channels
+ 1). Two passes, since one pass over x and x squared loses digits if the mean is large.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn

from .._compat.torch import _BatchNorm

__all__ = ["CPUSyncBatchNorm"]


class CPUSyncBatchNorm(TorchSyncBatchNorm):
    """Lightning's layer-sync plugin: batch-norm layers use the batch of all ranks while they train."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Changes the class of the batch-norm layers of `model`, in place."""
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, (nn.SyncBatchNorm, _SyncBatchNorm)):
                module._local_class = type(module)  # type: ignore[assignment]
                module.__class__ = _SyncBatchNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Restores the classes of the layers."""
        for module in model.modules():
            if isinstance(module, _SyncBatchNorm):
                module.__class__ = module.__dict__.pop("_local_class")
        return model


class _SyncBatchNorm(_BatchNorm):
    """Batch norm over all ranks, by differentiable all-reduces. Input: [batch, channels, ...]."""

    process_group: Any = None
    """The process group of the ranks with different samples; None: all ranks."""

    def _check_input_dim(self, input: Tensor) -> None:
        self.__dict__["_local_class"]._check_input_dim(self, input)

    def forward(self, input: Tensor) -> Tensor:
        """Normalises `input` [batch, channels, ...]; while training, by the statistics of all ranks' batches.

        Returns:
            A tensor of the input's shape and dtype.
        """
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        self._check_input_dim(input)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        # Phase 1.
        num_local = wide.new_tensor([input.numel() / input.size(1)])
        sums = _AllReduce.apply(torch.cat([wide.sum(dims), num_local]), self.process_group)
        num = sums[-1].detach()
        mean = sums[:-1] / num
        # Phase 2.
        centred = wide - mean.view(shape)
        variance = _AllReduce.apply(centred.square().sum(dims), self.process_group) / num
        # Phase 3.
        self._track(mean.detach(), variance.detach() * num / (num - 1).clamp(min=1))
        output = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


class _AllReduce(torch.autograd.Function):
    """Sums over the ranks. Each rank's output depends on all ranks' inputs, so backward sums the gradients as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
