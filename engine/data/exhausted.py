"""`StopIteration` of user code is an error, as in a generator (PEP 479), and not the end of the data.

A loop has ended its epoch, as if the data were over, when a step, a hook, a data set or a `collate_fn` called `next` of
an exhausted iterator: Lightning's loops and torch's loaders take each `StopIteration` for the end of the data. Whose it
is, the traceback tells.
"""

import functools
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from .._compat.torch import ExceptionWrapper, _IterableDatasetFetcher, _MapDatasetFetcher

__all__ = [
    "ExhaustedIteratorError",
    "ends_with_data",
    "fetch_from_stream",
    "is_end_of_data",
    "naming_exhausted_iterators",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FETCHERS = "lightning.pytorch.loops.fetchers"

_fetch_sample, _fetch_item = _MapDatasetFetcher.fetch, _IterableDatasetFetcher.fetch
_reraise = ExceptionWrapper.reraise


class ExhaustedIteratorError(RuntimeError):
    """User code has read an exhausted iterator, and has not handled its `StopIteration`."""

    @classmethod
    def at(cls, stop: StopIteration) -> "ExhaustedIteratorError":
        """Returns the error, which names the line that has raised `stop`."""
        frame = traceback.extract_tb(stop.__traceback__)[-1]
        return cls(
            f"StopIteration at {frame.filename}:{frame.lineno} in {frame.name}: `{frame.line}` reads an iterator that"
            " is exhausted. It does not mean the end of the data: make a new iterator there, or handle it with"
            " `next(iterator, default)`."
        )


def is_end_of_data(stop: StopIteration) -> bool:
    """Whether `stop` is of a loop's data, and not of the user's code."""
    return _FETCHERS in [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(stop.__traceback__)]


def ends_with_data(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a part of a loop: `StopIteration` leaves it only from the loader."""

    @functools.wraps(method)
    def part(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except StopIteration as stop:
            if is_end_of_data(stop):
                raise
            raise ExhaustedIteratorError.at(stop) from stop

    return part


def fetch_from_stream(fetcher: Any, indices: Any) -> Any:
    """Reads a batch of an iterable data set, as torch does.

    Raises:
        StopIteration: the data set has ended.
        ExhaustedIteratorError: its `collate_fn` has raised `StopIteration`.
    """
    try:
        return _fetch_item(fetcher, indices)
    except StopIteration as stop:
        _, *inside = [frame for frame, _ in traceback.walk_tb(stop.__traceback__)]
        # torch: in _IterableDatasetFetcher.fetch, `data` is there when the samples of the batch are.
        if len(inside) > 1 and "data" in inside[0].f_locals:
            raise ExhaustedIteratorError.at(stop) from stop
        raise


def _fetch_from_samples(fetcher: Any, indices: Any) -> Any:
    try:
        return _fetch_sample(fetcher, indices)
    except StopIteration as stop:
        raise ExhaustedIteratorError.at(stop) from stop


def _raise_again(wrapped: Any) -> None:
    """Raises the error of a worker; torch's workers tell the end of their data in another way."""
    if issubclass(wrapped.exc_type, StopIteration):
        raise ExhaustedIteratorError(f"Caught StopIteration {wrapped.where}.\n{wrapped.exc_msg}")
    _reraise(wrapped)


@contextmanager
def naming_exhausted_iterators() -> Iterator[None]:
    """Context of a run, and of its forks: `StopIteration` of data sets and of their `collate_fn` is an error."""
    samples: Any = _MapDatasetFetcher
    streams: Any = _IterableDatasetFetcher
    workers: Any = ExceptionWrapper
    before = samples.fetch, streams.fetch, workers.reraise
    samples.fetch, streams.fetch, workers.reraise = _fetch_from_samples, fetch_from_stream, _raise_again
    try:
        yield
    finally:
        samples.fetch, streams.fetch, workers.reraise = before
