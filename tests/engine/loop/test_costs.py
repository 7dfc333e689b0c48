"""Between two logging intervals the host waits for nothing; and a step makes few calls beside those of the work."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from polyphase.callbacks import ConsoleLogger, ProgressBar, ThroughputMonitor

from ..tiny import QUIET, CountingStream, Stream, engine
from .costs import NUM_ROWS, Costs, calls_of_a_step

INTERVAL = 5
NUM_BATCHES = 20


class Logs(LightningModule):
    """Logs in every way that a training step may."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)
        self.mean = MeanMetric(nan_strategy="disable")  # else it reads each value itself

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, prog_bar=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log_dict({"index": batch_idx, "half": loss.bfloat16()})
        self.mean.update(loss.detach())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def data() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(4 * NUM_BATCHES, 4)), batch_size=4)


def loggers_of_the_user(folder):
    return [TensorBoardLogger(folder), CSVLogger(folder)]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric MeanMetric")
@pytest.mark.parametrize("bar", [ProgressBar, ConsoleLogger])
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"precision": "bf16-mixed"},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_no_read_between_logging_intervals(tmp_path, bar, flags):
    costs = Costs()
    callbacks = [costs, bar(), LearningRateMonitor(), ThroughputMonitor(), ModelCheckpoint(tmp_path / "checkpoints")]
    trainer = engine(
        callbacks=callbacks,
        logger=loggers_of_the_user(tmp_path),
        enable_progress_bar=True,
        enable_checkpointing=True,
        log_every_n_steps=INTERVAL,
        **flags,
    )
    trainer.fit(Logs(), data())
    assert len(costs.reads) == NUM_BATCHES
    every = INTERVAL * trainer.accumulate_grad_batches
    # The last batch is followed by the end of the epoch, the first of an interval by the look at the last one's losses.
    quiet = [reads for i, reads in enumerate(costs.reads[:-1]) if (i + 1) % every and i % every]
    assert len(quiet) >= NUM_BATCHES - 2 * NUM_BATCHES // every - 1
    assert quiet == [0] * len(quiet), costs.reads
    assert sum(costs.reads) > 0, "the counter counts"


def test_the_counter_sees_what_lightnings_own_bar_costs(tmp_path):
    """The same run under Lightning's trainer and bar reads at every step: so the zeros above mean something."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import RichProgressBar

    costs = Costs()
    Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        log_every_n_steps=INTERVAL,
        callbacks=[costs, RichProgressBar()],
    ).fit(Logs(), data())
    assert min(costs.reads) > 0


def test_a_step_makes_few_calls_more_than_a_loop_by_hand():
    # Some 63: the loop's, and torch's for the step by a closure. Nine of them look up hooks and methods, which a
    # callback may replace at any time.
    assert calls_of_a_step(engine(log_every_n_steps=8)) <= 63


class Rows(TensorDataset):
    """A map with a state."""

    def __init__(self) -> None:
        super().__init__(torch.randn(NUM_ROWS, 4))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise NotImplementedError


class RowsOfStream(Stream):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(4),) for _ in super().__iter__())


class RowsOfCountingStream(CountingStream):
    def __iter__(self) -> Iterator[Any]:
        return ((torch.ones(4),) for _ in super().__iter__())


@pytest.mark.parametrize(
    ("data", "most"),
    [
        (Rows(), 63),
        # The states of the global generators before and after a read, and a look for own ones; and a checksum of the
        # batch, or a copy of the state.
        (RowsOfStream(NUM_ROWS), 76),
        (RowsOfCountingStream(NUM_ROWS), 77),
    ],
    ids=["map with a state", "stream", "stream with a state"],
)
def test_a_batch_of_any_data_takes_few_calls_more(data, most):
    assert calls_of_a_step(engine(log_every_n_steps=8), data) <= most


def test_the_counter_sees_the_calls_of_lightnings_own_loop():
    from lightning.pytorch import Trainer

    assert calls_of_a_step(Trainer(**QUIET, devices=1, max_epochs=1)) > 500
