"""The description of a run: as the text of its header, and as flat values by which loggers distinguish runs."""

import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from .config import plain_value
from .distributed.environment import given_seed
from .version import __version__

__all__ = ["folder_beside_logs", "header", "log_folder", "run_parameters", "shown_path"]

_GIT_TIMEOUT_S = 5.0


def header(trainer: Any) -> str:
    """One line that describes the setup of `trainer`, an engine that begins to train; unknown values are left out.

    ``polyphase 0.2.0 | fsdp, shard=8 on cuda | bf16-mixed | global batch 256 = 8 x 16 x 2 | logs: lightning_logs/x``:
    ranks with different samples x samples of a micro-batch x accumulated micro-batches.
    """
    seed = given_seed()
    folder = log_folder(trainer)
    compression = trainer.config.compression
    parts = [
        f"polyphase {__version__}",
        _strategy(trainer),
        str(trainer.precision),
        None if compression == "none" else f"compression {compression}",
        _batch(trainer),
        None if seed is None else f"seed {seed}",
        None if folder is None else f"logs: {shown_path(folder)}",
    ]
    return " | ".join(part for part in parts if part)


def _strategy(trainer: Any) -> str:
    flag = trainer.config.strategy
    name = str(flag).partition(":")[0] if isinstance(flag, str) and flag != "auto" else _name_of(trainer)
    sizes = "" if trainer.world_size == 1 else f", {trainer.layout}"
    return f"{name}{sizes} on {trainer.strategy.root_device.type}"


def _name_of(trainer: Any) -> str:
    # The text of a strategy of this package is its flag.
    name = repr(trainer.strategy).strip("'")
    if name.replace("_", "").isalnum():
        return name
    return "single" if trainer.world_size == 1 else type(trainer.strategy).__name__


def _batch(trainer: Any) -> str | None:
    sizes = trainer.batch_sizes
    if sizes is None:
        return None
    total, micro, num_micro_batches = sizes
    ranks = trainer.data_size
    strategy = trainer.engine_strategy
    if strategy.capabilities.steps_alone or not strategy.expects_parity:
        return f"batch {micro * num_micro_batches} on each of {ranks} ranks"
    if total == ranks * micro * num_micro_batches:
        return f"global batch {total} = {ranks} x {micro} x {num_micro_batches}"
    return f"global batch {total}, at most {ranks} x {micro} x {num_micro_batches}"


def log_folder(trainer: Any) -> str | None:
    """Returns the folder of the first logger that has one; None if none has. Only rank 0's result counts."""
    for logger in trainer.loggers:
        # Lightning: TensorBoardLogger and CSVLogger have a log_dir, all loggers a save_dir, which may be None.
        folder = getattr(logger, "log_dir", None) or logger.save_dir
        if isinstance(folder, (str, os.PathLike)):
            return os.fspath(folder)
    return None


def folder_beside_logs(trainer: Any, name: str) -> str:
    """Returns the local folder `name` beside the logs; in the working directory if these are at an address."""
    logs = log_folder(trainer) or trainer.default_root_dir
    return os.path.abspath(os.path.join("." if "://" in logs else logs, name))


def shown_path(path: str) -> str:
    """`path`, relative to the working directory if it is inside."""
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def run_parameters(trainer: Any) -> dict[str, Any]:
    """Returns the settings of an engine: its flags, layout, versions and the git commit of the working directory.

    Returns:
        Numbers, texts, booleans and None, by names that begin with ``polyphase/``.
    """
    values = {
        **trainer.flags,
        "precision": str(trainer.precision),
        "layout": trainer.layout.axes,
        "world_size": trainer.world_size,
        "device": trainer.strategy.root_device.type,
        "seed": given_seed(),
        "version": {
            "polyphase": __version__,
            "torch": str(torch.__version__),
            "lightning": version("lightning"),
            "python": platform.python_version(),
        },
        "git_commit": git_commit(),
    }
    return _flat(values, "polyphase")


def git_commit() -> str | None:
    """The commit of the working directory; None if there is none, no git, or no answer within seconds."""
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "--verify", "HEAD"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None


def _flat(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}/{key}")
        else:
            flat[f"{name}/{key}"] = plain_value(value)
    return flat
