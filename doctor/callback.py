"""`Doctor`: records where the time of each rank's steps goes, and names the largest costs at the end.

Phases of an interval's end, on all ranks:
1. each rank reads its clock (no collective, no wait for the device);
2. one gather on the hosts' group: 12 numbers, and two for each step: its time, and that in collectives. The time
   by which a rank waits longer in a step than the rank that waits least is the wait for slower ranks;
3. each rank appends a line to its own file, and rank 0 logs the mean shares of ten intervals at a time.
"""

import inspect
import itertools
import os
import socket
import time
import types
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from polyphase.callbacks._interval import steps_or_none
from polyphase.callbacks.run_summary import Summarized
from polyphase.engine.data.samples import num_samples
from polyphase.engine.devices import capacity_bytes, peak_bytes
from polyphase.engine.flags import split_launcher
from polyphase.engine.phases import PHASES
from polyphase.engine.run_info import folder_beside_logs, shown_path
from polyphase.engine.strategies import adapt
from polyphase.engine.version import __version__

from .clocks import HostClock, Measured, actions_of, collectives, make_clock, mark_end_of_backward, shown_steps
from .figures import Figures
from .flops import device_name, dtype_of, operator_s, peak_flops_per_s
from .health import lr_interval_steps, unfused_optimizer
from .host_use import num_cpus, own_cpus, rss_mb, shm_capacity_mb
from .interval import Interval, RankInfo, slowest_hooks
from .records import Notes, Run, compact, write_rank
from .verdict import judge
from .watches import Watches

__all__ = ["Doctor"]

_WARMUP_STEPS = 3
"""Number of first optimizer steps that form a separate interval."""
_INTERVAL_STEPS = 50
"""Optimizer steps between two records if `log_every_n_steps=0` turns logging off."""
_INTERVALS_OF_A_POINT = 10
"""Number of intervals whose shares are logged as one point: there are twelve of them, beside the few values that a run
logs in each interval."""
_NUM_SENT, _NUM_SENT_FAR = 8, 64
"""Number of intervals that a rank sends to rank 0 at the end: from the same host, which has the files, or another."""


class Doctor(Summarized):
    """Divides the wall time of each rank into phases, and names the largest costs and their remedies at the end.

    The phases add up to the wall time: waiting for data, copies to the device, forward and backward, exposed
    communication, waiting for slower ranks, optimizer, callbacks, loggers, validation, saves, and the engine itself. On
    accelerators they are measured on the compute stream, by events that are read an interval later.

    Each rank appends a line an interval to ``doctor/rank_<r>.jsonl`` in the run's folder of logs; rank 0 logs
    ``doctor/<phase>``, the shares of the time in ten intervals, mean over ranks. The lines at the end of the run show
    the main findings; ``polyphase doctor RUN_DIR`` shows all of them. See docs/doctor.md.

    Args:
        every_n_steps: optimizer steps of an interval; None for the trainer's `log_every_n_steps`.

    Attributes:
        last: the shares of the last interval, by name, mean over ranks.

    Raises:
        ValueError: `every_n_steps` is no positive whole number.
        MisconfigurationException: at the start of `fit`, if the trainer is not an `Engine`, whose loops announce the
            phases.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = steps_or_none(every_n_steps)
        self.last: dict[str, float] = {}
        self._clock: HostClock | None = None
        self._watches: Watches | None = None
        self._attached = ExitStack()
        self._run: Run | None = None
        self._folder: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"every_n_steps": self.every_n_steps, "last": self.last}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["every_n_steps"])  # type: ignore[misc]  # in another process nothing is under way
        self.last = state["last"]

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Checks that the trainer is an engine."""
        if not hasattr(trainer, "heartbeat"):
            raise MisconfigurationException(
                f"Doctor listens to the loops of a polyphase Engine, but the trainer is a {type(trainer).__name__}: use"
                " polyphase.engine.Engine, or one of Lightning's profilers."
            )

    def notes_folder(self, trainer: Any) -> str | None:
        """Returns the folder of the ranks' files; None if nothing is written."""
        return None if trainer.fast_dev_run else folder_beside_logs(trainer, "doctor")

    # --- while training

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begins to listen; broadcasts the folder of rank 0's logs."""
        self._end()
        folder, self._host = trainer.all_ranks.broadcast_object((self.notes_folder(trainer), socket.gethostname()))
        self._folder = folder
        can = adapt(trainer.strategy).capabilities
        self._may_gather = can.keeps_step
        self._notes = Notes(folder, _describe(trainer))
        self._first_step = self._step = self._noted_step = trainer.global_step
        self._run, self.last = None, {}
        self._logged_step = self._first_step
        self._unlogged: list[tuple[float, dict[str, float]]] = []  # wall time and shares of intervals
        self._every = self.every_n_steps or trainer.log_every_n_steps or _INTERVAL_STEPS
        self._marks_backward = trainer.world_size > 1 and not can.runs_own_schedule
        self._has_fillers = trainer.data_size > 1
        self._boards = _Boards(trainer.loggers if trainer.is_global_zero else [], trainer.world_size)
        self._watches = Watches(trainer)
        self._attach(trainer)

    def _attach(self, trainer: Any) -> None:
        clock = self._clock = make_clock(trainer.strategy.root_device)
        trainer.heartbeat.listen(clock)
        self._attached.callback(trainer.heartbeat.listen, None)
        self._attached.enter_context(actions_of(trainer.profiler, clock))
        if trainer.world_size > 1:
            self._attached.enter_context(collectives(clock))
        # The loops call no hook that is still `Callback`'s.
        needs_backward = self._marks_backward or (self._watches is not None and self._watches.has_backward)
        if not needs_backward:
            self.on_before_backward = types.MethodType(Callback.on_before_backward, self)  # type: ignore[method-assign]
        self._begin()

    def _detach(self) -> None:
        self._attached.close()
        self._clock = None
        vars(self).pop("on_before_backward", None)

    def _end(self) -> None:
        self._detach()
        if self._watches is not None:
            self._watches.close()
            self._watches = None

    def _begin(self) -> None:
        assert self._clock is not None
        self._batches = self._fillers = 0
        self._samples: int | None = 0
        self._saves = self._clock.num_saves
        self._hooks = self._clock.by_hook
        self._slowest_step_s = 0.0
        self._step_began = self._clock.now()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to watch the batch."""
        if self._watches is not None:
            self._watches.begin_batch(
                is_filler=self._has_fillers and trainer.is_filler(batch_idx),
                is_settled=self._step - self._first_step >= _WARMUP_STEPS,
                ends_interval=(self._step + 1) % self._every == 0,
            )

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Marks the last gradient of backward, after which the rank only waits for others."""
        if self._watches is not None:
            self._watches.begin_backward(trainer.strategy.model)
        if self._marks_backward and self._clock is not None and loss.requires_grad:
            mark_end_of_backward(loss, self._clock)

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Ends the watch on the CPU."""
        if self._watches is not None:
            self._watches.end_backward()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts, without reading from the device, and records an interval when it is over."""
        clock, watches = self._clock, self._watches
        if clock is None or watches is None:
            return
        is_filler = self._has_fillers and trainer.is_filler(batch_idx)
        watches.end_batch(batch, is_filler=is_filler)
        self._batches += 1
        self._fillers += is_filler
        if batch is not None and not is_filler:
            self._count_samples(batch)
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        clock.end_step()
        watches.end_step()
        now = clock.now()
        self._slowest_step_s = max(self._slowest_step_s, now - self._step_began)
        self._step_began = now
        every = self._every
        if self._noted_step == self._first_step:
            if step - self._first_step >= _WARMUP_STEPS:
                self._note(trainer, is_warmup=True)
        elif step // every != self._noted_step // every:
            self._note(trainer)
            if len(self._unlogged) == _INTERVALS_OF_A_POINT:
                outer = clock.enter("logging")
                self._log(trainer)
                clock.enter(outer)

    def _count_samples(self, batch: Any) -> None:
        size = num_samples(batch)  # None for a batch that does not show its number of samples
        self._samples = None if size is None or self._samples is None else self._samples + size

    def _note(self, trainer: Any, *, is_warmup: bool = False, is_last: bool = False) -> None:
        """Ends an interval: one gather, unless it is the warm-up; one line."""
        clock = self._clock
        assert clock is not None
        measured = clock.take(waits=is_last)
        steps = self._split_waits(trainer, measured, is_warmup)
        self.last = {f"doctor/{phase}": share for phase, share in measured.mean_shares().items()}
        interval = Interval(
            step=self._step,
            num_steps=measured.num_steps,
            wall_s=sum(measured.seconds.values()),
            seconds=measured.seconds,
            is_warmup=is_warmup,
            slowest_step_s=self._slowest_step_s,
            steps=steps,
            by_hook=slowest_hooks(clock.by_hook, {name: -seconds for name, seconds in self._hooks.items()}),
            num_saves=clock.num_saves - self._saves,
            num_batches=self._batches,
            num_fillers=self._fillers,
            num_samples=self._samples,
            rss_mb=rss_mb(),
            device_mb=None if (peak := peak_bytes(trainer.strategy.root_device)) is None else peak / 1e6,
            **self._watched(trainer, is_warmup, is_last),
        )
        self._notes.add(interval)
        if not is_warmup:
            self._unlogged.append((interval.wall_s, self.last))
        self._noted_step = self._step
        self._begin()

    def _log(self, trainer: Any) -> None:
        """Logs the shares of the intervals since the last point as one point."""
        parts, self._unlogged = self._unlogged, []
        if not parts or self._step == self._logged_step:
            return
        self._logged_step = self._step
        if trainer.is_global_zero and trainer.log_every_n_steps:
            wall_s = max(sum(wall_s for wall_s, _ in parts), 1e-12)
            shares = {name: sum(wall * last[name] for wall, last in parts) / wall_s for name in self.last}
            for logger in trainer.loggers:
                logger.log_metrics(shares, step=self._step)

    def _watched(self, trainer: Any, is_warmup: bool, is_last: bool) -> dict[str, Any]:
        """Returns the measurements, by the field names of an `Interval`."""
        watches = self._watches
        if watches is None:
            return {}
        if not is_warmup and self._may_gather:
            watches.note_communication(self.last["doctor/communication"])
        num_batches = self._batches - self._fillers
        figures = watches.take(trainer, is_warmup=is_warmup, num_batches=num_batches, num_samples=self._samples)
        return figures | (watches.take_last(trainer) if is_last else {})

    def _split_waits(self, trainer: Any, measured: Measured, is_warmup: bool) -> list[dict[str, float]]:
        """Separates waits for slower ranks from communication, by one gather. Returns the steps to show."""
        clock = self._clock
        assert clock is not None
        if not self._may_gather or is_warmup:
            clock.forget_all_steps()
            return []
        ranks = trainer.all_ranks
        times_of_ranks = ranks.all_gather_object((measured.seconds, clock.by_step, clock.walls()))
        num_steps = measured.tell_waits([(seconds, by_step) for seconds, by_step, _ in times_of_ranks], ranks.rank)
        steps = shown_steps(clock, [walls for _, _, walls in times_of_ranks], measured.shortest, self._step)
        clock.forget_steps(num_steps)
        return steps

    # --- when it is over

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Records the rest, and sends all records to rank 0, by one gather."""
        if self._clock is None:
            return
        self._note(trainer, is_warmup=self._noted_step == self._first_step, is_last=True)
        self._log(trainer)
        self._end()
        self._notes.close()
        kept = compact(self._notes.intervals, _NUM_SENT if self._host == socket.gethostname() else _NUM_SENT_FAR)
        records = trainer.all_ranks.gather_object((vars(self._notes.info), [vars(interval) for interval in kept]))
        if trainer.is_global_zero:
            parts = [(RankInfo(**info), [Interval(**fields) for fields in intervals]) for info, intervals in records]
            self._run = Run({info.rank: info for info, _ in parts}, {info.rank: notes for info, notes in parts})
            self._write_others(parts)
            self._boards.verdict(self._run, self._step)

    def _write_others(self, parts: list[tuple[RankInfo, list[Interval]]]) -> None:
        """Writes the records of ranks whose files are not visible on this host."""
        for info, intervals in parts:
            path = os.path.join(self._folder or "", f"rank_{info.rank}.jsonl")
            if self._folder is not None and info.host != self._host and not os.path.exists(path):
                write_rank(path, info, intervals)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Detaches everything; the records stay."""
        self._end()
        if hasattr(self, "_notes"):
            self._notes.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detaches everything."""
        self._end()

    def summary(self) -> list[str]:
        """Returns the lines of the verdict after the run, on rank 0; otherwise none."""
        if self._run is None:
            return []
        lines = judge(self._run).lines()
        folder = None if self._folder is None else shown_path(os.path.dirname(self._folder))
        where = [] if folder is None else [f"  all of it: polyphase doctor {folder}"]
        return [*lines, *where]


def _describe(trainer: Any) -> RankInfo:
    """Returns the first line of this rank's file: where and how the rank runs."""
    loader, device, dtype = trainer.train_dataloader, trainer.strategy.root_device, dtype_of(trainer)
    flag = trainer.config.strategy
    name = flag.partition(":")[0] if isinstance(flag, str) and flag != "auto" else repr(trainer.strategy).strip("'")
    return RankInfo(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        host=socket.gethostname(),
        device=device.type,
        device_name=device_name(device),
        device_capacity_mb=None if (capacity := capacity_bytes(device)) is None else capacity / 1e6,
        dtype=dtype,
        peak_flops_per_s=peak_flops_per_s(device, dtype),
        operator_s=operator_s(device),
        strategy=split_launcher(name)[0] if trainer.world_size > 1 else "single",
        layout=dict(trainer.layout.axes),
        local_ranks=max(1, trainer.world_size // trainer.num_nodes),
        num_threads=torch.get_num_threads(),
        num_cpus=num_cpus(),
        cpus=own_cpus(),
        num_workers=getattr(loader, "num_workers", None),
        pins_memory=getattr(loader, "pin_memory", None),
        shm_capacity_mb=shm_capacity_mb(),
        lr_interval_steps=lr_interval_steps(trainer),
        unfused_optimizer=unfused_optimizer(trainer),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        compression=trainer.config.compression,
        loggers=[type(logger).__name__ for logger in trainer.loggers],
        started_at=time.time(),
        flags=trainer.config.as_plain,
        versions={"polyphase": __version__, "torch": str(torch.__version__)},
        hooks=_places_of_hooks(trainer),
    )


_MOST_PLACES = 64


def _places_of_hooks(trainer: Any) -> dict[str, str]:
    """Returns file and line of the hooks that the user's callbacks and module define, by ``"Class.hook"``."""
    places: dict[str, str] = {}
    for owner in (*trainer.callbacks, trainer.lightning_module):
        for name in dir(type(owner)):
            function = inspect.unwrap(getattr(type(owner), name)) if name.startswith("on_") else None
            code = getattr(function, "__code__", None)
            if code is not None and not function.__module__.startswith(("lightning.", "polyphase.")):
                place = f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
                places.setdefault(f"{type(owner).__name__}.{name}", place)
    return dict(itertools.islice(places.items(), _MOST_PLACES))


# --- writes `Doctor`'s per-rank shares, memory, rates and verdict to TensorBoard
# Rank 0 uses the user's own `TensorBoardLogger`. Its writer supports what `log_metrics` does not: a layout of charts
# (the tab "Custom Scalars") and texts.


_NUM_RANKS = 16
"""Number of ranks with their own curves (the first ones); `polyphase doctor` shows all ranks."""


class _Boards:
    """The TensorBoards of a run, on rank 0.

    Args:
        loggers: the trainer's loggers.
        world_size: number of ranks.
    """

    def __init__(self, loggers: Sequence[Any], world_size: int) -> None:
        self._boards = [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]
        self._num_ranks = min(world_size, _NUM_RANKS) if world_size > 1 else 0

    def verdict(self, run: Run, step: int) -> None:
        """Writes the layout of charts, the verdict, and the shares, the memory and the rates of each rank."""
        self._lay_out()
        text = "\n".join(_markdown(run))
        for board in self._boards:
            for rank in sorted(run.intervals)[: max(self._num_ranks, 1)]:
                for interval in compact(run.intervals[rank], _NUM_SENT):
                    memory = {"rss_mb": interval.rss_mb, "device_mb": interval.device_mb}
                    numbers = {f"doctor/{name}/rank_{rank}": mb for name, mb in memory.items() if mb is not None}
                    rates = Figures({rank: run.ranks[rank]}, {rank: interval}).rates(rank) if interval.num_steps else {}
                    numbers |= {f"doctor/{name}/rank_{rank}": rate for name, rate in rates.items()}
                    if self._num_ranks and interval.num_steps:
                        shares = {phase: seconds / interval.wall_s for phase, seconds in interval.seconds.items()}
                        numbers |= {f"doctor/rank_{rank}/{phase}": share for phase, share in shares.items()}
                    board.log_metrics(numbers, step=interval.step)
            board.experiment.add_text("doctor/verdict", text, global_step=step)

    def _lay_out(self) -> None:
        charts = {"shares of the time, mean over ranks": [f"doctor/{phase}" for phase in PHASES]}
        for rank in range(self._num_ranks):
            charts[f"shares of the time, rank {rank}"] = [f"doctor/rank_{rank}/{phase}" for phase in PHASES]
        charts["share of the peak FLOP/s, by rank (MFU)"] = ["doctor/mfu/rank_[0-9]+"]
        charts["samples a second, by rank"] = ["doctor/samples_per_s/rank_[0-9]+"]
        charts["memory of the ranks, MB"] = ["doctor/rss_mb/rank_[0-9]+", "doctor/device_mb/rank_[0-9]+"]
        # TensorBoard treats tags as regular expressions: without anchors, doctor/copy would match doctor/copy_of.
        layout = {"Doctor": {name: ["Multiline", [f"^{tag}$" for tag in tags]] for name, tags in charts.items()}}
        for board in self._boards:
            board.experiment.add_custom_scalars(layout)


def _markdown(run: Run) -> list[str]:
    verdict = judge(run)
    lines = [verdict.lines()[0].removeprefix("doctor: "), ""]
    lines += [f"*{caveat}*" for caveat in verdict.caveats]
    for number, finding in enumerate(verdict.findings, start=1):
        gain = "" if finding.gain is None else f" (up to {finding.gain:.0%} less time)"
        lines += [f"{number}. **{finding.cause}**{gain}: {finding.evidence}", f"    - remedy: {finding.remedy}"]
    return lines if verdict.findings or verdict.caveats else [*lines, "nothing stands out"]
