"""How much of the time ranks that train alone compute, on a slow wire, if an exchange blocks and if it does not.

    python benchmarks/local_wire.py                         as root, on an idle machine: 10 minutes
    python benchmarks/local_wire.py --rounds 1 --output out     does it run?

Two network namespaces (`_namespaces.py`) with a process of one thread in each. ByteGPT with 4.8M parameters, whose
exchange is 19 MB in each direction. The rows take turns, each in processes of its own. The steps after the first H
count, of which each H have one exchange of each parameter; of the exchanges what steps wait for, and their arithmetic.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _contestants import QUIET, settle
from _namespaces import Namespaces
from lightning.pytorch import Callback, seed_everything
from overhead import spread, uncommitted
from report import Table, about, write_report

from polyphase.engine import Engine
from polyphase.models import ByteGPT, PythonSource

EVERY = 64
NUM_STEPS = 4 * EVERY
ALONE = "no exchange"
ROWS = {
    ALONE: f"diloco:sync_every={EVERY * 100}",
    "diloco": f"diloco:sync_every={EVERY}",
    "diloco, 4 fragments": f"diloco:sync_every={EVERY},fragments=4",
    "diloco, overlap": f"diloco:sync_every={EVERY},overlap_steps={EVERY - 1}",
    "diloco, 4 fragments, overlap": f"diloco:sync_every={EVERY},fragments=4,overlap_steps={EVERY // 4}",
}


class Clock(Callback):
    """Writes down the seconds that rank 0 takes for a step after the first `EVERY`, and those of its exchanges."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.exchanging_s = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        end_step = trainer.strategy._end_step

        def timed(step: int) -> None:
            began_s = time.perf_counter()
            end_step(step)
            self.exchanging_s += time.perf_counter() - began_s

        trainer.strategy._end_step = timed

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == EVERY:
            self.exchanging_s, self.began_s = 0.0, time.perf_counter()
        elif trainer.global_step == NUM_STEPS and trainer.is_global_zero:
            seconds = time.perf_counter() - self.began_s
            self.path.write_text(json.dumps([s / (NUM_STEPS - EVERY) for s in (seconds, self.exchanging_s)]))


def work(strategy: str, output: Path) -> None:
    """One rank's part of a row."""
    settle()
    seed_everything(0, verbose=False)
    module = ByteGPT(num_layers=6, dim=256, num_heads=4, context_length=64)
    data = PythonSource(1, 64, max_bytes=64 * 2 * (NUM_STEPS + 1) + 1, max_val_bytes=1000)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            strategy=strategy, devices=1, num_nodes=2, accelerator="cpu", callbacks=[Clock(output)],
            default_root_dir=folder, limit_val_batches=0, **{**QUIET, "max_epochs": -1, "max_steps": NUM_STEPS},
        )  # fmt: skip
        engine.fit(module, datamodule=data)


def measure(row: str, rate: str) -> tuple[float, float]:
    """Seconds of a step, and those of its exchanges."""
    with tempfile.TemporaryDirectory() as folder, Namespaces(rate) as net:
        output = Path(folder) / "seconds.json"
        net.torchrun([__file__, "--row", row, "--to", str(output)])
        step_s, exchanging_s = json.loads(output.read_text())
        return step_s, exchanging_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit", help="of the wire, in each direction")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.to is not None:
        work(ROWS[options.row], options.to)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by which the namespaces are removed
    times_s: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS}
    for number in range(options.rounds):
        for row in ROWS:
            times_s[row].append(measure(row, options.rate))
            print(f"  round {number + 1}, {row}: {times_s[row][-1]}", file=sys.stderr, flush=True)
    rows = [
        {
            "row": row,
            "strategy": strategy if row != ALONE else "",
            "step, ms": spread([1e3 * step_s for step_s, _ in times_s[row]], 1),
            "of it exchanges, ms": spread([1e3 * exchanging_s for _, exchanging_s in times_s[row]], 1),
            "rest, %": spread([100 * (1 - exchanging_s / step_s) for step_s, exchanging_s in times_s[row]], 1),
        }
        for row, strategy in ROWS.items()
    ]
    where = about(shlex.join(["python", "benchmarks/local_wire.py", *sys.argv[1:]])) + uncommitted()
    title = (
        f"{options.rate}, H = {EVERY}: means of {NUM_STEPS - EVERY} steps (medians; least to greatest of the rounds)"
    )
    tables = [Table(title=title, rows=rows)]
    write_report(
        options.output / "local-wire-cpu.md", "Ranks that train alone, on a slow wire", where, tables, plot=False
    )


if __name__ == "__main__":
    main()
