"""The kinds of faults that `doctor.py` puts into runs, and the list of its runs."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HEALTHY", "KINDS", "Kind", "Trial", "trials"]

REPLICAS = ("ddp", "fsdp", "local_sgd:sync_every=2", "zero1")
"""Each rank has samples of its own."""
LOCKSTEP = ("ddp", "fsdp", "hsdp:replicate=2", "tp", "zero1")
"""Ranks wait for each other in each step."""
PIPE = "pp:microbatches=12"
EVERY = (*LOCKSTEP, PIPE, "local_sgd:sync_every=2")
DDP = ("ddp", "zero1")
FEW = ("ddp", "fsdp", "single")
HEALTHY = "healthy"
_FAULTS_TO_A_HEALTHY_RUN = 5
_LONGER = {"fsdp": 1.5, "hsdp": 2.5, "pp": 2.5}
"""Times as long are steps under strategies that send something for each block or micro-batch."""
_LONGER_OF_FOUR = {"fsdp": 2.5}
"""The same with four ranks, which outnumber the CPUs that the benchmark is made for: they send for longer."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of fault, and what the doctor is to say of it."""

    cause: str
    strategies: Sequence[str]
    at_one_rank: bool = False
    """Whether it is of one rank, which is to be named; else of all."""
    strength: tuple[float, float] = (30.0, 90.0)
    """The least and the most: milliseconds that it costs in a step, unless the fault says otherwise."""
    ranks: tuple[int, int] = (2, 4)
    """The least and the most."""
    steps: int = 24
    interval: int = 10
    step_ms: float = 80.0
    """Milliseconds of a step without the fault."""


KINDS = {
    "slow_loader": Kind(cause="slow_loader", strategies=REPLICAS, at_one_rank=True),
    "slow_loaders": Kind(cause="slow_loader", strategies=(*REPLICAS, "single")),
    "sleep_in_step": Kind(
        cause="slow_rank", strategies=(*REPLICAS, "tp", "hsdp:replicate=2"), at_one_rank=True
    ),
    "heavy_step": Kind(cause="slow_rank", strategies=REPLICAS, at_one_rank=True),
    "paused_rank": Kind(cause="slow_rank", strategies=REPLICAS, at_one_rank=True),
    "cpu_burner": Kind(
        cause="busy_neighbour", strategies=REPLICAS, at_one_rank=True, strength=(1, 3), ranks=(2, 2), step_ms=40.0
    ),
    "slow_stage": Kind(cause="unequal_stages", strategies=(PIPE,), at_one_rank=True, strength=(200.0, 320.0)),
    "few_micro_batches": Kind(
        cause="few_micro_batches", strategies=("pp:microbatches=2", "pp:microbatches=3"), strength=(0, 0), ranks=(2, 2)
    ),
    "more_samples": Kind(cause="uneven_data", strategies=DDP, at_one_rank=True, step_ms=40.0),
    "fewer_batches": Kind(cause="uneven_data", strategies=REPLICAS, at_one_rank=True, strength=(3, 7)),
    "slow_in_turn": Kind(cause="varying_steps", strategies=LOCKSTEP, strength=(80.0, 140.0)),
    "slow_callback": Kind(cause="slow_callback", strategies=EVERY, at_one_rank=True),
    "slow_callbacks": Kind(cause="slow_callback", strategies=(*EVERY, "single")),
    "slow_module_hook": Kind(cause="slow_callback", strategies=(*EVERY, "single")),
    "slow_logger": Kind(cause="slow_logging", strategies=FEW, at_one_rank=True),
    "logs_too_often": Kind(cause="slow_logging", strategies=FEW, at_one_rank=True, strength=(10.0, 20.0)),
    "slow_saves": Kind(cause="checkpoint_stall", strategies=("ddp", "local_sgd:sync_every=2", "single")),
    "saves_too_often": Kind(cause="checkpoint_stall", strategies=FEW, strength=(20.0, 60.0), step_ms=40.0),
    "slow_validation": Kind(cause="slow_validation", strategies=FEW, strength=(60.0, 100.0)),
    "slow_transfer": Kind(cause="slow_copy", strategies=FEW),
    "slow_transfer_of_one": Kind(cause="slow_copy", strategies=REPLICAS, at_one_rank=True),
    "padding": Kind(cause="padding", strategies=FEW, strength=(5, 12)),
    "big_gradients": Kind(cause="exposed_communication", strategies=DDP, strength=(16.0, 40.0), step_ms=20.0),
    "small_buckets": Kind(cause="small_buckets", strategies=("ddp",), strength=(300, 600), step_ms=40.0),
    "costly_compression": Kind(
        cause="costly_compression", strategies=("ddp",), strength=(12.0, 24.0), ranks=(2, 2), step_ms=20.0
    ),
    "sync_while_accumulating": Kind(
        cause="sync_while_accumulating", strategies=("ddp",), strength=(12.0, 24.0), steps=20, interval=5, step_ms=15.0
    ),
    "small_units": Kind(cause="small_units", strategies=("fsdp",), strength=(40, 70), ranks=(2, 2), step_ms=40.0),
    "many_collectives": Kind(cause="underused_link", strategies=("ddp",), strength=(150, 300), step_ms=40.0),
    "small_operators": Kind(
        cause="host_bound", strategies=FEW, strength=(8000, 16000), ranks=(2, 2), step_ms=10.0
    ),
    "needless_search": Kind(cause="unused_parameter_search", strategies=("ddp",)),
    "threads": Kind(cause="thread_oversubscription", strategies=DDP, strength=(4, 8), ranks=(2, 2)),
    "leak": Kind(cause="memory_leak", strategies=(*REPLICAS, PIPE), at_one_rank=True, strength=(3.0, 6.0), interval=4),
    "replicas_differ": Kind(cause="replicas_differ", strategies=("ddp",), at_one_rank=True, ranks=(3, 4)),
    "gradient_spike": Kind(cause="gradient_spikes", strategies=FEW, strength=(100, 1000), interval=4),
    "dead_parameters": Kind(cause="dead_parameters", strategies=FEW),
    "scheduler_stands_still": Kind(cause="lr_stands_still", strategies=("ddp", "single")),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run."""

    kind: str
    strategy: str
    devices: int
    rank: int
    """At which the fault is, where it is at one."""
    strength: float
    steps: int
    interval: int
    step_ms: float
    is_mended: bool = False
    """Whether the run has the fault's remedy instead: see `_doctor_gains.py`."""

    @property
    def cause(self) -> str:
        """The cause that is to be named."""
        return "none" if self.kind == HEALTHY else KINDS[self.kind].cause

    @property
    def ranks(self) -> list[int]:
        """The ranks that are to be named: none where all are alike."""
        return [self.rank] if self.kind != HEALTHY and KINDS[self.kind].at_one_rank and self.devices > 1 else []

    def __str__(self) -> str:
        where = f" at rank {self.rank}" if self.ranks else ""
        return f"{self.kind} ({self.strength:.3g}) under {self.strategy} x{self.devices}{where}"


def trials(kinds: Sequence[str], num_faults: int, num_healthy: int, seed: int = 0) -> list[Trial]:
    """The runs, the same ones for each seed: kinds in turn, strategies of a kind in turn, healthy runs among them.

    So the runs up to any of them are as balanced as all.
    """
    dice = random.Random(seed)
    faults = [kinds[number % len(kinds)] for number in range(num_faults)]
    order: list[str] = []
    while faults or num_healthy:
        order += faults[:_FAULTS_TO_A_HEALTHY_RUN]
        del faults[:_FAULTS_TO_A_HEALTHY_RUN]
        if num_healthy:
            order.append(HEALTHY)
            num_healthy -= 1
    count = dict.fromkeys(order, 0)
    found = []
    for kind in order:
        row = KINDS.get(kind) or Kind(cause="none", strategies=(*EVERY, "single"))
        strategy = row.strategies[count[kind] % len(row.strategies)]
        count[kind] += 1
        found.append(_trial(kind, row, strategy, dice))
    return found


def _trial(kind: str, row: Kind, strategy: str, dice: random.Random) -> Trial:
    devices = dice.randint(*row.ranks)
    if strategy.startswith("hsdp"):
        devices = 4
    elif strategy == "tp" or strategy.startswith("pp:"):
        devices = 2
    elif strategy == "single":
        devices = 1
    name = strategy.partition(":")[0]
    longer = _LONGER.get(name, 1.0)
    if devices == 4:
        longer = _LONGER_OF_FOUR.get(name, longer)
    strength, rank = dice.uniform(*row.strength), dice.randrange(devices)
    if row.strength == Kind.strength:
        strength *= longer
    if kind in ("slow_logger", "logs_too_often"):
        rank = 0  # the others don't log
    return Trial(
        kind=kind, strategy=strategy, devices=devices, rank=rank, strength=strength, steps=row.steps,
        interval=row.interval, step_ms=row.step_ms * longer,
    )  # fmt: skip
