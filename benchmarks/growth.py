"""How set-up, a save and a resumption grow with the layers and the tensors of a module, beside the same by hand.

    python benchmarks/growth.py                      100, 1,000 and 10,000 layers; 10,000 tensors; 1 GiB
    python benchmarks/growth.py --layers 100 1000 --tensors 1000 --mib 64

Set-up is the time from `fit` to the first batch under a strategy of two processes, and the memory of the larger one at
its peak; by hand it is `DistributedDataParallel`, or `fully_shard` of each layer and of the module. A save is
`save_checkpoint` of one process, as a file and as a directory, beside `torch.save` and `torch.distributed.checkpoint`;
a resumption reads it again, beside `torch.load` and `dcp.load`. Each is taken once a round; the tables have medians.
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from _contestants import QUIET
from lightning.pytorch import Callback, LightningModule
from report import Table, about, write_report
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.checkpoint import AsyncCheckpointer
from polyphase.engine.checkpoint.whole import read_file, write_file

NUM_RANKS = 2


class Layers(LightningModule):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(number))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def note(folder: Path, rank: int, start_s: float) -> None:
    """Writes down how long this rank has taken, and its memory at its peak, in MB."""
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"{rank}.json").write_text(json.dumps([time.monotonic() - start_s, peak_mb]))


class Begins(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder, self.start_s = folder, time.monotonic()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        note(self.folder, trainer.global_rank, self.start_s)


def engine_begins(strategy: str, layers: int, folder: Path) -> None:
    module = Layers(layers)
    flags = {"strategy": f"{strategy}_fork", "accelerator": "cpu", "devices": NUM_RANKS, "max_steps": 1, **QUIET}
    Engine(callbacks=[Begins(folder)], default_root_dir=folder, **flags).fit(module, DataLoader(torch.ones(8, 8), 4))


def _rank_by_hand(rank: int, strategy: str, layers: int, folder: Path, start_s: float) -> None:
    store = dist.FileStore(str(folder / "store"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    module: Any = Layers(layers)
    if strategy == "ddp":
        DistributedDataParallel(module)
    else:
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
    module.configure_optimizers()
    dist.barrier()
    note(folder, rank, start_s)
    dist.destroy_process_group()


def by_hand_begins(strategy: str, layers: int, folder: Path) -> None:
    mp.start_processes(_rank_by_hand, (strategy, layers, folder, time.monotonic()), NUM_RANKS, start_method="fork")


def set_up(begins: Callable[[str, int, Path], None], strategy: str, layers: int) -> tuple[float, float]:
    """Seconds and MB of the rank that takes more."""
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, whose ranks do not begin with the memory of an earlier one.
        process = mp.get_context("spawn").Process(target=begins, args=(strategy, layers, Path(folder)))
        process.start()
        process.join()
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    return max(seconds for seconds, _ in found), max(peak for _, peak in found)


def state_of(num_tensors: int, num_bytes: int) -> dict[str, Any]:
    """Weights and the two moments of Adam."""
    size = max(1, num_bytes // (4 * 3 * num_tensors))
    names = [f"weights.{number}" for number in range(num_tensors)]
    state = {name: {"exp_avg": torch.rand(size), "exp_avg_sq": torch.rand(size)} for name in names}
    groups = [{"lr": 0.1, "params": names}]
    return {
        "global_step": 1, "epoch": 0, "pytorch-lightning_version": "2.6.0",
        "state_dict": {name: torch.rand(size) for name in names},
        "optimizer_states": [{"state": state, "param_groups": groups}],
    }  # fmt: skip


def timed(function: Callable[[], Any]) -> float:
    start_s = time.monotonic()
    function()
    return time.monotonic() - start_s


def saves(state: dict[str, Any], folder: Path) -> dict[str, tuple[float, float]]:
    """Seconds of a save and of a resumption, by contestant."""
    saver = AsyncCheckpointer()
    facts = {"step": 1, "epoch": 0, "layout": {}, "world_size": 1, "versions": {}}
    flat = {
        f"{name}.{key}": t
        for name, of_name in state["optimizer_states"][0]["state"].items()
        for key, t in of_name.items()
    }
    flat |= state["state_dict"]
    file, directory = str(folder / "ours.ckpt"), str(folder / "ours")
    plain, torchs = folder / "plain.pt", str(folder / "dcp")
    in_place = {key: torch.empty_like(tensor) for key, tensor in flat.items()}
    return {
        "Engine, a file": (timed(lambda: write_file(state, file)), timed(lambda: read_file(file))),
        "Engine, a directory": (
            timed(lambda: saver.save(state, directory, about=facts, of_rank={}, in_background=False)),
            timed(lambda: AsyncCheckpointer().load(directory)),
        ),
        "torch.save": (timed(lambda: torch.save(state, plain)), timed(lambda: torch.load(plain))),
        "torch.distributed.checkpoint": (
            timed(lambda: dcp.save(flat, checkpoint_id=torchs, no_dist=True)),
            timed(lambda: dcp.load(in_place, checkpoint_id=torchs, no_dist=True)),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    rows = []
    for layers in arguments.layers:
        for strategy in ("ddp", "fsdp"):
            row = {"layers": f"{layers:,}", "strategy": strategy}
            for who, begins in (("Engine", engine_begins), ("by hand", by_hand_begins)):
                found = [set_up(begins, strategy, layers) for _ in range(arguments.rounds)]
                seconds, peak = (statistics.median(values) for values in zip(*found, strict=True))
                row |= {f"{who}, s": f"{seconds:.2f}", f"{who}, MB": f"{peak:.0f}"}
            rows.append(row)
    tables = [Table(title="Set-up", rows=rows)]
    for title, num_tensors, num_bytes in (
        (f"{arguments.mib} MiB in 30 tensors", 10, arguments.mib * 2**20),
        (f"{3 * arguments.tensors:,} small tensors", arguments.tensors, arguments.tensors * 12 * 8),
    ):
        state, by_contestant = state_of(num_tensors, num_bytes), dict[str, list[tuple[float, float]]]()
        for _ in range(arguments.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for who, seconds in saves(state, Path(folder)).items():
                    by_contestant.setdefault(who, []).append(seconds)
        tables.append(
            Table(
                title=title,
                rows=[
                    {"": who, "save, s": f"{statistics.median(s for s, _ in of):.3f}",
                     "resume, s": f"{statistics.median(r for _, r in of):.3f}"}
                    for who, of in by_contestant.items()
                ],
            )
        )  # fmt: skip
    write_report(arguments.output / "growth-cpu.md", "Growth", about("python benchmarks/growth.py"), tables, plot=False)


if __name__ == "__main__":
    main()
