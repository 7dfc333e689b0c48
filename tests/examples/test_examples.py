"""Each example does what it says, with few steps."""

import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.distributed import ROOT, run_command, torchrun

EXAMPLES = ROOT / "examples"


def test_digits_reach_their_accuracy():
    flags = ["--strategy", "ddp", "--devices", "2", "--accelerator", "cpu"]
    finished = run_command([sys.executable, EXAMPLES / "digits.py", *flags], timeout_s=150)
    assert finished.returncode == 0, finished.output
    accuracy = re.search(r"test accuracy ([\d.]+)", finished.output)
    assert accuracy, finished.output
    assert float(accuracy[1]) >= 0.97
    logs = re.search(r"tensorboard --logdir (\S+)", finished.output)
    assert logs, finished.output
    assert list(Path(logs[1]).glob("events.out.tfevents.*"))
    assert re.search(r"epoch \d+/15  step 50/\d+  train/loss", finished.output), "progress as plain lines"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gpt_under_torchrun(strategy):
    finished = torchrun(EXAMPLES / "gpt.py", "--strategy", strategy, "--max_steps", "20", "--accelerator", "cpu")
    assert finished.returncode == 0, finished.output
    assert finished.output.count("validation bits per byte") == 1, "rank 0 alone prints"
    assert "throughput/tokens_per_s" in finished.output


def test_torchrun_script():
    script = EXAMPLES / "torchrun.sh"
    path = f"PATH={Path(sys.executable).parent}:/usr/bin:/bin"
    arguments = ["--strategy", "hsdp:replicate=2", "--accelerator", "cpu", "--max_steps", "5"]
    finished = run_command(["env", path, "bash", script, *arguments])
    assert finished.returncode == 0, finished.output
    assert "validation bits per byte" in finished.output


def test_slurm_script_uses_flags_that_the_example_has():
    text = (EXAMPLES / "slurm.sbatch").read_text()
    assert run_command(["bash", "-n", EXAMPLES / "slurm.sbatch"]).returncode == 0
    command = text[text.index("srun") :]
    used = set(re.findall(r"\s(--\w+)\s", command[command.index("gpt.py") :]))
    known = set(re.findall(r"add_argument\(\"(--\w+)\"", (EXAMPLES / "gpt.py").read_text()))
    assert used
    assert used <= known


def test_config_trains_by_the_command(tmp_path):
    config = EXAMPLES / "config.yaml"
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] == 200
    command = [sys.executable, "-m", "polyphase.engine", "fit", "--config", config, "--max_steps", "3"]
    finished = run_command([*command, "--accelerator", "cpu"])
    assert finished.returncode == 0, finished.output
    assert "max_steps=3" in finished.output


def test_examples_stay_short():
    for path in EXAMPLES.iterdir():
        if path.is_file():
            assert len(path.read_text().splitlines()) < 80, path.name
