"""Checks of a module before any process starts."""

import types
from collections.abc import Iterator

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .compression import CommHook

__all__ = ["check_module"]


def check_module(module: LightningModule, *, precision: str, comm_hook: CommHook | None = None) -> None:
    """Checks that `module` can be trained.

    Raises:
        MisconfigurationException: it has no optimizer, or its own optimization loop would bypass the loss scale.
        ValueError: it has gradients that `comm_hook` can't compress.
    """
    kind = type(module).__name__
    if not _overrides(module, "configure_optimizers"):
        raise MisconfigurationException(
            f"No `configure_optimizers()` method defined in {kind}: there is nothing to train with. Add one that"
            " returns an optimizer, e.g. `return torch.optim.AdamW(self.parameters())`."
        )
    if precision == "16-mixed" and not module.automatic_optimization and not _mentions(module, "manual_backward"):
        raise MisconfigurationException(
            f"{kind} optimizes by hand and never calls `self.manual_backward(loss)`, so precision='16-mixed' could not"
            " scale its loss: call it in place of `loss.backward()`, or choose precision='bf16-mixed'."
        )
    if precision == "16-mixed" and not module.automatic_optimization and _mentions(module, "get_scale"):
        rank_zero_warn(
            f"{kind} reads the loss scale. Gradients are unscaled when `self.manual_backward(loss)` returns, unlike"
            " those of Lightning's Trainer: don't divide them, or what clips them, by it."
        )
    if comm_hook is not None and not _overrides(module, "configure_model"):  # otherwise the module is not complete yet
        comm_hook.check(module)
        comm_hook.is_checked = True


def _overrides(module: LightningModule, name: str) -> bool:
    return getattr(type(module), name) is not getattr(LightningModule, name) or name in vars(module)


def _mentions(module: LightningModule, name: str) -> bool:
    """Whether any method of the module's own classes, or a function nested in one, uses the attribute `name`."""
    user_classes = (cls for cls in type(module).__mro__ if not cls.__module__.startswith(("lightning.", "torch.")))
    methods = (value for cls in user_classes for value in vars(cls).values() if isinstance(value, types.FunctionType))
    functions = (function for method in methods for function in _decorated(method))
    return any(name in code.co_names for function in functions for code in _nested(function.__code__))


def _decorated(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The function itself, and the functions that its decorators wrap."""
    yield function
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, types.FunctionType):
            yield from _decorated(cell.cell_contents)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
