"""Puts the engine's loop parts in the place of Lightning's, right after the trainer was built."""

from lightning.pytorch import Trainer

# Lightning: the decorator by which PL_TRAINER_* variables become arguments.
from lightning.pytorch.utilities.argparse import _defaults_from_env_vars as defaults_from_environment

from .data_connector import DataConnector
from .nonfinite import NonFiniteWatch
from .optimization import AutomaticOptimization

__all__ = ["attach", "defaults_from_environment"]


def attach(trainer: Trainer, watch: NonFiniteWatch) -> None:
    """Replaces what differs from Lightning in a trainer that has not run; the parts replaced hold no state yet.

    Args:
        trainer: changed in place.
        watch: sees each loss and gradient norm; also one of the trainer's callbacks.
    """
    trainer._data_connector = DataConnector(trainer)  # Lightning: Trainer._data_connector
    trainer.fit_loop.epoch_loop.automatic_optimization = AutomaticOptimization(trainer, watch)
