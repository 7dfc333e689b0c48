"""`OptimizerMonitor`: the learning rates, and the norm of all gradients where clipping has not computed it."""

import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from polyphase.callbacks import OptimizerMonitor
from polyphase.doctor import Doctor
from tests.engine.tiny import Regression, engine, rows
from tests.pairs import nightly

from .runs import MemoryLogger


class Whole(Callback):
    """The norm of the gradients before each step, in one process."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))


class TwoGroups(Regression):
    def configure_optimizers(self):
        first, _, last = self.net
        groups = [{"params": first.parameters(), "lr": 0.1}, {"params": last.parameters(), "lr": 0.2}]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def logged(module, *callbacks, **flags):
    logger = MemoryLogger()
    engine(callbacks=[OptimizerMonitor(2), *callbacks], logger=logger, max_steps=4, max_epochs=-1, **flags).fit(
        module, rows()
    )
    return [(step, row) for step, row in logger.rows if "grad_norm" in row or any("lr-" in name for name in row)]


@pytest.mark.parametrize(
    "flags", [{}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}], ids=str
)
def test_rates_of_each_group_and_the_norm_before_clipping(flags):
    whole = Whole()
    found = logged(TwoGroups(), whole, **flags)
    assert [step for step, _ in found] == [1, 3]
    for (step, row), norm in zip(found, whole.norms[1::2], strict=True):
        assert row.pop("grad_norm") == pytest.approx(norm, rel=1e-6)
        # The rates that the step was made with.
        assert row == {"lr-SGD/pg1": 0.1 * 0.5**step, "lr-SGD/pg2": 0.2 * 0.5**step}


@pytest.mark.parametrize(
    "strategy",
    [
        "fsdp_fork",
        "pp_fork:pipeline_size=2",
        *nightly("ddp_fork", "zero1_fork", "tp_fork"),
    ],
)
def test_several_ranks_log_the_norm_of_one_process(strategy, tmp_path):
    whole = Whole()
    engine(callbacks=[whole], max_steps=2, max_epochs=-1, global_batch_size=8).fit(Regression(), rows(16))
    logger = CSVLogger(tmp_path)
    flags = {"strategy": strategy, "devices": 2, "max_steps": 2, "max_epochs": -1, "log_every_n_steps": 1}
    engine(callbacks=[OptimizerMonitor()], logger=logger, **flags, global_batch_size=8).fit(Regression(), rows(16))
    (path,) = Path(tmp_path).rglob("metrics.csv")
    names, *lines = [line.split(",") for line in path.read_text().splitlines()]
    norms = [float(dict(zip(names, line, strict=True))["grad_norm"]) for line in lines]
    assert norms == pytest.approx(whole.norms, rel=1e-5)


def test_rates_that_lightnings_monitor_logs_are_left_to_it():
    assert all("lr-SGD" not in row for _, row in logged(Regression(), LearningRateMonitor()) if "grad_norm" in row)


def test_a_run_logs_both_to_tensorboard_by_default(tmp_path):
    engine(logger=True, default_root_dir=tmp_path, max_steps=2, max_epochs=-1, log_every_n_steps=1).fit(
        Regression(), rows()
    )
    (path,) = Path(tmp_path).rglob("events.*")
    written = EventAccumulator(str(path))
    written.Reload()
    for name in ("lr-SGD", "grad_norm"):
        assert [event.step for event in written.Scalars(name)] == [0, 1]


class Looks(Callback):
    def on_train_start(self, trainer, pl_module):
        self.seen = [callback for callback in trainer.callbacks if isinstance(callback, OptimizerMonitor)]


def monitors(*callbacks, **flags):
    looks = Looks()
    engine(callbacks=[looks, *callbacks], max_steps=1, **flags).fit(Regression(), rows())
    return looks.seen


def test_the_engine_adds_one_to_its_own_logger_alone(tmp_path):
    assert len(monitors(logger=True)) == 1
    own = OptimizerMonitor(5)
    assert monitors(own, logger=True) == [own]
    for logger in (False, TensorBoardLogger(tmp_path), CSVLogger(tmp_path), [MemoryLogger()]):
        assert not monitors(logger=logger)


class Waits(MemoryLogger):
    """A service far away, beside whose wait nothing else counts on a busy machine."""

    def log_metrics(self, metrics, step=None):
        time.sleep(0.1)
        super().log_metrics(metrics, step)


def test_the_doctor_counts_what_its_logger_takes_as_logging(tmp_path, capsys):
    flags = {"logger": Waits(), "max_steps": 30, "max_epochs": -1, "log_every_n_steps": 1, "default_root_dir": tmp_path}
    engine(callbacks=[OptimizerMonitor(), Doctor()], **flags).fit(Regression(), rows())
    said = capsys.readouterr().out
    assert "slow_logging: rank 0 spends" in said
    assert "OptimizerMonitor" not in said
