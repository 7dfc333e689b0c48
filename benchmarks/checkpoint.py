"""How long a training step waits for a checkpoint, how long the checkpoint takes, and what memory: side by side.

    python benchmarks/checkpoint.py                  one process, and two processes with FSDP2
    python benchmarks/checkpoint.py --mib 1024       a larger model

Contestants: Engine as `Snapshot` saves, in the background, and by `save_checkpoint`, which waits; Lightning's Trainer
with its `.ckpt`; Lightning's ModelParallelStrategy with its sharded directory; `torch.distributed.checkpoint.save` by
hand, alone and followed by a checksum of the tensors, which only the Engine's checkpoints have. Each saves the weights
of a stack of linear layers and AdamW's two moments, several times in a run; the first save also makes room for the
copies. "total" is the time until all is on the disk.

"memory" is what a process has more than before its first save: the copies, and memory that was freed and that glibc
keeps, some 150 MB whatever the size of the state. Where glibc gives each tensor pages of its own
(`MALLOC_MMAP_THRESHOLD_=1048576`), it keeps none: with --mib 64, 1.02 copies rather than 1.68.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _contestants import QUIET, settle
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from report import Table, about, write_report
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from polyphase.engine import Engine

WIDTH = 2048
WARM_UP, SAVES = 4, 4
"""Steps before the first save, by which training has all of its own memory; and saves, one after each later step."""

Times = dict[str, list[float]]


class Stack(LightningModule):
    """Square layers, `mib` MiB of them."""

    def __init__(self, mib: int, *, shards: bool = False) -> None:
        super().__init__()
        self.shards = shards
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, mib * 2**18 // WIDTH**2)))

    def configure_model(self) -> None:
        if self.shards:
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh)
            fully_shard(self, mesh=self.device_mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def warm_page_cache(folder: Path, rank: int, num_bytes: int) -> None:
    """Has what earlier saves left on the disk, and as much memory as a save needs in the operating system's hands.

    A virtual machine gives memory that is free back to its host, and waits for each page of it that it needs again: on
    one, the same write took 0.1 or 0.9 s, by chance. Each contestant begins with pages that were used a moment ago.
    """
    os.sync()
    scratch = folder / f"scratch-{rank}"
    block = bytes(1 << 22)
    with scratch.open("wb") as stream:
        for _ in range(num_bytes // len(block) + 1):
            stream.write(block)
    if dist.is_initialized():
        dist.barrier()
    scratch.unlink()  # before it is written to the disk


def state_bytes(module: nn.Module) -> int:
    """The size of the weights and of AdamW's two moments, of all ranks."""
    return 12 * sum(parameter.numel() for parameter in module.parameters())


class Saves(Callback):
    """Saves after each later step, and notes how long training waited and when the disk had it."""

    def __init__(self, folder: Path, **arguments: Any) -> None:
        self.folder, self.arguments = folder, arguments
        self.blocked: list[float] = []
        self.total: list[float] = []
        self.memory = 0.0

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.state_bytes = state_bytes(pl_module)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step <= WARM_UP:
            gc.collect()
            self.before = psutil.Process().memory_info().rss
            return
        path = self.folder / f"{trainer.global_step}.ckpt"
        warm_page_cache(self.folder, trainer.global_rank, self.state_bytes // trainer.world_size)
        began = time.perf_counter()
        trainer.save_checkpoint(path, **self.arguments)
        self.blocked.append(time.perf_counter() - began)
        if isinstance(trainer, Engine):
            trainer._checkpoint_connector.saver.finish()
        self.total.append(time.perf_counter() - began)
        self.memory = max(self.memory, psutil.Process().memory_info().rss - self.before)
        if trainer.is_global_zero:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def fit(make: Callable[[], Trainer], module: LightningModule, folder: Path, **arguments: Any) -> dict[str, Any]:
    saves = Saves(folder, **arguments)
    trainer = make()
    trainer.callbacks.append(saves)  # type: ignore[attr-defined]
    trainer.fit(module, DataLoader(torch.randn(64, WIDTH), batch_size=1))  # type: ignore[arg-type]
    return {"blocked": saves.blocked, "total": saves.total, "memory": saves.memory}


def by_hand(mib: int, folder: Path, *, adds_checksum: bool = False) -> dict[str, Any]:
    """`dcp.save` of the same tensors, sharded where there are several processes; and then a checksum of its bytes."""
    module = Stack(mib)
    if dist.is_initialized():
        for layer in module.layers:
            fully_shard(layer)
        fully_shard(module)
    optimizer = module.configure_optimizers()
    module.training_step(torch.randn(1, WIDTH), 0).backward()
    optimizer.step()
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    times = []
    for number in range(SAVES):
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        path = folder / str(number)
        warm_page_cache(folder, rank, state_bytes(module) // size)
        began = time.perf_counter()
        dcp.save(state, checkpoint_id=path)
        if adds_checksum:
            for tensor in (*module.parameters(), *(t for values in optimizer.state.values() for t in values.values())):
                zlib.crc32((tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().numpy())
        times.append(time.perf_counter() - began)
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(path)
    return {"blocked": times, "total": times, "memory": 0.0}


def flags(processes: int) -> dict[str, Any]:
    return {**QUIET, "accelerator": "cpu", "devices": processes, "max_steps": WARM_UP + SAVES}


def contestants(mib: int, processes: int, folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    common = flags(processes)
    single = processes == 1
    mine = {"strategy": "single" if single else "fsdp"}
    found: dict[str, Callable[[], dict[str, Any]]] = {
        "Engine, in the background": lambda: fit(lambda: Engine(**common, **mine), Stack(mib), folder, kind="snapshot"),
        "Engine, save_checkpoint": lambda: fit(lambda: Engine(**common, **mine), Stack(mib), folder),
        "dcp.save by hand": lambda: by_hand(mib, folder),
        "dcp.save by hand, then a checksum": lambda: by_hand(mib, folder, adds_checksum=True),
    }
    if single:
        found["Trainer, .ckpt"] = lambda: fit(lambda: Trainer(**common), Stack(mib), folder)
    else:
        sharded = ModelParallelStrategy(data_parallel_size=processes, tensor_parallel_size=1)
        found["Trainer, ModelParallelStrategy"] = lambda: fit(
            lambda: Trainer(**common, strategy=sharded), Stack(mib, shards=True), folder
        )
    return found


def measure(mib: int, rounds: int, processes: int, output: Path) -> None:
    """What each process does; rank 0 writes the times."""
    settle()
    folder = Path(os.environ["BENCHMARK_FOLDER"])
    if processes > 1:
        dist.init_process_group("gloo")
    results: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for name, run in contestants(mib, processes, folder).items():
            results.setdefault(name, []).append(run())
            gc.collect()
    if processes == 1 or dist.get_rank() == 0:
        output.write_text(json.dumps(results))
    if processes > 1:
        dist.destroy_process_group()


def table(mib: int, rounds: int, processes: int) -> Table:
    """Runs the above, and makes a table of it."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        words = [
            __file__,
            "--mib",
            str(mib),
            "--rounds",
            str(rounds),
            "--processes",
            str(processes),
            "--to",
            str(result),
        ]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if processes > 1 else []
        environment = {**os.environ, "BENCHMARK_FOLDER": folder}
        subprocess.run([sys.executable, *launcher, *words], check=True, stdout=subprocess.DEVNULL, env=environment)
        results = json.loads(result.read_text())
    state_gib = state_bytes(Stack(mib)) / 2**30
    rows = []
    for name, runs in results.items():
        later = [statistics.median(run["blocked"][1:]) for run in runs]
        total = [statistics.median(run["total"][1:]) for run in runs]
        first = [run["blocked"][0] for run in runs]
        memory = max(run["memory"] for run in runs) / 2**30 / state_gib * processes
        rows.append(
            {
                "contestant": name,
                "step waits, s/GiB": _spread(later, state_gib),
                "at the first save": _spread(first, state_gib),
                "until it is on the disk, s/GiB": _spread(total, state_gib),
                "memory, copies of the state": "" if name.startswith("dcp") else f"{memory:.2f}",
            }
        )
    title = f"{processes} process{'es, FSDP2' if processes > 1 else ''}, {state_gib:.2f} GiB of weights and moments"
    return Table(title=title, rows=rows)


def _spread(times: list[float], gib: float) -> str:
    each = [seconds / gib for seconds in times]
    return f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the weights (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--processes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.to is not None:
        measure(options.mib, options.rounds, options.processes, options.to)
        return
    command = f"python benchmarks/checkpoint.py --mib {options.mib} --rounds {options.rounds}"
    tables = [table(options.mib, options.rounds, processes) for processes in (1, 2)]
    write_report(options.output / "checkpoint-cpu.md", "Checkpoints", about(command), tables, plot=False)


if __name__ == "__main__":
    main()
