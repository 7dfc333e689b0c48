"""The rendezvous of the ranks of one start of a job, in a key-value store.

If no launcher has a store, rank 0 opens one: on the loopback interface if all ranks are on one machine, otherwise by
torch's own server. Each rank registers in it, so that the waiting ranks know which ones are missing.

torchrun keeps one store over all starts of a job. torch would find the addresses of the last start's processes there,
and wait for them until its timeout. So each start has its own prefix in the store. torchrun gives its processes no
unique name of a start: nodes that join later count restarts from 0. So rank 0 makes up a name, and the other ranks
request it.
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

from ..distributed.job_store import CausedByRank, JobStore, signed, verified
from ..distributed.waits import waiting
from .rank_registry import ALL_CONNECTED, absent_ranks, in_words, process_key, this_process

__all__ = ["AbsentError", "connect", "current_job", "missing_ranks", "name_of_start", "open_store", "wait_for_all"]

_PERIOD_S = 0.02
_MEETING = "the meeting of all"
"""The name of the wait in reports."""
_NAME = re.compile(rb"start/[0-9a-f]{32}")
_REQUEST = re.compile(rb"[0-9a-f]{32}")


class AbsentError(CausedByRank, TimeoutError):
    """Ranks have not connected in time; `rank` is the first of them."""


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
    job.write(process_key(rank), this_process())
    _current[os.getpid()] = job
    return job


def wait_for_all(job: JobStore, timeout: timedelta) -> None:
    """Waits until all ranks have registered, and says so to all; rank 0 calls it.

    Raises:
        AbsentError: names the ranks that have not in time.
    """
    absent = list(range(job.num_ranks))

    def still_absent() -> list[int]:
        absent[:] = absent_ranks(job, absent)
        return absent

    _await(still_absent, job.num_ranks, timeout)
    job.write(ALL_CONNECTED, {})


def open_store(address: str, port: int, rank: int, timeout: timedelta, *, is_local: bool) -> dist.Store:
    """Opens the store that rank 0 hosts; the n-th calls of all ranks get the same prefix of it.

    Args:
        address: address of rank 0's machine.
        port: the port on which rank 0 listens.
        rank: this rank.
        timeout: the longest time to wait for rank 0.
        is_local: all ranks are on this machine; rank 0 listens on `address` alone.

    Raises:
        torch.distributed.DistNetworkError: the port is taken, or rank 0 has not opened the store in time.
    """
    endpoint = address, port
    if endpoint not in _servers:
        if rank == 0:
            _servers[endpoint] = _server(address, port, timeout, is_local)
        else:
            with waiting(_MEETING):
                _servers[endpoint] = dist.TCPStore(address, port, is_master=False, timeout=timeout)
    number = _num_opened[endpoint] = _num_opened.get(endpoint, -1) + 1
    return dist.PrefixStore(f"meeting/{number}", _servers[endpoint])


def _server(address: str, port: int, timeout: timedelta, is_local: bool) -> dist.Store:
    options: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "timeout": timeout}
    if is_local:
        # torch's own server listens on all interfaces, whatever its address.
        family, _, _, _, address_info = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        try:
            options["master_listen_fd"] = socket.create_server((address_info[0], port), family=family).detach()
        except OSError as error:
            raise dist.DistNetworkError(f"rank 0 can't listen on {address}:{port}, for the others: {error}") from None
    return dist.TCPStore(address, port, **options)


def missing_ranks() -> list[int]:
    """Returns the ranks that this process waits for in the rendezvous at this moment."""
    return list(_missing)


_missing: list[int] = []


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
