"""Ends a run that gets no further: by a thread in each process, while the trainer's own one can wait for ever.

Each second, each rank
1. publishes where it is (one `set`), and looks whether a failure is on record (one `check`);
2. where it has stood still since the last second, looks for its peers. It puts a failure on record if one's process is
   gone, or has not been heard of for long while this one waits in a collective (on an accelerator: wherever it stands);
   or if this rank has stood in one place for `timeout_s`.
3. A failure on record has every rank print and publish its stack. The one that recorded it names the culprit, writes
   the report and publishes the verdict; then all end with exit code 1, so that a launcher starts them again.

All of that goes through the job's store, from before the ranks are connected until the run is over. Where the store is
gone, or leaves a call unanswered for too long, each rank that stands still ends by itself, with a report of its own.
While a call waits for its answer, what this rank can judge alone is judged (`_gives_up`).

The culprit is the rank that is gone, or has not come; else the one that does not answer, else the one with the smallest
progress, else the one that waits for nobody. Time in which the thread itself did not run (a machine that was suspended)
does not count, nor does time under a debugger.
"""

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from ..distributed.job_store import FIRST_FAILURE
from ..distributed.store_calls import PATIENCE_S, StoreLostError, end_threads
from ..launch.detection import launcher_name
from ..strategies import adapt
from .failure import SEEN, Report, print_rank
from .hard_exit import hard_exit, started_ranks
from .heartbeat import Heartbeat, describe
from .lost_hosts import DIED, HOST_LOST, because, blame, gone_silent, store_lost
from .observer import delay_the_kill
from .parent import watch_parent
from .rank_registry import LEFT, RankRegistry, this_process
from .rendezvous import current_job, missing_ranks
from .stack_answers import StackAnswers
from .wakeup import Wakeup

__all__ = ["Watchdog"]

_PERIOD_S = 1.0
_MEETING_PERIOD_S = 0.1
"""The period until the ranks have heard of each other, if they are not too many for the store."""
_MOST_BEATS_PER_S = 640.0
"""The most beats of all ranks together, until then; afterwards each has one per period."""
_STORE_LOST_S = 3.0
"""The time that a rank waits in a collective after the store is gone; its own error would say more."""
_ANSWER_S = 3.0
"""The time that the ranks have to answer. A process that holds Python's lock for that long can't."""
_VERDICT_S = 8.0
"""The time that a rank waits for the verdict, or for its own exception after another rank's."""
_SILENCE_S = (10.0, PATIENCE_S)
"""A peer of another machine counts as gone after the timeout, but not before the first nor later than the second."""
_MUTE_S = 60.0
"""The same of one whose process lives: opening a large pickle holds Python's lock for tens of seconds."""
_ENDING_S = 5.0
"""The time that another machine may be silent once this process was asked to end."""
_PARENT_S = 8.0
"""The time that this process outlives the one that has started it, to find out what has become of it."""
_SLOW_START = 3.0
"""The factor of the time in one place until the second batch: downloads, checkpoints, compilation."""

_COMING_S = 60.0
"""The least time that the ranks that have come wait for the others: these may still import what they need."""

_runs = itertools.count()


class Watchdog:
    """Watches one run of one process.

    Args:
        heartbeat: where this process is.
        timeout_s: how long it may stand in one place; None for ever.
        folder: for the failure report.
        world_size: number of ranks; one has nobody to tell.
        strategy: says which ranks the run can go on without; None: without none.
        answers: whom to have look for questions; None: nobody can ask.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        timeout_s: float | None,
        folder: str,
        world_size: int,
        strategy: Any = None,
        answers: StackAnswers | None = None,
    ) -> None:
        self.heartbeat = heartbeat
        self.folder = folder
        self.peers: RankRegistry | None = None
        """The other ranks, from when the processes are connected."""
        self._timeout_s = timeout_s
        self._silence_s = min(max(_SILENCE_S[0], timeout_s or _SILENCE_S[1]), _SILENCE_S[1])
        self.world_size = world_size
        self._strategy = adapt(strategy)
        self._can_lose: Callable[[int], bool] = self._strategy.can_lose
        self._go_on_without: Callable[[list[int]], bool] = self._strategy.go_on_without
        self._answers = answers
        self._may_lose_some = any(map(self._can_lose, range(world_size)))
        # The same on all ranks, since they all run the same; runs that only one rank has are not counted.
        self._run = str(next(_runs)) if world_size > 1 else ""
        self._place: dict[str, Any] = {}
        self._clock = self._since = self._before = 0.0
        self._failed_at: float | None = None
        self._lost_at: float | None = None
        self._loss: RuntimeError | None = None
        self._has_warned = self._is_ending = self._has_stumbled = False
        self.first_failure: dict[str, Any] | None = None
        """The exception of another rank that is on record, once it was seen there."""
        self._wakeup = Wakeup()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="polyphase-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch the thread that calls this."""
        self.heartbeat.begin()
        self.heartbeat.known = self.known
        watch_parent(self.heartbeat.rank, _PARENT_S)
        delay_the_kill(self.heartbeat.rank, self._can_lose)
        self._wakeup.begin()
        if self._answers is not None:
            self._answers.open()
        self._thread.start()

    def stop(self) -> None:
        """Stops, and tells the others that this rank is not to be waited for."""
        self._stop.set()
        self._thread.join(2 * _PERIOD_S)
        end_threads()
        self._wakeup.end()
        if self._answers is not None:
            self._answers.close()
        self.heartbeat.known = None

    @property
    def was_asked_to_end(self) -> bool:
        """Whether SIGTERM has come to this process, since the watchdog was started and until it was stopped."""
        return self._wakeup.was_asked_to_end()

    def wait_for_verdict(self) -> None:
        """Called where the trainer's thread has failed: if the run is being ended here, that is all there is to say."""
        if self._is_ending:
            self._thread.join(_VERDICT_S)

    def known(self, **of_this: Any) -> dict[int, dict[str, Any]]:
        """Returns the positions of all ranks, as far as is known here; `of_this`: arguments of this one's report."""
        peers = self.peers
        own_report = {self.heartbeat.rank: {**this_process(), **self.heartbeat.report(**of_this)}}
        return {**peers.beats(), **own_report} if peers else own_report

    def _watch(self) -> None:
        self._before = time.monotonic()
        while not self._stop.wait(self._period_s()):
            self._tick()
            try:
                self._look()
                self._answer_questions()
            except Exception:  # a run that nobody watches is worse than one that is watched by halves
                self._stumble()
        if self.peers is not None and self.first_failure is None:
            with suppress(RuntimeError):
                self.peers.beat({**self.heartbeat.report(), "phase": LEFT})

    def _period_s(self) -> float:
        has_met = self.peers is not None and len(self.peers.processes) == len(self.peers.others)
        if has_met or self.world_size == 1:
            return _PERIOD_S
        return min(_PERIOD_S, max(_MEETING_PERIOD_S, self.world_size / _MOST_BEATS_PER_S))

    def _tick(self) -> None:
        now = time.monotonic()
        self._clock += min(now - self._before, _PERIOD_S)
        self._before = now

    def _stands(self) -> tuple[dict[str, Any], float]:
        """Returns the report of this rank's position, and for how long it has been there."""
        report, place = self.heartbeat.report(), self.heartbeat.place()
        if place != self._place or report["is_debugged"]:
            self._place, self._since, self._has_warned = place, self._clock, False
        return report, self._clock - self._since

    def _may_wait(self, report: dict[str, Any]) -> bool:
        """Whether this rank waits for others if it stands still.

        On an accelerator no call of its thread may say so: collectives are launched, and the thread waits where it next
        reads a number of the device, in `.item()` say.
        """
        device = self._strategy.root_device
        return report["pending"] is not None or (device is not None and device.type != "cpu")

    def _is_too_long(self, still_s: float) -> bool:
        slow = _SLOW_START if self._place["batch"] < 2 else 1.0
        return self._timeout_s is not None and still_s >= self._timeout_s * slow

    def _look(self) -> None:
        report, still_s = self._stands()
        if self.world_size > 1 and self._lost_at is None:
            try:
                self._among_peers(report, still_s)
            except RuntimeError as error:  # the store's host is gone, or silent
                self._loss, self._lost_at = error, self._clock
                report, still_s = self._stands()
        if self._lost_at is not None:
            self._without_store(report, still_s, self._lost_at)
        if self._is_too_long(still_s):
            self._hang(report, still_s)

    def _gives_up(self) -> bool:
        """Called each second while the store leaves a call unanswered: whether to go on without it."""
        if threading.current_thread() is not self._thread or self.peers is None:
            return False
        self._tick()
        report, still_s = self._stands()
        unanswered_s = self.peers.job.line.waited_s
        is_to_end = self._wakeup.was_asked_to_end() and unanswered_s >= _ENDING_S and self._may_wait(report)
        return is_to_end or (unanswered_s >= _STORE_LOST_S and self._is_too_long(still_s))

    def _answer_questions(self) -> None:
        if self._answers is not None:
            with suppress(RuntimeError):  # the store's host is gone, or silent, of which the next look says more
                self._answers.look(None if self._lost_at is not None else self.peers)

    def _stumble(self) -> None:
        if not self._has_stumbled:
            self._has_stumbled = True
            print_rank(self.heartbeat.rank, f"the watchdog failed, and goes on:\n{traceback.format_exc()}")

    def _among_peers(self, report: dict[str, Any], still_s: float) -> None:
        if self.peers is None:
            job = current_job()
            if job is None:
                return
            self.peers = RankRegistry(self._run, job)
            self.peers.job.line.patience_s = self._silence_s
            self.peers.job.line.gives_up = self._gives_up
        if self.first_failure is not None:  # its host may have taken the store along
            self._await_own_exception(self.first_failure)
            return
        self.peers.beat(report)
        if self.peers.job.has(FIRST_FAILURE) and self._follow(self.peers):
            return
        early = [rank for rank in self.peers.absent if rank in started_ranks and started_ranks[rank].poll() is not None]
        if early and not self._go_on_without(early):
            code = started_ranks[early[0]].returncode
            self._end("death", f"{DIED} (exit code {code}), before the ranks had met", early)
        elif still_s > _PERIOD_S or self._may_lose_some:
            self._look_for_the_dead(self.peers, report)

    def _look_for_the_dead(self, peers: RankRegistry, report: dict[str, Any]) -> None:
        dead = peers.gone()
        if self._may_wait(report) and not dead and self._look_elsewhere(peers):
            return
        if dead and self._go_on_without(dead):
            peers.forget(dead)
        elif dead:
            self._end("death", DIED, dead)

    def _look_elsewhere(self, peers: RankRegistry) -> bool:
        """Whether ranks of other machines have been silent for too long; without them the run goes on, or ends."""
        patience_s = _ENDING_S if self._wakeup.was_asked_to_end() else self._silence_s
        silent = peers.silent(self._clock, patience_s)
        gone = gone_silent(peers, silent, max(_MUTE_S, patience_s)) if silent else None
        if gone is not None and self._go_on_without(gone[2]):
            peers.forget(gone[2])
        elif gone is not None:
            self._end(*gone)
        return bool(silent)

    def _hang(self, report: dict[str, Any], still_s: float) -> None:
        """This rank has stood in one place for too long."""
        message = f"no progress for {still_s:.0f} s"
        reports = self.known()
        if any(report["is_debugged"] for report in reports.values()):
            self._since = self._clock
        elif self.world_size > 1:
            silent = {} if self.peers is None else self.peers.silent(self._clock, _ENDING_S)
            if self.peers is not None and (gone := gone_silent(self.peers, silent, still_s)):
                self._end(*gone)
                return
            absent = self._absent(report)
            if absent and still_s < _COMING_S:
                return
            ranks = ", ".join(map(str, absent))
            self._end("hang", f"rank(s) {ranks} have not come within {still_s:.0f} s" if absent else message, absent)
        elif not self._has_warned:  # a process alone keeps nobody waiting: it ends where something starts it again
            self._has_warned = True
            self._tell_where()
            self._conclude("hang", self.heartbeat.rank, f"{message}, {describe(reports[self.heartbeat.rank])}", reports)
            if launcher_name() is not None:
                hard_exit()

    def _absent(self, report: dict[str, Any]) -> list[int]:
        """The ranks that this one waits for to meet them."""
        if self._lost_at is not None or report["pending"] is None:
            return []
        if self.peers is not None:
            return self.peers.absent
        # Without a store: it is rank 0's, or a strategy's of Lightning's own has not said who is missing.
        me = self.heartbeat.rank
        return missing_ranks() or ([0] if me else [rank for rank in range(self.world_size) if rank != me])

    def _without_store(self, report: dict[str, Any], still_s: float, lost_at: float) -> None:
        """Its host (rank 0's, or that of torchrun's agent) is gone, or can't be reached."""
        was_silent = isinstance(self._loss, StoreLostError)  # which took its time
        lost_s = self._clock - lost_at + was_silent * _STORE_LOST_S
        # Where only the device may wait, the run may as well be at its end, with a logger's last upload.
        patience_s = self._silence_s if report["pending"] is None else _STORE_LOST_S
        if not self._may_wait(report) or min(still_s, lost_s) < patience_s:
            return
        lost = None if self._loss is None else store_lost(self.peers, self._loss)
        # Ranks of this machine that are gone may have lost the store, too.
        gone = self.peers.gone() if self.peers is not None and not (lost and was_silent) else []
        lost = None if gone else lost
        self._tell_where()
        message = DIED if gone else lost or "the host of the job's key-value store is gone"
        self._conclude(HOST_LOST if lost else "death", gone[0] if gone else 0, message, self.known())
        hard_exit()

    def _follow(self, peers: RankRegistry) -> bool:
        """Whether a failure is on record, of another rank's; if so, this one ends when it knows the verdict."""
        first = peers.job.first_failure()
        if first is None:
            return False
        if self._failed_at is None:
            self._failed_at = self._clock
            if first["kind"] != "exception":
                self._answer(peers)
            elif first["rank"] != self.heartbeat.rank:
                self.first_failure = first
                peers.job.count(SEEN, 1)
                return True
        verdict = peers.read("verdict", [first["by"]]).get(first["by"])
        if verdict is not None:
            print_rank(self.heartbeat.rank, verdict["text"])
            peers.publish("heard", {})
            hard_exit()
        self._await_own_exception(first)
        return True

    def _await_own_exception(self, first: dict[str, Any]) -> None:
        """Ends this process if its own exception has not come in time."""
        if self._clock - (self._failed_at or 0.0) >= _VERDICT_S:
            print_rank(self.heartbeat.rank, f"stops because {because(first)}")
            hard_exit()

    def _answer(self, peers: RankRegistry) -> None:
        self._tell_where()
        peers.publish("answer", self.heartbeat.report(with_stack=True))

    def _end(self, kind: str, message: str, dead: list[int]) -> None:
        """Puts a failure on record, unless another rank has, and ends the run."""
        peers = self.peers if self._lost_at is None else None
        if peers is not None:
            rank = dead[0] if dead else peers.rank
            with suppress(RuntimeError):  # the store's host is gone
                failure = {"rank": rank, "kind": kind, "by": peers.rank, "message": message}
                if peers.job.record_failure(failure) != failure:
                    return  # the next look finds it
                self._is_ending = True
                self._end_all(peers, kind, message, dead)
        self._end_alone(kind, message, dead)

    def _end_alone(self, kind: str, message: str, dead: list[int]) -> NoReturn:
        self._is_ending = True
        self._tell_where()
        reports = self.known()
        culprits = dead or [self.heartbeat.rank]
        self._conclude(kind, culprits[0], f"{message}{_where(kind, reports, culprits)}", reports)
        hard_exit()

    def _end_all(self, peers: RankRegistry, kind: str, message: str, dead: list[int]) -> NoReturn:
        self._answer(peers)
        reports = self.known()
        present = [r for r in range(peers.world_size) if r not in dead and reports.get(r, {}).get("phase") != LEFT]
        answers = _gathered(peers, "answer", present)
        reports = {rank: {**reports.get(rank, {}), **answers.get(rank, {})} for rank in {*reports, *answers}}
        mute = [rank for rank in present if rank not in answers]
        culprits = dead or mute or _behind({rank: reports[rank] for rank in present})
        silence = ", and it does not answer" if mute and not dead else ""
        text = self._conclude(kind, culprits[0], f"{message}{_where(kind, reports, culprits)}{silence}", reports)
        peers.publish("verdict", {"text": text})
        for rank in filter(peers.is_local, mute):  # it would not hear of the end
            peers.kill(rank)
        with suppress(RuntimeError):  # the store was in one that has heard and ended; or it is in this process
            _gathered(peers, "heard", [rank for rank in answers if rank != peers.rank])
        hard_exit()

    def _conclude(self, kind: str, culprit: int, message: str, reports: dict[int, dict[str, Any]]) -> str:
        """Writes the report, and says so."""
        rank = self.heartbeat.rank
        failure = {"rank": culprit, "kind": kind, "by": rank, "message": message}
        report = Report(self.folder, failure, reports, self.heartbeat.resume_from, run_id=self.heartbeat.run_id)
        collectives = "".join(f" Collectives: {sentence}." for sentence in report.collectives)
        text = f"{kind}, {blame(failure)}.{collectives} The failure report is {report.write()}"
        print_rank(rank, text)
        return text

    def _tell_where(self) -> None:
        report = self.heartbeat.report(with_stack=True)
        print_rank(self.heartbeat.rank, f"{describe(report)}:\n{report['stack']}")


def _where(kind: str, reports: dict[int, dict[str, Any]], ranks: list[int]) -> str:
    if kind == HOST_LOST:  # where they were says nothing of where they are
        return ""
    return "".join(f"; rank {rank} {describe(reports.get(rank))}" for rank in ranks)


def _gathered(peers: RankRegistry, kind: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """Returns what those of `ranks` publish that do so in time."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        answers = peers.read(kind, ranks)
        if len(answers) == len(ranks) or time.monotonic() > deadline:
            return answers
        time.sleep(0.1)


def _behind(ranks: dict[int, dict[str, Any]]) -> list[int]:
    """The ranks that the others wait for, as far as their places tell."""
    progress = {rank: (r["batch"], r["evaluated"], r["step"]) for rank, r in ranks.items()}
    last = [rank for rank in ranks if progress[rank] == min(progress.values())]
    return [rank for rank in last if ranks[rank]["pending"] is None] or last
