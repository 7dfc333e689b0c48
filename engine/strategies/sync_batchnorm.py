"""`sync_batchnorm=True`: batch-norm layers that use the batch of all ranks while they train.

A layer keeps its place, hooks and attributes, and is still an instance of its class: its class becomes a subclass of
this class with the forward below. (`nn.SyncBatchNorm.convert_sync_batchnorm`, Lightning's way, replaces the layers.)

On accelerators torch's `SyncBatchNorm` computes, which refuses the CPU. Phases of a training forward on the CPU:
1. all-reduce the sum and count of each channel; 2. all-reduce the sum of squared deviations from that mean;
3. normalise (local). Backward repeats both. Bytes per layer and direction: 4 x (2 channels + 1). Two passes, since one
pass over x and x squared loses digits if the mean is large.

A rank that runs a filler takes part without samples.
"""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from .._compat.torch import _BatchNorm
from ..distributed.fillers import is_here

__all__ = ["SyncBatchNorm", "tell_own_statistics"]


def tell_own_statistics(trainer: Any) -> None:
    """Says that BatchNorm's result depends on the number of ranks, if it does in this run."""
    layers = [part for part in trainer.lightning_module.modules() if isinstance(part, _BatchNorm) and part.training]
    are_own = any(not isinstance(layer, (nn.SyncBatchNorm, _Synchronised)) for layer in layers)
    if are_own and trainer.data_size > 1 and not trainer.is_trial:
        rank_zero_info(
            "BatchNorm normalises by the samples of each rank alone, as in any DDP; sync_batchnorm=True: by those of"
            " all."
        )


class SyncBatchNorm(TorchSyncBatchNorm):
    """Lightning's layer-sync plugin: batch-norm layers use the batch of all ranks while they train."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Changes the class of the batch-norm layers of `model`, in place.

        Raises:
            ValueError: a layer's class computes batch norm in a forward of its own.
        """
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, (nn.SyncBatchNorm, _Synchronised)):
                _check_forward(name, type(module))
                module.__class__ = _synchronised(type(module))
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Restores the classes of the layers."""
        for module in model.modules():
            if isinstance(module, _Synchronised):
                module.__class__ = module._local_class  # type: ignore[assignment]
        return model


def _check_forward(name: str, cls: type[nn.Module]) -> None:
    """Checks that a layer's own forward, if it has one, calls that of its base class, which is replaced."""
    for owner in cls.__mro__[: cls.__mro__.index(_BatchNorm)]:
        forward = vars(owner).get("forward")
        if forward is not None and "super" not in getattr(getattr(forward, "__code__", None), "co_names", ("super",)):
            raise ValueError(
                f"sync_batchnorm=True can't synchronise {name!r}: {owner.__name__}.forward computes batch norm itself,"
                " by the batch of its rank. Let it call super().forward(), or leave out sync_batchnorm."
            )


_made: dict[Any, type["_Synchronised"]] = {}
"""The subclass of each class."""


def _synchronised(cls: type[nn.Module]) -> type["_Synchronised"]:
    """Returns the subclass of a batch-norm class that uses the batch of all ranks."""
    if cls not in _made:
        # In this order a forward of `cls` comes before `_Synchronised.forward`, and that before torch's.
        _made[cls] = type(cls.__name__, (cls, _Synchronised), {"_local_class": cls, "__module__": cls.__module__})
    return _made[cls]


def _new(cls: type[nn.Module]) -> nn.Module:
    """Creates a layer for `copy` and `pickle`, which can't look up a class that was made here."""
    synchronised = _synchronised(cls)
    return synchronised.__new__(synchronised)


class _Synchronised(_BatchNorm):
    """Batch norm over all ranks. Input: [batch, channels, ...]."""

    process_group: Any = None
    """The process group of the ranks with different samples; None: all ranks."""
    is_computed_together = True
    """Its statistics are those of all ranks, also on a rank that has no sample."""
    _local_class: type[nn.Module]
    _check_non_zero_input_channels = nn.SyncBatchNorm._check_non_zero_input_channels  # torch: its forward calls it

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self._local_class,), self.__getstate__()

    def forward(self, input: Tensor) -> Tensor:
        """Normalises `input` [batch, channels, ...]; while training, by the statistics of all ranks' batches.

        Returns:
            A tensor of the input's shape and dtype.
        """
        if not self.training or not dist.is_initialized():
            return super().forward(input)
        if not is_here():
            return self._over_all_ranks(input)
        # A filler: no samples of this rank count. Its own output, by its own statistics, is only to be finite; the
        # empty output beside it has backward take part in the other ranks' collectives.
        of_no_samples = self._over_all_ranks(input[:0])
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        dims = _all_but_channels(input)
        variance, mean = torch.var_mean(wide, dims, correction=0)
        return self._normalised(wide - _per_channel(mean, wide), variance).to(input.dtype) + of_no_samples.sum()

    def _over_all_ranks(self, input: Tensor) -> Tensor:
        if input.device.type != "cpu":
            return nn.SyncBatchNorm.forward(self, input)  # type: ignore[arg-type]
        self._check_input_dim(input)
        dims = _all_but_channels(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        # Phase 1.
        num_local = wide.new_tensor([input.numel() / input.size(1)])
        sums = _AllReduce.apply(torch.cat([wide.sum(dims), num_local]), self.process_group)
        num = sums[-1].detach()
        mean = sums[:-1] / num
        # Phase 2.
        centred = wide - _per_channel(mean, wide)
        variance = _AllReduce.apply(centred.square().sum(dims), self.process_group) / num
        # Phase 3.
        self._track(mean.detach(), variance.detach() * num / (num - 1).clamp(min=1))
        return self._normalised(centred, variance).to(input.dtype)

    def _normalised(self, centred: Tensor, variance: Tensor) -> Tensor:
        output = centred * _per_channel(torch.rsqrt(variance + self.eps), centred)
        if self.weight is not None:
            output = output * _per_channel(self.weight, centred)
        if self.bias is not None:
            output = output + _per_channel(self.bias, centred)
        return output

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(variance.to(self.running_var.dtype), factor)


def _all_but_channels(input: Tensor) -> list[int]:
    return [0, *range(2, input.dim())]


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Views [channels] as [1, channels, 1, ...], with as many dims as `like`."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


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
