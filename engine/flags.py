"""The grammar of the flags and their error messages: pure functions of strings, no `torch.distributed`.

A flag is ``name[_launcher][:argument,...]``: ``"fsdp"``, ``"ddp_spawn:static_graph=true"``,
``"hsdp:replicate=2,shard=4"``, ``"powersgd:2,start=100"``. Every error names the value, the allowed values and, if
one is similar, the closest match.
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, TypeVar

from .choices import Axis
from .synonyms import meaning

__all__ = [
    "LAUNCHERS",
    "Flag",
    "Layout",
    "check_count",
    "check_number",
    "choose",
    "did_you_mean",
    "parse_flag",
    "parse_options",
    "split_launcher",
]

LAUNCHERS: Mapping[str, Literal["popen", "spawn", "fork"]] = {
    "": "popen",
    "spawn": "spawn",
    "fork": "fork",
    "notebook": "fork",
}
"""Start method by suffix of the strategy's name; without a suffix the script is run once per device."""


_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")

_OptionsT = TypeVar("_OptionsT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the device mesh by axis, outermost first; every synchronous strategy is one of these."""

    pp: int = 1
    """Number of pipeline stages."""
    replicate: int = 1
    """Number of full copies of the (sharded) model."""
    shard: int = 1
    """Number of shards that parameters, gradients and optimizer state are cut into."""
    tp: int = 1
    """Number of devices that share one tensor-parallel layer."""

    def __post_init__(self) -> None:
        for axis, size in self.axes.items():
            check_count(f"the size of axis {axis!r}", size)

    @property
    def axes(self) -> dict[str, int]:
        """Size by axis name, outermost axis first."""
        return dataclasses.asdict(self)

    @property
    def world_size(self) -> int:
        """Number of processes: the product of all axes."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.axes.items() if size > 1) or "one device"

    @classmethod
    def derive(cls, world_size: int, *, rest: Axis, **sizes: int | None) -> "Layout":
        """The layout of `world_size` processes with the given axis sizes; axis `rest` gets the remaining factor.

        Raises:
            ValueError: the sizes do not multiply to `world_size`.
        """
        fixed = {axis: size for axis, size in sizes.items() if size is not None}
        for axis, size in fixed.items():
            check_count(f"the size of axis {axis!r}", size)
        product = math.prod(fixed.values())
        if rest not in fixed and world_size % product == 0:
            fixed[rest] = world_size // product
        layout = cls(**fixed)
        if layout.world_size != world_size:
            factors = " x ".join(f"{axis}={size}" for axis, size in fixed.items())
            remedy = "change the sizes, or `devices` and `num_nodes`, so that the product is the number of processes"
            raise ValueError(
                f"the layout {factors} = {product} does not fit {world_size} process(es): {remedy}"
                + (f", or leave out {rest!r} to have it derived." if sizes.get(rest) is not None else ".")
            )
        return layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """A flag taken apart: ``name:value,key=text,...``."""

    name: str
    """The text before the colon."""
    value: str | None = None
    """The one bare argument, such as the rank in ``powersgd:2``."""
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The ``key=text`` arguments, not yet converted."""


def choose(kind: str, text: str, allowed: Collection[str]) -> str:
    """`text` itself if it is allowed.

    Args:
        kind: noun for the message, such as "strategy".
        text: written by the user.
        allowed: all allowed texts.

    Raises:
        ValueError: it is not; the message lists `allowed` and names the closest one.
    """
    if isinstance(text, str) and text in allowed:
        return text
    by_lower = {name.lower(): name for name in allowed}
    hint = did_you_mean(str(text).lower(), by_lower, lambda name: repr(by_lower[name]), cutoff=0.5, kind=kind)
    raise ValueError(f"unknown {kind} {text!r}.{hint} Allowed: {', '.join(sorted(allowed)) or 'none'}.")


def did_you_mean(
    text: str,
    allowed: Iterable[str],
    shown: Callable[[str], str] = repr,
    *,
    cutoff: float = 0.6,
    kind: str = "",
) -> str:
    """Returns a hint to append to an error: a space and "Did you mean ...?"; empty if none of `allowed` is similar.

    Args:
        text: written by the user.
        allowed: the valid names.
        shown: formats the closest one.
        cutoff: least similarity, from 0 to 1.
        kind: of `synonyms.meaning`: a word of another tool is answered with ours, however it is spelled.
    """
    meant = meaning(kind, text)
    if meant is not None:
        return f" Did you mean {meant}?"
    near = difflib.get_close_matches(text, list(allowed), n=1, cutoff=cutoff)
    return f" Did you mean {shown(near[0])}?" if near else ""


def check_count(name: str, value: Any, *, least: int = 1, most: float = math.inf) -> int:
    """`value` itself if it is a whole number from `least` to `most`.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bound = "" if math.isinf(most) else f" and at most {most}"
        raise ValueError(f"{name} must be a whole number of at least {least}{bound}, but got {value!r}.")
    return value


def check_number(name: str, value: Any, *, above: float | None = None, most: float = 1e9) -> float:
    """`value` itself if it is a number from 0, or greater than `above`, to `most`.

    Raises:
        ValueError: it is not.
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most or (above is not None and value <= above):
        least = "at least 0" if above is None else f"greater than {above:g}"
        bound = "" if math.isinf(most) or not is_number or not value > most else f" and at most {most:g}"
        raise ValueError(f"{name} must be {least}{bound}, but got {value!r}.")
    return value


def parse_flag(text: str, kind: str = "the flag") -> Flag:
    """Takes ``name:value,key=text`` apart.

    Raises:
        ValueError: an empty name, an argument without a value, a second bare value, or a key given twice.
    """
    if not isinstance(text, str):
        raise ValueError(f"{kind} must be a text such as 'name' or 'name:key=value', but got {text!r}.")
    name, _, arguments = text.strip().partition(":")
    if not name:
        raise ValueError(f"{kind} {text!r} has no name; write name or name:key=value,...")
    value: str | None = None
    options: dict[str, str] = {}
    for argument in filter(None, (part.strip() for part in arguments.split(","))):
        key, equals, word = (part.strip() for part in argument.partition("="))
        if not equals and value is None and not options:
            value = key
        elif not equals or not key or not word:
            raise ValueError(f"can't read {argument!r} in the flag {text!r}; write name:key=value,key=value")
        elif key in options:
            raise ValueError(f"{key!r} stands twice in the flag {text!r}; give it once.")
        else:
            options[key] = word
    return Flag(name=name, value=value, options=options)


def split_launcher(name: str) -> tuple[str, str]:
    """``"fsdp_spawn"`` -> ``("fsdp", "spawn")``; the launcher is ``""`` where the name has no suffix for one."""
    for suffix in LAUNCHERS:
        if suffix and name.endswith(f"_{suffix}"):
            return name[: -len(suffix) - 1], suffix
    return name, ""


def parse_options(kind: str, cls: type[_OptionsT], options: Mapping[str, str]) -> _OptionsT:
    """Makes a `cls`, a dataclass or any class, converting texts to its constructor's arguments by their types.

    Raises:
        ValueError: an unknown key, or a text that is not of the field's type.
    """
    types = {name: type_ for name, type_ in typing.get_type_hints(cls.__init__).items() if name != "return"}
    values = {
        choose(f"option of {kind}", key, types): _convert(f"{kind}:{key}", text, types[key])
        for key, text in options.items()
    }
    return cls(**values)


def _convert(name: str, text: str, type_: Any) -> Any:
    choices = [option for option in typing.get_args(type_) if option is not type(None)] or [type_]
    if typing.get_origin(type_) is Literal:
        return choose(f"value of {name}", text, choices)
    target = choices[0]
    if target is bool:
        if text.lower() in _TRUE + _FALSE:
            return text.lower() in _TRUE
        raise ValueError(f"{name} must be true or false, but got {text!r}.")
    try:
        return target(text)
    except ValueError:
        kind = {int: "a whole number", float: "a number"}.get(target, target.__name__)
        raise ValueError(f"{name} must be {kind}, but got {text!r}.") from None
