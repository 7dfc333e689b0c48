"""Who is measured, and at what: a loop by hand, Engine, Lightning's Trainer, Fabric and Accelerate; the cases."""

import contextlib
import importlib.util
import io
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from polyphase.callbacks import ProgressBar
from polyphase.engine import Engine

__all__ = ["CASES", "MLP", "QUIET", "WARMUP", "Case", "Clock", "Contestant", "StepClock", "by_trainer", "contestants"]
__all__ += ["make_loader", "num_batches", "settle", "trainers"]

WARMUP = 100
"""Steps before the clock starts."""
BATCH_SIZE = 8
QUIET: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is asked of a trainer besides training."""

    key: str
    """By which --cases names it."""
    name: str
    num_logged: int = 0
    num_on_bar: int = 0
    extras: bool = False
    """TensorBoard, a progress bar, and a checkpoint at the end of the epoch."""
    own_bar: bool = False
    """Each trainer has the bar that it brings, in place of the same one."""
    accumulate: int = 1
    evaluates: bool = False


CASES = (
    Case(key="none", name="no logging"),
    Case(key="one", name="one logged value", num_logged=1),
    Case(key="five", name="five logged values, two on the bar", num_logged=5, num_on_bar=2),
    Case(key="extras", name="TensorBoard, progress bar, checkpoint", num_logged=5, num_on_bar=2, extras=True),
    Case(key="bars", name="the same, each its own bar", num_logged=5, num_on_bar=2, extras=True, own_bar=True),
    Case(key="accumulation", name="accumulation of 4", accumulate=4),
    Case(key="validation", name="validation, one logged value", num_logged=1, evaluates=True),
)


class Clock:
    """Time per step, between step `WARMUP` and `steps` steps later.

    Args:
        steps: how many are timed.
        wait: called before each of the two readings: for a device that runs behind the host.
    """

    def __init__(self, steps: int, wait: Callable[[], None] | None = None) -> None:
        self.steps, self.wait = steps, wait
        self._count = 0

    def tick(self) -> None:
        """Called at the start of each step, by every contestant."""
        self._count += 1
        if self._count == WARMUP:
            self._started = self._now()
        elif self._count == WARMUP + self.steps:
            self.us_per_step = (self._now() - self._started) / self.steps * 1e6

    def _now(self) -> float:
        if self.wait is not None:
            self.wait()
        return time.perf_counter()


class StepClock(Clock):
    """Notes when each step begins, too."""

    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self._starts: list[float] = []

    def tick(self) -> None:
        super().tick()
        self._starts.append(self._now())

    @property
    def times_us(self) -> list[float]:
        """The time of each step that is timed, in microseconds."""
        starts = self._starts[WARMUP - 1 : WARMUP + self.steps]
        return [(b - a) * 1e6 for a, b in pairwise(starts)]


Contestant = Callable[[Case, int], float | None]
"""Microseconds per step for a case and a number of steps; None where the case makes no sense."""


class MLP(LightningModule):
    """32-64-10, as every contestant trains it."""

    def __init__(self, case: Case, clock: Clock) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
        self.case, self.clock = case, clock

    def loss(self, batch: list[Tensor]) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def forward(self, batch: list[Tensor]) -> Tensor:
        return self.loss(batch)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.clock.tick()
        loss = self.loss(batch)
        for i in range(self.case.num_logged):
            self.log(f"loss{i}", loss, prog_bar=i < self.case.num_on_bar)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.clock.tick()
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def num_batches(steps: int) -> int:
    """Of an epoch in whose middle `steps` steps are timed."""
    return WARMUP + steps + 50


def make_loader(steps: int, sampler: Callable[..., Any] | None = None, world_size: int = 1) -> DataLoader:
    size = num_batches(steps) * BATCH_SIZE * world_size
    data = TensorDataset(torch.randn(size, 32), torch.randint(0, 10, (size,)))
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler(data) if sampler else None)


def by_hand(case: Case, steps: int) -> float:
    """The loop as PyTorch's tutorials have it; it logs nothing in any case."""
    clock = Clock(steps)
    module = MLP(case, clock)
    optimizer = module.configure_optimizers()
    if case.evaluates:
        module.eval()
        with torch.inference_mode():  # as both trainers evaluate
            for batch in make_loader(steps):
                clock.tick()
                module.loss(batch)
        return clock.us_per_step
    for i, batch in enumerate(make_loader(steps)):
        clock.tick()
        loss = module.loss(batch) / case.accumulate if case.accumulate > 1 else module.loss(batch)
        if i % case.accumulate == 0:
            optimizer.zero_grad()
        loss.backward()
        if (i + 1) % case.accumulate == 0:
            optimizer.step()
    return clock.us_per_step


def by_trainer(make: type[Trainer], module: LightningModule, loader: DataLoader, case: Case, **flags: Any) -> None:
    """One epoch under Lightning's Trainer or the Engine; what it prints goes nowhere."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = {**QUIET, "devices": 1, "accumulate_grad_batches": case.accumulate, **flags}
        if case.extras:
            flags["logger"] = TensorBoardLogger(folder)
            flags["callbacks"] = [*flags.get("callbacks", []), _bar(make, case), ModelCheckpoint(folder)]
            flags |= {"enable_checkpointing": True, "enable_progress_bar": True}
        trainer = make(**flags)
        if case.evaluates:
            trainer.validate(module, loader, verbose=False)
        else:
            trainer.fit(module, loader)


def _bar(make: type[Trainer], case: Case) -> Callback:
    # The same for both, so that what differs is the trainer: Lightning's default bar, which either can run.
    return ProgressBar() if case.own_bar and issubclass(make, Engine) else RichProgressBar()


def trainers() -> dict[str, type[Trainer]]:
    return {"Engine": Engine, "Trainer": Trainer}


def _timed(make: type[Trainer]) -> Contestant:
    def run(case: Case, steps: int) -> float:
        module = MLP(case, Clock(steps))
        by_trainer(make, module, make_loader(steps), case, accelerator="cpu")
        return module.clock.us_per_step

    return run


class _NoHooks:
    """Of callbacks and the module: there are none.

    Args:
        trainer: whose they would be.
    """

    clips = False

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def call(self, name: str, *arguments: Any) -> None: ...


def by_calls(case: Case, steps: int) -> float | None:
    """A loop by hand through what modules, strategies and plugins override of a step: no trainer can do with less."""
    if case.num_logged or case.accumulate > 1:
        return None
    module = MLP(case, Clock(WARMUP))
    engine = Engine(**QUIET, accelerator="cpu", devices=1)
    engine.fit(module, make_loader(WARMUP))
    strategy, wrapped, optimizer = engine.strategy, module.optimizers(), engine.optimizers[0]
    engine.precision_plugin.hooks = _NoHooks(engine)  # type: ignore[attr-defined]
    clock = module.clock = Clock(steps)
    for i, batch in enumerate(make_loader(steps)):

        def closure(batch: list[Tensor] = batch, i: int = i) -> Tensor:
            with torch.enable_grad():
                loss = strategy.training_step(batch, i)
                module.optimizer_zero_grad(0, i, optimizer)
                strategy.backward(loss, optimizer)
            return loss

        module.optimizer_step(0, i, wrapped, closure)
    return clock.us_per_step


def by_fabric(case: Case, steps: int) -> float | None:
    """Fabric has no loop: the user's, with its calls for backward and for the loader."""
    if case.num_logged:
        return None
    fabric = Fabric(accelerator="cpu", devices=1)
    clock = Clock(steps)
    module = MLP(case, clock)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for i, batch in enumerate(fabric.setup_dataloaders(make_loader(steps))):
        clock.tick()
        ends_window = (i + 1) % case.accumulate == 0
        with fabric.no_backward_sync(model, enabled=not ends_window):
            fabric.backward(model(batch) / case.accumulate)
        if ends_window:
            optimizer.step()
            optimizer.zero_grad()
    return clock.us_per_step


def by_accelerate(case: Case, steps: int) -> float | None:
    """Accelerate, where it is installed."""
    if case.num_logged:
        return None
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.accumulate)
    clock = Clock(steps)
    module = MLP(case, clock)
    model, optimizer, batches = accelerator.prepare(module, module.configure_optimizers(), make_loader(steps))
    for batch in batches:
        clock.tick()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
    return clock.us_per_step


def contestants() -> dict[str, Contestant]:
    """Those that can run here, the loop by hand first."""
    known: dict[str, Contestant] = {"by hand": by_hand, **{n: _timed(make) for n, make in trainers().items()}}
    known["Lightning's calls by hand"] = by_calls
    known["Fabric"] = by_fabric
    if importlib.util.find_spec("accelerate"):
        known["Accelerate"] = by_accelerate
    return known


def settle() -> None:
    """One thread, and none of Lightning's advice."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
