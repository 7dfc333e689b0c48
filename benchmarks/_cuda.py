"""The same cases on one GPU: ByteGPT in three sizes under bf16-mixed, and whether the host waits for the device.

Times are read after `torch.cuda.synchronize()`, at the first and at the last timed step only: in between the host may
run ahead as far as it can, as in training.
"""

from dataclasses import replace
from typing import Any

import torch
from _contestants import CASES, Case, Clock, Contestant, by_trainer, num_batches, trainers
from lightning.pytorch import Callback, LightningModule, Trainer
from report import Table
from torch import Tensor
from torch.utils.data import DataLoader

from polyphase.models import SIZES, ByteGPT

__all__ = ["cuda_cases", "cuda_contestants", "waits"]

BATCH_SIZE = 8
FLAGS: dict[str, Any] = {"accelerator": "cuda", "precision": "bf16-mixed"}
INTERVAL = 50
"""Steps between two loggings."""


class TimedGPT(ByteGPT):
    """With the case's logging in place of its own."""

    def __init__(self, size: Any, case: Case, clock: Clock) -> None:
        super().__init__(size)
        self.case, self.clock = case, clock

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clock.tick()
        loss = self._loss(batch)
        for i in range(self.case.num_logged):
            self.log(f"loss{i}", loss, prog_bar=i < self.case.num_on_bar)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.clock.tick()
        self.log("val", self._loss(batch))

    def _lr_factor(self, step: int) -> float:
        return 1.0  # ByteGPT's asks its trainer, and the loop by hand has none


def make_loader(size: str, steps: int) -> DataLoader:
    """In pinned memory, from which a copy to the device need not wait."""
    tokens = torch.randint(0, 256, (num_batches(steps) * BATCH_SIZE, SIZES[size]["context_length"] + 1))
    return DataLoader(tokens, batch_size=BATCH_SIZE, pin_memory=True)  # type: ignore[arg-type]


def by_hand(size: str, case: Case, steps: int) -> float:
    """Autocast, AdamW and its schedule, step by step."""
    clock = Clock(steps, torch.cuda.synchronize)
    module = TimedGPT(size, case, clock).cuda()
    configured = module.configure_optimizers()
    optimizer, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    if case.evaluates:
        module.eval()
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            for batch in make_loader(size, steps):
                clock.tick()
                module._loss(batch.cuda(non_blocking=True))
        return clock.us_per_step
    for i, batch in enumerate(make_loader(size, steps)):
        clock.tick()
        with torch.autocast("cuda", torch.bfloat16):
            loss = module._loss(batch.cuda(non_blocking=True)) / case.accumulate
        if i % case.accumulate == 0:
            optimizer.zero_grad()
        loss.backward()
        if (i + 1) % case.accumulate == 0:
            optimizer.step()
            schedule.step()
    return clock.us_per_step


def cuda_cases(cases: tuple[Case, ...]) -> list[tuple[str, Case]]:
    """Every case at every size."""
    return [(size, replace(case, name=f"{size}: {case.name}")) for size in SIZES for case in cases]


def cuda_contestants(size: str) -> dict[str, Contestant]:
    """The loop by hand and the two trainers."""

    def timed(make: type[Trainer]) -> Contestant:
        def run(case: Case, steps: int) -> float:
            module = TimedGPT(size, case, Clock(steps, torch.cuda.synchronize))
            by_trainer(make, module, make_loader(size, steps), case, **FLAGS)
            return module.clock.us_per_step

        return run

    known: dict[str, Contestant] = {"by hand": lambda case, steps: by_hand(size, case, steps)}
    return known | {name: timed(make) for name, make in trainers().items()}


class NoWaiting(Callback):
    """Makes it an error to wait for the device, in all steps of an interval but the first and the last.

    The last one logs; in the first the engine looks whether the losses before it were finite.
    """

    def __init__(self) -> None:
        self.num_watched = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        within = batch_idx % INTERVAL
        if batch_idx >= INTERVAL and within == 1:  # the first interval is warm-up
            torch.cuda.set_sync_debug_mode("error")
        elif within == INTERVAL - 1:
            torch.cuda.set_sync_debug_mode("default")
        self.num_watched += torch.cuda.get_sync_debug_mode() == 2  # "error"


def waits() -> Table:
    """Whether a step waits, in the Engine with all it brings; and in Trainer, which shows that the watch can see it."""
    case = next(case for case in CASES if case.own_bar)
    rows = []
    for size in SIZES:
        for name, make in trainers().items():
            watch, found = NoWaiting(), "none waits"
            module = TimedGPT(size, case, Clock(INTERVAL))
            try:
                by_trainer(
                    make, module, make_loader(size, INTERVAL), case, callbacks=[watch], log_every_n_steps=INTERVAL,
                    **FLAGS,
                )  # fmt: skip
            except RuntimeError as error:
                if "synchronizing CUDA operation" not in str(error):
                    raise
                found = f"waits ({error})"
            finally:
                torch.cuda.set_sync_debug_mode("default")
            rows.append({"size": size, "trainer": name, "steps watched": str(watch.num_watched), "found": found})
    return Table(title="Waiting for the device between two logging intervals (sync debug mode `error`)", rows=rows)
