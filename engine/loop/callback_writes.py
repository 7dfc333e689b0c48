"""Names the callbacks that write into weights or gradients, or freeze weights, in the first steps of a run.

Steps that are repeated with a copy of the module call the module's hooks. Callbacks are not called again: they may
write files, or count. So where one has written, the repeated steps are others.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..distributed.digests import digests
from .hooks import is_stock

__all__ = ["CallbackWrites", "may_change_training"]


def may_change_training(callback: Any) -> bool:
    """Whether a callback is the user's, and has hooks."""
    return not is_stock(callback) and any(is_overridden(hook, callback, Callback) for hook in _hooks())


@functools.cache
def _hooks() -> list[str]:
    evaluation = ("validation", "test", "predict", "sanity", "exception", "checkpoint")
    return [name for name in dir(Callback) if name[:3] == "on_" and not any(word in name for word in evaluation)]


class CallbackWrites:
    """Looks at weights and gradients before and after each hook of the user's callbacks, until `close`.

    Args:
        module: the module that is trained.
        callbacks: those of its trainer.
    """

    def __init__(self, module: LightningModule, callbacks: list[Any]) -> None:
        self._module = module
        self.names: list[str] = []
        """The classes of the callbacks that have written, frozen or unfrozen."""
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        for callback in filter(may_change_training, callbacks):
            for name in _hooks():
                if is_overridden(name, callback, Callback):
                    watched = functools.partial(self._call, callback, getattr(callback, name))
                    self._replaced.append((callback, name, vars(callback).get(name), watched))
                    setattr(callback, name, watched)

    def _call(self, callback: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        trained, before = self._trained(), self._figures()
        result = hook(*args, **kwargs)
        after = self._figures()
        if (
            trained != self._trained()
            or before.keys() != after.keys()
            or any(not torch.equal(before[name], after[name]) for name in before)
        ):
            self.names.append(type(callback).__name__)
        return result

    def _trained(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._module.parameters()]

    def _figures(self) -> dict[str, torch.Tensor]:
        """Returns sum and norm of each weight and gradient of this rank."""
        weights = dict(self._module.named_parameters())
        gradients = {f"{name}.grad": p.grad for name, p in weights.items() if p.grad is not None}
        of_all = digests({**weights, **gradients}.items())
        names = [f"{name} {place}" for name, place in of_all.pieces]
        return {} if of_all.figures is None else dict(zip(names, of_all.figures.nan_to_num(), strict=True))

    def close(self) -> None:
        """Gives the callbacks their hooks back."""
        for callback, name, own, watched in self._replaced:
            if vars(callback).get(name) is not watched:  # it has got another one
                continue
            if own is None:
                del vars(callback)[name]
            else:
                setattr(callback, name, own)
        self._replaced.clear()
