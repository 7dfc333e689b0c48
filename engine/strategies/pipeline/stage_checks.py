"""Refusals of modules, flags and loaders that can't be trained in pipeline stages, each with its remedy."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.modules import module as modules
from torch.utils.data import DataLoader

from ..options import PPFSDPOptions, PPOptions
from .plan import StagePlan

__all__ = ["check_batch_size", "check_flags", "check_hooks", "check_optimization", "check_plan", "check_schedule"]

_GLOBAL_HOOKS = {
    "register_module_forward_pre_hook": modules._global_forward_pre_hooks,
    "register_module_forward_hook": modules._global_forward_hooks,
    "register_module_full_backward_pre_hook": modules._global_backward_pre_hooks,
    "register_module_full_backward_hook": modules._global_backward_hooks,
}
"""torch's tables of hooks of all modules, by the function that fills them."""


def check_optimization(module: nn.Module) -> None:
    """Checks that a module uses automatic optimization, and the backward of a pipeline.

    Raises:
        ValueError: it optimizes manually, or has a `backward` of its own.
    """
    if not getattr(module, "automatic_optimization", True):
        raise ValueError(
            f"{type(module).__name__} optimizes by hand, but a pipeline runs forward and backward of several"
            " micro-batches at once: use automatic optimization, or choose another strategy, such as 'fsdp'."
        )
    if isinstance(module, LightningModule) and is_overridden("backward", module):
        raise ValueError(
            f"{type(module).__name__} has a `backward` of its own, which a pipeline can't call: each stage runs its"
            " own part of a micro-batch. Scale the loss in `training_step`, change gradients in"
            " on_before_optimizer_step, or choose another strategy, such as 'fsdp'."
        )


def check_plan(module: nn.Module, plan: StagePlan, options: PPOptions) -> None:
    """Checks that FSDP2 can shard each parameter of a module within one stage.

    Raises:
        ValueError: under `pp+fsdp`, a module around the blocks has parameters of its own.
    """
    if not isinstance(options, PPFSDPOptions):
        return
    for name, submodule in module.named_modules():
        own = [name for name, _ in submodule.named_parameters(recurse=False)]
        if own and len(plan.modules[submodule]) > 1:
            where, remedy = "which blocks of several stages share", "give each block its own"
            if submodule in plan.around:
                where, remedy = "around the blocks", "put them into a sub-module of their own"
            raise ValueError(
                f"strategy 'pp+fsdp' can't shard {', '.join(own)} of {name or type(submodule).__name__!r}, {where}:"
                f" {remedy}, or choose 'pp+ddp'."
            )


def check_hooks(module: nn.Module, plan: StagePlan) -> None:
    """Checks that the hooks of modules can be called on one stage.

    Raises:
        ValueError: a module whose input and output are on two stages has a backward hook; or a hook is registered for
            all modules, so that torch calls it for parts of the pipeline, too.
    """
    names = {id(submodule): name for name, submodule in module.named_modules()}
    for submodule in plan.around:
        if submodule._backward_hooks or submodule._backward_pre_hooks:
            name = names[id(submodule)]
            raise ValueError(
                f"a backward hook of {name or type(submodule).__name__!r}, which contains the blocks of a pipeline,"
                " would get the gradient of its input on one stage and that of its output on another: register it on"
                " the blocks, or choose another strategy, such as 'fsdp'."
            )
    for name, table in _GLOBAL_HOOKS.items():
        for hook in table.values():
            if not str(getattr(hook, "__module__", "")).startswith("torch."):  # such as those of a FlopCounterMode
                raise ValueError(
                    f"the hook {getattr(hook, '__qualname__', type(hook).__name__)!r} is registered for all modules"
                    f" ({name}), but a pipeline stage calls only those of its own, and modules of the"
                    " pipeline beside them: register it on the modules that it is for, or choose another strategy, such"
                    " as 'fsdp'."
                )


def check_flags(
    options: PPOptions, precision_plugin: Any, callbacks: Sequence[Callback], *, syncs_batchnorm: bool, compiles: bool
) -> None:
    """Checks the flags of a run, and its callbacks.

    Raises:
        ValueError: a flag can't be honoured in stages.
    """
    if syncs_batchnorm:
        raise ValueError(
            "sync_batchnorm=True can't be honoured in a pipeline, where each micro-batch is normalised by itself:"
            " leave it out, or choose 'ddp' or 'fsdp'."
        )
    if not hasattr(precision_plugin, "norm_of"):
        raise ValueError(
            f"{type(precision_plugin).__name__}, a precision plugin of your own, can't clip gradients that are"
            " spread over pipeline stages: name the precision by its flag."
        )
    if any(isinstance(callback, BackboneFinetuning) for callback in callbacks):
        raise ValueError(
            "BackboneFinetuning compares the parameters that it unfreezes with all others, and a pipeline stage has"
            " only its own: give all parameters to the optimizer, and set requires_grad in a callback of your own; or"
            " choose another strategy, such as 'fsdp'."
        )
    if compiles and options.schedule == "zero-bubble":
        raise ValueError(
            "schedule=zero-bubble can't be honoured with compile, whose backward is one piece: leave one of them"
            " out, or choose another schedule."
        )


def check_schedule(options: PPOptions, num_ranks: int) -> None:
    """Checks that there are enough micro-batches for the schedule of a pipeline of `num_ranks` ranks.

    Raises:
        ValueError: there are fewer micro-batches than ranks.
    """
    number = options.microbatches
    if options.schedule == "1f1b" and number is not None and number < num_ranks:
        raise ValueError(
            f"schedule=1f1b keeps {num_ranks} stages busy with at least as many micro-batches, but"
            f" microbatches={number}: ask for {num_ranks} or more, or for schedule=gpipe."
        )


def check_batch_size(dataloader: Any, number: int | None) -> None:
    """Checks that a loader's batches can be cut into `number` micro-batches.

    Raises:
        ValueError: the batch size is no multiple of `number`.
    """
    size = getattr(dataloader, "batch_size", None)
    if isinstance(dataloader, DataLoader) and isinstance(size, int) and number is not None and size % number:
        raise ValueError(
            f"pp:microbatches={number} does not divide the DataLoader's batch_size={size}: change one of them, or"
            " leave out microbatches."
        )
