"""Manual optimization, in which the loss of a backward is weighted by the samples of the rank's batch.

Strategies average the ranks' gradients. If ranks have unequal parts of a batch, as in the last one of an epoch, the
mean over all samples needs a weight for each rank's loss: see `loss_weighting.py` for automatic optimization. A rank
without a sample of the batch runs a padding batch for its collectives: its losses count for nothing.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from .._compat.lightning import _ManualOptimization
from ..data import ends_with_data
from ..precision.loss_scaling import one_update
from ..strategies import adapt
from .local_gradients import LocalGradients
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
        self._local_gradients: LocalGradients | None = None
        self._has_warned = False

    def run(self, kwargs: OrderedDict) -> Any:
        """Runs `training_step`; a loss scaler updates its scale once, after the last optimizer's step."""
        with one_update(self.trainer):
            return super().run(kwargs)

    @ends_with_data
    def advance(self, kwargs: OrderedDict) -> None:
        """Runs `training_step`; while it runs, `manual_backward` weighs the losses.

        Raises:
            RuntimeError: an optimizer steps with gradients that are not averaged over the ranks.
        """
        batch_idx = self.trainer.fit_loop.epoch_loop.batch_idx
        sizes = self.trainer._data_connector.sizes  # type: ignore[attr-defined]
        if self._loss_weighting.data_size > 1 and sizes.some_are_fillers(batch_idx):
            with beside_fillers(self.trainer, is_filler=sizes.is_filler(batch_idx), joined=sizes.joins):
                self._advance(batch_idx, kwargs)
        else:
            self._advance(batch_idx, kwargs)

    def _advance(self, batch_idx: int, kwargs: OrderedDict) -> None:
        factor = self._loss_weighting.factor_of_batch(batch_idx)
        local = self._refuse_local_gradients()
        if factor == 1 and local is None:
            super().advance(kwargs)
            return
        strategy: Any = self.trainer.strategy
        backward = _Backward(strategy.backward, factor, local)
        num_steps = self.optim_step_progress.total.ready
        own = vars(strategy)
        others = own.get("backward")  # the user may have set one on the object
        own["backward"] = backward  # Lightning: LightningModule.manual_backward calls it
        try:
            super().advance(kwargs)
        finally:
            own.pop("backward")
            if others is not None:
                own["backward"] = others
        if (
            factor != 1
            and backward.num_calls == 0
            and self.optim_step_progress.total.ready > num_steps
            and not self._has_warned
        ):
            self._has_warned = True
            rank_zero_warn(
                f"The ranks have unequal numbers of samples of batch {batch_idx}, and their gradients count as if they"
                " had equally many, since `training_step` called loss.backward(): call self.manual_backward(loss),"
                " which weighs the loss by its samples, or give the DataLoader drop_last=True."
            )

    def _refuse_local_gradients(self) -> LocalGradients | None:
        strategy = adapt(self.trainer.strategy)
        if not (strategy.capabilities.averages_on_request and strategy.averages_gradients):
            self.teardown()  # a warm-up is over, in which gradients were averaged
        elif self._local_gradients is None and self.trainer.world_size > 1:
            parameters = [(n, p) for n, p in self.trainer.lightning_module.named_parameters() if p.requires_grad]
            self._local_gradients = LocalGradients(parameters, self.trainer.optimizers, repr(strategy))
        return self._local_gradients

    def teardown(self) -> None:
        """Removes the hooks of parameters and optimizers."""
        if self._local_gradients is not None:
            self._local_gradients.close()
            self._local_gradients = None


class _Backward:
    """Replaces a strategy's `backward`: multiplies the loss by a factor."""

    def __init__(self, backward: Callable[..., Tensor], factor: float, local: LocalGradients | None) -> None:
        self._backward, self._factor, self._local = backward, factor, local
        self.num_calls = 0

    def __call__(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        loss = closure_loss if self._factor == 1 else closure_loss * self._factor
        with nullcontext() if self._local is None else self._local.averaged():
            return self._backward(loss, *args, **kwargs)
