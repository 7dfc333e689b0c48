"""Whether ranks that train alone for H steps end where ddp does: losses after the same samples, and what is sent.

    python benchmarks/local.py                                  all of it, into benchmarks/results: 15 minutes
    python benchmarks/local.py --steps 40 --output out          does it run? its figures mean nothing
    python benchmarks/local.py --only ddp diloco:sync_every=16       some of the rows

ByteGPT with its own AdamW and schedule, on the source of Python's standard library, on 4 CPU processes. First weights,
order of the data, global batch and hyper-parameters are the same in every row.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _contestants import QUIET, settle
from convergence import gpt_loss
from lightning.pytorch import Callback, LightningModule, seed_everything
from report import Table, about, write_report

from polyphase.engine import Engine
from polyphase.models import ByteGPT, PythonSource

DEVICES = 4
GLOBAL_BATCH = 32
CONTEXT = 32
# Strategy, and compression behind a blank.
ROWS = (
    "ddp",
    "local_sgd:sync_every=4",
    "local_sgd:sync_every=16",
    "local_sgd:sync_every=16,warmup={tenth}",
    "diloco:sync_every=16",
    "diloco:sync_every=16,warmup={tenth}",
    "diloco:sync_every=64,warmup={tenth}",
    "diloco:sync_every=16 int8",
    "diloco:sync_every=16 sign",
    "diloco:sync_every=16 topk:0.05",
    "diloco:sync_every=16 topk:0.125,chunk=512,bits=2",
    "diloco:sync_every=16,overlap_steps=4",
    "diloco:sync_every=16,fragments=4,overlap_steps=4",
    "local_sgd:sync_every=16 topk:0.125,chunk=512,bits=2,decay=0.95",
    "local_sgd:sync_every=16,fragments=4,overlap_steps=4 topk:0.125,chunk=512,bits=2,decay=0.95",
    "local_sgd:sync_every=16 topk:0.05,chunk=4096,bits=2,decay=0.95",
)


class Sent(Callback):
    """Writes down what rank 0 has sent: it is another process than the one that reports."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.counts_traffic = True

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(sum(sum(wire.sent.values()) for wire in trainer.strategy.wires)))


def train(row: str, steps: int, seed: int) -> tuple[float, float]:
    """Loss on new text at the end, in nats per byte, and MB that rank 0 has sent in a step."""
    seed_everything(seed, verbose=False)
    strategy, _, compression = row.format(tenth=steps // 10).partition(" ")
    name, colon, options = strategy.partition(":")
    module = ByteGPT(num_layers=2, num_heads=2, dim=64, context_length=CONTEXT, warmup_steps=steps // 10)
    data = PythonSource(
        GLOBAL_BATCH // DEVICES, CONTEXT, max_bytes=CONTEXT * GLOBAL_BATCH * 2000 + 1, max_val_bytes=64_000
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sent.json"
        engine = Engine(
            strategy=f"{name}_fork{colon}{options}", devices=DEVICES, accelerator="cpu",
            compression=compression or "none", callbacks=[Sent(path)], default_root_dir=folder, limit_val_batches=0,
            **{**QUIET, "max_epochs": -1, "max_steps": steps},
        )  # fmt: skip
        engine.fit(module, datamodule=data)
        sent_bytes = json.loads(path.read_text())
    data.setup("fit")
    return gpt_loss(module.eval(), data), sent_bytes / steps / 1e6


def measure(names: list[str], steps: int, num_seeds: int) -> list[dict[str, str]]:
    """The rows of the table."""
    rows: list[dict[str, str]] = []
    base = math.nan
    for name in names:
        began = time.perf_counter()
        runs = [train(name, steps, seed) for seed in range(num_seeds)]
        loss, sent_mb = (sum(values) / num_seeds for values in zip(*runs, strict=True))
        base = loss if name == "ddp" else base
        rows.append({
            "strategy": name,
            "loss on new text": f"{loss:.3f}",
            "of ddp's": f"{100 * (loss / base - 1):+.1f} %",
            "MB sent in a step": f"{sent_mb:.4f}",
        })  # fmt: skip
        print(f"  {rows[-1]}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps of each rank")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each row, whose mean is taken")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=ROWS, help="rows of the table")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    options = parser.parse_args()
    settle()
    names = [name for name in ROWS if not options.only or name in options.only]
    only = f" --only {' '.join(repr(name) for name in names)}" if options.only else ""
    where = about(f"python benchmarks/local.py --steps {options.steps} --seeds {options.seeds}{only}")
    rows = measure(names, options.steps, options.seeds)
    title = f"At the end, {DEVICES} processes: nats per byte; {{tenth}} is that of the steps"
    write_report(
        options.output / "local-cpu.md", "Ranks that train alone", where, [Table(title=title, rows=rows)], plot=False
    )


if __name__ == "__main__":
    main()
