"""Gradient compression: one comm hook a file, and this table of them."""

import inspect
import re

from ..flags import check_count, choose, parse_flag
from .base import CommHook
from .cast import BF16, FP16
from .powersgd import PowerSGD

__all__ = ["COMM_HOOKS", "CommHook", "make_comm_hook"]

COMM_HOOKS: dict[str, type[CommHook]] = {hook.name: hook for hook in (FP16, BF16, PowerSGD)}
"""Comm hooks by the name of their flag; `none` is no hook at all."""


def make_comm_hook(flag: str) -> CommHook | None:
    """The comm hook of a flag such as ``"powersgd:2,start=100"``; None for ``"none"``.

    The constructor's parameters are the flag's options, whole numbers all; the first may stand bare.

    Raises:
        ValueError: an unknown name or option, or a value that is out of range.
    """
    parsed = parse_flag(flag, "compression")
    name = choose("compression", parsed.name, ["none", *COMM_HOOKS])
    parameters = list(inspect.signature(COMM_HOOKS[name].__init__).parameters)[1:] if name != "none" else []
    given = dict(parsed.options)
    if parsed.value is not None:
        if not parameters or parameters[0] in given:
            raise ValueError(f"compression {name!r} can't take the value {parsed.value!r}; remove it from {flag!r}.")
        given[parameters[0]] = parsed.value
    options = {choose(f"option of compression {name!r}", key, parameters): text for key, text in given.items()}
    numbers = {key: _whole(f"compression {name}:{key}", text) for key, text in options.items()}
    return None if name == "none" else COMM_HOOKS[name](**numbers)


def _whole(name: str, text: str) -> int:
    return check_count(name, int(text) if re.fullmatch(r"-?[0-9]+", text) else text)
