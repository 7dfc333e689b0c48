"""Gradient compression: one comm hook a file, and this table of them."""

import inspect

from ..flags import choose, parse_flag, parse_options
from .auto import Auto
from .base import CommHook, NonFiniteGradientError
from .bucket import Bucket, Member
from .cast import BF16, FP16
from .deal import deal_residuals
from .forecast import Forecast, Link
from .int8 import Int8
from .plain import Plain
from .powersgd import PowerSGD
from .sign import Sign
from .topk import TopK
from .wire import Sent, Wire, seconds_between

__all__ = [
    "COMM_HOOKS",
    "Auto",
    "Bucket",
    "CommHook",
    "Forecast",
    "Link",
    "Member",
    "NonFiniteGradientError",
    "Plain",
    "Sent",
    "Wire",
    "deal_residuals",
    "make_comm_hook",
    "seconds_between",
]

COMM_HOOKS: dict[str, type[CommHook]] = {hook.name: hook for hook in (BF16, FP16, Int8, PowerSGD, TopK, Sign, Auto)}
"""Comm hooks by the name of their flag; `none` is no hook at all."""


def make_comm_hook(flag: str) -> CommHook | None:
    """The comm hook of a flag such as ``"powersgd:2,start=100"`` or ``"topk:0.01+fp16"``; None for ``"none"``.

    The constructor's parameters are the flag's options; the first may stand bare. ``+fp16`` and ``+bf16`` send in 16
    bit what a method would send in the dtype of the gradients.

    Raises:
        ValueError: an unknown name or option, or a value that is out of range.
    """
    method, plus, dtype = flag.partition("+") if isinstance(flag, str) else (flag, "", "")
    parsed = parse_flag(method, "compression")
    name = choose("compression", parsed.name, ["none", *COMM_HOOKS])
    kind = f"compression {name!r}"
    parameters = list(inspect.signature(COMM_HOOKS[name].__init__).parameters)[1:] if name != "none" else []
    options = dict(parsed.options)
    if parsed.value is not None:
        if not parameters or parameters[0] in ("start", "feedback") or parameters[0] in options:
            raise ValueError(f"{kind} can't take the value {parsed.value!r}; remove it from {flag!r}.")
        options[parameters[0]] = parsed.value
    for option in options:
        choose(f"option of {kind}", option, parameters)
    hook = None if name == "none" else parse_options(kind, COMM_HOOKS[name], options)
    if plus:
        _send_in(hook, name, choose("dtype to send in", dtype, ["fp16", "bf16"]))
    if hook is not None:
        hook.flag = flag.strip()
    return hook


def _send_in(hook: CommHook | None, name: str, dtype: str) -> None:
    if hook is None or not hook.takes_dtype:
        can = [name for name, kind in COMM_HOOKS.items() if kind.takes_dtype]
        instead = f"; for 16 bit alone write {dtype!r}" if hook is None else ""
        raise ValueError(
            f"compression {name!r} sends nothing that +{dtype} could shorten{instead}. It can be added to:"
            f" {', '.join(can)}."
        )
    hook.send_dtype = {"fp16": FP16, "bf16": BF16}[dtype].dtype
