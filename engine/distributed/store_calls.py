"""Calls to the job's key-value store that end, answered or not.

torch's client waits for an answer until the kernel gives the connection up. Where the other host has lost its power,
or the network drops packets without a word, that is after a quarter of an hour, and the thread that has asked can do
nothing else meanwhile. So a thread of the line's own asks, and the caller waits no longer than its patience.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from .host_liveness import Sign, ring

__all__ = ["PATIENCE_S", "StoreLine", "StoreLostError", "end_threads", "place_of"]

PATIENCE_S = 22.0
"""The longest that a store may leave a call unanswered."""
_LONGEST_S = 60.0
"""The limit if its host answers a new connection: the network was down, and TCP waits before it sends again."""
_TICK_S = 1.0

_lines: "weakref.WeakSet[StoreLine]" = weakref.WeakSet()


class StoreLostError(RuntimeError):
    """The store has not answered; from then on no call is made."""


class _Answer:
    """The result of a call, or the error that it has raised, once there is one."""

    def __init__(self) -> None:
        self.is_there = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class StoreLine:
    """One connection to a store.

    Args:
        store: of torch.
        other: a line to the same store; what one of them loses is lost for both.
    """

    def __init__(self, store: dist.Store, other: "StoreLine | None" = None) -> None:
        self.store: Any = store
        self.patience_s = PATIENCE_S
        self.waited_s = 0.0
        """The seconds that the call in flight has been waiting; time in which the machine slept does not count."""
        self.gives_up: Callable[[], bool] = lambda: False
        """Asked once a second by the thread that waits for an answer: whether to wait no more."""
        self._losses: list[str] = [] if other is None else other._losses
        self._lock = threading.Lock()
        self._asker = 0
        self._requests: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process = 0
        _lines.add(self)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the store.

        Raises:
            StoreLostError: the store has not answered in time, now or earlier.
            RuntimeError: (`torch.distributed.DistError`) its host is gone.
        """
        if self._losses:
            raise StoreLostError(self._losses[0])
        if self._asker == threading.get_ident():
            raise StoreLostError(f"{place_of(self.store)} has not answered yet.")
        with self._lock:
            self._asker = threading.get_ident()
            try:
                return self._answer(method, arguments)
            finally:
                self._asker, self.waited_s = 0, 0.0

    def _answer(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._start()
        answer = _Answer()
        self._requests.put((answer, getattr(self.store, method), arguments))
        before = time.monotonic()
        while not answer.is_there.wait(_TICK_S):
            now = time.monotonic()
            self.waited_s += min(now - before, _TICK_S)
            before = now
            if (self.gives_up() or self._is_lost()) and not answer.is_there.is_set():
                self._losses.append(f"{place_of(self.store)} has not answered for {self.waited_s:.0f} s.")
                raise StoreLostError(self._losses[0])
        if answer.error is not None:
            raise answer.error
        return answer.value

    def _is_lost(self) -> bool:
        if self.waited_s < self.patience_s:
            return False
        return self.waited_s >= _LONGEST_S or ring(*_address(self.store)) != Sign.LIVES

    def _start(self) -> None:
        """Starts the thread, if this process (it may be a fork) has none yet."""
        if self._process == os.getpid():
            return
        self._process = os.getpid()
        self._requests = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._requests,), name="polyphase-store", daemon=True)
        self._thread.start()
        # The thread ends with the line, of which it knows nothing.
        weakref.finalize(self, self._requests.put, None).atexit = False

    def end_thread(self) -> None:
        """Ends the thread, unless it is in a call, as it stays if that is lost; the next call starts another one."""
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
    """A run is over: leaves none of the threads behind that wait for a call."""
    for line in list(_lines):
        line.end_thread()


def _serve(requests: "SimpleQueue[Any]") -> None:
    while (request := requests.get()) is not None:
        answer, call, arguments = request
        try:
            answer.value = call(*arguments)
        except BaseException as error:  # it is the caller's
            answer.error = error
        answer.is_there.set()
        del request, answer, call, arguments


def place_of(store: Any) -> str:
    """A store in words, with its address if it has one."""
    host, port = _address(store)
    return f"the job's key-value store at {host}:{port}" if host else "the job's key-value store"


def _address(store: Any) -> tuple[str, int]:
    while hasattr(store, "underlying_store"):  # torch: PrefixStore
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "host") else ("", 0)
