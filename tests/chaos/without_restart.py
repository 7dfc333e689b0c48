"""Kills ranks of runs with `on_rank_loss="continue"` again and again, and compares each with resumptions without them.

    python -m tests.chaos.without_restart --kills 100

A row is a point: in each of its runs, of 3 or 4 ranks, ranks are killed (SIGKILL) there, twice where it can be, in
drawn steps, with or without workers of the loader and accumulation. At the end of a run: whether it has hung, or ended;
which samples were trained on how often in each epoch (of a step that was made again, by fewer ranks, the last time
counts); how far the weights are from those of runs that were stopped after the same steps and resumed with the ranks
that were left; and how long it took from each kill until the ranks that are left had finished a step.

Under `fsdp`, `hsdp` and `zero1` the ranks left go back to a snapshot; the runs to compare with were stopped there.

Under `local_sgd` and `diloco` the weights are compared with those of a loop by hand in one process: for each rank a
module with an optimizer, which is trained on the samples that the rank wrote down, and has no part in exchanges after
its loss, nor in those beside training that were under way. What a lost rank had still to do before the ranks that are
left met is counted apart, as nobody has done it.

Weights have 64 bits: the order of a sum makes less than 1e-12, anything else more than 1e-6.
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint import get_random_state, set_random_state
from polyphase.engine.distributed.object_group import ObjectGroup

from ..engine.tiny import QUIET
from .job import Traps

__all__ = ["POINTS", "Kill", "Plan", "SaveForSurvivors", "Verdict", "plan", "storm"]

SIZE, BATCH, EPOCHS = 61, 12, 4
STEPS = -(-SIZE // BATCH)
"""Optimizer steps of an epoch; the last one has one sample."""
SAME = 1e-12
"""The largest difference of weights of 64 bits that comes from the order of a sum."""
_DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
OUTER = {"local_sgd": {"lr": 1.0}, "diloco": _DILOCO, "diloco beside training": _DILOCO}
"""By strategy, the outer SGD."""
SYNC_EVERY = 4
"""Steps between exchanges, which meet the borders of epochs and the other points in various ways."""
BESIDE = 3
"""Steps that an exchange beside training takes: two are under way at a time."""
SAVE_EVERY = 3
"""Steps between snapshots, to which ranks return."""
_BUCKETS = "bucket_cap_mb=0.0001"
"""A bucket for each parameter."""
STRATEGIES = {
    "ddp": f"ddp_fork:{_BUCKETS}",
    "local_sgd": f"local_sgd_fork:{_BUCKETS},sync_every={SYNC_EVERY}",
    "diloco": f"diloco_fork:{_BUCKETS},sync_every={SYNC_EVERY}",
    "diloco beside training": f"diloco_fork:{_BUCKETS},sync_every={SYNC_EVERY},fragments=2,overlap_steps={BESIDE}",
    "fsdp": "fsdp_fork",
    "hsdp": "hsdp_fork:shard=1",
    "zero1": f"zero1_fork:{_BUCKETS}",
}
"""The flags, by name."""
RETURNING = ("fsdp", "hsdp", "zero1")
LIMIT_S = 120.0
"""A run that takes longer has hung: it takes a few seconds, and 15 more if a rank is lost while the others connect."""

IN_STEP = ("random", "fetch", "forward", "backward", "reduced", "stepped", "batch end")
IN_SAVE = ("save", "write", "rename", "renamed")
AT_BORDER = ("epoch end", "epoch start")
IN_VALIDATION = ("validation start", "validation batch", "validation end")
TOGETHER = ("two at once", "recovery", "order")
POINTS = (*IN_STEP, *TOGETHER, *AT_BORDER, *IN_VALIDATION, *IN_SAVE)
"""``"reduced"``: between the last all-reduce and the optimizer; ``"stepped"``: when the optimizer has changed the
weights; ``"recovery"``: a second rank while the others recover from the loss of a first one; ``"order"``: a second rank
when those that are left draw the order of the samples that they share. The last three are traps in the files of a
snapshot, see `job.POINTS`."""


@dataclass(frozen=True)
class Kill:
    """Ranks, by their numbers at the beginning, that are killed at a point of a step."""

    point: str
    ranks: tuple[int, ...]
    step: int
    delay_s: float


@dataclass(frozen=True)
class Plan:
    """A run, and who is killed in it."""

    num_ranks: int
    kills: tuple[Kill, ...]
    num_workers: int
    micro_batch: int
    """The batch size of the loader: less than a rank's share of a step is accumulated."""
    strategy: str = "ddp"

    @property
    def validates(self) -> bool:
        return any(kill.point in IN_VALIDATION for kill in self.kills)

    @property
    def save_every(self) -> int | None:
        """Steps between two snapshots, of which the first is saved before the first kill; None without snapshots."""
        if any(kill.point in IN_SAVE for kill in self.kills):
            return 1
        before = [kill.step - 1 for kill in self.kills]  # or of epochs, which are fewer
        return max(1, min(SAVE_EVERY, *before)) if self.strategy in RETURNING else None


@dataclass
class Verdict:
    """The outcome of a run."""

    num_kills: int = 0
    lost: int = 0
    repeated: int = 0
    difference: float = 0.0
    ended: str = ""
    """The error of a run that did not go on."""
    is_hung: bool = False
    left_running: int = 0
    recoveries_s: list[float] = field(default_factory=list)
    undone: int = 0
    """Samples of a lost rank that nobody was trained on, between its end and the step at which the others met."""

    @property
    def is_good(self) -> bool:
        bad = self.lost or self.repeated or self.ended or self.is_hung or self.left_running
        return not bad and self.difference <= SAME


def plan(point: str, draw: random.Random, strategy: str = "ddp") -> Plan:
    """Draws a run with kills at one point."""
    num_ranks = draw.choice([3, 4])
    victims = draw.sample(range(num_ranks), num_ranks - 1)
    # A loss in the last epoch would have no later step; each kill is in an epoch of its own.
    first = draw.randrange(2)
    earliest = 2 if strategy in RETURNING else 1  # a snapshot is saved after the end of a batch
    places = [epoch * STEPS + draw.randrange(earliest, STEPS) for epoch in (first, 2)]
    if point in AT_BORDER or point in IN_VALIDATION:
        places = [first + (point == "epoch start"), 2 + (point == "epoch start")]  # not before the first step
    sizes = [2, 1] if point in TOGETHER else [1, 1]
    sizes = sizes[: 2 if sum(sizes) < num_ranks else 1]
    kills = []
    for size, place in zip(sizes, places, strict=False):
        ranks, victims = tuple(victims[:size]), victims[size:]
        one = "random" if point == "two at once" else point if size == 2 or point not in TOGETHER else "backward"
        kills.append(Kill(one, ranks, place, draw.uniform(0.0, 0.1 if point == "recovery" else 0.02)))
    return Plan(num_ranks, tuple(kills), draw.choice([0, 0, 1]), draw.choice([2, BATCH]), strategy)


# --- the run


class Recorder(LightningModule):
    """Writes a line for each batch: epoch, optimizer step, number of ranks, and the numbers of its samples."""

    def __init__(self, folder: Path | None, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.folder = folder
        layers = (nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 16), nn.Linear(16, 1))
        self.net = nn.Sequential(*layers)

    def note(self, *words: Any) -> None:
        if self.folder is not None:
            with (self.folder / f"lines-{os.getpid()}").open("a") as file:
                file.write(json.dumps([*words]) + "\n")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        numbers, inputs, targets = batch
        if not self.trainer.is_filler(batch_idx):
            place = self.current_epoch, self.global_step, self.trainer.world_size
            self.note("samples", *place, *numbers.tolist())
        loss = self.loss(inputs, targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.hidden = self.net[:4](inputs)
        return (self.net[4](self.hidden).squeeze(1) - targets).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.trainer.fit_loop._should_accumulate():
            self.note("step", time.time(), self.trainer.world_size)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        _, inputs, targets = batch
        self.log("val_loss", (self.net(inputs).squeeze(1) - targets).square().mean(), sync_dist=True)

    def on_validation_end(self) -> None:
        _, inputs, targets = _data().tensors
        exact = (self.net(inputs).squeeze(1) - targets).square().mean()
        self.note("validated", abs(self.trainer.callback_metrics["val_loss"].item() - exact.item()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _die(folder: Path) -> None:
    with (folder / "kills").open("ab", buffering=0) as file:  # in one write, as the shell does
        file.write(f"{time.time()}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


class _Traps(Traps):
    def spring(self, point: str) -> None:
        """Kills this process, and writes down when, if there is a trap at a point."""
        trap = self._folder / f"trap-{point}"
        if trap.exists():
            with suppress(FileNotFoundError):  # one rank's alone
                trap.unlink()
                _die(self._folder)


class Victims(Callback):
    """Kills ranks as planned, and writes down each kill and each loss that a rank learns of."""

    def __init__(self, folder: Path, kills: tuple[Kill, ...]) -> None:
        self.folder, self.kills, self.traps = folder, kills, _Traps(folder)
        self.own, self.laid = -1, list[Kill]()

    def on_rank_loss(self, trainer: Any, pl_module: Any, lost: Any) -> None:
        pl_module.note("loss", trainer.global_step, lost.step, *lost.ranks)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.own < 0:  # not when it begins again
            self.own = trainer.global_rank
            (self.folder / f"pid-{self.own}").write_text(str(os.getpid()))
            sys.addaudithook(self.traps)
        trainer.optimizers[0].register_step_post_hook(lambda *_: self._reach("stepped", trainer.global_step))

    def _reach(self, point: str, place: int) -> None:
        for kill in self.kills:
            if kill.point == point and self.own in kill.ranks and kill.step == place:
                _die(self.folder)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step, is_first = trainer.global_step, batch_idx % trainer.accumulate_grad_batches == 0
        self._reach("fetch", step)
        for kill in self.kills if is_first else ():
            if kill.step != step or self.own not in kill.ranks:
                continue
            if kill.point == "random" and self.own == kill.ranks[0]:
                pids = " ".join((self.folder / f"pid-{rank}").read_text() for rank in kill.ranks)
                words = f"sleep {kill.delay_s:.4f}; date +%s.%N >> {self.folder}/kills; kill -9 {pids}"
                subprocess.Popen(["sh", "-c", words], start_new_session=True)
            if kill.point == "recovery" and self.own == kill.ranks[1]:
                threading.Thread(target=self._follow, args=(trainer, kill.delay_s), daemon=True).start()
            if kill.point == "order" and self.own == kill.ranks[1]:
                self._wait_for_order(trainer, trainer.world_size)
            if kill.point in IN_SAVE[1:] and kill not in self.laid:
                self.laid.append(kill)
                (self.folder / f"trap-{kill.point}").touch()

    def _wait_for_order(self, trainer: Any, num_ranks: int) -> None:
        broadcast = ObjectGroup.broadcast_object

        def kills_first(group: ObjectGroup, value: Any) -> Any:
            if trainer.world_size < num_ranks:
                _die(self.folder)
            return broadcast(group, value)

        ObjectGroup.broadcast_object = kills_first  # type: ignore[method-assign]

    def _follow(self, trainer: Any, delay_s: float) -> None:
        while trainer.heartbeat.phase != "regroup":
            time.sleep(0.0005)
        time.sleep(delay_s)
        _die(self.folder)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self._reach("forward", trainer.global_step)
        if trainer.fit_loop._should_accumulate():
            return
        for kill in self.kills:
            at = kill.point == "backward" or (kill.point in TOGETHER and self.own == kill.ranks[0])
            if at and self.own in kill.ranks and kill.step == trainer.global_step:
                # The gradients of the last layer have been sent, those of the first one have not. A hook of a parameter
                # would be called after the averages, and on one rank alone it would change them.
                pl_module.hidden.register_hook(lambda _: _die(self.folder))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._reach("reduced", trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._reach("batch end", trainer.global_step)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._reach("epoch start", trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._reach("epoch end", trainer.current_epoch)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._reach("validation start", trainer.current_epoch)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self._reach("validation batch", trainer.current_epoch)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._reach("validation end", trainer.current_epoch)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self._reach("save", trainer.global_step)


class SaveForSurvivors(Callback):
    """Saves after a step, with the random states of the ranks that are left in place of those of the first."""

    def __init__(self, path: Path, left: list[int], at: int) -> None:
        self.path, self.left, self.at = path, left, at

    def on_train_step_end(self, trainer: Any, pl_module: Any, save_now: bool) -> None:
        if trainer.global_step != self.at:
            return
        states: list[Any] = [get_random_state()]
        if trainer.world_size > 1:
            states *= trainer.world_size
            dist.all_gather_object(states, states[0])
        if trainer.global_rank < len(self.left):
            set_random_state(states[self.left[trainer.global_rank]])
        trainer.save_checkpoint(self.path)


def _data() -> TensorDataset:
    inputs = torch.randn(SIZE, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return TensorDataset(torch.arange(SIZE), inputs, inputs.sum(1).sin())


def _fit(run: Plan, num_ranks: int, module: Recorder, resume: Path | None = None, **flags: Any) -> None:
    engine = Engine(
        strategy=STRATEGIES[run.strategy],
        devices=num_ranks,
        precision="64-true",
        global_batch_size=BATCH,
        max_epochs=EPOCHS,
        hang_timeout_s=30,
        limit_val_batches=1.0 if run.validates else 0,
        num_sanity_val_steps=0,
        **QUIET,
        **flags,
    )
    order = torch.Generator().manual_seed(5)
    loader = DataLoader(_data(), run.micro_batch, shuffle=True, generator=order, num_workers=run.num_workers)
    engine.fit(module, loader, DataLoader(_data(), 4), ckpt_path=resume, weights_only=None if resume is None else False)


# --- the verdict


def storm(run: Plan, folder: Path) -> Verdict:
    """Makes a run in which ranks are killed, and judges it."""
    module, verdict = Recorder(folder, 0.0 if run.strategy in OUTER else 0.3), Verdict()
    others = set(psutil.Process().children(recursive=True))  # of the program that calls this
    callbacks: list[Callback] = [Victims(folder, run.kills)]
    if run.save_every is not None:
        callbacks.append(Snapshot(folder / "snapshots", every_n_steps=run.save_every, in_background=False))
    try:
        with _limit(LIMIT_S):
            _fit(run, run.num_ranks, module, on_rank_loss="continue", callbacks=callbacks)
    except TimeoutError:
        verdict.is_hung = True
    except Exception as error:
        verdict.ended, verdict.is_hung = str(error)[-2000:], "no progress" in str(error)
    verdict.left_running = len(set(psutil.Process().children(recursive=True)) - others)
    lines = list(_read(folder))
    kills = [float(line) for line in _lines(folder / "kills")]
    verdict.num_kills = len(kills)
    if verdict.ended or verdict.is_hung:
        return verdict
    verdict.lost, verdict.repeated = _count(lines)
    verdict.recoveries_s = list(_recoveries(lines, kills, run.num_ranks))
    if run.strategy in OUTER:
        expected, verdict.undone = _by_hand(run, lines)
        verdict.lost -= verdict.undone
    else:
        expected = _resumed(run, lines, folder)
    own = dict(module.named_parameters())
    validated = [line[1] for line in lines if line[0] == "validated"]
    verdict.difference = max(
        *validated, *((own[name] - p).abs().max().item() for name, p in expected.named_parameters())
    )
    return verdict


@contextmanager
def _limit(longest_s: float) -> Iterator[None]:
    def give_up(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, longest_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _read(folder: Path) -> Iterator[list[Any]]:
    """The lines of all ranks; those of samples with the rank after the number of ranks."""
    ranks = {path.read_text(): int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")}
    for path in folder.glob("lines-*"):
        own = ranks[path.name.removeprefix("lines-")]
        for line in map(json.loads, path.read_text().splitlines()):
            yield [*line[:4], own, *line[4:]] if line[0] == "samples" else line


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _count(lines: list[Any]) -> tuple[int, int]:
    """The numbers of samples that no step of an epoch, and more than one, was trained on."""
    batches = [line[1:] for line in lines if line[0] == "samples"]
    fewest: dict[int, int] = {}
    for _, step, num_ranks, *_ in batches:
        fewest[step] = min(num_ranks, fewest.get(step, num_ranks))
    trained = [Counter[int]() for _ in range(EPOCHS)]
    for epoch, step, num_ranks, _, *numbers in batches:
        if num_ranks == fewest[step]:
            trained[epoch].update(numbers)
    return (
        sum(SIZE - len(epoch) for epoch in trained),
        sum(count - 1 for epoch in trained for count in epoch.values()),
    )


def _recoveries(lines: list[Any], kills: list[float], num_ranks: int) -> Iterator[float]:
    """Seconds from each kill to the end of the first step by fewer ranks than were there."""
    steps = sorted((at, ranks) for kind, at, ranks, *_ in (line for line in lines if line[0] == "step"))
    for kill in kills:
        before = min((ranks for at, ranks in steps if at < kill), default=num_ranks)
        yield next((at for at, ranks in steps if at > kill and ranks < before), math.inf) - kill


def _resumed(run: Plan, lines: list[Any], folder: Path) -> Recorder:
    """Runs that were stopped where ranks went on after losses, and resumed with those that were left."""
    losses: dict[int, set[int]] = {}
    for _, at, made, *ranks in (line for line in lines if line[0] == "loss"):
        losses.setdefault(at if run.strategy in RETURNING else made, set()).update(ranks)
    ranks, path = list(range(run.num_ranks)), None
    module = Recorder(None)
    for step, lost in sorted(losses.items()):
        left = [rank for rank in ranks if rank not in lost]
        # A rank that goes back to a snapshot has, as in any resumption, the random state of the rank of its number.
        states = range(len(left)) if run.strategy in RETURNING else [ranks.index(rank) for rank in left]
        save = SaveForSurvivors(folder / f"{step}.ckpt", [*states], step)
        _fit(run, len(ranks), Recorder(None), path, callbacks=[save], max_steps=step)
        ranks, path = left, save.path
    _fit(run, len(ranks), module, path)
    return module


def _by_hand(run: Plan, lines: list[Any]) -> tuple[Recorder, int]:
    """Local steps and exchanges of the ranks, one after the other; and the samples that a lost rank has left undone."""
    is_beside = run.strategy.endswith("beside training")
    given: dict[tuple[int, int], tuple[int, list[int]]] = {}
    for _, _, step, num_ranks, own, *numbers in (line for line in lines if line[0] == "samples"):
        fewest, samples = given.get((own, step), (num_ranks, []))
        if num_ranks <= fewest:  # of a step that was made again, the last time counts
            given[own, step] = num_ranks, (samples if num_ranks == fewest else []) + numbers
    lost: dict[int, tuple[int, bool]] = {}
    for _, num_steps, at, *ranks in (line for line in lines if line[0] == "loss"):
        lost.update(dict.fromkeys(ranks, (at, num_steps < at)))  # whether in an exchange, which the others repeated
    modules = [Recorder(None, 0.0).double() for _ in range(run.num_ranks)]
    made = [module.configure_optimizers() for module in modules]
    steps, schedules = [one["optimizer"] for one in made], [one["lr_scheduler"]["scheduler"] for one in made]
    exchanges = _Exchanges(modules, OUTER[run.strategy], is_beside=is_beside)
    _, inputs, targets = _data().tensors
    members, undone = list(range(run.num_ranks)), 0
    for step in range(1, EPOCHS * STEPS + 1):
        size = 1 if step % STEPS == 0 else BATCH
        undone += size - sum(len(given.get((rank, step - 1), (0, []))[1]) for rank in members)
        for rank in members:
            _, samples = given.get((rank, step - 1), (0, []))
            # A filler counts for nothing, and is a step of the optimizer.
            loss = modules[rank].loss(inputs[samples or [0]], targets[samples or [0]]) * bool(samples)
            steps[rank].zero_grad()
            loss.backward()
            steps[rank].step()
            schedules[rank].step()
            exchanges.count(rank, len(samples))
        for in_exchange in (True, False):
            left = [rank for rank in members if lost.get(rank) != (step, in_exchange)]
            if left != members:
                exchanges.drop()
            members = left
            if in_exchange:
                exchanges.run(step, members)
    exchanges.run_all()
    weights = [list(modules[rank].parameters()) for rank in members]
    for own in zip(*weights, strict=True):
        own[0].data = torch.stack([p.detach() for p in own]).mean(0)
    return modules[members[0]], undone


class _Exchanges:
    """Exchanges of weights, in which each rank counts by its samples; one beside training is dropped with a rank."""

    def __init__(self, modules: list[Recorder], outer: dict[str, Any], *, is_beside: bool) -> None:
        self.weights = [list(module.parameters()) for module in modules]
        self.parts = (range(2), range(2, 6)) if is_beside else (range(6),)
        self.duration = BESIDE if is_beside else 0
        self.anchor = [p.detach().clone() for p in self.weights[0]]
        self.outers = [torch.optim.SGD([self.anchor[i] for i in part], **outer) for part in self.parts]
        self.samples = [[0] * len(self.parts) for _ in modules]
        self.under_way: list[tuple[int, int, dict[int, tuple[int, list[Tensor]]]]] = []

    def count(self, rank: int, num_samples: int) -> None:
        self.samples[rank] = [before + num_samples for before in self.samples[rank]]

    def drop(self) -> None:
        for _, number, sent in self.under_way:
            for rank, (num_samples, _) in sent.items():
                self.samples[rank][number] += num_samples
        self.under_way.clear()

    def run(self, step: int, members: list[int]) -> None:
        """Ends what is due after a step, and begins that of a part."""
        while self.under_way and self.under_way[0][0] == step:
            self.end()
        for number, part in enumerate(self.parts):
            if (step - SYNC_EVERY * (number + 1) // len(self.parts)) % SYNC_EVERY == 0:
                sent = {
                    rank: (self.samples[rank][number], [self.weights[rank][i].detach().clone() for i in part])
                    for rank in members
                }
                self.under_way.append((step + self.duration, number, sent))
                for rank in members:
                    self.samples[rank][number] = 0
        if not self.duration:
            self.run_all()

    def run_all(self) -> None:
        while self.under_way:
            self.end()

    def end(self) -> None:
        _, number, sent = self.under_way.pop(0)
        total = sum(num_samples for num_samples, _ in sent.values())
        with torch.no_grad():
            for place, i in enumerate(self.parts[number]):
                value = self.anchor[i]
                value.grad = sum(n * (value - before[place]) for n, before in sent.values()) / total
            self.outers[number].step()
            for rank, (_, before) in sent.items():
                for place, i in enumerate(self.parts[number]):
                    p = self.weights[rank][i]
                    p.copy_(self.anchor[i] + (p - before[place]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(POINTS), choices=list(POINTS))
    parser.add_argument("--strategy", default="ddp", choices=list(STRATEGIES))
    parser.add_argument("--kills", type=int, default=100, help="at least so many, of all points together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    each = -(-options.kills // len(options.only))
    of_strategy = "" if options.strategy == "ddp" else f" {options.strategy}"  # other draws
    are_good = [
        _row(point, each, random.Random(f"{options.seed} {point}{of_strategy}"), options.strategy)
        for point in options.only
    ]
    sys.exit(not all(are_good))


def _row(point: str, num_kills: int, draw: random.Random, strategy: str) -> bool:
    verdicts: list[Verdict] = []
    while sum(verdict.num_kills for verdict in verdicts) < num_kills and len(verdicts) < num_kills:
        run = plan(point, draw, strategy)
        with tempfile.TemporaryDirectory() as folder:
            verdicts.append(storm(run, Path(folder)))
        if not verdicts[-1].is_good:
            print(f"  {run}: {verdicts[-1]}", file=sys.stderr, flush=True)
    seconds = sorted(s for verdict in verdicts for s in verdict.recoveries_s)
    median, largest = (f"{statistics.median(seconds):.2f} s", f"{seconds[-1]:.2f} s") if seconds else ("-", "-")
    sums = [sum(getattr(v, name) for v in verdicts) for name in ("num_kills", "lost", "repeated")]
    counts = [*sums, sum(bool(v.ended) for v in verdicts), sum(v.is_hung for v in verdicts)]
    counts.append(sum(v.difference > SAME for v in verdicts))
    if strategy in OUTER:
        counts.append(sum(v.undone for v in verdicts))
    cells = [point, len(verdicts), *counts, f"{max(v.difference for v in verdicts):.0e}", median, largest]
    print("|", " | ".join(map(str, cells)), "|", flush=True)
    return all(verdict.is_good for verdict in verdicts)


if __name__ == "__main__":
    main()
