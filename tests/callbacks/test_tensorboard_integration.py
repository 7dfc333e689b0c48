"""`Doctor` in TensorBoard, read back as TensorBoard reads it: each rank's shares, memory, the charts, the verdict."""

import re
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from markdown import markdown
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.plugins.custom_scalar import layout_pb2
from torch.utils.data import DataLoader, Dataset

from polyphase.callbacks import Doctor
from polyphase.engine import Engine
from polyphase.engine.phases import PHASES
from tests.distributed import run_ranks
from tests.engine.tiny import QUIET, as_rank


class SlowRows(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.ones(4)


class Linear(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(rank, devices):
    if devices > 1:
        as_rank(rank)
    loggers = [TensorBoardLogger("logs", version="one"), CSVLogger("others")]
    flags = {**QUIET, "logger": loggers, "devices": devices, "log_every_n_steps": 5, "max_steps": 20}
    Engine(**flags, strategy="ddp" if devices > 1 else "auto", callbacks=[Doctor()]).fit(
        Linear(), DataLoader(SlowRows())
    )


def _written():
    (path,) = Path("logs").rglob("events.*")
    written = EventAccumulator(str(path))
    written.Reload()
    return written


def _text(written, tag):
    return written.Tensors(tag)[0].tensor_proto.string_val[0].decode()


def test_the_ranks_shares_memory_charts_and_verdict():
    run_ranks(_fit, 2, 2, start_method="fork", timeout_s=120)
    written = _written()
    for rank in range(2):
        values = [written.Scalars(f"doctor/rank_{rank}/{phase}") for phase in PHASES]
        assert [event.step for event in values[0]] == [3, 5, 10, 15, 20]
        for shares in zip(*values, strict=True):
            assert sum(event.value for event in shares) == pytest.approx(1.0, abs=1e-3)
        assert written.Scalars(f"doctor/rss_mb/rank_{rank}")[-1].value > 10
        rates = {name: written.Scalars(f"doctor/{name}/rank_{rank}") for name in ("mfu", "samples_per_s")}
        assert [event.step for event in rates["mfu"]] == [3, 5, 10, 15, 20]
        assert 0 < rates["mfu"][-1].value < 1
        assert 10 < rates["samples_per_s"][-1].value < 50, "a sample takes 20 ms"
    (mean,) = written.Scalars("doctor/data_wait")
    assert mean.step == 20
    own = [written.Scalars(f"doctor/rank_{rank}/data_wait") for rank in range(2)]
    assert min(e.value for of in own for e in of) <= mean.value <= max(e.value for of in own for e in of)
    shown = markdown(_text(written, "doctor/verdict/text_summary"))
    assert re.search(r"<ol>\n<li><strong>slow_loader</strong>[^\n]*<ul>\n<li>remedy: ", shown), shown
    layout = layout_pb2.Layout()
    layout.ParseFromString(written.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    (category,) = layout.category
    assert category.title == "Doctor"
    assert [chart.title for chart in category.chart] == [
        "shares of the time, mean over ranks",
        "shares of the time, rank 0",
        "shares of the time, rank 1",
        "share of the peak FLOP/s, by rank (MFU)",
        "samples a second, by rank",
        "memory of the ranks, MB",
    ]
    assert "^doctor/rank_1/data_wait$" in category.chart[2].multiline.tag
    assert not list(Path("others").rglob("*verdict*"))


class Logged(Linear):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_doctor_writes_few_events_more():
    numbers = []
    for name, callbacks in (("without", []), ("with", [Doctor()])):
        flags = {
            **QUIET,
            "logger": True,
            "default_root_dir": name,
            "log_every_n_steps": 5,
            "max_steps": 500,
            "max_epochs": -1,
        }
        Engine(**flags, devices=1, callbacks=callbacks).fit(Logged(), DataLoader(torch.ones(100, 4)))
        (path,) = Path(name).rglob("events.*")
        numbers.append(sum(1 for _ in EventFileLoader(str(path)).Load()))
    assert 400 <= numbers[0] <= 410, "a loss, an epoch, a learning rate and a norm at each of 100 points"
    assert numbers[1] <= 1.65 * numbers[0], numbers


def test_one_process_has_no_curves_of_ranks():
    _fit(0, 1)
    tags = _written().Tags()
    assert "doctor/data_wait" in tags["scalars"]
    assert not [tag for tag in tags["scalars"] if tag.startswith("doctor/rank_")]
    assert "doctor/rss_mb/rank_0" in tags["scalars"]
    assert "doctor/verdict/text_summary" in tags["tensors"]
