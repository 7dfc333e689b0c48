"""Each example does what it says, with few steps."""

import importlib.util
import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distributed import ROOT, free_port, run_command
from tests.pairs import nightly

EXAMPLES = ROOT / "examples"
HERE = f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""So that the scripts find the torchrun of this environment."""


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# .ci/run has all of its epochs, as a demo.
@pytest.mark.parametrize(("epochs", "expected"), [(3, 0.9), *nightly((15, 0.97))])
def test_digits_reach_their_accuracy(epochs, expected):
    flags = ["--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--max_epochs", str(epochs)]
    finished = run_command([sys.executable, EXAMPLES / "digits.py", *flags], timeout_s=150)
    assert finished.returncode == 0, finished.output
    (accuracy,) = re.findall(r"^.*test[ /]accuracy.*$", finished.output, re.MULTILINE)
    assert float(accuracy.removeprefix("test accuracy ")) >= expected
    assert "\x1b" not in finished.output
    logs = re.search(r"tensorboard --logdir (\S+)", finished.output)
    assert logs, finished.output
    assert list(Path(logs[1]).glob("events.out.tfevents.*"))
    progress = rf"epoch \d+/{epochs}  step 50/{17 * epochs}  train/loss"
    assert re.search(progress, finished.output), "as plain lines"


@pytest.mark.nightly
def test_gpt_on_one_node_needs_no_devices_flag():
    flags = ["--strategy", "fsdp", "--accelerator", "cpu", "--max_steps", "10"]
    finished = run_command(["env", HERE, EXAMPLES / "torchrun.sh", *flags])
    assert finished.returncode == 0, finished.output
    assert re.search(r"^polyphase \S+ \| fsdp, shard=2 on cpu \| ", finished.output, re.MULTILINE)
    assert finished.output.count("validation bits per byte") == 1, "rank 0 alone prints"
    assert "throughput/tokens_per_s" in finished.output
    assert Path("lightning_logs").is_dir(), "it writes to where it is started, as the other examples do"


def test_text_of_a_folder(tmp_path):
    flags = ["--strategy", "fsdp", "--devices", "2", "--accelerator", "cpu", "--max_steps", "8", "--batch_size", "16"]
    weights = tmp_path / "gpt.safetensors"
    finished = run_command(
        [sys.executable, EXAMPLES / "text.py", ROOT / "docs" / "howto", *flags, "--weights", weights]
    )
    assert finished.returncode == 0, finished.output
    (bits,) = re.findall(r"validation bits per byte ([\d.]+)", finished.output)
    assert float(bits) < 7, "of 8 before training"
    assert weights.exists()


@pytest.mark.nightly
def test_gpt_on_two_nodes():
    nodes = [HERE, "NNODES=2", "NPROC=1", f"HEAD=127.0.0.1:{free_port()}"]
    command = ["env", *nodes, EXAMPLES / "torchrun.sh", "--strategy", "hsdp", "--accelerator", "cpu"]
    with ThreadPoolExecutor() as pool:
        agents = list(pool.map(run_command, [[*command, "--max_steps", "2"]] * 2))
    for finished in agents:
        assert finished.returncode == 0, agents
    outputs = "".join(finished.output for finished in agents)
    assert len(re.findall(r"^polyphase \S+ \| hsdp, replicate=2 on cpu \| ", outputs, re.MULTILINE)) == 1
    assert outputs.count("validation bits per byte") == 1, "rank 0 alone prints"


def test_global_batch_is_the_same_on_one_and_on_three():
    flags = ["--devices", "3", "--max_steps", "14", "--strategies", "ddp_fork"]  # beyond the last one of the epoch
    finished = run_command([sys.executable, EXAMPLES / "global_batch.py", *flags])
    assert finished.returncode == 0, finished.output
    (difference,) = re.findall(r"^ddp_fork +3 +(\S+)$", finished.output, re.MULTILINE)
    assert float(difference) <= 1e-5


@pytest.mark.nightly
def test_one_module_runs_under_every_strategy():
    finished = run_command([sys.executable, EXAMPLES / "all_strategies.py", "--max_steps", "3"], timeout_s=240)
    assert finished.returncode == 0, finished.output
    found = re.findall(r"^(\S+) +\d +[\d.]+ +(\S+) +[\d.]+$", finished.output, re.MULTILINE)
    module = example("all_strategies")
    assert [flag for flag, _ in found] == list(module.STRATEGIES)
    same = {flag: float(difference) for flag, difference in found if flag in module.SAME}
    assert max(same.values()) <= 1e-5, same


def test_slurm_script_uses_flags_that_the_example_takes():
    script = EXAMPLES / "slurm.sbatch"
    assert run_command(["bash", "-n", script]).returncode == 0
    text = script.read_text().replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    _, _, flags = line.partition("examples/gpt.py")
    parsed = example("gpt").arguments().parse_args(shlex.split(flags))
    assert parsed.strategy == "hsdp"
    assert (parsed.devices, parsed.num_nodes) == ("auto", 1), "SLURM's own numbers are taken"


def test_config_trains_by_the_command():
    config = EXAMPLES / "config.yaml"
    assert yaml.safe_load(config.read_text())["trainer"]["max_steps"] == 200
    command = [sys.executable, "-m", "polyphase.engine", "fit", "--config", config, "--max_steps", "3"]
    finished = run_command([*command, "--accelerator", "cpu", "--devices", "1", "--data.batch_size", "2"])
    assert finished.returncode == 0, finished.output
    assert "max_steps=3" in finished.output


@pytest.mark.parametrize("path", sorted(filter(Path.is_file, EXAMPLES.iterdir())), ids=lambda path: path.name)
def test_examples_stay_short(path):
    assert len(path.read_text().splitlines()) < 80
