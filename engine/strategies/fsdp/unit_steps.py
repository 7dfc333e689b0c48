"""The steps of a module of FSDP2 units, and their wrappers while a strategy runs."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from ...distributed.equal_ranks import share_buffers
from ..mesh import MeshStrategy
from .by_hand import ByHand
from .comm import reshard
from .shard_checks import check_loss, explained
from .unit_order import UnitOrder

__all__ = ["UnitSteps"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class UnitSteps(MeshStrategy):
    """Base of strategies on a mesh whose steps run a module of FSDP2 units.

    FSDP2 gathers parameters around `forward`, but Lightning calls the steps: each step is registered as a forward
    method. The order of its collectives is checked.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._is_in_step = False
        self._by_hand: ByHand | None = None
        self._order: UnitOrder | None = None
        self._synchronises = True
        self._whole: dict[int, list[str]] = {}

    def _wrap_steps(self, model: nn.Module, hooks_before: set[int]) -> None:
        """Wraps the steps of a module that was just sharded.

        Args:
            model: the model whose steps are replaced.
            hooks_before: the ids of the forward hooks that it had before it was sharded.
        """
        # Lightning calls these, not `forward`, whose hooks gather the parameters.
        for step in _STEPS:
            if not is_overridden(step, model, LightningModule):  # Lightning makes the same check to skip a loop
                continue
            method = getattr(model, step)
            method = self._track_manual_steps(method) if step == "training_step" else method
            setattr(model, step, self._mark_in_step(method))
            if isinstance(model, FSDPModule):
                register_fsdp_forward_method(model, step)
                setattr(model, step, self._note_collectives(getattr(model, step), step))
        # If a step calls `self(batch)`, these hooks would be nested, and gather everything a second time.
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key in hooks.keys() - hooks_before:
                hooks[key] = functools.partial(self._unless_in_step, hooks[key])

    def _track_manual_steps(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def tracked(*args: Any, **kwargs: Any) -> Any:
            with self._by_hand.step() if self._by_hand is not None else nullcontext():
                return step(*args, **kwargs)

        return tracked

    def _mark_in_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def marked(*args: Any, **kwargs: Any) -> Any:
            self._is_in_step = True
            try:
                return step(*args, **kwargs)
            finally:
                self._is_in_step = False

        return marked

    def _note_collectives(self, step: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            order = None if self._is_in_step else self._order  # a step may call another one
            if order is not None:
                order.begin((name, self._synchronises))
            with explained(self.model, repr(self)):
                result = step(*args, **kwargs)
            if name == "training_step":
                check_loss(result.get("loss") if isinstance(result, dict) else result, repr(self))
            if order is not None and (name != "training_step" or self._by_hand is not None):
                order.begin(None)
            return result

        return noted

    def _unless_in_step(self, hook: Callable[..., Any], *arguments: Any) -> Any:
        return None if self._is_in_step else hook(*arguments)

    def on_validation_start(self) -> None:
        """Called before each validation, the sanity check included."""
        share_buffers(self.model)

    def on_test_start(self) -> None:
        """Called before each test."""
        share_buffers(self.model)

    def on_predict_start(self) -> None:
        """Called before each prediction."""
        share_buffers(self.model)

    def end_evaluation(self) -> None:
        """Frees gathered parameters, since no backward follows that would, so that hooks see the trained ones."""
        assert self.model is not None
        reshard(self.model)
