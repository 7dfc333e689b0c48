"""The arguments of an engine as one frozen object, which is checked once, passed down and saved with the run."""

import dataclasses
import inspect
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.loggers import Logger

from .argument_checks import check_arguments
from .arguments import Arguments, Plugin
from .choices import (
    ActivationCheckpointing,
    CheckpointFormat,
    CompileMode,
    NonFinitePolicy,
    Offload,
    UnevenPolicy,
)

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy

__all__ = ["EngineConfig", "plain_value"]


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
    async_checkpoints: bool = True
    """Whether snapshots are written while training continues."""
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
