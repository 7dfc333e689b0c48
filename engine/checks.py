"""Checks the arguments of `Engine` before anything is built: their names, types, closed sets and ranges.

Types, closed sets and the ranges of counts come from the fields of `EngineConfig`; the tables here describe arguments
with a grammar of their own. Every value that Lightning accepts is accepted here, too.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, ParamSpec

from .config import EngineConfig, types_of
from .errors import RefusedError, refusing
from .flags import AcceleratorName, check_count, check_number, choose, did_you_mean
from .precision import canonical_precision

__all__ = ["ArgumentError", "check_arguments", "checks_arguments"]

_P = ParamSpec("_P")

EXAMPLE = 'Engine(strategy="ddp", devices=2)'

_HINTS = types_of(EngineConfig)

_LEAST = {one.name: least for one in dataclasses.fields(EngineConfig) if (least := one.metadata["least"]) is not None}

_DURATION = "a time as 'DD:HH:MM:SS', a timedelta or a dictionary of its arguments"
_BATCHES = "a fraction from 0.0 to 1.0, a whole number of batches"
_WORDS = {
    "strategy": "a name such as 'ddp' or 'hsdp:shard=4', or a Strategy",
    "compression": "a name such as 'bf16' or 'powersgd:4'",
    "accelerator": "a name such as 'cpu' or 'gpu', or an Accelerator",
    "devices": "a number, 'auto' or a list of indices",
    "resume": "a path, 'auto' or None",
    "default_root_dir": "a path or None",
    "max_time": f"{_DURATION}, or None",
    "val_check_interval": f"{_BATCHES}, {_DURATION}, or None",
    **{f"limit_{stage}_batches": f"{_BATCHES}, or None" for stage in ("train", "val", "test", "predict")},
    "overfit_batches": f"{_BATCHES}",
}
"""Descriptions of an argument's allowed values, where its annotation says too little."""

_BATCHES_OF = "You have passed invalid value {value} for {name}"
_LIGHTNING_SAYS = {
    **{f"limit_{stage}_batches": _BATCHES_OF for stage in ("train", "val", "test", "predict")},
    "overfit_batches": _BATCHES_OF,
    "val_check_interval": _BATCHES_OF,
    "check_val_every_n_epoch": "`{name}` should be an integer.",
    "max_epochs": "`{name}` must be a non-negative integer or -1",
    "max_steps": "`{name}` must be a non-negative integer or -1",
    "gradient_clip_val": "`{name}` should be an int or a float",
    "gradient_clip_algorithm": "`{name}` {value} is invalid",
    "profiler": "When passing string value for the `{name}` parameter of `Trainer`, it can only be one of",
    "devices": "`{name}` must be an int, a string, a sequence of ints, but you passed",
}
"""The first words of Lightning's messages which its own tests look for; the engine's messages end with them."""

_ANY_CASE = ("gradient_clip_algorithm", "profiler")
"""Closed sets whose values Lightning also accepts in capitals."""

_INDICES = re.compile(r"\s*(auto|-1|\d+|\d+(\s*,\s*\d+)*\s*,?)\s*")
_TIME = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*:\s*(\d+)\s*:\s*(\d+)\s*")
_TWO_DIGITS = re.compile(r"\s*\d+:\d\d:\d\d:\d\d\s*")

_TOO_MANY_DEVICES = 100_000
"""The smallest number of devices on one node that is refused: Lightning makes a list of all devices."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlevel = 2


class ArgumentError(RefusedError, TypeError):
    """An unknown argument, or an invalid value; a subclass of the errors that Python and Lightning raise for it."""


def checks_arguments(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates an ``__init__``: refuses unknown names, and turns the errors that it raises into a `RefusedError`."""
    names = list(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(*args: _P.args, **flags: _P.kwargs) -> None:
        cls = type(args[0]).__name__
        if len(args) > 1:
            shown = ", ".join(_shorten(value) for value in args[1:])
            raise ArgumentError(f"{cls} takes its arguments by name, but got {shown} without one: write {EXAMPLE}.")
        unexpected = f"{cls}.__init__() got an unexpected keyword argument"  # in the words of Python
        unknown = [
            f"{unexpected} {name!r}.{did_you_mean(name, names, kind='argument')}" for name in flags if name not in names
        ]
        if unknown:
            raise ArgumentError("\n".join(unknown[:3]))
        with refusing():
            init(*args, **flags)

    return checked


def check_arguments(flags: Mapping[str, Any]) -> None:
    """Checks the values of arguments of `Engine`, by name; relations between arguments are checked elsewhere.

    Raises:
        ArgumentError: one line with the argument's name, the value, what is allowed, and the closest of a closed set.
    """
    for name, value in flags.items():
        hint = _HINTS[name]
        try:
            is_right = _is_right(name, value, hint, flags)
        except ValueError as error:
            raise ArgumentError(str(error) + _as_lightning_says(name, value)) from None
        if not is_right:
            near = did_you_mean(value.lower(), _texts(hint)) if isinstance(value, str) else ""
            message = f"{name}={_shorten(value)}: {_WORDS.get(name) or _described(name, hint)}.{near}"
            raise ArgumentError(message + _as_lightning_says(name, value))


def _as_lightning_says(name: str, value: Any) -> str:
    template = _LIGHTNING_SAYS.get(name)
    # A text is shown without quotes, as in Lightning's message.
    return (
        f" (Lightning: {template.format(name=name, value=' '.join(str(value)[:80].split()))} ...)" if template else ""
    )


def _is_right(name: str, value: Any, hint: Any, flags: Mapping[str, Any]) -> bool:
    """Whether an argument can have a value; raises a ValueError if it has a more precise message than the caller's."""
    if value is None and _fits(None, hint):
        return True
    if name in _LEAST and isinstance(value, numbers.Number):
        check_count(name, _as_count(name, value), least=_LEAST[name])
        return True
    if name in _OWN_CHECKS:
        return _OWN_CHECKS[name](value, flags)
    if name == "precision" and not _fits(value, hint):
        canonical_precision(value)
    elif isinstance(value, str) and _texts(hint) and _is_closed(hint):
        choose(f"value of {name}", value.lower() if name in _ANY_CASE else value, _texts(hint))
        return True
    return _fits(value, hint)


def _shorten(value: Any) -> str:
    """The `repr` of `value` on one line, shortened if it is long."""
    return " ".join(_REPR.repr(value).split())


def _as_count(name: str, value: Any) -> Any:
    """The whole number that Lightning takes `value` for, if any: ``True`` is 1, and steps may be ``1e6``."""
    if isinstance(value, numbers.Integral):
        return value if isinstance(value, bool) and name not in _SWITCHED else int(value)
    if isinstance(value, float) and value.is_integer() and name in ("max_steps", "min_steps"):
        return int(value)
    return value


_SWITCHED = ("fast_dev_run", "log_every_n_steps", "num_sanity_val_steps", "reload_dataloaders_every_n_epochs")
"""Counts that scripts set to False to turn them off."""


_TAKEN_FOR: dict[Any, type] = {int: numbers.Integral, float: numbers.Real, Path: os.PathLike}
"""The objects that have an annotated type, where these are more than its instances, such as numbers of NumPy."""


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value` has the annotated type; the elements of an iterator are not checked."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if isinstance(origin, type) and issubclass(origin, Iterable):
        if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
            return False
        try:
            return isinstance(value, Iterator) or all(_fits(item, inner[0]) for item in value)
        except TypeError:  # a tensor without dimensions
            return False
    if hint is bool:
        return isinstance(value, bool) or (isinstance(value, int) and value in (0, 1))
    return isinstance(value, _TAKEN_FOR.get(hint, hint)) or _stands_for(value, hint)


def _stands_for(value: Any, cls: type) -> bool:
    """Whether an object that is no instance of `cls` can take the place of one; Lightning never checks its class.

    Either its class has the same name, as in the package `pytorch_lightning`, or it has all members that `cls` requires
    of its subclasses.
    """
    if isinstance(value, type):
        return False
    asked = getattr(cls, "__abstractmethods__", ())
    is_alike = bool(asked) and all(hasattr(value, name) for name in asked)
    return is_alike or any(base.__name__ == cls.__name__ for base in type(value).__mro__)


def _is_closed(hint: Any) -> bool:
    """Whether an annotation allows only texts of a closed set, None and objects."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return not {str, bool, int, float}.intersection(options)


def _texts(hint: Any) -> list[str]:
    """All texts that an annotation names."""
    if typing.get_origin(hint) is Literal:
        return [text for text in typing.get_args(hint) if isinstance(text, str)]
    return [text for option in typing.get_args(hint) for text in _texts(option)]


def _described(name: str, hint: Any) -> str:
    """Describes in words what an annotation allows: ``True, False or None``."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = dict.fromkeys(word for option in options for word in _words(name, option))
    *others, last = [word for word in words if not (word == "a whole number" and "a number" in words)]
    return f"{', '.join(others)} or {last}" if others else last


def _words(name: str, hint: Any) -> list[str]:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return [repr(value) for value in inner]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return ["a list of them"]
    if hint is bool:
        return ["True", "False"]
    if hint is int:
        return [f"a whole number of at least {_LEAST[name]}" if name in _LEAST else "a whole number"]
    plain = {float: "a number", str: "a name", Path: "a path", type(None): "None"}
    return [plain[hint]] if hint in plain else [f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}"]


def _is_devices(value: Any, flags: Mapping[str, Any]) -> bool:
    accelerator = flags.get("accelerator", "auto")
    if not isinstance(accelerator, str) or accelerator not in typing.get_args(AcceleratorName):
        return True  # the user's own accelerator parses `devices`
    if isinstance(value, str):
        return _INDICES.fullmatch(value) is not None and all(len(digits) < 6 for digits in re.findall(r"\d+", value))
    values = value if isinstance(value, Sequence) and not isinstance(value, bytes) else [value]
    is_whole = all(isinstance(index, numbers.Integral) and not isinstance(index, bool) for index in values)
    return is_whole and all(abs(index) < _TOO_MANY_DEVICES for index in values)


def _is_number_of_batches(value: Any, _flags: Mapping[str, Any]) -> bool:
    if not isinstance(value, numbers.Real):
        return False
    try:
        number = float(value)
    except OverflowError:  # a whole number, but far too large for a number of batches
        return False
    return 0 <= number <= 1 or (number > 1 and number % 1 == 0)


def _is_positive(value: Any, _flags: Mapping[str, Any]) -> bool:
    return isinstance(value, numbers.Real) and bool(check_number("hang_timeout_s", value, above=0))


def _is_clip_val(value: Any, _flags: Mapping[str, Any]) -> bool:
    return isinstance(value, numbers.Real) and check_number("gradient_clip_val", value, most=math.inf) >= 0


def _is_max_time(value: Any, _flags: Mapping[str, Any]) -> bool:
    return _is_duration(value) and (not isinstance(value, str) or _TWO_DIGITS.fullmatch(value) is not None)


def _is_check_interval(value: Any, flags: Mapping[str, Any]) -> bool:
    return _is_number_of_batches(value, flags) or _is_duration(value)


def _is_duration(value: Any) -> bool:
    if isinstance(value, str) and (match := _TIME.fullmatch(value)):
        value = dict(zip(("days", "hours", "minutes", "seconds"), map(int, match.groups()), strict=True))
    if isinstance(value, Mapping):
        try:
            value = timedelta(**value)
        except (TypeError, ValueError, OverflowError):
            return False
    return isinstance(value, timedelta)


_OWN_CHECKS: dict[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "benchmark": lambda value, flags: isinstance(value, bool),  # torch refuses 0 and 1 there
    "devices": _is_devices,
    "hang_timeout_s": _is_positive,
    "gradient_clip_val": _is_clip_val,
    "max_time": _is_max_time,
    "val_check_interval": _is_check_interval,
    **{f"limit_{stage}_batches": _is_number_of_batches for stage in ("train", "val", "test", "predict")},
    "overfit_batches": _is_number_of_batches,
}
"""Checks of arguments whose annotation says too little, given all flags."""
