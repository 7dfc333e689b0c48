"""Files that others may have written: which are opened, how their text is shown, and whether their values have a type.

A folder that several people write to may have a pipe, a link or a text with commands for the terminal in any place.
"""

import dataclasses
import errno
import html
import os
import re
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import NoneType, UnionType
from typing import IO, Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from typing_extensions import NotRequired, Required, is_typeddict

__all__ = [
    "MOST",
    "MOST_RANKS",
    "NOT_SHOWN",
    "Count",
    "Few",
    "NotAPlainFileError",
    "Positive",
    "Range",
    "for_html",
    "for_terminal",
    "open_new",
    "open_plain",
    "problem",
    "written_beside",
]

NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls of terminals, marks that change the direction of the text, and bytes of file names that are no UTF-8."""


class NotAPlainFileError(ValueError):
    """A file is not opened, since it is a link, a folder, a device or a pipe, or larger than allowed."""


def open_plain(path: str, flags: int = 0) -> IO[bytes]:
    """Opens a local file for reading, with the further `flags` of `os.open`, unless it is a folder, device or pipe.

    Raises:
        NotAPlainFileError: it is one of these, or a link under the flag `os.O_NOFOLLOW`.
    """
    try:  # opening a pipe without O_NONBLOCK would wait for who writes into it
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotAPlainFileError(f"{os.path.basename(path)} is no plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotAPlainFileError(f"{os.path.basename(path)} is no plain file")
    return os.fdopen(handle, "rb")


def open_new(path: str) -> IO[str]:
    """Opens a new local text file of ours for writing, in the place of one that a killed process has left.

    A link at `path` is removed as well, and never followed.
    """
    if os.path.lexists(path):
        os.remove(path)
    return open(path, "x", encoding="utf-8")


@contextmanager
def written_beside(path: str) -> Iterator[str]:
    """Has somebody else's function write a local file of ours, by the yielded path, in a folder that only we can use.

    At the end the file gets the name `path`, in place of a file or a link there, which is never followed.
    """
    folder, name = os.path.split(path)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as own:
        yield os.path.join(own, name)
        os.replace(os.path.join(own, name), path)


def for_terminal(text: str) -> str:
    """Returns a text without commands for a terminal: each control is written as Python writes it in a string."""
    return NOT_SHOWN.sub(lambda control: control[0].encode("unicode_escape").decode(), text)


def for_html(text: object) -> str:
    """Returns a text for a page, in which it is neither markup nor a command for a terminal that shows the page."""
    return html.escape(for_terminal(str(text)))


# Checks that a value which was read from a file has a declared type: Python's annotations, with ranges.
#
# A file may come from a stranger, a broken disk or another version. Its content is checked once, where it is opened,
# and everything else may rely on the declaration. Classes are compared exactly: a bool is no int, and a subclass may be
# anything. A value that is shared within the content is checked once, so a check is linear in what the file holds.

MOST = (1 << 62) - 1
"""The largest whole number that any field may have: sums of two still fit 64 bits."""


@dataclasses.dataclass(frozen=True)
class Range:
    """The least and the largest value of a number."""

    least: float
    most: float = MOST

    def __call__(self, value: Any) -> str | None:
        """Returns what is wrong with `value`, or None."""
        return None if self.least <= value <= self.most else f"is {_described(value)}"


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
MOST_RANKS = 1 << 20
"""Far more than any run has, and few enough to loop over."""
Few = Annotated[int, Range(1, MOST_RANKS)]


def problem(value: Any, expected: Any, where: str) -> str | None:
    """Returns a description of the first part of `value` that has not the type `expected`; None if all have.

    Args:
        value: what was read.
        expected: a class, `Any`, a `Literal`, a union of different classes, a `TypedDict`, `list`, `tuple` or `dict` of
            these, or `Annotated` with functions that return what is wrong with a value, or None. A `TypedDict` may have
            more keys.
        where: name of the value, for the description.
    """
    return _problem(value, expected, where, set())


def _problem(value: Any, expected: Any, where: str, seen: set[tuple[int, Any]]) -> str | None:
    if expected is Any:
        return None
    origin, parts = get_origin(expected), get_args(expected)
    if origin in (Required, NotRequired):
        return _problem(value, parts[0], where, seen)
    if origin is Annotated:
        wrong_value = _problem(value, parts[0], where, seen)
        return wrong_value or next((f"{where} {wrong}" for rule in parts[1:] if (wrong := rule(value))), None)
    if origin in (Union, UnionType):
        part = next((part for part in parts if type(value) in _classes(part)), None)
        return _problem(value, part, where, seen) if part is not None else _other(value, parts, where)
    if origin is Literal:
        is_one = any(type(value) is type(part) and value == part for part in parts)
        return None if is_one else f"{where} is {_described(value)} in place of {' or '.join(map(repr, parts))}"
    if type(value) not in _classes(expected):
        return _other(value, (expected,), where)
    if (id(value), expected) in seen:  # the content keeps its values alive, so ids stay unique
        return None
    seen.add((id(value), expected))
    if is_typeddict(expected) and (missing := sorted(expected.__required_keys__ - value.keys())):
        return f"{where} has no {missing[0]}"
    if origin is tuple and parts[-1] is not ... and len(value) != len(parts):
        return f"{where} has {len(value)} parts in place of {len(parts)}"
    if type(value) in (list, tuple) and parts and _are_plain(value, parts[0]) and parts[-1] in (parts[0], ...):
        return None
    found_parts = (_problem(item, kind, name, seen) for name, item, kind in _parts(value, expected, parts, where))
    return next(filter(None, found_parts), None)


def _are_plain(values: list[Any] | tuple[Any, ...], kind: Any) -> bool:
    """Whether all values are numbers or texts of the type `kind`: one look at hundreds, as in a generator's state."""
    plain, *rules = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if plain not in (int, float, str) or not {plain}.issuperset(map(type, values)):
        return False
    if not rules or not values:
        return not rules
    is_range = all(isinstance(rule, Range) for rule in rules)
    return is_range and not any(rule(end) for rule in rules for end in (min(values), max(values)))


def _parts(value: Any, expected: Any, kinds: tuple[Any, ...], where: str) -> Iterator[tuple[str, Any, Any]]:
    """Yields the name, the value and the expected type of each part of a container."""
    if is_typeddict(expected):
        yield from ((f"{where}.{key}", value[key], kind) for key, kind in _fields(expected).items() if key in value)
    elif not kinds:
        return
    elif isinstance(value, dict):
        if not _are_plain([*value], kinds[0]):
            yield from ((f"a key of {where}", key, kinds[0]) for key in value)
        if kinds[1] is not Any:
            yield from ((f"an entry of {where}", item, kinds[1]) for item in value.values())
    else:
        is_record = type(value) is tuple and kinds[-1] is not ...
        yield from ((f"{where}[{i}]", item, kinds[i if is_record else 0]) for i, item in enumerate(value))


@cache
def _fields(expected: Any) -> dict[str, Any]:
    return get_type_hints(expected, include_extras=True)


@cache
def _classes(expected: Any) -> tuple[type, ...]:
    """Returns the classes of the values that have the type `expected`."""
    origin, parts = get_origin(expected), get_args(expected)
    if origin is Annotated:
        return _classes(parts[0])
    if origin in (Union, UnionType):
        return tuple(kind for part in parts for kind in _classes(part))
    if origin is Literal:
        return tuple(dict.fromkeys(type(part) for part in parts))
    if is_typeddict(expected) or expected is dict or origin is dict:
        return dict, OrderedDict
    return (NoneType if expected is None else origin or expected,)


def _other(value: Any, expected: tuple[Any, ...], where: str) -> str:
    names = " or ".join(_classes(part)[0].__name__.replace("NoneType", "None") for part in expected)
    return f"{where} is {_described(value)} in place of {names}"


def _described(value: Any) -> str:
    """Returns a short value itself, or its class: the text of a nested value may fill the memory."""
    is_number = type(value) is float or (type(value) is int and abs(value) <= MOST)
    is_short = is_number or value is None or type(value) is bool or (type(value) is str and len(value) < 30)
    return repr(value) if is_short else f"a value of type {type(value).__name__}"
