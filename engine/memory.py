"""The memory that a rank needs to train a model, without activations: the sum over its tensors."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .strategies import adapt

__all__ = ["held_bytes", "model_state_bytes"]


def model_state_bytes(trainer: Any) -> dict[str, int]:
    """Bytes of this rank's part of the trained state: by kind, see `held_bytes`, and of the strategy's own copies."""
    own_bytes = adapt(trainer.strategy).held_bytes
    return {**held_bytes(trainer.lightning_module, trainer.optimizers), "strategy": own_bytes}


def held_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients, optimizer state and buffers.

    A sharded tensor counts with its shard, a tensor on the meta device not at all. A gradient that does not exist yet
    counts with the size of its parameter.
    """
    parameters = list(module.parameters())
    of_parameters = [state for optimizer in optimizers for state in optimizer.state.values()]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p if p.grad is None else p.grad for p in parameters if p.requires_grad),
        "optimizer state": _bytes(value for state in of_parameters for value in state.values()),
        "buffers": _bytes(module.buffers()),
    }


def _bytes(values: Iterable[Any]) -> int:
    tensors = [value for value in values if isinstance(value, Tensor) and not value.is_meta]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)
