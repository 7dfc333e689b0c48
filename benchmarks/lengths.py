"""What is computed for nothing where sequences differ in length, and how long ranks wait for one another.

    python benchmarks/lengths.py                  counted for 1 to 8 ranks, measured on 2; some minutes on 2 cores

The sequences are the paragraphs of Python's standard library, in bytes, cut to 512. Contestants: batches of equally
many samples in random order, padded to the longest or packed in rows of 512; and `LengthBucketing`, padded or packed in
one row of its budget. *Useful* are the tokens of sequences among all that are computed. *Skew* is how much longer the
slowest rank of a step takes than the mean of all ranks, over the whole epoch: by tokens where it is counted, and by the
CPU time of forward and backward where it is measured, which other processes of the machine lengthen little.
"""

import argparse
import json
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _contestants import QUIET
from lightning.pytorch import seed_everything
from report import Table, about, write_report
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from polyphase.engine import Engine
from polyphase.engine.data import LengthBucketing, PackSequences
from polyphase.engine.data.global_order import GlobalOrder
from polyphase.models import ByteGPT

LONGEST, BUDGET, SAMPLES = 512, 2048, 10
"""Tokens of a sequence and of a bucketed batch at most; samples of a batch in random order, about as many tokens."""
Samples = list[dict[str, list[int]]]


def paragraphs() -> Samples:
    texts = [path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))]
    parts = [part.strip() for text in texts for part in re.split(rb"\n\s*\n", text) if part.strip()]
    return [{"input_ids": list(part[i : i + LONGEST])} for part in parts for i in range(0, len(part), LONGEST)]


def padded(samples: Samples) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    one_each = [PackSequences(longest)([sample]) for sample in samples]
    return {name: torch.cat([batch[name] for batch in one_each]) for name in one_each[0]}


def contestants(samples: Samples) -> dict[str, tuple[Any, Callable[[Samples], dict[str, Tensor]]]]:
    lengths = [len(sample["input_ids"]) for sample in samples]
    shuffled, bucketed = BatchSampler(RandomSampler(lengths), SAMPLES, True), LengthBucketing(lengths, BUDGET)
    return {
        "random order, padded": (shuffled, padded),
        f"random order, packed in rows of {LONGEST}": (shuffled, PackSequences(LONGEST)),
        "LengthBucketing, padded": (bucketed, padded),
        f"LengthBucketing, packed in a row of {BUDGET}": (bucketed, PackSequences(BUDGET)),
    }


def skew(costs: list[tuple[float, ...]]) -> str:
    """Of each step, the cost of each rank."""
    mean = sum(sum(step) / len(step) for step in costs)
    return f"{sum(map(max, costs)) / mean - 1:.1%}"


def counted(samples: Samples, num_ranks: int) -> list[dict[str, str]]:
    rows = []
    for name, (batches, collate) in contestants(samples).items():
        dealt = []
        for rank in range(num_ranks):
            torch.manual_seed(0)  # all ranks draw one order
            order = GlobalOrder(batches, num_replicas=num_ranks, rank=rank, drop_last=True)
            dealt.append([[samples[index] for index in batch] for batch in order])
        costs = [tuple(collate(batch)["input_ids"].numel() for batch in step) for step in zip(*dealt, strict=True)]
        useful = sum(len(sample["input_ids"]) for batches in dealt for batch in batches for sample in batch)
        share = f"{useful / sum(map(sum, costs)):.1%}"
        rows.append({"batches": name, "ranks": str(num_ranks), "useful": share, "skew": skew(costs)})
    return rows


class Clocked(ByteGPT):
    """Notes the CPU time of forward and backward in each step, and the tokens that were useful."""

    folder: Path

    def on_train_start(self) -> None:
        self.seconds: list[float] = []
        self.useful = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Each sequence has one token that nothing predicts, the first one.
        self.useful += int((batch["labels"] >= 0).sum())
        self.since = time.thread_time()

    def on_after_backward(self) -> None:
        self.seconds.append(time.thread_time() - self.since)

    def on_train_end(self) -> None:
        found = {"seconds": self.seconds[5:], "useful": self.useful * (1 - 5 / len(self.seconds))}
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(found))


def measured(samples: Samples, steps: int, folder: Path) -> list[dict[str, str]]:
    rows = []
    for name, (batches, collate) in contestants(samples).items():
        seed_everything(0, verbose=False)
        module = Clocked(num_layers=2, num_heads=2, dim=64, context_length=BUDGET)
        module.folder = folder
        trains: dict[str, Any] = {**QUIET, "accelerator": "cpu", "max_steps": steps, "max_epochs": 1}
        loader = DataLoader(samples, batch_sampler=batches, collate_fn=collate)  # type: ignore[arg-type]
        Engine(strategy="ddp_fork", devices=2, **trains).fit(module, loader)
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        seconds = sum(sum(rank["seconds"]) for rank in ranks)
        speed = f"{sum(rank['useful'] for rank in ranks) / seconds:,.0f}"
        costs = list(zip(*(rank["seconds"] for rank in ranks), strict=True))
        rows.append({"batches": name, "useful tokens per CPU second": speed, "skew in CPU time": skew(costs)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="of each measured run")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    samples = paragraphs()
    mean = sum(len(sample["input_ids"]) for sample in samples) / len(samples)
    tables = [
        Table(
            title=f"An epoch of {len(samples):,} sequences of {mean:.0f} tokens on average, counted",
            rows=[row for num_ranks in (1, 2, 4, 8) for row in counted(samples, num_ranks)],
        )
    ]
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(samples, flags.steps, Path(folder))
    tables.append(Table(title=f"{flags.steps} steps of a small ByteGPT under ddp on 2 ranks, measured", rows=rows))
    where = about("python " + " ".join(["benchmarks/lengths.py", *sys.argv[1:]]))
    write_report(flags.output / "lengths-cpu.md", "Sequences of different lengths", where, tables, plot=False)


if __name__ == "__main__":
    main()
