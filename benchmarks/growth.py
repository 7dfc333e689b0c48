"""How set-up, saves and resumptions grow with layers, ranks, tensors and old checkpoints, beside the same by hand.

    python benchmarks/growth.py                      all of it; some 20 minutes on 2 cores with 24 GB
    python benchmarks/growth.py --only saves --tensors 1000 --mib 64

- Set-up is the time from `fit` to the first batch under a strategy of several processes, and the memory of the largest
  one at its peak. By hand it is `DistributedDataParallel`, or `fully_shard` of each layer and of the module; stock is
  Lightning's Trainer with `ddp_fork`.
- A save is one of weights and the two moments of Adam by one process: the time that training waits for it, the time
  until it is written, and the memory that it adds at its peak; a resumption reads it again. The engine's saves are on
  the disk (fsync) and checked when they are read, by their checksums; the others are neither.
- Old checkpoints: from `fit(resume="auto")` to the first batch, and the files opened meanwhile, in a folder with as
  many snapshots; once without an index, as in a folder of an earlier version, and once with it.
- The store: what each rank asks the job's store for in a second, by the engine's own functions against a store that
  counts, with a simulated clock (`_store_load.py`); 16 ranks are driven.

Each contestant runs in a process of its own, as often as there are rounds; the tables have medians. Of set-up, only the
smallest runs more than once.
"""

import argparse
import json
import os
import resource
import statistics
import sys
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
from _store_load import loads
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from report import Table, about, write_report
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint import AsyncCheckpointer, read_manifest
from polyphase.engine.checkpoint.manifest import MANIFEST, manifest_bytes
from polyphase.engine.checkpoint.whole import read_file, write_file

FORK = mp.get_context("fork")
"""This process runs no operator itself, so that what it starts has no threads and no memory of earlier runs."""


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


def in_a_process(function: Callable[..., None], *arguments: Any) -> Any:
    """What the function writes down in `result.json` of a folder, its last argument; by rank, if there are several."""
    with tempfile.TemporaryDirectory() as folder:
        process = FORK.Process(target=function, args=(*arguments, Path(folder)))
        process.start()
        process.join()
        return [json.loads(path.read_text()) for path in sorted(Path(folder).glob("*.json"))]


# --- set-up


def note(folder: Path, rank: int, start_s: float) -> None:
    """Writes down how long this rank has taken, and its memory at its peak, in MB."""
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"{rank}.json").write_text(json.dumps([time.monotonic() - start_s, peak_mb]))


class Begins(Callback):
    """Notes when training begins, and ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.start_s = folder, time.monotonic()

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        note(self.folder, trainer.global_rank, self.start_s)
        trainer.should_stop = True


def trainer_begins(kind: type[Trainer], strategy: str, layers: int, ranks: int, folder: Path) -> None:
    module = Layers(layers)
    flags = {"strategy": f"{strategy}_fork", "accelerator": "cpu", "devices": ranks, "max_steps": 1, **QUIET}
    data = DataLoader(torch.ones(4 * ranks, 8), 4)
    kind(callbacks=[Begins(folder)], default_root_dir=folder, **flags).fit(module, data)


def _rank_by_hand(rank: int, strategy: str, layers: int, ranks: int, folder: Path, start_s: float) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
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


def by_hand_begins(strategy: str, layers: int, ranks: int, folder: Path) -> None:
    arguments = (strategy, layers, ranks, folder, time.monotonic())
    mp.start_processes(_rank_by_hand, arguments, ranks, start_method="fork")


def set_up_row(strategy: str, layers: int, ranks: int, rounds: int) -> dict[str, str]:
    row = {"layers": f"{layers:,}", "ranks": str(ranks), "strategy": strategy}
    for who, function, first in (
        ("Engine", trainer_begins, (Engine,)),
        ("stock", trainer_begins, (Trainer,)),
        ("by hand", by_hand_begins, ()),
    ):
        found = []
        if who != "stock" or strategy == "ddp":  # stock has no flag that shards a module
            for _ in range(rounds):
                of_ranks = in_a_process(function, *first, strategy, layers, ranks)
                found.append([max(values) for values in zip(*of_ranks, strict=True)])
        seconds, peak = map(statistics.median, zip(*found, strict=True)) if found and found[0] else (None, None)
        row |= {f"{who}, s": shown(seconds, 2), f"{who}, MB": shown(peak, 0)}
    print(row, file=sys.stderr)
    return row


def shown(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


# --- saves


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


def peak_of(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, MB of memory beyond the present at the peak, and the result of a function."""
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak begins anew
    before, start_s = _memory_mb("VmRSS"), time.monotonic()
    result = function()
    return time.monotonic() - start_s, _memory_mb("VmHWM") - before, result


def _memory_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def save_by_engine(
    state: dict[str, Any], path: str, in_background: bool
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    saver = AsyncCheckpointer()
    facts = {"step": 1, "epoch": 0, "layout": {}, "world_size": 1, "versions": {}}
    return (
        lambda: (saver.save(state, path, about=facts, of_rank={}, in_background=in_background), saver.finish)[1],
        lambda: AsyncCheckpointer().load(path),
    )


def save_by_dcp(flat: dict[str, Tensor], path: str, in_background: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
    def save() -> Any:
        if in_background:
            return dcp.async_save(flat, checkpoint_id=path).result
        dcp.save(flat, checkpoint_id=path, no_dist=True)
        return None

    def load() -> None:
        in_place = {key: torch.empty_like(tensor) for key, tensor in flat.items()}
        dcp.load(in_place, checkpoint_id=path, no_dist=True)

    return save, load


def checked_file(path: str) -> Any:
    AsyncCheckpointer().check_file(path)
    return read_file(path, lazily=True)


CONTESTANTS = {
    "Engine, a file": lambda state, flat, path: (lambda: write_file(state, path), lambda: checked_file(path)),
    "Engine, a directory": lambda state, flat, path: save_by_engine(state, path, False),
    "Engine, in the background": lambda state, flat, path: save_by_engine(state, path, True),
    "stock Trainer's `TorchCheckpointIO`": lambda state, flat, path: (
        lambda: TorchCheckpointIO().save_checkpoint(state, path),
        lambda: TorchCheckpointIO().load_checkpoint(path),
    ),
    "`torch.save`": lambda state, flat, path: (lambda: torch.save(state, path), lambda: torch.load(path)),
    "`dcp.save`": lambda state, flat, path: save_by_dcp(flat, path, False),
    "`dcp.async_save`": lambda state, flat, path: save_by_dcp(flat, path, True),
}


def saved(who: str, num_tensors: int, num_bytes: int, folder: Path) -> None:
    """Saves and reads, and writes down the figures."""
    if "async" in who:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state = state_of(num_tensors, num_bytes)
    flat = {
        f"{name}.{key}": tensor
        for name, of_name in state["optimizer_states"][0]["state"].items()
        for key, tensor in of_name.items()
    }
    flat |= state["state_dict"]
    (folder / "saved").mkdir()
    save, load = CONTESTANTS[who](state, flat, str(folder / "saved" / "at.ckpt"))
    stalls: list[float] = []

    def whole() -> None:
        start_s = time.monotonic()
        rest = save()
        stalls.append(time.monotonic() - start_s)
        if callable(rest):
            rest()

    save_s, save_mb, _ = peak_of(whole)
    load_s, load_mb, _ = peak_of(load)
    (folder / "result.json").write_text(json.dumps([stalls[0], save_s, save_mb, load_s, load_mb]))


SAVED_COLUMNS = {
    "training waits, s": 3,
    "saved, s": 3,
    "memory, MB": 0,
    "read, s": 3,
    "memory to read, MB": 0,
}


def saves_table(title: str, num_tensors: int, num_bytes: int, rounds: int) -> Table:
    by_contestant: dict[str, list[list[float]]] = {who: [] for who in CONTESTANTS}
    for _ in range(rounds):
        for who, found in by_contestant.items():
            found += in_a_process(saved, who, num_tensors, num_bytes)
    rows = []
    for who, found in by_contestant.items():
        medians = map(statistics.median, zip(*found, strict=True))
        figures = {name: shown(v, digits) for v, (name, digits) in zip(medians, SAVED_COLUMNS.items(), strict=True)}
        rows.append({"": who, **figures})
        print(rows[-1], file=sys.stderr)
    return Table(title=title, rows=rows)


# --- old checkpoints

_opened: list[str] = []


def many_old(number: int, folder: Path) -> None:
    """Continues a run in a folder with so many snapshots, without an index and with one."""
    flags = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, **QUIET, "max_epochs": -1}
    data = DataLoader(torch.ones(8, 8), 4)

    def fit(steps: int, *callbacks: Callback, **more: Any) -> None:
        snapshot = Snapshot(every_n_steps=1, every_minutes=None, keep_every_n_steps=1)
        Engine(callbacks=[snapshot, *callbacks], max_steps=steps, **flags, **more).fit(Layers(2), data)

    fit(1)
    snapshots = folder / "snapshots"
    manifest = read_manifest(snapshots / "step=1")
    for step in range(2, number + 1):
        place = snapshots / f"step={step}"
        place.mkdir()
        for path in (snapshots / "step=1").iterdir():
            if path.name != MANIFEST:
                os.link(path, place / path.name)
        fields = {**vars(manifest), "name": place.name, "sequence": manifest.sequence + step}
        (place / MANIFEST).write_bytes(manifest_bytes(type(manifest)(**fields)))
    sys.addaudithook(lambda event, values: _opened.append(str(values[0])) if event == "open" else None)
    result = []
    for index in (False, True):
        if not index:
            (snapshots / ".index.jsonl").unlink(missing_ok=True)
        (folder / "begins").mkdir(exist_ok=True)
        begins = Begins(folder / "begins")
        _opened.clear()
        fit(3, begins, resume="auto")
        opened = sum(str(snapshots) in path for path in _opened)
        ((seconds, _),) = [json.loads(path.read_text()) for path in (folder / "begins").glob("*.json")]
        result += [seconds, float(opened)]
    (folder / "result.json").write_text(json.dumps(result))


def old_row(number: int, rounds: int) -> dict[str, str]:
    found = [in_a_process(many_old, number)[0] for _ in range(rounds)]
    figures = map(statistics.median, zip(*found, strict=True))
    columns = ("no index, s", "no index, files opened", "index, s", "index, files opened")
    return {
        "old checkpoints": f"{number:,}",
        **{name: shown(value, 2 if name.endswith(" s") else 0) for name, value in zip(columns, figures, strict=True)},
    }


# --- the store


def store_rows(ranks: int, folder: Path) -> None:
    rows = [
        {
            "ranks": f"{ranks:,}", "while": what, "calls of a rank, /s": f"{load.calls:.1f}",
            "keys of a rank, /s": f"{load.keys:.1f}", "read by a rank, kB/s": f"{load.read_bytes / 1e3:.1f}",
            "keys of all, /s": f"{ranks * load.keys:,.0f}",
        }
        for what, load in loads(ranks).items()
    ]  # fmt: skip
    (folder / "result.json").write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=["set-up", "saves", "old", "store"])
    parser.add_argument("--layers", type=int, nargs="+", default=[100, 1000, 10_000], help="by 2 ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16], help="of the smallest number of layers")
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--old", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--store-ranks", type=int, nargs="+", default=[512, 16_384])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    only, rounds, tables = arguments.only or ["saves", "old", "store", "set-up"], arguments.rounds, []
    command = " ".join(["python benchmarks/growth.py", *_given(arguments, parser)])

    def report(table: Table) -> None:
        """After each table: one that ends the process loses no other."""
        tables.append(table)
        write_report(arguments.output / "growth-cpu.md", "Growth", about(command), tables, plot=False)

    if "saves" in only:
        report(saves_table(f"{arguments.mib:,} MiB in 30 tensors", 10, arguments.mib * 2**20, rounds))
        small = f"{3 * arguments.tensors:,} small tensors"
        report(saves_table(small, arguments.tensors, arguments.tensors * 12 * 8, rounds))
    if "old" in only:
        report(Table(title="Old checkpoints", rows=[old_row(number, rounds) for number in arguments.old]))
    if "store" in only:
        rows = [row for ranks in arguments.store_ranks for row in in_a_process(store_rows, ranks)[0]]
        report(Table(title="What ranks ask the store for", rows=rows))
    if "set-up" in only:
        smallest = min(arguments.layers)
        for title, sizes in (
            ("Set-up by ranks", [(smallest, ranks) for ranks in arguments.ranks]),
            ("Set-up by layers", [(layers, 2) for layers in arguments.layers]),
        ):
            rows = [
                set_up_row(strategy, layers, ranks, rounds if (layers, ranks) == (smallest, 2) else 1)
                for layers, ranks in sizes
                for strategy in ("ddp", "fsdp")
            ]
            report(Table(title=title, rows=rows))


def _given(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The arguments that are not their defaults, but for the folder."""
    values = {name: value for name, value in vars(arguments).items() if value != parser.get_default(name)}
    return [
        f"--{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in values.items()
        if name != "output"
    ]


if __name__ == "__main__":
    main()
