"""The text printed at the end of a run, in lines of at most 100 columns unless paths are long."""

import inspect
import os
import shlex
import sys
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint

from polyphase.engine.run_info import log_folder, shown_path

__all__ = ["RunEnd", "end_text", "stop_text"]

_WIDTH = 100
_INDENT = "    "


class RunEnd(NamedTuple):
    """Figures of a finished run; a figure that is None is not printed."""

    num_steps: int
    elapsed_s: float
    samples_per_s: float | None
    data_wait_share: float | None
    peak_bytes: int


def end_text(trainer: Any, end: RunEnd) -> list[str]:
    """Returns the lines to print after training."""
    path = _saved(trainer)
    return [
        _figures(trainer, end),
        *_best(trainer),
        *_where(trainer),
        *_to_go_on(trainer, path),
        *_to_load(trainer, path),
    ]


def stop_text(trainer: Any, cause: str) -> list[str]:
    """Returns the lines to print after a run that `cause` has stopped."""
    path = _saved(trainer)
    stopped = f"Stopped by {cause} after {_counted(trainer.global_step, 'step')}."
    if path is None:
        has_snapshots = trainer.snapshots_path is not None
        return [f"{stopped} Nothing was saved{' yet' if has_snapshots else '; resume=auto saves every ten minutes'}."]
    return [f"{stopped} The last checkpoint is {shown_path(path)}", *_to_go_on(trainer, path)]


def _figures(trainer: Any, end: RunEnd) -> str:
    steps = _counted(end.num_steps, "step")
    if trainer.global_step > end.num_steps:
        steps += f" ({trainer.global_step:,} in all)"
    speed = (
        f"{_number(end.num_steps / end.elapsed_s)} steps/s"
        if end.samples_per_s is None
        else f"{_number(end.samples_per_s)} samples/s"
    )
    share = "" if end.data_wait_share is None else f", {min(1.0, end.data_wait_share):.0%} of it waiting for data"
    memory = f"{end.peak_bytes / 1e9:.2f} GB" if end.peak_bytes >= 1e9 else f"{end.peak_bytes / 1e6:.0f} MB"
    of_ranks = " (largest rank)" if trainer.world_size > 1 else ""
    return f"{steps} in {_duration(end.elapsed_s)}{share}; {speed}, peak memory {memory}{of_ranks}"


def _model_checkpoints(trainer: Any) -> list[ModelCheckpoint]:
    """Returns the real `ModelCheckpoint` callbacks, without substitutes for one."""
    checkpoints = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [callback for callback in checkpoints if hasattr(callback, "last_model_path")]


def _best(trainer: Any) -> list[str]:
    for callback in _model_checkpoints(trainer):
        if callback.monitor and callback.best_model_path:
            score = callback.best_model_score
            value = "" if score is None else f" {float(score):.4g}"
            return [f"best {callback.monitor}{value}: {shown_path(callback.best_model_path)}"]
    return []


def _where(trainer: Any) -> list[str]:
    logs = log_folder(trainer)
    folders = [callback.dirpath for callback in _model_checkpoints(trainer) if callback.best_model_path]
    if trainer.snapshots_path:
        folders.append(trainer.snapshots_path)
    shown = ", ".join(dict.fromkeys(shown_path(str(folder)) for folder in folders if folder))
    parts = [f"logs: {shown_path(logs)}" if logs else "", f"checkpoints: {shown}" if shown else ""]
    line = "   ".join(filter(None, parts))
    return [] if not line else [line] if len(line) <= _WIDTH else list(filter(None, parts))


def _saved(trainer: Any) -> str | None:
    """Returns the path of the last checkpoint that still exists."""
    callbacks = _model_checkpoints(trainer)
    paths = [trainer.last_checkpoint, *(path for c in callbacks for path in (c.last_model_path, c.best_model_path))]
    return next((path for path in paths if path and ("://" in path or os.path.exists(path))), None)


def _to_go_on(trainer: Any, path: str | None) -> list[str]:
    limit = _limit(trainer)
    if limit and any(hasattr(config.scheduler, "total_steps") for config in trainer.lr_scheduler_configs):
        return []  # torch: OneCycleLR refuses to take more steps than it was made for
    if trainer.flags.get("resume") == "auto":
        return [f"to go on: run it again{f' with a larger {limit}' if limit else ''} (resume='auto')"]
    if path is None:
        return []
    shown = shown_path(path)
    command = _command()
    how = f"engine.fit(..., ckpt_path={shown!r})"
    if command is not None:
        how = shlex.join([*command, "--ckpt_path", shown])
        if len(how) > _WIDTH - len(_INDENT):
            how = f"the same command and --ckpt_path {shlex.quote(shown)}"
    before = f"to go on, with a larger {limit}:" if limit else "to go on:"
    line = f"{before} {how}"
    return [line] if len(line) <= _WIDTH else [before, f"{_INDENT}{how}"]


def _limit(trainer: Any) -> str | None:
    """Returns the flag that ended training, if one did."""
    if trainer.max_steps not in (None, -1) and trainer.global_step >= trainer.max_steps:
        return "max_steps"
    is_last = trainer.max_epochs not in (None, -1) and trainer.current_epoch >= trainer.max_epochs
    return "max_epochs" if is_last else None


def _command() -> list[str] | None:
    """Returns the LightningCLI command line of this process; None if it was started in another way."""
    if "lightning.pytorch.cli" not in sys.modules or sys.argv[1:2] != ["fit"]:
        return None
    program = os.path.basename(sys.argv[0])
    name = ["polyphase"] if program in ("polyphase", "__main__.py") else ["python", sys.argv[0]]
    words = list(sys.argv[1:])
    while "--ckpt_path" in words[:-1]:  # of an earlier resumption
        at = words.index("--ckpt_path")
        del words[at : at + 2]
    return name + [word for word in words if not word.startswith("--ckpt_path=")]


def _to_load(trainer: Any, path: str | None) -> list[str]:
    best = [callback.best_model_path for callback in _model_checkpoints(trainer) if callback.monitor]
    path = next(filter(None, best), path)
    if path is None:
        return []
    shown, name = shown_path(path), _class_of(trainer.lightning_module).__name__
    is_file, builds_itself = os.path.isfile(path), _builds_itself(trainer.lightning_module)
    file = shown if is_file else "model.ckpt" if builds_itself else "model.safetensors"
    if builds_itself:
        load = f"{name}.load_from_checkpoint({file!r})"
    elif is_file:
        load = f"model.load_state_dict(torch.load({file!r}, map_location='cpu')['state_dict'])"
    else:
        load = f"model.load_state_dict(safetensors.torch.load_file({file!r}))"
    if is_file:
        return ["to load it elsewhere:", f"{_INDENT}{load}"]
    export = shlex.join(["polyphase", "ckpt", "export", shown, "--to", file])
    return ["to load it elsewhere, in a shell and in Python:", f"{_INDENT}{export}", f"{_INDENT}{load}"]


def _builds_itself(module: LightningModule) -> bool:
    """Whether `load_from_checkpoint` can construct the module: each argument has a default or was saved."""
    parameters = inspect.signature(_class_of(module)).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    arguments = [p for p in parameters if p.kind not in kinds]
    return all(p.default is not inspect.Parameter.empty or p.name in module.hparams for p in arguments)


def _class_of(module: LightningModule) -> type:
    """Returns the module's own class, not the subclass that `fully_shard` creates."""
    return next(c for c in type(module).__mro__ if not c.__module__.startswith("torch.distributed."))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
