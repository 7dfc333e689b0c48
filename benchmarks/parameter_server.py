"""Where asynchronous training ends, and what it spares: losses after equally many samples, and times of a step.

    python benchmarks/parameter_server.py                           into benchmarks/results: 8 minutes
    python benchmarks/parameter_server.py --steps 40 --output out   does it run? its figures mean nothing

ByteGPT with its own optimizer and schedule on the source of Python's standard library, on 3 CPU processes. First
weights, order of the data and hyper-parameters are the same in every row. In the columns with stragglers each process,
in one step of ten, by chance, takes 50 ms longer: synchronous training waits for each of them.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _contestants import QUIET, settle
from convergence import gpt_loss
from lightning.pytorch import Callback, LightningModule, seed_everything
from report import Table, about, write_report

from polyphase.engine import Engine
from polyphase.models import ByteGPT, PythonSource

DEVICES, BATCH = 3, 8
FLAGS = ("ddp", "ps:staleness=0", "ps:staleness=4", "ps:staleness=4,patience=0", "ps:staleness=16")
STRAGGLE_S, STRAGGLE_SHARE = 0.05, 0.1


class GPT(ByteGPT):
    """Takes its time now and then, if it is to."""

    straggles = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.straggles and random.Random(f"{batch_idx} {self.global_rank}").random() < STRAGGLE_SHARE:
            time.sleep(STRAGGLE_S)
        return super().training_step(batch, batch_idx)


class Clock(Callback):
    """Writes rank 0's time between the first steps and the end, and what its server has seen."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: LightningModule, outputs: Any, batch: Any, idx: int) -> None:
        if idx == 4:
            self.began, self.first = time.perf_counter(), idx

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            step_ms = 1e3 * (time.perf_counter() - self.began) / (trainer.global_step - 1 - self.first)
            seen = getattr(trainer.strategy, "staleness", {})
            self.path.write_text(json.dumps({"step_ms": step_ms, "staleness": seen}))


def train(flag: str, steps: int, *, straggles: bool) -> tuple[float, dict[str, Any]]:
    """The loss on new text at the end, and what `Clock` has written."""
    seed_everything(0, verbose=False)
    module = GPT(num_layers=2, num_heads=2, dim=32, context_length=32)
    module.straggles = straggles
    data = PythonSource(BATCH, 32, max_bytes=32 * BATCH * DEVICES * steps + 1, max_val_bytes=64_000)
    name, colon, options = flag.partition(":")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clock.json"
        engine = Engine(
            strategy=f"{name}_fork{colon}{options}", devices=DEVICES, accelerator="cpu", callbacks=[Clock(path)],
            default_root_dir=folder, limit_val_batches=0, **{**QUIET, "max_epochs": 1},
        )  # fmt: skip
        engine.fit(module, datamodule=data)
        found = json.loads(path.read_text())
    data.setup("fit")
    return gpt_loss(module.eval(), data), found


def described(staleness: dict[str, int]) -> str:
    """Its mean and maximum."""
    if not staleness:
        return ""
    counts = {int(behind): number for behind, number in staleness.items()}
    mean = sum(behind * number for behind, number in counts.items()) / sum(counts.values())
    return f"{mean:.2f}, {max(counts)}"


def measure(steps: int) -> list[dict[str, str]]:
    """The rows of the table."""
    rows, base = [], 0.0
    for flag in FLAGS:
        row = {"strategy": flag}
        for straggles in (False, True):
            loss, found = train(flag, steps, straggles=straggles)
            base = base or loss
            kind = ", stragglers" if straggles else ""
            row[f"loss{kind}"] = f"{loss:.3f} ({100 * (loss / base - 1):+.1f} %)"
            row[f"step, ms{kind}"] = f"{found['step_ms']:.1f}"
            row[f"staleness: mean, max{kind}"] = described(found["staleness"])
        print(f"  {row}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    options = parser.parse_args()
    settle()
    where = about(f"python benchmarks/parameter_server.py --steps {options.steps}")
    rows = measure(options.steps)
    title = f"ByteGPT, {DEVICES} processes, {options.steps} steps of {DEVICES * BATCH} samples: loss on new text, nats"
    path = options.output / "parameter-server-cpu.md"
    write_report(path, "Parameter server", where, [Table(title=title, rows=rows)], plot=False)


if __name__ == "__main__":
    main()
