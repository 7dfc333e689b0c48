"""Code shared by the strategies that compress gradients or count the bytes that they send."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch import Tensor
from torch.optim import Optimizer

from ..compression import CommHook, CountingGroup
from ..contract import EngineStrategy, adapt

__all__ = ["CommHookMixin", "prepare_to_repeat"]

_PASSING_ON = (
    __name__,
    f"{__package__}.ddp",
    "lightning.pytorch.strategies.ddp",
    "lightning.pytorch.strategies.strategy",
)
"""The modules whose `optimizer_step` only calls the inherited one if there is no comm hook, and no Muon."""


def prepare_to_repeat(strategy: Strategy, *, sync_batchnorm: bool) -> None:
    """Makes `strategy` able to repeat a step in which one of its ranks ran out of memory.

    Raises:
        ValueError: the strategy can't repeat a step.
    """
    why_not = "sync_batchnorm=True" if sync_batchnorm else adapt(strategy).capabilities.unsupported_repeat
    if why_not is not None:
        raise ValueError(
            f"micro_batch_size='auto' can't repeat a step under {why_not}, in which a rank that ran out of memory could"
            " not take part: give a number, or choose strategy 'ddp', 'zero1', 'fsdp' or 'hsdp' without it."
        )
    assert isinstance(strategy, CommHookMixin)
    strategy.may_repeat()


class CommHookMixin(EngineStrategy, ParallelStrategy):
    """Mixin that tells a comm hook when a step is over, and whether the step was taken."""

    _has_left_out = False
    """Whether the step of an optimizer of the present step was left out."""

    def ends_step(self, optimizer: Optimizer) -> bool:
        """Whether a step is over with that of an optimizer: of several, in automatic optimization, with the last's."""
        assert self.lightning_module is not None
        return not self.lightning_module.automatic_optimization or optimizer is self.optimizers[-1]

    def may_repeat(self) -> None:
        """Called before training if steps may be repeated because a rank ran out of memory."""
        self.may_repeat_steps = True
        self.counts_traffic = True  # then all collectives go through the comm hook
        if self.comm_hook is not None:
            self.comm_hook.may_repeat = True

    def begin_micro_batch(self) -> None:
        """Called before each micro-batch that `finish_micro_batch` may have to finish."""
        self._calls = [(wire, wire.num_calls) for wire in self.wires]

    def finish_micro_batch(self, step: Callable[[Callable[..., Any]], Tensor], synchronises: bool) -> None:
        """Takes part in the remaining collectives of a micro-batch that failed on this rank only.

        Args:
            step: given a `training_step`, calls it with the smallest batch and returns the loss.
            synchronises: whether gradients are averaged in this micro-batch.
        """
        raise NotImplementedError

    def _mute_what_was_sent(self) -> None:
        if self.active_hook is not None:
            self.active_hook.finish()
            self.active_hook.on_step_end(skipped=True)
        for wire, num_calls in self._calls:
            wire.skip_next(wire.num_calls - num_calls)

    def begin_again(self) -> None:
        """Called on all ranks before a step is repeated."""
        if self.comm_hook is not None:
            self.comm_hook.on_step_end(skipped=True)

    @property
    def active_hook(self) -> CommHook | None:
        """The comm hook that averages the gradients and counts bytes; None if torch averages them, without a count."""
        return self.comm_hook

    @property
    def wires(self) -> list[CountingGroup]:
        """The groups that count bytes; empty before training."""
        hook = self.active_hook
        return [] if hook is None or hook.wire is None else [hook.wire]

    @property
    def loss_scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of `16-mixed`; other precisions have none."""
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def passes_step_on(self) -> bool:
        """See `EngineStrategy`."""
        # Lightning: DDPStrategy.optimizer_step, which does more than to call Strategy's.
        if self.comm_hook is not None or getattr(self, "_model_averager", None) is not None:
            return False
        owners = (vars(owner) for owner in (self, *type(self).__mro__))
        steps = [names["optimizer_step"] for names in owners if "optimizer_step" in names]
        # The module of a function's globals identifies it: a replacement may have the same name.
        return all(getattr(step, "__globals__", {}).get("__name__") in _PASSING_ON for step in steps)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Any | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps; unless the step overflowed, the comm hook keeps its staged state for the next one."""
        hook = self.comm_hook
        if hook is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        if self.step_guard is not None or self.loss_scaler is None:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
            if self.ends_step(optimizer):
                hook.on_step_end(skipped=False if self.step_guard is None else self.step_guard.verdict)
            return output
        # Reading the scale would wait for the device; the scaler has waited itself before it calls the optimizer.
        has_loss = has_stepped = False

        def noted_closure() -> Any:
            nonlocal has_loss
            has_loss = (loss := closure()) is not None
            return loss

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            nonlocal has_stepped
            found_inf = getattr(
                optimizer, "found_inf", None
            )  # torch: set for fused optimizers, which detect the overflow themselves
            has_stepped = found_inf is None or not found_inf.item()

        handle = optimizer.register_step_post_hook(note_step)
        try:
            output = super().optimizer_step(optimizer, noted_closure, model, **kwargs)
        finally:
            handle.remove()
        # Lightning skips a step without a loss; that step has not overflowed.
        may_step = has_loss or not self.lightning_module.automatic_optimization  # type: ignore[union-attr]
        self._has_left_out |= may_step and not has_stepped
        if self.ends_step(optimizer):
            hook.on_step_end(skipped=self._has_left_out)
            self._has_left_out = False
        return output

    def post_backward(self, closure_loss: Tensor) -> None:
        """Raises before a step with gradients that are not finite.

        Checks only logged steps if the check waits for a GPU, or needs a collective because no rank has all averages.
        """
        super().post_backward(closure_loss)
        hook = self.comm_hook
        if hook is None:
            return
        every = self.lightning_module.trainer.log_every_n_steps or 50  # type: ignore[union-attr]
        if (self.root_device.type == "cpu" and not hook.sees_shards_only) or hook.step % every == 0:
            hook.raise_if_bad()

    def on_train_end(self) -> None:
        """Checks the steps since the last logged one."""
        super().on_train_end()
        if self.comm_hook is not None:
            self.comm_hook.raise_if_bad()
