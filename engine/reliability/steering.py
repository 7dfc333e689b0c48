"""All ranks decide together on all that steers the loop: `trainer.should_stop`, a cancelled epoch, limits of the run.

A rank that left the loop alone would leave the others waiting in a collective. No collective in a step is needed:

1. A rank on which something steers the loop says so in the job's store, with the number of the batch, and waits until
   all ranks have said the same. Usually they have, since all have the same reason: they stop at this batch.
2. After `_PATIENCE_S`, it is this rank's alone: the others train, and wait for this one. A request to stop is then
   agreed on as after a signal (`StopConsensus`), so that all ranks stop a few batches later. Nothing else can be
   followed: it is an error, by name.

Between epochs, and after a validation, all ranks are at the same place: they compare by one collective.
"""

import logging
import time
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from ..contract import adapt
from ..distributed.job_store import SignedStore
from ..distributed.waits import waiting
from .signals import StopConsensus

__all__ = ["SteeredApartError", "Steering"]

log = logging.getLogger("polyphase.engine")

_PATIENCE_S = 2.0
"""How long a rank waits for the others to do the same: longer than a callback of one rank makes it late."""
_TICK_S = 0.002

_OF_TRAINER = ("accumulate_grad_batches", "check_val_every_n_epoch", "limit_train_batches", "limit_val_batches")
_OF_FIT_LOOP = ("max_epochs", "min_epochs")
_OF_EPOCH_LOOP = ("max_steps", "min_steps")
_NAMES = (*_OF_TRAINER, *_OF_FIT_LOOP, *_OF_EPOCH_LOOP)
_limits_of = attrgetter(
    *_OF_TRAINER,
    *(f"fit_loop.{name}" for name in _OF_FIT_LOOP),
    *(f"fit_loop.epoch_loop.{name}" for name in _OF_EPOCH_LOOP),
)


class SteeredApartError(RuntimeError):
    """A rank has steered its loop in a way that the other ranks can't follow."""


class Steering:
    """The agreement of the ranks of a run on what steers their loops.

    Args:
        trainer: the trainer of the loops.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._num_runs = self._num_stops = 0
        self._store: SignedStore | None = None
        self._consensus: StopConsensus | None = None
        self._is_asked = self._is_agreed = False
        self._keeps_step = True
        self._limits: tuple[Any, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        # A copied trainer takes part in no run.
        return {**vars(self), "_store": None, "_consensus": None}

    def begin_run(self) -> None:
        """Called by all ranks when training begins."""
        self._num_runs += 1
        self._num_stops = 0
        self._store = None
        self._is_asked = self._is_agreed = False
        self._keeps_step = adapt(self._trainer.strategy).capabilities.keeps_step
        if self._trainer.world_size > 1 and dist.is_available() and dist.is_initialized():
            # torch: the store of the default process group, which has no public name.
            store = dist.distributed_c10d._get_default_store()
            self._store = SignedStore(dist.PrefixStore(f"polyphase/steering/{self._num_runs}", store), dist.get_rank())
        self._begin_consensus()
        self.compare()

    def end_run(self) -> None:
        """Called when training ends."""
        self._store = self._consensus = None

    def compare(self) -> None:
        """Called between epochs and after a validation, by all ranks; any of them may stop the run."""
        if self._store is None:
            return
        trainer = self._trainer
        self._limits = _limits_of(trainer)
        if not self._keeps_step:  # the ranks are at different places
            self.after_batch(trainer.fit_loop.epoch_loop.batch_progress.total.ready)
            return
        of_ranks = trainer.all_ranks.all_gather_object((bool(trainer.should_stop), self._is_asked, self._limits))
        for name, *values in zip(_NAMES, *(limits for _, _, limits in of_ranks), strict=True):
            if any(value != values[0] for value in values):
                raise SteeredApartError(
                    f"`{name}` is {', '.join(map(str, values))} on the ranks 0 to {len(values) - 1}: a callback has"
                    " changed it on some of them. Change it on all ranks alike."
                )
        if any(stops or is_asked for stops, is_asked, _ in of_ranks):
            self._agree()

    def after_batch(self, batches: int) -> None:
        """Called after the hooks at the end of each batch of training.

        Args:
            batches: number of batches trained on.
        """
        trainer, consensus = self._trainer, self._consensus
        if consensus is None:
            return
        if self._keeps_step and (limits := _limits_of(trainer)) != self._limits:
            self._limits = limits
            values = ", ".join(f"{name}={value}" for name, value in zip(_NAMES, limits, strict=True))
            if not self._all_say(f"limits/{batches}/{values}"):
                raise SteeredApartError(
                    f"rank {dist.get_rank()} has other limits of the run than the other ranks after batch {batches}"
                    f" ({values}): a callback has changed one of them. Change it on all ranks alike."
                )
        if trainer.should_stop and not self._is_agreed:
            if self._all_say(f"stop/{batches}"):
                self._agree()
                return
            log.info("rank %d asks to stop after batch %d; all ranks stop soon", dist.get_rank(), batches)
            self._is_asked, trainer.should_stop = True, False
        if not self._is_agreed and consensus.should_stop(batches, self._is_asked):
            self._agree()

    def cancel_epoch(self, batches: int) -> None:
        """Called when `on_train_batch_start` has returned -1, which ends the epoch.

        Raises:
            SteeredApartError: other ranks go on with the epoch.
        """
        if self._store is not None and not self._all_say(f"cancel/{batches}"):
            raise SteeredApartError(
                f"`on_train_batch_start` has returned -1 on rank {dist.get_rank()} before batch {batches}, and not on"
                " all ranks: those that train on the batch would wait for this one. Return -1 on all ranks alike, or"
                " set `trainer.should_stop`, which one rank may do for all."
            )

    def _agree(self) -> None:
        self._trainer.should_stop, self._is_agreed, self._is_asked = True, True, False
        self._num_stops += 1
        self._begin_consensus()

    def _begin_consensus(self) -> None:
        self._consensus = None
        if self._store is not None:
            strategy = adapt(self._trainer.strategy)
            store = dist.PrefixStore(
                f"polyphase/should_stop/{self._num_runs}/{self._num_stops}",
                dist.distributed_c10d._get_default_store(),
            )
            ranks = dist.get_rank(), dist.get_world_size()
            self._consensus = StopConsensus(SignedStore(store, ranks[0]), *ranks, lambda: strategy.lost_ranks)

    def _all_say(self, what: str) -> bool:
        """Whether all ranks say `what`, this one by this call; the first of them that gives up decides for all."""
        store = self._store
        assert store is not None
        store.set(f"{what}/{dist.get_rank()}", "1")
        lost = adapt(self._trainer.strategy).lost_ranks
        ranks = [rank for rank in range(dist.get_world_size()) if rank not in lost]
        # The first of them looks whether all have, and the others at what it has found: a key each.
        verdict = f"{what}/verdict"
        keys = [f"{what}/{rank}" for rank in ranks] if dist.get_rank() == ranks[0] else [verdict]
        deadline = time.monotonic() + _PATIENCE_S
        with waiting("the other ranks' decision"):
            while not (is_known := store.check(keys)) and time.monotonic() < deadline:
                time.sleep(_TICK_S)
        return store.set_first(verdict, "yes" if is_known else "no") == "yes"
