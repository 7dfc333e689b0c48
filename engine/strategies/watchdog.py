"""Ends a run that gets no further: by a thread in each process, while the trainer's own one can wait for ever.

Each second, each rank
1. publishes where it is (one `set`), and looks whether a failure is on record (one `check`);
2. where it has stood still since the last second, looks for its peers. It puts a failure on record if one's process is
   gone, or has not been heard of for long while this one waits in a collective; or if this rank has stood in one place
   for `timeout_s`.
3. A failure on record has every rank print and publish its stack. The one that recorded it names the culprit, writes
   the report and publishes the verdict; then all end with exit code 1, so that a launcher starts them again.

All of that goes through the job's store, from before the ranks are connected until the run is over. Where the store is
gone, or can't be reached, each rank that stands still ends by itself, with a report of its own.

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
from functools import partial
from typing import Any, NoReturn

# Lightning: the thread by which the process that started the others watches them.
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from ..environment import started_by
from ..exiting import exit_at_once, started_ranks
from .failure import DIED, SEEN, Report, say
from .heartbeat import Heartbeat, describe
from .job_store import FIRST_FAILURE
from .meeting import current_job, missing_ranks
from .parent import watch_parent
from .peers import LEFT, Peers, this_process

__all__ = ["Watchdog"]

_PERIOD_S = 1.0
_MEETING_PERIOD_S = 0.1
"""Until the ranks have heard of each other."""
_STORE_LOST_S = 3.0
"""How long a rank waits in a collective after the store is gone; its own error would say more."""
_ANSWER_S = 3.0
"""How long the ranks have to answer. A process that holds Python's lock for that long can't."""
_LAST_WORDS_S = 4.0
"""How long a process outlives one that it has started."""
_VERDICT_S = 8.0
"""How long a rank waits for the verdict, or for its own exception after another rank's."""
_SILENCE_S = (10.0, 60.0)
"""A peer of another machine counts as dead after the timeout, but not before the first nor later than the second:
opening a large pickle holds Python's lock for tens of seconds."""
_PARENT_S = 8.0
"""How long this process outlives the one that has started it: time to find out what has become of it."""
_SLOW_START = 3.0
"""How much longer the place may stay the same until the second batch: downloads, checkpoints, compilation."""

_COMING_S = 60.0
"""How long the ranks that have come wait for the others at the least: these may still import what they need."""

_runs = itertools.count()


class Watchdog:
    """Watches one run of one process.

    Args:
        heartbeat: where this process is.
        timeout_s: how long it may stand in one place; None for ever.
        folder: for the failure report.
        world_size: number of ranks; one has nobody to tell.
        strategy: says which ranks the run can go on without; None: without none.
    """

    def __init__(
        self, heartbeat: Heartbeat, timeout_s: float | None, folder: str, world_size: int, strategy: Any = None
    ) -> None:
        self.heartbeat = heartbeat
        self.folder = folder
        self.peers: Peers | None = None
        """The other ranks, from when the processes are connected."""
        self._timeout_s = timeout_s
        self._silence_s = min(max(_SILENCE_S[0], timeout_s or _SILENCE_S[1]), _SILENCE_S[1])
        self.world_size = world_size
        self._can_lose: Callable[[int], bool] = getattr(strategy, "can_lose", lambda rank: False)
        self._go_on_without: Callable[[list[int]], bool] = getattr(strategy, "go_on_without", lambda ranks: False)
        self._may_lose_some = any(map(self._can_lose, range(world_size)))
        # The same on all ranks, since they all run the same; runs that only one rank has are not counted.
        self._run = str(next(_runs)) if world_size > 1 else ""
        self._place: dict[str, Any] = {}
        self._clock = self._since = 0.0
        self._failed_at: float | None = None
        self._lost_at: float | None = None
        self._has_warned = self._is_ending = self._has_stumbled = False
        self.first_failure: dict[str, Any] | None = None
        """The exception of another rank that is on record, once it was seen there."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="polyphase-watchdog", daemon=True)

    def start(self) -> None:
        """Begins to watch the thread that calls this."""
        self.heartbeat.begin()
        self.heartbeat.known = self.known
        watch_parent(self.heartbeat.rank, _PARENT_S)
        _delay_the_kill(self.heartbeat.rank, self._can_lose)
        self._thread.start()

    def stop(self) -> None:
        """Stops, and tells the others that this rank is not to be waited for."""
        self._stop.set()
        self._thread.join(2 * _PERIOD_S)
        self.heartbeat.known = None

    def let_end(self) -> None:
        """Called where the trainer's thread has failed: if the run is being ended here, that is all there is to say."""
        if self._is_ending:
            self._thread.join(_VERDICT_S)

    def known(self, **of_this: Any) -> dict[int, dict[str, Any]]:
        """Where each rank is, as far as is known here; `of_this`: arguments of this one's report."""
        peers = self.peers
        mine = {self.heartbeat.rank: {**this_process(), **self.heartbeat.report(**of_this)}}
        return {**peers.beats(), **mine} if peers else mine

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(self._period_s()):
            now = time.monotonic()
            self._clock += min(now - before, _PERIOD_S)
            before = now
            try:
                self._look()
            except Exception:  # a run that nobody watches is worse than one that is watched by halves
                self._stumble()
        if self.peers is not None and self.first_failure is None:
            with suppress(RuntimeError):
                self.peers.beat({**self.heartbeat.report(), "phase": LEFT})

    def _period_s(self) -> float:
        has_met = self.peers is not None and len(self.peers.processes) == len(self.peers.others)
        return _PERIOD_S if has_met or self.world_size == 1 else _MEETING_PERIOD_S

    def _look(self) -> None:
        report, place = self.heartbeat.report(), self.heartbeat.place()
        if place != self._place or report["is_debugged"]:
            self._place, self._since, self._has_warned = place, self._clock, False
        still_s = self._clock - self._since
        if self.world_size > 1 and self._lost_at is None:
            try:
                self._among_peers(report, still_s)
            except RuntimeError:  # torch.distributed.DistError: the store's host is gone
                self._lost_at = self._clock
        if self._lost_at is not None:
            self._without_store(report, self._lost_at)
        if self._timeout_s is not None and still_s >= self._timeout_s * (_SLOW_START if place["batch"] < 2 else 1.0):
            self._hang(report, still_s)

    def _stumble(self) -> None:
        if not self._has_stumbled:
            self._has_stumbled = True
            say(self.heartbeat.rank, f"the watchdog failed, and goes on:\n{traceback.format_exc()}")

    def _among_peers(self, report: dict[str, Any], still_s: float) -> None:
        if self.peers is None:
            job = current_job()
            if job is None:
                return
            self.peers = Peers(self._run, job)
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

    def _look_for_the_dead(self, peers: Peers, report: dict[str, Any]) -> None:
        dead = peers.gone()
        if report["pending"] is not None and not dead:
            dead = peers.silent(self._clock, self._silence_s)
        if dead and self._go_on_without(dead):
            peers.forget(dead)
        elif dead:
            self._end("death", DIED, dead)

    def _hang(self, report: dict[str, Any], still_s: float) -> None:
        """This rank has stood in one place for too long."""
        message = f"no progress for {still_s:.0f} s"
        known = self.known()
        if any(report["is_debugged"] for report in known.values()):
            self._since = self._clock
        elif self.world_size > 1:
            absent = self._absent(report)
            if absent and still_s < _COMING_S:
                return
            ranks = ", ".join(map(str, absent))
            self._end("hang", f"rank(s) {ranks} have not come within {still_s:.0f} s" if absent else message, absent)
        elif not self._has_warned:  # a process alone keeps nobody waiting: it ends where something starts it again
            self._has_warned = True
            self._tell_where()
            self._conclude("hang", self.heartbeat.rank, f"{message}, {describe(known[self.heartbeat.rank])}", known)
            if started_by() is not None:
                exit_at_once()

    def _absent(self, report: dict[str, Any]) -> list[int]:
        """The ranks that this one waits for to meet them."""
        if self._lost_at is not None or report["pending"] is None:
            return []
        if self.peers is not None:
            return self.peers.absent
        # Without a store: it is rank 0's, or a strategy's of Lightning's own has not said who is missing.
        me = self.heartbeat.rank
        return missing_ranks() or ([0] if me else [rank for rank in range(self.world_size) if rank != me])

    def _without_store(self, report: dict[str, Any], lost_at: float) -> None:
        """Its host is gone: the process of rank 0, or torchrun's agent."""
        if report["pending"] is None or self._clock - max(lost_at, self._since) < _STORE_LOST_S:
            return
        gone = self.peers.gone() if self.peers is not None else []
        self._tell_where()
        message = DIED if gone else "the host of the job's key-value store is gone"
        self._conclude("death", gone[0] if gone else 0, message, self.known())
        exit_at_once()

    def _follow(self, peers: Peers) -> bool:
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
            say(self.heartbeat.rank, verdict["text"])
            peers.publish("heard", {})
            exit_at_once()
        self._await_own_exception(first)
        return True

    def _await_own_exception(self, first: dict[str, Any]) -> None:
        """Ends this process if its own exception has not come in time."""
        if self._clock - (self._failed_at or 0.0) >= _VERDICT_S:
            say(self.heartbeat.rank, f"stops because rank {first['rank']} failed first: {first['message']}")
            exit_at_once()

    def _answer(self, peers: Peers) -> None:
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
        known = self.known()
        culprits = dead or [self.heartbeat.rank]
        self._conclude(kind, culprits[0], f"{message}; {_where(known, culprits)}", known)
        exit_at_once()

    def _end_all(self, peers: Peers, kind: str, message: str, dead: list[int]) -> NoReturn:
        self._answer(peers)
        known = self.known()
        present = [r for r in range(peers.world_size) if r not in dead and known.get(r, {}).get("phase") != LEFT]
        answers = _gathered(peers, "answer", present)
        known = {rank: {**known.get(rank, {}), **answers.get(rank, {})} for rank in {*known, *answers}}
        mute = [rank for rank in present if rank not in answers]
        culprits = dead or mute or _behind({rank: known[rank] for rank in present})
        silence = ", and it does not answer" if mute and not dead else ""
        text = self._conclude(kind, culprits[0], f"{message}; {_where(known, culprits)}{silence}", known)
        peers.publish("verdict", {"text": text})
        for rank in filter(peers.is_local, mute):  # it would not hear of the end
            peers.kill(rank)
        with suppress(RuntimeError):  # the store was in one that has heard and ended; or it is in this process
            _gathered(peers, "heard", [rank for rank in answers if rank != peers.rank])
        exit_at_once()

    def _conclude(self, kind: str, culprit: int, message: str, known: dict[int, dict[str, Any]]) -> str:
        """Writes the report, and says so."""
        rank = self.heartbeat.rank
        failure = {"rank": culprit, "kind": kind, "by": rank, "message": message}
        path = Report(self.folder, failure, known, self.heartbeat.resume_from, run_id=self.heartbeat.run_id).write()
        text = f"{kind}, because of rank {culprit}: {message}. The failure report is {path}"
        say(rank, text)
        return text

    def _tell_where(self) -> None:
        report = self.heartbeat.report(with_stack=True)
        say(self.heartbeat.rank, f"{describe(report)}:\n{report['stack']}")


def _where(known: dict[int, dict[str, Any]], ranks: list[int]) -> str:
    return "; ".join(f"rank {rank} {describe(known.get(rank))}" for rank in ranks)


def _gathered(peers: Peers, kind: str, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """What those of `ranks` publish that do so in time."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        found = peers.read(kind, ranks)
        if len(found) == len(ranks) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def _behind(ranks: dict[int, dict[str, Any]]) -> list[int]:
    """The ranks that the others wait for, as far as their places tell."""
    progress = {rank: (r["batch"], r["evaluated"], r["step"]) for rank, r in ranks.items()}
    last = [rank for rank in ranks if progress[rank] == min(progress.values())]
    return [rank for rank in last if ranks[rank]["pending"] is None] or last


def _delay_the_kill(rank: int, can_lose: Callable[[int], bool]) -> None:
    """Has Lightning's observer give this process the time to find out what happened, and to end by itself.

    Children that the run can go on without are observed no more.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver) and "_terminate_all" not in vars(thread):
            kill = thread._terminate_all  # Lightning: sends SIGKILL to all processes, this one too
            thread._terminate_all = partial(_late, kill)  # type: ignore[method-assign]
            # Lightning: the processes that are observed, of the ranks that follow this one's.
            children: Any = thread._child_processes
            thread._child_processes = [c for other, c in enumerate(children, rank + 1) if not can_lose(other)]


def _late(kill: Callable[[], None]) -> None:
    time.sleep(_LAST_WORDS_S)
    kill()
