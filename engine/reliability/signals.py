"""Signals, handled by all ranks at the same step without a collective: SIGTERM and Ctrl-C stop, SIGUSR1 saves.

All ranks continue to train until they have agreed on the step at which they stop, through the process group's key-value
store:

1. The signalled rank sets ``requested``. The others check it once a second.
2. From then on each rank, at each boundary between steps, writes the number of the boundary, and *then* checks
   ``frozen``. If it is not set, the rank continues.
3. When all ranks have written, rank 0 sets ``frozen``, *then* reads their numbers, and sets ``stop_at`` to the largest
   number plus one.
4. A rank that finds ``frozen`` set waits for ``stop_at``, and stops at the first boundary that has reached it.
5. Each rank that stops sets ``stopped``. Rank 0, whose process may host the store, exits last.

No rank can have passed ``stop_at``: the number that it wrote before it found ``frozen`` not set was read in 3.
Lightning instead broadcasts a tensor, and reads it back, on every step.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from .._compat.lightning import _SignalConnector
from ..contract import adapt
from ..distributed.job_store import SignedStore
from ..distributed.waits import waiting

__all__ = ["INTERRUPTED", "STOPPED", "Interrupted", "SignalConnector", "SteeredApartError", "Steering"]

log = logging.getLogger("polyphase.engine")

INTERRUPTED, STOPPED = 128 + signal.SIGINT, 128 + signal.SIGTERM
"""The exit codes by which shells report that Ctrl-C, or a request to stop, has ended a process."""
_END_OF_STEP = 2**32 - 1
"""The number of the boundary between two steps; it is greater than any number of evaluated batches."""
_PERIOD_S = 1.0
"""The seconds between two checks whether another rank was asked to stop."""
_STOP = "the stop of all"
"""The name of the wait in reports."""
_STOP_TIMEOUT_S = 30.0
"""The seconds that rank 0 waits until the other ranks have stopped."""


class Interrupted(SIGTERMException, KeyboardInterrupt):
    """All ranks have stopped after the same step because of Ctrl-C; a KeyboardInterrupt for callbacks and callers."""


class _StopConsensus:
    """The ranks' agreement on the boundary at which they stop.

    Args:
        store: the key-value store, shared by all ranks.
        rank: this rank.
        world_size: number of ranks.
        lost: returns the ranks that have ended, if the run continues without them.
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
        self._next_check = 0.0
        self._has_joined = False
        self._stop_at: int | None = None

    def should_stop(self, boundary: int, requested: bool) -> bool:
        """Whether to stop at this boundary; called at each boundary between steps.

        Args:
            boundary: number of the boundary, the same on all ranks, never smaller than the last one.
            requested: whether this rank was asked to stop.
        """
        if not (requested or self._has_joined) and time.monotonic() < self._next_check:
            return False  # nearly always
        if self._stop_at is None and (self._has_joined or self._join(requested)):
            with waiting(_STOP):
                self._negotiate(boundary)
        return self._stop_at is not None and boundary >= self._stop_at

    def leave(self) -> None:
        """Publishes that this rank has stopped; rank 0 waits for the others. Called before the process may end."""
        self._store.set(f"stopped/{self._rank}", "1")
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        with waiting(_STOP):
            while self._rank == 0 and not self._store.check(self._present("stopped")) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _present(self, name: str) -> list[str]:
        """Returns the key ``<name>/<rank>`` of each rank that is not lost."""
        lost = self._lost()
        return [f"{name}/{rank}" for rank in range(self._world_size) if rank not in lost]

    def _join(self, requested: bool) -> bool:
        if requested:
            self._store.set("requested", "1")
        else:
            self._next_check = time.monotonic() + _PERIOD_S
        with waiting(_STOP):  # the store may not answer
            self._has_joined = requested or self._store.check(["requested"])
        return self._has_joined

    def _negotiate(self, boundary: int) -> None:
        self._store.set(f"at/{self._rank}", str(boundary))
        if self._rank == 0:
            places = self._present("at")
            if self._store.check(places):
                self._store.set("frozen", "1")
                self._stop_at = max(int(self._store.get(key)) for key in places) + 1
                self._store.set("stop_at", str(self._stop_at))
        elif self._store.check(["frozen"]):
            self._stop_at = int(self._store.get("stop_at"))  # waits only while rank 0 executes the two lines above


class SignalConnector(_SignalConnector):  # Lightning: Trainer._signal_connector
    """Lightning's connector, whose `received_sigterm` becomes true on all ranks at the same step while they train."""

    requeues = False
    """Whether SLURM's signal saves the job and requeues it."""
    _is_requeued = False
    _is_interrupted = False
    """Whether Ctrl-C was pressed during the training of this run."""
    _can_stop_later = False
    """Whether Ctrl-C waits for the end of a step: a step has been trained, and another one comes."""

    def __init__(self, trainer: Trainer) -> None:
        self._num_runs = self._num_snapshots = 0
        self._snapshot_requested = False
        self._snapshot_agreement: _StopConsensus | None = None
        super().__init__(trainer)

    @property
    def received_sigterm(self) -> bool:
        """Whether this process stops now; Lightning's loops check it after each batch."""
        return self._requested and (self._agreement is None or self._agreed)

    @received_sigterm.setter
    def received_sigterm(self, value: bool) -> None:  # Lightning: set to False by the constructor and at each run
        self._requested = self._agreed = value
        self._agreement: _StopConsensus | None = None

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
        self._is_interrupted = self._can_stop_later = False
        self._process = os.getpid()
        if self.trainer.state.fn == TrainerFn.FITTING and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._register_signal(signal.SIGINT, self._stop_on_ctrl_c)

    def _stop_on_ctrl_c(self, signum: int, frame: Any) -> None:
        """Stops the run between two steps; before the first, after the last and when it is called again, at once.

        Python loses an exception of a handler that is called within a weak reference's callback, for example.
        """
        is_fork = os.getpid() != self._process  # a loader's worker: its parent needs it until the run has stopped
        if self._is_interrupted or not (self._can_stop_later or is_fork):
            signal.default_int_handler(signum, frame)
        self._is_interrupted = self._requested = True
        if not is_fork:
            rank_zero_info("Ctrl-C: the run stops after this step. Press it again to stop at once.")

    def end_training(self) -> None:
        """Called after the last step."""
        self._can_stop_later = False

    def cause_of(self, exception: BaseException) -> BaseException:
        """Returns the exception that ends the run: after Ctrl-C, an interrupt, whatever else failed because of it."""
        if not self._is_interrupted or isinstance(exception, KeyboardInterrupt):
            return exception
        if isinstance(exception, SIGTERMException):
            return Interrupted(INTERRUPTED)
        log.warning("After Ctrl-C, the run ended before the end of the step: %r", exception)
        return KeyboardInterrupt()

    def _agreement_on(self, subject: str) -> _StopConsensus | None:
        fits = self.trainer.state.fn == TrainerFn.FITTING
        if not (fits and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return None
        # torch: the store of the default process group, which has no public name.
        store = dist.PrefixStore(f"polyphase/{subject}", dist.distributed_c10d._get_default_store())
        signed_store = SignedStore(store, dist.get_rank())  # so that other processes can't stop the run
        strategy = adapt(self.trainer.strategy)
        return _StopConsensus(signed_store, dist.get_rank(), dist.get_world_size(), lambda: strategy.lost_ranks)

    def meet_again(self) -> None:
        """Called when ranks were lost, and the others have met again: a request that is not agreed on is made again."""
        self._agreement = self._agreement_on(f"stop/{self._num_runs}")
        self._snapshot_agreement = self._agreement_on(f"snapshot/{self._num_runs}/{self._num_snapshots}")

    def request_snapshot(self) -> None:
        """Makes all ranks save after the same step."""
        self._snapshot_requested = True

    def snapshot_due(self, batches: int) -> bool:
        """Whether all ranks save now; called by the training loop between two steps, as `poll` is."""
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
        """Checks whether to stop; called by the loops between two steps, or two batches of a validation.

        Args:
            batches: number of batches trained on.
            evaluated: number of batches evaluated since then, while a validation runs.
        """
        self._can_stop_later = True
        boundary = (batches << 32) + evaluated
        if self._agreement is not None and not self._agreed and self._agreement.should_stop(boundary, self._requested):
            self._requested = self._agreed = True
            self._agreement.leave()

    # Lightning: _SignalConnector._slurm_sigusr_handler_fn, which saves within the signal handler, in mid-step.
    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        self._is_requeued = True
        self.request_snapshot()

    # Lightning: _SignalConnector._sigterm_notifier_fn, which starts a collective within the signal handler.
    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        log.info("rank %d received signal %s", self.trainer.global_rank, signum)
        launcher = self.trainer.strategy.launcher
        if not self._requested and launcher is not None:
            launcher.kill(signum)
        self._requested = True


# All ranks decide together on all that steers the loop: `trainer.should_stop`, a cancelled epoch, limits of the run.
#
# A rank that left the loop alone would leave the others waiting in a collective. No collective in a step is needed:
#
# 1. A rank on which something steers the loop says so in the job's store, with the number of the batch, and waits until
#    all ranks have said the same. Usually they have, since all have the same reason: they stop at this batch.
# 2. After `_PATIENCE_S`, it is this rank's alone: the others train, and wait for this one. A request to stop is then
#    agreed on as after a signal (`_StopConsensus`), so that all ranks stop a few batches later. Nothing else can be
#    followed: it is an error, by name.
#
# Between epochs, and after a validation, all ranks are at the same place: they compare by one collective.

_PATIENCE_S = 2.0
"""How long a rank waits for the others to do the same: longer than a callback of one rank makes it late."""
# Short beside a step: usually the other ranks say the same at the same batch.
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
        self._consensus: _StopConsensus | None = None
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
            self.meet_again()
        else:
            self._begin_consensus()
        self.compare()

    def meet_again(self) -> None:
        """Called when ranks were lost, and the others have met again; what was not agreed on by then is asked again."""
        self._store = None
        if dist.get_world_size() > 1:
            # torch: the store of the default process group, which has no public name.
            store = dist.distributed_c10d._get_default_store()
            self._store = SignedStore(dist.PrefixStore(f"polyphase/steering/{self._num_runs}", store), dist.get_rank())
        self._begin_consensus()

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
            self._consensus = _StopConsensus(SignedStore(store, ranks[0]), *ranks, lambda: strategy.lost_ranks)

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
