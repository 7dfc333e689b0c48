"""The rendezvous of the ranks of one start of a job, by a key-value store.

Where no launcher keeps a store, rank 0 opens one: on the loopback interface if all ranks are on one machine, by torch's
own server otherwise. The ranks say in it that they are there, so that whoever waits knows for whom.

torchrun keeps one key-value store over all starts. torch would look in it for the addresses of the peers, find those of
the last start, whose processes are gone, and wait for them until its timeout. So each start has a part of the store of
its own. Nothing that torchrun tells its processes names a start: nodes that joined later count restarts from 0. So rank
0 makes up a name, and tells it to whoever asks.
"""

import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..distributed.job_store import CausedByRank, JobStore
from ..distributed.signing import opened, signed
from ..distributed.waits import waiting
from .rank_registry import absent_ranks, process_key, this_process

__all__ = ["AbsentError", "connect", "current_job", "missing_ranks", "name_of_start", "open_store", "wait_for_all"]

_PERIOD_S = 0.02
_MEETING = "the meeting of all"
"""The name of the wait, in reports."""
_NAME = re.compile(rb"start/[0-9a-f]{32}")
_QUESTION = re.compile(rb"[0-9a-f]{32}")


class AbsentError(CausedByRank, TimeoutError):
    """Ranks did not come; `rank` is the first of them."""


_servers: dict[tuple[str, int], Any] = {}
"""The stores that this process has opened, which others may need until it ends."""
_number_of_meeting: dict[tuple[str, int], int] = {}
_current: dict[int, JobStore] = {}
"""The store of the job by process id, as a fork is no rank of its parent's job."""


def current_job() -> JobStore | None:
    """The store of the job that this process takes part in, once it is connected to it; None without one."""
    if os.getpid() in _current:
        return _current[os.getpid()]
    if not (dist.is_available() and dist.is_initialized()):
        return None
    # torch: the store under the default process group, which a strategy of Lightning's own has made.
    return JobStore(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())


def connect(store: dist.Store, rank: int, world_size: int) -> JobStore:
    """From now on `store` is the job's: this rank's threads can use it, and the others know of this process."""
    # A connection of its own: torch waits in that of `store`.
    job = JobStore(store.clone(), rank, world_size)  # type: ignore[attr-defined]
    job.write(process_key(rank), this_process())
    _current[os.getpid()] = job
    return job


def wait_for_all(job: JobStore, timeout: timedelta) -> None:
    """Waits until all ranks have come.

    Raises:
        AbsentError: some did not; names them.
    """
    _await(lambda: absent_ranks(job), job.num_ranks, timeout)


def open_store(address: str, port: int, rank: int, timeout: timedelta, *, is_local: bool) -> dist.Store:
    """A part of the store that rank 0 keeps; the n-th call of each rank is for one part.

    Args:
        address: of rank 0's machine.
        port: on which it listens.
        rank: this rank.
        timeout: how long to wait for rank 0.
        is_local: all ranks are on this machine; listen on `address` alone.

    Raises:
        torch.distributed.DistNetworkError: the port is taken; or rank 0 did not come.
    """
    place = address, port
    if place not in _servers:
        if rank == 0:
            _servers[place] = _server(address, port, timeout, is_local)
        else:
            with waiting(_MEETING):
                _servers[place] = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    number = _number_of_meeting[place] = _number_of_meeting.get(place, -1) + 1
    return dist.PrefixStore(f"meeting/{number}", _servers[place])


def _server(address: str, port: int, timeout: timedelta, is_local: bool) -> dist.Store:
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
    if is_local:
        # torch's own server listens on all interfaces, whatever address it is given.
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        try:
            options["master_listen_fd"] = socket.create_server((where[0], port), family=family).detach()
        except OSError as error:
            raise dist.DistNetworkError(f"rank 0 can't listen on {address}:{port}, for the others: {error}") from None
    return dist.TCPStore(address, port, **options)


def missing_ranks() -> list[int]:
    """Those that this process waits for at this moment, to meet."""
    return list(_missing)


_missing: list[int] = []


def _await(absent: Callable[[], list[int]], world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    with waiting(_MEETING):
        try:
            while missing := absent():
                _missing[:] = missing
                if time.monotonic() > deadline:
                    raise AbsentError(f"ranks {missing} of {world_size} have not come within {timeout}.", missing[0])
                time.sleep(_PERIOD_S)
        finally:
            _missing.clear()


def name_of_start(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name that the ranks of this start have in common, and no other start has; all ranks call it.

    Args:
        store: what all starts share.
        rank: this rank, 0 to `world_size` - 1.
        world_size: number of ranks of this start.
        timeout: how long to wait for the others.

    Raises:
        AbsentError: some ranks did not come.
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
            question = _said(store, f"asks/{other}", _QUESTION)
            if question is not None and question not in answered:
                answered.add(question)
                _say(store, f"answer/{question}", name)
        return sorted(absent)

    _await(missing, world_size, timeout)
    return name


def _name_from_rank_0(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    # Not the rank's number alone: that is what this rank of an earlier start has asked under.
    question = uuid.uuid4().hex
    asks = f"asks/{rank}"
    names: list[str | None] = []

    def missing() -> list[int]:
        if _said(store, asks, _QUESTION) != question:  # the first time; or somebody else has written over it
            _say(store, asks, question)
        names[:] = [_said(store, f"answer/{question}", _NAME)]
        return [0] if names[0] is None else []

    _await(missing, world_size, timeout)
    name = names[0]
    assert name is not None
    store.set(f"{name}/here/{rank}", "")
    return name


def _say(store: Any, key: str, what: str) -> None:
    store.set(key, signed(key, what.encode()))


def _said(store: dist.Store, key: str, pattern: re.Pattern[bytes]) -> str | None:
    """Reads the text under a key; None if there is none, or if it is not what a rank of this job would write."""
    content = opened(key, store.get(key)) if store.check([key]) else None
    return content.decode() if content is not None and pattern.fullmatch(content) else None
