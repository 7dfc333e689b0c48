"""`Doctor`: where each step of each rank goes, noted while it trains, and what costs most of it when it ends.

Phases of an interval's end, on all ranks:
1. each rank reads its clock (no collective, no wait for the device);
2. one gather on the hosts' group: 11 numbers, and two for each step: its time, and that in collectives. What a rank has
   waited longer in a step than the rank that has waited least is the wait for slower ranks;
3. each rank appends a line to its own file, and rank 0 logs the mean shares.
"""

import dataclasses
import os
import socket
import time
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel

from polyphase.engine.devices import capacity_bytes, peak_bytes
from polyphase.engine.doctor import Interval, RankInfo, Run, compact, judge, slowest_hooks, write_rank
from polyphase.engine.flags import split_launcher
from polyphase.engine.run_info import log_folder, shown_path
from polyphase.engine.strategies import capabilities_of
from polyphase.engine.version import __version__

from ._clocks import HostClock, Measured, make_clock, shown_steps
from ._compression_cost import CompressionWatch
from ._counts import count_samples, num_places
from ._flops import StepFlops, device_name, dtype_of, peak_flops_per_s
from ._health import HealthWatch, lr_interval_steps
from ._host_use import HostUse, num_cpus
from ._interval import positive_steps
from ._links import MOST_RANKS, all_reduce_rate, receive_rates
from ._notes import Notes
from ._padding import PaddingWatch
from ._reads import ReadWatch
from ._swap import SwapWatch
from ._tensorboard import Boards
from ._throttling import throttle_watch
from ._waits import actions_of, collectives, mark_end_of_backward

__all__ = ["WARMUP_STEPS", "Doctor", "describe"]

WARMUP_STEPS = 3
"""Optimizer steps that are an interval of their own."""
_INTERVAL_STEPS = 50
"""Optimizer steps between two notes where `log_every_n_steps=0` says that nothing is logged."""
_LONG_COMMUNICATION = 0.15
"""Mean share of the time in exposed communication from which on the links between ranks are measured in the end."""
_MIN_HOSTS = 2
"""Hosts from which on links between ranks are measured."""
_NUM_SENT, _NUM_SENT_FAR = 8, 64
"""Intervals that a rank tells rank 0 as training ends: on its host, which has the files as well, and elsewhere."""


class Doctor(Callback):
    """Divides the wall time of each rank into phases, and says in the end what costs most of it and what mends that.

    The phases add up to the wall time: waiting for data, copies to the device, forward and backward, communication that
    nothing hides, waiting for slower ranks, optimizer, callbacks, loggers, validation, saves, and the engine itself. On
    accelerators they are the compute stream's, by events that are read an interval later.

    Each rank appends a line an interval to ``doctor/rank_<r>.jsonl`` in the run's folder of logs; rank 0 logs
    ``doctor/<phase>``, the shares of the time, mean over ranks. The lines at the end of the run say what stands out;
    ``polyphase doctor RUN_DIR`` says all of it. See docs/doctor.md.

    Args:
        every_n_steps: optimizer steps of an interval; None for the trainer's `log_every_n_steps`.

    Attributes:
        last: the shares of the last interval, by name, mean over ranks.

    Raises:
        ValueError: `every_n_steps` is no positive whole number.
        MisconfigurationException: at the start of `fit`, if the trainer is not an `Engine`, whose loops say which phase
            begins.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        self.every_n_steps = None if every_n_steps is None else positive_steps(every_n_steps, " (None: the trainer's)")
        self.last: dict[str, float] = {}
        self._clock: HostClock | None = None
        self._attached = ExitStack()
        self._run: Run | None = None
        self._folder: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"every_n_steps": self.every_n_steps, "last": self.last}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["every_n_steps"])  # type: ignore[misc]  # in another process nothing is under way
        self.last = state["last"]

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Checks that there is somebody to listen to."""
        if not hasattr(trainer, "heartbeat"):
            raise MisconfigurationException(
                f"Doctor listens to the loops of a polyphase Engine, but the trainer is a {type(trainer).__name__}: use"
                " polyphase.engine.Engine, or one of Lightning's profilers."
            )

    def notes_folder(self, trainer: Any) -> str | None:
        """Returns the folder of the ranks' files; None where nothing is written."""
        if trainer.fast_dev_run:
            return None
        logs = log_folder(trainer) or trainer.default_root_dir
        return os.path.abspath(os.path.join("." if "://" in logs else logs, "doctor"))

    # --- while training

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begins to listen; tells all ranks where rank 0's logs are."""
        self._detach()
        folder, self._host = trainer.all_ranks.broadcast_object((self.notes_folder(trainer), socket.gethostname()))
        self._folder = folder
        can = capabilities_of(trainer.strategy)
        self._may_gather = can.keeps_step
        self._notes = Notes(folder, self._describe(trainer))
        self._first_step = self._step = self._noted_step = trainer.global_step
        self._num_batches = 0
        self._run, self.last = None, {}
        self._marks_backward = trainer.world_size > 1 and not can.runs_own_schedule
        self._has_fillers = trainer.data_size > 1
        self._flops: StepFlops | None = None
        self._flops_of_batch: tuple[float, float] | None = None
        self._has_counted = False
        self._boards = Boards(trainer.loggers if trainer.is_global_zero else [], trainer.world_size)
        self._padding = PaddingWatch(trainer.strategy.root_device)
        self._reads = ReadWatch(trainer)
        self._health = HealthWatch(trainer)
        self._begin_watches(trainer)
        self._attach(trainer)

    def _begin_watches(self, trainer: Any) -> None:
        self._swap = SwapWatch()
        self._throttling = throttle_watch(trainer.strategy.root_device)
        self._compression = CompressionWatch(trainer)
        self._attached.callback(self._compression.close)
        self._communication_shares: list[float] = []

    def _describe(self, trainer: Any) -> RankInfo:
        device, dtype = trainer.strategy.root_device, dtype_of(trainer)
        peak = peak_flops_per_s(device, dtype)
        return dataclasses.replace(
            describe(trainer),
            device_name=device_name(device),
            device_capacity_mb=None if (capacity := capacity_bytes(device)) is None else capacity / 1e6,
            dtype=dtype,
            peak_flops_per_s=peak,
            lr_interval_steps=lr_interval_steps(trainer),
        )

    def _attach(self, trainer: Any) -> None:
        clock = self._clock = make_clock(trainer.strategy.root_device)
        self._use = HostUse()
        self._attached.callback(self._use.close)
        self._attached.callback(self._reads.end)
        trainer.heartbeat.listen(clock)
        self._attached.callback(trainer.heartbeat.listen, None)
        self._attached.enter_context(actions_of(trainer.profiler, clock))
        if trainer.world_size > 1:
            self._attached.enter_context(collectives(clock))
        self._begin()

    def _detach(self) -> None:
        self._attached.close()
        self._clock = None

    def _begin(self) -> None:
        assert self._clock is not None
        self._batches = self._fillers = 0
        self._syncs: int | None = None
        self._samples: int | None = 0
        self._tokens: int | None = None
        self._saves = self._clock.num_saves
        self._hooks = self._clock.by_hook
        self._slowest_step_s = 0.0
        self._step_began = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to watch reads, and the CPU time, of some batches of many; counts what the second one computes."""
        # In the first one a pipeline is cut, and what is lazy is made.
        if self._num_batches > 0 and not self._has_counted and not (self._has_fillers and trainer.is_filler(batch_idx)):
            self._has_counted = True
            self._flops = StepFlops()
            self._attached.callback(self._flops.close)
            self._flops.begin()
        self._use.begin()
        if self._compression.is_on and (self._step + 1) // (every := self._every(trainer)) != self._step // every:
            self._compression.begin_step()
        if self._step - self._first_step >= WARMUP_STEPS:
            self._reads.begin(self._num_batches)

    def on_before_backward(self, trainer: Any, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Marks where the last gradient is there, after which only the other ranks are waited for."""
        self._reads.end()
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            self._syncs = (self._syncs or 0) + model.require_backward_grad_sync
        if self._marks_backward and self._clock is not None and loss.requires_grad:
            mark_end_of_backward(loss, self._clock)

    def on_after_backward(self, trainer: Any, pl_module: LightningModule) -> None:
        """Ends the watch on the CPU."""
        self._use.end()

    def on_train_batch_end(
        self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts, without reading from the device, and notes an interval where it is over."""
        clock = self._clock
        if clock is None:
            return
        self._reads.end()
        if self._flops is not None:
            self._end_count(batch)
        self._num_batches += 1
        self._batches += 1
        if self._has_fillers and trainer.is_filler(batch_idx):
            self._fillers += 1
        elif batch is not None:
            self._count(batch)
        step = trainer.global_step
        if step == self._step:
            return
        self._step = step
        clock.end_step()
        self._compression.end_step()
        now = time.perf_counter()
        self._slowest_step_s = max(self._slowest_step_s, now - self._step_began)
        self._step_began = now
        every = self._every(trainer)
        if self._noted_step == self._first_step:
            if step - self._first_step >= WARMUP_STEPS:
                self._note(trainer, is_warmup=True)
        elif step // every != self._noted_step // every:
            self._note(trainer)
            if trainer.is_global_zero and trainer.log_every_n_steps:
                outer = clock.enter("logging")
                for logger in trainer.loggers:
                    logger.log_metrics(self.last, step=step)
                self._boards.shares(self._shares, step)
                clock.enter(outer)

    def _every(self, trainer: Any) -> int:
        return self.every_n_steps or trainer.log_every_n_steps or _INTERVAL_STEPS

    def _end_count(self, batch: Any) -> None:
        """Ends the count of operations; they are taken for those of each sample, or of each batch."""
        flops, self._flops = self._flops, None
        assert flops is not None
        flops.close()
        if not flops.is_known or not flops.model:
            return
        try:
            per = count_samples(batch)
            self._flops_are_by_sample = True
        except ValueError:
            per, self._flops_are_by_sample = 1, False
        self._flops_of_batch = flops.model / max(per, 1), flops.recomputed / max(per, 1)

    def _operations(self) -> tuple[float, float] | tuple[None, None]:
        number = self._samples if self._flops_of_batch and self._flops_are_by_sample else self._batches - self._fillers
        if self._flops_of_batch is None or number is None:
            return None, None
        return self._flops_of_batch[0] * number, self._flops_of_batch[1] * number

    def _count(self, batch: Any) -> None:
        self._padding.look(batch, self._num_batches)
        tokens = num_places(batch)
        if tokens is not None:
            self._tokens = (self._tokens or 0) + tokens
        if self._samples is not None:
            try:
                self._samples += count_samples(batch)
            except ValueError:  # a batch of a kind that does not show how many it has
                self._samples = None

    def _note(self, trainer: Any, *, is_warmup: bool = False, waits_for_device: bool = False) -> None:
        """Ends an interval: one gather, unless it is the warm-up; one line."""
        clock = self._clock
        assert clock is not None
        measured = clock.take(waits_for_device)
        cpu_s, runqueue_s = self._cpu_use()
        steps = self._split_waits(trainer, measured, is_warmup)
        is_exposed = waits_for_device and self._is_exposed(trainer)
        flops, recomputed_flops = self._operations()
        self._shares = measured.shares()
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
            num_syncs=self._syncs,
            num_samples=self._samples,
            num_tokens=self._tokens,
            flops=flops,
            recomputed_flops=recomputed_flops,
            cpu_s=cpu_s,
            runqueue_s=runqueue_s,
            padding=self._padding.take(),
            reads=self._reads.take(),
            **({} if is_warmup else self._looked_at(trainer)),
            rss_mb=self._use.rss_mb,
            device_mb=None if (peak := peak_bytes(trainer.strategy.root_device)) is None else peak / 1e6,
            links=self._links(trainer) if is_exposed else [],
            **self._watched(is_exposed),
        )
        self._notes.add(interval)
        self._noted_step = self._step
        self._begin()

    def _split_waits(self, trainer: Any, measured: Measured, is_warmup: bool) -> list[dict[str, float]]:
        """Tells waits for slower ranks from communication: one gather. Returns the steps that are to be shown."""
        clock = self._clock
        assert clock is not None
        if not self._may_gather or is_warmup:
            clock.forget_all_steps()
            return []
        ranks = trainer.all_ranks
        told = ranks.all_gather_object((measured.seconds, clock.by_step, clock.walls()))
        num_steps = measured.tell_waits([(seconds, by_step) for seconds, by_step, _ in told], ranks.rank)
        steps = shown_steps(clock, [walls for _, _, walls in told], measured.shortest, self._step)
        clock.forget_steps(num_steps)
        self._communication_shares.append(measured.mean_shares()["communication"])
        return steps

    def _is_exposed(self, trainer: Any) -> bool:
        """Whether gloo's collectives took long, so that they are measured; all ranks have the same numbers."""
        shares = self._communication_shares
        is_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        is_long = len(shares) > 0 and sum(shares) / len(shares) >= _LONG_COMMUNICATION
        return is_long and is_gloo and dist.get_world_size() == trainer.world_size

    def _links(self, trainer: Any) -> list[float]:
        return receive_rates() if trainer.num_nodes >= _MIN_HOSTS and 2 < trainer.world_size <= MOST_RANKS else []

    def _watched(self, is_exposed: bool) -> dict[str, Any]:
        """Returns the findings of the watches on swap, device and compression, by the names of an `Interval`."""
        device = {} if self._throttling is None else self._throttling.take()
        compression = self._compression.take()
        if is_exposed and self._compression.is_on:
            compression["plain_mb_per_s"] = all_reduce_rate()
        return {**self._swap.take(), **device, "compression": compression}

    def _looked_at(self, trainer: Any) -> dict[str, Any]:
        """Returns the findings of the watch on the health of training, by the names of an `Interval`."""
        return self._health.look(trainer.lightning_module)

    def _cpu_use(self) -> tuple[float | None, float | None]:
        return self._use.take()

    # --- when it is over

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Notes the rest, and has rank 0 know what all ranks noted: one gather."""
        if self._clock is None:
            return
        self._note(trainer, is_warmup=self._noted_step == self._first_step, waits_for_device=True)
        self._detach()
        self._notes.close()
        kept = self._notes.intervals
        while len(kept) > (_NUM_SENT if self._host == socket.gethostname() else _NUM_SENT_FAR):
            kept = compact(kept)
        told = trainer.all_ranks.gather_object((vars(self._notes.info), [vars(interval) for interval in kept]))
        if trainer.is_global_zero:
            parts = [(RankInfo(**info), [Interval(**each) for each in intervals]) for info, intervals in told]
            self._run = Run({info.rank: info for info, _ in parts}, {info.rank: notes for info, notes in parts})
            self._write_far(parts)
            self._boards.verdict(self._run, self._step)

    def _write_far(self, parts: list[tuple[RankInfo, list[Interval]]]) -> None:
        """Writes what ranks have noted whose files this host can't see."""
        for info, intervals in parts:
            path = os.path.join(self._folder or "", f"rank_{info.rank}.jsonl")
            if self._folder is not None and info.host != self._host and not os.path.exists(path):
                write_rank(path, info, intervals)

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        """Leaves everything as it was; what was noted stays."""
        self._detach()
        if hasattr(self, "_notes"):
            self._notes.close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves everything as it was."""
        self._detach()

    def summary(self) -> list[str]:
        """The lines of the verdict on the run that has ended, on rank 0; none elsewhere, and none before."""
        if self._run is None:
            return []
        lines = judge(self._run).lines()
        folder = None if self._folder is None else shown_path(os.path.dirname(self._folder))
        where = [] if folder is None else [f"  all of it: polyphase doctor {folder}"]
        return [*lines, *where]


def describe(trainer: Any) -> RankInfo:
    """Line 1 of this rank."""
    loader = trainer.train_dataloader
    flag = trainer.flags.get("strategy")
    name = flag.partition(":")[0] if isinstance(flag, str) and flag != "auto" else repr(trainer.strategy).strip("'")
    return RankInfo(
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        host=socket.gethostname(),
        device=trainer.strategy.root_device.type,
        strategy=split_launcher(name)[0] if trainer.world_size > 1 else "single",
        layout=dict(trainer.layout.axes),
        local_ranks=max(1, trainer.world_size // trainer.num_nodes),
        num_threads=torch.get_num_threads(),
        num_cpus=num_cpus(),
        num_workers=getattr(loader, "num_workers", None),
        pins_memory=getattr(loader, "pin_memory", None),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        compression=str(trainer.flags.get("compression") or "none"),
        loggers=[type(logger).__name__ for logger in trainer.loggers],
        started_at=time.time(),
        flags=trainer.config.as_plain,
        versions={"polyphase": __version__, "torch": str(torch.__version__)},
    )
