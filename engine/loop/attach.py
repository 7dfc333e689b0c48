"""Puts the engine's loop parts in the place of Lightning's, right after the trainer was built."""

import functools
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

# Lightning: what its own decorator of `Trainer.__init__` reads; for a subclass that one would look for PL_ENGINE_*.
from lightning.pytorch.utilities.argparse import _parse_env_variables

from .data_connector import DataConnector
from .nonfinite import NonFiniteWatch
from .optimization import AutomaticOptimization

__all__ = ["attach", "defaults_from_environment"]


def defaults_from_environment(init: Callable[..., None]) -> Callable[..., None]:
    """Decorates an ``__init__`` so that PL_TRAINER_* variables stand for the arguments that are not given."""

    @functools.wraps(init)
    def with_defaults(self: Trainer, **flags: Any) -> None:
        init(self, **{**vars(_parse_env_variables(Trainer)), **flags})

    return with_defaults


def attach(trainer: Trainer, watch: NonFiniteWatch) -> None:
    """Replaces what differs from Lightning in a trainer that has not run; the parts replaced hold no state yet.

    Args:
        trainer: changed in place.
        watch: sees each loss and gradient norm; also one of the trainer's callbacks.
    """
    trainer._data_connector = DataConnector(trainer)  # Lightning: Trainer._data_connector
    trainer.fit_loop.epoch_loop.automatic_optimization = AutomaticOptimization(trainer, watch)
