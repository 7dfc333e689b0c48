"""Probes of whether a process of another machine still runs, although its threads do not answer.

Each process of a job on several machines listens on a port, and closes each connection. Its kernel accepts connections
even while a thread of the process holds Python's lock, for example to unpickle a large file. So an accepted connection
means that the process runs, a refused one that it has ended, and none within 2 s that its host or the network has
failed.
"""

import os
import socket
from contextlib import suppress
from enum import Enum

__all__ = ["ProcessState", "accept_probes", "own_port", "probe"]

_BACKLOG = 256
_LONGEST_S = 2.0
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
        socket.create_connection((address, port), _LONGEST_S).close()
    except ConnectionRefusedError:
        return ProcessState.ENDED
    except OSError:
        return ProcessState.UNKNOWN
    return ProcessState.LIVES
