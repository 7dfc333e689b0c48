"""The watchdog ends a run that makes no progress, on a thread in each process: the trainer's thread may wait for ever.

Each second, each rank
1. publishes its position (one `set`), and checks whether a failure is recorded (one `check`);
2. checks the other ranks, if its own position has not changed for a second. It records a failure if a rank's process
   has ended; if a rank has had no heartbeat for long, while this one waits in a collective (on an accelerator: at any
   position); or if this rank has been at one position for `timeout_s`. If the run survives losses, the rank at fault
   ends instead, and the others go on.
3. If a failure is recorded, every rank prints and publishes its stack. The rank that has recorded it passes the verdict
   (see below). Then all ranks end with exit code 1, so that a launcher restarts them.

All of this goes through the job's store, from before the ranks are connected until the run is over. If the store's
process has ended, or does not answer, each rank that makes no progress ends by itself, with its own report. While a
call of the store waits, this rank decides on what it knows by itself (`_gives_up`).

Time in which the watchdog's thread did not run (the machine was suspended) does not count, nor does time under a
debugger.
"""

import itertools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..contract import adapt
from ..distributed.environment import launcher_name, shows_all_frames
from ..distributed.job_store import FIRST_FAILURE, PATIENCE_S, JobStore, StoreLostError, end_threads
from ..foreign import for_terminal
from .failure import DONE, TOLD, Wakeup, delay_the_kill, print_rank, watch_parent
from .flight_recorder import late_ranks
from .hard_exit import hard_exit, started_ranks
from .heartbeat import Heartbeat, describe
from .rendezvous import LEFT, RankRegistry, current_job, in_words, meeting_endpoint, missing_ranks, this_process
from .report import DIED, HOST_LOST, Report, because, blame, lost_ranks, store_lost
from .stack_answers import StackAnswers
from .tracebacks import shorten

__all__ = ["Verdict", "Watchdog", "behind"]

# What the watchdog finds is at most this old; with thousands of ranks each beat is a call of the one store.
_PERIOD_S = 1.0
_MEETING_PERIOD_S = 0.1
"""The period of beats until all ranks are connected, unless so many ranks would exceed the limit below."""
_MOST_BEATS_PER_S = 640.0
"""The limit of beats of all ranks together until all are connected; then each rank has one beat per `_PERIOD_S`."""
_STORE_LOST_S = 3.0
"""The time that a rank waits in a collective after the store is lost: the collective's own error is more precise."""
_VERDICT_S, _TOLD_S = 8.0, 4.0
"""The times that a rank waits for the verdict, or for its own exception after another rank's; the shorter one if that
rank has printed its error: then Lightning's launcher soon kills the process of the first rank."""
_TELLING_S = 2.5
"""The time in which the rank that has failed first prints what happened. It then waits somewhat longer for this one."""
_SILENCE_S = (10.0, PATIENCE_S)
"""The least and the longest time without a heartbeat after which a rank of another machine counts as lost."""
_LIVE_SILENCE_S = 60.0
"""The longest time for a rank whose process runs: reading a large pickle holds Python's lock for tens of seconds."""
_ENDING_S = 5.0
"""The longest time without a heartbeat after this process was asked to end."""
_PARENT_S = 8.0
"""The time that this process continues after its parent has ended, to find out how the parent has ended."""
_SLOW_START = 3.0
"""The factor of the timeout until the second batch, once all ranks are connected: downloads, checkpoints, compilation.
"""
_CONNECTING_S, _IMPORTING_S = 30.0, 60.0
"""The least times that this rank waits for others to connect: for ranks that were started at the same time as this one,
and for those that this one has started, which have yet to import their packages."""
_FIRST_TO_REPORT = 8
"""The number of ranks that report a hang first; if they do not, as many more in the next period, then twice as many."""
_MENTION_S = 15.0
"""The time after which a rank says for which others it waits."""

_runs = itertools.count()


class Watchdog:
    """Watches one run of one process.

    Args:
        heartbeat: the position of this process.
        timeout_s: the longest time at one position; None without limit.
        folder: folder of the failure reports.
        world_size: number of ranks.
        strategy: knows which ranks the run can continue without; None: it needs all ranks.
        answers: serves requests of `polyphase stacks`; None: no requests are served.
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
        """The other ranks; None until the processes are connected."""
        self._timeout_s = timeout_s
        self._silence_s = min(max(_SILENCE_S[0], timeout_s or _SILENCE_S[1]), _SILENCE_S[1])
        self.world_size = world_size
        self._strategy = adapt(strategy)
        self._can_lose: Callable[[int], bool] = self._strategy.can_lose
        self._continue_without: Callable[[list[int]], bool] = self._strategy.go_on_without
        self._answers = answers
        self.lose: Callable[[list[int]], bool] = lambda ranks: False
        """Has all other ranks go on without these, of other machines; returns whether they do."""
        self._verdict = Verdict(heartbeat, folder, self.positions_of_all)
        self._may_lose_some = any(map(self._can_lose, range(world_size)))
        # The number of the run is the same on all ranks: they have the same runs, and runs of one rank don't count.
        self._run = str(next(_runs)) if world_size > 1 else ""
        self._place: dict[str, Any] = {}
        self._clock = self._since = self._before = 0.0
        self._ended: list[int] = []
        self._failed_at: float | None = None
        self._lost_at: float | None = None
        self._loss: RuntimeError | None = None
        self._has_warned = self._has_mentioned = self._is_ending = self._has_failed = self._is_told = False
        self.first_failure: dict[str, Any] | None = None
        """The recorded exception of another rank, once this rank has read it; None before."""
        self.is_done_with_store = False
        """Whether this rank has told the failed rank, which may host the store, that it no longer uses the store."""
        self._wakeup = Wakeup()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="polyphase-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch the thread that calls this."""
        self.heartbeat.begin()
        self.heartbeat.positions_of_all = self.positions_of_all
        watch_parent(self.heartbeat.rank, _PARENT_S)
        delay_the_kill(self.heartbeat.rank, self._can_lose)
        self._wakeup.begin()
        if self._answers is not None:
            self._answers.open()
        self._thread.start()

    def stop(self) -> None:
        """Stops, and publishes that this rank's run is over."""
        self.stop_but_listen().end()

    def stop_but_listen(self) -> Wakeup:
        """Stops as `stop` does, and returns what detects a SIGTERM since `start`; the caller ends it."""
        self._stop.set()
        self._thread.join(2 * _PERIOD_S)
        end_threads()
        if self._answers is not None:
            self._answers.close()
        self.heartbeat.positions_of_all = dict
        return self._wakeup

    def wait_for_verdict(self) -> None:
        """If the watchdog is ending the run, waits for the end; called when the trainer's thread has failed."""
        if self._is_ending:
            self._thread.join(_VERDICT_S)

    def positions_of_all(self, **of_this: Any) -> dict[int, dict[str, Any]]:
        """Returns the positions of all ranks that are known here, by rank.

        Args:
            of_this: arguments of `Heartbeat.report` for this rank.
        """
        peers = self.peers
        own_report = {self.heartbeat.rank: {**this_process(), **self.heartbeat.report(**of_this)}}
        return {**peers.beats(), **own_report} if peers else own_report

    def _watch(self) -> None:
        self._before = time.monotonic()
        while not self._stop.wait(self._period_s()):
            self._tick()
            try:
                self._check()
                self._serve_requests()
            except Exception:  # the watchdog continues, since it may fail in a part of its work only
                self._warn_of_failure()
        if self.peers is not None and self.first_failure is None:
            with suppress(RuntimeError):
                self.peers.beat({**self.heartbeat.report(), "phase": LEFT})

    def _period_s(self) -> float:
        has_met = self.peers is not None and not self.peers.absent
        if has_met or self.world_size == 1:
            return _PERIOD_S
        return min(_PERIOD_S, max(_MEETING_PERIOD_S, self.world_size / _MOST_BEATS_PER_S))

    def _tick(self) -> None:
        now = time.monotonic()
        self._clock += min(now - self._before, _PERIOD_S)
        self._before = now

    def _position(self) -> tuple[dict[str, Any], float]:
        """Returns the report of this rank's position, and the seconds since it has last changed."""
        report, place = self.heartbeat.report(), self.heartbeat.place()
        if place != self._place or report["is_debugged"]:
            self._place, self._since, self._has_warned = place, self._clock, False
        return report, self._clock - self._since

    def _may_wait(self, report: dict[str, Any]) -> bool:
        """Whether this rank may wait for others at its position.

        On an accelerator its stack need not show it: collectives are launched, and the thread waits when it next reads
        a value of the device, for example in `.item()`.
        """
        device = self._strategy.root_device
        return report["pending"] is not None or (device is not None and device.type != "cpu")

    def _is_too_long(self, report: dict[str, Any], still_s: float) -> bool:
        if self._timeout_s is None:
            return False
        # All ranks hang at once, and the first that reports it reads what every rank has said: ranks 0 to 7 begin, and
        # with each period as many more again, if none of them could.
        turn_s = (self.heartbeat.rank // _FIRST_TO_REPORT).bit_length() * _PERIOD_S
        return still_s >= self._longest_s(self._timeout_s, self._absent(report)) + turn_s

    def _longest_s(self, timeout_s: float, absent: list[int]) -> float:
        """The longest time at this position, while this rank waits for those that are `absent`."""
        if absent:
            return max(timeout_s, _IMPORTING_S if started_ranks.keys() & set(absent) else _CONNECTING_S)
        return timeout_s * (_SLOW_START if self._place["batch"] < 2 else 1.0)

    def _mention_absent(self, report: dict[str, Any], still_s: float) -> None:
        """Says for which ranks this one waits, once."""
        if self._has_mentioned or still_s < _MENTION_S or not (absent := self._absent(report)):
            return
        self._has_mentioned = True
        rank = self.heartbeat.rank
        if rank == min({*range(self.world_size)} - set(absent), default=rank):  # one for all that wait
            limit = "" if self._timeout_s is None else f", until {self._longest_s(self._timeout_s, absent):.0f} s"
            print_rank(rank, f"waits for {in_words(absent)} to connect, for {still_s:.0f} s so far{limit}")

    def _check(self) -> None:
        report, still_s = self._position()
        if self.world_size > 1 and self._lost_at is None:
            try:
                self._check_peers(report, still_s)
            except RuntimeError as error:  # the store's process has ended, or does not answer
                self._loss, self._lost_at = error, self._clock
                report, still_s = self._position()
        if self._lost_at is not None:
            self._without_store(report, still_s, self._lost_at)
        self._mention_absent(report, still_s)
        if self._is_too_long(report, still_s):
            self._hang(report, still_s)

    def _gives_up(self) -> bool:
        """Whether to give up a call of the store; called each second while it waits."""
        if threading.current_thread() is not self._thread or self.peers is None:
            return False
        self._tick()
        report, still_s = self._position()
        unanswered_s = self.peers.job.line.waited_s
        is_to_end = self._wakeup.was_asked_to_end() and unanswered_s >= _ENDING_S and self._may_wait(report)
        return is_to_end or (unanswered_s >= _STORE_LOST_S and self._is_too_long(report, still_s))

    def _serve_requests(self) -> None:
        if self._answers is not None:
            with suppress(RuntimeError):  # the next check of the store handles its loss
                self._answers.poll(None if self._lost_at is not None else self.peers)

    def _warn_of_failure(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            print_rank(self.heartbeat.rank, f"the watchdog failed, and continues:\n{traceback.format_exc()}")

    def _check_peers(self, report: dict[str, Any], still_s: float) -> None:
        if self.peers is None:
            job = current_job()
            if job is None:
                return
            self.peers = self._registry(job)
        if self.first_failure is not None:
            # Only in the check after the one that read the failure: until then this rank may publish its own exception.
            if self.is_done_with_store or self._leave_store(self.peers.job):
                self._await_own_exception(self.first_failure)
            return
        self.peers.beat(report)
        if self.peers.job.has(FIRST_FAILURE) and self._follow(self.peers):
            return
        early = [rank for rank in self.peers.absent if rank in started_ranks and started_ranks[rank].poll() is not None]
        if early and not self._continue_without(early):
            code = started_ranks[early[0]].returncode
            self._end("death", f"{DIED} (exit code {code}), before the ranks were connected", early)
        elif still_s > _PERIOD_S or self._may_lose_some:
            self._check_processes(self.peers, report)

    def _leave_store(self, job: JobStore) -> bool:
        """Tells the rank that failed first that its store is needed no more, if it has printed all; returns whether."""
        with suppress(RuntimeError):  # the store's process has ended
            told = job.read(TOLD, {"in_full": bool})
            self._is_told = told is not None and told["in_full"]
            if told is None and self._clock - (self._failed_at or 0.0) < _TELLING_S:
                return False
            self.is_done_with_store = True
            job.count(DONE, 1)
        self.is_done_with_store = True
        return True

    def _registry(self, job: JobStore) -> RankRegistry:
        """The ranks of a job, whose store is given up when it is silent for too long."""
        peers = RankRegistry(self._run, job)
        peers.job.line.patience_s, peers.job.line.gives_up = self._silence_s, self._gives_up
        return peers

    def _check_processes(self, peers: RankRegistry, report: dict[str, Any]) -> None:
        """Continues without ranks that have ended, or ends the run."""
        ended = peers.ended_ranks()
        if self._may_wait(report) and not ended and self._check_other_hosts(peers):
            return
        if ended and self._continue_without(ended):
            peers.forget(ended)
        elif ended and not self._strategy.survives_losses:  # else the trainer's thread learns of it, in a collective
            self._end("death", DIED, ended)

    def meet_again(self, num_ranks: int) -> None:
        """Watches the ranks that are left, which have met in another store; called by the trainer's thread."""
        self._run += "+"
        job = current_job()
        assert job is not None
        self.peers, self.world_size, self._ended = self._registry(job), num_ranks, []

    def _check_other_hosts(self, peers: RankRegistry) -> bool:
        """Continues without lost ranks of other machines, or ends the run; returns whether a rank has no heartbeat."""
        patience_s = _ENDING_S if self._wakeup.was_asked_to_end() else self._silence_s
        silent = peers.silent(self._clock, patience_s)
        lost = lost_ranks(peers, silent, max(_LIVE_SILENCE_S, patience_s)) if silent else None
        if lost is not None and self._continue_without(lost[2]):
            peers.forget(lost[2])
        elif lost is not None and not self.lose(lost[2]):
            self._end(*lost)
        return bool(silent)

    def _hang(self, report: dict[str, Any], still_s: float) -> None:
        """Ends the run because this rank has been at one position for too long."""
        message = f"no progress for {still_s:.0f} s"
        reports = self.positions_of_all()
        if any(report["is_debugged"] for report in reports.values()):
            self._since = self._clock
        elif self.world_size > 1:
            silent = {} if self.peers is None else self.peers.silent(self._clock, _ENDING_S)
            if self.peers is not None and (lost := lost_ranks(self.peers, silent, still_s)):
                if not self.lose(lost[2]):
                    self._end(*lost)
                return
            absent = self._absent(report)
            if not absent and self._leave_behind(reports, still_s):
                return
            if absent:
                message = f"{in_words(absent)} of {self.world_size} did not connect within {still_s:.0f} s"
                message += meeting_endpoint()
            self._end("hang", message, absent)
        elif not self._has_warned:  # no other process waits for a single one: it ends only if a launcher restarts it
            self._has_warned = True
            self._verdict.pass_alone("hang", message, [])
            if launcher_name() is not None:
                hard_exit()

    def _leave_behind(self, reports: dict[int, dict[str, Any]], still_s: float) -> bool:
        """Ends the processes of those ranks that the others wait for, if these go on without; returns whether it does.

        A rank ends itself, with its stack; if it does not within a few seconds, another rank ends it.
        """
        rank, peers = self.heartbeat.rank, self.peers
        if peers is None or self._timeout_s is None or not self._strategy.survives_losses:
            return False
        ended = peers.ended_ranks()  # a loss after which the others have not met yet
        if ended != self._ended:  # who has waited for a lost rank until now has not been late
            self._ended, self._since = ended, self._clock
            return True
        present = {r: position for r, position in reports.items() if position["phase"] != LEFT and r not in ended}
        late = behind(present)
        patience_s = self._longest_s(self._timeout_s, []) + _ANSWER_S
        if len(present) + len(ended) < self.world_size or len(late) == len(present):
            return False  # who is at fault is not known
        if rank not in late and still_s < patience_s:
            return True
        words = f"{in_words(late)}: no progress for {still_s:.0f} s, and the others go on without"
        stacks = _stacks({rank: self.heartbeat.report(with_stack=True)}, [rank] if rank in late else [])
        print_rank(rank, "\n".join([f"{words}{_where('hang', reports, late)}", *stacks]))
        for other in late:
            if other != rank:
                peers.kill(other)
        if rank in late:
            os.kill(os.getpid(), signal.SIGKILL)  # an exit code would end the run
        return True

    def _absent(self, report: dict[str, Any]) -> list[int]:
        """Returns the ranks that are not connected yet, if this rank waits for them."""
        if self._lost_at is not None or report["pending"] is None:
            return []
        if self.peers is not None:
            return self.peers.absent
        # Without a store the missing ranks may be unknown: rank 0 has not opened it, or a strategy of Lightning's own
        # connects the ranks.
        own_rank = self.heartbeat.rank
        return missing_ranks() or ([0] if own_rank else list(range(1, self.world_size)))

    def _without_store(self, report: dict[str, Any], still_s: float, lost_at: float) -> None:
        """Ends this rank if it makes no progress, when the store (of rank 0 or torchrun's agent) can't be reached."""
        was_silent = isinstance(self._loss, StoreLostError)  # the call has waited for an answer already
        lost_s = self._clock - lost_at + was_silent * _STORE_LOST_S
        # If only the device may wait, the run may be at its end, in a logger's last upload.
        patience_s = self._silence_s if report["pending"] is None else _STORE_LOST_S
        if not self._may_wait(report) or min(still_s, lost_s) < patience_s:
            return
        lost = None if self._loss is None else store_lost(self.peers, self._loss)
        # Ranks of this machine may have ended because they have lost the store, too.
        ended = self.peers.ended_ranks() if self.peers is not None and not (lost and was_silent) else []
        lost = None if ended else lost
        message = DIED if ended else lost or "the host of the job's key-value store is gone"
        self._verdict.pass_alone(HOST_LOST if lost else "death", message, ended or [0])
        hard_exit()

    def _follow(self, peers: RankRegistry) -> bool:
        """Whether a failure of another rank is recorded; if so, this rank ends when it can read the verdict."""
        first = peers.job.first_failure()
        if first is None:
            return False
        if self._failed_at is None:
            self._failed_at = self._clock
            if first["kind"] != "exception":
                peers.publish("answer", self.heartbeat.report(with_stack=True))
            elif first["rank"] != self.heartbeat.rank:
                self.first_failure = first
                return True
        verdict = peers.read("verdict", [first["by"]]).get(first["by"])
        if verdict is not None:
            if not peers.is_local(first["by"]):  # which has printed it on this machine
                print_rank(self.heartbeat.rank, for_terminal(verdict["text"], has_lines=True))
            peers.publish("heard", {})
            hard_exit()
        self._await_own_exception(first)
        return True

    def _await_own_exception(self, first: dict[str, Any]) -> None:
        """Ends this process if its thread has not raised an exception in time."""
        if self._clock - (self._failed_at or 0.0) >= (_TOLD_S if self._is_told else _VERDICT_S):
            if not self._is_told:
                print_rank(self.heartbeat.rank, f"stops because {because(first, self.heartbeat.rank)}")
            hard_exit()

    def _end(self, kind: str, message: str, culprits: list[int]) -> None:
        """Records a failure, unless another rank has, and ends the run.

        Args:
            kind: kind of the failure.
            message: about it.
            culprits: ranks that have ended, are lost or not connected; empty if there are none.
        """
        peers = self.peers if self._lost_at is None else None
        if peers is not None:
            rank = culprits[0] if culprits else peers.rank
            with suppress(RuntimeError):  # the store's process has ended
                failure = {"rank": rank, "kind": kind, "by": peers.rank, "message": message}
                if peers.job.record_failure(failure) != failure:
                    return  # another rank has recorded its failure first, which the next check finds
                self._is_ending = True
                self._verdict.pass_on_all(peers, kind, message, culprits)
                hard_exit()
        self._is_ending = True
        self._verdict.pass_alone(kind, message, culprits)
        hard_exit()


# --- the verdict on a run that is ended: its culprit, the failure report, and the end of all ranks
# The rank that has recorded the failure gathers the other ranks' positions with their stacks, names the culprit, writes
# the report, prints the verdict and publishes it. The culprit is the rank that has ended or not connected; otherwise
# the rank that does not answer; otherwise the one with the least progress; otherwise the one that does not wait for
# others; otherwise the one that has not called the collective which others wait in.
#
# Each rank looks at its thread once, so that its position and its stack are of the same moment. The stacks of culprits
# are printed without the frames of libraries; each other rank has a line. The report has everything.


_ANSWER_S = 3.0
"""The time in which the ranks must publish their stacks. A rank cannot if Python's lock is held for all this time."""

_MOST_SENTENCES, _MOST_STACKS, _MOST_CALL_LINES, _MOST_PLACES = 2, 2, 10, 8
"""The numbers of culprits in the verdict and of their stacks, of lines of each of these, and of other ranks' lines: a
screen shows all of them together."""


class Verdict:
    """Passes the verdict on one run, as one rank.

    Args:
        heartbeat: the position of this process.
        folder: folder of the failure reports.
        positions: returns the positions of all ranks that are known here, by rank; `Watchdog.positions_of_all`.
    """

    def __init__(self, heartbeat: Heartbeat, folder: str, positions: Callable[..., dict[int, dict[str, Any]]]) -> None:
        self._heartbeat, self._folder, self._positions = heartbeat, folder, positions

    def pass_alone(self, kind: str, message: str, culprits: list[int]) -> None:
        """Writes the report of a rank that the others can't read; see `Watchdog._end`."""
        self._write(kind, message, culprits or [self._heartbeat.rank], self._positions(with_stack=True))

    def pass_on_all(self, peers: RankRegistry, kind: str, message: str, known_culprits: list[int]) -> None:
        """Writes the report, publishes the verdict, and waits until the other ranks have read it.

        Args:
            peers: all ranks.
            kind: kind of the failure.
            message: about it.
            known_culprits: ranks that have ended, are lost or not connected; empty if there are none.
        """
        reports = self._positions(with_stack=True)
        peers.publish("answer", reports[self._heartbeat.rank])  # its number changes before the ranks have met again
        present = [
            rank
            for rank in range(peers.world_size)
            if rank not in known_culprits and reports.get(rank, {}).get("phase") != LEFT
        ]
        answers = _gathered(peers, "answer", present)
        reports = {rank: {**reports.get(rank, {}), **answers.get(rank, {})} for rank in {*reports, *answers}}
        unresponsive = [rank for rank in present if rank not in answers]
        culprits = known_culprits or unresponsive or behind({rank: reports[rank] for rank in present})
        silence = ", and it does not answer" if unresponsive and not known_culprits else ""
        text = self._write(kind, message, culprits, reports, silence)
        peers.publish("verdict", {"text": text})
        for rank in filter(peers.is_local, unresponsive):  # it can't read the verdict
            peers.kill(rank)
        with suppress(RuntimeError):  # the rank that hosts the store may have read the verdict and ended
            _gathered(peers, "heard", [rank for rank in answers if rank != peers.rank])

    def _write(
        self, kind: str, message: str, culprits: list[int], reports: dict[int, dict[str, Any]], silence: str = ""
    ) -> str:
        """Writes the failure report; prints and returns the verdict."""
        rank = self._heartbeat.rank
        message = f"{message}{_where(kind, reports, culprits)}{silence}"
        failure = {"rank": culprits[0], "kind": kind, "by": rank, "message": message}
        report = Report(self._folder, failure, reports, self._heartbeat.resume_from, run_id=self._heartbeat.run_id)
        collectives = "".join(f" Collectives: {sentence}." for sentence in report.collectives[:_MOST_SENTENCES])
        text = f"{kind}, {blame(failure)}.{collectives} The failure report, with all frames: {report.write()}"
        print_rank(rank, "\n".join([text, *_stacks(reports, culprits), *_lines(reports, culprits)]))
        return text


def _where(kind: str, reports: dict[int, dict[str, Any]], ranks: list[int]) -> str:
    if kind == HOST_LOST:  # their last known positions are not their present ones
        return ""
    more = f"; so may {in_words(ranks[_MOST_SENTENCES:])}" if len(ranks) > _MOST_SENTENCES else ""
    return "".join(f"; rank {rank} {describe(reports.get(rank))}" for rank in ranks[:_MOST_SENTENCES]) + more


def _stacks(reports: dict[int, dict[str, Any]], culprits: list[int]) -> list[str]:
    """Returns the lines of the culprits' stacks, without frames of libraries; those that are equal once."""
    by_stack: dict[str, list[int]] = {}
    for rank in culprits:
        if stack := reports.get(rank, {}).get("stack"):
            stack = stack if shows_all_frames() else shorten(stack, keeps_innermost=False)
            by_stack.setdefault(stack.rstrip(), []).append(rank)
    lines = []
    for stack, ranks in list(by_stack.items())[:_MOST_STACKS]:
        calls = stack.splitlines()
        if not shows_all_frames() and len(calls) > _MOST_CALL_LINES:  # the innermost calls are at the end
            calls = [f"  ... {len(calls) - _MOST_CALL_LINES} lines", *calls[-_MOST_CALL_LINES:]]
        lines += [f"The stack of {in_words(ranks)}:", *calls]
    return lines


def _lines(reports: dict[int, dict[str, Any]], culprits: list[int]) -> list[str]:
    """Returns a line for each rank that is no culprit; one for all that are at the same place."""
    by_place: dict[str, list[int]] = {}
    for rank in sorted(reports.keys() - set(culprits)):
        if reports[rank]["phase"] != LEFT:
            by_place.setdefault(describe(reports[rank]), []).append(rank)
    lines = [f"{in_words(ranks)}: {place}" for place, ranks in by_place.items()]
    more = len(lines) - _MOST_PLACES
    return lines if more <= 0 else [*lines[:_MOST_PLACES], f"... {more} more places of ranks are in the report"]


def _gathered(peers: RankRegistry, kind: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """Returns the reports of those of `ranks` that publish one in time."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        answers = peers.read(kind, ranks)
        if len(answers) == len(ranks) or time.monotonic() > deadline:
            return answers
        time.sleep(0.1)


def behind(ranks: dict[int, dict[str, Any]]) -> list[int]:
    """Returns the ranks with the least progress; of these the ones that do not wait, or are late, if there are some."""
    progress = {rank: (r["batch"], r["evaluated"], r["step"]) for rank, r in ranks.items()}
    last = [rank for rank in ranks if progress[rank] == min(progress.values())]
    busy = [rank for rank in last if ranks[rank]["pending"] is None]
    late = late_ranks({rank: ranks[rank].get("collectives") for rank in last})
    return busy or late or last
