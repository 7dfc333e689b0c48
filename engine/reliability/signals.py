"""Signals are acted on by all ranks at the same step, without a collective: SIGTERM stops, SIGUSR1 saves a snapshot.

A rank that was signalled, and every rank that finds out, goes on training until all have agreed on a step to stop at;
what they say to each other goes through the process group's key-value store:

1. the signalled rank sets ``requested``; the others look for it once a second;
2. from then on each rank writes at each boundary between steps the number of that boundary, *then* looks whether
   ``frozen`` is set, and goes on if it is not;
3. rank 0, once all ranks have written, sets ``frozen``, *then* reads what they wrote, and sets ``stop_at`` to the
   largest number plus one;
4. a rank that finds ``frozen`` waits for ``stop_at``, and stops at the first boundary that has reached it;
5. each rank that stops says so, and rank 0, whose process may host the store, exits last.

No rank can have passed ``stop_at``: what it wrote before it found no ``frozen`` was read in 3. Lightning broadcasts a
tensor, and reads it back, on every step instead.
"""

import logging
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from .._compat.lightning import _SignalConnector
from ..distributed.job_store import SignedStore
from ..distributed.waits import waiting
from ..strategies import adapt

__all__ = ["SignalConnector", "StopConsensus"]

log = logging.getLogger("polyphase.engine")

_END_OF_STEP = 2**32 - 1
"""After all batches of a validation."""
_PERIOD_S = 1.0
"""The seconds between two looks of a rank whether another one was asked to stop."""
_STOP = "the stop of all"
"""The name of the wait, in reports."""
_FAREWELL_S = 30.0
"""The seconds that rank 0 waits for a rank that does not get to its stop; a snapshot would wait for it as well."""


class StopConsensus:
    """The ranks' agreement on where to stop.

    Args:
        store: the key-value store all ranks share.
        rank: this process's.
        world_size: number of ranks.
        lost: the ranks without which the run goes on.
    """

    def __init__(
        self,
        store: dist.Store | SignedStore,
        rank: int,
        world_size: int,
        lost: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._lost = lost
        self._next_look = 0.0
        self._has_joined = False
        self._stop_at: int | None = None

    def should_stop(self, place: int, requested: bool) -> bool:
        """Whether to stop here. Called at each boundary between steps.

        Args:
            place: number of the boundary, the same on all ranks and never smaller than the last.
            requested: whether this rank was asked to stop.
        """
        if self._stop_at is None and (self._has_joined or self._join(requested)):
            with waiting(_STOP):
                self._negotiate(place)
        return self._stop_at is not None and place >= self._stop_at

    def leave(self) -> None:
        """Called by each rank that has stopped, before its process may end."""
        self._store.set(f"stopped/{self._rank}", "1")
        deadline = time.monotonic() + _FAREWELL_S
        with waiting(_STOP):
            while self._rank == 0 and not self._store.check(self._present("stopped")) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _present(self, word: str) -> list[str]:
        """The keys of what the ranks say, without those that are lost."""
        lost = self._lost()
        return [f"{word}/{rank}" for rank in range(self._world_size) if rank not in lost]

    def _join(self, requested: bool) -> bool:
        now = time.monotonic()
        if requested:
            self._store.set("requested", "1")
        elif now < self._next_look:
            return False
        else:
            self._next_look = now + _PERIOD_S
        with waiting(_STOP):  # once a second: the store may not answer
            self._has_joined = requested or self._store.check(["requested"])
        return self._has_joined

    def _negotiate(self, place: int) -> None:
        self._store.set(f"at/{self._rank}", str(place))
        if self._rank == 0:
            places = self._present("at")
            if self._store.check(places):
                self._store.set("frozen", "1")
                self._stop_at = max(int(self._store.get(key)) for key in places) + 1
                self._store.set("stop_at", str(self._stop_at))
        elif self._store.check(["frozen"]):
            self._stop_at = int(self._store.get("stop_at"))  # waits for rank 0's two lines above, for nothing else


class SignalConnector(_SignalConnector):  # Lightning: Trainer._signal_connector
    """Lightning's, whose `received_sigterm` is true on all ranks at the same step while they train."""

    requeues = False
    """Whether a signal of SLURM's has the job saved and started again."""
    _is_requeued = False

    def __init__(self, trainer: Trainer) -> None:
        self._num_runs = self._num_snapshots = 0
        self._snapshot_requested = False
        self._snapshot_agreement: StopConsensus | None = None
        super().__init__(trainer)

    @property
    def received_sigterm(self) -> bool:
        """Whether this process is to stop now. Lightning's loops look at it after each batch."""
        return self._requested and (self._agreement is None or self._agreed)

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:  # Lightning: set to False by the constructor and at each run
        self._requested = self._agreed = value
        self._agreement: StopConsensus | None = None

    def register_signal_handlers(self) -> None:
        """Called by Lightning when the processes of a run are connected."""
        super().register_signal_handlers()
        self._num_runs += 1
        self._agreement = self._agreement_on(f"stop/{self._num_runs}")
        self._num_snapshots = 0
        self._snapshot_requested = False
        self._snapshot_agreement = self._agreement_on(f"snapshot/{self._num_runs}/0")
        environment = self.trainer._accelerator_connector.cluster_environment
        self.requeues = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        takes_snapshots = any(hasattr(callback, "on_train_step_end") for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        if takes_snapshots and not self._has_already_handler(signal.SIGUSR1):
            self._register_signal(signal.SIGUSR1, lambda *_: self.request_snapshot())

    def _agreement_on(self, subject: str) -> StopConsensus | None:
        fits = self.trainer.state.fn == TrainerFn.FITTING
        if not (fits and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        # torch: the store under the default process group; there is no public way to it.
        store = dist.PrefixStore(f"polyphase/{subject}", dist.distributed_c10d._get_default_store())
        words = SignedStore(store, dist.get_rank())  # whoever else writes there stops nothing
        strategy = adapt(self.trainer.strategy)
        return StopConsensus(words, dist.get_rank(), dist.get_world_size(), lambda: strategy.lost_ranks)

    def request_snapshot(self) -> None:
        """Asks all ranks to save after the same step."""
        self._snapshot_requested = True

    def snapshot_due(self, batches: int) -> bool:
        """Whether all ranks are to save now. Called by the training loop between two steps, as `poll` is."""
        due = self._snapshot_requested
        if self._snapshot_agreement is not None:
            due = self._snapshot_agreement.should_stop(batches, self._snapshot_requested)
        if due:
            self._snapshot_requested = False
            self._num_snapshots += 1
            self._snapshot_agreement = self._agreement_on(f"snapshot/{self._num_runs}/{self._num_snapshots}")
            if self._is_requeued:
                super()._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
        return due

    def poll(self, batches: int, evaluated: int = _END_OF_STEP) -> None:
        """Called by the loops between two steps, or two batches of a validation.

        Args:
            batches: number of batches trained on.
            evaluated: number of batches evaluated since, if it is not over.
        """
        place = (batches << 32) + evaluated
        if self._agreement is not None and not self._agreed and self._agreement.should_stop(place, self._requested):
            self._requested = self._agreed = True
            self._agreement.leave()

    # Lightning: _SignalConnector._slurm_sigusr_handler_fn saves from within the signal handler, in mid-step.
    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        self._is_requeued = True
        self.request_snapshot()

    # Lightning: _SignalConnector._sigterm_notifier_fn starts a collective from within the signal handler.
    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        log.info("rank %d received signal %s", self.trainer.global_rank, signum)
        launcher = self.trainer.strategy.launcher
        if not self._requested and launcher is not None:
            launcher.kill(signum)
        self._requested = True
