"""`sync_batchnorm=True` on the CPU: torch's `SyncBatchNorm` refuses any device but accelerators.

Phases of a training forward: 1. all-reduce the sum and count of each channel; 2. all-reduce the sum of squared
deviations from that mean; 3. normalise (local). Backward repeats both. Bytes per layer and direction: 4 x (2 channels
+ 1). Two passes rather than one over x and x squared, which loses digits where the mean is large.
"""

import torch
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce

__all__ = ["CPUSyncBatchNorm"]


class _SyncBatchNorm(nn.SyncBatchNorm):
    """`SyncBatchNorm` by differentiable all-reduces, on any device and backend. Input: [batch, channels, ...]."""

    def forward(self, input: Tensor) -> Tensor:
        if not (self.training or self.running_mean is None) or not torch.distributed.is_initialized():
            return nn.functional.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.0, self.eps
            )
        dims = [0, *range(2, input.dim())]
        shape = [1, -1, *[1] * (input.dim() - 2)]
        # Phase 1.
        num_local = input.new_tensor([input.numel() / input.size(1)], dtype=torch.float32)
        sums = all_reduce(torch.cat([input.float().sum(dims), num_local]))
        num, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
        # Phase 2.
        centred = input.float() - mean.view(shape)
        variance = all_reduce(centred.square().sum(dims)) / num
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
        factor = 1.0 / self.num_batches_tracked if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


class CPUSyncBatchNorm(TorchSyncBatchNorm):
    """Lightning's layer-sync plugin with a `SyncBatchNorm` that runs on the CPU."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Replaces the batch-norm layers of `model` in place; parameters and statistics are kept."""
        model = super().apply(model)
        for module in model.modules():
            if type(module) is nn.SyncBatchNorm:
                module.__class__ = _SyncBatchNorm
        return model
