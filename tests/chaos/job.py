"""The job that is killed: trains a small module under torchrun, and writes down every sample it trains on.

Usage: job.py FOLDER STRATEGY SAMPLES EPOCHS [PAUSE_S [DROPOUT [FLAGS]]]. Run again, it goes on. It leaves
``weights.pt`` behind when it is done. FLAGS is JSON: of the engine's, ``num_workers`` and ``shuffle`` of the
loader's, ``uses_muon`` and ``has_sequences`` of the module's.

A file ``trap-POINT`` in the folder has the first rank that gets to that point of a start, a save or a load kill itself:
see `POINTS`.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.strategies import layout

BATCH = 2
"""Samples in a batch of one rank."""


POINTS = ("write", "start", "meet", "register", "connect", "rename", "renamed", "prune", "load")
"""Where a trap can be: as a file of a snapshot is opened to be written (the first trap is in the first save); before
the engine is there, before the ranks have a store, before the rank registers in it, and right after that; as a file
gets its name, at the next thing that is done after that, as an older one is removed, as one is read."""


class Traps:
    """Kills this process at a point for which there is a trap, by what Python tells of files (`sys.addaudithook`)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._snapshots = str(folder / "snapshots")
        self._has_renamed = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event.partition(".")[0] not in ("open", "os", "shutil"):
            return
        if self._has_renamed:
            self._has_renamed = False
            self.spring("renamed")
        if not arguments or not str(arguments[0]).startswith(self._snapshots):
            return
        if event == "open":
            mode, flags = str(arguments[1]), int(arguments[2] or 0)
            writes = any(letter in mode for letter in "wxa+") or flags & (os.O_WRONLY | os.O_RDWR)
            if writes or os.path.isfile(arguments[0]):  # folders are opened, too, to be written out
                self.spring("write" if writes else "load")
        elif event == "os.rename":
            self.spring("rename")
            self._has_renamed = True
        elif event in ("os.remove", "os.rmdir", "shutil.rmtree"):
            self.spring("prune")

    def in_meeting(self) -> None:
        """Puts traps around the calls by which ranks find each other."""
        name_of_start, connect = layout.name_of_start, layout.connect

        def meet(*args: Any) -> Any:
            self.spring("meet")
            return name_of_start(*args)

        def register(*args: Any) -> Any:
            self.spring("register")
            job = connect(*args)
            self.spring("connect")
            return job

        layout.name_of_start, layout.connect = meet, register

    def spring(self, point: str) -> None:
        """Kills this process if there is a trap at a point."""
        trap = f"{self._folder}/trap-{point}"
        if os.path.exists(trap):
            try:
                os.rename(trap, f"{trap}-sprung")  # one rank's alone
            except FileNotFoundError:
                return
            os.kill(os.getpid(), signal.SIGKILL)


class Numbered(Dataset[tuple[int, Tensor]]):
    """Rows that know their number."""

    def __init__(self, size: int) -> None:
        self.rows = torch.randn(size, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index]


class Block(nn.Module):
    """A perceptron beside its input, as strategies that split layers or deal blocks out look for."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(dropout)

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.down(self.dropout(torch.relu(self.up(rows))))


class Recorder(LightningModule):
    """Writes a line for each batch: time, epoch, optimizer step, and the numbers of its samples.

    To a file for each start and rank, whose name has the time at which rank 0 started. Of ranks that share their
    samples, the first one writes.
    """

    def __init__(
        self, folder: Path, pause_s: float, dropout: float, uses_muon: bool = False, has_sequences: bool = False
    ) -> None:
        super().__init__()
        self.folder, self.pause_s = folder, pause_s
        self.uses_muon, self.has_sequences = uses_muon, has_sequences
        self.blocks = nn.Sequential(*(Block(dropout) for _ in range(2)))
        self.head = nn.Linear(16, 1)

    def forward(self, rows: Tensor) -> Tensor:
        if self.has_sequences:
            rows = torch.stack([rows * step for step in range(1, 5)], 1)
            return self.head(self.blocks(rows)).mean(1).squeeze(1)
        return self.head(self.blocks(rows)).squeeze(1)

    def on_train_start(self) -> None:
        start = self.trainer.strategy.broadcast(time.time_ns())
        name = f"start-{start:020}-{self.global_rank}.txt"
        sharing: list[Any] = [self.trainer.data_rank]
        if self.trainer.world_size > 1:
            sharing = [None] * self.trainer.world_size
            torch.distributed.all_gather_object(sharing, self.trainer.data_rank)
        is_first = sharing.index(self.trainer.data_rank) == self.global_rank
        self.lines = (self.folder / name).open("x", buffering=1) if is_first else None

    def on_rank_loss(self, lost: Any) -> None:
        self.on_train_start()  # another file: the step of the loss is made again

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        time.sleep(self.pause_s)
        words = (time.time(), self.current_epoch, self.global_step, *batch[0].tolist())
        if self.lines is not None:
            self.lines.write(" ".join(map(str, words)) + "\n")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        _, rows = batch
        return (self(rows) - rows.sum(1)).square().mean()

    def configure_optimizers(self) -> Any:
        if not self.uses_muon:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        matrices = [p for p in self.blocks.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if all(p is not matrix for matrix in matrices)]
        return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


def main(
    folder: Path,
    strategy: str,
    num_samples: int,
    num_epochs: int,
    pause_s: float = 0.0,
    dropout: float = 0.1,
    flags: dict[str, Any] | None = None,
) -> None:
    flags = dict(flags or {})
    flags.pop("num_ranks", None)  # the launcher's
    loading = {name: flags.pop(name, default) for name, default in (("num_workers", 0), ("shuffle", True))}
    of_module = {name: flags.pop(name, False) for name in ("uses_muon", "has_sequences")}
    seed_everything(5)
    snapshot = Snapshot(folder / "snapshots", every_n_steps=3, every_minutes=None)
    engine = Engine(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=num_epochs,
        resume="auto",
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[snapshot],
        **flags,
    )
    module = Recorder(folder, pause_s, dropout, **of_module)
    loader = DataLoader(Numbered(num_samples), batch_size=BATCH, **loading)
    engine.fit(module, loader)
    state = engine.strategy.lightning_module_state_dict()
    if engine.is_global_zero:
        torch.save(state, folder / "unfinished.pt")
        (folder / "unfinished.pt").rename(folder / "weights.pt")


if __name__ == "__main__":
    arguments: list[Any] = sys.argv[1:]
    traps = Traps(Path(arguments[0]))
    traps.spring("start")
    traps.in_meeting()
    sys.addaudithook(traps)
    flags = json.loads(arguments[6]) if len(arguments) > 6 else {}
    numbers = [float(argument) for argument in arguments[4:6]]
    main(Path(arguments[0]), arguments[1], int(arguments[2]), int(arguments[3]), *numbers, flags=flags)
