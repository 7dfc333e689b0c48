"""Checks of two processes that share one device, over gloo where NCCL refuses that, and of one that stands still."""

import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from polyphase.engine import Engine
from polyphase.engine.compression import CountingGroup
from polyphase.engine.strategies.pipeline.shapes import TreeBroadcast

from . import device
from .child import ROOT, Outcome, elsewhere, two_ranks
from .meter import Meter
from .subjects import (
    FSDP_OF_ONE,
    GPT,
    MLP,
    QUIET,
    STEPS,
    close,
    engine,
    largest_difference,
    rows,
    seeded,
    text,
    weights,
)

HERE = "benchmarks.gpu.checks_ranks"
HOOKS = ("none", "bf16", "powersgd:4,start=2")


def rank_engine(accelerator: str, strategy: str = "ddp", **flags: Any) -> Engine:
    """Makes the engine of one of two machines of one device each."""
    trainer = Engine(strategy=strategy, accelerator=accelerator, devices=1, num_nodes=2, **{**QUIET, **flags})
    if accelerator == "cuda":
        trainer.strategy._process_group_backend = "gloo"  # Lightning: DDPStrategy's; NCCL wants a device for each rank
    return trainer


def _save(path: str, module: nn.Module) -> None:
    if dist.get_rank() == 0:
        torch.save(weights(module), path)


def _both_ok(ranks: list[Outcome]) -> None:
    bad = [f"rank {rank}: {found.reason}\n{found.output}" for rank, found in enumerate(ranks) if found.status != "ok"]
    assert not bad, "\n".join(bad)


# --- uneven ranks


class Uneven(IterableDataset):
    """Rank 1 has two samples less."""

    shards_itself = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        for _ in range(8 - 2 * rank):
            yield torch.randn(64, generator=generator), torch.randint(10, (), generator=generator)


def joined() -> str:
    with tempfile.TemporaryDirectory() as folder:
        paths = {accelerator: f"{folder}/{accelerator}.pt" for accelerator in (device.kind(), "cpu")}
        for accelerator, path in paths.items():
            _both_ok(two_ranks(f"{HERE}:join", accelerator, path, limit_s=28))
        return close("weights", *(torch.load(path) for path in paths.values()))


def join(accelerator: str, path: str) -> None:
    module = seeded(MLP)
    trainer = rank_engine(accelerator, max_epochs=2)
    trainer.fit(module, DataLoader(Uneven(), batch_size=2))
    assert trainer.global_step == 8, trainer.global_step
    _save(path, module)


# --- a collective that one rank has no memory for


def lost_collective() -> str:
    ranks = two_ranks(f"{HERE}:lose_memory_once", limit_s=45)
    _both_ok(ranks)
    (calls, repeated, sums, raised), (other_calls, _, other_sums, _) = (rank.value for rank in ranks)
    assert raised == 1, f"out of memory was raised {raised} times"
    assert calls == other_calls, f"rank 0 has made {calls} collectives, rank 1 {other_calls}"
    assert sums == other_sums, f"the ranks' weights differ: {sums} and {other_sums}"
    return f"{calls} collectives on both ranks, {repeated} of them not made again, equal weights"


def lose_memory_once() -> tuple[int, int, list[float], int]:
    start, speaks, raised = CountingGroup.start_all_to_all, CountingGroup._speaks, []
    spoken: list[bool] = []  # of each collective: whether it was made, or had been before its step was repeated

    def without_memory(wire: CountingGroup, payload: Tensor) -> Any:
        if wire.rank == 0 and wire.num_calls >= 5 and not raised:
            raised.append(1)
            raise torch.OutOfMemoryError("no memory for an all-to-all, for a check")
        return start(wire, payload)

    def noted(wire: CountingGroup) -> bool:
        spoken.append(speaks(wire))
        return spoken[-1]

    CountingGroup.start_all_to_all = without_memory  # type: ignore[method-assign]
    CountingGroup._speaks = noted  # type: ignore[method-assign]
    module = seeded(MLP)
    flags: dict[str, Any] = {"global_batch_size": 16, "micro_batch_size": "auto", "max_steps": 8}
    trainer = rank_engine(device.kind(), compression="int8", **flags)
    trainer.fit(module, rows())
    assert trainer.global_step == 8, trainer.global_step
    sums = [float(t.double().sum()) for t in weights(module).values()]
    return spoken.count(True), spoken.count(False), sums, len(raised)


# --- a host that the device blocks


class Stands(MLP):
    """Reads a number that the device will not have for long."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 5:
            device.sleep(8)
            loss.item()  # on CUDA, where the report points to; the simulated device sleeps a line above
        return loss


def stuck() -> str:
    found = elsewhere(f"{HERE}:stand_still", limit_s=50)
    # A process alone keeps nobody waiting: it says where it is, and goes on when the device does.
    assert found.status == "ok", f"{found.reason}\n{found.output}"
    for part in ("no progress for", "step 5", "benchmarks/gpu/", "in "):
        assert part in found.value, f"{part!r} is not in its report: {found.value}"
    return found.value.replace(f"{ROOT}/", "")


def stand_still() -> str:
    flags: dict[str, Any] = {"accelerator": device.kind(), "devices": 1, "max_steps": STEPS, "hang_timeout_s": 3}
    Engine(**flags, **QUIET).fit(seeded(Stands), rows())
    (report,) = Path("failures").glob("*.json")
    return json.loads(report.read_text())["message"]


# --- two ranks on one device


def two_on_one() -> str:
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        for accelerator in (device.kind(), "cpu"):
            _both_ok(two_ranks(f"{HERE}:train_hooks", accelerator, folder, limit_s=60))
        for hook in HOOKS:
            found, expected = (torch.load(f"{folder}/{name}-{hook}.pt") for name in (device.kind(), "cpu"))
            # A gradient that the CPU rounds to another number of 16 bit moves a weight by a step's part.
            seen.append(close(hook, found, expected, 1e-5 if hook == "none" else 1e-3))
    for where in ("forward", "backward", *(("device",) if device.kind() == "cuda" else ())):
        ranks = two_ranks(f"{HERE}:fail", where, limit_s=45)
        for rank, found in enumerate(ranks):
            assert found.status == "failed", f"{where}: rank {rank} is {found.status}, though rank 1 has failed"
        said = "\n".join(found.output for found in ranks)
        assert "rank 1" in said, f"{where}: nobody names rank 1:\n{said}"
        seen.append(f"failed in {where}: over after {max(found.seconds for found in ranks):.1f} s")
    return "; ".join(seen)


def train_hooks(accelerator: str, folder: str) -> None:
    for hook in HOOKS:
        module = seeded(MLP)
        trainer = rank_engine(accelerator, compression=hook, max_steps=10)
        trainer.fit(module, rows())
        assert trainer.global_step == 10, trainer.global_step
        _save(f"{folder}/{accelerator}-{hook}.pt", module)


class Fails(MLP):
    """On rank 1, at its fourth batch."""

    where = "forward"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx != 3 or self.global_rank != 1:
            return loss
        if self.where == "forward":
            raise RuntimeError("for a check")
        if self.where == "device":
            return loss + batch[0].flatten()[torch.full((1,), 10**9, device=self.device)].sum()
        loss.register_hook(_raise)
        return loss


def _raise(gradient: Tensor) -> Tensor:
    raise RuntimeError("for a check")


def fail(where: str) -> None:
    module = seeded(Fails)
    module.where = where
    rank_engine(device.kind(), max_steps=10).fit(module, rows())


# --- a parameter server, and the certificate


class Conv(MLP):
    """Convolutions, for which cuDNN takes fewer bits than float32 has unless it is told not to."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(),
            nn.Linear(512, 10),
        )  # fmt: skip


def server_and_verify() -> str:
    module, before = seeded(MLP), weights(seeded(MLP))
    flags: dict[str, Any] = {"accelerator": device.kind(), "devices": 1, **QUIET}
    trainer = Engine(strategy="ps", max_steps=STEPS, **flags)
    trainer.fit(module, rows())
    moved = largest_difference(weights(module), before)
    assert trainer.global_step == STEPS, trainer.global_step
    assert 1e-3 < moved < 4e-3 * STEPS, f"ps: a weight has moved by {moved:.1e}"
    certificate = Engine(strategy=FSDP_OF_ONE, **flags).verify(seeded(Conv if device.kind() == "cuda" else MLP), rows())
    assert certificate.equal, str(certificate)
    return f"ps: weights move by {moved:.1e}; verify: {max(certificate.differences):.1e}"


# --- a pipeline


class Timed(GPT):
    """Ticks at each step; the first stage notes what a step has cost, and how long it spent on what hosts tell."""

    def __init__(self, path: str, meter: Meter, spent: list[float]) -> None:
        super().__init__()
        self.path, self.meter, self.spent = path, meter, spent

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.meter.tick()

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            assert self.spent, "the stages told each other nothing: this check looks in the wrong place"
            later = self.spent[len(self.spent) // 2 :]
            per_step = sum(later) / len(later) * len(self.spent) / self.trainer.global_step
            Path(self.path).write_text(json.dumps([self.meter.step_s, per_step]))


def pipeline() -> str:
    if device.simulated() is None and torch.accelerator.device_count() < 2:
        raise device.NotRunError("needs two devices: stages that share one can't exchange tensors over NCCL")
    told, spent = TreeBroadcast._broadcast_form, []

    def timed(broadcast: TreeBroadcast, content: bytes) -> bytes:
        began = time.perf_counter()
        found = told(broadcast, content)
        spent.append(time.perf_counter() - began)
        return found

    meter = Meter(warm_up=5, timed=5 if device.smoke() else 50)
    TreeBroadcast._broadcast_form = timed  # type: ignore[method-assign]  # in the ranks, too, which are forks
    try:
        trainer = engine("pp_fork:microbatches=4", devices=2, max_steps=meter.steps)
        trainer.fit(seeded(Timed, "pipeline.json", meter, spent), text(meter.steps))
    finally:
        TreeBroadcast._broadcast_form = told  # type: ignore[method-assign]
    step_s, told_s = json.loads(Path("pipeline.json").read_text())
    return f"a step {1e3 * step_s:.2f} ms, of which hosts tell each other for {1e3 * told_s:.2f} ms"
