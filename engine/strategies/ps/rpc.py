"""Remote calls of `ps`: `torch.distributed.rpc` over TCP, on the loopback interface unless an address is named.

https://docs.pytorch.org/docs/stable/rpc.html. Three things differ from a plain `init_rpc`:

- the ranks find each other by the store of the job, so no further port is opened for that;
- a message can call the functions of `ALLOWED` only, where torch would call whatever a pickle names;
- a call of a rank to itself is an ordinary function call.

There is no password: whoever reaches the port can push gradients, or end the run. So the port must not be public.
"""

import atexit
import ipaddress
import itertools
import pickle
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed import rpc

# torch: its `_unpickler` reads each message.
from torch.distributed.rpc import internal
from torch.futures import Future

from ...distributed.waits import waiting
from ...phases import counts_as_communication

__all__ = ["ALLOWED", "Connection", "interface_of"]

ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {}
"""The functions that a message may call, by module and name; each module adds its own."""

_SCHEME = "polyphase"
_TICK_S = 0.2
"""The period in which a waiting rank checks its deadline."""
_THREADS = 4
"""Threads that answer calls of other ranks; none of them blocks."""
_SHUTDOWN_S = 30.0
"""The longest time that the ranks wait for each other to shut down, once all have asked for it."""
_numbers = itertools.count()
"""Numbers the connections of this process: the same numbers on all ranks."""


def interface_of(address: str) -> str:
    """Returns the name of the network interface of this machine that has `address`.

    Args:
        address: an IP address, a network that it is in ("10.0.0.0/24"), or the name of an interface.

    Raises:
        ValueError: this machine has no such interface.
    """
    interfaces = psutil.net_if_addrs()
    if address in interfaces:
        return address
    try:
        network = ipaddress.ip_network(address, strict=False)
    except ValueError:
        network = None
    names_by_address = {
        entry.address.partition("%")[0]: name
        for name, entries in interfaces.items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    for address_here, name in names_by_address.items():
        if network is not None and ipaddress.ip_address(address_here) in network:
            return name
    have = ", ".join(f"{address_here} ({name})" for address_here, name in names_by_address.items())
    raise ValueError(
        "ps:address must be an IP address of this machine, a network that it is in (10.0.0.0/24), or the name of an"
        f" interface, but got {address!r}. This machine has {have}."
    )


class _Unpickler(pickle.Unpickler):
    """Reads messages of tensors, plain values, exceptions, and functions of `ALLOWED`; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _receiver_of
        value = super().find_class(module, name) if module in ("builtins", *_TORCH_NAMES) else None
        if module in _TORCH_NAMES and name in _TORCH_NAMES[module]:
            return value
        if isinstance(value, type) and issubclass(value, Exception):
            return value
        raise pickle.UnpicklingError(f"a message names {module}.{name}, which is not among what ps may be asked for")


# torch: the classes of a call, of an exception as answer and of a tensor's slot; and the calls of its own start-up.
_TORCH_NAMES = {
    internal.__name__: ("PythonUDF", "RemoteException", "_InternalRPCPickler"),
    "torch.distributed.rpc.api": ("_gather_to_leader", "_broadcast_to_followers"),
}


def _receiver_of(owner: Any, name: str) -> Any:
    """Replaces `getattr`, by which a pickle could reach everything."""
    if (owner, name) != (internal._InternalRPCPickler, "_tensor_receiver"):
        raise pickle.UnpicklingError(f"a message asks for {name!r} of {owner!r}")
    return internal._InternalRPCPickler._tensor_receiver


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    # torch: the store under the default process group; a clone, since torch sets a timeout of its own on it.
    yield dist.PrefixStore("polyphase/rpc", _store().clone()), dist.get_rank(), dist.get_world_size()


dist.register_rendezvous_handler(_SCHEME, _rendezvous)


class Connection:
    """This rank's connection to the other ranks, which start together and may be lost one by one.

    Args:
        timeout_s: the longest time of a call, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_s = timeout_s
        self._number = next(_numbers)
        self.is_ended = False
        self.lost: frozenset[int] = frozenset()
        """Ranks whose processes have ended."""
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"{_SCHEME}://",
            num_worker_threads=_THREADS,
            rpc_timeout=timeout_s,
            # torch: TCP alone. Other transports are for one machine, InfiniBand, or tensors on GPUs: messages are on
            # the CPU, and a transport for GPUs would take some of their memory.
            _transports=["uv"],
            _channels=["basic"],
        )
        internal._unpickler = _Unpickler
        with warnings.catch_warnings():
            # torch 2.13 warns of its own call.
            warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup")
            rpc.init_rpc(_name(self.rank), rank=self.rank, world_size=self.world_size, rpc_backend_options=options)
        atexit.register(self._end)

    @property
    def is_open(self) -> bool:
        """Whether the other ranks can be called: a rank that fails ends its process group."""
        return dist.is_initialized() and not self.is_ended

    @property
    def surviving(self) -> list[int]:
        """The ranks that are not lost."""
        return [rank for rank in range(self.world_size) if rank not in self.lost]

    def call(self, rank: int, function: Callable[..., Future], *arguments: Any) -> Future:
        """Calls a function on a rank.

        Args:
            rank: may be this one.
            function: one of `ALLOWED`, decorated by `rpc.functions.async_execution`.
            *arguments: tensors on the CPU and plain values.
        """
        if rank == self.rank:
            return function(*arguments)
        return rpc.rpc_async(_name(rank), function, args=arguments, timeout=self.timeout_s)

    def late_ranks(self, calls: dict[int, Future], patience_s: float) -> list[int]:
        """Waits for the answers for at most `patience_s`; returns the ranks that have not answered by then."""
        deadline = time.monotonic() + patience_s
        return [rank for rank, call in calls.items() if not _done(call).wait(max(0.0, deadline - time.monotonic()))]

    @counts_as_communication
    def wait(self, calls: dict[int, Future], purpose: str) -> dict[int, Any]:
        """Waits for the answers to calls; returns them by rank.

        Args:
            calls: by rank.
            purpose: the object of "the ranks were asked", for messages: "for its share of the parameters".

        Raises:
            RuntimeError: a rank can't be reached, or did not answer in time; names it.
        """
        deadline = time.monotonic() + self.timeout_s
        answers = {}
        with waiting("a call to another rank"):
            for rank, future in calls.items():
                # Not by Future.wait, which handles no signal and has no timeout.
                has_answered = _done(future)
                while not has_answered.wait(_TICK_S):
                    if time.monotonic() >= deadline:
                        raise RuntimeError(
                            f"rank {rank} was asked {purpose}, and has not answered in {self.timeout_s:g} s."
                        )
                try:
                    answers[rank] = future.value()
                except RuntimeError as failure:
                    raise RuntimeError(f"rank {rank} was asked {purpose}, and could not answer: {failure}") from failure
        return answers

    def close(self) -> None:
        """Ends the connection when all surviving ranks have called this, so that no rank needs another one any more."""
        atexit.unregister(self._end)
        is_complete = self.is_open and self._agree_to_close()
        with suppress(RuntimeError):  # a rank was lost only now
            # torch: a graceful shutdown waits for all ranks that were started, lost ones too; without it, torch
            # complains of the ranks that end first.
            rpc.shutdown(graceful=is_complete, timeout=min(self.timeout_s, _SHUTDOWN_S))
        self.is_ended = True
        internal._unpickler = pickle.Unpickler

    def _agree_to_close(self) -> bool:
        """Waits until all surviving ranks close; returns whether no rank was lost.

        Rank 0 decides whether a rank was lost, since ranks learn of a loss at different times. Rank 0 hosts the store,
        so it leaves after all ranks have read its answer.
        """
        store: Any = dist.PrefixStore(f"polyphase/rpc/parting/{self._number}", _store())
        with suppress(RuntimeError):  # the store is gone, with rank 0, or other ranks do not close in time
            store.set(f"here/{self.rank}", "")
            if self.rank == 0:
                self._await_keys(store, lambda: [f"here/{rank}" for rank in self.surviving])
                store.set("who", "some" if self.lost else "all")
            else:
                self._await_keys(store, lambda: ["who"])
            is_complete = store.get("who") == b"all"
            store.set(f"heard/{self.rank}", "")
            if self.rank == 0:
                self._await_keys(store, lambda: [f"heard/{rank}" for rank in self.surviving])
            return is_complete
        return False

    def _await_keys(self, store: Any, keys: Callable[[], list[str]]) -> None:
        """Waits until the store has all keys; `keys` is called for each check, since ranks may be lost meanwhile."""
        deadline = time.monotonic() + self.timeout_s
        with waiting("the end of the parameter server"):
            while not store.check(keys()):
                if time.monotonic() > deadline:
                    raise RuntimeError("the other ranks don't end")
                time.sleep(_TICK_S / 10)

    def _end(self) -> None:
        if not self.is_ended:
            rpc.shutdown(graceful=False)


def _done(future: Future) -> threading.Event:
    """Returns an event that is set once `future` has a value, or an error."""
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event


def _name(rank: int) -> str:
    return f"rank{rank}"
