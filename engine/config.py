"""The arguments of an engine by name and type, as one frozen object that is checked once and saved with the run."""

import dataclasses
import functools
import inspect
import json
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
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from typing_extensions import TypedDict

from .errors import RefusedError, refusing
from .flags import (
    AcceleratorName,
    ActivationCheckpointing,
    CheckpointFormat,
    ClipAlgorithm,
    CompileMode,
    CompressionName,
    NonFinitePolicy,
    Offload,
    PrecisionName,
    ProfilerName,
    StrategyName,
    UnevenPolicy,
    check_count,
    check_number,
    choose,
    did_you_mean,
)
from .precision import canonical_precision

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

__all__ = [
    "ArgumentError",
    "Arguments",
    "Duration",
    "EngineConfig",
    "Plugin",
    "check_arguments",
    "checks_arguments",
    "plain_value",
    "with_arguments_of",
]

# The arguments of `Engine` by name and type, for functions that pass all of them on: ``**flags: Unpack[Arguments]``.
#
# `Engine.__init__` repeats them with defaults; a test compares the two, and both with `lightning.pytorch.Trainer`.

Plugin: TypeAlias = Precision | ClusterEnvironment | CheckpointIO | LayerSync
Duration: TypeAlias = str | timedelta | dict[str, int]
"""``"DD:HH:MM:SS"``, or a `timedelta` or its arguments."""

_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


class Arguments(TypedDict, total=False):
    """All arguments of `Engine`; each may be left out."""

    accelerator: AcceleratorName | str | Accelerator
    strategy: StrategyName | str | Strategy
    devices: list[int] | str | int
    num_nodes: int
    precision: PrecisionName | None
    compression: CompressionName | str
    compile: bool | CompileMode | None
    activation_checkpointing: ActivationCheckpointing
    offload: Offload | Sequence[Offload] | None
    resume: str | Path | None
    checkpoint_format: CheckpointFormat
    hang_timeout_s: float | None
    nonfinite: NonFinitePolicy
    check_first_steps: bool | Literal["auto"]
    uneven: UnevenPolicy
    seed_samples: bool
    name: str | None
    enable_run_summary: bool | None
    global_batch_size: int | None
    micro_batch_size: int | Literal["auto"] | None
    logger: Logger | Iterable[Logger] | bool | None
    callbacks: Callback | Sequence[Callback] | None
    fast_dev_run: int | bool
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: Duration | None
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: int | float
    val_check_interval: int | float | Duration | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | None
    log_every_n_steps: int | None
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    accumulate_grad_batches: int
    gradient_clip_val: int | float | None
    gradient_clip_algorithm: ClipAlgorithm | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    profiler: Profiler | ProfilerName | None
    detect_anomaly: bool
    barebones: bool
    plugins: Plugin | Sequence[Plugin] | None
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    default_root_dir: str | Path | None
    enable_autolog_hparams: bool
    model_registry: str | None


def with_arguments_of(cls: type) -> Callable[[_FunctionT], _FunctionT]:
    """Decorates a function whose ``**flags`` are the arguments of `cls`, so that `inspect.signature` names each."""

    def decorate(function: _FunctionT) -> _FunctionT:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        every = [*own, *inspect.signature(cls).parameters.values()]
        vars(function)["__signature__"] = signature.replace(parameters=every)
        return function

    return decorate


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EngineConfig:
    """The arguments of `Engine`: a field for each that the engine reads itself; `trainer` has those for Lightning only.

    Raises:
        ArgumentError: a value of the wrong type or out of its range.
    """

    # --- which processes, on which devices
    accelerator: str | Accelerator = "auto"
    """Kind of device, by name or as Lightning's object."""
    strategy: "str | Strategy" = "auto"
    """Flag of the strategy, with the current names of its options, or Lightning's object."""
    devices: list[int] | str | int = "auto"
    """Number of devices of each node, ``"auto"`` or -1 for all, or a list of their indices."""
    num_nodes: int = 1
    """Number of nodes (machines)."""
    precision: Any = None
    """Name of the precision; None: float32."""
    compression: str = "none"
    """Flag of the comm hook: how gradients are sent."""
    plugins: Plugin | Sequence[Plugin] | None = None
    """Lightning's plugins: precision, cluster environment, checkpoint IO, layer sync."""
    sync_batchnorm: bool = False
    """Whether BatchNorm's statistics are computed over all ranks."""

    # --- the step
    compile: bool | CompileMode | None = False
    """Mode of `torch.compile`; False and None: not compiled, True: ``"default"``."""
    activation_checkpointing: ActivationCheckpointing = "none"
    """Activations that each repeated block computes again in backward."""
    offload: Offload | Sequence[Offload] | None = None
    """Tensors that are kept in host memory: ``"activations"``, ``"parameters"`` or both."""
    nonfinite: NonFinitePolicy = "warn"
    """Response to a loss or gradient that is infinite or NaN: ``"skip"`` leaves the step out, on all ranks."""
    check_first_steps: bool | Literal["auto"] = "auto"
    """Whether the first steps are compared with those of the whole module in one process."""

    # --- batches
    global_batch_size: int | None = None
    """Samples of an optimizer step, over all ranks and micro-batches; None: the DataLoader's batch size decides."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Most samples of a micro-batch; None: the DataLoader's batch size, ``"auto"``: as many as fit in memory."""
    accumulate_grad_batches: int = 1
    """Micro-batches of an optimizer step."""
    uneven: UnevenPolicy = "pad"
    """How an epoch ends in which ranks have different numbers of training batches."""
    seed_samples: bool = False
    """Whether the random draws of each sample are seeded by its index."""

    # --- checkpoints and failures
    resume: str | Path | None = None
    """Checkpoint to resume from, ``"auto"``, ``"fresh"``, or None."""
    checkpoint_format: CheckpointFormat = "auto"
    """Whether a checkpoint is a file or a directory."""
    hang_timeout_s: float | None = 600.0
    """Seconds that a rank may stay at one batch and phase; None: for ever."""

    # --- what is shown and logged
    logger: Logger | Iterable[Logger] | bool | None = None
    """Loggers; None and True: TensorBoard's, False: none."""
    name: str | None = None
    """Name of the folder of the default logger; None: a number."""
    callbacks: Callback | Sequence[Callback] | None = None
    """The user's callbacks."""
    enable_progress_bar: bool | None = None
    """Whether a progress bar is added where there is none; None: yes."""
    enable_run_summary: bool | None = None
    """Whether a line about the run is printed; None: unless the run is silent."""
    barebones: bool = False
    """Whether everything that costs time is left out."""

    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further arguments of Lightning's `Trainer`, by name."""

    def __post_init__(self) -> None:
        check_arguments(self._given())

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> "EngineConfig":
        """Builds it from the arguments of `Engine` by name; other names are ignored."""
        values = {name: value for name, value in arguments.items() if name in Arguments.__annotations__}
        own = {name: values.pop(name) for name in _OWN_FIELDS if name in values}
        return cls(**own, trainer=values)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of `Engine`, by name."""
        return {**{name: getattr(self, name) for name in _OWN_FIELDS}, **self.trainer}

    @property
    def arguments_of_trainer(self) -> dict[str, Any]:
        """The arguments that Lightning's `Trainer` has as well, by name."""
        return {name: value for name, value in self.arguments.items() if name in _TRAINERS_DEFAULTS}

    @property
    def is_silent(self) -> bool:
        """Whether the run shows and logs nothing by itself."""
        return self.barebones or (self.enable_progress_bar is False and self.logger is False)

    @property
    def continues_runs(self) -> bool:
        """Whether the engine chooses the checkpoint to resume from, and saves what this choice needs."""
        return self.resume in ("auto", "fresh")

    def __str__(self) -> str:
        """The arguments that differ from their defaults: ``Engine(strategy='ddp', devices=2)``."""
        return f"Engine({', '.join(f'{name}={value!r}' for name, value in self._given().items())})"

    @property
    def as_plain(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, by name, as values that JSON has."""
        return {name: plain_value(value) for name, value in self._given().items()}

    def _given(self) -> dict[str, Any]:
        defaults = {**_TRAINERS_DEFAULTS, **_OWN_FIELDS}
        return {name: value for name, value in self.arguments.items() if not _is_same(value, defaults.get(name))}


_OWN_FIELDS = {field.name: field.default for field in dataclasses.fields(EngineConfig) if field.name != "trainer"}
"""Default by name of each argument that is a field."""

_TRAINERS_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
"""Default by name of each argument of Lightning's `Trainer`."""


def _is_same(value: Any, default: Any) -> bool:
    """Whether a value is the default; objects are compared by identity, since their ``==`` may do anything."""
    return value is default or (
        isinstance(value, (bool, int, float, str)) and (type(value), value) == (type(default), default)
    )


def plain_value(value: Any) -> Any:
    """Returns `value` as a number, a text, a switch or None: lists as a text, objects by the name of their class."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        entries = [plain_value(entry) for entry in value]
        return json.dumps(entries) if entries and not isinstance(entries[0], str) else ", ".join(map(str, entries))
    return str(value) if isinstance(value, os.PathLike) else type(value).__name__


# Checks the arguments of `Engine` before anything is built: their names, types, closed sets and ranges.
#
# Types and closed sets come from the annotations of `Arguments`. The tables here have the rest: the
# ranges of counts, and descriptions of arguments with a grammar of their own. Every value that Lightning accepts is
# accepted here, too.

_P = ParamSpec("_P")

EXAMPLE = 'Engine(strategy="ddp", devices=2)'

_HINTS = typing.get_type_hints(Arguments)

_LEAST = {
    "num_nodes": 1,
    "global_batch_size": 1,
    "micro_batch_size": 1,
    "fast_dev_run": 0,
    "max_epochs": -1,
    "min_epochs": 0,
    "max_steps": -1,
    "min_steps": 0,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": -1,
    "log_every_n_steps": 0,
    "accumulate_grad_batches": 1,
    "reload_dataloaders_every_n_epochs": 0,
}
"""The least value of each count; -1 stands for no limit."""

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
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real)
    if hint is Path:
        return isinstance(value, os.PathLike)
    if hint in (str, type(None)):
        return isinstance(value, hint)
    return isinstance(value, hint) or _stands_for(value, hint)


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
