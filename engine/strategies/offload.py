"""`offload=`: what waits in host memory until it is needed on the device.

``"activations"``: what autograd keeps for backward, by torch's `save_on_cpu`
(https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu), in pinned memory. Parameters
among it stay where they are. With ``activation_checkpointing="full"`` it is the inputs of blocks.
``"parameters"``: FSDP2's `CPUOffloadPolicy`, with which gradients and optimizer state are in host memory too.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from .dp import DP
from .fsdp import FSDP
from .options import FSDPOptions
from .ps import PS
from .tensor import TensorParallel

__all__ = ["ActivationsOnHost", "choose_offload"]


def choose_offload(strategy: Strategy, flag: str | Sequence[str] | None, *, compiles: bool) -> bool:
    """Has `strategy` offload parameters if that is asked for; whether activations are to be offloaded.

    Raises:
        ValueError: the strategy can't offload what the flag names.
    """
    names = {flag} if isinstance(flag, str) else set(flag or ())
    options: Any = getattr(strategy, "options", None)
    if "parameters" in names:
        if not isinstance(options, FSDPOptions):
            raise ValueError(
                "offload='parameters' needs a strategy that shards them, and gathers them when they are used: choose"
                " 'fsdp', 'hsdp', 'fsdp+tp' or 'hsdp+tp', or leave it out."
            )
        strategy.options = dataclasses.replace(options, cpu_offload=True)  # type: ignore[attr-defined]
    elif "optimizer" in names:
        raise ValueError(
            "offload='optimizer' can't be done alone, since torch's optimizers keep their state beside the parameters:"
            " offload='parameters', under 'fsdp' or 'hsdp', takes it along; under 'zero1' each rank has a part of it."
        )
    if "activations" not in names:
        return False
    can = isinstance(strategy, (SingleDeviceStrategy, DDPStrategy, FSDP, PS)) and not isinstance(
        strategy, (DP, TensorParallel)
    )
    if not can:
        raise ValueError(
            f"offload='activations' can't be done under {strategy!r}: choose 'single', 'ddp', 'zero1', 'fsdp', 'hsdp',"
            " 'local_sgd', 'diloco' or 'ps', or leave it out. activation_checkpointing saves memory under all of them,"
            " and under 'tp' and 'pp'."
        )
    if compiles:
        raise ValueError(
            "offload='activations' can't be done with compile, which decides by itself what to keep for backward: leave"
            " one of them out."
        )
    return True


class ActivationsOnHost(save_on_cpu):
    """Around a forward: what it keeps for backward is kept in host memory, but for parameters.

    Args:
        device_type: of the accelerator.
        around: another context, within which this one is.
    """

    def __init__(self, device_type: str, around: AbstractContextManager[Any]) -> None:
        super().__init__(pin_memory=True, device_type=device_type)
        self._around = around
        # torch: saved_tensors_hooks.pack_hook and .unpack_hook
        pack, unpack = self.pack_hook, self.unpack_hook
        self.pack_hook = lambda tensor: tensor if _stays(tensor) else pack(tensor)
        self.unpack_hook = lambda kept: kept if isinstance(kept, Tensor) else unpack(kept)

    def __enter__(self) -> None:
        """Begins."""
        self._around.__enter__()
        super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Ends."""
        super().__exit__(*raised)
        self._around.__exit__(*raised)


def _stays(tensor: Tensor) -> bool:
    """Whether a tensor is on the host, or a parameter or a view of one, which nothing would free."""
    # torch: Tensor._base
    return tensor.device.type == "cpu" or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
