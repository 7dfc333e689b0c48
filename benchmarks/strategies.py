"""What a rank holds and sends under each strategy, counted, beside the formulas of docs/strategies.md.

    python benchmarks/strategies.py                                 all of it, into benchmarks/results: 5 minutes
    python benchmarks/strategies.py --size tiny --output out        does it run?
    python benchmarks/strategies.py --only ddp fsdp                 some of the rows

ByteGPT under AdamW. Memory is that of parameters, gradients and optimizer state, counted from the tensors after a step
on each rank; the largest rank's is in the table. Bytes are what the loopback interface has sent in a step, of all ranks
together and divided by their number, so that it holds for all collectives alike; the machine should send nothing else.
What ranks of one machine hand over in memory, as `ps` does (TensorPipe), is not in it.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from report import Table, about, write_report
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.loop.out_of_memory import model_state_bytes
from polyphase.models import SIZES, ByteGPT

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
STEPS, WARM_UP = 8, 3
CONTEXT, BATCH = 64, 8
"""Bytes per sample, and samples of all ranks in a step: few, so that activations do not matter."""


class Sizes(NamedTuple):
    """Numbers of parameters of a GPT, by where they are."""

    block: int
    split: int
    """Of a block, those that tensor parallelism cuts: weight matrices, and the biases of what they fan out to."""
    num_blocks: int
    tokens: int
    """Embedding and output layer, which are one."""
    positions: int
    norm: int

    @property
    def all(self) -> int:
        return self.num_blocks * self.block + self.tokens + self.positions + self.norm

    @classmethod
    def of(cls, size: str) -> "Sizes":
        shape = SIZES[size]
        dim = shape["dim"]
        matrices = 12 * dim * dim
        return cls(
            block=matrices + 13 * dim,
            split=matrices + 7 * dim,
            num_blocks=shape["num_layers"],
            tokens=256 * dim,
            positions=CONTEXT * dim,
            norm=2 * dim,
        )


def parallel(sizes: Sizes, tp: int, shards: int = 1) -> float:
    """Parameters of a rank under tensor parallelism, and in shards of that."""
    split = sizes.num_blocks * sizes.split + sizes.tokens
    return (split / tp + sizes.all - split) / shards


def first_stage(sizes: Sizes, stages: int, shards: int = 1) -> float:
    """Parameters of the first stage, which has both embeddings; the last one has the tied one, too."""
    return (sizes.num_blocks / stages * sizes.block + sizes.tokens + sizes.positions) / shards


class Row(NamedTuple):
    """A flag, and what it should cost in bytes: 4 for a parameter, 4 for its gradient and 8 of AdamW's."""

    num_ranks: int
    formula: str
    held_bytes: Any


ROWS = {
    "single": Row(1, "16 P", lambda n: 16 * n.all),
    "ddp": Row(2, "16 P", lambda n: 16 * n.all),
    "zero1": Row(4, "8 P + 8 P / W", lambda n: 8 * n.all + 8 * n.all / 4),
    "fsdp": Row(4, "16 P / W", lambda n: 16 * n.all / 4),
    "hsdp:replicate=2,shard=2": Row(4, "16 P / S", lambda n: 16 * n.all / 2),
    "tp": Row(2, "16 (Q / T + P - Q)", lambda n: 16 * parallel(n, 2)),
    "fsdp+tp:tp=2": Row(4, "16 (Q / T + P - Q) / S", lambda n: 16 * parallel(n, 2, 2)),
    "pp:pipeline_size=2": Row(2, "16 x largest stage", lambda n: 16 * first_stage(n, 2)),
    "pp+ddp:pipeline_size=2": Row(4, "16 x largest stage", lambda n: 16 * first_stage(n, 2)),
    "pp+fsdp:pipeline_size=2": Row(4, "16 x largest stage / S", lambda n: 16 * first_stage(n, 2, 2)),
    "local_sgd:sync_every=4": Row(2, "16 P + 4 P", lambda n: 20 * n.all),
    "diloco:sync_every=4": Row(2, "16 P + 8 P", lambda n: 24 * n.all),
    "ps:staleness=0": Row(2, "8 P + 12 P / W", lambda n: 8 * n.all + 12 * n.all / 2),
}
"""P: parameters; Q: those of them that the plan of tp cuts; W: ranks; S, T: sizes of the axes shard and tp."""


class Probe(Callback):
    """Each rank writes down what it holds after a step, and rank 0 what the interface has sent between two steps."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.sent.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
        held = sum(model_state_bytes(trainer).values())
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps({"held": held, "sent": self.sent}))


class GPT(ByteGPT):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def measure(flag: str, size: str) -> tuple[float, float]:
    """Bytes that the largest rank holds, and that a rank sends in a step."""
    seed_everything(0, verbose=False)
    num_ranks = ROWS[flag].num_ranks
    name, colon, options = flag.partition(":")
    batches = DataLoader(torch.randint(256, (STEPS * BATCH, CONTEXT + 1)), batch_size=BATCH)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            strategy=flag if name == "single" else f"{name}_fork{colon}{options}",
            devices=num_ranks,
            accelerator="cpu",
            global_batch_size=BATCH,
            max_steps=STEPS,
            callbacks=[Probe(folder)],
            **QUIET,
        )
        engine.fit(GPT(size, context_length=CONTEXT).train(), batches)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    sent = ranks[0]["sent"]
    return max(rank["held"] for rank in ranks), (sent[-1] - sent[WARM_UP]) / (STEPS - 1 - WARM_UP) / num_ranks


def row(flag: str, size: str) -> dict[str, str]:
    held, sent = measure(flag, size)
    expected = ROWS[flag].held_bytes(Sizes.of(size))
    return {
        "strategy": flag,
        "ranks": str(ROWS[flag].num_ranks),
        "held by the largest rank, MB": f"{held / 1e6:.1f}",
        "formula, bytes": ROWS[flag].formula,
        "formula, MB": f"{expected / 1e6:.1f}",
        "difference": f"{held / expected - 1:+.1%}",
        "sent by a rank in a step, MB": f"{sent / 1e6:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="FLAG")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    sizes = Sizes.of(options.size)
    rows = [row(flag, options.size) for flag in options.only]
    title = f"ByteGPT of {sizes.all / 1e6:.2f} million parameters, {BATCH} samples of {CONTEXT} bytes in a step"
    where = about("python benchmarks/strategies.py")
    write_report(options.output / "strategies-cpu.md", "Strategies", where, [Table(title=title, rows=rows)], plot=False)


if __name__ == "__main__":
    main()
