"""Checks of snapshots: where their tensors are, whose step they are of, what a resumed run computes."""

import time
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from polyphase.callbacks import Snapshot
from polyphase.engine.checkpoint import load_checkpoint
from polyphase.engine.checkpoint.staging import Staging
from polyphase.engine.devices import module_of, wait_for

from . import device
from .subjects import FSDP_OF_ONE, GPT, MLP, close, engine, rows, seeded, text, trained, weights


def snapshot_devices() -> str:
    left = []
    for turn in range(3):
        _train_with_snapshots(f"snapshots{turn}", "ddp", every_n_steps=5, compression="topk:0.1,start=0")
        left.append(device.empty())
    devices: set[str] = set()

    def note(storage: Any, location: str) -> Any:  # torch: called for each storage, with where it was saved from
        devices.add(location)
        return storage

    found = sorted(Path("snapshots0").glob("*/*.pt"))
    for path in found:
        torch.load(path, map_location=note, weights_only=True)
    assert found, "no snapshot has a file of what only its ranks know"
    assert devices <= {"cpu"}, f"whoever opens a snapshot has tensors put on {sorted(devices)}"
    num_bytes = sum(p.nbytes for p in MLP().parameters())
    assert left[2] - left[1] < num_bytes / 10, f"bytes that runs leave behind grow: {left}, of a module of {num_bytes}"
    return f"{len(found)} files, on {', '.join(devices)}; left behind by three runs: {left} bytes"


class Keeps(Callback):
    """The weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.weights[trainer.global_step] = weights(pl_module)


def _train_with_snapshots(folder: str, strategy: str, every_n_steps: int, **flags: Any) -> dict[int, dict[str, Tensor]]:
    keeps = Keeps()
    snapshot = Snapshot(Path(folder).absolute(), every_n_steps=every_n_steps, every_minutes=None, keep_last=100)
    trainer = engine(strategy, callbacks=[keeps, snapshot], **flags)
    trainer.fit(seeded(MLP), rows())
    return keeps.weights


def each_step() -> str:
    seen = []
    for strategy in ("single", FSDP_OF_ONE):
        kept = _train_with_snapshots(strategy, strategy, every_n_steps=3)
        found = {}
        for path in Path(strategy).iterdir():
            if path.is_dir() and not path.is_symlink():
                checkpoint = load_checkpoint(path)
                found[checkpoint["global_step"]] = checkpoint["state_dict"]
        assert sorted(found) == [3, 6, 9, 12, 15, 18, 20], f"{strategy}: snapshots of steps {sorted(found)}"
        for step, state in found.items():
            close(f"{strategy}: the snapshot of step {step}", state, kept[step], 0)
        seen.append(f"{strategy}: {len(found)} snapshots equal")
    return ", ".join(seen)


def staging() -> str:
    """The trainer waits for the copy within the device, and for nothing more, whatever it writes after it."""
    room = min(psutil.virtual_memory().available, module_of(device.root()).mem_get_info()[0]) // 4
    num_bytes = 2**20 if device.smoke() else min(12 * 10**9, room)
    tensors = {f"p{i}": torch.empty(num_bytes // 64, device=device.root()) for i in range(16)}
    memory, waits, times = Staging(), [], []
    for turn in range(3):
        for i, tensor in enumerate(tensors.values()):
            tensor.fill_(i + turn)
        wait_for(device.root())
        began = time.perf_counter()
        complete = memory.begin(tensors)
        for tensor in tensors.values():
            tensor.data.fill_(-1)  # as a hook might, without a trace
        wait_for(device.root())
        waits.append(time.perf_counter() - began)
        copies = complete()
        times.append(time.perf_counter() - began)
        for i, copy in enumerate(copies.values()):
            assert copy.device.type == "cpu"
            assert bool((copy[:: max(1, len(copy) // 1000)] == i + turn).all()), f"copy {i} of save {turn} is wrong"
    waited = ", ".join(f"{1e3 * t:.1f} ms" for t in waits)
    rates = ", ".join(f"{1e3 * t:.1f} ms ({num_bytes / t / 1e9:.1f} GB/s)" for t in times)
    return f"{num_bytes / 1e9:.3f} GB, first to third save: the device is busy for {waited}; on the host in {rates}"


class Drops(GPT):
    """Draws random numbers on the device."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)


def resumed() -> str:
    seen = []
    for strategy in ("single", FSDP_OF_ONE):
        whole = trained(Drops, strategy, text(shuffle=True))
        path = Path(f"{strategy}.ckpt").absolute()
        saves = ModelCheckpoint(path.parent, path.stem, every_n_train_steps=10)
        flags: dict[str, Any] = {"callbacks": [saves], "enable_checkpointing": True}
        trained(Drops, strategy, text(shuffle=True), max_steps=10, **flags)
        again = trained(Drops, strategy, text(shuffle=True), ckpt_path=path)
        seen.append(close(strategy, again, whole, 0))
    return ", ".join(seen)
