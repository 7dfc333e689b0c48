"""The runs of `doctor.py`: a small module with one fault in it."""

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from polyphase.callbacks import Doctor
from polyphase.engine import Engine

__all__ = ["run", "step_us"]

WIDTH, BATCH = 64, 4
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_run_summary": False,
    "check_first_steps": False,
}


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Fault:
    """Costs time where it is asked for, on one rank or on all."""

    def __init__(self, trial: Any) -> None:
        self.kind, self.cost_s = trial.kind, trial.cost_s
        self.rank = None if trial.kind and trial.kind.endswith("s") else trial.rank

    def at(self, *kinds: str, of: int = 1) -> None:
        """Sleeps if it is one of these kinds; `of` times share the cost of a step."""
        if self.kind in kinds and (self.rank is None or self.rank == _rank() or self.kind in _OF_ALL):
            time.sleep(self.cost_s / of)


_OF_ALL = ("slow_validation", "padding", "slow_transfer")


class MLP(nn.Module):
    def __init__(self, fault: Fault, is_last: bool) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)
        self.fault, self.is_last = fault, is_last

    def forward(self, x: Tensor) -> Tensor:
        if self.is_last:
            self.fault.at("sleep_in_step", "slow_stage")
            if self.fault.kind == "heavy_step" and self.fault.rank == _rank():
                until = time.thread_time() + self.fault.cost_s
                while time.thread_time() < until:
                    torch.linalg.matrix_exp(torch.full((WIDTH, WIDTH), 1e-3))
        return self.down(self.act(self.up(x)))


class Module(LightningModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault
        self.blocks = nn.ModuleList(MLP(fault, i == 3) for i in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch["x"]
        if self.fault.kind == "more_samples":
            x = x.repeat_interleave(200, 0)
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fault.at("slow_validation")

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.fault.at("slow_transfer")
        return batch

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Rows(Dataset[Any]):
    def __init__(self, size: int, fault: Fault) -> None:
        self.size, self.fault = size, fault
        self.mask = torch.ones(16, dtype=torch.int64)
        if fault.kind == "padding":
            self.mask[6:] = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        self.fault.at("slow_loader", "slow_loaders", of=BATCH)
        return {"x": torch.full((WIDTH,), index / self.size), "attention_mask": self.mask}


class Hooks(Callback):
    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.fault.at("slow_callback", "slow_callbacks")
        if self.fault.kind == "slow_saves" and trainer.global_step % 4 == 0:
            trainer.save_checkpoint(self.folder / "last.ckpt")

    def on_save_checkpoint(self, *_: Any) -> None:
        self.fault.at("slow_saves")


class SlowLogger(CSVLogger):
    def __init__(self, folder: Path, fault: Fault) -> None:
        super().__init__(str(folder))
        self.fault = fault

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        self.fault.at("slow_logger")
        super().log_metrics(*args, **kwargs)


class MoreOnOne:
    """Collates eight times as many samples on one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, batch: list[Any]) -> Any:
        return torch.utils.data.default_collate(batch * (8 if _rank() == self.rank else 1))


def run(trial: Any, folder: Path) -> None:
    """Trains with the trial's fault; what the ranks note is in `folder`."""
    torch.set_num_threads(1)
    fault = Fault(trial)
    if trial.kind == "slow_validation":
        fault.rank = None
    name, _, options = trial.strategy.partition(":")
    strategy = name if trial.devices == 1 else f"{name}_fork{':' if options else ''}{options}"
    flags = dict(QUIET)
    if trial.kind == "slow_logger":
        flags |= {"logger": SlowLogger(folder / "logs", fault), "log_every_n_steps": 1}
    else:
        flags |= {"log_every_n_steps": 10}
    doctor = Doctor(every_n_steps=10)
    engine = Engine(
        **flags,
        strategy=strategy,
        devices=trial.devices,
        max_steps=trial.steps,
        max_epochs=-1,
        val_check_interval=4 if trial.kind == "slow_validation" else None,
        num_sanity_val_steps=0,
        callbacks=[Hooks(fault, folder), doctor],
        default_root_dir=folder,
    )
    collate = MoreOnOne(trial.rank) if trial.kind == "more_samples" else None
    data = DataLoader(Rows(BATCH * trial.devices * trial.steps, fault), batch_size=BATCH, collate_fn=collate)
    validation = DataLoader(Rows(BATCH * trial.devices * 2, Fault(trial)), batch_size=BATCH)
    engine.fit(Module(fault), data, validation if trial.kind == "slow_validation" else None)


class _Between(Callback):
    """The time from a step to another one."""

    def __init__(self, steps: int) -> None:
        self.first, self.last = steps // 5, steps - 2

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.first:
            self.began = time.perf_counter()
        elif trainer.global_step == self.last:
            self.us = 1e6 * (time.perf_counter() - self.began) / (self.last - self.first)


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def step_us(with_doctor: bool, steps: int) -> float:
    """Microseconds of a step of a small module, with or without the callback."""
    torch.set_num_threads(1)
    between = _Between(steps)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [*([Doctor()] if with_doctor else []), between]
        engine = Engine(**QUIET, max_steps=steps, max_epochs=-1, callbacks=callbacks, default_root_dir=folder)
        gc.collect()  # nobody pays for what the run before left
        engine.fit(Linear(), DataLoader(torch.ones(4 * steps, 8), batch_size=4))  # type: ignore[arg-type]
    return between.us
