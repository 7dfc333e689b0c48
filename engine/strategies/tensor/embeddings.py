"""Embeddings split by their rows over the tensor-parallel ranks, also with a `padding_idx`."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel

from .styles import plain_output

__all__ = ["EmbeddingParallel"]


class EmbeddingParallel(RowwiseParallel):
    """Splits an embedding [rows, width] by its rows. The row ``padding_idx`` of the whole table gets no gradient.

    Args:
        by_sequence: the output stays a DTensor that is sharded by its second dim; else it is a plain tensor.
    """

    def __init__(self, by_sequence: bool = False) -> None:
        output = Shard(1) if by_sequence else Replicate()
        super().__init__(input_layouts=Replicate(), output_layouts=output, use_local_output=False)
        self.by_sequence = by_sequence

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        if module.padding_idx is not None:
            # torch: its backward would count padding_idx within this rank's rows, not within the whole table.
            module.forward = functools.partial(_without_padding, module, module.forward)
            module.register_forward_hook(_stop_at_padding)
        if not self.by_sequence:
            module.register_forward_hook(plain_output)
        return module


def _without_padding(module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    index, module.padding_idx = module.padding_idx, None
    try:
        return forward(*args, **kwargs)
    finally:
        module.padding_idx = index


def _stop_at_padding(module: Any, args: Any, output: Tensor) -> Tensor:
    is_padding = (args[0] == module.padding_idx).unsqueeze(-1)
    return torch.where(is_padding, output.detach(), output)
