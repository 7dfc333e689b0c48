"""The one home of an argument of `Engine`: its type, default, range, help, and place in the help of the command.

The signatures of `Engine` and `fit`, what an editor completes, the checks, the flags of the command and the page
docs/reference/flags.md are made from the fields of `EngineConfig`. It is read without torch: annotations stay texts.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import json
import operator
import os
import textwrap
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

from .flags import (
    AcceleratorName,
    ActivationCheckpointing,
    CheckpointFormat,
    ClipAlgorithm,
    CompileMode,
    CompressionName,
    FinetuneName,
    NonFinitePolicy,
    Offload,
    PrecisionName,
    ProfilerName,
    RankLossPolicy,
    StrategyName,
    UnevenPolicy,
)

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.accelerators import Accelerator
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
    from lightning.pytorch.profilers import Profiler
    from lightning.pytorch.strategies import Strategy

    Plugin: TypeAlias = Precision | ClusterEnvironment | CheckpointIO | LayerSync

__all__ = ["GROUPS", "EngineConfig", "field_docs", "plain_value", "types_of", "with_arguments_of"]

Duration: TypeAlias = str | timedelta | dict[str, int]
"""``"DD:HH:MM:SS"``, or a `timedelta` or its arguments."""

GROUPS = (
    "How to run it",
    "How long",
    "Batches",
    "Optimization",
    "Checkpoints and resuming",
    "What is shown and logged",
)
"""Headings of the command's help, in order."""

_HOW, _LONG, _BATCHES, _STEP, _SAVING, _SHOWN = GROUPS


def _about(group: str, example: str, least: int | None = None) -> dict[str, Any]:
    """The metadata of an argument, besides its type, default and text.

    Args:
        group: one of `GROUPS`; the short help of the command leaves out an argument of the group ``""``.
        example: a value, as it is written behind the flag of the command.
        least: the least value of a count; -1 stands for no limit.
    """
    return {"group": group, "example": example, "least": least}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EngineConfig:
    """The arguments of `Engine`, of which `Trainer` has most under the same name, with the same default and meaning."""

    # --- which processes, on which devices
    accelerator: AcceleratorName | str | Accelerator = field(default="auto", metadata=_about(_HOW, "cpu"))
    """Kind of device: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"mps"``, ``"tpu"``, or an object."""
    strategy: StrategyName | str | Strategy = field(default="auto", metadata=_about(_HOW, "ddp"))
    """How work is split over devices: see `polyphase strategies`. ``"single"``, ``"ddp"``, ``"fsdp"``,
    ``"hsdp:replicate=2,shard=4"``, ... A suffix ``_spawn``, ``_fork`` or ``_notebook`` chooses how processes start.
    Lightning's own names and strategy objects work, too. ``"auto"``: ``single`` on one device, otherwise ``ddp``."""
    devices: list[int] | str | int = field(default="auto", metadata=_about(_HOW, "2"))
    """Devices of each node: their number, -1 or ``"auto"`` for all, or a list of the indices of accelerators."""
    num_nodes: int = field(default=1, metadata=_about(_HOW, "2", least=1))
    """Number of nodes (machines)."""
    precision: PrecisionName | None = field(default=None, metadata=_about(_HOW, "bf16-mixed"))
    """Number format: ``"32-true"`` (None), ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"`` or
    ``"64-true"``; under some strategies ``"bf16-blocks"``, ``"float8"`` or ``"float8-rowwise"``, too."""
    compression: CompressionName | str = field(default="none", metadata=_about(_HOW, "bf16"))
    """How gradients are sent: see `polyphase strategies`. ``"none"``, ``"bf16"``, ``"int8"``, ``"powersgd:4"``,
    ``"topk:0.01"``, ``"sign"``, ``"powersgd:4+fp16"``, ... ``"auto"``: the fastest one, measured in the first steps."""
    plugins: Plugin | Sequence[Plugin] | None = field(default=None, metadata=_about("", "MyPlugin"))
    """One or several of Lightning's: precision, cluster environment, checkpoint IO, layer sync."""
    sync_batchnorm: bool = field(default=False, metadata=_about(_STEP, "true"))
    """Compute BatchNorm's statistics over all ranks."""
    use_distributed_sampler: bool = field(default=True, metadata=_about("", "false"))
    """Distribute samples over the ranks; False: your sampler does it."""

    # --- the step
    finetune: FinetuneName | str = field(default="none", metadata=_about(_STEP, "lora:rank=8"))
    """Freeze the module and train adapters, small matrices beside its linear layers. ``"lora"``,
    ``"lora:rank=16,alpha=32"``, ``"lora:targets=q_proj+v_proj"``; the layers are those of peft. ``"none"``: train all
    parameters that require a gradient."""
    compile: bool | CompileMode | None = field(default=False, metadata=_about(_HOW, "true"))
    """Run the module's steps through `torch.compile`, in the mode named (True: ``"default"``)."""
    activation_checkpointing: ActivationCheckpointing = field(default="none", metadata=_about(_HOW, "full"))
    """Activations that each repeated block recomputes in backward. This saves memory: ``"none"``, all but its inputs
    (``"full"``), or all but those of matrix products, convolutions and attention (``"selective"``). The result is the
    same."""
    offload: Offload | Sequence[Offload] | None = field(default=None, metadata=_about(_HOW, "activations"))
    """Tensors that are kept in host memory, one or several: ``"activations"`` until backward, and under fsdp and hsdp
    ``"parameters"``, with their gradients and optimizer state."""
    nonfinite: NonFinitePolicy = field(default="warn", metadata=_about(_STEP, "error"))
    """Reaction to a loss or gradient norm that is infinite or NaN. ``"warn"``, ``"error"``: the run ends, with the
    weights from before that step, ``"skip"``: all ranks leave the step out (weights, optimizer state, residuals,
    buffers), and the run ends after 20 of them in a row, or ``"ignore"``."""
    skip_spikes: float | None = field(default=None, metadata=_about(_STEP, "10"))
    """Under ``nonfinite="skip"``, leave out a step if the norm of its gradients, before clipping, is more than this
    many times the mean of about the last hundred. The first 20 steps are not judged. None: never."""
    check_first_steps: bool | Literal["auto"] = field(default="auto", metadata=_about(_STEP, "false"))
    """Compare the first steps with one process. Their losses, gradients and weights are compared between the ranks,
    and, under strategies that divide the module or the optimizer's state (fsdp, hsdp, tp, pp, zero1), with those of the
    whole module in one process. Under all, rank 0 compares its batch with two parts of it: a loss that is no mean over
    samples is told. ``"auto"`` warns of a difference, and takes a sample of large modules; with True a difference
    is an error, and the steps of ddp are compared with one process, too. False: never."""
    gradient_clip_val: int | float | None = field(default=None, metadata=_about(_STEP, "1.0"))
    """Largest norm of all gradients together, or largest value; None: no clipping."""
    gradient_clip_algorithm: ClipAlgorithm | None = field(default=None, metadata=_about(_STEP, "value"))
    """Clip by ``"norm"`` or by ``"value"``. None: ``"norm"``."""
    deterministic: bool | Literal["warn"] | None = field(default=None, metadata=_about(_STEP, "true"))
    """Use only deterministic algorithms; ``"warn"``: only warn if there is none."""
    benchmark: bool | None = field(default=None, metadata=_about("", "true"))
    """Sets `torch.backends.cudnn.benchmark`."""
    detect_anomaly: bool = field(default=False, metadata=_about("", "true"))
    """Find the operation whose backward made a NaN; slow."""
    inference_mode: bool = field(default=True, metadata=_about("", "false"))
    """Evaluate under `torch.inference_mode`; False, or if shards are gathered: `torch.no_grad`."""

    # --- how long
    max_epochs: int | None = field(default=None, metadata=_about(_LONG, "5", least=-1))
    """End after this number of epochs; -1: never. None: 1000, unless `max_steps` or `max_time` ends training."""
    min_epochs: int | None = field(default=None, metadata=_about("", "1", least=0))
    """Train for at least this number of epochs, even if a callback would stop earlier."""
    max_steps: int = field(default=-1, metadata=_about(_LONG, "1000", least=-1))
    """End after this number of optimizer steps; -1: never."""
    min_steps: int | None = field(default=None, metadata=_about("", "100", least=0))
    """Train for at least this number of optimizer steps, even if a callback would stop earlier."""
    max_time: Duration | None = field(default=None, metadata=_about(_LONG, "00:08:00:00"))
    """End after this time: ``"DD:HH:MM:SS"``, a `timedelta`, or a dictionary of its arguments."""
    limit_train_batches: int | float | None = field(default=None, metadata=_about(_LONG, "10"))
    """Use this number of batches of an epoch on each rank (int), or this fraction of them (float)."""
    limit_val_batches: int | float | None = field(default=None, metadata=_about(_LONG, "10"))
    """The same in validation."""
    limit_test_batches: int | float | None = field(default=None, metadata=_about("", "10"))
    """The same in `test`."""
    limit_predict_batches: int | float | None = field(default=None, metadata=_about("", "10"))
    """The same in `predict`."""
    overfit_batches: int | float = field(default=0.0, metadata=_about("", "2"))
    """Train and validate on this number of batches (int), or this fraction of them (float), in every epoch."""
    fast_dev_run: int | bool = field(default=False, metadata=_about(_LONG, "true", least=0))
    """Run this many batches of each stage, without logs and checkpoints; True: 1."""
    check_val_every_n_epoch: int | None = field(default=1, metadata=_about(_SHOWN, "5", least=1))
    """Validate in every n-th epoch; None: only by `val_check_interval`, across epochs."""
    val_check_interval: int | float | Duration | None = field(default=None, metadata=_about(_SHOWN, "0.25"))
    """Validate after this number of training batches (int), this fraction of an epoch (float), or this time (as in
    `max_time`)."""
    num_sanity_val_steps: int | None = field(default=None, metadata=_about("", "0", least=-1))
    """Validation batches to run before training; -1: all. None: 2."""

    # --- batches
    global_batch_size: int | None = field(default=None, metadata=_about(_BATCHES, "256", least=1))
    """Samples of each optimizer step, over all ranks and micro-batches, whatever their number. The accumulation follows
    from it. None: the DataLoader's ``batch_size`` x ranks x `accumulate_grad_batches`."""
    micro_batch_size: int | Literal["auto"] | None = field(default=None, metadata=_about(_BATCHES, "8", least=1))
    """Largest number of these samples that a rank processes at once. None: the DataLoader's ``batch_size``. ``"auto"``:
    its whole share; if a rank runs out of memory, the step is repeated with half as many."""
    accumulate_grad_batches: int = field(default=1, metadata=_about(_BATCHES, "4", least=1))
    """Micro-batches of each optimizer step."""
    uneven: UnevenPolicy = field(default="pad", metadata=_about(_BATCHES, "drop"))
    """The end of an epoch if ranks have different numbers of training batches (streams). After the last rank
    (``"pad"``: ranks that have finished count for nothing), or after the first (``"drop"``)."""
    seed_samples: bool = field(default=False, metadata=_about(_BATCHES, "true"))
    """Seed Python's, NumPy's and torch's CPU generators before each sample by seed, epoch and index. Its augmentation
    is then the same with any number of ranks and workers, any batch size, and after a resumption. Each evaluation has
    the same draws. Not for an `IterableDataset`."""
    reload_dataloaders_every_n_epochs: int = field(default=0, metadata=_about("", "1", least=0))
    """Ask for new DataLoaders in every n-th epoch; 0: never."""

    # --- checkpoints and failures
    resume: str | Path | None = field(default=None, metadata=_about(_SAVING, "auto"))
    """Checkpoint to resume from, if `fit` gets none. ``"auto"``: the newest undamaged one of this run, or a fresh
    start; adds a `Snapshot` callback if there is none, and keeps the global batch if the number of processes changes.
    ``"fresh"``: the same, but training starts anew even if there is a checkpoint."""
    checkpoint_format: CheckpointFormat = field(default="auto", metadata=_about(_SAVING, "file"))
    """Whether a checkpoint is a file or a directory. ``"auto"``: a file that stock Lightning opens, or a directory if
    the strategy shards the state (fsdp, hsdp, tp, cp, pp). ``"file"``: always a file; rank 0 gathers the shards.
    ``"directory"``: always a directory. `Snapshot` always writes directories."""
    hang_timeout_s: float | None = field(default=600.0, metadata=_about(_SAVING, "60"))
    """Seconds that a rank may stay at one batch and phase. Then the run ends, and the rank at fault is named with its
    stack. Three times as long before the second batch, once all ranks are connected. None: no limit."""
    on_rank_loss: RankLossPolicy = field(default="stop", metadata=_about(_SAVING, "continue"))
    """Reaction to a signal, such as the SIGKILL of the out-of-memory killer, that ends a rank's process. ``"stop"``:
    all ranks end, and the next start resumes. ``"continue"``: the other ranks make the step again with the samples of
    that step, in the same processes (``ddp``, ``local_sgd``, ``diloco``), or go back to the newest `Snapshot` in them
    (the others). With the suffix ``_spawn`` or ``_fork``, or under ``polyphase launch``, on the CPU with a
    `global_batch_size`."""
    default_root_dir: str | Path | None = field(default=None, metadata=_about(_SAVING, "runs"))
    """Folder or URL of logs and checkpoints. None: the working directory."""
    enable_checkpointing: bool | None = field(default=None, metadata=_about(_SAVING, "false"))
    """Add a `ModelCheckpoint` if there is none. None: True."""

    # --- what is shown and logged
    logger: Logger | Iterable[Logger] | bool | None = field(default=None, metadata=_about(_SHOWN, "CSVLogger"))
    """One or several; True or None: TensorBoard's; False: none."""
    log_every_n_steps: int | None = field(default=None, metadata=_about(_SHOWN, "10", least=0))
    """Log in every n-th optimizer step. None: 50."""
    callbacks: Callback | Sequence[Callback] | None = field(default=None, metadata=_about(_SHOWN, "MemoryMonitor"))
    """One or several; on the command line += adds another."""
    enable_progress_bar: bool | None = field(default=None, metadata=_about(_SHOWN, "false"))
    """Add a progress bar if there is none. None: True."""
    enable_run_summary: bool | None = field(default=None, metadata=_about("", "false"))
    """Print one line about the run when training begins, and the places of its results at the end. None: unless
    `barebones`, or neither a logger nor a progress bar is wanted."""
    enable_model_summary: bool | None = field(default=None, metadata=_about("", "false"))
    """Print a table of the module's layers. None: True."""
    profiler: Profiler | ProfilerName | None = field(default=None, metadata=_about(_SHOWN, "simple"))
    """Where time goes: ``"simple"``, ``"advanced"``, ``"pytorch"``, ``"xla"``, or an object."""
    barebones: bool = field(default=False, metadata=_about("", "true"))
    """Leave out everything that costs time, to measure the cost of the rest."""
    enable_autolog_hparams: bool = field(default=True, metadata=_about("", "false"))
    """Log the module's hyperparameters at the start."""
    model_registry: str | None = field(default=None, metadata=_about("", "my-model"))
    """Name of the model in Lightning's registry."""

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments of `Engine`, by name."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}

    @property
    def compile_mode(self) -> CompileMode | None:
        """The mode of `torch.compile`; None if nothing is compiled."""
        if isinstance(self.compile, str):
            return self.compile
        return "default" if self.compile else None

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
        return f"Engine({', '.join(f'{name}={value!r}' for name, value in self.changed.items())})"

    @property
    def as_plain(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, by name, as values that JSON has."""
        return {name: plain_value(value) for name, value in self.changed.items()}

    @property
    def changed(self) -> dict[str, Any]:
        """The arguments that differ from their defaults, by name."""
        fields = dataclasses.fields(self)
        return {f.name: value for f in fields if not _is_same(value := getattr(self, f.name), f.default)}


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


# --- what is made from the fields

_LIGHTNINGS = {
    "accelerators": ("Accelerator",),
    "callbacks": ("Callback",),
    "loggers": ("Logger",),
    "plugins": ("Precision", "ClusterEnvironment", "CheckpointIO", "LayerSync"),
    "profilers": ("Profiler",),
    "strategies": ("Strategy",),
}
"""Module of Lightning -> its classes among the annotations."""


@functools.cache
def types_of(config: type) -> dict[str, Any]:
    """The type of each field, by name; imports Lightning, whose classes are among them."""
    modules = {name: importlib.import_module(f"lightning.pytorch.{name}") for name in _LIGHTNINGS}
    theirs = {name: getattr(modules[module], name) for module, names in _LIGHTNINGS.items() for name in names}
    theirs["Plugin"] = functools.reduce(operator.or_, [theirs[name] for name in _LIGHTNINGS["plugins"]])
    return typing.get_type_hints(config, localns=theirs)


_P = ParamSpec("_P")
_ReturnT = TypeVar("_ReturnT")


def with_arguments_of(cls: Callable[_P, Any]) -> Callable[[Callable[..., _ReturnT]], Callable[_P, _ReturnT]]:
    """Decorates a function of ``**flags`` that takes the fields of the dataclass `cls`, with their types and defaults.

    A type checker sees the constructor of `cls`, `inspect.signature` the same.
    """

    def decorate(function: Callable[..., _ReturnT]) -> Callable[_P, _ReturnT]:
        types = types_of(cls)
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = inspect.signature(cls).parameters.values()
        named = [p.replace(annotation=types[p.name]) for p in fields if p.name not in signature.parameters]
        vars(function)["__signature__"] = signature.replace(parameters=[*own, *named])
        function.__annotations__ = {**types, "return": signature.return_annotation}
        return function

    return decorate


def method_with_arguments_of(
    cls: Callable[_P, Any],
) -> Callable[[Callable[..., _ReturnT]], Callable[Concatenate[Any, _P], _ReturnT]]:
    """Decorates a method like `with_arguments_of` a function: a type checker sees its ``self`` as well."""
    return with_arguments_of(cls)


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass and its bases, by the field's name."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue  # created at run time, or in an interactive session
        body = tree.body[0].body  # type: ignore[attr-defined]
        for name, text in itertools.pairwise(body):
            if (
                isinstance(name, ast.AnnAssign)
                and isinstance(name.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                docs[name.target.id] = " ".join(str(text.value.value).split())
    return docs
