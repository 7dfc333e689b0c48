"""Several optimizers in automatic optimization, as "Muon for the matrices, AdamW for the rest": one step on one loss.

Forward and backward run once, when the first optimizer calls its closure. Then the gradients of all are unscaled,
`on_before_optimizer_step` is called for each, and they are clipped by one norm, as those of a single optimizer of all
parameters; only then the first one steps. The hook `optimizer_step` is called for each optimizer in its order, and the
step counts once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core import optimizer as lightnings
from torch import Tensor
from torch.optim import Optimizer

from ..errors import RefusedError
from ..precision.plugins import can_step_together
from ..strategies.step_guard import needs_closure

__all__ = ["SharedClosure", "allowing_several_optimizers"]


@contextmanager
def allowing_several_optimizers(trainer: Trainer) -> Iterator[None]:
    """Context of a run: Lightning's error about several optimizers gives way to the checks of this file."""
    # Lightning: Strategy.setup_optimizers calls it by way of _init_optimizers_and_lr_schedulers.
    validate = lightnings._validate_multiple_optimizers_support

    def validate_or_check(optimizers: list[Optimizer], model: LightningModule) -> None:
        is_ours = model.automatic_optimization and len(optimizers) > 1 and model.trainer is trainer
        validate(optimizers[:1] if is_ours else optimizers, model)
        if is_ours:
            _check(trainer, optimizers)

    lightnings._validate_multiple_optimizers_support = validate_or_check
    try:
        yield
    finally:
        lightnings._validate_multiple_optimizers_support = validate


def _check(trainer: Trainer, optimizers: Sequence[Optimizer]) -> None:
    """Checks that several optimizers can step together.

    Raises:
        RefusedError: they can't; the message names the parameter, the optimizer or the plugin.
    """
    names = {parameter: name for name, parameter in trainer.lightning_module.named_parameters()}
    owners: dict[Tensor, Optimizer] = {}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if needs_closure(optimizer):
            raise RefusedError(
                f"{kind} computes the loss several times in a step, with other weights each time, so it can't step with"
                " other optimizers on one loss: leave it alone, or set `self.automatic_optimization = False` and step"
                " each optimizer in `training_step`."
            )
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter in owners:
                raise RefusedError(
                    f"the optimizers {type(owners[parameter]).__name__} and {kind} both have the parameter"
                    f" {names.get(parameter, 'that the module has no name for')!r}. Each parameter may be in one of"
                    " several optimizers that step together: leave it out of the other one."
                )
            owners[parameter] = optimizer
    strategy, plugin = trainer.strategy, trainer.precision_plugin
    if strategy.handles_gradient_accumulation or not can_step_together(plugin):
        taker = strategy if strategy.handles_gradient_accumulation else plugin
        raise RefusedError(
            f"several optimizers can't step together under {type(taker).__name__}, which steps each by itself: choose a"
            " strategy and a precision by their names, or set `self.automatic_optimization = False` and step each"
            " optimizer in `training_step`."
        )


class SharedClosure:
    """The closure of a step of several optimizers: the first that calls it runs forward and backward.

    Args:
        closure: runs forward and backward, and returns the loss.
    """

    def __init__(self, closure: Callable[[], Tensor | None]) -> None:
        self._closure = closure
        self._callers: set[Any] = set()
        self._loss: Tensor | None = None

    def __call__(self, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor | None:
        """Returns the loss.

        Raises:
            RefusedError: this optimizer has called it before, for a loss with other weights.
        """
        if optimizer in self._callers:
            raise RefusedError(
                f"{type(optimizer).__name__} calls its closure several times in a step, so it can't step with other"
                " optimizers on one loss: leave it alone, or set `self.automatic_optimization = False`."
            )
        if not self._callers:
            self._loss = self._closure()
        self._callers.add(optimizer)
        return self._loss
