"""The rendezvous of the ranks of one start of a job, in a key-value store.

If no launcher has a store, rank 0 opens one: on the loopback interface if all ranks are on one machine, otherwise by
torch's own server. Each rank registers in it, so that the waiting ranks know which ones are missing.

torchrun keeps one store over all starts of a job. torch would find the addresses of the last start's processes there,
and wait for them until its timeout. So each start has its own prefix in the store. torchrun gives its processes no
unique name of a start: nodes that join later count restarts from 0. So rank 0 makes up a name, and the other ranks
request it.
"""

import multiprocessing
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Annotated, Any

import psutil
import torch.distributed as dist
from typing_extensions import TypedDict

from ..distributed.connections import keep_connections_to
from ..distributed.environment import own_address
from ..distributed.job_store import (
    CausedByRank,
    Fields,
    JobStore,
    ProcessState,
    accept_probes,
    address_of,
    own_port,
    probe,
    signed,
    verified,
)
from ..distributed.waits import waiting

__all__ = [
    "ALL_CONNECTED",
    "LEFT",
    "AbsentError",
    "RankRegistry",
    "Recorded",
    "connect",
    "current_job",
    "has_ended",
    "in_words",
    "listen",
    "meeting_endpoint",
    "missing_ranks",
    "name_of_start",
    "open_store",
    "reach",
    "serve",
    "this_process",
    "wait_for_all",
    "wait_for_ends",
]

# The registry of a run's ranks: the reports that they publish, and whether their processes still run.
#
# All reports go through the job's key-value store, over a connection of its own, which the trainer's thread can't
# block. Each rank writes its own keys. One store serves all ranks, so what a rank reads on each beat does not grow
# with their number: a key by which it knows that all are connected, the processes of a few ranks that it does not know
# yet, and the beats of a few ranks of other machines.

LEFT = "left"
"""The phase of a rank whose run is over: other ranks don't wait for it."""

_STORE_TIMEOUT_S = 10.0
ALL_CONNECTED = "polyphase/process/all"
"""The key that rank 0 writes when all ranks are connected."""
_MAX_CHECKED = 8
"""The number of ranks whose keys each beat reads: of those that are not known yet, in turn, beginning with rank 0,
which may host the store, and the ones next to this rank, which are on this machine; and of those of other machines. Of
the latter, one half are always the next ones after this rank, so that a machine that is lost is noticed at once by the
ranks before its own; the other half are all the rest, in turn."""


class _Units(TypedDict):
    done: str


class _Collective(TypedDict):
    operation: str
    number: int
    is_p2p: bool
    group: str
    is_done: bool
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    input_dtypes: list[str]
    output_dtypes: list[str]


class Recorded(TypedDict):
    """The last collectives of a rank, see `flight_recorder.recorded`."""

    calls: dict[str, list[_Collective]]
    groups: dict[str, list[int]]


def _is_call(call: list[Any]) -> str | None:
    return None if [*map(type, call)] == [str, int, str] else "is no file, line and function"


class _Thread(TypedDict):
    name: str
    runs: bool
    calls: list[Annotated[list[Any], _is_call]]


_PROCESS: Fields = {"host": str, "space": str, "pid": int, "address": str, "port": int, "tells_end": bool}
_PLACE: Fields = {
    "step": int,
    "batch": int,
    "evaluated": int,
    "phase": str,
    "pending": str | None,
    "line": str | None,
    "units": _Units | None,
    "is_debugged": bool,
    "resume_from": str | None,
}
_FIELDS: dict[str, Fields] = {
    "beat": {**_PLACE, **_PROCESS, "number": int},
    "answer": {**_PLACE, "stack": str, "collectives": Recorded | None},
    "stacks": {**_PLACE, **_PROCESS, "number": str, "threads": list[_Thread]},
    "verdict": {"text": str},
    "heard": {},
}
"""The fields that each kind of report must have, down to those that its readers use."""


def _process_key(rank: int) -> str:
    """Returns the key under which a rank publishes its process, as soon as it is connected to the store."""
    return f"polyphase/process/{rank}"


class RankRegistry:
    """The ranks of a run, as one rank sees them.

    All methods may raise RuntimeError: the store's process has ended (`torch.distributed.DistError`) or does not answer
    (`StoreLostError`).

    Args:
        run: name of the run, the same on all ranks, which is a part of the keys.
        job: the store of the job.
    """

    def __init__(self, run: str, job: JobStore) -> None:
        self.rank, self.world_size = job.rank, job.num_ranks
        self.others = [rank for rank in range(self.world_size) if rank != self.rank]
        self.job = job.clone()
        self.job.store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))
        self._run = run
        self._number = 0
        self._unknown = sorted(self.others, key=lambda rank: abs(rank - self.rank) if rank else 0)
        """The ranks whose processes are not known yet, in the order in which they are looked for."""
        self._are_all_connected = False
        self.elsewhere: list[int] = []
        """The known ranks of other machines, beginning with the one after this rank."""
        self._turn = 0
        self._last_heard: dict[int, tuple[int, float]] = {}
        """The number of each rank's last beat, and the time when that was first read."""
        self.processes: dict[int, dict[str, Any]] = {}
        """Host and process id of the other ranks that are known to be connected, by rank."""
        self._local: dict[int, psutil.Process | None] = {}
        """The processes of this machine; None for one that has ended before it was seen. psutil has noted their start
        times, so a changed clock does not matter."""
        self.last: dict[int, dict[str, Any]] = {}
        """The last beat that was read of each rank."""
        self.me = this_process()
        self.job.write(_process_key(self.rank), self.me)

    def publish(self, kind: str, report: dict[str, Any]) -> None:
        """Writes a report of this rank; it replaces the former one of the same kind."""
        self.job.write(self._key(kind, self.rank), report)

    def read(self, kind: str, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
        """Returns the latest reports of this `kind` of `ranks`, by rank; does not wait for missing ones."""
        return self._read({self._key(kind, rank): rank for rank in ranks}, _FIELDS[kind])

    def beat(self, report: dict[str, Any]) -> None:
        """Publishes the position of this rank, and looks for some of the ranks that it does not know yet."""
        accept_probes()
        self._number += 1
        self.publish("beat", {"number": self._number, **self.me, **report})
        self.look_for(self._unknown[:_MAX_CHECKED])

    def look_for_all(self) -> None:
        """Reads the processes of all ranks that are not known yet, which a rank does once, to report of them."""
        with suppress(RuntimeError):
            self.look_for(self._unknown)

    def look_for(self, ranks: list[int]) -> None:
        """Reads the processes of these ranks, as far as they are connected."""
        if not ranks:
            return
        if len(self._unknown) > _MAX_CHECKED and not self._are_all_connected:
            self._are_all_connected = self.job.has(ALL_CONNECTED)
        seen = self._read({_process_key(rank): rank for rank in ranks}, _PROCESS)
        self.processes = {**self.processes, **seen}
        due = set(ranks)
        unknown = [*(rank for rank in self._unknown if rank not in due), *ranks]
        self._unknown = [rank for rank in unknown if rank not in self.processes]
        for rank in filter(self.is_local, seen):
            self._local[rank] = None
            with suppress(psutil.NoSuchProcess, ValueError, OverflowError):
                self._local[rank] = psutil.Process(self.processes[rank]["pid"])
        elsewhere = [*self.elsewhere, *(rank for rank in seen if not self.is_local(rank))]
        self.elsewhere = sorted(elsewhere, key=lambda rank: (rank - self.rank) % self.world_size)

    def _key(self, kind: str, rank: int) -> str:
        return f"polyphase/watch/{self._run}/{kind}/{rank}"

    def _read(self, keys: dict[str, int], fields: Fields) -> dict[int, dict[str, Any]]:
        return {keys[key]: report for key, report in self.job.read_all(keys, fields).items()}

    @property
    def absent(self) -> list[int]:
        """The ranks that are not connected yet."""
        return [] if self._are_all_connected else sorted(self._unknown)

    def beats(self, ranks: Iterable[int] | None = None) -> dict[int, dict[str, Any]]:
        """Returns the positions of the other ranks; the last known ones, if the store can't be read.

        Args:
            ranks: read those of these ranks only; None: of all.
        """
        with suppress(RuntimeError):
            self.last.update(self.read("beat", self.others if ranks is None else ranks))
        return self.last

    def _due(self) -> list[int]:
        """Returns the ranks of other machines whose beats are read now."""
        half = _MAX_CHECKED // 2
        near, rest = self.elsewhere[:half], self.elsewhere[half:]
        start = self._turn % len(rest) if rest else 0
        self._turn = start + half
        return near + (rest[start:] + rest[:start])[:half]

    def ended_ranks(self) -> list[int]:
        """Returns the ranks on this machine whose processes have ended before their run was over."""
        ended = [rank for rank, process in list(self._local.items()) if has_ended(process)]
        beats = self.beats(ended)
        return [rank for rank in ended if not _has_left(beats.get(rank))]

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is on this machine and has ended; makes no call of the store."""
        return rank in self._local and has_ended(self._local[rank])

    def silent(self, clock: float, longest_s: float) -> dict[int, float]:
        """Returns ranks of other machines without a recent beat, with the seconds since their last one.

        It looks at some of them, and at others when it is called again.

        Args:
            clock: the caller's time, in seconds.
            longest_s: the longest time between two beats.
        """
        due = self._due()
        beats = self.beats(due)
        for rank in due:
            number = beats[rank]["number"] if rank in beats else 0  # connected, and not one beat yet
            if _has_left(beats.get(rank)) or self._last_heard.get(rank, (-1,))[0] != number:
                self._last_heard[rank] = number, clock
        heard = {rank: self._last_heard[rank][1] for rank in due}
        return {rank: clock - at for rank, at in heard.items() if clock - at > longest_s}

    def is_gone(self, rank: int) -> bool:
        """Whether the process of a rank that is known here has ended; takes at most 2 s."""
        if rank not in self.processes or self.is_local(rank):
            return self.has_ended(rank)
        return self.probe(rank) is ProcessState.ENDED

    def has_started_this(self, rank: int) -> bool:
        """Whether a rank's process has started this one, directly or not, and so may wait for its end."""
        started_by = [process.pid for process in psutil.Process().parents()]
        return self.is_local(rank) and self.processes[rank]["pid"] in started_by

    def probe(self, rank: int) -> ProcessState:
        """Returns the state of a rank's process on another machine; takes at most 2 s."""
        process = self.processes[rank]
        return probe(process["address"], process["port"])

    def without_heartbeat(self, ranks: list[int], patience_s: float) -> list[int]:
        """Waits `patience_s` seconds; returns those of `ranks` that have no new beat, and whose run is not over."""
        before = dict(self.read("beat", ranks))
        time.sleep(patience_s)
        after = self.read("beat", ranks)
        return [rank for rank in ranks if after.get(rank) == before.get(rank) and not _has_left(after.get(rank))]

    def on_other_hosts(self, address: str | None = None) -> list[int]:
        """Returns the running ranks of other machines; of the one with this address or name, if it is given."""
        ranks = [rank for rank in sorted(self.elsewhere) if not _has_left(self.last.get(rank))]
        places = {rank: (self.processes[rank]["address"], self.processes[rank]["host"]) for rank in ranks}
        return [rank for rank in ranks if address is None or address in places[rank]]

    def hosts(self, ranks: list[int]) -> str:
        """Describes the machines of `ranks` for a message."""
        by_host: dict[str, list[int]] = {}
        for rank in ranks:
            by_host.setdefault(self.processes[rank]["host"], []).append(rank)
        return " and ".join(f"host {host} ({in_words(ranks)})" for host, ranks in by_host.items())

    def kill(self, rank: int) -> None:
        """Ends the process of a rank of this machine."""
        process = self._local.get(rank)
        # Only a process with the same parent, the parent or a child: the process id may be forged.
        with suppress(psutil.Error):
            me = psutil.Process()
            if process is not None and (me.ppid() in (process.ppid(), process.pid) or process.ppid() == me.pid):
                process.kill()

    def forget(self, ranks: list[int]) -> None:
        """Drops ranks without which the run continues."""
        gone = set(ranks)
        self.others, self._unknown, self.elsewhere = (
            [rank for rank in kind if rank not in gone] for kind in (self.others, self._unknown, self.elsewhere)
        )
        for by_rank in (self.processes, self._local, self.last, self._last_heard):
            for rank in ranks:
                by_rank.pop(rank, None)

    def is_local(self, rank: int) -> bool:
        """Whether a rank's process is on this machine, in the same process namespace."""
        process = self.processes.get(rank)
        return process is not None and all(process[key] == self.me[key] for key in ("host", "space"))


def this_process() -> dict[str, Any]:
    """Returns host, process namespace and id of this process, the address and port at which it can be probed, and
    whether it tells its end: those of multiprocessing run nothing at exit, and who has started them sees their codes.
    """
    space = ""
    with suppress(OSError):  # containers with the same host name each number their processes from 1
        space = os.readlink("/proc/self/ns/pid")
    address = own_address()
    process = {"host": socket.gethostname(), "space": space, "pid": os.getpid()}
    process["tells_end"] = multiprocessing.parent_process() is None
    return {**process, "address": address, "port": own_port(address)}


def _has_left(beat: dict[str, Any] | None) -> bool:
    return beat is not None and beat["phase"] == LEFT


def in_words(ranks: list[int]) -> str:
    """``[0, 2, 3, 4]`` -> ``"ranks 0, 2-4"``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)


def has_ended(process: psutil.Process | None) -> bool:
    """Whether a process has ended; a zombie has, too."""
    try:
        return process is None or not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


_PERIOD_S = 0.02
_MEETING = "the meeting of all"
"""The name of the wait in reports."""
_NAME = re.compile(rb"start/[0-9a-f]{32}")
_REQUEST = re.compile(rb"[0-9a-f]{32}")


class AbsentError(CausedByRank, TimeoutError):
    """Ranks have not connected in time; `rank` is the first of them."""


_ENDED = "polyphase/ended"
"""Key of rank 0's list of the ranks whose programs have failed; with a rank behind it, of what that rank says."""
_READ = f"{_ENDED}/read"
"""Counter of the ranks that have read the list, and make no further call of the store."""
_LAST_READ_S = 3.0
"""The longest time that rank 0 waits for that."""

_servers: dict[tuple[str, int], Any] = {}
"""The stores that this process has opened, by address and port; other ranks need them until it ends."""
_num_opened: dict[tuple[str, int], int] = {}
_current: dict[int, JobStore] = {}
"""The store of the job by process id: a fork is not a rank of its parent's job."""


def current_job() -> JobStore | None:
    """Returns the store of the job that this process is connected to; None without one."""
    if os.getpid() in _current:
        return _current[os.getpid()]
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # torch: the store of the default process group, if one of Lightning's own strategies has made it.
    return JobStore(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


def connect(store: dist.Store, rank: int, world_size: int) -> JobStore:
    """Makes `store` the job's store of this process, and registers this rank in it."""
    # Another connection, since torch waits in that of `store`.
    job = JobStore(store.clone(), rank, world_size)  # type: ignore[attr-defined]
    keep_connections_to(address_of(store)[1])
    job.write(_process_key(rank), this_process())
    _current[os.getpid()] = job
    return job


def wait_for_all(job: JobStore, timeout: timedelta) -> None:
    """Waits until all ranks have registered, and says so to all; rank 0 calls it.

    Raises:
        AbsentError: names the ranks that have not in time.
    """
    absent = list(range(job.num_ranks))

    def still_absent() -> list[int]:
        absent[:] = [rank for rank in absent if not job.has(_process_key(rank))]
        return absent

    _await(still_absent, job.num_ranks, timeout)
    job.write(ALL_CONNECTED, {})


def wait_for_ends(job: JobStore, *, has_failed: bool, longest_s: float) -> list[int]:
    """Tells the other ranks how this one's program ends, and learns how theirs do; called when each of them exits.

    Phases: each rank writes whether it has failed; rank 0, whose process may host the store, waits for all of them and
    writes which have; the others read that and count themselves, for which rank 0 waits last.

    Args:
        job: the store of the job.
        has_failed: whether an exception ends this program: then it waits for none.
        longest_s: the longest time to wait.

    Returns:
        The ranks that have failed; none of those that take longer.
    """
    deadline = time.monotonic() + longest_s
    try:
        ranks = RankRegistry("end", job)
        ranks.job.write(f"{_ENDED}/{job.rank}", {"failed": has_failed})
        if job.rank:
            return [] if has_failed else _failed_by_rank_0(ranks, deadline)
        failed = [0] if has_failed else _failed_ranks(ranks, deadline)
        ranks.job.write(_ENDED, {"failed": failed})
        deadline = time.monotonic() + _LAST_READ_S
        while ranks.job.count(_READ) < job.num_ranks - 1 - len({*failed} - {0}) and time.monotonic() < deadline:
            time.sleep(_PERIOD_S)
        return failed
    except RuntimeError:  # the store's host has ended, so not all ranks have ended well
        return [0] if job.rank and not has_failed else []


def _failed_ranks(ranks: RankRegistry, deadline: float) -> list[int]:
    """Waits as rank 0 until all others end well, or one has failed, by its words or since it could say none."""
    ranks.look_for_all()
    running = ranks.others
    while running and time.monotonic() < deadline:
        due, rest = running[:_MAX_CHECKED], running[_MAX_CHECKED:]
        gone = list(filter(ranks.is_gone, due))  # looked at before their last words are
        words = ranks.job.read_all([f"{_ENDED}/{rank}" for rank in due], {"failed": bool})
        ends = {rank: words.get(f"{_ENDED}/{rank}") for rank in due}
        killed = [rank for rank in gone if ends[rank] is None and ranks.processes[rank]["tells_end"]]
        if failed := [rank for rank, end in ends.items() if rank in killed or (end is not None and end["failed"])]:
            return failed
        running = [*rest, *(rank for rank, end in ends.items() if end is None and rank not in gone)]
        time.sleep(_PERIOD_S)
    return []


def _failed_by_rank_0(ranks: RankRegistry, deadline: float) -> list[int]:
    ranks.look_for([0])
    if ranks.has_started_this(0):
        return []
    while time.monotonic() < deadline:
        is_gone = ranks.is_gone(0)
        if (end := ranks.job.read(_ENDED, {"failed": list})) is not None:
            ranks.job.count(_READ, 1)
            return [rank for rank in end["failed"] if type(rank) is int]
        if is_gone:
            return [0]
        time.sleep(_PERIOD_S)
    return []


def open_store(address: str, port: int, timeout: timedelta, *, hosts: bool, is_local: bool) -> dist.Store:
    """Opens the store that rank 0, or its launcher, hosts; the n-th calls of all ranks get the same prefix of it.

    Args:
        address: address of the host's machine.
        port: the port on which the host listens.
        timeout: the longest time to wait for the host.
        hosts: whether this process is the host.
        is_local: all ranks are on this machine; the host listens on `address` alone.

    Raises:
        torch.distributed.DistNetworkError: the port is taken, or the host has not opened the store in time.
    """
    endpoint = address, port
    if endpoint not in _servers:
        _endpoint[:] = [f"{address}:{port}"]
        _servers[endpoint] = _server(address, port, timeout, is_local) if hosts else reach(address, port, timeout)
    number = _num_opened[endpoint] = _num_opened.get(endpoint, -1) + 1
    return dist.PrefixStore(f"meeting/{number}", _servers[endpoint])


def reach(address: str, port: int, timeout: timedelta) -> dist.Store:
    """Connects to the store that another process hosts.

    Args:
        address: address of its machine.
        port: the port on which it listens.
        timeout: the longest time to wait for it.
    """
    _endpoint[:] = [f"{address}:{port}"]
    with waiting(_MEETING):
        return dist.TCPStore(address, port, is_master=False, timeout=timeout)


def _server(address: str, port: int, timeout: timedelta, is_local: bool) -> dist.Store:
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
    if is_local:
        # torch's own server listens on all interfaces, whatever its address.
        options["master_listen_fd"] = listen(address, port).detach()
    # torch connects to its own server, too, for which this machine need not know the name by which others reach it.
    return dist.TCPStore(address if is_local else "127.0.0.1", port, **options)


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens for the ranks of this machine.

    Raises:
        torch.distributed.DistNetworkError: the port is taken.
    """
    try:
        family, _, _, _, address_info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((address_info[0], port), family=family)
    except OSError as error:
        place = f"{address}:{port} (MASTER_ADDR and MASTER_PORT)"
        raise dist.DistNetworkError(f"rank 0 can't listen on {place}, for the others: {error}") from None


def serve(listening: socket.socket) -> Any:
    """Returns a store that answers the ranks of this machine, as long as it is referred to."""
    port = listening.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def meeting_endpoint() -> str:
    """Returns where this process meets the other ranks, for a message; empty before it has looked for them."""
    return f" at {_endpoint[0]} (MASTER_ADDR and MASTER_PORT)" if _endpoint else ""


def missing_ranks() -> list[int]:
    """Returns the ranks that this process waits for in the rendezvous at this moment."""
    return list(_missing)


_missing: list[int] = []
_endpoint: list[str] = []
"""The address and port of the store that this process has opened or looked for last; none before that."""


def _await(absent: Callable[[], list[int]], world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    with waiting(_MEETING):
        try:
            while missing := absent():
                _missing[:] = missing
                if time.monotonic() > deadline:
                    raise AbsentError(
                        f"{in_words(missing)} of {world_size} did not connect within {timeout}.", missing[0]
                    )
                time.sleep(_PERIOD_S)
        finally:
            _missing.clear()


def name_of_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """Returns a unique name of this start, the same on all of its ranks; all ranks call it.

    Args:
        store: shared by all starts of the job.
        rank: this rank, 0 to `world_size` - 1.
        world_size: number of ranks of this start.
        timeout: the longest time to wait for the other ranks.

    Raises:
        AbsentError: some ranks have not called it in time.
    """
    if rank > 0:
        return _name_from_rank_0(store, rank, world_size, timeout)
    name = f"start/{uuid.uuid4().hex}"
    absent, answered = set(range(1, world_size)), set()

    def missing() -> list[int]:
        for other in list(absent):
            if store.check([f"{name}/here/{other}"]):
                absent.remove(other)
                continue
            request = _read(store, f"asks/{other}", _REQUEST)
            if request is not None and request not in answered:
                answered.add(request)
                _write(store, f"answer/{request}", name)
        return sorted(absent)

    _await(missing, world_size, timeout)
    return name


def _name_from_rank_0(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    # The rank alone does not identify a request: the same rank of an earlier start has made one, too.
    request = uuid.uuid4().hex
    key = f"asks/{rank}"
    names: list[str | None] = []

    def missing() -> list[int]:
        if _read(store, key, _REQUEST) != request:  # not written yet, or overwritten by another process
            _write(store, key, request)
        names[:] = [_read(store, f"answer/{request}", _NAME)]
        return [0] if names[0] is None else []

    _await(missing, world_size, timeout)
    name = names[0]
    assert name is not None
    store.set(f"{name}/here/{rank}", "")
    return name


def _write(store: Any, key: str, text: str) -> None:
    store.set(key, signed(key, text.encode()))


def _read(store: dist.Store, key: str, pattern: re.Pattern[bytes]) -> str | None:
    """Reads the text under a key; returns None if there is none that is signed and matches `pattern`."""
    content = verified(key, store.get(key)) if store.check([key]) else None
    return content.decode() if content is not None and pattern.fullmatch(content) else None
