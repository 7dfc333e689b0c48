"""The job's key-value store, with signed messages between the ranks' threads.

Any process that reaches the store's port can write to it. So each message is signed by its writer and checked by its
reader. An invalid message counts as missing, with one warning.
"""

import hashlib
import hmac
import json
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from ..foreign import problem
from .environment import job_secret

__all__ = [
    "FIRST_FAILURE",
    "PATIENCE_S",
    "CausedByRank",
    "Fields",
    "JobStore",
    "ProcessState",
    "SignedStore",
    "StoreLostError",
    "accept_probes",
    "address_of",
    "end_threads",
    "own_port",
    "parsed",
    "place_of",
    "probe",
    "signed",
    "verified",
]

# Probes of whether a process of another machine still runs, although its threads do not answer.
#
# Each process of a job on several machines listens on a port, and closes each connection. Its kernel accepts
# connections even while a thread of the process holds Python's lock, for example to unpickle a large file. So an
# accepted connection means that the process runs, a refused one that it has ended, and none within 2 s that its host
# or the network has failed.

# Connections are closed once in a period of the watchdog (`accept_probes`): as many may come in between.
_BACKLOG = 256
_LONGEST_PROBE_S = 2.0
"""The longest time that a probe waits."""


class ProcessState(Enum):
    """The state of a process of another machine, as its kernel reports it."""

    LIVES = "lives"
    ENDED = "ended"
    UNKNOWN = "unknown"


_servers: dict[int, socket.socket] = {}
"""The listening sockets by process id: a fork needs its own."""


def own_port(address: str) -> int:
    """Returns the port that this process listens on at `address`; 0 for loopback, where ranks see their processes."""
    if os.getpid() not in _servers and address and not address.startswith("127."):
        with suppress(OSError):
            server = socket.create_server((address, 0), backlog=_BACKLOG)
            server.setblocking(False)
            _servers[os.getpid()] = server
    return _servers[os.getpid()].getsockname()[1] if os.getpid() in _servers else 0


def accept_probes() -> None:
    """Closes all connections that were made to this process's port."""
    with suppress(OSError):  # there are no more
        while os.getpid() in _servers:
            _servers[os.getpid()].accept()[0].close()


def probe(address: str, port: int) -> ProcessState:
    """Returns the state of the process of another machine that listens on this port; takes at most 2 s."""
    if not address or not port:
        return ProcessState.UNKNOWN
    try:
        socket.create_connection((address, port), _LONGEST_PROBE_S).close()
    except ConnectionRefusedError:
        return ProcessState.ENDED
    except OSError:
        return ProcessState.UNKNOWN
    return ProcessState.LIVES


# Calls of the job's key-value store with a time limit.
#
# torch's client waits for a response until the kernel gives up the connection. If the other host has lost its power, or
# the network drops packets, this takes a quarter of an hour, in which the calling thread can do nothing else. So a
# separate thread makes the calls, and the caller waits for a limited time.

PATIENCE_S = 22.0
"""The longest time that a call of a store may take."""
_LONGEST_S = 60.0
"""The longest time if the store's process still accepts connections: TCP may wait to resend after a network failure."""
# While a call waits, it asks this often whether it is given up.
_TICK_S = 1.0

_lines: "weakref.WeakSet[_StoreLine]" = weakref.WeakSet()


class StoreLostError(RuntimeError):
    """The store has not answered in time; no further call is made."""


class _Result:
    """The value that a call has returned, or the error that it has raised."""

    def __init__(self) -> None:
        self.is_ready = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None


class _StoreLine:
    """One connection to a store.

    Args:
        store: a store of torch.
        other: another connection to the same store; if one of the two is lost, both are.
    """

    def __init__(self, store: dist.Store, other: "_StoreLine | None" = None) -> None:
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
        return self.waited_s >= _LONGEST_S or probe(*address_of(self.store)) != ProcessState.LIVES

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
    host, port = address_of(store)
    return f"the job's key-value store at {host}:{port}" if host else "the job's key-value store"


def address_of(store: Any) -> tuple[str, int]:
    """Returns the host and port of a store; an empty host and 0 without."""
    while hasattr(store, "underlying_store"):  # torch: PrefixStore
        store = store.underlying_store
    return (store.host, store.port) if hasattr(store, "host") else ("", 0)


# Signatures of the messages between ranks, with the job's secret: other processes can write to the same store.
#
# The signature is the HMAC-SHA256 (RFC 2104) of the message and of its key, so that a message is valid under one key
# only. A job without a secret (see `environment.job_secret`) checks only the form of its messages.

Fields = Mapping[str, Any]
"""Names and types of the fields that a message must have, see `foreign.problem`; it may have more."""

_MOST_BYTES = 2_000_000
"""The largest size of a message: the stack of a recursive thread has thousands of lines."""
# The deepest message, a rank's last collectives with the sizes of their tensors, has 7 levels. One with thousands
# would exhaust the stack of whoever goes through it.
_MOST_DEPTH = 8
_SIGNATURE_BYTES = hashlib.sha256().digest_size


def signed(key: str, content: bytes) -> bytes:
    """Returns `content` with its signature in front.

    Args:
        key: under which the message will be read.
        content: at most `_MOST_BYTES` bytes, if it goes into a store.
    """
    return _signature(key, content) + content


def verified(key: str, message: bytes) -> bytes | None:
    """Returns the content of a signed message; None if the signature is not of this job and this key."""
    signature, content = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
    return content if hmac.compare_digest(signature, _signature(key, content)) else None


def parsed(content: bytes, fields: Fields, num_ranks: int) -> dict[str, Any] | None:
    """Parses a message of JSON; returns None if it is no object, lacks one of `fields`, or names an unknown rank.

    Args:
        content: UTF-8.
        fields: names and types; the fields ``"rank"`` and ``"by"`` are ranks.
        num_ranks: number of ranks.
    """
    try:
        message = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not _is_plain(message, _MOST_DEPTH):
        return None
    if any(name not in message or problem(message[name], kind, name) for name, kind in fields.items()):
        return None
    ranks = [message[name] for name in ("rank", "by") if name in fields]
    return message if all(0 <= rank < num_ranks for rank in ranks) else None


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, dict):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in value)
    return True


def _signature(key: str, content: bytes) -> bytes:
    # Without a secret it is a checksum.
    return hmac.digest(job_secret() or b"polyphase", f"{len(key)}:{key}".encode() + content, "sha256")


FIRST_FAILURE = "polyphase/first_failure"
"""Key under which the first failure of the job is recorded."""

log = logging.getLogger("polyphase.engine")

_RETRY_S = 0.05
_ATTEMPTS = 100
"""The number of attempts to replace an invalid message that others may keep writing."""
_FAILURE: Fields = {"rank": int, "by": int, "kind": str, "message": str}


class CausedByRank(Exception):  # noqa: N818 - what several errors have in common
    """An error that a rank raises because another rank has failed.

    Args:
        message: message of the error.
        rank: the rank that has failed.
    """

    def __init__(self, message: str, rank: int = 0) -> None:
        super().__init__(message)
        self.rank = rank


class JobStore:
    """The job's store, as one rank uses it.

    All methods may raise RuntimeError: the store's process has ended (`torch.distributed.DistError`) or does not answer
    (`StoreLostError`).

    Args:
        store: shared by all ranks.
        rank: this rank.
        num_ranks: number of ranks.
        line: another connection to the same store; if one of the two is lost, both are.
    """

    def __init__(self, store: dist.Store, rank: int, num_ranks: int, line: _StoreLine | None = None) -> None:
        self.store: Any = store
        self.line = _StoreLine(store, line)
        self.rank = rank
        self.num_ranks = num_ranks
        self._has_warned = False

    def clone(self) -> "JobStore":
        """Returns the same store over another connection, which a thread that waits in this one does not block."""
        self.has(FIRST_FAILURE)  # raises at once if the host has ended: torch would look for it until its timeout
        return JobStore(self.store.clone(), self.rank, self.num_ranks, self.line)

    def has(self, *keys: str) -> bool:
        """Whether there is a value, valid or not, under each of `keys`; one call of the store."""
        return self.line.ask("check", list(keys))

    def write(self, key: str, message: dict[str, Any]) -> None:
        """Writes a message of plain values, which all ranks can read."""
        self.line.ask("set", key, signed(key, json.dumps(message).encode()))

    def read(self, key: str, fields: Fields) -> dict[str, Any] | None:
        """Returns the message under `key`; None if there is no valid one. Does not wait."""
        return self.read_all([key], fields).get(key)

    def read_all(self, keys: Iterable[str], fields: Fields) -> dict[str, dict[str, Any]]:
        """Returns the valid messages under `keys`, by key; two calls of the store, or one more a key if some lack."""
        present = list(keys)
        if not self.has(*present):
            present = [key for key in present if self.has(key)] if len(present) > 1 else []
        values = self.line.ask("multi_get", present) if present else []
        messages = {key: self._checked(key, value, fields) for key, value in zip(present, values, strict=True)}
        return {key: message for key, message in messages.items() if message is not None}

    def count(self, key: str, more: int = 0) -> int:
        """Adds to a counter and returns it. It is not signed: nothing may depend on its value being right."""
        return self.line.ask("add", key, more)

    def first_failure(self) -> dict[str, Any] | None:
        """Returns the job's first failure: its rank, kind, message, and ``by``, the rank that has recorded it."""
        return self.read(FIRST_FAILURE, _FAILURE)

    def record_failure(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Records a failure, unless there is one already; returns the job's first failure."""
        return self.record_first(FIRST_FAILURE, failure, _FAILURE)

    def record_first(self, key: str, message: dict[str, Any], fields: Fields) -> dict[str, Any]:
        """Writes `message`, unless there is a valid message already; returns the first valid message under `key`."""
        signed_message = signed(key, json.dumps(message).encode())
        expected = b""
        for _ in range(_ATTEMPTS):
            present = self.line.ask("compare_set", key, expected, signed_message)
            first = message if present == signed_message else self._checked(key, present, fields)
            if first is not None:
                return first
            # torch: if the key was deleted, `compare_set` returns the expected value.
            expected = b"" if present == expected else present
        return message

    def _checked(self, key: str, value: bytes, fields: Fields) -> dict[str, Any] | None:
        content = verified(key, value) if len(value) <= _MOST_BYTES else None
        message = None if content is None else parsed(content, fields, self.num_ranks)
        if message is None and not self._has_warned:
            self._has_warned = True
            _warn(self.rank, key)
        return message


class SignedStore:
    """A store of short signed texts; the methods are those of `torch.distributed.Store`.

    Args:
        store: shared by all ranks; it may have other values, too.
        rank: this rank.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._line = _StoreLine(store)
        self._rank = rank
        self._has_warned = False

    def set(self, key: str, text: str) -> None:
        """Writes a text."""
        self._line.ask("set", key, signed(key, text.encode()))

    def set_first(self, key: str, text: str) -> str:
        """Writes a text, unless there is a valid one already; returns the first one."""
        own, expected = signed(key, text.encode()), b""
        for _ in range(_ATTEMPTS):
            present = self._line.ask("compare_set", key, expected, own)
            if present == own:
                return text
            if (first := verified(key, present)) is not None:
                return first.decode()
            # torch: if the key was deleted, `compare_set` returns the expected value.
            expected = b"" if present == expected else present
        return text

    def check(self, keys: list[str]) -> bool:
        """Whether there is a valid text under each key."""
        return self._line.ask("check", keys) and all(self._text(key) is not None for key in keys)

    def get(self, key: str) -> bytes:
        """Returns the text under a key; waits until there is a valid one."""
        while not self._line.ask("check", [key]) or (text := self._text(key)) is None:
            time.sleep(_RETRY_S)
        return text

    def _text(self, key: str) -> bytes | None:
        text = verified(key, self._line.ask("get", key))
        if text is None and not self._has_warned:
            self._has_warned = True
            _warn(self._rank, key)
        return text


def _warn(rank: int, key: str) -> None:
    log.warning(
        "Rank %d ignores a message in the job's key-value store under %r: no rank of this job has written it. See"
        " docs/security.md.",
        rank,
        key,
    )
