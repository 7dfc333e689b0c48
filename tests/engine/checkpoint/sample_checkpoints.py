"""Checkpoints to test with: of each step, the content is known."""

import copy
import json
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer

from polyphase.engine.checkpoint import AsyncCheckpointer, Manifest, get_random_state, read_manifest
from polyphase.engine.checkpoint.content import VERSION
from polyphase.engine.checkpoint.manifest import MANIFEST

_RANDOM = get_random_state()
LARGE = 300_000
"""Elements of a tensor that is taken out of the rest by its size."""


def content(step: int, world_size: int = 1) -> dict[str, Any]:
    """A dict like Lightning's; every tensor and number in it says its step."""
    weight = torch.full((4, 3), float(step))
    return {
        "pytorch-lightning_version": "2.6.6",
        "global_step": step,
        "epoch": step // 10,
        "state_dict": {"net.weight": weight, "net.bias": torch.arange(4.0) + step},
        "optimizer_states": [
            {
                "state": {"net.weight": {"step": torch.tensor(float(step)), "exp_avg": weight + 0.5}},
                "param_groups": [{"lr": 0.1, "params": ["net.bias", "net.weight"]}],
            }
        ],
        "lr_schedulers": [{"last_epoch": step}],
        "loops": loops(step),
        "callbacks": {"Average": {"large": torch.full((LARGE,), float(step)), "small": torch.tensor(step)}},
        "polyphase": {
            "optimizers": ["AdamW"],
            "between_epochs": False,
            "between_steps": True,
            "in_validation": False,
            "batches": step,
            "world_size": world_size,
            "accumulate_grad_batches": 1,
            "accumulation_asked": 1,
            "version": VERSION,
            "cut_short": False,
            "loaders_of_epoch": 0,
            "validation_loaders_of_epoch": None,
            "layout": {},
            "trained": {"is_trained": {}, "tracks": {}, "added": []},
            "run": {"id": "sample", "lineage": ["sample"]},
            "strategy": {},
        },
    }


def loops(step: int) -> dict[str, Any]:
    """The state of Lightning's loops after `step` steps."""
    trainer = Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    loop = trainer.fit_loop
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = step
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.ready = step
    others = {f"{name}_loop": getattr(trainer, f"{name}_loop").state_dict() for name in ("validate", "test", "predict")}
    return {"fit_loop": loop.state_dict(), **others}


def rank_state(step: int) -> dict[str, Any]:
    """The state that only one rank has."""
    return {
        "seed": step,
        "random": copy.deepcopy(_RANDOM),  # tests overwrite what they have saved
        "data": {"world_size": 1, "batches": step, "loaders": [], "micro_batch_size": None, "sample_seed": None},
        "compression": {},
        "strategy": {},
    }


def about(step: int, world_size: int = 1) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step // 10,
        "layout": {"shard": world_size} if world_size > 1 else {},
        "world_size": world_size,
        "versions": {"polyphase": "0.1.0", "torch": str(torch.__version__)},
    }


def save(path: str | os.PathLike[str], step: int = 1, saver: AsyncCheckpointer | None = None, **changes: Any) -> str:
    """Saves the content of `step`, with `changes` to it, and returns the path."""
    path = os.fspath(path)
    checkpoint = {**content(step), **changes}
    (saver or AsyncCheckpointer()).save(
        checkpoint, path, about=about(step), of_rank=rank_state(step), in_background=False
    )
    return path


def seal(path: str | os.PathLike[str], said: dict[str, Any] | None = None) -> None:
    """Writes a manifest that fits the files as they are, as an attacker would.

    Args:
        path: of the checkpoint.
        said: what else the manifest says; None: as it is.
    """
    file = Path(path, MANIFEST)
    said = dict(said or json.loads(file.read_bytes()))
    said.pop("crc32", None)
    said["files"] = {
        found.name: (found.stat().st_size, zlib.crc32(found.read_bytes()))
        for found in sorted(Path(path).iterdir())
        if found.name != MANIFEST
    }
    said["crc32"] = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    file.write_text(json.dumps(said))


def saved(folder: Path, *steps: int) -> list[str]:
    return [save(folder / f"step={step}", step) for step in steps]


def is_whole(path: str, step: int) -> bool:
    """Whether a checkpoint opens, and its content is that of `step`."""
    found = AsyncCheckpointer().load(path)
    expected = content(step)
    found["polyphase"]["ranks"] = [{"seed": rank["seed"]} for rank in found["polyphase"]["ranks"]]
    expected["polyphase"]["ranks"] = [{"seed": step}]
    assert read_manifest(path).step == step
    return same(found, expected)


def same(one: Any, other: Any) -> bool:
    """Whether two nested dicts are equal, bit for bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def manifest(**changes: Any) -> Manifest:
    return Manifest(**{"name": "x", "time": 0.0, "files": {}, **about(1), **changes})
