"""Detects SIGTERM while its Python handler can't run, because the main thread waits in C++.

Python calls signal handlers in the main thread, between two instructions; a wait for a collective is one instruction.
But Python's C handler writes the number of each signal to a socket at once, which another thread can read.
"""

import signal
import socket
import threading
from contextlib import suppress

__all__ = ["Wakeup"]


class Wakeup:
    """Detects whether this process has received SIGTERM.

    It begins and ends in the main thread. In another thread, or if other code uses Python's socket for signals, it
    detects nothing.
    """

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._was_asked = False

    def begin(self) -> None:
        """Begins to detect signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        ends = socket.socketpair()
        for end in ends:
            end.setblocking(False)
        before = signal.set_wakeup_fd(ends[1].fileno(), warn_on_full_buffer=False)
        self._ends = ends
        if before != -1:
            signal.set_wakeup_fd(before)
            self.end()

    def end(self) -> None:
        """Restores Python's former socket; signals that have come until now stay known."""
        self.was_asked_to_end()
        ends, self._ends = self._ends, None
        if ends is None:
            return
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, ends[1].fileno()):
                signal.set_wakeup_fd(before)  # other code has set it meanwhile
        for end in ends:
            end.close()

    def was_asked_to_end(self) -> bool:
        """Whether SIGTERM has come since `begin`."""
        if self._ends is not None and not self._was_asked:
            with suppress(OSError):
                self._was_asked = signal.SIGTERM in self._ends[0].recv(4096)
        return self._was_asked
