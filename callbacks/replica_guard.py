"""`ReplicaGuard`: stops a run whose ranks should have the same weights but do not.

Phases of a check, after the first two optimizer steps and then at each logging interval:
1. each rank computes the norm and the sum of each of its parameters in float64, without copying them;
2. one all-gather of these, 16 bytes and a name per parameter and rank, for which the ranks wait;
3. each rank compares the figures of the ranks that must have the same tensor.
The check changes no state and draws no random numbers: the weights are bitwise those of a run without it.
"""

import logging
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from polyphase.engine.data.uneven import UnevenTrainLoader
from polyphase.engine.distributed.digests import digests, unequal_replicas
from polyphase.engine.distributed.object_group import WORLD
from polyphase.engine.strategies import adapt

__all__ = ["ReplicaError", "ReplicaGuard", "why_not"]

_FIRST_STEPS = 2
_INTERVAL_STEPS = 50
"""Optimizer steps between two checks if `log_every_n_steps=0` turns logging off."""

log = logging.getLogger("polyphase.callbacks")


class ReplicaError(RuntimeError):
    """A parameter that must be the same on several ranks differs between them."""


class ReplicaGuard(Callback):
    """Compares the parameters that must be equal on several ranks: all under `ddp`, the unsplit ones under `tp`.

    It detects weights that diverge between ranks. It does not see errors that all ranks share: use `polyphase verify`.

    Raises:
        ReplicaError: after an optimizer step; names the first parameter that differs. Diverged ranks do not become
            equal again, so further steps would be wasted.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self._reason: str | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Determines whether the ranks have anything to compare; logs the reason if not."""
        self._first = self._step = trainer.global_step
        self._reason = why_not(trainer)
        if self._reason and trainer.is_global_zero:
            log.info("ReplicaGuard compares nothing: %s.", self._reason)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Checks if the interval ends here."""
        step = trainer.global_step
        if self._reason or step == self._step:
            return
        self._step = step
        interval = trainer.log_every_n_steps or _INTERVAL_STEPS  # type: ignore[attr-defined]
        if step - self._first <= _FIRST_STEPS or step % interval == 0:
            self.num_checks += 1
            _check(pl_module)


def why_not(trainer: Trainer) -> str | None:
    """Returns the reason why ranks have nothing to compare; None if they have."""
    strategy = adapt(trainer.strategy)
    if trainer.world_size == 1:
        return "there is one rank"
    can = strategy.capabilities
    if not can.replicas_stay_equal or not strategy.expects_parity:
        return "this strategy does not keep ranks equal after each step"
    loses_ranks = any(strategy.can_lose(rank) for rank in range(trainer.world_size))
    if strategy.layout.pp > 1 or strategy.layout.shard > 1 or can.optimizer_state_partitioned or loses_ranks:
        return "it knows only `ddp` and `tp`"
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader, UnevenTrainLoader):
        return "ranks may have different numbers of batches, so that one could wait for the others in vain"
    if not dist.is_initialized() or dist.get_world_size() != strategy.layout.world_size:
        return "the ranks have no process group in common"
    return None


def _check(module: LightningModule) -> None:
    unequal = unequal_replicas(WORLD.all_gather_object(digests(module.named_parameters()).on_host()), tolerance=0)
    if unequal:
        name, text = unequal[0]
        more = f" and {len(unequal) - 1} more" if len(unequal) > 1 else ""
        raise ReplicaError(
            f"ranks no longer have the same weights of {type(module).__name__}: {name!r}{more} differ ({text}). The"
            " cause may be a gradient that was not reduced, or code that changes weights on one rank. `polyphase"
            " verify`, with the same model, data and strategy, finds the step and the tensor at which the run first"
            " differs from a run in one process."
        )
