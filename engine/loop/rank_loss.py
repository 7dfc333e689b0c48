"""`on_rank_loss="continue"`: training goes on in the same processes when a signal has ended the process of a rank.

It is a resumption with fewer ranks, from memory. A collective of the step raises on the ranks that are left; they

1. end their process groups, so that the ranks raise as well that wait for one of them rather than for the lost one;
2. say in the job's store, which is in the launcher's process, how many steps they have made. The first of them decides
   who is left, once each rank has either spoken or ended; one that does neither in time is killed;
3. meet under a new generation: another prefix in the store, other numbers of the ranks, a new process group, the same
   `DistributedDataParallel` with a new reducer. If another rank ends meanwhile, all of this begins again;
4. give the state after the step to those that lost it in its last all-reduce, if some had received all of the averages;
5. return to the beginning of the step otherwise (`step_start.py`), and divide its samples, and all that follow, among
   themselves: the global batch stays, and micro-batches are accumulated instead.

A rank that is not left has no way back: it has been killed, or ends when it reads the decision.

When a process of another machine has ended, that machine's kernel refuses connections to its port. A rank that is
silent, or whose machine is, is declared lost by the watchdog of another one, in the store: all ranks read that, and one
that reads it of itself ends. The store is in the launcher of node 0. So of two parts of a job that can't reach each
other, one has the store and goes on; ranks without it end, and can't declare others lost.

Between two steps, until the next one has a batch, nothing can be returned to: hooks have been called, on some ranks. So
the collectives of all ranks go through the store there, where what was written stays: either all ranks have the values
of all, or none has, and those that are left repeat this one collective. A validation and a save are repeated from their
beginning, on all of them or on none, by such a collective at their end; so is an exchange of ranks that train apart, at
the end of a step. A collective that is not the engine's, as of a user's hook, ends the run.

Ranks that train apart notice a loss at different steps. Each says at which one it is, before its next step, and goes on
to the largest of these numbers, where all of this begins.

Blocks in 2 to 4 only. Without a loss, each step copies the module's buffers and random state, and sends nothing.
"""

import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor

from .._compat.lightning import _DataLoaderIterDataFetcher
from ..distributed.agreement import Agreement, LostRankError
from ..distributed.connections import cut_connections
from ..distributed.environment import note_lost_machine, set_outlived
from ..distributed.job_store import Fields, JobStore
from ..distributed.object_group import gather_otherwise
from ..distributed.waits import waiting
from ..reliability.failure import is_of_connection, print_rank
from ..reliability.rendezvous import RankRegistry, current_job, in_words
from ..strategies import adapt
from ..strategies.step_guard import StepSnapshot, needs_closure
from .rank_loss_checks import refusal
from .step_start import StepStart

__all__ = ["LostRanks", "RankLoss", "RankLossError"]

log = logging.getLogger("polyphase.engine")

_NOTICE_S = 3.0
"""The longest time after a failed collective until a rank's process is seen to have ended; otherwise it is no loss."""
_ANSWER_S = 300.0
"""The longest time for a rank to say where it is: it raises at the end of its micro-batch. Then it is killed. It is at
most half of `hang_timeout_s`, after which those that wait for it would count as hung."""
_TICK_S = 0.005
_WATCH_MS = 500
"""How long the thread that waits for ends of processes may take to see that the run is over."""
_MOST_LOSSES, _WITHIN_S = 3, 600.0
"""More losses than this in that time are no accident: a step that needs too much memory would kill one rank after the
other, each time with larger shares."""

_WORD: Fields = {"steps": int, "samples": int, "altered": bool}
_DECISION: Fields = {"by": int, "ranks": list[int], "steps": int, "samples": int, "source": int, "ends": str}
_PLACE: Fields = {"steps": int}
_GONE: Fields = {"by": int, "ranks": list[int]}
_PROBE_S = 0.1
_MOST_PROBED = 8
"""The ranks of other machines that one rank probes after a failed collective: others probe others."""


class LostRanks(NamedTuple):
    """A loss, after which training has gone on."""

    ranks: list[int]
    """The lost ranks, by the numbers that they had when the run began."""
    step: int
    """The number of optimizer steps that the run had made."""
    num_left: int
    duration_s: float
    """From the failed collective until training went on."""
    num_repeated: int
    """Samples of the next step that the ranks left had computed by then, and computed again; fillers count, too."""
    snapshot_step: int | None = None
    """The step of the snapshot from which training went on; None: it went on from the step itself."""

    def __str__(self) -> str:
        repeated = f", {self.num_repeated} samples computed again" if self.num_repeated else ""
        source = "" if self.snapshot_step is None else f" from step {self.snapshot_step}"
        return (
            f"{in_words(self.ranks)} lost after step {self.step}, {self.num_left} left: went on{source} after"
            f" {self.duration_s:.2f} s{repeated}"
        )


class RankLossError(RuntimeError):
    """The run can't go on without the lost rank."""


# --- a run


class RankLoss:
    """Takes a run on after the loss of ranks; one for each rank.

    Args:
        trainer: the trainer of the run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self.events: list[LostRanks] = []
        """The losses of this run."""
        self.watchdog: Any = None
        """The watchdog of the run."""
        self._registry: RankRegistry | None = None
        """All ranks of the beginning, by the numbers that they had then, as all of `_members` and `_me`."""
        self._members: list[int] = []
        self._me = 0
        self._devices: list[Any] = []
        self._ranks_of_node = 1
        self._generation = 0
        self._start: StepStart | None = None
        self._versions: list[int] = []
        self._is_to_deal = False
        self._times_s: list[float] = []
        self._is_in_epoch = False
        self._loop: Any = None
        self._place: Literal["step", "between", "repeated"] = "step"
        """``"repeated"``: in a validation or a save, which begins again after a loss."""
        self._agreement: Any = None
        """Collectives of the ranks that are left, between two steps."""
        self._meeting_step: int | None = None
        """The step at which the ranks that are left meet, if they step apart; None while none is known to be lost."""
        self._is_cut = False
        """Whether a rank was seen to have ended since the ranks have met."""
        self._gone: list[list[int]] = []
        """Lost ranks of other machines, as they were declared in the store."""
        self._gone_lock = threading.Lock()
        """Held while it is read, or written, by the threads of this rank."""
        self._has_ended = threading.Event()
        self._lock = threading.Lock()
        """Held while connections are cut because of a lost rank, and while the members change."""

    def __getstate__(self) -> dict[str, Any]:
        # A copied trainer takes part in no run.
        return {"_trainer": self._trainer}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["_trainer"])  # type: ignore[misc]

    def begin_epoch(self, fetcher: Any) -> None:
        """Looks up the processes of all ranks, in the first epoch.

        Raises:
            ValueError: the steps of the run can't be made again.
        """
        if self._registry is not None:
            return
        trainer = self._trainer
        if trainer._data_connector.sizes.loader is None or isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise ValueError(refusal("the training data is not one DataLoader", "Give one DataLoader"))
        whole = next((o for o in trainer.optimizers if needs_closure(o)), None)
        if whole is not None:
            reason = f"{type(whole).__name__} changes the weights several times within a step"
            raise ValueError(refusal(reason, "Choose another optimizer"))
        self._begin_run()
        self._agree_by_store()
        adapt(trainer.strategy).repeats = partial(self.repeat, is_in_step=True)

    def _begin_run(self) -> None:
        job = current_job()
        assert job is not None
        self._me, self._members, self.events = job.rank, list(range(job.num_ranks)), []
        self._devices = list(self._trainer.strategy.parallel_devices) * self._trainer.num_nodes
        self._ranks_of_node = job.num_ranks // self._trainer.num_nodes
        self._registry = RankRegistry("losses", job)
        self._registry.look_for_all()
        set_outlived(True)
        self._has_ended.clear()
        self._gone = []
        threading.Thread(target=self._watch, args=(self._registry,), name="polyphase-losses", daemon=True).start()
        if self._elsewhere():
            threading.Thread(target=self._watch_elsewhere, name="polyphase-losses-elsewhere", daemon=True).start()

    def _elsewhere(self) -> list[int]:
        """The members of other machines, beginning with those after this one."""
        assert self._registry is not None
        return [rank for rank in self._registry.elsewhere if rank in self._members]

    def _watch_elsewhere(self) -> None:
        """Learns which ranks of other machines were declared lost, until the run, or the store, has ended."""
        with suppress(RuntimeError):
            while not self._has_ended.wait(_WATCH_MS / 1e3):
                self._read_gone()

    def lose_present(self, ranks: list[int]) -> bool:
        """`lose` by the present numbers of ranks."""
        if self._registry is None or not (self._is_in_epoch or self._place == "repeated"):
            return False
        with suppress(RuntimeError, IndexError):  # the store is lost, or they have just met without these
            self.lose([self._members[rank] for rank in ranks])
            return True
        return False

    def lose(self, ranks: list[int]) -> None:
        """Declares ranks of other machines lost, to all ranks; it ends those that can read it."""
        assert self._registry is not None
        self._read_gone()
        with self._gone_lock:
            while new := [rank for rank in ranks if all(rank not in gone for gone in self._gone)]:
                own = {"by": self._me, "ranks": new}
                self._note_gone(self._registry.job.record_first(self._gone_key(), own, _GONE))

    def _read_gone(self) -> None:
        registry = self._registry
        with self._gone_lock:
            while registry is not None and (said := registry.job.read(self._gone_key(), _GONE)) is not None:
                self._note_gone(said)

    def _gone_key(self) -> str:
        return f"polyphase/losses/gone/{len(self._gone)}"

    def _note_gone(self, said: dict[str, Any]) -> None:
        if self._me in said["ranks"]:
            self._leave([said["by"]])
        with self._lock:
            self._gone.append(said["ranks"])
            if (self._is_in_epoch or self._place == "repeated") and not {*self._members}.isdisjoint(said["ranks"]):
                self._is_cut = True
                cut_connections()

    def _leave(self, others: list[int]) -> None:
        print_rank(self._me, f"ends: {in_words(others)} {'have' if others[1:] else 'has'} gone on without it")
        os.kill(os.getpid(), signal.SIGKILL)  # as the others believe; an exit code would end the run

    def _watch(self, registry: RankRegistry) -> None:
        """Cuts this rank's connections when the process of another one has ended.

        That one's connections may stay open for seconds, in the workers of its loaders.
        """
        poll, ranks = select.poll(), {}
        for rank, process in registry.processes.items():
            if not registry.is_local(rank):
                continue
            with suppress(OSError, AttributeError):  # it has ended already; or the system has no such descriptors
                number = os.pidfd_open(process["pid"])
                poll.register(number, select.POLLIN)
                ranks[number] = rank
        try:
            while not self._has_ended.is_set():
                for number, _ in poll.poll(_WATCH_MS):
                    poll.unregister(number)
                    with self._lock:
                        if (self._is_in_epoch or self._place == "repeated") and ranks[number] in self._members:
                            self._is_cut = True
                            cut_connections()
        finally:
            for number in ranks:
                os.close(number)

    @contextmanager
    def in_epoch(self) -> Iterator[None]:
        """Context of an epoch's steps and validations; after it, a rank whose program is over may end."""
        self._is_in_epoch = True
        try:
            yield
        finally:
            with self._lock:
                self._is_in_epoch = False

    def end_run(self) -> None:
        """Forgets what belongs to one run."""
        self._has_ended.set()
        set_outlived(False)
        self._registry = self._start = self._loop = self._agreement = self._meeting_step = None
        adapt(self._trainer.strategy).repeats = None
        self._enter("step")

    def begin_step(self, loop: Any) -> None:
        """Notes the state that a step changes; called before the first batch of each step."""
        self._loop = loop
        if self._is_cut and adapt(self._trainer.strategy).steps_apart:
            self._meet_at_a_step(loop)
        self._enter("between")
        while self._is_to_deal:  # again if another rank is lost meanwhile
            StepStart(self._trainer, loop).divide(self._deal)
        self._start = StepStart(self._trainer, loop)
        self._trainer._data_connector.data_position.data_sets.mark_step()
        self._versions = self._present_versions()

    def begin_batch(self) -> bool:
        """Called with each batch; returns whether it is to be trained on, and not to be fetched again.

        The first batch of an epoch, or of its rest after a loss, has the order of the samples drawn.
        """
        if self._is_to_deal:  # another rank was lost meanwhile
            return False
        self._enter("step")
        return True

    def deal_epoch(self) -> None:
        """Divides an epoch that has not begun, if ranks were lost since the last step; called before it begins."""
        if self._is_to_deal:
            self._is_to_deal = False
            self._trainer._data_connector.data_position.deal_epoch()

    def _present_versions(self) -> list[int]:
        # torch: each change of a tensor in place counts; the weights of a step that is made again must be as before.
        return [parameter._version for parameter in self._trainer.lightning_module.parameters()]

    def _deal(self, done: int) -> int:
        self._is_to_deal = False
        self._trainer.fit_loop.epoch_loop.begin_again()
        return self._trainer._data_connector.data_position.deal_again(done)

    # --- a loss

    def is_cause_of(self, error: BaseException) -> bool:
        """Whether a step has failed because the process of another rank has ended."""
        return self._registry is not None and self._start is not None and self._comes_from_loss(error)

    def _comes_from_loss(self, error: BaseException) -> bool:
        if not (isinstance(error, LostRankError) or is_of_connection(error)):
            return False
        return bool(self._noticed()) and not self._has_failed()

    def returns_after(self, error: BaseException) -> bool:
        """Whether a run that was interrupted by an error begins again from a snapshot: see `roll_back.py`."""
        return False

    def _lost(self) -> list[int]:
        assert self._registry is not None
        gone = {rank for ranks in self._gone for rank in ranks}
        has_ended = self._registry.has_ended
        return [rank for rank in self._members if rank != self._me and (rank in gone or has_ended(rank))]

    def _noticed(self) -> list[int]:
        """Waits until the process of another rank is seen to have ended: its connections are closed before."""
        deadline = time.monotonic() + _NOTICE_S
        while not (lost := self._lost()) and time.monotonic() < deadline and not self._has_failed():
            self._probe()
            time.sleep(_TICK_S)
        return lost

    def _probe(self) -> None:
        """Looks for ranks of other machines whose processes have ended, or that were declared lost."""
        assert self._registry is not None
        if not (elsewhere := self._elsewhere()):
            return
        self._read_gone()
        if ended := [rank for rank in elsewhere[:_MOST_PROBED] if self._registry.is_gone(rank)]:
            self.lose(ended)
        else:
            time.sleep(_PROBE_S)

    def _has_failed(self) -> bool:
        """Whether a failure is recorded, which ends the run: an exception on another rank, say."""
        job = current_job()
        return job is not None and job.first_failure() is not None

    def recover(self, loop: Any, error: BaseException, *, goes_back: bool = True, is_made: bool = False) -> bool:
        """Goes on with the ranks that are left; returns whether the step that has failed here is made.

        If not, the loop is at the beginning of that step, if it is to go back.

        Args:
            loop: the loop of the epoch.
            error: why the step has failed.
            goes_back: whether it can be made again.
            is_made: whether this rank has made it, and only what follows has failed.

        Raises:
            RankLossError: the run can't go on.
        """
        began_s = time.monotonic()
        trainer, strategy = self._trainer, adapt(self._trainer.strategy)
        # A collective between two steps may be called where gradients are off; a new reducer begins with a backward.
        with trainer.heartbeat.within("regroup"), torch.enable_grad():
            before, was_zero = list(self._members), trainer.is_global_zero
            steps = loop.automatic_optimization.optim_progress.optimizer.step.total.completed
            self._enter("step")
            while True:
                strategy.leave_groups()
                trainer._checkpoint_connector.saver.leave_groups()
                decision = self._decide(steps + is_made, error)
                try:
                    self._meet(decision["ranks"])
                    is_made |= self._share_step(decision, steps + is_made, loop)
                except RuntimeError as again:
                    if not self.is_cause_of(again):
                        raise
                    error = again.with_traceback(None)
                else:
                    break
            self._take_over(loop, is_new_zero=trainer.is_global_zero and not was_zero)
            self._is_to_deal = True
            self._enter("between")  # another loss is noticed by all who draw the order of the samples, or by none
            if goes_back and not is_made:
                assert self._start is not None
                self._start.return_to(self._deal)
                trainer._data_connector.data_position.data_sets.return_to_step()
            lost = [rank for rank in before if rank not in self._members]
            seconds = time.monotonic() - began_s
            event = LostRanks(lost, decision["steps"], len(self._members), seconds, decision["samples"])
            self._tell(
                event,
                "They share the samples of that step, and of all that follow. What the lost rank alone has logged in"
                f" this epoch is left out of the epoch's values.{strategy.loss_in_words(decision['steps'])}",
            )
        return is_made

    def _tell(self, event: LostRanks, consequence: str) -> None:
        """Notes a loss, prints it on rank 0, and calls the hooks `on_rank_loss`."""
        trainer = self._trainer
        self.events.append(event)
        self._times_s.append(time.monotonic())
        if trainer.is_global_zero:
            log.warning("%s. %s", event, consequence)
        for owner in (*trainer.callbacks, trainer.lightning_module):
            if (on_rank_loss := getattr(owner, "on_rank_loss", None)) is not None:
                arguments = () if owner is trainer.lightning_module else (trainer, trainer.lightning_module)
                on_rank_loss(*arguments, event)

    def _meet_at_a_step(self, loop: Any) -> None:
        """Goes on without a lost rank as soon as this rank has made as many steps as the first of those that are left.

        Without a collective in each step, the ranks notice the loss at different steps.
        """
        steps = loop.automatic_optimization.optim_progress.optimizer.step.total.completed
        if self._meeting_step is None:
            self._meeting_step = self._most_steps(steps)
        if steps >= self._meeting_step:
            self.recover(loop, LostRankError(), goes_back=False)

    def _most_steps(self, steps: int) -> int:
        assert self._registry is not None
        job, key = self._registry.job, f"polyphase/losses/{self._generation}"
        job.write(f"{key}/at/{self._me}", {"steps": steps})
        while True:
            lost = self._lost()
            left = [rank for rank in self._members if rank not in lost]
            # One that waits in an exchange, or between two steps, has said so already.
            said = job.read_all([f"{key}/{rank}" for rank in left], _WORD)
            said |= job.read_all([f"{key}/at/{rank}" for rank in left if f"{key}/{rank}" not in said], _PLACE)
            if len(said) == len(left):
                return max(word["steps"] for word in said.values())
            if self._has_failed():
                raise RuntimeError("The connection was closed: another rank has failed.")
            time.sleep(_TICK_S)

    # --- between two steps

    def _agree_by_store(self) -> None:
        assert self._registry is not None
        name = f"polyphase/losses/{self._generation}/between"
        self._agreement = Agreement(
            self._registry.job, name, self._members, self._me, lost=self._lost, has_failed=self._has_failed
        )

    def _enter(self, place: Literal["step", "between", "repeated"]) -> None:
        self._place = place
        gather_otherwise(self._gather if place == "between" and self._registry is not None else None)

    def end_step(self) -> None:
        """Called when a step is complete, before what follows it: validations, saves, the end of an epoch."""
        self._enter("between")

    def _gather(self, value: Any) -> list[Any]:
        """Returns the values of all ranks, in the order of their numbers; those of the ranks left, after a loss."""
        while True:
            try:
                return self._agreement.gather(value)
            except LostRankError as lost:
                failure = lost.with_traceback(None)
            self.recover(self._loop, failure, goes_back=False)

    def repeat(
        self, work: Callable[[], Any], undo: Callable[[], None] = lambda: None, *, is_in_step: bool = False
    ) -> Any:
        """Calls `work` on all ranks; again on those that are left, if one is lost meanwhile.

        Args:
            work: calls `commit` when nothing of it can be repeated any more; else that is done after it.
            undo: called before `work` is called again.
            is_in_step: whether it may be at the end of a step, when weights have changed, rather than between two.
        """
        place = self._place
        if place != "between" and not (is_in_step and place == "step"):  # a save of a hook within a step, say
            return work()
        while self._agreement is not None:
            self._enter("repeated")
            try:
                result = work()
                self.commit()
                self._enter(place)
                return result
            except RuntimeError as error:
                if self._place != "repeated" or not self.is_cause_of(error):
                    raise
                failure = error.with_traceback(None)
            undo()
            self.recover(self._loop, failure, goes_back=False, is_made=place == "step")
        return work()

    def commit(self) -> None:
        """Ends what is repeated after a loss: all ranks have done it.

        Raises:
            LostRankError: one has ended before, so that none has.
        """
        if self._place == "repeated":
            self._agreement.gather(None)
            self._enter("between")

    def check(self) -> None:
        """Called between two batches of a validation, which may be long, and have no collective.

        Raises:
            LostRankError: a rank has ended.
        """
        if self._place == "repeated" and self._is_cut:
            raise LostRankError

    def validate(self, loop: Any) -> None:
        """Runs the validation of a loop; its values and the module's attributes are as before it, if it is repeated."""
        trainer, validation = self._trainer, loop.val_loop
        snapshot = StepSnapshot(trainer.lightning_module, validation._results)
        progress, seen = validation.batch_progress.state_dict(), dict(validation._seen_batches_per_dataloader)
        connector = trainer._logger_connector
        first_loop_iter = connector._first_loop_iter

        def undo() -> None:
            if connector.results is not None:
                connector.end_batch()
            connector._first_loop_iter = first_loop_iter
            snapshot.undo()
            validation.batch_progress.load_state_dict(progress)
            validation._seen_batches_per_dataloader.clear()
            validation._seen_batches_per_dataloader.update(seen)

        self.repeat(validation.run, undo)

    # --- who is left

    def _decide(self, steps: int, error: BaseException) -> dict[str, Any]:
        """Agrees with the other ranks on who is left, and on the last step that any of them has made."""
        assert self._registry is not None
        job, key = self._registry.job, f"polyphase/losses/{self._generation}"
        altered = not self._is_to_deal and self._versions != self._present_versions() and not self._has_stepped(steps)
        samples = 0 if self._start is None or self._has_stepped(steps) else self._start.num_samples
        job.write(f"{key}/{self._me}", {"steps": steps, "samples": samples, "altered": altered})
        deadline = time.monotonic() + min(_ANSWER_S, (self._trainer.hang_timeout_s or math.inf) / 2)
        with waiting("the decision who is left"):
            while (decision := job.read(f"{key}/decision", _DECISION)) is None:
                if self._has_failed():
                    raise error
                lost = self._lost()
                left = [rank for rank in self._members if rank not in lost]
                if left[0] == self._me:
                    words = job.read_all([f"{key}/{rank}" for rank in left], _WORD)
                    if len(words) == len(left):
                        by_rank = {rank: words[f"{key}/{rank}"] for rank in left}
                        job.record_first(f"{key}/decision", self._verdict(by_rank, lost), _DECISION)
                    elif time.monotonic() > deadline:
                        for rank in left:
                            if f"{key}/{rank}" not in words:
                                self._registry.kill(rank)
                                self.lose([rank] if rank in self._elsewhere() else [])
                time.sleep(_TICK_S)
        if self._me not in decision["ranks"]:
            self._leave(decision["ranks"])
        if decision["ends"]:
            raise RankLossError(decision["ends"]) from error
        return decision

    def _has_stepped(self, steps: int) -> bool:
        return self._start is None or steps > self._start.num_steps

    def _verdict(self, words: dict[int, dict[str, Any]], lost: list[int]) -> dict[str, Any]:
        """Decides as the first of the ranks that are left, by what each of them has said."""
        now = time.monotonic()
        num_losses = 1 + sum(now - time_s < _WITHIN_S for time_s in self._times_s)
        most = max(word["steps"] for word in words.values())
        ends = ""
        if num_losses > _MOST_LOSSES:
            ends = (
                f"on_rank_loss='continue': {in_words(lost)} lost, the {num_losses}th loss within"
                f" {_WITHIN_S / 60:.0f} minutes. Processes that are killed one after the other often need more memory"
                " than there is: start again with resume='auto' when you know the cause."
            )
        elif altered := [rank for rank, word in words.items() if word["altered"]]:
            ends = (
                f"on_rank_loss='continue': {in_words(lost)} lost in a step in which {in_words(altered)} had changed"
                " weights before the step was complete (a hook of backward, say), so it can't be made again. Start"
                " again with resume='auto'."
            )
        source = next(rank for rank, word in words.items() if word["steps"] == most)
        samples = sum(word["samples"] for word in words.values() if word["steps"] == most)
        about = {"ranks": list(words), "steps": most, "samples": samples, "source": source}
        return {"by": self._me, **about, "ends": ends}

    def _meet(self, ranks: Sequence[int]) -> None:
        """Connects the ranks that are left under a new generation.

        Raises:
            LostRankError: one of them has ended.
        """
        assert self._registry is not None
        job: JobStore = self._registry.job
        with self._lock:
            self._members, self._generation = list(ranks), self._generation + 1
            self._is_cut, self._meeting_step = False, None
        self._agree_by_store()
        keys = [f"polyphase/losses/{self._generation}/here/{rank}" for rank in ranks]
        rank = self._members.index(self._me)
        job.write(keys[rank], {})
        with waiting("the ranks that are left"):
            while not job.has(*keys):
                if self._lost():
                    raise LostRankError
                time.sleep(_TICK_S)
        store = dist.PrefixStore(f"generation/{self._generation}", job.store.clone())
        adapt(self._trainer.strategy).regroup([self._devices[member] for member in ranks], rank, store)
        self.watchdog.meet_again(len(ranks))
        if len({member // self._ranks_of_node for member in ranks}) * self._ranks_of_node < job.num_ranks:
            note_lost_machine()

    def _share_step(self, decision: dict[str, Any], steps: int, loop: Any) -> bool:
        """Gives the state after the last step that a rank has made to those that have not; returns whether to this."""
        is_behind = steps < decision["steps"]
        trainer = self._trainer
        if not any(trainer.all_ranks.all_gather_bools(is_behind)):
            return False
        parameters: list[Tensor] = list(trainer.lightning_module.parameters())
        own = [parameter.detach() for parameter in parameters], [o.state_dict()["state"] for o in trainer.optimizers]
        values: list[Any] = [own]
        dist.broadcast_object_list(values, group_src=self._members.index(decision["source"]))
        if not is_behind:
            return False
        weights, states = values[0]
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.detach().copy_(weight)
        for optimizer, state in zip(trainer.optimizers, states, strict=True):
            # The groups stay this rank's own: schedulers of this step have yet to change them.
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        return True

    def _take_over(self, loop: Any, *, is_new_zero: bool) -> None:
        """Has the parts of the trainer that know the ranks meet again, and takes the duties of rank 0."""
        trainer, module = self._trainer, self._trainer.lightning_module
        trainer.steering.meet_again()
        trainer._signal_connector.meet_again()
        loop.leave_comparisons()
        loop.val_loop.begin_again()
        if is_new_zero:
            trainer.run_history.take_over()
            trainer._checkpoint_connector.logs.take_over()
            for bar in trainer.callbacks:
                if isinstance(bar, ProgressBar):
                    bar.enable()
                    bar.setup(trainer, module, "fit")
                    bar.on_train_start(trainer, module)
                    bar.on_train_epoch_start(trainer, module)

    def explain(self, error: BaseException) -> None:
        """Prints, on one rank, why training does not go on after a loss."""
        if self._registry is None or isinstance(error, RankLossError) or not is_of_connection(error):
            return
        lost = self._noticed()
        own = {"by": self._me}
        if lost and self._registry.job.record_first("polyphase/losses/explained", own, {"by": int}) == own:
            print_rank(
                self._trainer.global_rank,
                f"on_rank_loss='continue': {in_words(lost)} lost while this rank was in a collective of a hook (its"
                f" phase: {self._trainer.heartbeat.phase!r}), which only the hook could repeat. So the run ends; start"
                " it again with resume='auto'",
            )
