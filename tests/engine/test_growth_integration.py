"""Twice as many layers, or tensors, take twice as many calls in Python, in each phase and under every strategy."""

import gc
import json
import sysconfig
from collections import Counter
from cProfile import Profile
from itertools import product
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from polyphase.engine.strategies import STRATEGIES
from tests.pairs import alternating, nightly

from .tiny import engine

NUM = 50
"""Layers, or tensors, of the smaller module: with fewer, what a phase costs in any case would hide how it grows."""
MOST, MOST_OF_FUNCTION = 2.2, 2.5
"""The largest ratio of a phase; and of one function, which may take N log N."""

NUM_STEPS = 4
"""Of the run that saves, in its last step: two that are compared with one process, the end of that, a usual one."""

STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]
BY_THE_CLOCK = tuple(
    f"/engine/{name}.py"
    for name in (
        *("distributed/job_store", "distributed/signing", "distributed/store_calls"),
        *("reliability/heartbeat", "reliability/tracebacks", "reliability/watchdog"),
    )
)
"""What is called once a second, and more often in a larger run for that alone."""


def is_counted(file: str) -> bool:
    """Whether functions of a file are counted: those of the standard library are called by the clock, too."""
    is_standard = file.startswith(STANDARD_LIBRARY) and "site-packages" not in file
    return not is_standard and not file.endswith(BY_THE_CLOCK)


class Perceptron(nn.Module):
    """What tensor parallelism can split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Block(nn.Module):
    """A perceptron, a number that may be a scalar, which no shards have, a buffer, and some more tensors."""

    def __init__(self, num_tensors: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.perceptron = Perceptron()
        self.gain = nn.Parameter(torch.ones(shape))
        self.register_buffer("shift", torch.zeros(4))
        self.tensors = nn.ParameterList(torch.zeros(4) for _ in range(num_tensors))

    def forward(self, x: Tensor) -> Tensor:
        for tensor in self.tensors:
            x = x + tensor
        return x + self.gain * self.perceptron(x) + self.shift


class Net(LightningModule):
    def __init__(self, num_blocks: int, num_tensors: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(num_tensors // num_blocks, shape) for _ in range(num_blocks))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


SUBJECTS = {
    "layers": lambda number, shape: Net(number, 0, shape),
    "tensors": lambda number, shape: Net(2, number, shape),
}


class Phases(Callback):
    """Counts the calls of each function in the phases of a run, and writes them down; begins before `fit`."""

    def __init__(self, folder: Path, *, is_resumed: bool) -> None:
        self.folder, self.is_resumed = folder, is_resumed
        self.profiles: dict[str, Profile] = {}
        self._begin("resume" if is_resumed else "set-up")

    def _begin(self, phase: str) -> None:
        # What is collected in a phase may be the module of an earlier run, whose end torch then hears of in Python.
        gc.collect()
        gc.disable()
        self._profile = self.profiles[phase] = Profile(subcalls=False, builtins=False)
        self._profile.enable()

    def end(self) -> None:
        """Ends the present phase."""
        self._profile.disable()
        gc.enable()

    def on_train_start(self, trainer, pl_module):
        self.end()
        if not self.is_resumed:
            self._begin("step 1")

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.end()
        if self.is_resumed:
            return
        if trainer.global_step < NUM_STEPS:
            self._begin(f"step {trainer.global_step + 1}")
        else:
            self._begin("save")
            trainer.save_checkpoint(self.folder / "saved")
            self.end()

    def on_train_end(self, trainer, pl_module):
        found = {phase: Counter() for phase in self.profiles}
        for phase, profile in self.profiles.items():
            for entry in profile.getstats():
                code = entry.code
                if is_counted(code.co_filename):
                    found[phase][f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"] += entry.callcount
        name = f"{self.is_resumed}-{trainer.global_rank}.json"
        (self.folder / name).write_text(json.dumps(found))


def calls(strategy: str, devices: int, module: LightningModule, folder: Path) -> list[dict[str, Counter[str]]]:
    """The calls of each function by phase, for each rank."""
    folder.mkdir()
    data = DataLoader(torch.ones(4 * (NUM_STEPS + 1) * devices, 4), 4)
    for is_resumed in (False, True):
        phases = Phases(folder, is_resumed=is_resumed)
        flags = {"strategy": strategy, "devices": devices, "max_steps": NUM_STEPS + is_resumed}
        trainer = engine(max_epochs=-1, callbacks=[phases], default_root_dir=folder, **flags)
        try:
            trainer.fit(module, data, ckpt_path=folder / "saved" if is_resumed else None)
        finally:
            phases.end()  # of this process, which may have started the ranks
    ranks = range(len(list(folder.glob("True-*.json"))))
    both = [[json.loads((folder / f"{kind}-{rank}.json").read_text()) for kind in (False, True)] for rank in ranks]
    # Under `ps` the thread that happens to bring a server's last gradient takes its step.
    is_timed = strategy.startswith("ps")
    return [
        {phase: Counter(calls) for run in runs for phase, calls in run.items() if not (is_timed and "step" in phase)}
        for runs in both
    ]


def grown(few: list[dict[str, Counter[str]]], many: list[dict[str, Counter[str]]]) -> list[str]:
    """What is called more than twice as often: a phase in all, or one function, whose part in a phase may be small."""
    found = []
    for rank, (phases, phases_of_many) in enumerate(zip(few, many, strict=True)):
        before, after = (sum(counts.values(), Counter()) for counts in (phases, phases_of_many))
        numbers = [(phase, counts.total(), phases_of_many[phase].total(), MOST) for phase, counts in phases.items()]
        numbers += [(function, before[function], number, MOST_OF_FUNCTION) for function, number in after.items()]
        large = [number for number in numbers if number[2] > number[3] * number[1] + NUM]
        found += [f"rank {rank}, {name}: {first} -> {second}" for name, first, second, _ in large]
    return found


RUNS = {
    "single": ("single", 1),
    "ddp": ("ddp_fork", 2),
    "zero1": ("zero1_fork", 2),
    "fsdp": ("fsdp_fork", 2),
    "hsdp": ("hsdp_fork:replicate=2", 4),
    "tp": ("tp_fork", 2),
    "cp": ("cp_fork", 2),
    "pp": ("pp_fork:microbatches=2", 2),
    "local_sgd": ("local_sgd_fork:sync_every=2", 2),
    "ps": ("ps_fork", 2),
}
COMPOSED = {
    "fsdp+tp": ("fsdp+tp_fork:tp=2", 4),
    "hsdp+tp": ("hsdp+tp_fork:replicate=2,tp=2", 4),
    "ddp+cp": ("ddp+cp_fork", 4),
    "fsdp+cp": ("fsdp+cp_fork", 4),
    "hsdp+cp": ("hsdp+cp_fork:replicate=2,cp=2", 4),
    "pp+ddp": ("pp+ddp_fork:pipeline_size=2,microbatches=2", 4),
    "pp+fsdp": ("pp+fsdp_fork:pipeline_size=2,microbatches=2", 4),
    "diloco": ("diloco_fork:sync_every=2", 2),
}


def test_every_strategy_is_here():
    assert RUNS.keys() | COMPOSED.keys() == STRATEGIES.keys() - {"dp"}, "dp needs several GPUs"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "devices", "subject"),
    [
        *alternating(RUNS.values(), SUBJECTS),
        *nightly(*((*run, subject) for run, subject in product(COMPOSED.values(), SUBJECTS))),
    ],
)
def test_calls_grow_as_the_module_grows(strategy, devices, subject, tmp_path):
    shape = (1,) if (strategy, devices) in COMPOSED.values() else ()  # most of these refuse scalars
    few, many = (
        calls(strategy, devices, SUBJECTS[subject](number, shape), tmp_path / str(number)) for number in (NUM, 2 * NUM)
    )
    assert not grown(few, many)
