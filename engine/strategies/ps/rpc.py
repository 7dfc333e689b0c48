"""The wire of `ps`: `torch.distributed.rpc` over TCP, on the loopback interface unless an address is named.

https://docs.pytorch.org/docs/stable/rpc.html. Three things differ from a plain `init_rpc`:

- the ranks find each other by the store of the job, so no further port is opened for that;
- a message can name the functions of `ALLOWED` and nothing else, where torch would call whatever a pickle names;
- a call of a rank to itself is a call.

There is no password: whoever reaches the port can push gradients, or end the run. So it must not be a public one.
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

# torch: the module by whose `_unpickler` everything that arrives is opened.
from torch.distributed.rpc import internal
from torch.futures import Future

from ...phases import waits

__all__ = ["ALLOWED", "Connection", "interface_of"]

ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {}
"""The functions that a message may call, by module and name; each module that serves adds its own."""

_SCHEME = "polyphase"
_TICK_S = 0.2
"""The time after which a waiting rank looks again whether it still has to wait."""
_THREADS = 4
"""That answer the others; none of them ever waits."""
_PATIENCE_S = 30.0
"""The time that the ranks wait for each other at the end, once all are there."""
_numbers = itertools.count()
"""Numbers the connections of this process, which are those of all ranks."""


def interface_of(address: str) -> str:
    """Name of the network interface of this machine that has `address`.

    Args:
        address: an IP address, a network that it is in ("10.0.0.0/24"), or the name of an interface.

    Raises:
        ValueError: there is none.
    """
    interfaces = psutil.net_if_addrs()
    if address in interfaces:
        return address
    try:
        network = ipaddress.ip_network(address, strict=False)
    except ValueError:
        network = None
    here = {
        each.address.partition("%")[0]: name
        for name, addresses in interfaces.items()
        for each in addresses
        if each.family in (socket.AF_INET, socket.AF_INET6)
    }
    for own, name in here.items():
        if network is not None and ipaddress.ip_address(own) in network:
            return name
    have = ", ".join(f"{own} ({name})" for own, name in here.items())
    raise ValueError(
        "ps:address must be an IP address of this machine, a network that it is in (10.0.0.0/24), or the name of an"
        f" interface, but got {address!r}. This machine has {have}."
    )


class _Unpickler(pickle.Unpickler):
    """Opens messages that consist of tensors, plain values, and functions of `ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return ALLOWED[module, name]
        if (module, name) == ("builtins", "getattr"):
            return _receiver_of
        found = super().find_class(module, name) if module in ("builtins", *_TORCHS) else None
        if module in _TORCHS and name in _TORCHS[module]:
            return found
        if isinstance(found, type) and issubclass(found, Exception):
            return found
        raise pickle.UnpicklingError(f"a message names {module}.{name}, which is not among what ps may be asked for")


# torch: a call, an answer that is an exception, a place for a tensor; and what its own start-up calls.
_TORCHS = {
    internal.__name__: ("PythonUDF", "RemoteException", "_InternalRPCPickler"),
    "torch.distributed.rpc.api": ("_gather_to_leader", "_broadcast_to_followers"),
}


def _receiver_of(owner: Any, name: str) -> Any:
    """In place of `getattr`, by which a pickle would get at everything."""
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
    """This rank's connection to the others, which are started at the same time and may be lost one by one.

    Args:
        timeout_s: how long a call may take.
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
            # torch: TCP alone. All else is for one machine, for InfiniBand, or for tensors on GPUs: messages are on the
            # CPU, and what is for GPUs would take some of their memory.
            _transports=["uv"],
            _channels=["basic"],
        )
        internal._unpickler = _Unpickler
        with warnings.catch_warnings():
            # torch 2.13 of what it does itself in there.
            warnings.filterwarnings("ignore", "You are using a Backend .* as a ProcessGroup")
            rpc.init_rpc(_name(self.rank), rank=self.rank, world_size=self.world_size, rpc_backend_options=options)
        atexit.register(self._end)

    @property
    def is_open(self) -> bool:
        """Whether the others can be asked for anything: a rank that fails ends its process group."""
        return dist.is_initialized() and not self.is_ended

    @property
    def living(self) -> list[int]:
        """The ranks that are not lost."""
        return [rank for rank in range(self.world_size) if rank not in self.lost]

    def call(self, rank: int, function: Callable[..., Future], *arguments: Any) -> Future:
        """Has `function`, one of `ALLOWED`, called on a rank.

        Args:
            rank: may be this one.
            function: decorated by `rpc.functions.async_execution`.
            *arguments: tensors on the CPU and plain values.
        """
        if rank == self.rank:
            return function(*arguments)
        return rpc.rpc_async(_name(rank), function, args=arguments, timeout=self.timeout_s)

    def late(self, calls: dict[int, Future], patience_s: float) -> list[int]:
        """The ranks that have not answered their calls after so long."""
        deadline = time.monotonic() + patience_s
        return [rank for rank, call in calls.items() if not _done(call).wait(max(0.0, deadline - time.monotonic()))]

    @waits
    def wait(self, calls: dict[int, Future], what: str) -> dict[int, Any]:
        """The answers to calls, by rank.

        Raises:
            RuntimeError: a rank can't be reached, or did not answer in time; names it.
        """
        deadline = time.monotonic() + self.timeout_s
        answers = {}
        for rank, future in calls.items():
            # Not by Future.wait, in which no signal is handled and which knows no deadline.
            is_there = _done(future)
            while not is_there.wait(_TICK_S):
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"rank {rank} was asked {what}, and has not answered in {self.timeout_s:g} s.")
            try:
                answers[rank] = future.value()
            except RuntimeError as failure:
                raise RuntimeError(f"rank {rank} was asked {what}, and could not answer: {failure}") from failure
        return answers

    def close(self) -> None:
        """Ends it, when none of the living ranks needs another any more; all of them call it."""
        atexit.unregister(self._end)
        is_whole = self.is_open and self._part()
        with suppress(RuntimeError):  # a rank was lost only now
            # torch: waits for all ranks there ever were, and without that complains of those that end first.
            rpc.shutdown(graceful=is_whole, timeout=min(self.timeout_s, _PATIENCE_S))
        self.is_ended = True
        internal._unpickler = pickle.Unpickler

    def _part(self) -> bool:
        """Waits until all living ranks are here, and says whether they are all there ever were.

        Rank 0 decides that: the others may not have heard of a loss yet, or hear of it just now. It has the store, so
        it leaves when they have heard.
        """
        store: Any = dist.PrefixStore(f"polyphase/rpc/parting/{self._number}", _store())
        with suppress(RuntimeError):  # the store is gone, with rank 0
            store.set(f"here/{self.rank}", "")
            if self.rank == 0:
                self._await(store, lambda: [f"here/{rank}" for rank in self.living])
                store.set("who", "some" if self.lost else "all")
            else:
                self._await(store, lambda: ["who"])
            is_whole = store.get("who") == b"all"
            store.set(f"heard/{self.rank}", "")
            if self.rank == 0:
                self._await(store, lambda: [f"heard/{rank}" for rank in self.living])
            return is_whole
        return False

    def _await(self, store: Any, keys: Callable[[], list[str]]) -> None:
        """Waits until the store has them; ranks may be lost meanwhile."""
        deadline = time.monotonic() + self.timeout_s
        while not store.check(keys()):
            if time.monotonic() > deadline:
                raise RuntimeError("the other ranks don't end")
            time.sleep(_TICK_S / 10)

    def _end(self) -> None:
        if not self.is_ended:
            rpc.shutdown(graceful=False)


def _done(future: Future) -> threading.Event:
    """Is set when `future` has a value, or an error."""
    event = threading.Event()
    future.add_done_callback(lambda _: event.set())
    return event


def _name(rank: int) -> str:
    return f"rank{rank}"
