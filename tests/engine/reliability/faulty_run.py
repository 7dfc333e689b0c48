"""A run in which one rank gets into trouble. Usage: faulty_run.py STRATEGY DEVICES RANK TROUBLE TIMEOUT_S."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.reliability import watchdog

AT = 24
"""Number of the batch; the ranks have heard of each other by then."""


class Rows(Dataset[Tensor]):
    """Can be slow."""

    is_stuck = False
    is_stuck_at: int | None = None

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> Tensor:
        if index // 2 == self.is_stuck_at:
            Path(f"worker{os.getpid()}.pid").write_text(str(os.getpid()))
        if self.is_stuck or index // 2 == self.is_stuck_at:
            time.sleep(100)
        return torch.ones(4)


class Troubled(LightningModule):
    """Does what it is told to, on one rank."""

    def __init__(self, rank: int, trouble: str) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.rows = Rows()
        self.rank, self.trouble = rank, trouble

    def setup(self, stage: str) -> None:
        if self._meets("exit_early"):
            os._exit(0)

    def _meets(self, trouble: str) -> bool:
        return self.global_rank == self.rank and self.trouble == trouble

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.06)
        Path(f"rank{self.global_rank}.pid").write_text(str(os.getpid()))
        if batch_idx == AT:
            self._trouble()
        factor = float("nan") if batch_idx == AT - 7 and self._meets("nan") else 1.0
        return factor * self.layer(batch).sum()

    def _trouble(self) -> None:
        me = os.getpid()
        if self._meets("sleep"):
            time.sleep(100)
        elif self._meets("sleep_deaf"):  # torch has workers sent SIGINT when their parent ends
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(100)
        elif self._meets("raise"):
            raise ValueError("this rank has had enough")
        elif self._meets("loader"):
            self.rows.is_stuck = True
        elif self.trouble in ("interrupt", "interrupt_slowly"):  # as a terminal does
            for _ in range(100):  # once more stops within the step
                if self.global_rank == self.rank:
                    os.killpg(0, signal.SIGINT)
                time.sleep(1)
        elif self._meets("interrupt_once"):
            os.killpg(0, signal.SIGINT)
        elif self._meets("pause"):  # as when a laptop is closed
            subprocess.Popen(["sh", "-c", f"kill -STOP {me}; sleep 4; kill -CONT {me}"])
            time.sleep(1)
        elif self._meets("stop"):
            os.kill(me, signal.SIGSTOP)
        elif self.trouble in ("kill", "kill_unnoticed"):
            self._kill()

    def _kill(self) -> None:
        if self.global_rank == self.rank:
            Path("killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.trouble == "kill_unnoticed":
            time.sleep(100)  # no collective tells this rank

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == AT - 1 and self._meets("nan"):
            time.sleep(2)  # the others look first, who have it too by now

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self._meets("validation") and batch_idx == 2:
            time.sleep(100)

    def on_validation_epoch_end(self) -> None:
        if self.trouble == "barrier" and self.global_rank != self.rank:
            dist.barrier()

    def on_train_end(self) -> None:
        if self._meets("kill_late"):  # when the others wait for this rank to take its connections down
            self.trainer.strategy.teardown = lambda: (time.sleep(1), self._kill())

    def on_fit_end(self) -> None:
        if self._meets("late"):
            time.sleep(5)
        elif self._meets("late_for_ever"):
            time.sleep(100)

    def train_dataloader(self) -> Any:
        if self.trouble == "loader_worker":
            self.rows.is_stuck_at = AT
            return DataLoader(self.rows, batch_size=1, num_workers=1)
        if self.trouble == "interrupt_once":  # a spawned worker would end
            return DataLoader(self.rows, batch_size=1, num_workers=1, multiprocessing_context="fork")
        return DataLoader(self.rows, batch_size=1)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SlowToEnd(Callback):
    """Takes its time when the run is interrupted, on rank 0."""

    def on_exception(self, trainer: Any, pl_module: LightningModule, exception: BaseException) -> None:
        if trainer.is_global_zero:
            time.sleep(12)
            Path("saved").touch()


def main(strategy: str, devices: str, rank: str, trouble: str, timeout_s: str) -> None:
    if trouble == "alone":
        watchdog._CONNECTING_S = 1.0
    if trouble == "absent":
        watchdog._IMPORTING_S = 1.0
        if os.environ.get("LOCAL_RANK", "0") == rank:
            time.sleep(200)
    engine = Engine(
        strategy=strategy,
        accelerator="cpu",
        devices=int(devices),
        hang_timeout_s=float(timeout_s),
        max_epochs=1,
        limit_train_batches=32,
        limit_val_batches=4,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Snapshot("snapshots", every_n_steps=10), *([SlowToEnd()] if trouble == "interrupt_slowly" else [])],
        nonfinite="error",
        log_every_n_steps=8,
    )
    engine.fit(Troubled(int(rank), trouble))
    print(f"rank {engine.global_rank} is done")


if __name__ == "__main__":
    main(*sys.argv[1:])
