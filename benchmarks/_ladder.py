"""What the Engine's own time without logging consists of: a loop by hand that keeps one more of its promises per rung.

Each rung does by hand, with the Engine's own objects, what the rungs before it do and one thing more. Between the last
rung and the Engine is the loop that asks at each batch what may be due: an optimizer step, a scheduler's, validation, a
log, the end of the epoch or of the run.

A rung's time is the tenth percentile of its steps, of which a neighbour on the machine disturbs few, and the least of
the rounds.
"""

import gc
import random
from collections.abc import Callable
from typing import Any

import torch
from _contestants import MLP, QUIET, WARMUP, Case, Clock, StepClock, by_trainer, make_loader, trainers
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from report import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from polyphase.engine import Engine
from polyphase.engine.data.epoch_position import Watched
from polyphase.engine.loop.hooks import Hooks

__all__ = ["RUNGS", "by_rung", "ladder"]

CASE = Case(key="ladder", name="no logging")
RUNGS = (
    "the step calls a closure, as any optimizer may",
    "hooks of module and callbacks are looked for; `self.log` knows the one it is in",
    "hooks get a copy of the loss without its graph",
    "progress is counted, for checkpoints",
    "the order of samples is recorded, for checkpoints",
    "the watchdog knows the phase; waits for data are timed",
    "a loss that is not finite is noticed",
    "signals are looked for",
)


def _low_us(clock: StepClock) -> float:
    """The tenth percentile of the timed steps, in microseconds."""
    return sorted(clock.times_us)[clock.steps // 10]


def by_rung(rung: int, steps: int, num_ranks: int = 1) -> StepClock:
    """A loop by hand that keeps the first `rung` promises; on several ranks with `DistributedDataParallel`."""
    module = MLP(CASE, Clock(WARMUP))
    sampler = DistributedSampler if num_ranks > 1 else None
    engine: Any = Engine(**QUIET, accelerator="cpu", devices=num_ranks, strategy="ddp" if num_ranks > 1 else "auto")
    engine.fit(module, make_loader(WARMUP, None, num_ranks))
    optimizer, epochs = engine.optimizers[0], engine.fit_loop.epoch_loop
    hooks, heartbeat, watch = Hooks(engine), engine.heartbeat, epochs.automatic_optimization.watch
    signals, batches, optimization = engine._signal_connector, epochs.batch_progress, epochs.automatic_optimization
    steps_done, zeroed = optimization.optim_progress.optimizer.step, optimization.optim_progress.optimizer.zero_grad
    clock = module.clock = StepClock(steps)
    result: list[ClosureResult] = []
    model: Any = DistributedDataParallel(module) if num_ranks > 1 else None

    def wrapped_step(batch: list[Tensor], i: int) -> Tensor:
        clock.tick()
        return model(batch)

    training_step = module.training_step if model is None else wrapped_step

    def plain(batch: list[Tensor], i: int) -> Tensor:
        loss = training_step(batch, i)
        optimizer.zero_grad()
        loss.backward()
        return loss

    def hooked(batch: list[Tensor], i: int) -> Tensor:
        loss = hooks.in_hook("training_step", training_step, batch, i)
        if rung >= 3:
            result[:] = [ClosureResult(loss)]
        if rung >= 7:
            watch.observe(engine, "loss", result[0].loss, i)
        hooks.call("on_before_zero_grad", optimizer)
        hooks.in_hook("optimizer_zero_grad", optimizer.zero_grad)
        hooks.call("on_before_backward", loss)
        hooks.in_hook("backward", loss.backward)
        hooks.call("on_after_backward")
        hooks.call("on_before_optimizer_step", optimizer)
        return loss

    def count(total: Any, current: Any) -> None:
        total.ready += 1
        current.ready += 1
        total.completed += 1
        current.completed += 1

    loader: Any = make_loader(steps, sampler, num_ranks)
    if rung >= 5:
        loader = Watched(loader, loader.sampler, lambda: 0, lambda: 2)
    run = hooked if rung >= 2 else plain
    for i, batch in enumerate(loader):
        if rung >= 6:
            for phase in ("copy", "batch", "train", "optimizer", "train", "optimizer", "batch", "fetch"):
                heartbeat.phase = phase
            clock._now(), clock._now()
        if rung >= 2:
            hooks.call("on_train_batch_start", batch, i)
        if rung >= 2:
            hooks.in_hook("optimizer_step", optimizer.step, lambda batch=batch, i=i: run(batch, i))
        elif rung == 1:
            optimizer.step(lambda batch=batch, i=i: run(batch, i))
        else:
            run(batch, i)
            optimizer.step()
        if rung >= 4:
            count(batches.total, batches.current)
            count(steps_done.total, steps_done.current)
            count(zeroed.total, zeroed.current)
        if rung >= 2:
            outputs = result[0].asdict() if result else None
            hooks.call("on_train_batch_end", outputs, batch, i)
        if rung >= 8:
            signals.poll(i)
            assert not signals.received_sigterm
    return clock


def _by(name: str) -> Callable[[int], float]:
    def run(steps: int) -> float:
        clock = StepClock(steps)
        by_trainer(trainers()[name], MLP(CASE, clock), make_loader(steps), CASE, accelerator="cpu")
        return _low_us(clock)

    return run


def ladder(rounds: int, steps: int) -> Table:
    """The table of the rungs."""
    torch.set_num_threads(1)
    runs: dict[str, Callable[[int], float]] = {"a loop by hand": lambda steps: _low_us(by_rung(0, steps))}
    runs |= {name: lambda steps, rung=i + 1: _low_us(by_rung(rung, steps)) for i, name in enumerate(RUNGS)}
    runs |= {"all that the Engine does": _by("Engine"), "all that Lightning's Trainer does": _by("Trainer")}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(runs), len(runs)):
            gc.collect()
            times[name].append(runs[name](steps))
    least = {name: min(us) for name, us in times.items()}
    hand, stock = least["a loop by hand"], least["all that Lightning's Trainer does"]
    rows, before = [], hand
    for name, us in least.items():
        rows.append(
            {
                "what": name,
                "us": f"{us:.0f}",
                "more than the row above": f"{us - before:+.1f}",
                "own time, of the Trainer's": f"{(us - hand) / (stock - hand):.3f}",
            }
        )
        before = us
    title = "What the own time without logging consists of (tenth percentile of the steps, least of the rounds)"
    return Table(title=title, rows=rows)
