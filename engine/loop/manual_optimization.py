"""Manual optimization, in which the loss of a backward is weighted by the samples of the rank's batch.

Strategies average the ranks' gradients. If ranks have unequal parts of a batch, as in the last one of an epoch, the
mean over all samples needs a weight for each rank's loss: see `loss_weighting.py` for automatic optimization. A rank
without a sample of the batch runs a padding batch for its collectives: its losses count for nothing.

A module may call backward and step in `training_step`, and in the hooks of a batch as well: from the first batch of a
run until its end, losses are weighted and steps are counted, where Lightning counts those of `training_step` only.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import do_nothing_closure
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from .._compat.lightning import _ManualOptimization
from ..data import ends_with_data
from ..precision.loss_scaling import one_update
from ..strategies.step_guard import StepGuard
from .loss_weighting import LossWeighting
from .padding_batch import beside_fillers

__all__ = ["ManualOptimization"]


class ManualOptimization(_ManualOptimization):  # Lightning: _TrainingEpochLoop.manual_optimization
    """Lightning's manual optimization, with losses that are weighted by samples.

    Args:
        trainer: the trainer of the loop.
        loss_weighting: knows the samples of each rank.
    """

    def __init__(self, trainer: Trainer, loss_weighting: LossWeighting) -> None:
        super().__init__(trainer)
        self._loss_weighting = loss_weighting
        self._backward: _Backward | None = None
        self._users_backward: Any = None
        self._has_warned = False

    def begin_epoch(self) -> None:
        """Makes steps count, and `manual_backward` weigh losses of several ranks and look at them, until `teardown`."""
        self.on_run_start()
        if self._backward is None and (self._loss_weighting.data_size > 1 or self._guard is not None):
            strategy: Any = self.trainer.strategy
            self._users_backward = vars(strategy).get("backward")  # the user may have set one on the object
            # Lightning: LightningModule.manual_backward calls it
            self._backward = vars(strategy)["backward"] = _Backward(strategy.backward, self._factor, self._guard)

    @property
    def _guard(self) -> StepGuard | None:
        return self.trainer.fit_loop.epoch_loop.automatic_optimization.step_guard  # type: ignore[attr-defined]

    def _factor(self) -> float:
        """The weight of a loss of this rank's current batch."""
        epoch_loop = self.trainer.fit_loop.epoch_loop
        progress = epoch_loop.batch_progress.current
        is_in_batch = progress.ready > progress.completed
        return self._loss_weighting.factor_of_batch(epoch_loop.batch_idx) if is_in_batch else 1.0

    def run(self, kwargs: OrderedDict) -> Any:
        """Runs `training_step`; a loss scaler updates its scale once, after the last optimizer's step."""
        with one_update(self.trainer):
            return super().run(kwargs)

    @ends_with_data
    def advance(self, kwargs: OrderedDict) -> None:
        """Runs `training_step`."""
        backward, num_steps = self._backward, self.optim_step_progress.total.ready
        num_calls = 0 if backward is None else backward.num_calls
        batch_idx = self.trainer.fit_loop.epoch_loop.batch_idx
        if self._guard is not None:
            self._guard.begin_micro_batch()
        sizes = self.trainer._data_connector.sizes  # type: ignore[attr-defined]
        if self._loss_weighting.data_size > 1 and sizes.some_are_fillers(batch_idx):
            with beside_fillers(self.trainer, is_filler=sizes.is_filler(batch_idx)):
                super().advance(kwargs)
        else:
            super().advance(kwargs)
        if (
            backward is not None
            and backward.num_calls == num_calls
            and self.optim_step_progress.total.ready > num_steps
            and not self._has_warned
            and self._factor() != 1
        ):
            self._has_warned = True
            rank_zero_warn(
                f"The ranks have unequal numbers of samples of batch {batch_idx}, and"
                " their gradients count as if they had equally many, since `training_step` called loss.backward(): call"
                " self.manual_backward(loss), which weighs the loss by its samples, or give the DataLoader"
                " drop_last=True."
            )

    def on_run_end(self) -> dict[str, Any]:
        """Returns the outputs of `training_step`; steps count until `teardown`."""
        output, self._output = self._output, {}
        return output

    def teardown(self) -> None:
        """Removes what `begin_epoch` has set."""
        # Lightning: _ManualOptimization.on_run_end
        for optimizer in self.trainer.strategy._lightning_optimizers:
            optimizer._on_before_step = optimizer._on_after_step = do_nothing_closure
        if self._backward is None:
            return
        own = vars(self.trainer.strategy)
        if own.pop("backward", None) is not None and self._users_backward is not None:
            own["backward"] = self._users_backward
        self._backward = self._users_backward = None


class _Backward:
    """Replaces a strategy's `backward`: multiplies the loss by a factor, and has it looked at."""

    def __init__(self, backward: Callable[..., Tensor], factor: Callable[[], float], guard: StepGuard | None) -> None:
        self._backward, self._factor, self._guard = backward, factor, guard
        self.num_calls = 0

    def __call__(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        if self._guard is not None:
            self._guard.note_loss(closure_loss)
        factor = self._factor()
        return self._backward(closure_loss if factor == 1 else closure_loss * factor, *args, **kwargs)
