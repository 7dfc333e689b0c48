"""The connections of process groups, which can be cut at once, from any thread.

A group that ends closes its sockets. But a loader's worker is a fork, and has copies of them: the connections stay, and
other ranks go on to wait for this one. To shut a connection down ends it for all copies, and wakes up who waits in it.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

__all__ = ["MEETING_AGAIN", "cut_connections", "keep_connections_to", "noting_connections"]

MEETING_AGAIN = timedelta(seconds=5)
"""The limit for ranks that wait for each other to connect: gloo takes five times as long if one ends meanwhile."""

_noted: set[tuple[int, int]] = set()
"""File descriptors and inodes: another file may have the number of one that was closed."""
_kept_ports: set[int] = set()


def keep_connections_to(port: int) -> None:
    """Leaves connections to the job's store, and of it, alone: another thread may make one at any time."""
    _kept_ports.add(port)


def _sockets() -> set[tuple[int, int]]:
    connected = set()
    with suppress(OSError):  # no Linux: nothing is noted
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed meanwhile
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:["):
                    connected.add((int(name), int(link[8:-1])))
    return connected


@contextmanager
def noting_connections() -> Iterator[None]:
    """Notes the connections that are made in this context as those of a group."""
    before = _sockets()
    yield
    for number, inode in _sockets() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            if not _kept_ports & {copy.getpeername()[1], copy.getsockname()[1]}:
                _noted.add((number, inode))


def cut_connections() -> None:
    """Ends all connections that were noted: collectives that wait in them raise, here and on the other ranks."""
    cut = _noted & _sockets()
    _noted.clear()
    for number, _ in cut:
        with suppress(OSError), socket.socket(fileno=os.dup(number)) as copy:
            copy.shutdown(socket.SHUT_RDWR)
