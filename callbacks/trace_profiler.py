"""`TraceProfiler`: writes traces of a few steps of each rank for Perfetto: at set steps, on a signal, or if slow."""

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.optim import Optimizer
from torch.profiler import profile, record_function, schedule

from polyphase.engine.flags import check_count
from polyphase.engine.foreign import written_beside
from polyphase.engine.run_info import folder_beside_logs, shown_path
from polyphase.engine.strategies import adapt

from .run_summary import Summarized

__all__ = ["TraceProfiler"]

_NUM_TIMES = 50
"""Number of steps whose median a step is compared with."""
_LEAST_TIMES = 10
_MOST_SLOW_TRACES = 3
"""Largest number of traces of slow steps per rank; each takes some megabytes and some time."""
_SIGNAL = getattr(signal, "SIGUSR2", None)


class TraceProfiler(Summarized):
    """Writes traces of `torch.profiler` for https://ui.perfetto.dev, one file for each rank and each time.

    A trace begins after every `wait` steps, `repeat` times; on the signal SIGUSR2 (``kill -USR2 PID``, for that rank
    alone); and after a step that took `slow_factor` times the median of the last 50. It has `active` optimizer steps,
    after `warmup` steps in which the profiler warms up. Between traces only the time of each step is measured.

    The files are ``traces/rank_<r>-step_<n>-<why>.json.gz`` in the run's folder of logs (in `default_root_dir` if no
    logger has a folder; no files with `fast_dev_run`). The training thread has ranges called "forward", "backward" and
    "optimizer". While a rank writes a file, for some tenths of a second, the other ranks wait for it.

    Args:
        wait: optimizer steps before a trace.
        warmup: number of profiled steps that are discarded, at least 1.
        active: number of steps in a trace.
        repeat: number of such traces; 0: only on the signal and for slow steps.
        slow_factor: a step that takes this many times the median causes a trace, above 1; None to disable.
        on_signal: listen for SIGUSR2. None: if no other code handles it, and `fit` is called by the main thread.
        memory_snapshot: on CUDA, keep the last allocations, and write them to ``traces/rank_<r>-memory_<n>.pickle``,
            for https://docs.pytorch.org/memory_viz, when memory runs out.
        record_shapes: record the input sizes of each operator.
        with_stack: record the line of code of each operator; makes steps slower.

    Attributes:
        files: paths of the files that this rank has written.

    Raises:
        ValueError: a number is out of range.
        MisconfigurationException: at the start of `fit`, if the trainer has a `PyTorchProfiler` (only one profiler can
            run), if `memory_snapshot` is set and the device is not CUDA, or if `on_signal` is set and SIGUSR2 is taken.
    """

    def __init__(
        self,
        wait: int = 10,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        *,
        slow_factor: float | None = 3.0,
        on_signal: bool | None = None,
        memory_snapshot: bool = False,
        record_shapes: bool = False,
        with_stack: bool = False,
    ) -> None:
        numbers = {"wait": (wait, 1), "warmup": (warmup, 1), "active": (active, 1), "repeat": (repeat, 0)}
        for name, (value, least) in numbers.items():
            check_count(name, value, least=least)
        if slow_factor is not None and not slow_factor > 1:
            raise ValueError(f"slow_factor must be a number above 1, or None, but got {slow_factor!r}.")
        self.wait, self.warmup, self.active, self.repeat = wait, warmup, active, repeat
        self.slow_factor, self.on_signal, self.memory_snapshot = slow_factor, on_signal, memory_snapshot
        self.record_shapes, self.with_stack = record_shapes, with_stack
        self.files: list[str] = []
        self._is_requested = False
        self._forget()

    def _forget(self) -> None:
        self._attached = contextlib.ExitStack()
        self._named = contextlib.ExitStack()
        self._trace: profile | None = None
        self._memory: _MemoryHistory | None = None
        self._optimizer = _OptimizerRange()
        self._folder: str | None = None
        self._is_on = False

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_attached", "_named", "_trace", "_memory", "_optimizer", "_folder", "_is_on")
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()  # no trace is in progress in the new process

    def request(self) -> None:
        """Requests a trace of this rank's next steps."""
        self._is_requested = True

    # --- when it is due

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the arguments can be honoured."""
        if stage != "fit":
            return
        if isinstance(trainer.profiler, PyTorchProfiler):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "TraceProfiler and profiler='pytorch' both use torch.profiler, which runs once in a process: leave one"
                " out."
            )
        device = trainer.strategy.root_device
        if self.memory_snapshot and device.type != "cuda":
            raise MisconfigurationException(
                "TraceProfiler(memory_snapshot=True) keeps CUDA's allocations, but this rank computes on"
                f" {device.type!r}: leave it out, or use MemoryMonitor."
            )
        if self.on_signal and (reason := _why_no_signal()) is not None:
            raise MisconfigurationException(f"TraceProfiler(on_signal=True) can't use SIGUSR2: {reason}.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts to check for due traces; sends rank 0's folder of logs to all ranks."""
        self._end()
        folder = trainer.strategy.broadcast(folder_beside_logs(trainer, "traces"))
        self.files, self._is_requested = [], False
        self._is_on = not trainer.fast_dev_run  # type: ignore[attr-defined]
        if not self._is_on:
            return
        self._folder, self._rank = folder, trainer.global_rank
        self._step = self._first_step = trainer.global_step
        self._times: deque[float] = deque(maxlen=_NUM_TIMES)
        self._since: float | None = None
        self._num_set = self._num_slow = self._num_snapshots = 0
        self._next = self._step + self.wait
        if self.on_signal is not False and _why_no_signal() is None:
            assert _SIGNAL is not None
            before = signal.signal(_SIGNAL, lambda *_: self.request())
            self._attached.callback(signal.signal, _SIGNAL, before)
        if self.memory_snapshot:
            self._memory = _MemoryHistory(trainer.strategy.root_device, self._snapshot_path)
            self._attached.callback(self._memory.end)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Begins the range "optimizer"."""
        if self._trace is not None:
            self._optimizer.begin(getattr(optimizer, "optimizer", optimizer))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins, continues and ends traces, after each optimizer step."""
        if not self._is_on or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        now = time.perf_counter()
        took_s, self._since = None if self._since is None else now - self._since, now
        if self._trace is not None:
            self._trace.step()
            self._num_left -= 1
            if self._num_left == 0:
                self._finish()
        elif (why := self._why_now(took_s)) is not None:
            self._begin(trainer, why)
        if took_s is not None and self._trace is None:
            self._times.append(took_s)

    def _why_now(self, took_s: float | None) -> str | None:
        """Returns the reason for a trace of the next steps, or None."""
        if self._is_requested:
            self._is_requested = False
            return "signal"
        if self._step >= self._next and self._num_set < self.repeat:
            self._num_set += 1
            return "set"
        enough = len(self._times) >= _LEAST_TIMES and self._num_slow < _MOST_SLOW_TRACES
        if took_s is not None and self.slow_factor is not None and enough:
            usual_s = median(self._times)
            if took_s > self.slow_factor * usual_s:
                self._num_slow += 1
                return f"slow_{took_s / usual_s:.0f}x"
        return None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Excludes the start of an epoch from the time of a step."""
        self._since = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Excludes a validation from the time of a step."""
        self._since = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Excludes a save from the time of a step."""
        self._since = None

    # --- a trace

    def _begin(self, trainer: Trainer, why: str) -> None:
        self._why, self._began = why, self._step
        self._num_left = self.warmup + self.active
        self._trace = profile(
            schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=self._write,
            record_shapes=self.record_shapes,
            with_stack=self.with_stack,
            profile_memory=self.memory_snapshot,
        )
        self._named.enter_context(_named_steps(trainer.strategy))
        self._trace.start()
        self._since = None

    def _write(self, trace: profile) -> None:
        assert self._folder is not None
        path = os.path.join(self._folder, f"rank_{self._rank}-step_{self._began + self.warmup}-{self._why}.json.gz")
        try:
            os.makedirs(self._folder, exist_ok=True)
            with written_beside(path) as beside:
                trace.export_chrome_trace(beside)
        except OSError as error:  # a full disk must not end training
            rank_zero_warn(f"TraceProfiler could not write {path}: {error}")
            return
        self.files.append(path)

    def _finish(self) -> None:
        """Ends the current trace; a trace without a step is discarded."""
        trace, self._trace = self._trace, None
        if trace is not None:
            self._optimizer.end()
            trace.stop()
            self._since = None
            self._next = self._step + self.wait
            self._named.close()

    def _snapshot_path(self) -> str:
        assert self._folder is not None
        os.makedirs(self._folder, exist_ok=True)
        self._num_snapshots += 1
        return os.path.join(self._folder, f"rank_{self._rank}-memory_{self._num_snapshots}.pickle")

    # --- when it is over

    def _end(self) -> None:
        self._finish()
        if self._memory is not None:
            self.files += self._memory.written
            self._memory = None
        self._attached.close()
        self._is_on = False

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the current trace."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Ends the current trace; the steps before the failure are written."""
        self._end()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores everything that the callback has changed."""
        self._end()

    def summary(self) -> list[str]:
        """Returns the line for the end of the run."""
        if not self.files:
            return []
        folder = shown_path(os.path.dirname(self.files[0]))
        return [f"traces: {len(self.files)} of this rank in {folder}, for https://ui.perfetto.dev"]


def _why_no_signal() -> str | None:
    """Returns the reason why SIGUSR2 can't be used; None if it can."""
    if _SIGNAL is None:
        return "this system has no such signal"
    if threading.current_thread() is not threading.main_thread():
        return "fit is not called by the main thread"
    if signal.getsignal(_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return "the program has a handler of its own for it"
    return None


# --- allocations before memory runs out
# Writes a snapshot of CUDA's memory when it runs out.


_NUM_EVENTS = 100_000
"""Number of the last allocations and frees that are kept."""


class _MemoryHistory:
    """Keeps the last allocations with their stacks, and writes them when memory runs out.

    torch: torch.cuda.memory._record_memory_history and _dump_snapshot, and the observer of its allocator,
    torch._C._cuda_attach_out_of_memory_observer, which is called before the error is raised, even if it is caught.

    Args:
        device: the CUDA device.
        path: returns the path of the next file.
    """

    def __init__(self, device: torch.device, path: Callable[[], str]) -> None:
        self._device, self._path, self._is_on = device, path, True
        self.written: list[str] = []
        torch.cuda.memory._record_memory_history(max_entries=_NUM_EVENTS, device=device)
        # Only builds with CUDA have this function; torch keeps the observer until the process ends.
        attach: Any = getattr(torch._C, "_cuda_attach_out_of_memory_observer")  # noqa: B009
        attach(self._write)

    def _write(self, device: int, requested: int, total: int, free: int) -> None:
        if self._is_on:
            path = self._path()
            with written_beside(path) as beside:
                torch.cuda.memory._dump_snapshot(beside)
            self.written.append(path)

    def end(self) -> None:
        """Stops recording."""
        if self._is_on:
            self._is_on = False
            torch.cuda.memory._record_memory_history(enabled=None, device=self._device)


# --- names of the parts of a step
# Names the parts of a step in a trace of torch.profiler: forward, backward, optimizer.


@contextmanager
def _named_steps(strategy: Any) -> Iterator[None]:
    """Marks each forward and backward of `strategy` as a range in the trace."""
    # A pipeline schedule runs both in one call.
    forward = "forward and backward" if adapt(strategy).capabilities.runs_own_schedule else "forward"
    names = {"training_step": forward, "backward": "backward"}
    before = {attribute: vars(strategy)[attribute] for attribute in names if attribute in vars(strategy)}
    for attribute, name in names.items():
        setattr(strategy, attribute, _named(getattr(strategy, attribute), name))
    try:
        yield
    finally:
        for attribute in names:
            vars(strategy).pop(attribute, None)  # makes the class's method visible again
        vars(strategy).update(before)


def _named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return method(*args, **kwargs)

    return named


class _OptimizerRange:
    """The trace range "optimizer", from the end of backward to the end of `Optimizer.step`."""

    def __init__(self) -> None:
        self._open: Any = None
        self._hooks = ExitStack()

    def begin(self, optimizer: Any) -> None:
        """Begins the range; called after backward."""
        self.end()
        handle = optimizer.register_step_post_hook(lambda *_: self.end())
        self._hooks.callback(handle.remove)
        self._open = record_function("optimizer")
        self._open.__enter__()

    def end(self) -> None:
        """Ends the range, if one is open."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.__exit__(None, None, None)
        self._hooks.close()
