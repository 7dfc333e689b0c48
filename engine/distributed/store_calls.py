"""Calls of the job's key-value store with a time limit.

torch's client waits for a response until the kernel gives up the connection. If the other host has lost its power, or
the network drops packets, this takes a quarter of an hour, in which the calling thread can do nothing else. So a
separate thread makes the calls, and the caller waits for a limited time.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from .host_liveness import ProcessState, probe

__all__ = ["PATIENCE_S", "StoreLine", "StoreLostError", "end_threads", "place_of"]

PATIENCE_S = 22.0
"""The longest time that a call of a store may take."""
_LONGEST_S = 60.0
"""The longest time if the store's process still accepts connections: TCP may wait to resend after a network failure."""
_TICK_S = 1.0

_lines: "weakref.WeakSet[StoreLine]" = weakref.WeakSet()


class StoreLostError(RuntimeError):
    """The store has not answered in time; no further call is made."""


class _Result:
    """The value that a call has returned, or the error that it has raised."""

    def __init__(self) -> None:
        self.is_ready = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class StoreLine:
    """One connection to a store.

    Args:
        store: a store of torch.
        other: another connection to the same store; if one of the two is lost, both are.
    """

    def __init__(self, store: dist.Store, other: "StoreLine | None" = None) -> None:
        self.store: Any = store
        self.patience_s = PATIENCE_S
        self.waited_s = 0.0
        """The seconds that the call in flight has taken so far, without the time in which the machine was suspended."""
        self.gives_up: Callable[[], bool] = lambda: False
        """Called once a second by the thread that waits for a call: whether to stop waiting."""
        self._losses: list[str] = [] if other is None else other._losses
        self._lock = threading.Lock()
        self._calling_thread = 0
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0
        _lines.add(self)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the store.

        Raises:
            StoreLostError: the store has not answered in time, now or earlier.
            RuntimeError: (`torch.distributed.DistError`) the store's process has ended.
        """
        if self._losses:
            raise StoreLostError(self._losses[0])
        if self._calling_thread == threading.get_ident():
            raise StoreLostError(f"{place_of(self.store)} has not answered yet.")
        with self._lock:
            self._calling_thread = threading.get_ident()
            try:
                return self._call(method, arguments)
            finally:
                self._calling_thread, self.waited_s = 0, 0.0

    def _call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._start()
        result = _Result()
        self._requests.put((result, getattr(self.store, method), arguments))
        before = time.monotonic()
        while not result.is_ready.wait(_TICK_S):
            now = time.monotonic()
            self.waited_s += min(now - before, _TICK_S)
            before = now
            if (self.gives_up() or self._is_lost()) and not result.is_ready.is_set():
                self._losses.append(f"{place_of(self.store)} has not answered for {self.waited_s:.0f} s.")
                raise StoreLostError(self._losses[0])
        if result.error is not None:
            raise result.error
        return result.value

    def _is_lost(self) -> bool:
        if self.waited_s < self.patience_s:
            return False
        return self.waited_s >= _LONGEST_S or probe(*_address(self.store)) != ProcessState.LIVES

    def _start(self) -> None:
        """Starts the thread that makes the calls, if this process (it may be a fork) has none yet."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._requests = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._requests,), name="polyphase-store", daemon=True)
        self._thread.start()
        # The thread has no reference to this object, and ends when it is collected.
        weakref.finalize(self, self._requests.put, None).atexit = False

    def end_thread(self) -> None:
        """Ends the thread, unless it is in a call, which may never return; the next call starts another thread."""
        if self._thread is None or self._process != os.getpid() or self._losses:
            return
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._requests.put(None)
            self._thread.join(_TICK_S)
            self._process = 0
        finally:
            self._lock.release()


def end_threads() -> None:
    """Ends the idle threads of all connections; called when a run is over."""
    for line in list(_lines):
        line.end_thread()


def _serve(requests: "SimpleQueue[Any]") -> None:
    while (request := requests.get()) is not None:
        result, call, arguments = request
        try:
            result.value = call(*arguments)
        except BaseException as error:  # raised again in the calling thread
            result.error = error
        result.is_ready.set()
        del request, result, call, arguments


def place_of(store: Any) -> str:
    """Names a store in a message, with its address if it has one."""
    host, port = _address(store)
    return f"the job's key-value store at {host}:{port}" if host else "the job's key-value store"


def _address(store: Any) -> tuple[str, int]:
    while hasattr(store, "underlying_store"):  # torch: PrefixStore
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "host") else ("", 0)
