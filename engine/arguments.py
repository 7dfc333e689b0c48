"""The arguments of `Engine` by name and type, for functions that pass all of them on: ``**flags: Unpack[Arguments]``.

`Engine.__init__` repeats them with defaults; a test compares the two, and both with `lightning.pytorch.Trainer`.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from lightning.pytorch import Callback
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO, ClusterEnvironment, LayerSync, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy
from typing_extensions import TypedDict

from .choices import (
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
)

__all__ = ["Arguments", "Duration", "Plugin", "with_arguments_of"]

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
    async_checkpoints: bool
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
