import json
import subprocess
from pathlib import Path

import lightning
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data
from torch.utils.data import DataLoader

from polyphase.engine import Engine, __version__

from ..tiny import Positions, Seen


class Saves(Seen):
    """Has hyperparameters of its own, one of them by a name of the engine's."""

    def __init__(self, width=32, precision="mine"):
        super().__init__()
        self.save_hyperparameters()


def fit(module=None, **flags):
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_run_summary"] = False
    engine = Engine(**{"accelerator": "cpu", "devices": 1, "max_epochs": 1, **quiet, **flags})
    engine.fit(module or Saves(), DataLoader(Positions(2)))
    return engine


def events(folder) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def hparams(folder) -> dict:
    content = events(folder).summary_metadata[SESSION_START_INFO_TAG].plugin_data.content
    values = parse_session_start_info_plugin_data(content).hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values.items()}


def saved_hparams(logger) -> dict:
    return yaml.safe_load((Path(logger.log_dir) / "hparams.yaml").read_text())


def test_tensorboard_has_flags_layout_versions_and_the_modules_own(tmp_path):
    git = ["git", "-c", "user.name=a", "-c", "user.email=b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

    engine = fit(accumulate_grad_batches=2, gradient_clip_val=0.5)

    found = hparams(engine.logger.log_dir)
    expected = {
        "width": 32,
        "precision": "mine",
        "polyphase/precision": "32-true",
        "polyphase/accumulate_grad_batches": 2,
        "polyphase/gradient_clip_val": 0.5,
        "polyphase/compression": "none",
        "polyphase/layout/shard": 1,
        "polyphase/world_size": 1,
        "polyphase/version/torch": torch.__version__,
        "polyphase/version/lightning": lightning.__version__,
        "polyphase/version/polyphase": __version__,
        "polyphase/git_commit": commit,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert {f"polyphase/{flag}" for flag in engine.flags} <= found.keys(), "all flags"
    assert "hp_metric" not in events(engine.logger.log_dir).Tags()["scalars"]
    assert json.dumps(found)
    assert saved_hparams(engine.logger) == {"width": 32, "precision": "mine"}


def test_a_module_without_hyperparameters_is_told_apart_as_well(tmp_path):
    engine = fit(Seen())
    assert hparams(engine.logger.log_dir)["polyphase/strategy"] == "auto"
    assert not saved_hparams(engine.logger)


class Keeps(Logger):
    name, version = "keeps", 0

    def __init__(self):
        super().__init__()
        self.given = []

    def log_metrics(self, metrics, step=None):
        pass

    def log_hyperparams(self, params, *args, **kwargs):
        self.given.append(params)


def test_loggers_of_the_users_own_get_them_and_stay_as_they_are(tmp_path):
    keeps, csv, board = Keeps(), CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")
    fit(logger=[keeps, csv, board])
    ours, given = keeps.given
    assert given == {"width": 32, "precision": "mine"}
    assert ours["polyphase/max_epochs"] == 1
    assert "log_hyperparams" not in vars(board)
    assert events(board.log_dir).Scalars("hp_metric")[0].value == -1
    assert hparams(board.log_dir)["polyphase/max_epochs"] == 1
    for logger in (csv, board):
        assert saved_hparams(logger) == {"width": 32, "precision": "mine"}


def test_loggers_of_the_users_own_are_not_called_where_lightning_calls_none(tmp_path):
    keeps, board = Keeps(), TensorBoardLogger(tmp_path / "board")
    fit(Seen(), logger=[keeps, board])
    assert not keeps.given
    assert "hp_metric" not in events(board.log_dir).Tags()["scalars"]


def test_who_wants_no_hyperparameters_logged_gets_none(tmp_path):
    engine = fit(enable_autolog_hparams=False)
    assert SESSION_START_INFO_TAG not in events(engine.logger.log_dir).summary_metadata


def test_a_checkpoint_has_the_modules_values_alone(tmp_path):
    engine = fit(enable_checkpointing=True)
    (folder,) = Path(engine.checkpoint_callback.dirpath).iterdir()
    again = Saves.load_from_checkpoint(str(folder))
    assert dict(again.hparams) == {"width": 32, "precision": "mine"}


def test_a_metric_of_the_users_is_logged_with_the_hyperparameters(tmp_path):
    engine = Engine(accelerator="cpu", devices=1, enable_progress_bar=False)
    engine.logger.log_hyperparams({"width": 3}, {"accuracy": 0.5})
    engine.logger.save()
    assert events(engine.logger.log_dir).Scalars("accuracy")[0].value == 0.5
    assert hparams(engine.logger.log_dir)["width"] == 3


# --- names


def test_runs_are_numbered():
    assert [Path(fit().logger.log_dir).name for _ in range(2)] == ["version_0", "version_1"]
