"""Refuses callbacks of Lightning that would have no effect, or a wrong one, by name."""

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, WeightAveraging

# Lightning: Trainer._run makes these checks only after it has created the run's folders.
from lightning.pytorch.trainer import configuration_validator

# Lightning: the launchers of worker processes; the parent's objects do not change.
from .._compat.lightning import _MultiProcessingLauncher

__all__ = ["check_callbacks", "check_manual_optimization"]

# Lightning: lightning.pytorch.trainer.configuration_validator.__verify_manual_optimization_support
_verify_manual_optimization = getattr(configuration_validator, "__verify_manual_optimization_support")


def check_manual_optimization(trainer: Trainer, module: LightningModule) -> None:
    """Checks, before the run creates any folder, that no flag conflicts with manual optimization.

    Raises:
        MisconfigurationException: Lightning's error about gradient clipping or accumulation.
    """
    _verify_manual_optimization(trainer, module)


def check_callbacks(callbacks: Iterable[Callback], *, launcher: Any, global_batch_size: int | None) -> None:
    """Checks that each of `callbacks` can have an effect.

    Args:
        callbacks: callbacks of a run.
        launcher: launcher of the strategy.
        global_batch_size: the flag; None if it is not set.

    Raises:
        ValueError: one of them has no effect, or spoils another's; the message has the remedy.
    """
    callbacks = list(callbacks)
    swapping = [type(callback).__name__ for callback in callbacks if isinstance(callback, WeightAveraging)]
    if len(swapping) > 1:
        raise ValueError(
            f"{' and '.join(swapping)} would each swap the module's weights for their own average in a validation, and"
            " swap each other's back: leave one of them."
        )
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and global_batch_size is not None:
            raise ValueError(
                f"GradientAccumulationScheduler changes how many micro-batches a step has, which"
                f" global_batch_size={global_batch_size} decides: leave one of them out."
            )
        # Lightning: Tuner makes LearningRateFinder and BatchSizeFinder end the run, and reads their results.
        if getattr(callback, "_early_exit", False) and isinstance(launcher, _MultiProcessingLauncher):
            raise ValueError(
                "Tuner can't read what worker processes have found: choose a strategy without the suffix _spawn, _fork"
                f" or _notebook, or give the callback {type(callback).__name__} to the run that trains."
            )
