"""The flag `offload`: the state that each strategy can keep in host memory until the device needs it.

``"activations"``: the tensors that autograd keeps for backward; see `strategies/offload.py`.
``"parameters"``: FSDP2's `CPUOffloadPolicy`, which keeps gradients and optimizer state in host memory, too.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from ..contract import EngineStrategy

__all__ = ["OffloadActivations", "choose_offload"]


def choose_offload(strategy: EngineStrategy, flag: str | Sequence[str] | None) -> bool:
    """Makes `strategy` offload parameters if the flag names them; returns whether activations are offloaded.

    Raises:
        ValueError: the strategy can't offload what the flag names.
    """
    names = {flag} if isinstance(flag, str) else set(flag or ())
    if "parameters" in names:
        if "parameters" not in strategy.capabilities.can_offload:
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
    if "activations" in names and "activations" not in strategy.capabilities.can_offload:
        raise ValueError(
            f"offload='activations' can't be done under {strategy!r}: choose 'single', 'ddp', 'zero1', 'fsdp', 'hsdp',"
            " 'local_sgd', 'diloco' or 'ps', or leave it out. activation_checkpointing saves memory under all of them,"
            " and under 'tp' and 'pp'."
        )
    return "activations" in names


# `offload="activations"`: keeps the tensors that backward needs in pinned host memory during each training step.
#
# It is based on torch's `save_on_cpu`
# (https://docs.pytorch.org/docs/stable/autograd.html#torch.autograd.graph.save_on_cpu). Parameters stay on the device.
# With ``activation_checkpointing="full"`` only the inputs of blocks are kept, in host memory.


class OffloadActivations(Callback):
    """Keeps the activations of training steps in host memory while a trainer runs."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Adds the hooks to the precision plugin's context, in which every strategy runs its steps."""
        plugin, device_type = trainer.precision_plugin, trainer.strategy.root_device.type
        if device_type == "cpu":
            rank_zero_info("offload='activations': they are in host memory already.")
            return
        inner_context = plugin.train_step_context

        def context() -> AbstractContextManager[Any]:
            return _ActivationsOnHost(device_type, inner_context())

        vars(plugin)["train_step_context"] = context

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Removes the hooks."""
        vars(trainer.precision_plugin).pop("train_step_context", None)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Removes the hooks."""
        vars(trainer.precision_plugin).pop("train_step_context", None)


class _ActivationsOnHost(save_on_cpu):
    """Context manager around a forward: tensors saved for backward are kept in host memory, except parameters.

    Args:
        device_type: device type of the accelerator.
        inner: another context manager, which is entered before this one.
    """

    def __init__(self, device_type: str, inner: AbstractContextManager[Any]) -> None:
        super().__init__(pin_memory=True, device_type=device_type)
        self._inner = inner
        # torch: saved_tensors_hooks.pack_hook and .unpack_hook
        pack, unpack = self.pack_hook, self.unpack_hook
        self.pack_hook = lambda tensor: tensor if _stays_where_it_is(tensor) else pack(tensor)
        self.unpack_hook = lambda kept: kept if isinstance(kept, Tensor) else unpack(kept)

    def __enter__(self) -> None:
        """Enters both contexts."""
        self._inner.__enter__()
        super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        """Exits both contexts."""
        super().__exit__(*raised)
        self._inner.__exit__(*raised)


def _stays_where_it_is(tensor: Tensor) -> bool:
    """Whether a tensor is on the host, or is a parameter or a view of one, so that a copy would free no memory."""
    # torch: Tensor._base
    return tensor.device.type == "cpu" or isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
