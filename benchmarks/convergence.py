"""Whether training under a lossy compression ends where it ends without one: losses after equally many steps.

    python benchmarks/convergence.py                            all of it, into benchmarks/results: less than 30 minutes
    python benchmarks/convergence.py --steps 40 --output out    does it run? its figures mean nothing
    python benchmarks/convergence.py --only none topk:0.01      some of the rows

ByteGPT on the source of Python's standard library and DigitsClassifier on scikit-learn's digits, on 2 and on 4 CPU
processes with the same global batch. First weights, order of the data and hyper-parameters are the same in every row.
The lossy methods run without error feedback, too: those rows say what the feedback is good for.
"""

import argparse
import csv
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
import torch
from _contestants import QUIET, settle
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from report import Table, about, write_report
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn import functional

from polyphase.engine import Engine
from polyphase.models import ByteGPT, Digits, DigitsClassifier, PythonSource

# {tenth}: of the steps, as the papers have it (see docs/compression.md).
FEEDBACK = (
    "none",
    "bf16",
    "fp16",
    "int8:feedback=true",
    "powersgd:4,start={tenth}",
    "powersgd:4,start={tenth}+fp16",
    "topk:0.1,start={tenth}",
    "topk:0.01,start={tenth}",
    "sign:start={tenth}",
)
WITHOUT = (
    "int8",
    "powersgd:4,start={tenth},feedback=false",
    "topk:0.01,start={tenth},feedback=false",
    "sign:start={tenth},feedback=false",
)
CURVE_POINTS = 25


def momentum(self: Any) -> OptimizerLRSchedulerConfig:
    """SGD with Nesterov's momentum; linear warm-up over a tenth of the steps, then a cosine to zero.

    Not the models' own AdamW. Error feedback promises that the *sum* of the averages follows the sum of the gradients
    (Karimireddy et al. 2019, Vogels et al. 2019: SGD, with momentum), which is what a linear optimizer adds up to
    weights. Adam divides each average by its own running magnitude: a value that topk sends once in a hundred steps,
    a hundred times as large, moves its weight by a few learning rates, not by a hundred (Tang et al. 2021,
    arXiv:2102.02888, who therefore freeze Adam's variance before they compress).
    """
    steps = int(self.trainer.estimated_stepping_batches)
    warmup = max(1, steps // 10)
    optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True)

    def factor(step: int) -> float:
        return min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warmup) / (steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class GPT(ByteGPT):
    configure_optimizers = momentum


class Classifier(DigitsClassifier):
    configure_optimizers = momentum


@torch.no_grad()
def gpt_loss(module: LightningModule, data: Any) -> float:
    """Nats per byte of all text to validate on."""
    windows = torch.stack(list(data.val))
    losses = [functional.cross_entropy(module(w[:, :-1]).transpose(1, 2), w[:, 1:]) * len(w) for w in windows.split(64)]
    return float(sum(losses)) / len(windows)


@torch.no_grad()
def digits_accuracy(module: LightningModule, data: Any) -> float:
    """Per cent right of all images that were not trained on: two parts, for a finer figure."""
    images, classes = (torch.cat([data.parts[p].tensors[i] for p in ("val", "test")]) for i in range(2))
    return 100 * float((module(images).argmax(1) == classes).float().mean())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its data and what is measured of it at the end."""

    name: str
    module: Callable[[], LightningModule]
    data: Callable[[int], LightningDataModule]
    """Of a batch size per process."""
    global_batch: int
    measure: Callable[[LightningModule, Any], float]
    steps: float
    """Share of --steps."""
    num_seeds: int
    is_relative: bool
    """Whether differences are in per cent of `none`; otherwise they are in points."""


CASES = (
    Case(
        name="GPT",
        # Small, so that it has learnt most of what it will within the steps.
        module=lambda: GPT(num_layers=1, num_heads=2, dim=32, context_length=32, lr=0.3),
        # A multiple of the global batch: no odd last one.
        data=lambda size: PythonSource(size, 32, max_bytes=32 * 16 * 2000 + 1, max_val_bytes=64_000),
        global_batch=16,
        measure=gpt_loss,
        steps=1,
        num_seeds=1,
        is_relative=True,
    ),
    Case(
        name="digits",
        module=lambda: Classifier(lr=0.05),
        data=Digits,
        global_batch=32,
        measure=digits_accuracy,
        steps=0.1,
        num_seeds=3,
        is_relative=False,
    ),
)


class Curve(Callback):
    """Rank 0's losses, into a file at the end: it is another process than the one that plots."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.losses))


def train(case: Case, compression: str, devices: int, steps: int, seed: int) -> tuple[float, list[float]]:
    """What is measured at the end, and rank 0's losses; NaN where training was stopped by what is not finite."""
    seed_everything(seed, verbose=False)
    module, data = case.module(), case.data(case.global_batch // devices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses.json"
        engine = Engine(
            strategy="ddp_fork", devices=devices, accelerator="cpu", compression=compression.format(tenth=steps // 10),
            callbacks=[Curve(path)], default_root_dir=folder, limit_val_batches=0,
            **{**QUIET, "max_epochs": -1, "max_steps": steps},
        )  # fmt: skip
        try:
            engine.fit(module, datamodule=data)
        except ProcessRaisedException as error:
            if "infinite or NaN" not in str(error):
                raise
            return math.nan, []
        losses = json.loads(path.read_text())
    data.setup("fit")
    return case.measure(module.eval(), data), losses


def cell(case: Case, values: list[float], plain: list[float]) -> str:
    """The mean over the seeds, and how far it is from that of `none`."""
    value, base = statistics.mean(values), statistics.mean(plain or [math.nan])
    if math.isnan(value):
        return "diverged"
    shown = f"{value:.3f}" if case.is_relative else f"{value:.2f} %"
    if values is plain or math.isnan(base):
        return shown
    return f"{shown} ({100 * (value / base - 1):+.1f} %)" if case.is_relative else f"{shown} ({value - base:+.2f})"


def measure(names: list[str], steps: int) -> tuple[list[dict[str, str]], dict[str, list[float]]]:
    """The rows of the table, and the losses of the first case on 2 processes."""
    rows = [{"compression": name} for name in names]
    curves: dict[str, list[float]] = {}
    for case in CASES:
        for devices in (2, 4):
            plain: list[float] = []
            for name, row in zip(names, rows, strict=True):
                began = time.perf_counter()
                num_steps = max(1, round(steps * case.steps))
                runs = [train(case, name, devices, num_steps, seed) for seed in range(case.num_seeds)]
                values = [value for value, _ in runs]
                plain = values if name == "none" else plain
                column = f"{case.name} x{devices}"
                row[column] = cell(case, values, plain)
                curves |= {name: runs[0][1]} if case is CASES[0] and devices == 2 else {}
                took_s = time.perf_counter() - began
                print(f"  {column}, {name}: {row[column]}, {took_s:.0f} s", file=sys.stderr, flush=True)
    return rows, curves


def keep(path: Path, curves: dict[str, list[float]]) -> None:
    """Writes means over as many parts of the run, and draws them where matplotlib is installed."""
    size = max(1, len(next(iter(curves.values()))) // CURVE_POINTS)
    starts = range(0, len(next(iter(curves.values()))), size)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *curves])
        for i in starts:
            means = (statistics.mean(losses[i : i + size]) for losses in curves.values())
            writer.writerow([i + size // 2, *(f"{mean:.4f}" for mean in means)])
    if importlib.util.find_spec("matplotlib"):
        figures.convergence(path)
    else:
        print("(no plot: matplotlib is not installed)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="steps of the GPT; the digits have a tenth of them")
    parser.add_argument("--only", nargs="+", metavar="FLAG", choices=FEEDBACK + WITHOUT, help="rows of the table")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    options = parser.parse_args()
    settle()
    names = [name for name in FEEDBACK + WITHOUT if not options.only or name in options.only]
    only = f" --only {' '.join(names)}" if options.only else ""
    where = about(f"python benchmarks/convergence.py --steps {options.steps}{only}")  # before: the commit may move on
    rows, curves = measure(names, options.steps)
    title = "At the end: loss on new text, nats per byte (one layer, 32 dims); accuracy on new digits (mean of 3 seeds)"
    path = options.output / "convergence-cpu.md"
    write_report(path, "Convergence under compression", where, [Table(title=title, rows=rows)], plot=False)
    keep(path.with_suffix(".svg"), curves)


if __name__ == "__main__":
    main()
