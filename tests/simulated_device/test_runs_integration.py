"""Runs on the device as users have them: evaluated, stopped and resumed, pinned, too large for its memory."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MeanMetric

from polyphase.engine import Engine
from polyphase.engine.precision.plugins import make_precision
from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.fsdp.rounded_gather import Rounded
from tests.distributed import run_command
from tests.engine.parity import QUIET
from tests.engine.strategies.fsdp.test_rounded_gather_integration import InFloat32
from tests.pairs import nightly

from . import in_a_child, install

pytestmark = [
    pytest.mark.timeout(180, func_only=True),  # to compile the device takes a minute
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),  # into which a resumed run writes as well
]


@pytest.mark.parametrize(("devices", "cls"), [(1, SingleDeviceStrategy), (2, DDP)])
def test_auto_is_the_engines_own_on_devices_of_any_maker(devices, cls):
    engine = Engine(accelerator="sim", devices=devices, **QUIET)
    assert type(engine.strategy) is cls
    assert type(engine.precision_plugin).__module__ == make_precision.__module__


class Drops(LightningModule):
    """Draws random numbers on its device, keeps a metric there, and evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.5)) for _ in range(4))
        self.head = nn.Linear(16, 1)
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self(x) + torch.rand(1, device=self.device) - y).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.mean.update((self(x) - y).square().mean())
        self.log("val/loss", self.mean)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(batch_size: int = 4, size: int = 64, **options: Any) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(size, 16, generator=generator), torch.randn(size, 1, generator=generator))
    return DataLoader(data, batch_size, **options)


def _fit(flag: str, devices: int, steps: int, folder: Path, opens: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Drops()
    engine = Engine(
        strategy=flag,
        accelerator="sim",
        devices=devices,
        max_steps=steps,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)],
        **{**QUIET, "enable_checkpointing": True},
    )
    # Of two ranks that have their own samples, 4 steps are an epoch.
    engine.fit(module, rows(size=32, shuffle=True), rows(size=32), ckpt_path=opens)
    assert engine.global_step == steps
    return {name: value.cpu().numpy() for name, value in module.state_dict().items()}  # which outlives this process


def _opens_without_the_device(path: Path) -> str:
    code = "state = torch.load(sys.argv[1], map_location='cpu', weights_only=True)['state_dict']"
    code = f"import sys, torch; {code}; print({{value.device.type for value in state.values()}})"
    finished = run_command([sys.executable, "-c", code, path])
    assert finished.returncode == 0, finished.output
    return finished.output.strip()


@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        ("single", 1),
        ("zero1_fork", 2),
        ("fsdp_fork", 2),
        ("pp_fork:microbatches=2", 2),
        *nightly(("ddp_fork", 2), ("hsdp_fork:replicate=2", 4), ("pp+fsdp_fork:pipeline_size=2,microbatches=2", 4)),
        ("diloco_fork:sync_every=4", 2),
    ],
)
def test_a_resumed_run_draws_the_numbers_of_one_that_was_not_stopped(flag, devices, tmp_path):
    whole = in_a_child(_fit, flag, devices, 6, tmp_path)
    half = tmp_path / "step=3.ckpt"
    resumed = in_a_child(_fit, flag, devices, 6, tmp_path, half)
    assert max(abs(resumed[name] - value).max() for name, value in whole.items()) == 0
    if half.is_file():
        assert _opens_without_the_device(half) == "{'cpu'}"


class Fits(Drops):
    """Draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block[:2] for block in self.blocks)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return (self(x) - y).square().mean()


class Uneven(IterableDataset):
    """Rank 1 has one batch less."""

    shards_itself = True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        for _ in range(8 - 2 * rank):
            yield torch.randn(16, generator=generator), torch.randn(1, generator=generator)


def _joined(accelerator: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Fits()
    engine = Engine(
        strategy="ddp_fork",
        accelerator=accelerator,
        devices=2,
        max_epochs=2,
        **QUIET,
    )
    engine.fit(module, DataLoader(Uneven(), batch_size=2))
    assert engine.global_step == 8
    return {name: value.cpu().numpy() for name, value in module.state_dict().items()}


def test_a_rank_without_samples_joins_the_others():
    found, expected = in_a_child(_joined, "sim"), in_a_child(_joined, "cpu")
    assert max(abs(found[name] - value).max() for name, value in expected.items()) <= 1e-6


def _fit_into(limit_bytes: int | None) -> tuple[dict[str, Any], int]:
    """The weights, and the peak of memory in bytes."""
    device = install()
    torch.manual_seed(0)
    module = Fits()
    engine = Engine(
        accelerator="sim",
        devices=1,
        max_epochs=2,
        global_batch_size=64,
        micro_batch_size=None if limit_bytes is None else "auto",
        **QUIET,
    )
    device.set_limit(limit_bytes or 0)
    engine.fit(module, rows(batch_size=64))
    return {name: value.cpu().numpy() for name, value in module.state_dict().items()}, device.memory()[1]


def test_a_batch_that_does_not_fit_into_memory_is_halved():
    expected, peak_bytes = in_a_child(_fit_into, None)
    found, halved_bytes = in_a_child(_fit_into, int(0.8 * peak_bytes))
    assert halved_bytes < peak_bytes
    assert max(abs(found[name] - value).max() for name, value in expected.items()) <= 1e-6


def _flags_of(text: str) -> dict[str, str]:
    """The arguments for a strategy's flag, which "offloaded" may follow."""
    flag, _, offloaded = text.partition(" ")
    return {"strategy": flag, "offload": "parameters"} if offloaded else {"strategy": flag}


def _in_fp16(accelerator: str, flag: str, devices: int) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Fits()
    flags = {"accelerator": accelerator, "devices": devices, "precision": "16-mixed", "max_steps": 4, **QUIET}
    Engine(**_flags_of(flag), gradient_clip_val=0.5, accumulate_grad_batches=2, **flags).fit(module, rows())
    return {name: value.cpu().numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        ("single", 1),
        ("ddp_fork", 2),
        *nightly(("zero1_fork", 2), ("fsdp_fork", 2), ("hsdp_fork:replicate=2", 4)),
        ("fsdp_fork offloaded", 2),
        ("local_sgd_fork:sync_every=4", 2),
    ],
)
def test_16_mixed_computes_what_it_does_on_the_cpu(flag, devices):
    found, expected = (in_a_child(_in_fp16, accelerator, flag, devices) for accelerator in ("sim", "cpu"))
    assert max(abs(found[name] - value).max() for name, value in expected.items()) <= 1e-5


class Gathers(Callback):
    """Checks whether the blocks' weights are gathered in 16 bits."""

    def __init__(self, rounds: bool) -> None:
        self.rounds = rounds

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        (group,) = pl_module.blocks[0]._get_fsdp_state()._fsdp_param_groups
        assert all(isinstance(p._unsharded_param, Rounded) == self.rounds for p in group.fsdp_params)


def _in_bf16(flag: str, rounds: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Fits()
    callbacks = [Gathers(rounds), *([] if rounds else [InFloat32()])]
    flags = {"accelerator": "sim", "devices": 2, "precision": "bf16-mixed", "max_steps": 6, **QUIET}
    Engine(**_flags_of(flag), callbacks=callbacks, **flags).fit(module, rows(), rows())
    return {name: value.cpu().numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("flag", ["fsdp_fork", *nightly("fsdp_fork offloaded")])
def test_weights_that_are_gathered_in_16_bits_train_as_those_in_32(flag):
    rounded, expected = (in_a_child(_in_bf16, flag, rounds) for rounds in (True, False))
    for name, value in expected.items():
        assert (rounded[name] == value).all(), name


class MeetsOnTheHost(Callback):
    """Adds numbers of the host up, over the default group."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [trainer.world_size] * 3


def _serve() -> int:
    engine = Engine(
        strategy="ps_fork", accelerator="sim", devices=2, max_steps=4, callbacks=[MeetsOnTheHost()], **QUIET
    )
    engine.fit(Fits(), rows())
    return engine.global_step


def test_the_ranks_of_a_parameter_server_meet_on_the_host():
    # A connection of their devices would be waited for at the end, when a rank was lost.
    assert in_a_child(_serve) == 4
