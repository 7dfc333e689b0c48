"""What a rank holds and sends under each strategy, counted, beside the formulas of docs/strategies.md.

    python benchmarks/strategies.py                                 all of it, into benchmarks/results: 8 minutes
    python benchmarks/strategies.py --size tiny --output out        does it run?
    python benchmarks/strategies.py --only ddp fsdp                 some of the rows

ByteGPT under AdamW; in the second table under Muon, with an average of its weights, and fine-tuned by LoRA. Memory is
that of parameters, gradients, optimizer state and averages, counted from the tensors after a step on each rank; the
largest rank's is in the table. Bytes are what the loopback interface has sent in a step, of all ranks together and
divided by their number, so that it holds for all collectives alike; nothing else should send. On a machine in use,
`unshare --net --map-root-user`, with `ip link set lo up` inside, gives the run an interface of its own.
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
from lightning.pytorch.callbacks import EMAWeightAveraging
from report import Table, about, write_report
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.loop.out_of_memory import model_state_bytes
from polyphase.engine.strategies.averages import values_of_averages
from polyphase.models import SIZES, ByteGPT

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
STEPS, WARM_UP = 8, 3
CONTEXT, BATCH = 64, 8
"""Bytes per sample, and samples of all ranks in a step: few, so that activations do not matter."""


class Sizes(NamedTuple):
    """Numbers of parameters of a GPT, by where they are."""

    block: int
    matrices: int
    """Of a block, the weights of its linear layers."""
    split: int
    """Of a block, those that tensor parallelism cuts: weight matrices, and the biases of what they fan out to."""
    num_blocks: int
    tokens: int
    """Embedding and output layer, which are one."""
    positions: int
    norm: int
    dim: int

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
            matrices=matrices,
            split=matrices + 7 * dim,
            num_blocks=shape["num_layers"],
            tokens=256 * dim,
            positions=CONTEXT * dim,
            norm=2 * dim,
            dim=dim,
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
    "cp": Row(2, "16 P", lambda n: 16 * n.all),
    "fsdp+cp:cp=2": Row(4, "16 P / S", lambda n: 16 * n.all / 2),
    "pp:pipeline_size=2": Row(2, "16 x largest stage", lambda n: 16 * first_stage(n, 2)),
    "pp+ddp:pipeline_size=2": Row(4, "16 x largest stage", lambda n: 16 * first_stage(n, 2)),
    "pp+fsdp:pipeline_size=2": Row(4, "16 x largest stage / S", lambda n: 16 * first_stage(n, 2, 2)),
    "local_sgd:sync_every=4": Row(2, "16 P + 4 P", lambda n: 20 * n.all),
    "diloco:sync_every=4": Row(2, "16 P + 8 P", lambda n: 24 * n.all),
    "ps:staleness=0": Row(2, "8 P + 12 P / W", lambda n: 8 * n.all + 12 * n.all / 2),
}
"""P: parameters; Q: those of them that the plan of tp cuts; W: ranks; S, T: sizes of the axes shard and tp."""


def as_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Probe(Callback):
    """Each rank writes down what it holds after a step, and rank 0 what the interface has sent between two steps."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.sent: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self.sent.append(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)
        held = sum(model_state_bytes(trainer).values())
        held += sum(as_local(value).nbytes for value in values_of_averages(trainer))
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps({"held": held, "sent": self.sent}))


class GPT(ByteGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class WithMuon(ByteGPT):
    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.net.blocks.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if all(p is not own for own in matrices)]
        return [torch.optim.Muon(matrices), torch.optim.AdamW(others)]


RANK = 8
"""Of the adapters."""


class What(NamedTuple):
    """What is trained, and what it should cost in bytes where nothing is sharded."""

    make: type[ByteGPT]
    arguments: dict[str, Any]
    formula: str
    held_bytes: Any


WHATS = {
    "Muon for the matrices of the blocks": What(
        WithMuon, {}, "16 P - 4 M", lambda n: 16 * n.all - 4 * n.num_blocks * n.matrices
    ),
    "EMA of the weights": What(GPT, {"average": True}, "16 P + 4 P", lambda n: 20 * n.all),
    f"LoRA of rank {RANK}": What(
        GPT,
        {"finetune": f"lora:rank={RANK}"},
        "4 P + 16 A",
        # Inputs and outputs of the four layers of a block: 4 and 2 and 5 and 5 times its width.
        lambda n: 4 * n.all + 16 * n.num_blocks * RANK * 16 * n.dim,
    ),
}
"""M: parameters in matrices of blocks, of which Muon keeps one number, and AdamW two; A: parameters of adapters."""
SHARED = {"ddp": (2, 1), "fsdp": (4, 4)}
"""Ranks, and parts of what is held, by strategy."""


def measure(
    flag: str, size: str, num_ranks: int, make: type[ByteGPT] = GPT, average: bool = False, **arguments: Any
) -> tuple[float, float]:
    """Bytes that the largest rank holds, and that a rank sends in a step."""
    seed_everything(0, verbose=False)
    name, colon, options = flag.partition(":")
    batches = DataLoader(torch.randint(256, (STEPS * BATCH, CONTEXT + 1)), batch_size=BATCH)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(
            strategy=flag if name == "single" else f"{name}_fork{colon}{options}",
            devices=num_ranks,
            accelerator="cpu",
            global_batch_size=BATCH,
            max_steps=STEPS,
            callbacks=[Probe(folder), *([EMAWeightAveraging(decay=0.9)] if average else [])],
            **QUIET,
            **arguments,
        )
        engine.fit(make(size, context_length=CONTEXT).train(), batches)
        ranks = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    sent = ranks[0]["sent"]
    return max(rank["held"] for rank in ranks), (sent[-1] - sent[WARM_UP]) / (STEPS - 1 - WARM_UP) / num_ranks


def row(flag: str, size: str) -> dict[str, str]:
    num_ranks, formula, held_bytes = ROWS[flag]
    held, sent = measure(flag, size, num_ranks)
    return {"strategy": flag, "ranks": str(num_ranks)} | _cells(held, formula, held_bytes(Sizes.of(size)), sent)


def row_of_what(name: str, flag: str, size: str) -> dict[str, str]:
    what, (num_ranks, parts) = WHATS[name], SHARED[flag]
    held, sent = measure(flag, size, num_ranks, what.make, **what.arguments)
    formula = what.formula if parts == 1 else f"({what.formula}) / W"
    cells = _cells(held, formula, what.held_bytes(Sizes.of(size)) / parts, sent)
    return {"trained": name, "strategy": flag, "ranks": str(num_ranks)} | cells


def _cells(held: float, formula: str, expected: float, sent: float) -> dict[str, str]:
    return {
        "held by the largest rank, MB": f"{held / 1e6:.1f}",
        "formula, bytes": formula,
        "formula, MB": f"{expected / 1e6:.1f}",
        "difference": f"{held / expected - 1:+.1%}",
        "sent by a rank in a step, MB": f"{sent / 1e6:.2f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="10M")
    parser.add_argument("--only", nargs="+", choices=[*ROWS, *WHATS], default=[*ROWS, *WHATS], metavar="NAME")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = [row(flag, options.size) for flag in ROWS if flag in options.only]
    others = [row_of_what(name, flag, options.size) for name in WHATS if name in options.only for flag in SHARED]
    title = f"ByteGPT of {Sizes.of(options.size).all / 1e6:.2f} million parameters, {BATCH} samples of {CONTEXT} bytes"
    titles = (f"{title} in a step", "What is trained: the same under other optimizers, with averages and adapters")
    tables = [Table(title=name, rows=table) for name, table in zip(titles, (rows, others), strict=True) if table]
    where = about("python benchmarks/strategies.py")
    write_report(options.output / "strategies-cpu.md", "Strategies", where, tables, plot=False)


if __name__ == "__main__":
    main()
