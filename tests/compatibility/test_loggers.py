"""Loggers, and what is uploaded by them."""

import csv
import os
from pathlib import Path

import mlflow
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from lightning.pytorch.utilities import rank_zero_only
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from .small import Small


class Mine(Logger):
    name, version = "mine", 0

    def __init__(self):
        super().__init__()
        self.rows, self.parameters, self.files, self.ends = [], {}, [], []

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.rows.append((step, metrics))

    @rank_zero_only
    def log_hyperparams(self, params, *_, **__):
        self.parameters.update(params)

    def after_save_checkpoint(self, checkpoint_callback):
        self.files.append([os.path.isfile(path) for _, path, _, _ in _scan_checkpoints(checkpoint_callback, {})])

    def finalize(self, status):
        self.ends.append(status)


def test_a_logger_of_ones_own(make, tmp_path):
    mine = Mine()
    trainer = make(max_epochs=2, logger=mine, log_every_n_steps=3, callbacks=[ModelCheckpoint(tmp_path)])
    trainer.fit(Small())
    assert [step for step, metrics in mine.rows if "train_loss" in metrics] == [2, 5, 8, 11]
    assert [step for step, metrics in mine.rows if "val_loss" in metrics] == [5, 11]
    assert mine.parameters["width"] == 4
    assert mine.files
    assert all(all(each) for each in mine.files)
    assert mine.ends == ["success"]


def test_several(make, tmp_path):
    loggers = [CSVLogger(tmp_path, "a"), TensorBoardLogger(tmp_path, "b")]
    trainer = make(max_epochs=1, logger=loggers, log_every_n_steps=1)
    trainer.fit(Small())
    assert trainer.loggers == loggers
    assert trainer.logger is loggers[0]
    assert trainer.log_dir == loggers[0].log_dir
    with open(tmp_path / "a" / "version_0" / "metrics.csv") as stream:
        assert [row["train_loss"] != "" for row in csv.DictReader(stream)].count(True) == 6
    events = EventAccumulator(str(tmp_path / "b" / "version_0"))
    events.Reload()
    assert len(events.Scalars("train_loss")) == 6


def test_the_default(make, tmp_path):
    trainer = make(max_epochs=1, logger=True)
    trainer.fit(Small())
    assert trainer.log_dir == str(tmp_path / "lightning_logs" / "version_0")
    assert isinstance(trainer.logger, TensorBoardLogger)
    assert (tmp_path / "lightning_logs" / "version_0" / "hparams.yaml").exists()
    assert len(list((tmp_path / "lightning_logs" / "version_0" / "checkpoints").glob("*.ckpt"))) == 1


def test_metrics_that_a_callback_or_a_script_logs(make):
    mine = Mine()
    trainer = make(max_epochs=1, logger=mine)
    trainer.fit(Small())
    trainer.logger.log_metrics({"after": 1.0}, step=9)
    assert mine.rows[-1] == (9, {"after": 1.0})


def test_wandb_offline(make, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    make(max_epochs=1, logger=logger).fit(Small())
    assert logger.experiment.config["width"] == 4
    logger.experiment.finish()


def test_mlflow_uploads_the_model(make, tmp_path):
    store = f"sqlite:///{tmp_path / 'runs.db'}"
    logger = MLFlowLogger("digits", tracking_uri=store, artifact_location=str(tmp_path / "artifacts"), log_model=True)
    make(max_epochs=1, logger=logger, callbacks=[ModelCheckpoint(tmp_path / "saved")]).fit(Small())
    (uploaded,) = (tmp_path / "artifacts").rglob("*.ckpt")
    assert torch.load(uploaded, weights_only=True)["global_step"] == 6
    assert logger.experiment.get_run(logger.run_id).data.params["width"] == "4"


def test_mlflow_logs_by_itself(make, tmp_path):
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    mlflow.pytorch.autolog(log_models=False)
    try:
        with mlflow.start_run() as started:
            make(max_epochs=2, logger=False, enable_checkpointing=False).fit(Small())
    finally:
        mlflow.pytorch.autolog(disable=True)
    logged = mlflow.get_run(started.info.run_id).data
    assert "val_loss" in logged.metrics
    assert logged.params["epochs"] == "2"
    assert logged.params["lr"] == "0.1"


class Alike:
    """Has what a logger has, without being a `Logger`."""

    name, version, save_dir, root_dir, log_dir, group_separator = "alike", 0, None, None, None, "/"

    def __init__(self):
        self.calls = []

    def __getattr__(self, method):
        return lambda *args, **_: self.calls.append(method)

    def log_metrics(self, metrics, step=None):
        self.calls.append("log_metrics")

    def log_hyperparams(self, params):
        self.given = params


def test_a_logger_without_a_base_class(make):
    alike = Alike()
    make(max_epochs=1, logger=alike, log_every_n_steps=2, enable_checkpointing=False).fit(Small(width=5))
    assert {"log_metrics", "save", "finalize"} <= set(alike.calls)
    assert alike.given == {"width": 5, "lr": 0.1}


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger])
def test_hparams_yaml_makes_the_module_again(make, tmp_path, kind):
    logger = kind(tmp_path)
    make(max_epochs=1, logger=logger).fit(Small(width=5))
    text = (Path(logger.log_dir) / "hparams.yaml").read_text()
    assert yaml.safe_load(text) == {"width": 5, "lr": 0.1}
    assert dict(Small(**yaml.safe_load(text)).hparams) == {"width": 5, "lr": 0.1}


def test_a_module_without_hyperparameters(make, tmp_path):
    class Plain(Small):
        def save_hyperparameters(self, *args, **kwargs):
            pass

    mine, board = Mine(), TensorBoardLogger(tmp_path)
    make(max_epochs=1, logger=[mine, board]).fit(Plain())
    assert not mine.parameters
    assert not board.hparams
