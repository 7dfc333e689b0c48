"""Whether this process was asked to end, where its handler of SIGTERM can't run: the main thread waits in C++.

Python calls handlers in the main thread, between two of its instructions; a wait for a collective is one instruction.
But the number of each signal is written to a socket at once, which another thread can read.
"""

import signal
import socket
import threading
from contextlib import suppress

__all__ = ["Wakeup"]


class Wakeup:
    """Begins and ends in the main thread; in another one, or where somebody else has the socket, it learns nothing."""

    def __init__(self) -> None:
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._was_asked = False

    def begin(self) -> None:
        """From now on signals are noticed."""
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
        """Leaves things as they were; what has come until now is known from then on."""
        self.was_asked_to_end()
        ends, self._ends = self._ends, None
        if ends is None:
            return
        if threading.current_thread() is threading.main_thread():
            before = signal.set_wakeup_fd(-1)
            if before not in (-1, ends[1].fileno()):
                signal.set_wakeup_fd(before)  # somebody else's by now
        for end in ends:
            end.close()

    def was_asked_to_end(self) -> bool:
        """Whether SIGTERM has come."""
        if self._ends is not None and not self._was_asked:
            with suppress(OSError):
                self._was_asked = signal.SIGTERM in self._ends[0].recv(4096)
        return self._was_asked
