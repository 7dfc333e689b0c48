"""`RunSummary`: describes a run in one line at the start, and its results in a few lines at the end."""

import inspect
import os
import shlex
import sys
from time import perf_counter
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException

from polyphase.engine.data.samples import num_samples as samples_of
from polyphase.engine.devices import host_peak_bytes, peak_bytes, wait_for
from polyphase.engine.run_info import header, log_folder, shown_path

from ._bar import duration
from .memory import MemoryMonitor
from .throughput import ThroughputMonitor

__all__ = ["RunSummary", "Summarized"]


class Summarized(Callback):
    """A callback with lines of its own for the end of a run, which `RunSummary` prints after its own."""

    def summary(self) -> list[str]:
        """Returns the lines, on rank 0; on other ranks, and without anything to say, none."""
        raise NotImplementedError


class _Figures(NamedTuple):
    """The figures that a rank has counted during training."""

    num_samples: int | None
    waited_s: float
    peak_bytes: int
    stopped_by: str | None


class RunSummary(Callback):
    """Prints one line when training begins, and about eight lines when it ends; rank 0 only.

    The engine adds it; see its argument `enable_run_summary`. The first line has the version, strategy and layout,
    precision, the global batch as ranks x micro-batch x accumulated micro-batches, and the folder of the logs. The
    lines at the end have:

    - what ended the run early, such as `EarlyStopping`, its reason and its rank, also as a text in TensorBoard;
    - optimizer steps, and samples/s over all ranks for the time of training without validation; samples shared by
      several ranks count once, and no samples are printed if a batch does not show how many it has;
    - the share of that time in which the ranks waited for their data loaders, mean over ranks;
    - the largest peak memory of a rank since its process began: memory that torch allocated on the device, or resident
      memory on the CPU;
    - the best checkpoint and its value, the folders of logs and checkpoints, how to continue, and how to load the
      weights;
    - each loss of ranks after which training has gone on, and how long that took;
    - with a `Doctor` among the callbacks, where the time went, and its most expensive cause.

    After Ctrl-C and SIGTERM it prints what was saved, and how to continue. The counts are sent once, when training is
    over. The host waits for the device only then, and before and after each validation.
    """

    def __init__(self) -> None:
        self._figures: list[_Figures] | None = None
        self._began = False
        self._started: float | None = None
        self._elapsed_s = 0.0

    @property
    def num_samples(self) -> int | None:
        """Number of this rank's samples since training began; None if a batch does not show how many it has."""
        return self._num_samples

    # --- while training

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Prints the line, and starts the clock."""
        if trainer.is_global_zero:
            _say(header(trainer))
        self._figures = None
        self._first_step = trainer.global_step
        self._waited_s = trainer.data_wait_s
        monitors = [c for c in trainer.callbacks if isinstance(c, ThroughputMonitor)]
        self._count = monitors[0].count_samples if monitors else samples_of
        self._num_samples: int | None = 0
        self._has_fillers = trainer.data_size > 1
        self._elapsed_s = 0.0
        self._began = True
        self._started = perf_counter()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch's samples, without reading from the device."""
        if self._num_samples is None or batch is None or (self._has_fillers and trainer.is_filler(batch_idx)):
            return
        size = self._count(batch)  # None for a batch that does not show its number of samples
        self._num_samples = None if size is None else self._num_samples + size

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._stop_clock(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continues the clock."""
        if self._began:
            wait_for(trainer.strategy.root_device)
            self._started = perf_counter()

    def _stop_clock(self, trainer: Trainer) -> None:
        if self._started is not None:
            wait_for(trainer.strategy.root_device)
            self._elapsed_s += perf_counter() - self._started
            self._started = None

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Gathers the counts of all ranks: one gather of three numbers."""
        self._stop_clock(trainer)
        waited_s = trainer.data_wait_s - self._waited_s
        on_device = peak_bytes(trainer.strategy.root_device)
        # Each `MemoryMonitor` resets torch's counter when it has read it.
        monitored = [callback.largest_bytes for callback in trainer.callbacks if isinstance(callback, MemoryMonitor)]
        peak = max([host_peak_bytes() if on_device is None else on_device, *monitored])
        own = _Figures(self._num_samples, waited_s, peak, _stopped_by(trainer))
        self._figures = trainer.all_ranks.all_gather_object(own)
        if trainer.is_global_zero and (reason := _reason(self._figures)) is not None:
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_text("stopped_by", reason, global_step=trainer.global_step)

    # --- when it is over

    def on_run_end(self, trainer: Any, pl_module: LightningModule, exception: BaseException | None) -> None:
        """Prints the final lines; called by the engine after all saves and all other hooks."""
        figures, began = self._figures, self._began
        self._figures, self._began, self._started = None, False, None
        if not began or not trainer.is_global_zero:
            return
        if isinstance(exception, (KeyboardInterrupt, SIGTERMException)):
            cause = "Ctrl-C" if isinstance(exception, KeyboardInterrupt) else "SIGTERM"
            _say(*_stop_text(trainer, cause))
        elif exception is None and figures is not None:
            others = [line for c in trainer.callbacks if isinstance(c, Summarized) for line in c.summary()]
            _say(*_end_text(trainer, self._end(trainer, figures)), *others, *map(str, trainer.rank_losses))

    def _end(self, trainer: Any, figures: list[_Figures]) -> "_RunEnd":
        counts = [rank.num_samples for rank in figures]
        # Ranks that share batches count as one replica of the data.
        sharing = trainer.world_size // trainer.data_size
        elapsed_s = max(self._elapsed_s, 1e-9)
        return _RunEnd(
            num_steps=trainer.global_step - self._first_step,
            elapsed_s=elapsed_s,
            samples_per_s=None if None in counts else sum(filter(None, counts)) / sharing / elapsed_s,
            data_wait_share=sum(rank.waited_s for rank in figures) / len(figures) / elapsed_s,
            peak_bytes=max(rank.peak_bytes for rank in figures),
            stopped_by=_reason(figures),
        )


def _stopped_by(trainer: Any) -> str | None:
    """Describes the callback or module of this rank that asked the run to end early; None if none has."""
    stopper = trainer.stopped_by
    if stopper is None:
        return None
    reason = getattr(stopper, "stopping_reason_message", None)  # of Lightning's EarlyStopping
    if isinstance(stopper, Timer):
        reason = f"max_time was over after {duration(stopper.time_elapsed())}"
    name = type(stopper).__name__
    return (
        f"{name}: {reason.removesuffix(' Signaling Trainer to stop.')}" if reason else f"{name} (trainer.should_stop)"
    )


def _reason(figures: list[_Figures]) -> str | None:
    """Returns what ended the run early, on the first rank that has asked for it."""
    by_rank = {rank: of_rank.stopped_by for rank, of_rank in enumerate(figures) if of_rank.stopped_by is not None}
    rank = next(iter(by_rank), None)
    return None if rank is None else f"{by_rank[rank]}{f' on rank {rank}' if len(by_rank) < len(figures) else ''}"


def _say(*lines: str) -> None:
    # Not with print(), which programs and tests replace to capture the module's own output.
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


# --- the text at the end of a run
# The text printed at the end of a run, in lines of at most 100 columns unless paths are long.


_WIDTH = 100
_INDENT = "    "


class _RunEnd(NamedTuple):
    """Figures of a finished run; a figure that is None is not printed."""

    num_steps: int
    elapsed_s: float
    samples_per_s: float | None
    data_wait_share: float
    peak_bytes: int
    stopped_by: str | None


def _end_text(trainer: Any, end: _RunEnd) -> list[str]:
    """Returns the lines to print after training."""
    path = _saved(trainer)
    return [
        *([] if end.stopped_by is None else [f"stopped by {end.stopped_by}"]),
        _figures(trainer, end),
        *_best(trainer),
        *_where(trainer),
        *_to_go_on(trainer, path),
        *_to_load(trainer, path),
    ]


def _stop_text(trainer: Any, cause: str) -> list[str]:
    """Returns the lines to print after a run that `cause` has stopped."""
    path = _saved(trainer)
    stopped = f"Stopped by {cause} after {_counted(trainer.global_step, 'step')}."
    if path is None:
        has_snapshots = trainer.snapshots_path is not None
        return [f"{stopped} Nothing was saved{' yet' if has_snapshots else '; resume=auto saves every ten minutes'}."]
    return [f"{stopped} The last checkpoint is {shown_path(path)}", *_to_go_on(trainer, path)]


def _figures(trainer: Any, end: _RunEnd) -> str:
    steps = _counted(end.num_steps, "step")
    if trainer.global_step > end.num_steps:
        steps += f" ({trainer.global_step:,} in all)"
    speed = (
        f"{_number(end.num_steps / end.elapsed_s)} steps/s"
        if end.samples_per_s is None
        else f"{_number(end.samples_per_s)} samples/s"
    )
    share = f", {min(1.0, end.data_wait_share):.0%} of it waiting for data"
    memory = f"{end.peak_bytes / 1e9:.2f} GB" if end.peak_bytes >= 1e9 else f"{end.peak_bytes / 1e6:.0f} MB"
    of_ranks = " (largest rank)" if trainer.world_size > 1 else ""
    return f"{steps} in {duration(end.elapsed_s)}{share}; {speed}, peak memory {memory}{of_ranks}"


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
    if trainer.config.resume == "auto":
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
