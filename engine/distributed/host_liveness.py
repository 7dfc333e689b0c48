"""Tells a rank whether a process of another machine still lives, when its threads say nothing.

Each process of a job on several machines listens on a port, and does nothing with those who connect. The kernel
answers for it, also while one of its threads holds Python's lock, as one does that opens a large pickle. So a
connection that is made tells of a process that lives, one that is refused of a process that has ended, and one that
gets no answer of a host or a network that has failed.
"""

import os
import socket
from contextlib import suppress
from enum import Enum

__all__ = ["Sign", "answer", "own_port", "ring"]

_BACKLOG = 256
_LONGEST_S = 2.0
"""The longest that an answer may take."""


class Sign(Enum):
    """The state of another machine's process, as its kernel reports it."""

    LIVES = "lives"
    ENDED = "ended"
    UNKNOWN = "unknown"


_servers: dict[int, socket.socket] = {}
"""The listening socket of each process, by process id, as a fork has its own."""


def own_port(address: str) -> int:
    """The port of this process on one of its addresses; 0 where all ranks see each other's processes: on loopback."""
    if os.getpid() not in _servers and address and not address.startswith("127."):
        with suppress(OSError):
            server = socket.create_server((address, 0), backlog=_BACKLOG)
            server.setblocking(False)
            _servers[os.getpid()] = server
    return _servers[os.getpid()].getsockname()[1] if os.getpid() in _servers else 0


def answer() -> None:
    """Lets go of all who have rung."""
    with suppress(OSError):  # nobody has
        while os.getpid() in _servers:
            _servers[os.getpid()].accept()[0].close()


def ring(address: str, port: int) -> Sign:
    """Asks the kernel of another machine for one of its processes."""
    if not address or not port:
        return Sign.UNKNOWN
    try:
        socket.create_connection((address, port), _LONGEST_S).close()
    except ConnectionRefusedError:
        return Sign.ENDED
    except OSError:
        return Sign.UNKNOWN
    return Sign.LIVES
