"""Short tracebacks of uncaught exceptions that have ended a run.

The exception itself does not change, for callers, notebooks and debuggers. When a run has failed, Python's hook for
uncaught exceptions is replaced, until it is called or another run begins. The replacement passes on all exceptions but
those of failed runs to the former hook; and these as well, if the former hook is one of the user's.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, NamedTuple

from ..environment import shows_all_frames
from .tracebacks import shown

__all__ = ["Failure", "failure_of", "forget_failures", "on_uncaught"]

_MARK = "_polyphase_failure"
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_replaced: list[_Hook] = []
"""The former hook; at most one."""


class Failure(NamedTuple):
    """Facts about an exception that has ended a run."""

    is_printed: bool = False
    """Whether it was printed on the terminal already."""
    is_interrupt: bool = False
    """Whether it is Ctrl-C, or a consequence of it."""
    print_details: Callable[[], None] | None = None
    """Called before the traceback is printed; pickled with the exception, if a worker sends it to its parent."""


def on_uncaught(exception: BaseException, failure: Failure) -> None:
    """Sets how `exception` is printed if it is not caught; a second call for the same exception changes nothing."""
    if failure_of(exception) is None:
        with suppress(AttributeError, TypeError):  # an exception that takes no attributes is printed whole
            setattr(exception, _MARK, failure)
    if not _replaced:
        _replaced.append(sys.excepthook)
        sys.excepthook = _print


def failure_of(exception: BaseException) -> Failure | None:
    """Returns the `Failure` that `on_uncaught` was called with for an exception; None without one."""
    return vars(exception).get(_MARK)


def forget_failures() -> None:
    """Restores the former hook; called when a run begins."""
    if _replaced and sys.excepthook is _print:
        sys.excepthook = _replaced.pop()


def _print(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
    before = _replaced[-1]
    forget_failures()
    failures = [failure for link in _chain(exception) if (failure := failure_of(link)) is not None]
    for failure in failures:
        if failure.print_details is not None:
            failure.print_details()
    if not failures or not _is_plain(before) or shows_all_frames():
        before(kind, exception, trace)
        return
    own_failure = failure_of(exception)
    if own_failure is None or not own_failure.is_printed:
        print(shown(exception), end="", file=sys.stderr, flush=True)


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """Yields an exception, its cause or context, and so on."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        yield exception
        seen.add(id(exception))
        exception = exception.__cause__ or exception.__context__


def _is_plain(hook: Any) -> bool:
    """Whether a hook is Python's, or torch's, which adds the rank to each line of Python's output."""
    while getattr(hook, "__qualname__", "").endswith("init_process_group.<locals>._distributed_excepthook"):  # torch
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook")
    return hook is sys.__excepthook__
