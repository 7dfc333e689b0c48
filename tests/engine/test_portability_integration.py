"""Any checkpoint opens anywhere: saved under each layout, opened under each, and trained on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.distributed.object_group import WORLD
from polyphase.engine.strategies import adapt
from tests.pairs import alternating, nightly

from .parity import TOLERANCE, largest_difference

LAYOUTS = {
    "single": ("single", 1),
    "ddp x2": ("ddp_fork:find_unused_parameters=true", 2),
    "fsdp x2": ("fsdp_fork", 2),
    "fsdp x4": ("fsdp_fork", 4),
    "hsdp 2x2": ("hsdp_fork:replicate=2,shard=2", 4),
}
MORE_LAYOUTS = {
    "zero1 x2": ("zero1_fork:find_unused_parameters=true", 2),
    "tp x2": ("tp_fork", 2),
    "fsdp+tp 2x2": ("fsdp+tp_fork:tp=2", 4),
    "cp x2": ("cp_fork", 2),
    "pp x2": ("pp_fork:microbatches=2", 2),
    "pp+fsdp 2x2": ("pp+fsdp_fork:microbatches=2", 4),
}
"""Each of these with the partners only: what opens in one process, and in two, opens in the others, and in itself."""
ALL_LAYOUTS = LAYOUTS | MORE_LAYOUTS | {"fsdp x1": ("fsdp", 1), "fsdp+cp 2x2": ("fsdp+cp_fork:cp=2", 4)}
OF_OTHERS = [
    ("fsdp x4", "fsdp x4"),
    ("hsdp 2x2", "hsdp 2x2"),
    ("fsdp x2", "hsdp 2x2"),
    ("hsdp 2x2", "fsdp x2"),
    ("ddp x2", "fsdp+tp 2x2"),
    ("pp+fsdp 2x2", "single"),
]
"""What two ranks of fsdp, hsdp with one process, and composed layouts the other way show in `make test`."""
PAIRS = [*alternating(LAYOUTS, LAYOUTS), pytest.param("fsdp x1", "fsdp x2"), pytest.param("fsdp x2", "fsdp x1")]
for _name in MORE_LAYOUTS:
    PAIRS += [pytest.param(_name, "single"), pytest.param("ddp x2", _name)]
    PAIRS += nightly((_name, _name), (_name, "ddp x2"), ("single", _name))
PAIRS = [pair for pair in PAIRS if pair.values not in OF_OTHERS] + nightly(*OF_OTHERS)
SAVED, STEPS = 3, 6


class Odd(LightningModule):
    """Tied, frozen and unused parameters, a buffer, two groups of one optimizer, and a scheduler."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.table = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(5, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def pipeline_stages(self) -> list[list[nn.Module]]:
        return [[self.table, self.frozen, *self.inner[:2]], [*self.inner[2:], self.head]]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.frozen(self.table(batch[:, :-1])) * self.scale
        for block in self.inner:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        vectors = [p for p in self.parameters() if p.ndim == 1 and p.requires_grad]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        # The eps of the parity tests: see there.
        optimizer = torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data(world_size: int) -> DataLoader:
    rows = torch.randint(12, (8 * STEPS, 6), generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=8 // world_size, shuffle=True)  # type: ignore[arg-type]


class Dumps(Callback):
    """Rank 0 writes the whole state, gathered, when training starts, at step `SAVED`, and when it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.dump(trainer, "start")

    def on_train_step_end(self, trainer: Any, pl_module: LightningModule, save_now: bool) -> None:
        if trainer.global_step == SAVED:
            self.dump(trainer, "saved")

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.dump(trainer, "end")

    def dump(self, trainer: Any, name: str) -> None:
        module = trainer.lightning_module
        state = dict(module.state_dict())
        for parameter_name, parameter in module.named_parameters():
            for optimizer in trainer.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    state[f"{parameter_name}/{key}"] = value
        for callback in trainer.callbacks:
            if isinstance(callback, EMAWeightAveraging):
                average = callback._average_model
                state |= {f"average/{name}": value for name, value in average.module.state_dict().items()}
                state["average/updates"] = average.n_averaged
        state = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
        if adapt(trainer.strategy).capabilities.optimizer_state_partitioned:  # each rank has some of it
            mine = {key: value for key, value in state.items() if trainer.engine_strategy.keeps_state_of(value)}
            state = {key: value for each in WORLD.all_gather_object(mine) for key, value in each.items()}
        state["lr"] = torch.tensor([group["lr"] for o in trainer.optimizers for group in o.param_groups])
        if trainer.is_global_zero:
            torch.save({key: value.clone() for key, value in state.items()}, f"{self.path}-{name}")


class OddOfTwo(Odd):
    """Its hidden matrices are Muon's."""

    def configure_optimizers(self) -> Any:
        hidden = [p for p in self.inner.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if p.requires_grad and all(p is not own for own in hidden)]
        # The rate of the parity tests: see there.
        muon, adamw = torch.optim.Muon(hidden, lr=2e-4), torch.optim.AdamW(others, lr=3e-3, eps=1e-4)
        schedules = [torch.optim.lr_scheduler.StepLR(muon, 2), torch.optim.lr_scheduler.CosineAnnealingLR(adamw, STEPS)]
        return [muon, adamw], [{"scheduler": schedule, "interval": "step"} for schedule in schedules]


def train(
    layout: str, folder: Path, kind: type[Odd] = Odd, averages: tuple[Callback, ...] = (), **arguments: Any
) -> None:
    strategy, devices = ALL_LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    snapshot = Snapshot(folder / "snapshots", every_n_steps=SAVED, every_minutes=None, keep_last=3)
    engine = Engine(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*averages, snapshot, Dumps(folder / "state")],
    )
    torch.manual_seed(7)
    engine.fit(kind(), data(engine.data_size), **arguments)


def dumped(folder: Path, name: str) -> dict[str, Tensor]:
    return torch.load(folder / f"state-{name}", weights_only=True)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    train(request.param, folder)
    return request.param, folder


@pytest.mark.parametrize(("saved", "target"), PAIRS, indirect=["saved"], scope="module")
def test_opens_bit_for_bit_and_trains_on(saved, target, tmp_path):
    source, folder = saved
    train(target, tmp_path, ckpt_path=folder / "snapshots" / f"step={SAVED}")
    at_save = dumped(folder, "saved")
    assert {"table.weight/exp_avg", "inner.0.0.bias/exp_avg_sq"} <= at_save.keys()
    assert same(at_save, dumped(tmp_path, "start"))
    uninterrupted, resumed = dumped(folder, "end"), dumped(tmp_path, "end")
    if source == target:
        assert same(uninterrupted, resumed)
    else:
        assert largest_difference(uninterrupted, resumed) < TOLERANCE


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *(
            ("single", "single"),
            ("fsdp x2", "single"),
            ("ddp x2", "fsdp x2"),
            ("zero1 x2", "pp x2"),
            ("pp x2", "zero1 x2"),
        ),
        *nightly(("single", "tp x2"), ("tp x2", "hsdp 2x2"), ("fsdp x2", "fsdp x2"), ("hsdp 2x2", "ddp x2")),
    ],
)
def test_several_optimizers_open_bit_for_bit_and_train_on(source, target, tmp_path):
    train(source, tmp_path / "saved", OddOfTwo)
    train(target, tmp_path / "on", OddOfTwo, ckpt_path=tmp_path / "saved" / "snapshots" / f"step={SAVED}")
    at_save = dumped(tmp_path / "saved", "saved")
    assert {"table.weight/exp_avg", "inner.0.0.weight/momentum_buffer"} <= at_save.keys()
    assert same(at_save, dumped(tmp_path / "on", "start"))
    uninterrupted, resumed = dumped(tmp_path / "saved", "end"), dumped(tmp_path / "on", "end")
    if source == target:
        assert same(uninterrupted, resumed)
    else:
        assert largest_difference(uninterrupted, resumed) < TOLERANCE


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("cp x2", "fsdp x2"),
        *nightly(
            *(("fsdp+cp 2x2", other) for other in ("single", "tp x2", "fsdp+cp 2x2")),
            *((other, "fsdp+cp 2x2") for other in ("single", "fsdp x2")),
            *(("single", "cp x2"), ("tp x2", "cp x2"), ("pp x2", "cp x2"), ("cp x2", "zero1 x2")),
        ),
    ],
)
def test_an_average_opens_bit_for_bit_where_sequences_are_split_and_goes_on(source, target, tmp_path):
    train(source, tmp_path / "saved", averages=(EMAWeightAveraging(decay=0.5),))
    snapshot = tmp_path / "saved" / "snapshots" / f"step={SAVED}"
    train(target, tmp_path / "on", averages=(EMAWeightAveraging(decay=0.5),), ckpt_path=snapshot)
    at_save = dumped(tmp_path / "saved", "saved")
    assert at_save["average/updates"] == SAVED
    assert (at_save["average/table.weight"] - at_save["table.weight"]).abs().max() > 100 * TOLERANCE
    assert same(at_save, dumped(tmp_path / "on", "start"))
    uninterrupted, resumed = dumped(tmp_path / "saved", "end"), dumped(tmp_path / "on", "end")
    if source == target:
        assert same(uninterrupted, resumed)
    else:
        assert largest_difference(uninterrupted, resumed) < TOLERANCE
