"""What a trainer costs per step, against a loop written by hand: Engine, Lightning's Trainer, Fabric, Accelerate.

    python benchmarks/overhead.py [--rounds 7] [--steps 1000] [--output benchmarks/results]

Each round runs every contestant once, in a new order, in one process with one thread; a figure is the median over the
rounds. A contestant's own time is its time per step minus that of the hand-written loop in the same round. The time is
taken between two steps in mid-epoch, so that starting up is not in it.
"""

import argparse
import contextlib
import importlib.util
import io
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from polyphase.callbacks import ProgressBar
from polyphase.engine import Engine

sys.path.insert(0, str(Path(__file__).parent))
from report import Table, about, write_report

WARMUP = 100
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

    name: str
    num_logged: int = 0
    num_on_bar: int = 0
    extras: bool = False
    """TensorBoard, a progress bar and a checkpoint at the end of the epoch."""
    accumulate: int = 1
    evaluates: bool = False


CASES = (
    Case(name="no logging"),
    Case(name="one logged value", num_logged=1),
    Case(name="five logged values, two on the bar", num_logged=5, num_on_bar=2),
    Case(name="TensorBoard, progress bar, checkpoint", num_logged=5, num_on_bar=2, extras=True),
    Case(name="accumulation of 4", accumulate=4),
    Case(name="validation, one logged value", num_logged=1, evaluates=True),
)


class Clock:
    """Time per step, between step `WARMUP` and `steps` steps later."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._count = 0

    def tick(self) -> None:
        self._count += 1
        if self._count == WARMUP:
            self._started = time.perf_counter()
        elif self._count == WARMUP + self.steps:
            self.us_per_step = (time.perf_counter() - self._started) / self.steps * 1e6


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


def loader(steps: int, sampler: Callable[..., Any] | None = None, world_size: int = 1) -> DataLoader:
    size = (WARMUP + steps + 50) * BATCH_SIZE * world_size
    data = TensorDataset(torch.randn(size, 32), torch.randint(0, 10, (size,)))
    return DataLoader(data, batch_size=BATCH_SIZE, sampler=sampler(data) if sampler else None)


def by_hand(case: Case, steps: int) -> float:
    """The loop as PyTorch's tutorials have it."""
    clock = Clock(steps)
    module = MLP(case, clock)
    optimizer = module.configure_optimizers()
    if case.evaluates:
        with torch.no_grad():
            for batch in loader(steps):
                clock.tick()
                module.loss(batch)
        return clock.us_per_step
    for i, batch in enumerate(loader(steps)):
        clock.tick()
        loss = module.loss(batch) / case.accumulate if case.accumulate > 1 else module.loss(batch)
        if i % case.accumulate == 0:
            optimizer.zero_grad()
        loss.backward()
        if (i + 1) % case.accumulate == 0:
            optimizer.step()
    return clock.us_per_step


def by_trainer(make: type[Trainer], bar: type[RichProgressBar], case: Case, steps: int) -> float:
    """Lightning's Trainer, or the Engine."""
    module = MLP(case, Clock(steps))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        flags = dict(QUIET, accumulate_grad_batches=case.accumulate)
        if case.extras:
            extras = [bar(), ModelCheckpoint(folder)]
            flags |= {"logger": TensorBoardLogger(folder), "callbacks": extras}
            flags |= {"enable_checkpointing": True, "enable_progress_bar": True}
        trainer = make(accelerator="cpu", devices=1, **flags)
        if case.evaluates:
            trainer.validate(module, loader(steps), verbose=False)
        else:
            trainer.fit(module, loader(steps))
    return module.clock.us_per_step


def by_fabric(case: Case, steps: int) -> float | None:
    """Fabric has no loop: the user's, with its calls for backward and for the loader."""
    if case.num_logged:
        return None
    fabric = Fabric(accelerator="cpu", devices=1)
    clock = Clock(steps)
    module = MLP(case, clock)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    for i, batch in enumerate(fabric.setup_dataloaders(loader(steps))):
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
    model, optimizer, batches = accelerator.prepare(module, module.configure_optimizers(), loader(steps))
    for batch in batches:
        clock.tick()
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()
    return clock.us_per_step


def contestants() -> dict[str, Callable[[Case, int], float | None]]:
    known: dict[str, Callable[[Case, int], float | None]] = {
        "by hand": by_hand,
        "Engine": lambda case, steps: by_trainer(Engine, ProgressBar, case, steps),
        "Trainer": lambda case, steps: by_trainer(Trainer, RichProgressBar, case, steps),
        "Fabric": by_fabric,
    }
    if importlib.util.find_spec("accelerate"):
        known["Accelerate"] = by_accelerate
    return known


def single_process(rounds: int, steps: int) -> Table:
    order = random.Random(0)
    rows = []
    for case in CASES:
        times: dict[str, list[float]] = {name: [] for name in contestants()}
        for _ in range(rounds):
            for name, run in order.sample(list(contestants().items()), len(times)):
                if (us := run(case, steps)) is not None:
                    times[name].append(us)
        own = {n: [t - h for t, h in zip(ts, times["by hand"], strict=True)] for n, ts in times.items() if ts}
        ratios = [e / t for e, t in zip(own["Engine"], own["Trainer"], strict=True)]
        row = {"case": case.name, "by hand, us": f"{statistics.median(times['by hand']):.0f}"}
        row |= {f"{name}, us": _spread(own[name]) if own.get(name) else "" for name in times if name != "by hand"}
        rows.append(row | {"Engine / Trainer": f"{statistics.median(ratios):.3f}"})
        print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    title = (
        "Own time per micro-batch: one CPU process, MLP 32-64-10, batch 8, SGD (medians; min to max over the rounds)"
    )
    return Table(title=title, rows=rows)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def ddp_rank(rounds: int, steps: int, output: Path) -> None:
    """Runs in each of two processes that torchrun started."""
    dist.init_process_group("gloo")
    case = Case(name="one logged value", num_logged=1)

    def hand() -> float:
        clock = Clock(steps)
        module = MLP(case, clock)
        model = DistributedDataParallel(module)
        optimizer = module.configure_optimizers()
        logged = []
        for batch in loader(steps, DistributedSampler, 2):
            clock.tick()
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logged.append(loss.detach())
        return clock.us_per_step

    def by(make: type[Trainer]) -> float:
        module = MLP(case, Clock(steps))
        make(accelerator="cpu", devices=2, strategy="ddp", **QUIET).fit(module, loader(steps, None, 2))
        return module.clock.us_per_step

    runs: dict[str, Callable[[], float]] = {
        "by hand": hand,
        "Engine": lambda: by(Engine),
        "Trainer": lambda: by(Trainer),
    }
    order = random.Random(0)  # the same on both ranks
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in order.sample(list(runs.items()), len(runs)):
            times[name].append(run())
    if dist.get_rank() == 0:
        output.write_text(json.dumps(times))


def ddp(rounds: int, steps: int) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "times.json"
        arguments = ["--rounds", rounds, "--steps", steps, "--ddp-rank", result]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
        subprocess.run([*launcher, *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)
        times = json.loads(result.read_text())
    rows = []
    for name, us in times.items():
        ratios = [hand / own for hand, own in zip(times["by hand"], us, strict=True)]
        speed = f"{1e6 / statistics.median(us):.0f}"
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append({"contestant": name, "steps/s": speed, "of the loop by hand": spread})
    return Table(title="DDP, two processes over gloo, one logged value (steps/s; share of the loop by hand)", rows=rows)


def startup(rounds: int) -> Table:
    code = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"
    imports: dict[str, list[float]] = {"lightning.pytorch": [], "lightning.pytorch, polyphase.engine": []}
    firsts: dict[str, list[float]] = {"Trainer": [], "Engine": []}
    for _ in range(rounds):
        for modules, seconds in imports.items():
            out = subprocess.run(
                [sys.executable, "-c", code.format(modules)], check=True, capture_output=True, text=True
            )
            seconds.append(float(out.stdout.splitlines()[-1]))
        for make in (Trainer, Engine):
            firsts[make.__name__].append(_first_step_ms(make))
    rows = [{"what": f"import {m}", "median": f"{statistics.median(s):.2f} s"} for m, s in imports.items()]
    rows += [
        {"what": f"{n}.fit to first training_step", "median": f"{statistics.median(ms):.1f} ms"}
        for n, ms in firsts.items()
    ]
    return Table(title="Starting up", rows=rows)


def _first_step_ms(make: type[Trainer]) -> float:
    class First(MLP):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.at = time.perf_counter()
            return self.loss(batch)

    module, data = First(CASES[0], Clock(1)), loader(1)
    trainer = make(accelerator="cpu", devices=1, limit_train_batches=1, **QUIET)
    started = time.perf_counter()
    trainer.fit(module, data)
    return (module.at - started) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="alternating rounds (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=1000, help="steps that are timed in each run (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    parser.add_argument("--ddp-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.ddp_rank:
        ddp_rank(options.rounds, options.steps, options.ddp_rank)
        return
    tables = [single_process(options.rounds, options.steps)]
    tables.append(ddp(options.rounds, max(1, options.steps // 2)))
    tables.append(startup(min(5, options.rounds)))
    command = f"python benchmarks/overhead.py --rounds {options.rounds} --steps {options.steps}"
    write_report(options.output / "overhead-cpu.md", "Overhead per step", about(command), tables)


if __name__ == "__main__":
    main()
