"""Plans of training runs: what `test_equivalence.py` draws, and `replay.py` carries out under both trainers.

The `repr` of a plan names only what is not at its default; it can be pasted as an `@example`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from hypothesis import strategies as st

METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
READS = (*METRICS, "progress", "lr")
"""What a hook may look at. `progress` is the state of all loops, which a checkpoint written there would hold."""

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
EPOCH_HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end")
VAL_STEP_HOOKS = ("on_validation_batch_start", "on_validation_batch_end")
VAL_EPOCH_HOOKS = ("on_validation_start", "on_validation_epoch_start", "on_validation_epoch_end")
SILENT_HOOKS = ("on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_exception")
"""Hooks in which nothing may be logged."""

CALLBACK_HOOKS = (
    *STEP_HOOKS,
    *EPOCH_HOOKS,
    *VAL_STEP_HOOKS,
    *VAL_EPOCH_HOOKS,
    *SILENT_HOOKS,
    "on_sanity_check_start",
    "on_sanity_check_end",
    "on_test_batch_end",
    "on_test_epoch_end",
)
MODULE_STEP_HOOKS = ("backward", "configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad")
MODULE_HOOKS = (
    "training_step",
    "validation_step",
    *STEP_HOOKS,
    *EPOCH_HOOKS,
    *VAL_STEP_HOOKS,
    *VAL_EPOCH_HOOKS,
    *SILENT_HOOKS[:-1],
    *MODULE_STEP_HOOKS,
    "lr_scheduler_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_test_batch_end",
    "on_test_epoch_end",
)
PER_STEP = {"training_step", "validation_step", "on_test_batch_end", *STEP_HOOKS, *VAL_STEP_HOOKS, *MODULE_STEP_HOOKS}
PER_EPOCH = {"on_test_epoch_end", *EPOCH_HOOKS, *VAL_EPOCH_HOOKS}

VALUES = ("float", "int", "bool", "tensor", "loss", "view", "float64", "bfloat16", "int64", "vector", "numpy", "nan")
REDUCTIONS = ("mean", "mean", "mean", "min", "max", "sum", "builtin_max", "builtin_min")
METRIC_VALUES = ("metric", "updated metric", "collection")
"""Logged as torchmetrics objects."""


class _Short:
    """Shows the fields that are not at their default."""

    def __repr__(self) -> str:
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis would show all fields
        printer.text(repr(self))


@dataclass(frozen=True, kw_only=True, repr=False)
class Entry(_Short):
    """One `self.log`."""

    name: str = "a"
    value: str = "float"
    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: str = "mean"
    """`builtin_max` and `builtin_min` stand for Python's functions."""
    enable_graph: bool = False
    add_dataloader_idx: bool = True
    batch_size: int | None = None
    sync_dist: bool = False
    rank_zero_only: bool = False
    first: int = 0
    """The call of the hook in which it is first logged."""
    every: int = 1
    """In how many calls of the hook it is logged from then on."""
    in_dict: bool = False
    """Whether by way of `log_dict`."""
    spoiled: bool = False
    """Whether the value is overwritten after the call."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Hook(_Short):
    """A hook that somebody overrides, and what happens in it."""

    name: str
    entries: tuple[Entry, ...] = ()
    reads: tuple[str, ...] = ()
    does: str | None = None
    """`stop` sets `trainer.should_stop`, `raise` raises."""
    at: int = 0
    """The call in which it does so."""
    late: bool = False
    """Whether a module's hook first does what it usually does."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(_Short):
    """A run."""

    module: tuple[Hook, ...] = ()
    callbacks: tuple[tuple[Hook, ...], ...] = ()
    windows: int = 2
    """Number of optimizer steps in an epoch: the loader has this times `accumulate` batches, and `surplus`."""
    accumulate: int = 1
    surplus: int = 0
    """Batches that `limit_train_batches` cuts off."""
    sized: bool = True
    """Whether the loaders know their length."""
    batch: str = "tensor"
    returns: str = "tensor"
    """What `training_step` does: `tensor`, `dict`."""
    none_at: int | None = None
    """The batch of each epoch for which it returns None."""
    cancel_at: int | None = None
    """The batch of each epoch for which the module's `on_train_batch_start` returns -1."""
    max_epochs: int = 1
    max_steps: int = -1
    min_epochs: int | None = None
    val_batches: tuple[int, ...] = ()
    """Number of batches of each validation loader."""
    val_check_interval: int | float | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 0
    optimizer: str = "sgd"
    scheduler: str | None = None
    frequency: int = 1
    monitor: str = "watched"
    """What a plateau scheduler looks at; `watched` is always logged."""
    log_every_n_steps: int = 1
    logger: str | None = "writes"
    """`reads`: it looks at `trainer.logged_metrics` as well."""
    clip: float | None = None
    clip_algorithm: str | None = None
    precision: str = "32-true"
    then: str | None = None
    """What follows, even a run that raised: `validate`, `test`, or one more epoch by `fit` or of an `other module`."""


_T = TypeVar("_T")


def _mostly(usual: _T, *others: _T) -> st.SearchStrategy[_T]:
    return st.sampled_from([usual] * (2 * len(others)) + list(others))


_levels = st.sampled_from([(None, None), (True, None), (True, True), (False, True), (True, False), (None, True)])


@st.composite
def _entries(draw: Callable, hook: str) -> Entry:
    value = draw(st.sampled_from(VALUES + METRIC_VALUES))
    on_step, on_epoch = draw(_levels) if hook in PER_STEP else (None, None)
    is_metric = value in METRIC_VALUES
    return Entry(
        name=draw(st.sampled_from(["a", "b", "c", "step"])),
        value=value,
        prog_bar=draw(st.booleans()),
        logger=draw(_mostly(None, True, False)),
        on_step=on_step,
        on_epoch=on_epoch,
        reduce_fx="mean" if is_metric else draw(st.sampled_from(REDUCTIONS)),
        enable_graph=draw(_mostly(False, True)),
        add_dataloader_idx=draw(_mostly(True, False)),
        batch_size=draw(_mostly(None, 3)),
        sync_dist=draw(_mostly(False, True)),
        rank_zero_only=draw(_mostly(False, True)),
        first=draw(_mostly(0, 1, 2)),
        every=draw(_mostly(1, 2)),
        in_dict=draw(_mostly(False, True)),
        spoiled=draw(st.booleans()),
    )


@st.composite
def _hooks(draw: Callable, name: str) -> Hook:
    logs = name in PER_STEP | PER_EPOCH
    entries = draw(st.lists(_entries(name), max_size=3, unique_by=lambda e: e.name)) if logs else ()
    reads = draw(st.lists(st.sampled_from(READS), max_size=2, unique=True)) if draw(st.booleans()) else ()
    does = draw(_mostly(None, None, None, "stop", None, None, "stop", "raise"))
    if (name, does) == ("on_exception", "raise"):
        does = None  # the engine raises the error that ended the run; the stock trainer, that of this hook
    at = draw(st.integers(0, 3)) if does else 0
    late = draw(st.booleans()) if name in MODULE_STEP_HOOKS else False
    return Hook(name=name, entries=tuple(entries), reads=tuple(reads), does=does, at=at, late=late)


def _owner(draw: Callable, names: tuple[str, ...], most: int) -> tuple[Hook, ...]:
    chosen = draw(st.lists(st.sampled_from(names), max_size=most, unique=True))
    always = [name for name in ("training_step", "validation_step") if name in names and name not in chosen]
    return tuple(draw(_hooks(name)) for name in (*always, *chosen))


def _agreed(owners: list[tuple[Hook, ...]]) -> list[tuple[Hook, ...]]:
    """Owners who log one name in one hook with the same arguments, without which Lightning raises."""
    first: dict[tuple[str, str], Entry] = {}

    def agree(hook: Hook) -> Hook:
        entries = (first.setdefault((hook.name, entry.name), entry) for entry in hook.entries)
        return replace(hook, entries=tuple(entries))

    return [tuple(agree(hook) for hook in hooks) for hooks in owners]


def _has_metrics(owners: list[tuple[Hook, ...]]) -> bool:
    return any(entry.value in METRIC_VALUES for hooks in owners for hook in hooks for entry in hook.entries)


@st.composite
def plans(draw: Callable) -> Plan:
    """Runs of one to three short epochs."""
    windows, accumulate = draw(st.integers(1, 4)), draw(_mostly(1, 2, 3))
    size = windows * accumulate
    sized = draw(_mostly(True, False))
    vals = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    by_batches = draw(_mostly(False, True)) if vals else False
    intervals = [st.integers(1, size), *([st.none(), st.just(0.5)] if sized else [st.none()])]
    interval = draw(st.integers(1, size + 2) if by_batches else st.one_of(intervals)) if vals else None
    clip = draw(_mostly(None, 0.1, 10.0))
    algorithm = draw(st.sampled_from(["norm", "value"])) if clip else None
    owners = [_owner(draw, MODULE_HOOKS, 8), *(_owner(draw, CALLBACK_HOOKS, 6) for _ in range(draw(st.integers(0, 3))))]
    module, *callbacks = _agreed(owners) if draw(st.integers(0, 9)) else owners
    arguments: dict[str, Any] = {
        "surplus": draw(_mostly(0, 2)),
        # In a window of several batches each sample counts the same; Lightning's batches do, however short one is.
        "batch": draw(_mostly("tensor", "dict", "list", *(["ragged"] if accumulate == 1 else []))),
        "returns": draw(st.sampled_from(["tensor", "dict"])),
        # Clipping by value is an error of Lightning's where there is no gradient at all, and none of the engine's.
        "none_at": None if algorithm == "value" else draw(_mostly(None, 0, size - 1)),
        "cancel_at": draw(_mostly(None, 0, size // 2)),
        "max_epochs": draw(st.integers(1, 3)),
        "max_steps": draw(_mostly(-1, windows, windows + 1)),
        "min_epochs": draw(_mostly(None, 2)),
        "check_val_every_n_epoch": None if by_batches else draw(_mostly(1, 2)),
        "num_sanity_val_steps": draw(_mostly(0, 1, 2)),
        "optimizer": draw(st.sampled_from(["sgd", "momentum", "adam"])),
        "scheduler": draw(st.sampled_from([None, "step", "epoch", "plateau step", "plateau epoch"])),
        "frequency": draw(_mostly(1, 2)),
        "monitor": draw(_mostly("watched", "a")),
        "log_every_n_steps": draw(st.integers(1, 5)),
        "logger": draw(_mostly("writes", "reads", None)),
        "clip_algorithm": algorithm,
        # Each call of Lightning's `log` makes a metric compute in the default dtype of that moment, which 64-true
        # changes around the steps; the engine's does so at the first call alone.
        "precision": draw(_mostly("32-true", "bf16-mixed", *([] if _has_metrics(owners) else ["64-true"]))),
        "then": draw(_mostly(None, "validate", "test", "fit", "other module")),
    }
    return Plan(
        module=module,
        callbacks=tuple(callbacks),
        windows=windows,
        accumulate=accumulate,
        sized=sized,
        val_batches=vals,
        val_check_interval=interval,
        clip=clip,
        **arguments,
    )
