"""Puts the engine's loop parts in the place of Lightning's, right after the trainer was built."""

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.connectors.callback_connector import _CallbackConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

# Lightning: what its own decorator of `Trainer.__init__` reads; for a subclass that one would look for PL_ENGINE_*.
from lightning.pytorch.utilities.argparse import _parse_env_variables

from ..strategies import announce
from .data_connector import DataConnector
from .evaluation import EvaluationLoop
from .metrics import LoggerConnector
from .nonfinite import NonFiniteWatch
from .signals import SignalConnector
from .training import TrainingEpochLoop

__all__ = ["LoopTrainer", "attach", "defaults_from_environment"]


def defaults_from_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates an ``__init__`` so that PL_TRAINER_* variables stand for the arguments that are not given."""

    @functools.wraps(init)
    def with_defaults(self: Trainer, **flags: Any) -> None:
        init(self, **{**vars(_parse_env_variables(Trainer)), **flags})

    return with_defaults


class LoopTrainer(Trainer):
    """A trainer that names a failed rank before any callback can wait for the others."""

    # Lightning: Trainer._run, within the trainer's own handling of exceptions.
    def _run(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._run(*args, **kwargs)
        except BaseException as exception:
            announce(exception)
            raise


class CallbackConnector(_CallbackConnector):  # Lightning: Trainer._callback_connector
    """Lightning's; a progress bar that the module brings takes the place of the default one, of whatever class."""

    def __init__(self, trainer: Trainer, default_bar: Callback | None) -> None:
        super().__init__(trainer)
        self._default_bar = default_bar

    def _attach_model_callbacks(self) -> None:
        super()._attach_model_callbacks()
        callbacks = self.trainer.callbacks  # type: ignore[attr-defined]
        if any(isinstance(c, ProgressBar) and c is not self._default_bar for c in callbacks):
            self.trainer.callbacks = [c for c in callbacks if c is not self._default_bar]  # type: ignore[attr-defined]


def attach(trainer: Trainer, watch: NonFiniteWatch, default_bar: Callback | None = None) -> None:
    """Replaces what differs from Lightning in a trainer that has not run; the parts replaced hold no state yet.

    Args:
        trainer: changed in place.
        watch: sees each loss and gradient norm.
        default_bar: the progress bar that nobody asked for by name; None for none.
    """
    # Lightning: the private parts that Trainer.__init__ makes.
    trainer._callback_connector = CallbackConnector(trainer, default_bar)
    trainer._data_connector = DataConnector(trainer)
    trainer._signal_connector = SignalConnector(trainer)
    # The connector was told its loggers already: they stay.
    trainer._logger_connector = LoggerConnector(trainer)
    epochs = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = TrainingEpochLoop(trainer, epochs.min_steps, epochs.max_steps, watch)
    for name, fn, stage in (
        ("validate_loop", TrainerFn.VALIDATING, RunningStage.VALIDATING),
        ("test_loop", TrainerFn.TESTING, RunningStage.TESTING),
    ):
        lightnings = getattr(trainer, name)
        setattr(trainer, name, EvaluationLoop(trainer, fn, stage, lightnings.verbose, lightnings.inference_mode))
