"""The flag `offload`: the state that each strategy can keep in host memory until the device needs it.

``"activations"``: the tensors that autograd keeps for backward; see `loop/offload.py`.
``"parameters"``: FSDP2's `CPUOffloadPolicy`, which keeps gradients and optimizer state in host memory, too.
"""

from collections.abc import Sequence

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

from .dp import DP
from .fsdp.strategy import FSDP
from .options import FSDPOptions
from .ps import PS
from .tensor import TensorParallel

__all__ = ["choose_offload"]


def choose_offload(strategy: Strategy, flag: str | Sequence[str] | None, *, compiles: bool) -> bool:
    """Makes `strategy` offload parameters if the flag names them; returns whether activations are offloaded.

    Raises:
        ValueError: the strategy can't offload what the flag names.
    """
    names = {flag} if isinstance(flag, str) else set(flag or ())
    if "parameters" in names:
        if not (isinstance(strategy, FSDP) and isinstance(strategy.options, FSDPOptions)):
            raise ValueError(
                "offload='parameters' needs a strategy that shards them, and gathers them when they are used: choose"
                " 'fsdp', 'hsdp', 'fsdp+tp' or 'hsdp+tp', or leave it out."
            )
        strategy.offloads_parameters = True
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
