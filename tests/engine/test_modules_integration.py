"""Modules and data of all kinds: groups and schedules, streams, precisions and compression that keep the loss."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from polyphase.engine import Engine
from polyphase.models import ByteGPT, PythonSource
from tests.engine.parity import MLP, loader
from tests.pairs import alternating, nightly

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Losses(Callback):
    """Writes the mean over all ranks of each batch's loss."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.losses.append(trainer.strategy.reduce(outputs["loss"].float(), reduce_op="mean").item())

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.losses))


def losses(tmp_path: Path, steps: int, **flags: object) -> list[float]:
    torch.manual_seed(0)
    module = ByteGPT(num_layers=2, num_heads=2, dim=32, context_length=32, warmup_steps=5)
    path = tmp_path / "losses.json"
    engine = Engine(accelerator="cpu", devices=2, max_steps=steps, callbacks=[Losses(path)], **QUIET, **flags)
    data = PythonSource(batch_size=4, context_length=32, max_bytes=100_000)
    data.setup("fit")
    engine.fit(module, DataLoader(data.train, batch_size=4))
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """The losses of ten steps in float32."""
    return losses(tmp_path_factory.mktemp("exact"), 10, strategy="ddp_fork")


@pytest.mark.parametrize(
    ("strategy", "precision"), alternating(["ddp_fork", "fsdp_fork"], ["bf16-mixed", "16-mixed", "bf16-true"])
)
def test_low_precision_keeps_the_loss_within_two_percent(strategy, precision, exact, tmp_path):
    low = losses(tmp_path, 10, strategy=strategy, precision=precision)
    assert low == pytest.approx(exact, rel=0.02)
    assert low != exact


@pytest.mark.parametrize("num_steps", [40, *nightly(100)])
def test_powersgd_ends_within_five_percent(num_steps, tmp_path):
    plain = losses(tmp_path, num_steps, strategy="ddp_fork")
    compressed = losses(tmp_path, num_steps, strategy="ddp_fork", compression="powersgd:4")
    assert compressed != plain
    # The mean of the last ten: single batches scatter by more than the effect.
    assert sum(compressed[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.05)


class GroupsAndSchedule(MLP):
    def configure_optimizers(self):
        groups = [{"params": self.net[0].parameters(), "lr": 0.1}, {"params": self.net[2:].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_parameter_groups_and_a_schedule(strategy):
    def trained(flag: str, devices: int) -> dict:
        torch.manual_seed(0)
        module = GroupsAndSchedule()
        engine = Engine(strategy=flag, accelerator="cpu", devices=devices, max_epochs=1, **QUIET)
        engine.fit(module, loader("mlp", 1, devices))
        return module.state_dict()

    expected, found = trained("single", 1), trained(strategy, 2)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-5)


class Stream(IterableDataset):
    """Each rank's own part, of unknown length."""

    shards_itself = True

    def __iter__(self):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        generator = torch.Generator().manual_seed(rank)
        for _ in range(20):
            yield torch.randn(64, generator=generator), torch.randint(0, 10, (), generator=generator)


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_a_stream(strategy):
    engine = Engine(strategy=strategy, accelerator="cpu", devices=2, max_epochs=2, accumulate_grad_batches=3, **QUIET)
    engine.fit(MLP(), DataLoader(Stream(), batch_size=4))
    assert engine.state.finished


class Seen(LightningModule):
    """Writes which samples this rank trains on, batch by batch."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[0].int().flatten().tolist())
        return self.layer(batch[0]).mean()

    def on_train_end(self):
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(self.seen))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_each_step_sees_the_samples_of_one_process(strategy, shuffle, tmp_path):
    def seen(flag: str, devices: int) -> list[list[list[int]]]:
        torch.manual_seed(3)
        data = TensorDataset(torch.arange(24.0).unsqueeze(1))
        engine = Engine(strategy=flag, accelerator="cpu", devices=devices, max_epochs=2, **QUIET)
        engine.fit(Seen(str(tmp_path)), DataLoader(data, batch_size=4 // devices, shuffle=shuffle))
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(devices)]

    (alone,) = seen("single", 1)
    together = [sorted(a + b) for a, b in zip(*seen(strategy, 2), strict=True)]
    assert together == [sorted(batch) for batch in alone]
    epoch = [sample for batch in alone[:6] for sample in batch]
    assert (epoch == list(range(24))) is not shuffle
    assert sorted(epoch) == list(range(24))
