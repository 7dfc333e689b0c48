"""Converts flags into the arguments of Lightning's Trainer; contradicting flags are an error."""

import dataclasses
import functools
import numbers
import os
import re
import types
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Lightning: the meaning of accelerator="auto" and "gpu".
from ._compat.lightning import _select_auto_accelerator
from .compression import CommHook, make_comm_hook
from .config import EngineConfig
from .flags import LAUNCHERS, Flag, did_you_mean, parse_flag, parse_options, split_launcher
from .loop.compile import CompileSteps
from .precision import FLOAT8, OF_BLOCKS, TRANSFORMER_ENGINE, canonical_precision
from .precision.plugins import make_precision
from .strategies.block_precision import BF16Blocks
from .strategies.callers import names_in
from .strategies.float8 import Float8Precision
from .strategies.registry import STRATEGIES, find_strategy, import_all
from .strategies.sync_batchnorm import SyncBatchNorm

__all__ = ["check_module", "check_strategy", "default_run_callbacks", "select", "use_own_device", "with_defaults"]

import_all()


class InvalidFlagError(ValueError, MisconfigurationException):
    """An error in a flag for which Lightning raises its own type of error; it is of that type, too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TrainerArgs:
    """The arguments that `lightning.pytorch.Trainer` gets, and the comm hook."""

    strategy: Strategy | str
    devices: Any
    precision: Any
    plugins: list[Any]
    options: Any = None
    """The options of the strategy; None if it has none."""
    comm_hook: CommHook | None = None


def select(config: EngineConfig, *, devices: Any, num_nodes: int, plugins: list[Any]) -> _TrainerArgs:
    """Returns the arguments for a set of flags.

    Args:
        config: the flags.
        devices: devices of each node; a launcher may have set their number.
        num_nodes: number of nodes; a launcher may have set it.
        plugins: the user's, and the launcher's environment.

    Raises:
        ValueError: a flag is unknown, or the chosen strategy can't honour it.
    """
    strategy, precision = config.strategy, config.precision
    comm_hook = make_comm_hook(config.compression)
    if isinstance(strategy, Strategy):
        return _lightnings_own(strategy, devices, precision, comm_hook, plugins)
    devices = _as_lightning_counts(devices, config.accelerator)
    device_type, num_devices = _devices(config.accelerator, devices)
    name, launcher, options = _read_strategy(strategy, device_type, num_devices * num_nodes)
    if options is None:
        return _lightnings_own(name, devices, precision, comm_hook, plugins)
    row = STRATEGIES[name]
    _check_compression(name, config.compression, comm_hook)
    _check_precision(name, canonical_precision(precision))
    if row.note:
        _say_once(row.note)
    strategy_object: Strategy | str = "auto"  # Lightning's choice: SingleDeviceStrategy if there is one device
    is_single = num_devices * num_nodes == 1 and comm_hook is None and row.is_single_alone(options)
    if row.make is not None and is_single and "parameters" not in (config.offload or ()):
        divides: Any = row.make(options, launcher, comm_hook)
        divides.derive_layout(1)  # refuses sizes of several devices
    elif row.make is not None:
        _check_interactive(name, launcher)
        strategy_object = row.make(options, launcher, comm_hook)
    elif row.make_for_several is not None and num_devices * num_nodes > 1:
        strategy_object = row.make_for_several(device_type, num_devices, num_nodes, config.sync_batchnorm)
    else:
        devices = _one_device(devices, num_devices, num_nodes)
    return _TrainerArgs(
        strategy=strategy_object,
        devices=devices,
        options=options,
        comm_hook=comm_hook,
        **_plugins(plugins, precision, device_type, config.sync_batchnorm),
    )


def check_strategy(text: str) -> None:
    """Checks the name and the options of a flag such as ``"hsdp_spawn:replicate=2"``.

    Raises:
        ValueError: an unknown name or option, or a value that is out of range.
    """
    _read_strategy(text, "cpu", 1)


def _read_strategy(text: str, device_type: str, num_processes: int) -> tuple[str, str, Any]:
    """The name, the launcher's suffix and the options of a flag; no options: the name is Lightning's own."""
    flag = _strategy_flag(text, device_type, num_processes)
    name, launcher = split_launcher(flag.name if flag.name in StrategyRegistry else flag.name.lower())
    if find_strategy(name) is None or (STRATEGIES[name].make is None and launcher):
        return _known(flag), "", None
    if flag.value is not None:
        raise ValueError(f"strategy {text!r}: write {name}:key=value; {flag.value!r} has no key.")
    return name, launcher, parse_options(f"strategy {name!r}", STRATEGIES[name].options, flag.options)


def _as_lightning_counts(devices: Any, accelerator: Any) -> Any:
    if isinstance(devices, numbers.Integral):
        devices = int(devices)  # numpy's integers
    # Lightning knows "all of them" for accelerators only.
    return "auto" if accelerator == "cpu" and devices in (-1, "-1") else devices


def _check_compression(name: str, compression: str, comm_hook: CommHook | None) -> None:
    row = STRATEGIES[name]
    if comm_hook is not None and comm_hook.name not in row.compressions:
        can = f"It can do: {', '.join(['none', *row.compressions])}."
        raise ValueError(f"strategy {name!r} can't do compression {compression!r}: {row.why_not}. {can}")


def _check_precision(name: str, canonical: str) -> None:
    row = STRATEGIES[name]
    if canonical in TRANSFORMER_ENGINE:
        if name not in ("single", "ddp"):
            raise ValueError(f"strategy {name!r} can't do precision {canonical!r}: it works with single and ddp.")
    elif canonical not in row.precisions:
        raise ValueError(
            f"strategy {name!r} can't do precision {canonical!r}: {row.why_not_precision}. It can do:"
            f" {', '.join(row.precisions)}."
        )


def use_own_device(trainer: Any, strategy: Any) -> None:
    """Makes one process compute on its accelerator's device; Lightning only knows CUDA, MPS and XLA, and else uses the
    CPU.

    Args:
        trainer: has not run yet.
        strategy: the flag; the user's own strategy object is not changed.
    """
    strategy_object = trainer.strategy
    devices = trainer._accelerator_connector._parallel_devices  # Lightning: Trainer._accelerator_connector
    is_lightnings = not isinstance(strategy, Strategy) and type(strategy_object) is SingleDeviceStrategy
    if is_lightnings and devices and strategy_object.root_device.type != devices[0].type:
        strategy_object._root_device = devices[0]  # Lightning: SingleDeviceStrategy._root_device


@functools.cache
def _say_once(note: str) -> None:
    rank_zero_info(note)


def _plugins(plugins: list[Any], precision: Any, device_type: str, sync_batchnorm: bool) -> dict[str, Any]:
    """The plugins with the engine's own, and the `precision` that Lightning still has to handle."""
    if sync_batchnorm:
        # Replaces Lightning's own plugin; a layer-sync plugin of the user stays.
        plugins = [p for p in plugins if type(p) is not TorchSyncBatchNorm]
        plugins += [] if any(isinstance(p, LayerSync) for p in plugins) else [SyncBatchNorm()]
    if precision in TRANSFORMER_ENGINE or any(isinstance(plugin, Precision) for plugin in plugins):
        return {"plugins": plugins, "precision": precision}  # Lightning creates it, or refuses a second one
    make: Any = make_precision
    if precision in OF_BLOCKS:
        make = Float8Precision if precision in FLOAT8 else BF16Blocks
    return {"plugins": [*plugins, make(canonical_precision(precision), device_type)], "precision": None}


def _lightnings_own(
    strategy: Strategy | str, devices: Any, precision: Any, comm_hook: CommHook | None, plugins: list[Any]
) -> _TrainerArgs:
    if comm_hook is not None:
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        can = ", ".join(name for name, row in STRATEGIES.items() if row.compressions)
        raise ValueError(
            f"compression {comm_hook.name!r} works with the strategies {can}, not with"
            f" Lightning's own {name}: choose one of them by name, or give the strategy its own comm hook."
        )
    options = getattr(strategy, "options", None)
    return _TrainerArgs(strategy=strategy, devices=devices, options=options, precision=precision, plugins=plugins)


def _strategy_flag(text: str, device_type: str, num_processes: int) -> Flag:
    """The parsed flag; `auto` becomes a name, and Lightning's long names of DDP become options of `ddp`."""
    flag = parse_flag(text, "strategy")
    if flag.name == "auto" and device_type != "tpu":  # whose strategies Lightning has, and chooses
        if flag.options or flag.value:
            raise ValueError(f"strategy {text!r}: auto has no options; name the strategy to give it some.")
        # An interactive session can't be restarted. Lightning: its own choice depends on the same property.
        several = "ddp_notebook" if accelerator_connector._IS_INTERACTIVE else "ddp"
        return Flag(name="single" if num_processes == 1 else several)
    long_name = re.fullmatch(r"(ddp(?:_[a-z]+)?)_find_unused_parameters_(true|false)", flag.name.lower())
    if long_name:
        return Flag(name=long_name[1], options={"find_unused_parameters": long_name[2], **flag.options})
    return flag


def _known(flag: Flag) -> str:
    """Returns the name if Lightning's registry has it."""
    if flag.name != "auto" and flag.name not in StrategyRegistry.available_strategies():
        raise ValueError(_unknown_strategy(flag.name))
    if flag.name.startswith("deepspeed") and find_spec("deepspeed") is None:
        hint = did_you_mean(flag.name, (), kind="strategy")
        raise ValueError(f"strategy {flag.name!r} needs the package deepspeed: pip install deepspeed.{hint}")
    if flag.value or flag.options:
        raise ValueError(f"strategy {flag.name!r} is Lightning's own and takes no options by flag: pass its object.")
    return flag.name


def _unknown_strategy(flag: str) -> str:
    suffixes = [f"_{suffix}" for suffix in LAUNCHERS if suffix]
    alone = ["auto", *(name for name, row in STRATEGIES.items() if not row.make)]
    with_launcher = [name for name, row in STRATEGIES.items() if row.make]
    every = [*alone, *with_launcher, *(name + suffix for name in with_launcher for suffix in suffixes)]
    name, _ = split_launcher(flag.lower())
    near = did_you_mean(name if name in alone else flag.lower(), every, cutoff=0.5, kind="strategy")
    return (
        f"unknown strategy {flag!r}.{near} Allowed: {', '.join(sorted([*alone, *with_launcher]))}; all but"
        f" {', '.join(sorted(alone))} also with {', '.join(suffixes[:-1])} or {suffixes[-1]}, as in ddp_spawn."
    )


def _devices(accelerator: Any, devices: Any) -> tuple[str, int]:
    """The type of the devices, ``"cpu"``, ``"cuda"``, ..., and their number on this node according to `devices`."""
    if isinstance(accelerator, str):
        accelerators = AcceleratorRegistry.available_accelerators()
        if accelerator not in ("auto", "gpu", *accelerators):  # begins like Lightning's message
            names = sorted(["auto", "gpu", *accelerators])
            raise InvalidFlagError(
                f"You selected an invalid accelerator name: `accelerator={accelerator!r}`."
                f"{did_you_mean(accelerator.lower(), names, cutoff=0.5)} Allowed: {', '.join(names)}."
            )
        name = _select_auto_accelerator() if accelerator in ("auto", "gpu") else accelerator
        kind: Any = AcceleratorRegistry[name]["accelerator"]
    else:
        kind, name = type(accelerator), "cpu" if isinstance(accelerator, CPUAccelerator) else accelerator.name()
    if devices in (0, "0", []) or (isinstance(devices, int) and devices < -1):
        # Checked first, as in Lightning, even if the accelerator is missing, too.
        raise InvalidFlagError(
            f"`Engine(devices={devices!r})` value is not a valid input using {name} accelerator: a number of at least"
            " 1, -1 or 'auto' for all, or a list of indices."
        )
    not_available = f"`{kind.__qualname__}` can not run on your system since the accelerator is not available."
    if accelerator in ("gpu", "cuda", "mps"):
        _check_gpu(accelerator, name, not_available)
    if not kind.is_available():
        raise InvalidFlagError(f"{not_available} Available here: {', '.join(_available())}.")
    if devices == "auto":
        num_devices = kind.auto_device_count()
        # Lightning: _set_devices_flag_if_auto_passed takes one GPU only in an interactive session.
        return name, min(1, num_devices) if name == "cuda" and accelerator_connector._IS_INTERACTIVE else num_devices
    if name == "cpu" and (not isinstance(devices, (int, str)) or "," in str(devices)):
        raise InvalidFlagError(f"devices={devices!r}: the CPU has no indices; a number of processes, or 'auto'.")
    parsed = kind.parse_devices(devices)
    return name, len(parsed) if isinstance(parsed, (list, tuple)) else int(parsed)


def _check_gpu(accelerator: str, name: str, not_available: str) -> None:
    """Checks that there is a GPU if the flag names one; `name` is Lightning's name of the accelerator."""
    if name in ("cuda", "mps") and AcceleratorRegistry[name]["accelerator"].is_available():
        return
    version = torch.version.cuda or torch.version.hip
    built_for = f"{'CUDA' if torch.version.cuda else 'ROCm'} {version}" if version else "the CPU only"
    if torch.backends.mps.is_built():
        built_for = "MPS"
    has_driver = not version and os.path.exists("/dev/nvidiactl")
    driver = " An NVIDIA driver is here: install torch for CUDA." if has_driver else ""
    message = "No supported gpu backend found!" if accelerator == "gpu" else not_available
    raise InvalidFlagError(
        f"accelerator={accelerator!r}: {message} torch {torch.__version__} is built for"
        f" {built_for} and sees {torch.cuda.device_count()} GPUs.{driver} Available here: {', '.join(_available())}."
        ' Without a GPU: Engine(accelerator="cpu").'
    )


def _available() -> list[str]:
    return [kind for kind in AcceleratorRegistry if AcceleratorRegistry[kind]["accelerator"].is_available()]


def _check_interactive(name: str, launcher: str) -> None:
    """Checks that processes can be started: an interactive session has no script that they could run."""
    # Lightning: its own check of the launcher uses this property, when the strategy is set up.
    if accelerator_connector._IS_INTERACTIVE and LAUNCHERS[launcher] != "fork":
        flag = f"{name}_{launcher}" if launcher else name
        raise InvalidFlagError(
            f"`Engine(strategy={flag!r})` is not compatible with an interactive environment (a notebook or prompt),"
            f' which has no script to start again: Engine(strategy="{name}_notebook"), or run a script.'
        )


def _one_device(devices: Any, num_devices: int, num_nodes: int) -> Any:
    if devices == "auto":
        return 1
    if num_devices * num_nodes != 1:
        raise ValueError(
            f"strategy 'single' runs on one device, but the flags ask for {num_nodes} node(s) x {num_devices}"
            " device(s): set devices=1, or choose 'ddp', 'fsdp' or 'hsdp'."
        )
    return devices


# The callbacks that the engine adds if the user has passed none of their kind.
#
# Callbacks import the engine, not the reverse; these few are the exception, and are imported by name.


def with_defaults(callbacks: list[Callback], config: EngineConfig) -> tuple[list[Callback], Callback | None]:
    """Returns `callbacks` with those that the flags ask for, and with the default progress bar in place of Lightning's.

    Args:
        callbacks: the user's; changed in place.
        config: the flags.
    """
    default_bar: Callback | None = None
    shows_progress = config.enable_progress_bar is not False and not config.barebones
    if shows_progress and not any(isinstance(callback, ProgressBar) for callback in callbacks):
        callbacks.append(default_bar := _progress_bar())
    if config.continues_runs and not any(hasattr(callback, "snapshot_folder") for callback in callbacks):
        callbacks.append(_snapshot())
    if config.compile_mode is not None:
        callbacks.insert(0, CompileSteps(config.compile_mode))
    return callbacks, default_bar


def default_run_callbacks(config: EngineConfig, callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks that the engine adds to those of the user while it trains."""
    # What is logged by a logger of the user's own is what the user chose.
    logs = config.logger in (None, True) and not config.barebones
    sums_up = not config.is_silent if config.enable_run_summary is None else config.enable_run_summary
    if not (logs or sums_up):
        return []
    from polyphase.callbacks import OptimizerMonitor, RunSummary

    added: list[Callback] = []
    if logs and not any(isinstance(callback, OptimizerMonitor) for callback in callbacks):
        added.append(OptimizerMonitor())
    if sums_up and not any(hasattr(callback, "on_run_end") for callback in callbacks):
        added.append(RunSummary())
    return added


def _progress_bar() -> Callback:
    from polyphase.callbacks import default_progress_bar

    return default_progress_bar()


def _snapshot() -> Callback:
    from polyphase.callbacks import default_snapshot

    return default_snapshot()


def check_module(module: LightningModule, *, precision: str, comm_hook: CommHook | None = None) -> None:
    """Checks that `module` can be trained.

    Raises:
        MisconfigurationException: it has no optimizer, or its own optimization loop would bypass the loss scale.
        ValueError: it has gradients that `comm_hook` can't compress.
    """
    kind = type(module).__name__
    if not _overrides(module, "configure_optimizers"):
        raise MisconfigurationException(
            f"No `configure_optimizers()` method defined in {kind}: there is nothing to train with. Add one that"
            " returns an optimizer, e.g. `return torch.optim.AdamW(self.parameters())`."
        )
    if precision == "16-mixed" and not module.automatic_optimization and not _mentions(module, "manual_backward"):
        raise MisconfigurationException(
            f"{kind} optimizes by hand and never calls `self.manual_backward(loss)`, so precision='16-mixed' could not"
            " scale its loss: call it in place of `loss.backward()`, or choose precision='bf16-mixed'."
        )
    if precision == "16-mixed" and not module.automatic_optimization and _mentions(module, "get_scale"):
        rank_zero_warn(
            f"{kind} reads the loss scale. Gradients are unscaled when `self.manual_backward(loss)` returns, unlike"
            " those of Lightning's Trainer: don't divide them, or what clips them, by it."
        )
    if comm_hook is not None and not _overrides(module, "configure_model"):  # otherwise the module is not complete yet
        comm_hook.check(module)
        comm_hook.is_checked = True


def _overrides(module: LightningModule, name: str) -> bool:
    return getattr(type(module), name) is not getattr(LightningModule, name) or name in vars(module)


def _mentions(module: LightningModule, name: str) -> bool:
    """Whether any method of the module's own classes, or a function nested in one, uses the attribute `name`."""
    user_classes = (cls for cls in type(module).__mro__ if not cls.__module__.startswith(("lightning.", "torch.")))
    methods = (value for cls in user_classes for value in vars(cls).values() if isinstance(value, types.FunctionType))
    functions = (function for method in methods for function in _decorated(method))
    return any(name in names_in(function.__code__) for function in functions)


def _decorated(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """The function itself, and the functions that its decorators wrap."""
    yield function
    for cell in function.__closure__ or ():
        if isinstance(cell.cell_contents, types.FunctionType):
            yield from _decorated(cell.cell_contents)
