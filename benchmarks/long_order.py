"""How long a run over very many samples takes to its first step, and what memory its order of samples needs.

    python benchmarks/long_order.py                      10^7 samples, 5 rounds; about 10 minutes on 2 cores
    python benchmarks/long_order.py --samples 1000000

Contestants: Engine and Lightning's Trainer, each over a shuffled map-style data set, in one process and with DDP on
two; and Engine resumed after 90 % of an epoch, which Trainer does not do: it begins the order again. The time is from
`on_fit_start`, by when all processes have met, to the first `training_step`; the memory is the resident set of the
process by then, over what it was at `on_fit_start`; CPU is the process's own time, which others on the machine lengthen
little. Of two ranks the larger figures count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from _contestants import QUIET
from lightning.pytorch import LightningModule, Trainer, seed_everything
from report import Table, about, write_report
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from polyphase.engine import Engine

STEPS = 1000
"""Steps of an epoch, of all ranks together."""


class Numbers(Dataset[Tensor]):
    """Samples that cost nothing."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [torch.zeros(1)]


class Clocked(LightningModule):
    """Notes when the first step begins, and with what memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.figures: dict[str, float] = {}

    def on_fit_start(self) -> None:
        self.start, self.start_of_cpu = time.perf_counter(), time.process_time()
        self.base = psutil.Process().memory_info().rss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if not self.figures:
            more = psutil.Process().memory_info().rss - self.base
            cpu = time.process_time() - self.start_of_cpu
            self.figures = {"seconds": time.perf_counter() - self.start, "cpu": cpu, "megabytes": more / 1e6}
        return self.layer(batch).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def measure(flags: argparse.Namespace) -> None:
    """One run, which each rank writes the figures of into `flags.run`."""
    seed_everything(1, verbose=False)
    saved, steps = flags.run / "saved.ckpt", 3 + (STEPS * 9 // 10 if flags.case == "resumed" else 0)
    trains: dict[str, Any] = {**QUIET, "accelerator": "cpu", "devices": flags.devices, "max_steps": steps}
    if flags.devices > 1:
        trains["strategy"] = "ddp"
    module, loader = (
        Clocked(),
        DataLoader(Numbers(flags.samples), flags.samples // STEPS // flags.devices, shuffle=True),
    )
    if flags.case == "saving":
        trainer = Engine(**{**trains, "max_steps": STEPS * 9 // 10})
        trainer.fit(module, loader)
        trainer.save_checkpoint(saved)
        return
    trainer = {"Engine": Engine, "Trainer": Trainer}[flags.contestant](**trains)
    trainer.fit(module, loader, ckpt_path=saved if flags.case == "resumed" else None)
    (flags.run / f"rank{trainer.global_rank}.json").write_text(json.dumps(module.figures))


def started(folder: Path, samples: int, case: str, contestant: str, devices: int) -> dict[str, float]:
    """The figures of one run in processes of its own."""
    numbers = ["--samples", str(samples), "--devices", str(devices)]
    command = [sys.executable, __file__, "--run", str(folder), "--case", case, "--contestant", contestant, *numbers]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(devices) if case != "saving"]
    return {name: max(figures[name] for figures in found) for name in found[0]} if found else {}


def spread(values: list[float], form: str) -> str:
    """Median, least and greatest."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def table(samples: int, rounds: int) -> Table:
    runs = [("fresh", "Trainer", 1), ("fresh", "Engine", 1), ("resumed", "Engine", 1)]
    runs += [(case, name, 2) for case, name, _ in runs]
    found: dict[Any, list[dict[str, float]]] = {run: [] for run in runs}
    drawn, drawn_cpu = [], []
    with tempfile.TemporaryDirectory() as name:
        folders = {devices: Path(name, str(devices)) for devices in (1, 2)}
        for devices, folder in folders.items():
            folder.mkdir()
            started(folder, samples, "saving", "Engine", devices)
        for _ in range(rounds):
            start, start_of_cpu = time.perf_counter(), time.process_time()
            torch.randperm(samples)
            drawn.append(time.perf_counter() - start)
            drawn_cpu.append(time.process_time() - start_of_cpu)
            for run in runs:
                found[run].append(started(folders[run[2]], samples, *run))
    alone = {"to the first step, s": spread(drawn, ".2f"), "CPU, s": spread(drawn_cpu, ".2f"), "MB": ""}
    rows = [{"run": "torch.randperm alone", "ranks": "", **alone}]
    for run, figures in found.items():
        seconds, cpu, megabytes = ([one[name] for one in figures] for name in ("seconds", "cpu", "megabytes"))
        columns = {"to the first step, s": spread(seconds, ".2f"), "CPU, s": spread(cpu, ".2f")}
        columns["MB"] = spread(megabytes, ".0f")
        rows.append({"run": f"{run[1]}, {run[0]}", "ranks": str(run[2]), **columns})
    return Table(title=f"{samples:,} samples, shuffled", rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10**7, help="of the data set")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each contestant")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    for name in ("--run", "--case", "--contestant", "--devices"):
        parser.add_argument(name, type={"--run": Path, "--devices": int}.get(name, str), help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.run:
        measure(flags)
        return
    where = about("python " + " ".join(["benchmarks/long_order.py", *sys.argv[1:]]))
    title = "The first step of a run over many samples"
    report = table(flags.samples, flags.rounds)
    write_report(flags.output / "long-order-cpu.md", title, where, [report], plot=False)


if __name__ == "__main__":
    main()
