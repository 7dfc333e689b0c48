"""Callbacks of Lightning's that can't do here what they are for, refused by name rather than run to no effect."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler

# Lightning: the module whose checks Trainer._run makes, after the folders of the run are there.
from lightning.pytorch.trainer import configuration_validator

# Lightning: the launchers that return to the process that started them, whose objects the run has not touched.
from .._compat.lightning import _MultiProcessingLauncher

__all__ = ["check_callbacks", "check_manual_optimization"]

# Lightning: lightning.pytorch.trainer.configuration_validator.__verify_manual_optimization_support
_verify_manual_optimization = getattr(configuration_validator, "__verify_manual_optimization_support")


def check_manual_optimization(trainer: Trainer, module: LightningModule) -> None:
    """Checks, before the run has made any folder, that no flag asks for what a module does by hand.

    Raises:
        MisconfigurationException: Lightning's, of gradient clipping or accumulation.
    """
    _verify_manual_optimization(trainer, module)


def check_callbacks(callbacks: Iterable[Callback], *, launcher: Any, global_batch_size: int | None) -> None:
    """Checks that each of `callbacks` can do what it is for.

    Args:
        callbacks: of a run.
        launcher: the strategy's.
        global_batch_size: samples of an optimizer step, where that was asked for.

    Raises:
        ValueError: one of them can't; says what to do.
    """
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and global_batch_size is not None:
            raise ValueError(
                f"GradientAccumulationScheduler changes how many micro-batches a step has, which"
                f" global_batch_size={global_batch_size} decides: leave one of them out."
            )
        # Lightning: Tuner has LearningRateFinder and BatchSizeFinder end the run, and reads what they found.
        if getattr(callback, "_early_exit", False) and isinstance(launcher, _MultiProcessingLauncher):
            raise ValueError(
                "Tuner can't read what worker processes have found: choose a strategy without the suffix _spawn, _fork"
                f" or _notebook, or give the callback {type(callback).__name__} to the run that trains."
            )
