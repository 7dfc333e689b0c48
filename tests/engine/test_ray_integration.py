"""Real Ray: four trials of Ray Tune at once, whose checkpoints open, one of which fails and continues from its own."""

import sys

import pytest

from tests.distributed import ROOT, run_command

TRIALS = """
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path

import ray
from lightning.pytorch import seed_everything
from ray import tune
from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback

from tests.engine.tiny import QUIET, Engine, Regression, rows

FOLDER = Path(__file__).parent
TRIALS = [
    {"seed": 1, "checkpoint_format": "file", "fails": False},
    {"seed": 2, "checkpoint_format": "directory", "fails": False},
    {"seed": 3, "checkpoint_format": "file", "fails": True},
    {"seed": 4, "checkpoint_format": "directory", "fails": False},
]


class Logged(Regression):
    fails = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_train_epoch_start(self):
        mark = FOLDER / "has-failed"
        if self.fails and self.current_epoch == 2 and not mark.exists():
            mark.touch()
            raise RuntimeError("a node is gone")


def train(trial, callbacks=(), path=None):
    seed_everything(trial["seed"])
    module = Logged()
    module.fails = trial["fails"]
    flags = {**QUIET, "checkpoint_format": trial["checkpoint_format"]}
    engine = Engine(**flags, devices=1, max_epochs=4, callbacks=list(callbacks))
    engine.fit(module, rows(shuffle=True), ckpt_path=path)
    return module


def run_trial(config):
    # All four are there before any of them goes on.
    (FOLDER / f"there-{config['trial']['seed']}").touch()
    deadline = time.monotonic() + 120
    while len(list(FOLDER.glob("there-*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    checkpoint = tune.get_checkpoint()
    report = TuneReportCheckpointCallback({"loss": "loss"}, on="train_epoch_end")
    with checkpoint.as_directory() if checkpoint else nullcontext() as folder:
        if folder:
            (FOLDER / f"resumed-{config['trial']['seed']}").touch()
        train(config["trial"], [report], folder and os.path.join(folder, "checkpoint"))


def weights(module):
    return {name: value.tolist() for name, value in module.state_dict().items()}


def tune_four():
    results = tune.Tuner(
        tune.with_resources(run_trial, {"cpu": 0.5}),
        param_space={"trial": tune.grid_search(TRIALS)},
        run_config=tune.RunConfig(
            storage_path=str(FOLDER / "results"), failure_config=tune.FailureConfig(max_failures=1)
        ),
    ).fit()
    for result in results:
        trial = {**result.config["trial"], "fails": False}
        path = Path(result.checkpoint.path, "checkpoint")
        said = {
            "at once": (FOLDER / f"there-{trial['seed']}").exists(),
            "directory": path.is_dir(),
            "equal": weights(Logged.load_from_checkpoint(path)) == weights(train(trial)),
            "resumed": (FOLDER / f"resumed-{trial['seed']}").exists(),
        }
        print(f"trial {trial['seed']}: {result.metrics['training_iteration']} epochs {json.dumps(said)}", flush=True)


def ask_for_two_processes():
    Engine(**QUIET, strategy="ddp", devices=2, max_epochs=1).fit(Logged(), rows())


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        ray.get(ray.remote(ask_for_two_processes).remote())
    except ValueError as error:
        print(error)
    tune_four()
"""


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_four_trials_at_once_and_one_that_resumes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # Ray's workers have it from here
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray's own is 15: beside other tests they would get no turn
    script = tmp_path / "trials.py"
    script.write_text(TRIALS)
    finished = run_command([sys.executable, script], timeout_s=380)
    assert finished.returncode == 0, finished.output[-6000:]
    # An engine in a worker of Ray's can't start that worker once more.
    refusal = "strategy 'ddp' runs this process's command once per device, but it is Ray's own command"
    assert refusal in finished.output, finished.output[-6000:]
    assert "ScalingConfig(num_workers=2)" in finished.output
    for seed, is_directory, resumed in ((1, "false", "false"), (2, "true", "false"), (3, "false", "true")):
        expected = f'{{"at once": true, "directory": {is_directory}, "equal": true, "resumed": {resumed}}}'
        assert f"trial {seed}: 4 epochs {expected}" in finished.output, finished.output[-6000:]
    assert 'trial 4: 4 epochs {"at once": true, "directory": true, "equal": true' in finished.output
