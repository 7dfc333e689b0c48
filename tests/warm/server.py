"""A process that has imported what nearly all scripts import, and forks itself for each that a test would start.

The fork becomes as like a new interpreter as can be, and then runs the script. What it can't be like is started cold.
"""

import fcntl
import gc
import importlib
import marshal
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from tests.entry_points import remember_entry_points
from tests.huge_pages import have_huge_pages
from tests.warm import interpreter
from tests.warm.client import here

# What is read of them while modules are imported is set again in the fork.
_SET_AGAIN = {"RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER"}
# Read once more when it matters: NCCL's when a group is made; by PATH, importing looks for a compiler.
_READ_LATER = {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "PATH"}
# Read by code that is not Python, or of all names with such a beginning.
_PREFIXES = ("ATEN_", "CUDA_", "DNNL_", "FSSPEC_", "GLIBC_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "OMP_")
_PREFIXES += ("OPENBLAS_", "PYTHON", "PYTORCH_", "TORCH_", "TQDM_", "TZ")
_TIMEOUT_S = 10.0
NOT_FOR_SERVER = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""From a terminal, and from scripts that take it for who has started them; it ends with its owner."""


IMPORTED = ("torch", "lightning.pytorch", "torchmetrics", "polyphase.engine")
LATER = ("torch.distributed.algorithms.ddp_comm_hooks", "torch.distributed.checkpoint.state_dict", "omegaconf")
"""What torch and Lightning import when a run begins or saves."""


class _Recorded(os._Environ):  # type: ignore[type-arg]
    """Keeps the names that were asked for: what modules have read while they were imported is the same in each fork."""

    names: set[str] = set()  # noqa: RUF012
    num_passes = 0

    def __getitem__(self, name: str) -> str:
        if not self.num_passes:
            self.names.add(name)
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:  # by tqdm and fsspec, for names that begin with theirs
        _Recorded.num_passes += 1
        yield from super().__iter__()
        _Recorded.num_passes -= 1


class Imports(NamedTuple):
    """What importing has read, and changed besides `sys.modules`."""

    read: set[str]
    environment: dict[str, str]
    """As it was before."""
    added: dict[str, str]
    """To the environment."""
    path: list[str]


def import_all() -> Imports:
    """Imports what a script with a LightningModule and an engine has imported when it trains."""
    environment, path = dict(os.environ), list(sys.path)
    importlib.import_module("fsspec.config")  # it copies all variables, for those that begin with its name
    os.environ.__class__ = _Recorded
    for name in (*IMPORTED, *LATER):
        importlib.import_module(name)
    getattr(sys.modules["polyphase.engine"], "Engine")  # noqa: B009 - imported when it is asked for
    os.environ.__class__ = os._Environ
    added = {name: value for name, value in os.environ.items() if environment.get(name) != value}
    return Imports(_Recorded.names - _SET_AGAIN - _READ_LATER, environment, added, path)


class Server:
    """Serves starts until the process that it belongs to is gone; a fork leaves `serve` with its request."""

    def __init__(self, path: str, owner: int) -> None:
        self.imports = import_all()
        remember_entry_points()
        self.place = here([], set())["place"]
        self.pid = os.getpid()
        self.is_stopped = False
        self.owner = os.pidfd_open(owner)
        self.listener = socket.socket(socket.AF_UNIX)
        self.poll = select.poll()
        self.clients: dict[int, Client] = {}
        """By the descriptors of their connections and of their processes."""
        self.ended: dict[int, int] = {}
        """Process groups of those that have ended, by the ids of their clients."""
        threads = os.listdir("/proc/self/task")
        assert len(threads) == threading.active_count() == 1, "a fork would have none of the other threads"
        gc.collect()
        gc.freeze()
        have_huge_pages()
        self.listener.bind(path)
        self.listener.listen(64)
        for descriptor in (self.owner, self.listener.fileno()):
            self.poll.register(descriptor, select.POLLIN)

    def serve(self) -> "dict[str, Any] | None":
        """The request that this process, a fork, is to fulfil; None at the end."""
        while not self.is_stopped:
            descriptor = self.poll.poll()[0][0]  # one at a time, as that may close the others
            if descriptor == self.owner:
                break
            if descriptor != self.listener.fileno():
                self.settle(descriptor)
            elif (request := self.accept()) is not None:
                return request
        for client in set(self.clients.values()):
            client.kill()
        return None

    def accept(self) -> "dict[str, Any] | None":
        connection, _ = self.listener.accept()
        connection.settimeout(_TIMEOUT_S)  # who stops in mid-word does not stop the others
        peer = int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)
        descriptors: list[int] = []
        try:
            size, descriptors, _, _ = socket.recv_fds(connection, 8, 250)
            request = marshal.loads(_received(connection, int.from_bytes(size, "little")))
            if "kill" in request:
                self.kill_group(request["kill"])
            elif "stop" in request:
                self.is_stopped = True
            elif self.is_like(request):
                if self.fork(connection, peer, request) == 0:
                    self.leave(connection)
                    _set_descriptors(descriptors, request["descriptors"])
                    return request
                return None
            connection.sendall(bytes(8))
        except (OSError, EOFError):
            pass  # the client is gone
        finally:
            if os.getpid() == self.pid:
                for descriptor in descriptors:
                    os.close(descriptor)
        connection.close()
        return None

    def is_like(self, request: dict[str, Any]) -> bool:
        """Whether a fork of this process can be what is asked for."""
        asked, had = request["environment"], self.imports.environment
        allowed = {name: (had.get(name), self.imports.added.get(name)) for name in {*asked, *had}}
        differing = {name for name, values in allowed.items() if asked.get(name) not in values} - _SET_AGAIN
        differing -= _READ_LATER
        if differing & self.imports.read or any(name.startswith(_PREFIXES) for name in differing):
            return False
        has_streams = {0, 1, 2} <= set(request["descriptors"])
        return has_streams and request["place"] == self.place and bool(_split(request["arguments"]))

    def fork(self, connection: socket.socket, peer: int, request: dict[str, Any]) -> int:
        """Starts a process for a client; returns its id, which is 0 in itself."""
        ready, told = os.pipe()
        pid = os.fork()
        os.close(ready if pid == 0 else told)
        if pid == 0:
            os.setsid()
            os.close(told)
            return 0
        os.read(ready, 1)  # until it has a process group to be killed by
        os.close(ready)
        client = Client(connection, peer, pid, os.pidfd_open(pid))
        self.ended.pop(peer, None)
        for descriptor in (connection.fileno(), client.process):
            self.clients[descriptor] = client
            self.poll.register(descriptor, select.POLLIN)
        with suppress(OSError):  # its end of the connection tells that it is gone
            connection.sendall(pid.to_bytes(8, "little"))
        return pid

    def leave(self, connection: socket.socket) -> None:
        """In a fork: gives up what is the server's, whose numbers the script's files may have."""
        for owned in (self.listener, connection, *(client.connection for client in self.clients.values())):
            owned.detach()

    def settle(self, descriptor: int) -> None:
        """Tells a client how its process has ended; kills the process of a client that is gone."""
        client = self.clients.pop(descriptor)
        self.poll.unregister(descriptor)
        if descriptor == client.process:
            _, status = os.waitpid(client.pid, 0)
            self.ended[client.peer] = client.pid
            with suppress(OSError):
                client.connection.sendall(status.to_bytes(8, "little"))
            if self.clients.pop(client.connection.fileno(), None):
                self.poll.unregister(client.connection)
            client.connection.close()
            os.close(client.process)
        else:
            client.kill()

    def kill_group(self, peer: int) -> None:
        """Kills what the process of a client has left behind, and the process."""
        pid = self.ended.pop(peer, None)
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        for client in set(self.clients.values()):
            if client.peer == peer:
                client.kill()


class Client(NamedTuple):
    """Who stands for a process."""

    connection: socket.socket
    peer: int
    """Its process id."""
    pid: int
    """That of the process that it stands for, and of its process group."""
    process: int
    """A descriptor of that."""

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    found = b""
    while len(found) < num_bytes:
        some = connection.recv(num_bytes - len(found))
        if not some:
            raise EOFError
        found += some
    return found


def _set_descriptors(descriptors: list[int], numbers: list[int]) -> None:
    """Has exactly these open, by the numbers that the client has them by."""
    lowest = max(numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, lowest) for descriptor in descriptors]
    for descriptor in set(map(int, os.listdir("/proc/self/fd"))) - set(moved):
        with suppress(OSError):  # the one of the listing
            os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)


class Start(NamedTuple):
    """A command line of the interpreter."""

    kind: str
    """-c, -m, or file"""
    what: str
    words: list[str]
    unbuffered: bool
    writes_bytecode: bool


def _split(arguments: list[str]) -> Start | None:
    """The command line, if it is one that a fork can be like."""
    unbuffered, writes_bytecode = False, True
    for index, word in enumerate(arguments):
        if word in ("-c", "-m") and len(arguments) > index + 1:
            return Start(word, arguments[index + 1], arguments[index + 2 :], unbuffered, writes_bytecode)
        if word in ("-u", "-B"):
            unbuffered, writes_bytecode = unbuffered or word == "-u", writes_bytecode and word != "-B"
        elif word.startswith("-") or not word or os.path.isdir(word):
            return None
        else:
            return Start("file", word, arguments[index + 1 :], unbuffered, writes_bytecode)
    return None


def main() -> None:
    path, owner, stub = sys.argv[1:]
    for number in NOT_FOR_SERVER:
        signal.signal(number, signal.SIG_IGN)
    server = Server(path, int(owner))
    request = server.serve()
    if request is None:
        shutil.rmtree(os.path.dirname(path), ignore_errors=True)
    else:
        imports = server.imports
        del server
        interpreter.run(request, _split(request["arguments"]), imports, stub, NOT_FOR_SERVER)


if __name__ == "__main__":
    main()
