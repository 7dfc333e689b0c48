"""Refuses modules, losses and callbacks that `fsdp` and `hsdp` can't shard, by name and with a way out."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor

__all__ = ["check_callbacks", "check_loss", "check_parameters", "explained"]

_MIXED = "mixed torch.Tensor and DTensor"  # torch: what it says of an operation on a shard and a plain tensor


def check_parameters(model: nn.Module, units: Collection[nn.Module], flag: str) -> None:
    """Checks that the parameters of each unit can be sharded, before any is.

    Args:
        model: with all its parameters, on any device.
        units: its modules that will be units; what is outside of them is one more.
        flag: the strategy's.

    Raises:
        ValueError: a parameter has no dim, or sparse gradients; or those that are trained in one unit differ in dtype.
    """
    dtypes: dict[nn.Module, dict[Any, str]] = {}
    for unit, name, part in _by_unit(model, model, units, ""):
        where = f"{name}." if name else ""
        for key, parameter in part.named_parameters(recurse=False):
            if parameter.dim() == 0:
                raise ValueError(
                    f"{flag} can't shard {where}{key}, a single number without a dim: make it"
                    " `nn.Parameter(torch.tensor([...]))`, of shape [1], or choose strategy='ddp'."
                )
            if not parameter.requires_grad:
                continue
            if getattr(part, "sparse", False) is True:
                raise ValueError(
                    f"{flag} can't average the sparse gradient of {where}{key}: build"
                    f" {type(part).__name__} with sparse=False."
                )
            dtypes.setdefault(unit, {}).setdefault(parameter.dtype, f"{where}{key}")
    for of_unit in dtypes.values():
        if len(of_unit) > 1:
            names = ", ".join(f"{name} ({dtype})" for dtype, name in of_unit.items())
            raise ValueError(
                f"{flag} gathers the parameters of a unit as one tensor, but some of one unit differ in dtype: {names}."
                " Give them one dtype; or have the module's `shard_units()` return the sub-modules of the other dtype"
                " as well, so that each is a unit of its own; or choose strategy='ddp'."
            )


def check_callbacks(callbacks: Iterable[Any], flag: str) -> None:
    """Checks that none of a trainer's callbacks averages weights with a copy of the whole module.

    Raises:
        ValueError: one does.
    """
    for callback in callbacks:
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise ValueError(
                f"{type(callback).__name__} averages a whole copy of the module with its weights, of which each rank"
                f" has a shard under {flag}: leave it out, or choose strategy 'ddp' or 'zero1'."
            )


@contextmanager
def explained(model: nn.Module | None, flag: str) -> Iterator[None]:
    """Puts into torch's message of an operation on a shard which module was used outside of its unit's forward."""
    try:
        yield
    except RuntimeError as error:
        if model is not None and _MIXED in str(error) and "whole only while" not in str(error):
            _explain(error, model, flag)
        raise


def _explain(error: RuntimeError, model: nn.Module, flag: str) -> None:
    names = {part: name for name, part in model.named_modules() if name}
    used = ""
    traceback = error.__traceback__
    while traceback is not None:
        part = traceback.tb_frame.f_locals.get("self")
        if isinstance(part, nn.Module) and any(isinstance(p, DTensor) for p in part.parameters(recurse=False)):
            used = f": {names[part]} was called from outside of it" if part in names else used
        traceback = traceback.tb_next
    error.args = (f"{_used_outside(flag, used)} torch says: {error}",)


def check_loss(loss: Any, flag: str) -> None:
    """Checks that a loss is this rank's own: torch takes one with shards in it for the same on all ranks.

    Raises:
        RuntimeError: it was made of shards.
    """
    if isinstance(loss, DTensor):
        raise RuntimeError(_used_outside(flag, ", but the loss was made of such shards"))


def _used_outside(flag: str, how: str) -> str:
    return (
        f"under {flag} the parameters of a block are whole only while the block's own forward runs, and shards outside"
        f" of it{how}. A step that uses them there (`block.norm(x)`, `block.weight`, a penalty over"
        " `self.parameters()`) can have its module keep everything whole during a step by `def shard_units(self):"
        " return []`, or use strategy='ddp'; a penalty on weights is the optimizer's `weight_decay`. This step has"
        " changed no weights."
    )


def _by_unit(
    part: nn.Module, unit: nn.Module, units: Collection[nn.Module], name: str
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """`part` and all below it, each with its unit and name."""
    unit = part if part in units else unit
    yield unit, name, part
    for key, child in part.named_children():
        yield from _by_unit(child, unit, units, f"{name}.{key}".lstrip("."))
