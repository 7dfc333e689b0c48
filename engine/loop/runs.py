"""Decorators of `fit`, `validate`, `test` and `predict`: they check the arguments, and print an error once."""

import functools
import logging
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..errors import refusing
from ..reliability.tracebacks import Failure, failure_of, forget_failures, on_uncaught
from .requests import check_request

__all__ = ["checked", "log_later_error", "reports_uncaught"]

log = logging.getLogger("polyphase.engine")

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])

INTERRUPTED = 128 + signal.SIGINT
"""The exit code by which shells report that Ctrl-C has ended a process."""


def checked(method: _MethodT) -> _MethodT:
    """Decorates one of Trainer's four methods: checks its arguments before any process starts."""

    @functools.wraps(method)
    def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        with refusing():
            check_request(self, method, args, kwargs)
        # Looked up at each call: tools such as mlflow.pytorch.autolog() replace the method.
        return getattr(Trainer, method.__name__)(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def log_later_error(error: Exception) -> None:
    """Logs an error that was raised while a run ended after another one. A warning may be an error itself."""
    log.warning("While the run ended after an error, another one was raised: %r", error)


def _first_error_counts(trainer: Trainer, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except BaseException as exception:
        # Their `on_exception` is not called if that of another callback has raised an error.
        for unlock in [getattr(callback, "unlock", None) for callback in getattr(trainer, "callbacks", ())]:
            if unlock is not None:
                unlock()
        first = getattr(trainer, "_ended_by", None)
        if not isinstance(first, Exception) or not isinstance(exception, Exception) or not _follows(exception, first):
            raise
        log_later_error(exception)
        raise first from first.__cause__


def _follows(exception: BaseException, first: BaseException) -> bool:
    """Whether `exception` was raised while `first` was handled, but not because of it."""
    seen = exception
    while seen.__context__ is not None and seen.__cause__ is None:
        seen = seen.__context__
        if seen is first:
            return True
    return False


def reports_uncaught(method: _MethodT) -> _MethodT:
    """Decorates a function that runs an engine: an uncaught exception is printed short, and Ctrl-C exits with 130.

    An error while the run ends, such as a logger's on a full disk, does not replace the one that has ended the run.
    """

    @functools.wraps(method)
    def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        forget_failures()
        try:
            return _first_error_counts(self, lambda: method(self, *args, **kwargs))
        except SystemExit as ended:
            # Lightning: _call_and_handle_interrupt exits with 1 after Ctrl-C.
            if isinstance(ended.__context__, KeyboardInterrupt):
                ended.code = INTERRUPTED
            raise
        except SIGTERMException:
            raise
        except BaseException as exception:
            failure = failure_of(exception)
            if failure is not None and failure.is_interrupt:  # of another rank: Ctrl-C reaches all ranks
                raise SystemExit(INTERRUPTED) from exception
            on_uncaught(exception, Failure())
            raise

    return run  # type: ignore[return-value]
