"""Refuses modules, losses and callbacks that `fsdp` and `hsdp` can't shard; each message names a remedy."""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = [
    "check_loss",
    "check_own_parameters",
    "check_pruning",
    "check_tensor_parallel",
    "explained",
]

_MIXED = "mixed torch.Tensor and DTensor"  # torch: its message about an operation on a shard and a plain tensor
_TRANSFORMED = "functorch transforms"  # torch: its message about a function without a rule for `vmap` and `grad`
_UNUSED = "appears to not have been used in the graph"  # torch: its message about `torch.autograd.grad`

_WRITTEN_INPUT = re.compile("RegisterPostBackwardFunction.* is a view and is being modified inplace")


def check_tensor_parallel(whole: Collection[str], num_tp: int, flag: str) -> None:
    """Checks that no parameter would have to be whole on every rank while `num_tp` ranks split layers.

    Raises:
        ValueError: there is one.
    """
    if whole and num_tp > 1:
        raise ValueError(
            f"{flag} can't shard {', '.join(whole)}: a parameter needs a dim (`nn.Parameter(torch.tensor([...]))`, of"
            " shape [1]) and the dtype of its unit, or the module's `shard_units()` must return its sub-module as a"
            " unit; or choose strategy='fsdp' or 'tp', which keep it whole on every rank."
        )


def check_pruning(callbacks: Iterable[Any], flag: str) -> None:
    """Checks that none of a trainer's callbacks prunes parameters.

    Raises:
        ValueError: one does.
    """
    for callback in callbacks:
        if isinstance(callback, ModelPruning):
            raise ValueError(
                f"{type(callback).__name__} replaces parameters by products with masks of whole tensors, but each rank"
                f" has only a part of them under {flag}: choose strategy 'ddp', or prune before or after `fit`"
                " (torch.nn.utils.prune)."
            )


def check_own_parameters(group: Any, flag: str) -> None:
    """Checks that a unit that is about to be gathered has its own parameters.

    Args:
        group: the unit's FSDPParamGroup.
        flag: flag of the strategy.

    Raises:
        RuntimeError: they were replaced for a call, and the gathered ones would be used in their place.
    """
    for parameter in group.fsdp_params:
        # torch: FSDPParam.sharded_state, and ._module_info, which says where the parameter belongs.
        module, name = parameter._module_info.module, parameter._module_info.param_name
        if parameter.sharded_state.name == "SHARDED" and module._parameters.get(name) is not parameter.sharded_param:
            raise RuntimeError(
                f"under {flag} the code has replaced {parameter._param_fqn or name!r} for a call, as"
                " `torch.func.functional_call` does for per-sample gradients and meta learning (MAML). A block gathers"
                " its own weights from all ranks when it is called, so that the replaced ones would have no effect:"
                " choose strategy='ddp'. With automatic optimization the option units=module"
                " (strategy='fsdp:units=module') helps as well: it keeps everything whole during a step. This step has"
                " changed no weights."
            )


@contextmanager
def explained(model: nn.Module | None, flag: str) -> Iterator[None]:
    """In this context, torch's errors about shards name the module that was used outside its unit, and a remedy."""
    try:
        yield
    except RuntimeError as error:
        if _WRITTEN_INPUT.search(str(error)) and "is refused" not in str(error):
            error.args = (
                f"under {flag} a block writes in place into a tensor that it is called with, which is refused: FSDP2"
                " hands it a view. Compute a new one (`x = x + y` in place of `x += y`), or choose strategy 'ddp'."
                f" torch says: {error}",
            )
        if model is not None and _MIXED in str(error) and "whole only while" not in str(error):
            _explain(error, model, flag)
        elif model is not None and _UNUSED in str(error) and "`torch.autograd.grad`" not in str(error):
            error.args = (
                f"under {flag} `torch.autograd.grad` has no gradient for parameters of a block: outside of the block's"
                " own forward they are shards, which no loss was computed from. Use `self.manual_backward(loss)` and"
                f" `p.grad`, or choose strategy='ddp'. torch says: {error}",
            )
        elif _TRANSFORMED in str(error) and f"under {flag}" not in str(error):
            error.args = (
                f"under {flag} `torch.func` (`vmap`, `grad`) can't transform the collectives of a layer, as per-sample"
                f" gradients need: choose strategy='ddp'. torch says: {error}",
            )
        raise


def _explain(error: RuntimeError, model: nn.Module, flag: str) -> None:
    names = {submodule: name for name, submodule in model.named_modules() if name}
    used = ""
    traceback = error.__traceback__
    while traceback is not None:
        submodule = traceback.tb_frame.f_locals.get("self")
        if isinstance(submodule, nn.Module) and any(
            isinstance(p, DTensor) for p in submodule.parameters(recurse=False)
        ):
            used = f": {names[submodule]} was called from outside of it" if submodule in names else used
        traceback = traceback.tb_next
    error.args = (f"{_used_outside(flag, used)} torch says: {error}",)


def check_loss(loss: Any, flag: str) -> None:
    """Checks that a loss is this rank's own: torch treats a loss that was computed from shards as equal on all ranks.

    Raises:
        RuntimeError: it was computed from shards.
    """
    if isinstance(loss, DTensor):
        raise RuntimeError(_used_outside(flag, ", but the loss was made of such shards"))


def _used_outside(flag: str, how: str) -> str:
    return (
        f"under {flag} the parameters of a block are whole only while the block's own forward runs, and shards outside"
        f" of it{how}. If a step uses them there (`block.norm(x)`, `block.weight`, a penalty over"
        " `self.parameters()`), choose the option units=module (strategy='fsdp:units=module'), which keeps everything"
        " whole during a step, or strategy='ddp'; a penalty on weights is the optimizer's `weight_decay`. This step has"
        " changed no weights."
    )
