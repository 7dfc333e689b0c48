"""Stands where a test would start Python: hands the start to the server, and is for the rest of the world that process.

Written into an executable file by `tests.warm.start`, which puts `SOCKET` and `PYTHON` before it; run with few imports.
"""

import _signal
import _socket
import marshal
import os
import resource
import sys
from array import array

SOCKET: str = globals().get("SOCKET", "")
PYTHON: str = globals().get("PYTHON", "")
# What can be forwarded; those of the terminal are for a process that has one, which is never warm.
FORWARDED = (_signal.SIGHUP, _signal.SIGINT, _signal.SIGQUIT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGUSR2)
SOCKET_LIMIT = 100
"""Characters that a socket's path may have."""
_LATEST_S = 0.5
"""After which a signal is forwarded, however it comes."""
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


def here(descriptors: list[int], blocked: set[int]) -> dict[str, object]:
    """All that a new process has from the one that starts it."""
    umask = os.umask(0o77)
    os.umask(umask)
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {
        "arguments": sys.argv[1:],
        "environment": {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()},
        "folder": os.getcwd(),
        "umask": umask,
        "descriptors": descriptors,
        "blocked": sorted(blocked),
        "ignored": [number for number in range(1, _signal.NSIG) if _is_ignored(number)],
        "parent": os.getppid(),
        # Where these differ from the server's, the start is a cold one.
        "place": {
            "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES],
            "limits": [(name, *resource.getrlimit(getattr(resource, name))) for name in limits],
            "users": [*os.getresuid(), *os.getresgid()],
            "niceness": os.nice(0),
            "cores": sorted(os.sched_getaffinity(0)),
        },
    }


def _is_ignored(number: int) -> bool:
    # This interpreter itself ignores these two, as any does.
    return _signal.getsignal(number) == _signal.SIG_IGN and number not in (_signal.SIGPIPE, _signal.SIGXFSZ)


def open_descriptors() -> list[int]:
    """Those that are inherited; what this process has opened itself is closed on exec."""
    return [number for number in map(int, os.listdir("/proc/self/fd")) if _is_inherited(number)]


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # the one of the listing
        return False


def start_cold() -> None:
    os.execv(PYTHON, [PYTHON, *sys.argv[1:]])


def main() -> None:
    blocked = _signal.pthread_sigmask(_signal.SIG_BLOCK, FORWARDED)
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    os.set_inheritable(connection.fileno(), False)
    descriptors = open_descriptors()
    pid = 0
    try:
        if not any(map(os.isatty, descriptors)):
            connection.connect(SOCKET)
            pid = ask(connection, marshal.dumps(here(descriptors, blocked)), descriptors)
    except OSError:
        pass  # no server
    if not pid:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)
        start_cold()
    for number in FORWARDED:  # those that are ignored here, too: the script may have a handler by now
        _signal.signal(number, lambda number, _: forward(pid, number))
    _signal.pthread_sigmask(_signal.SIG_SETMASK, blocked)
    for number in descriptors:  # else a pipe that the process closes would stay open
        os.close(number)
    # A signal that comes just before the wait begins does not end it, and is forwarded only by what Python does next.
    connection.settimeout(_LATEST_S)
    end_as(receive(connection, 8))


def ask(connection: "_socket.socket", request: bytes, descriptors: list[int]) -> int:
    """The id of the process that the server has started; 0 if it is to be a cold one."""
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", descriptors))]
    connection.sendmsg([len(request).to_bytes(8, "little")], rights)
    connection.sendall(request)
    return int.from_bytes(receive(connection, 8), "little")


def receive(connection: "_socket.socket", num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        try:
            some = connection.recv(num_bytes - len(received))
        except TimeoutError:
            continue
        if not some:  # the server is gone, and with it the process
            os._exit(125)
        received += some
    return received


def forward(pid: int, number: int) -> None:
    try:  # noqa: SIM105 - contextlib takes as long to import as all the rest
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended meanwhile
        pass


def end_as(status: bytes) -> None:
    """Ends this process as that one has ended."""
    code = os.waitstatus_to_exitcode(int.from_bytes(status, "little"))
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -code not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(-code, _signal.SIG_DFL)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [-code])
    os.kill(os.getpid(), -code)


def tell(address: str, request: dict[str, object]) -> None:
    """Has the server `kill` the process group of what a client of that id stands for, or stood for; or `stop`."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        connection.connect(address)
        ask(connection, marshal.dumps(request), [])
    finally:
        connection.close()


if __name__ == "__main__":
    main()
