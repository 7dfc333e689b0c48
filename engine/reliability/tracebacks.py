"""Short tracebacks: the user's frames, and the number of frames of libraries in their place.

It works on text, so that it can shorten tracebacks of other processes (workers of a launcher or a DataLoader), too.
"""

import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ..distributed.environment import ALL_FRAMES, shows_all_frames

__all__ = [
    "Failure",
    "failure_of",
    "forget_failures",
    "is_installed",
    "on_uncaught",
    "package_of",
    "shorten",
    "shown",
]

_LIBRARIES = ("IPython", "jsonargparse", "lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchdata")
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
_COMMANDS = ("polyphase", "torchrun")
_SOURCES = Path(__file__).parents[2]
_OURS = tuple(f"{_SOURCES / package}{os.sep}" for package in ("callbacks", "doctor", "engine"))
_PYTHON = f"{os.path.dirname(os.__file__)}{os.sep}"

_FRAME = re.compile(r'(?P<indent>[ |]*)File "(?P<file>[^"]*)", line \d+, in .*')
_MARKS = re.compile(r"[ |]*[~^][~^ ]*")
"""Matches the line that Python puts under a line of code to mark a part of it."""


class _Frame(NamedTuple):
    lines: list[str]
    """Its file and line, its code, and how often it is repeated."""
    indent: str
    package: str | None
    """The library it is in; None for the user's code."""


def shown(exception: BaseException) -> str:
    """Returns the traceback of `exception` for the terminal: short, unless the user has asked for all frames."""
    # Not above: `polyphase stacks` looks at files of code, and needs no torch.
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    kind, trace = type(exception), exception.__traceback__
    if isinstance(
        exception, (ProcessExitedException, ProcessRaisedException)
    ):  # its message is the worker's traceback, which its cause would repeat
        own_text = "".join(traceback.format_tb(trace))
        if not shows_all_frames():
            own_text = shorten(own_text, keeps_innermost=False, says_how=False)
        message = "".join(traceback.format_exception_only(kind, exception))
        return f"Traceback (most recent call last):\n{own_text}{message}"
    text = "".join(traceback.format_exception(kind, exception, trace))
    return text if shows_all_frames() else shorten(text, keeps_innermost=not _says_what_is_wrong(exception))


def _says_what_is_wrong(exception: BaseException) -> bool:
    """Whether the engine has raised the error because of a user's mistake: then its own frame doesn't matter."""
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return isinstance(exception, ValueError) and bool(frames) and frames[-1].f_code.co_filename.startswith(_OURS)


def shorten(text: str, *, keeps_innermost: bool = True, says_how: bool = True) -> str:
    """Returns `text` with a count in place of the frames of libraries, in all tracebacks in it.

    Args:
        text: any text, with tracebacks as Python prints them.
        keeps_innermost: keep the last frame of each traceback, where the error was raised, also of a library.
        says_how: add to the first count how to see all frames.
    """
    lines, out, number = text.splitlines(), [], 0
    while number < len(lines):
        stack = _stack_at(lines, number)
        if not stack:
            out.append(lines[number])
            number += 1
            continue
        number += sum(len(frame.lines) for frame in stack)
        for line, is_count in _kept(stack, keeps_innermost):
            out.append(f"{line} ({ALL_FRAMES}=full shows them)" if is_count and says_how else line)
            says_how = says_how and not is_count
    return "\n".join(out) + ("\n" if text.endswith("\n") else "")


def _stack_at(lines: Sequence[str], number: int) -> list[_Frame]:
    """Returns the consecutive frames from line `number` on."""
    stack: list[_Frame] = []
    while number < len(lines) and (header := _FRAME.fullmatch(lines[number])):
        indent = header["indent"]
        end = number + 1
        while end < len(lines) and lines[end].startswith(f"{indent}  ") and not _FRAME.fullmatch(lines[end]):
            end += 1
        if end < len(lines) and lines[end].startswith(f"{indent}[Previous line repeated"):
            end += 1
        stack.append(_Frame(list(lines[number:end]), indent, package_of(header["file"])))
        number = end
    return stack


def _kept(stack: Sequence[_Frame], keeps_innermost: bool) -> Iterator[tuple[str, bool]]:
    """Yields the lines of a shortened stack, and whether each is a count."""
    left_out: list[str] = []
    for frame in stack:
        if frame.package is not None and not (keeps_innermost and frame is stack[-1]):
            left_out.append(frame.package)
            continue
        yield from _count(left_out, frame.indent)
        left_out.clear()
        yield from ((line, False) for line in frame.lines if not _MARKS.fullmatch(line))
    yield from _count(left_out, stack[-1].indent)


def _count(libraries: Sequence[str], indent: str) -> Iterator[tuple[str, bool]]:
    if libraries:
        frames = "1 frame" if len(libraries) == 1 else f"{len(libraries)} frames"
        yield f"{indent}... {frames} of {', '.join(sorted(set(libraries)))}", True


@cache
def package_of(file: str) -> str | None:
    """Returns the library that a file of code belongs to; None for the user's code."""
    if file.startswith(_OURS) or (os.path.basename(os.path.dirname(file)) in ("bin", "Scripts") and _is_command(file)):
        return "polyphase"
    if file.startswith("<frozen ") or file == "<string>":
        return "python"
    if file.startswith(_PYTHON) and not is_installed(file):
        return "python"
    for name in _LIBRARIES:
        place = getattr(sys.modules.get(name), "__file__", None)
        if place is not None and file.startswith(os.path.dirname(place) + os.sep):
            return name
    return None


def is_installed(file: str) -> bool:
    """Whether a file was installed by pip or the system: a library's, or the user's own package."""
    return any(folder in file for folder in _INSTALLED)


def _is_command(file: str) -> bool:
    return os.path.splitext(os.path.basename(file))[0] in _COMMANDS


# --- short tracebacks of uncaught exceptions that have ended a run
# The exception's own traceback does not change, for callers and debuggers; a notebook asks it for what to show. When a
# run has failed, Python's hook for uncaught exceptions is replaced, until it is called or another run begins. The
# replacement passes on all exceptions but those of failed runs to the former hook; and these as well, if the former
# hook is one of the user's.


_MARK = "_polyphase_failure"
_SHOWS = "_render_traceback_"  # IPython
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
            if not shows_all_frames():
                setattr(exception, _SHOWS, _render)
    if not _replaced:
        _replaced.append(sys.excepthook)
        sys.excepthook = _print


def _render() -> list[str]:
    """Returns the lines of the exception that is being handled, for a notebook."""
    exception = sys.exc_info()[1]
    return [] if exception is None else shown(exception).splitlines()


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
