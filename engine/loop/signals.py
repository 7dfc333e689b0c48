"""SIGTERM stops all ranks at the same step, without a collective.

A rank that was signalled, and every rank that finds out, goes on training until all have agreed on a step to stop at;
what they say to each other goes through the process group's key-value store:

1. the signalled rank sets ``requested``; the others look for it once a second;
2. from then on each rank writes at each boundary between steps how many batches it has done, *then* looks whether
   ``frozen`` is set, and goes on if it is not;
3. rank 0, once all ranks have written, sets ``frozen``, *then* reads what they wrote, and sets ``stop_at`` to the
   largest number plus one;
4. a rank that finds ``frozen`` waits for ``stop_at``, and stops at the first boundary that has reached it.

No rank can have passed ``stop_at``: what it wrote before it found no ``frozen`` was read in 3. Lightning broadcasts a
tensor, and reads it back, on every step instead.
"""

import logging
import time
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn

__all__ = ["Agreement", "SignalConnector"]

log = logging.getLogger("polyphase.engine")

_PERIOD_S = 1.0
"""How often a rank looks whether another one was asked to stop."""


class Agreement:
    """The ranks' agreement on where to stop.

    Args:
        store: the key-value store all ranks share.
        rank: this process's.
        world_size: number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._ranks = [f"at/{rank}" for rank in range(world_size)]
        self._next_look = 0.0
        self._has_joined = False
        self._stop_at: int | None = None

    def reached(self, batches: int, requested: bool) -> bool:
        """Whether to stop here. Called at each boundary between steps.

        Args:
            batches: number of batches done.
            requested: whether this rank was asked to stop.
        """
        if self._stop_at is None and (self._has_joined or self._join(requested)):
            self._negotiate(batches)
        return self._stop_at is not None and batches >= self._stop_at

    def _join(self, requested: bool) -> bool:
        now = time.monotonic()
        if requested:
            self._store.set("requested", "1")
        elif now < self._next_look:
            return False
        else:
            self._next_look = now + _PERIOD_S
        self._has_joined = requested or self._store.check(["requested"])
        return self._has_joined

    def _negotiate(self, batches: int) -> None:
        self._store.set(self._ranks[self._rank], str(batches))
        if self._rank == 0:
            if self._store.check(self._ranks):
                self._store.set("frozen", "1")
                self._stop_at = max(int(self._store.get(key)) for key in self._ranks) + 1
                self._store.set("stop_at", str(self._stop_at))
        elif self._store.check(["frozen"]):
            self._stop_at = int(self._store.get("stop_at"))  # waits for rank 0's two lines above, for nothing else


class SignalConnector(_SignalConnector):  # Lightning: Trainer._signal_connector
    """Lightning's, whose `received_sigterm` is true on all ranks at the same step while they train."""

    def __init__(self, trainer: Trainer) -> None:
        self._num_runs = 0
        super().__init__(trainer)

    @property
    def received_sigterm(self) -> bool:
        """Whether this process is to stop now. Lightning's loops look at it after each batch."""
        return self._requested and (self._agreement is None or self._agreed)

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:  # Lightning: set to False by the constructor and at each run
        self._requested = self._agreed = value
        self._agreement: Agreement | None = None

    def register_signal_handlers(self) -> None:
        """Called by Lightning when the processes of a run are connected."""
        super().register_signal_handlers()
        self._num_runs += 1
        fits = self.trainer.state.fn == TrainerFn.FITTING
        if fits and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            # torch: the store under the default process group; there is no public way to it.
            store = dist.PrefixStore(f"polyphase/stop/{self._num_runs}", dist.distributed_c10d._get_default_store())
            self._agreement = Agreement(store, dist.get_rank(), dist.get_world_size())

    def look(self, batches: int) -> None:
        """Called by the training loop between two steps, with the number of batches done."""
        if self._agreement is not None and not self._agreed and self._agreement.reached(batches, self._requested):
            self._requested = self._agreed = True

    # Lightning: _SignalConnector._sigterm_notifier_fn starts a collective from within the signal handler.
    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        log.info("rank %d received signal %s", self.trainer.global_rank, signum)
        launcher = self.trainer.strategy.launcher
        if not self._requested and launcher is not None:
            launcher.kill(signum)
        self._requested = True
