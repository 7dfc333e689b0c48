"""Declared waits for other ranks, by which the watchdog of the process knows what a thread waits for.

Collectives of torch need no declaration: the watchdog finds them in the thread's stack (`reliability/heartbeat.py`).
"""

import threading
from contextlib import suppress
from types import TracebackType

__all__ = ["current_wait", "wait_that_raised", "waiting"]

_waits: dict[int, list[str]] = {}
"""The declared waits of each thread, the innermost last, by the thread's identifier."""
_ATTRIBUTE = "_polyphase_wait"


class waiting:  # noqa: N801 (a context manager, named as a function is)
    """Context manager around a wait for other ranks. It costs an append and a pop: no lock, no system call.

    Args:
        name: the name of the wait; reports have "waits for other ranks in <name>".
    """

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _waits.setdefault(threading.get_ident(), []).append(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _waits[threading.get_ident()].pop()
        # A failure is reported after the wait has ended. So the exception keeps the name of its innermost wait.
        if error is not None and wait_that_raised(error) is None:
            with suppress(AttributeError, TypeError):  # some exceptions take no attributes
                setattr(error, _ATTRIBUTE, self._name)


def current_wait(thread: int) -> str | None:
    """The innermost wait that a thread of this process has declared; None if it does not wait.

    Args:
        thread: its identifier, as of `threading.get_ident`.
    """
    waits = _waits.get(thread, [])[-1:]  # one operation, since the other thread continues meanwhile
    return waits[0] if waits else None


def wait_that_raised(error: BaseException) -> str | None:
    """The wait in which an exception was raised; None if it was raised in no declared wait."""
    return getattr(error, _ATTRIBUTE, None)
