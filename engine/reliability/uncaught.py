"""Shortens what Python prints of an exception that nobody has caught and that has ended a run.

The exception itself stays as it is, for callers, notebooks and debuggers. Python's hook for uncaught exceptions is
replaced when a run has failed, and put back when it was called or another run begins. It leaves all exceptions but
those of failed runs to the hook that was there; and these too, where that is one of the user's own.
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
"""The hook that was there before ours."""


class Failure(NamedTuple):
    """The facts that are known of an exception that has ended a run."""

    is_said: bool = False
    """The terminal has it already."""
    is_interrupt: bool = False
    """It is Ctrl-C, or a consequence."""
    say: Callable[[], None] | None = None
    """Called before the traceback is printed; pickled with the exception, as it goes to a worker's parent."""


def on_uncaught(exception: BaseException, failure: Failure) -> None:
    """Sets how `exception` is printed if nobody catches it; a second call for the same exception changes nothing."""
    if failure_of(exception) is None:
        with suppress(AttributeError, TypeError):  # an exception that takes no attributes is printed whole
            setattr(exception, _MARK, failure)
    if not _replaced:
        _replaced.append(sys.excepthook)
        sys.excepthook = _print


def failure_of(exception: BaseException) -> Failure | None:
    """The `Failure` that `on_uncaught` was given for an exception; None if there was none."""
    return vars(exception).get(_MARK)


def forget_failures() -> None:
    """Puts back the hook that was there, as a run begins."""
    if _replaced and sys.excepthook is _print:
        sys.excepthook = _replaced.pop()


def _print(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
    before = _replaced[-1]
    forget_failures()
    failures = [failure for link in _chain(exception) if (failure := failure_of(link)) is not None]
    for failure in failures:
        if failure.say is not None:
            failure.say()
    if not failures or not _is_plain(before) or shows_all_frames():
        before(kind, exception, trace)
        return
    own_failure = failure_of(exception)
    if own_failure is None or not own_failure.is_said:
        print(shown(exception), end="", file=sys.stderr, flush=True)


def _chain(exception: BaseException | None) -> Iterator[BaseException]:
    """An exception, and what it was raised from."""
    seen: set[int] = set()
    while exception is not None and id(exception) not in seen:
        yield exception
        seen.add(id(exception))
        exception = exception.__cause__ or exception.__context__


def _is_plain(hook: Any) -> bool:
    """Whether a hook is Python's own; or torch's, which puts the rank before each line of Python's."""
    while getattr(hook, "__qualname__", "").endswith("init_process_group.<locals>._distributed_excepthook"):  # torch
        hook = inspect.getclosurevars(hook).nonlocals.get("old_hook")
    return hook is sys.__excepthook__
