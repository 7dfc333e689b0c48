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
from collections.abc import Collection, Iterator
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
    "Falling",
    "Few",
    "NotAPlainFileError",
    "PlainName",
    "Positive",
    "Range",
    "Unlike",
    "for_html",
    "for_terminal",
    "is_plain_name",
    "open_new",
    "open_plain",
    "problem",
    "read_plain",
    "written_beside",
]

NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls of terminals, marks that change the direction of the text, and bytes of file names that are no UTF-8."""


class NotAPlainFileError(ValueError):
    """A file is not opened, since it is a link, a folder, a device or a pipe, or larger than allowed."""


def is_plain_name(name: Any) -> bool:
    """Whether `name` is the plain name of a file in a folder: no path that could lead out of it, nor commands."""
    if type(name) is not str or name in ("", ".", "..") or {*name} & {"/", "\\", "\n"} or NOT_SHOWN.search(name):
        return False
    return len(os.fsencode(name)) <= 255  # the most that file systems take, of bytes


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


def read_plain(path: str, most_bytes: int) -> bytes:
    """Reads a whole local file, see `open_plain`.

    Raises:
        NotAPlainFileError: it is no plain file, or larger than `most_bytes`.
    """
    with open_plain(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise NotAPlainFileError(f"{os.path.basename(path)} has more than {most_bytes} bytes")
    return content


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


def for_terminal(text: str, *, has_lines: bool = False) -> str:
    """Returns a text without commands for a terminal: each control is written as Python writes it in a string.

    So is a new line, which the name of a file may have, unless the text `has_lines`.
    """
    shown = NOT_SHOWN.sub(lambda control: control[0].encode("unicode_escape").decode(), text)
    return shown if has_lines else shown.replace("\n", "\\n")


def for_html(text: object) -> str:
    """Returns a text for a page, in which it is neither markup nor a command for a terminal that shows the page."""
    return html.escape(for_terminal(str(text), has_lines=True))


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


@dataclasses.dataclass(frozen=True)
class Falling:
    """Fields of a record, none of which is larger than the one before it; a field may be missing."""

    names: tuple[str, ...]
    otherwise: str
    """Says what is wrong with larger ones."""

    def __call__(self, record: dict[str, Any]) -> str | None:
        """Returns what is wrong with `record`, or None."""
        values = [record[name] for name in self.names if name in record]
        return None if values == sorted(values, reverse=True) else f"{self.otherwise}: {values}"


@dataclasses.dataclass(frozen=True)
class Unlike:
    """A text that a pattern does not match as a whole."""

    pattern: re.Pattern[str]
    otherwise: str
    """Says what a text is that it matches."""

    def __call__(self, text: str) -> str | None:
        """Returns what is wrong with `text`, or None."""
        return f"is {text!r}, {self.otherwise}" if self.pattern.fullmatch(text) else None


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
MOST_RANKS = 1 << 20
"""Far more than any run has, and few enough to loop over."""
Few = Annotated[int, Range(1, MOST_RANKS)]


def _is_name(name: str) -> str | None:
    return None if is_plain_name(name) else f"is {name!r}, which is no name within a folder"


PlainName = Annotated[str, _is_name]


def problem(value: Any, expected: Any, where: str) -> str | None:
    """Returns a description of the first part of `value` that has not the type `expected`; None if all have.

    Args:
        value: what was read.
        expected: a class, `Any`, a `Literal`, a union of different classes, a `TypedDict`, `list`, `tuple` or `dict` of
            these, or `Annotated` with functions that return what is wrong with a value, or None. A `TypedDict` may have
            more keys.
        where: name of the value, for the description.
    """
    return _problem(value, _type_of(expected), where, set())


class _Type:
    """A declared type, taken apart once: a look at `typing` for each value takes several calls."""

    def __init__(self, expected: Any) -> None:
        origin, parts = get_origin(expected), get_args(expected)
        self.rules: tuple[Any, ...] = ()
        if origin is Annotated:
            self.rules = parts[1:]
            expected = parts[0]
            origin, parts = get_origin(expected), get_args(expected)
        self.expected, self.parts, self.classes = expected, parts, _classes(expected)
        self.values = parts if origin is Literal else ()
        self.options = [*map(_type_of, parts)] if origin in (Union, UnionType) else []
        self.required: frozenset[str] = expected.__required_keys__ if is_typeddict(expected) else frozenset()
        self.fields: list[tuple[str, _Type]] = []
        if is_typeddict(expected):
            self.fields = [(key, _type_of(kind)) for key, kind in get_type_hints(expected, include_extras=True).items()]
        self.kinds = [_type_of(kind) for kind in parts if kind is not ...] if origin in (list, tuple, dict) else []
        self.is_record = origin is tuple and parts[-1] is not ...
        self.is_class = not (self.rules or self.values or self.options or self.fields or self.kinds)
        """Whether a look at the class of a value is all; of `Any`, nothing is looked at."""


@cache
def _type_of(expected: Any) -> _Type:
    is_marked = get_origin(expected) in (Required, NotRequired)
    return _type_of(get_args(expected)[0]) if is_marked else _Type(expected)


def _problem(value: Any, kind: _Type, where: str, seen: set[tuple[int, int]]) -> str | None:
    if kind.expected is Any:
        return None
    if kind.options:
        option = next((option for option in kind.options if type(value) in option.classes), None)
        wrong = _other(value, kind.parts, where) if option is None else _problem(value, option, where, seen)
    elif kind.values:
        is_one = any(type(value) is type(part) and value == part for part in kind.values)
        wrong = None if is_one else f"{where} is {_described(value)} in place of {' or '.join(map(repr, kind.values))}"
    elif type(value) not in kind.classes:
        wrong = _other(value, (kind.expected,), where)
    elif not (kind.fields or kind.kinds) or (id(value), id(kind)) in seen:
        wrong = None
    else:
        seen.add((id(value), id(kind)))  # the content keeps its values alive, so ids stay unique
        wrong = _wrong_part(value, kind, where, seen)
    for rule in kind.rules if wrong is None else ():
        if wrong_value := rule(value):
            return f"{where} {wrong_value}"
    return wrong


def _wrong_part(value: Any, kind: _Type, where: str, seen: set[tuple[int, int]]) -> str | None:
    """Returns what is wrong with the parts of a container; one loop, without a call for those of a plain class."""
    if missing := kind.required.difference(value) if kind.required else None:
        return f"{where} has no {min(missing)}"
    if kind.is_record and len(value) != len(kind.parts):
        return f"{where} has {len(value)} parts in place of {len(kind.parts)}"
    parts: Any
    if kind.fields:
        parts = [(f"{where}.{key}", value[key], part) for key, part in kind.fields if key in value]
    elif isinstance(value, dict):
        parts = [] if _are_all(value, kind.kinds[0]) else [(f"a key of {where}", key, kind.kinds[0]) for key in value]
        if not _are_all(value.values(), kind.kinds[1]):
            parts += [(f"an entry of {where}", item, kind.kinds[1]) for item in value.values()]
    elif not kind.is_record and _are_all(value, kind.kinds[0]):
        return None
    else:
        of_parts = kind.kinds if kind.is_record else kind.kinds * len(value)
        parts = [(f"{where}[{i}]", item, part) for i, (item, part) in enumerate(zip(value, of_parts, strict=True))]
    for name, item, part in parts:
        if part.is_class and (type(item) in part.classes or part.expected is Any):
            continue
        if wrong := _problem(item, part, name, seen):
            return wrong
    return None


def _are_all(values: Collection[Any], kind: _Type) -> bool:
    """Whether all values are of a type that needs no look at each, as the numbers of a generator's state."""
    if kind.expected is Any:
        return True
    if kind.values or kind.options or kind.fields or kind.kinds or not {*kind.classes}.issuperset(map(type, values)):
        return False
    if not kind.rules or not values:
        return True
    are_ranges = all(isinstance(rule, Range) for rule in kind.rules)
    return are_ranges and not any(rule(end) for rule in kind.rules for end in (min(values), max(values)))


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
