"""Losses under each precision of the blocks beside float32's, after equally many steps on a CPU.

    python benchmarks/precisions.py                            into benchmarks/results: some minutes
    python benchmarks/precisions.py --steps 20 --output out    does it run? its figures mean nothing

ByteGPT on the source of Python's standard library, under `single`, with the same first weights, batches and settings in
each row. A CPU rounds as a GPU does; but on a GPU autocast computes norms in float32.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from _contestants import QUIET
from lightning.pytorch import Callback, seed_everything
from report import Table, about, write_report

from polyphase.engine import Engine
from polyphase.models import ByteGPT, PythonSource

PRECISIONS = ("32-true", "bf16-mixed", "bf16-blocks", "float8", "float8-rowwise")
NUM_PARTS = 5
"""The curve's points, each the mean of so many equal parts of the run."""


class Losses(Callback):
    """Of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def curve(precision: str, steps: int) -> dict[str, str]:
    """A row of the table."""
    seed_everything(0, verbose=False)
    losses, data = Losses(), PythonSource(8, 64, max_bytes=64 * 8 * (steps + 1) + 1)
    engine = Engine(precision=precision, max_steps=steps, accelerator="cpu", callbacks=[losses], **QUIET)
    engine.fit(ByteGPT(num_layers=4, num_heads=4, dim=64, context_length=64), data)
    validated = engine.validate(engine.lightning_module, data, verbose=False)[0]["val/loss"]
    parts = torch.tensor(losses.losses[: steps // NUM_PARTS * NUM_PARTS]).view(NUM_PARTS, -1).mean(1)
    columns = {f"steps to {(i + 1) * steps // NUM_PARTS}": f"{loss:.3f}" for i, loss in enumerate(parts.tolist())}
    return {"precision": precision, **columns, "new text": f"{validated:.3f}"}


def main() -> None:
    """Writes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="of each run")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    flags = parser.parse_args()
    rows = [curve(precision, flags.steps) for precision in PRECISIONS]
    tables = [Table(title="Mean loss while training, and at the end on new text, in nats per byte", rows=rows)]
    where = about("python " + " ".join(["benchmarks/precisions.py", *sys.argv[1:]]))
    write_report(flags.output / "precisions-cpu.md", "Losses by precision", where, tables, plot=False)


if __name__ == "__main__":
    main()
