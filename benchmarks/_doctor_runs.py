"""The runs of `doctor.py`: a small module with one fault in it.

What stands for the module's computing takes no CPU (as on an accelerator), so that four ranks fit on two CPUs; but for
the faults that are a CPU's own.
"""

import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from polyphase.callbacks import Doctor
from polyphase.engine import Engine

__all__ = ["QUIET", "Linear", "run"]

WIDTH, BATCH, BLOCKS = 64, 12, 4
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_run_summary": False,
    "check_first_steps": False,
}
_ON_CPU = ("cpu_burner",)
"""Faults whose runs compute on the CPU."""
_TOKENS = 16
"""The length of a padded sample."""
_BATCHES_A_STEP = 4
"""Of manual accumulation."""
_EPOCH = 10
"""Batches of an epoch in which a rank has fewer."""
_MORE_GRADIENT = 1e-6
"""Of each of the parameters that are there to be averaged: one of zero would be a fault of its own."""
_LATE_S = 80.0
"""After which a rank that still runs writes its stack."""
_RUNNING_S = 0.1
"""Between two pauses."""


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Fault:
    """Costs time where it is asked for, on one rank or on all."""

    def __init__(self, trial: Any) -> None:
        self.trial, self.kind, self.strength = trial, trial.kind, trial.strength
        self.work = 1.0
        """The part of a step's usual work that the batch needs."""

    def is_(self, *kinds: str) -> bool:
        """Whether it is one of these, and not mended."""
        return self.kind in kinds and not self.trial.is_mended

    def is_here(self, *kinds: str) -> bool:
        """Whether it is one of these, not mended, and at this rank."""
        return self.is_(*kinds) and (not self.trial.ranks or self.trial.rank == _rank())

    def at(self, *kinds: str, part: float = 1.0) -> None:
        """Sleeps for a part of the strength if it is one of these kinds."""
        if self.is_here(*kinds):
            time.sleep(part * self.strength / 1e3)


def _burn(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        torch.linalg.matrix_exp(torch.full((WIDTH, WIDTH), 1e-3))


class Block(nn.Module):
    def __init__(self, fault: Fault, is_last: bool) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        self.fault, self.is_last = fault, is_last

    def forward(self, x: Tensor) -> Tensor:
        fault, part = self.fault, x.shape[0] / BATCH  # of the step: a micro-batch is one
        usual_s = part * fault.work * fault.trial.step_ms / 1e3 / BLOCKS
        if fault.kind == "slow_stage" and fault.trial.is_mended:
            usual_s += part * fault.strength / 1e3 / BLOCKS  # the two stages have as much
        if fault.kind in _ON_CPU:
            _burn(usual_s)
        elif fault.kind != "threads":
            time.sleep(usual_s)
        fault.at("slow_stage", part=2 * part / BLOCKS)  # which two stages share
        if self.is_last:
            fault.at("sleep_in_step", part=part)
            if fault.is_here("heavy_step"):
                _burn(part * fault.strength / 1e3)
        return self.down(self.act(self.up(x)))


class Module(LightningModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.blocks = nn.ModuleList(Block(fault, i == BLOCKS - 1) for i in range(BLOCKS))
        self.automatic_optimization = fault.kind not in ("sync_while_accumulating", "scheduler_stands_still")
        self.more = nn.ParameterList(_more_parameters(fault))
        num_small = round(fault.strength) if fault.kind == "small_units" else 0
        self.small = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_small))
        self.leaked: list[Tensor] = []

    def shard_units(self) -> list[nn.Module]:
        """Every second block: a gather among four processes on two CPUs takes 4 ms, and a block computes for 30."""
        return [*self.blocks[::2], *(self.small if self.fault.is_("small_units") else ())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.fault.kind == "padding":
            self.fault.work = batch["attention_mask"].shape[1] / _TOKENS
        loss = self._loss(batch["x"], batch_idx)
        if self.fault.kind == "logs_too_often":
            self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        is_step = self.fault.kind == "scheduler_stands_still" or batch_idx % _BATCHES_A_STEP == _BATCHES_A_STEP - 1
        with nullcontext() if is_step or not self.fault.trial.is_mended else self.trainer.model.no_sync():
            self.manual_backward(loss)
        if is_step:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def _loss(self, x: Tensor, batch_idx: int) -> Tensor:
        fault = self.fault
        if fault.kind == "slow_in_turn" and fault.trial.is_mended:
            time.sleep(fault.strength / 1e3 / fault.trial.devices)
        elif fault.kind == "slow_in_turn" and self.global_step % fault.trial.devices == _rank():
            time.sleep(fault.strength / 1e3)
        if fault.is_here("leak"):
            self.leaked.append(torch.ones(int(1e6 * fault.strength / 4)))
        if fault.kind == "threads":
            wide = torch.rand(512, 512)
            for _ in range(8):
                wide = wide @ wide
        for i, block in enumerate(self.blocks):
            x = x + (0.0 * block(x) if fault.kind == "dead_parameters" and i == 1 else block(x))
        loss = x.square().mean()
        for layer in self.small:
            loss = loss + _MORE_GRADIENT * layer(x).square().mean()
        if fault.kind == "many_collectives":
            values = torch.ones(round(fault.strength))
            for part in values.split(values.numel() if fault.trial.is_mended else 1):
                dist.all_reduce(part)
        if fault.kind == "small_operators":
            scale = torch.ones(())
            for _ in range(1 if fault.trial.is_mended else round(fault.strength / 2)):
                loss = loss * scale
        for parameter in self.more:
            loss = loss + _MORE_GRADIENT * parameter.sum()
        if fault.kind == "gradient_spike" and self.global_step == self.fault.trial.steps // 8 * 4 - 1:
            loss = fault.strength * loss
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fault.at("slow_module_hook")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fault.at("slow_validation")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.fault.at("slow_transfer", "slow_transfer_of_one")
        return batch

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        if self.fault.kind != "scheduler_stands_still":
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def _more_parameters(fault: Fault) -> list[nn.Parameter]:
    if fault.kind == "small_buckets":
        return [nn.Parameter(torch.zeros(512)) for _ in range(int(fault.strength))]
    if fault.kind in ("big_gradients", "sync_while_accumulating", "costly_compression"):
        return [nn.Parameter(torch.zeros(int(fault.strength * 1e6 / 4 / 4))) for _ in range(4)]
    return []


class Rows(Dataset[Any]):
    def __init__(self, size: int, fault: Fault) -> None:
        self.size, self.fault = size, fault
        self.mask = torch.ones(_TOKENS, dtype=torch.int64)
        if fault.kind == "padding":
            self.mask[_TOKENS - round(fault.strength) :] = 0
        if fault.trial.is_mended:
            self.mask = self.mask[self.mask > 0]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.fault.at("slow_loader", "slow_loaders", part=1 / BATCH)
        return {"x": torch.full((WIDTH,), index / self.size), "attention_mask": self.mask}


class Stream(IterableDataset[Any]):
    """An epoch of ten batches, and of fewer on one rank."""

    shards_itself = True

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __iter__(self) -> Iterator[Any]:
        missing = round(self.fault.strength) if self.fault.is_here("fewer_batches") else 0
        for index in range(BATCH * (_EPOCH - missing)):
            yield {"x": torch.full((WIDTH,), index / BATCH / _EPOCH)}


class Hooks(Callback):
    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        faulthandler.dump_traceback_later(_LATE_S)
        if self.fault.is_("threads"):
            torch.set_num_threads(round(self.fault.strength))
        if self.fault.kind == "cpu_burner":
            # The rank beside which others burn has its CPU with them, and the other rank has the other one.
            first, second = sorted(os.sched_getaffinity(0))[:2]
            os.sched_setaffinity(0, {first if self.fault.trial.rank == _rank() else second})
            for _ in range(round(self.fault.strength) if self.fault.is_here("cpu_burner") else 0):
                _beside(lambda: _burn(0.1))
        if self.fault.is_here("paused_rank"):
            pid, pause_s = os.getpid(), 3 * self.fault.strength / 1e3
            _beside(lambda: _pause_again_and_again(pid, pause_s))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        fault, step = self.fault, trainer.global_step
        fault.at("slow_callback", "slow_callbacks")
        every = {"slow_saves": 4, "saves_too_often": 2}.get(fault.kind)
        if every and step % every == 0 and fault.is_(fault.kind):
            trainer.save_checkpoint(self.folder / "last.ckpt")
        if fault.is_here("replicas_differ") and step == fault.trial.steps // 2:
            with torch.no_grad():
                next(module.parameters()).add_(1e-3)

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.fault.at("slow_saves", part=2.0)
        if self.fault.kind == "saves_too_often":
            checkpoint["more"] = torch.zeros(int(self.fault.strength * 1e6 / 4))


def _beside(function: Any) -> None:
    """Calls `function` in a process beside this one, which ends with the run's session."""
    parent = os.getpid()
    if os.fork() == 0:
        os.closerange(3, 1024)  # by one of them whoever has started the rank is told of its end
        try:
            while os.getppid() == parent:
                function()
        finally:
            os._exit(0)


def _pause_again_and_again(pid: int, pause_s: float) -> None:
    time.sleep(_RUNNING_S)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(pause_s)
    os.kill(pid, signal.SIGCONT)


class SlowLogger(CSVLogger):
    def __init__(self, folder: Path, fault: Fault) -> None:
        super().__init__(str(folder))
        self.fault = fault

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.fault.at("logs_too_often")
        self.fault.at("slow_logger", part=10.0)
        super().log_metrics(*args, **kwargs)


class MoreOnOne:
    """Collates several times as many samples on one rank."""

    def __init__(self, trial: Any) -> None:
        self.rank, self.times = trial.rank, 1 if trial.is_mended else 2 + round(trial.strength / 40)

    def __call__(self, batch: list[Any]) -> Any:
        return torch.utils.data.default_collate(batch * (self.times if _rank() == self.rank else 1))


def _flags(trial: Any, fault: Fault, folder: Path) -> dict[str, Any]:
    flags = QUIET | {"log_every_n_steps": trial.interval}
    name, _, options = trial.strategy.partition(":")
    if fault.is_("small_buckets"):
        options = "bucket_cap_mb=0.002"
    if fault.kind == "few_micro_batches" and trial.is_mended:
        options = f"microbatches={2 * int(options.partition('=')[2])}"
    if fault.is_("costly_compression"):
        flags["compression"] = "topk"  # which looks for the largest values, where a message takes next to no time
    if fault.kind == "needless_search":
        options = "find_unused_parameters=true"
    flags["strategy"] = name if trial.devices == 1 else f"{name}_fork{':' if options else ''}{options}"
    if fault.kind in ("slow_logger", "logs_too_often"):
        flags["logger"] = SlowLogger(folder / "logs", fault)
        flags["log_every_n_steps"] = 50 if trial.is_mended else 1 if fault.kind == "logs_too_often" else 10
    if fault.is_("slow_validation"):
        flags["val_check_interval"] = 2
    return flags


def run(trial: Any, folder: Path) -> None:
    """Trains with the trial's fault; what the ranks note is in `folder`."""
    torch.set_num_threads(1)
    fault = Fault(trial)
    num_batches = trial.steps * (_BATCHES_A_STEP if fault.kind == "sync_while_accumulating" else 1)
    engine = Engine(
        **_flags(trial, fault, folder),
        devices=trial.devices,
        max_steps=trial.steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        callbacks=[Hooks(fault, folder), Doctor(every_n_steps=trial.interval)],
        default_root_dir=folder,
    )
    rows: Any = Rows(BATCH * trial.devices * num_batches, fault)
    if fault.kind == "fewer_batches":
        rows = Stream(fault)
    collate = MoreOnOne(trial) if fault.kind == "more_samples" else None
    data = DataLoader(rows, batch_size=BATCH, collate_fn=collate)
    validation = DataLoader(Rows(BATCH * trial.devices * 2, fault), batch_size=BATCH)
    engine.fit(Module(fault), data, validation if fault.is_("slow_validation") else None)


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)
