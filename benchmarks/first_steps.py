"""What `check_first_steps` costs: its share of a run of 1,000 steps, on two processes of this machine.

    python benchmarks/first_steps.py                      about 5 minutes on 2 cores
    python benchmarks/first_steps.py --steps 20 --output out    does it run? its figures mean nothing

A run is timed from its first batch to its end. The check's time is that of the rank on which it takes longer, and has
all of it: the copy of the module, both times that the weights are gathered, the same steps in one process, and waiting
for rank 0. It is the same for longer runs.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _contestants import QUIET
from lightning.pytorch import Callback, LightningModule, seed_everything
from report import Table, about, write_report
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.models import ByteGPT

STRATEGIES = ("fsdp_fork", "tp_fork", "pp_fork")
SIZES: dict[str, dict[str, int]] = {
    "0.2M": {"num_layers": 4, "num_heads": 4, "dim": 64, "context_length": 64},
}


class Clock(Callback):
    """Writes the seconds of a rank's run, and those of the check."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.began = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        spent = time.perf_counter() - self.began, trainer.fit_loop.epoch_loop.first_steps.duration_s
        torch.save(spent, f"{self.folder}/{trainer.global_rank}.pt")


def measure(size: str, strategy: str, steps: int) -> dict[str, str]:
    """One run."""
    seed_everything(0, verbose=False)
    module = ByteGPT(**SIZES[size], warmup_steps=10)
    rows = torch.randint(256, (8 * steps, SIZES[size]["context_length"] + 1))
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            strategy=strategy, accelerator="cpu", devices=2, max_steps=steps, callbacks=[Clock(folder)], **QUIET
        )
        engine.fit(module, DataLoader(rows, batch_size=8 // engine.data_size))  # type: ignore[arg-type]
        spent = [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]
    run_s, check_s = (max(figures) for figures in zip(*spent, strict=True))
    return {
        "parameters": size,
        "strategy": strategy.removesuffix("_fork"),
        f"{steps} steps, s": f"{run_s:.1f}",
        "the check, s": f"{check_s:.2f}",
        "its share": f"{100 * check_s / run_s:.2f} %",
    }


def main() -> None:
    """All sizes under all strategies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps of a run (default: 1000)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(size, strategy, asked.steps) for size in SIZES for strategy in STRATEGIES]
    table = Table(title=f"ByteGPT, AdamW, global batch 8, {asked.steps} steps on two CPU processes", rows=rows)
    write_report(
        asked.output / "first-steps-cpu.md",
        "The check of the first steps",
        about("python benchmarks/first_steps.py"),
        [table],
        plot=False,
    )


if __name__ == "__main__":
    main()
