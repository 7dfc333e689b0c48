"""Decorators of `fit`, `validate`, `test` and `predict`: they check the arguments, and print an error once."""

import functools
import signal
from collections.abc import Callable
from typing import Any, TypeVar

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..errors import refusing
from ..reliability.uncaught import Failure, failure_of, forget_failures, on_uncaught
from .requests import check_request

__all__ = ["checked", "reports_uncaught"]

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


def reports_uncaught(method: _MethodT) -> _MethodT:
    """Decorates a function that runs an engine: an uncaught exception is printed short, and Ctrl-C exits with 130."""

    @functools.wraps(method)
    def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        forget_failures()
        try:
            return method(self, *args, **kwargs)
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
