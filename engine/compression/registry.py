"""The table of comm hooks, one row each. Torch is imported when a hook is made, not when its flag is checked."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..flags import choose, parse_flag, parse_options
from ..registration import COMM_HOOK_GROUP, Reference, check_new_name, load_plugin, plugin_names

if TYPE_CHECKING:
    from .base import CommHook

__all__ = [
    "COMM_HOOKS",
    "ROWS",
    "HookRow",
    "make_comm_hook",
    "register_comm_hook",
]


# --- the options after the colon of each compression flag (its comm hook's arguments), readable without torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class _NoOptions:
    """The options of a method without options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Int8Options:
    """Arguments of `Int8`."""

    block: int = 256
    """Number of values that share a scale; a multiple of 4."""
    feedback: bool = False
    """Add the rounding error to the next gradient; not supported under fsdp, where no rank could keep it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PowerSGDOptions:
    """Arguments of `PowerSGD`."""

    rank: int = 4
    """Number of columns of the two factors that are sent instead of a matrix."""
    start: int = 10
    """Number of optimizer steps without compression at the beginning."""
    min_ratio: float = 2.0
    """Compress a matrix only if its factors have this many times fewer values."""
    feedback: bool = True
    """Add the unsent part of a gradient to the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TopKOptions:
    """Arguments of `TopK`."""

    density: float = 0.01
    """Share of the values that are sent; the values of largest magnitude are sent."""
    chunk: int = 0
    """Search the largest of each so many values of a parameter, which shortens their indices (12 bits at 4096); 0: the
    largest of the whole parameter, with indices of 32 bits."""
    bits: int = 0
    """Bits of each value, from 1 to 8: a sign, and a magnitude between two scales that each chunk has, or without
    chunks each parameter; 0: all bits of its dtype."""
    decay: float = 1.0
    """Multiply the unsent part by it before it is added to the next gradient."""
    start: int = 0
    """Number of optimizer steps without compression at the beginning."""
    feedback: bool = True
    """Add the unsent part of a gradient to the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _SignOptions:
    """Arguments of `Sign`."""

    start: int = 0
    """Number of optimizer steps without compression at the beginning."""
    feedback: bool = True
    """Add the unsent part of a gradient to the next one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AutoOptions:
    """Arguments of `Auto`."""

    steps: int = 3
    """Number of optimizer steps to measure before a method is chosen."""


_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookRow:
    """Describes one comm hook; the fields equal the attributes of its class."""

    description: str
    load: Callable[[], Any]
    """Returns the class, a `CommHook`."""
    options: type = _NoOptions
    """Dataclass with the arguments of the class's constructor."""
    reduces_shards: bool = False
    """See `CommHook`."""
    takes_dtype: bool = False
    """See `CommHook`."""


def _class(path: str) -> Callable[[], Any]:
    return Reference(path, __package__ or "").load


ROWS: dict[str, HookRow] = {
    "bf16": HookRow(
        load=_class(".cast:BF16"),
        description="all-reduce in bfloat16: half the bytes, the range of fp32",
        reduces_shards=True,
    ),
    "fp16": HookRow(
        load=_class(".cast:FP16"), description="all-reduce in float16: half the bytes", reduces_shards=True
    ),
    "int8": HookRow(
        load=_class(".int8:Int8"),
        description="8 bits a value and a scale a block, stochastic rounding: int8[:block][,feedback=true]; block 256",
        options=_Int8Options,
        reduces_shards=True,
    ),
    "powersgd": HookRow(
        load=_class(".powersgd:PowerSGD"),
        description="low-rank factors with error feedback: powersgd[:rank][,start=steps]; rank 4, start 10",
        options=_PowerSGDOptions,
        takes_dtype=True,
    ),
    "topk": HookRow(
        load=_class(".topk:TopK"),
        description=(
            "the largest values (of chunks, in few bits) and their places, with error feedback:"
            " topk[:density][,chunk=values][,bits=bits][,decay=factor][,start=steps]; density 0.01"
        ),
        options=_TopKOptions,
        takes_dtype=True,
    ),
    "sign": HookRow(
        load=_class(".sign:Sign"),
        description="one bit a value and a scale a row, with error feedback: sign[:start=steps]",
        options=_SignOptions,
    ),
    "auto": HookRow(
        load=_class(".auto:Auto"),
        description=(
            "measures the first steps and takes the fastest of none, bf16, int8 and powersgd: auto[:steps]; steps 3"
        ),
        options=_AutoOptions,
    ),
}
"""Comm hooks by flag name; `none` means no hook."""


class _Classes(Mapping[str, "type[CommHook]"]):
    """The classes of `ROWS`, each imported at its lookup."""

    def __getitem__(self, name: str) -> "type[CommHook]":
        return ROWS[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)

    def __contains__(self, name: object) -> bool:  # Mapping's own method would import the class
        return name in ROWS


COMM_HOOKS: Mapping[str, "type[CommHook]"] = _Classes()
"""Classes of comm hooks by the name of their flag."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ParsedCompression:
    """A parsed compression flag, checked as far as possible without torch."""

    name: str
    arguments: Mapping[str, Any]
    """Arguments of the hook's constructor."""
    dtype: str
    """``"fp16"``, ``"bf16"`` or ``""``."""


def _parse_compression(flag: str) -> _ParsedCompression:
    """Parses a flag such as ``"powersgd:2,start=100"`` or ``"topk:0.01+fp16"`` without importing the hook.

    The constructor's parameters are the flag's options. The name of the first may be omitted, unless it is `start` or
    `feedback`. ``+fp16`` and ``+bf16`` send values in 16 bit that the method would send in the dtype of the gradients.

    Raises:
        ValueError: an unknown name or option, or a value that is not of the option's type.
    """
    method, plus, dtype = flag.partition("+") if isinstance(flag, str) else (flag, "", "")
    parsed = parse_flag(method, "compression")
    name = parsed.name
    if name != "none" and name not in ROWS:
        load_plugin(COMM_HOOK_GROUP, name)
        choose("compression", name, sorted({"none", *ROWS, *plugin_names(COMM_HOOK_GROUP)}))
    kind = f"compression {name!r}"
    options = ROWS[name].options if name != "none" else _NoOptions
    fields = [field.name for field in dataclasses.fields(options)]
    texts = dict(parsed.options)
    if parsed.value is not None:
        if not fields or fields[0] in ("start", "feedback") or fields[0] in texts:
            raise ValueError(f"{kind} can't take the value {parsed.value!r}; remove it from {flag!r}.")
        texts[fields[0]] = parsed.value
    values: Any = parse_options(kind, options, texts)
    if plus:
        _check_dtype(name, choose("dtype to send in", dtype, list(_DTYPES)))
    arguments = {key: getattr(values, key) for key in texts}
    return _ParsedCompression(name=name, arguments=arguments, dtype=dtype)


def make_comm_hook(flag: str) -> "CommHook | None":
    """Creates the comm hook of a flag, see `_parse_compression`; returns None for ``"none"``.

    Raises:
        ValueError: an unknown name or option, or a value that is out of range.
    """
    parsed = _parse_compression(flag)
    if parsed.name == "none":
        return None
    hook = COMM_HOOKS[parsed.name](**parsed.arguments)
    if parsed.dtype:
        import torch

        hook.send_dtype = getattr(torch, _DTYPES[parsed.dtype])
    hook.flag = flag.strip()
    return hook


def _check_dtype(name: str, dtype: str) -> None:
    if name == "none" or not ROWS[name].takes_dtype:
        can = [name for name, row in ROWS.items() if row.takes_dtype]
        instead = f"; for 16 bit alone write {dtype!r}" if name == "none" else ""
        raise ValueError(
            f"compression {name!r} sends nothing that +{dtype} could shorten{instead}. It can be added to:"
            f" {', '.join(can)}."
        )


# --- from outside the package

_HookT = TypeVar("_HookT", bound="type[CommHook]")


def register_comm_hook(hook: _HookT) -> _HookT:
    """Registers your own `CommHook` as a value of the flag `compression`; can be used as a class decorator.

    The constructor's parameters are the flag's options, with annotations ``int``, ``float``, ``bool``, ``str`` or a
    ``Literal`` of texts, and with defaults. The name of the first may be omitted, unless it is `start` or `feedback`.
    The hook can be combined with the strategies that support every compression (``ddp``, ``zero1``, ``hsdp``,
    ``local_sgd``, ``diloco``), and with ``fsdp`` if ``reduces_shards`` is true. Call it in the script or in the model's
    module, which every process imports; an installed package names that module as an entry point, see
    `polyphase.engine.registration`.

    Example:
        >>> @register_comm_hook
        ... class Rounded(CommHook):
        ...     name = "rounded"
        ...     description = "all-reduce of gradients rounded to a step: rounded[:step]; step 0.001"
        ...
        ...     def __init__(self, step: float = 1e-3) -> None:
        ...         super().__init__()
        ...         self.rounding_step = step
        ...
        ...     def average(self, bucket, wire):
        ...         gradients = bucket.gradients
        ...         gradients.div_(self.rounding_step).round_().mul_(self.rounding_step / wire.size)
        ...         wire.all_reduce(gradients)
        >>> Engine(strategy="ddp", devices=2, compression="rounded:0.01")

    Args:
        hook: the class; `polyphase strategies` shows its attributes `name` and `description`.

    Returns:
        The class itself.

    Raises:
        TypeError: `hook` is not a subclass of `CommHook`, lacks `average`, `name` or `description`, or its
            constructor's parameters lack a default or a type.
        ValueError: the name is taken by another class, or is not a valid flag name.
    """
    from .base import CommHook

    if not (isinstance(hook, type) and issubclass(hook, CommHook)):
        raise TypeError(f"register_comm_hook takes a subclass of polyphase.engine.compression.CommHook, not {hook!r}.")
    missing = [name for name in ("name", "description") if not isinstance(getattr(hook, name, None), str)]
    missing += sorted(hook.__abstractmethods__)
    if missing:
        raise TypeError(f"the comm hook {hook.__name__} lacks {', '.join(missing)}.")
    check_new_name("compression", hook.name, hook, COMM_HOOKS, reserved=("none",))
    ROWS[hook.name] = HookRow(
        description=hook.description,
        load=lambda: hook,
        options=_options_of(hook),
        reduces_shards=hook.reduces_shards,
        takes_dtype=hook.takes_dtype,
    )
    return hook


def _options_of(hook: type) -> type:
    """Returns a dataclass with the parameters of a hook's constructor."""
    types = typing.get_type_hints(hook.__init__)  # type: ignore[misc]
    fields = []
    for name, parameter in list(inspect.signature(hook.__init__).parameters.items())[1:]:  # type: ignore[misc]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(f"the constructor of {hook.__name__} must name its parameters: {parameter} has no flag.")
        if name not in types or parameter.default is parameter.empty:
            raise TypeError(f"the parameter {name!r} of {hook.__name__} needs a type and a default, as in n: int = 4.")
        fields.append((name, types[name], dataclasses.field(default=parameter.default)))
    return dataclasses.make_dataclass(f"{hook.__name__}Options", fields, frozen=True, kw_only=True)
