"""Each example does what it says, with few steps."""

import importlib.util
import os
import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbclient import NotebookClient
from safetensors.torch import load_file, save_file

from polyphase.models import ByteGPT
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
    logs = re.search(r"tensorboard\.main --logdir (\S+)", finished.output)
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


def test_lora_trains_and_keeps_the_adapters_alone(tmp_path):
    base, adapters = tmp_path / "base.safetensors", tmp_path / "adapters"
    save_file({name: tensor.clone() for name, tensor in ByteGPT().state_dict().items()}, base)
    flags = [
        "--strategy",
        "fsdp",
        "--devices",
        "2",
        "--accelerator",
        "cpu",
        "--max_steps",
        "12",
        "--adapters",
        adapters,
    ]
    finished = run_command([sys.executable, EXAMPLES / "lora.py", base, ROOT / "README.md", *flags])
    assert finished.returncode == 0, finished.output
    kept = load_file(adapters / "adapter_model.safetensors")
    assert len(kept) == 2 * 4 * 4, "two matrices for each of four layers of four blocks"
    assert all(".lora_" in name for name in kept)
    assert any(tensor.abs().max() > 0 for name, tensor in kept.items() if "lora_B" in name)
    losses = re.findall(r"train/loss ([\d.]+)", finished.output)
    assert losses, finished.output


def test_images_are_classified_by_two_ranks():
    flags = ["--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--max_epochs", "8"]
    finished = run_command([sys.executable, EXAMPLES / "images.py", *flags], timeout_s=150)
    assert finished.returncode == 0, finished.output
    (accuracy,) = re.findall(r"test/accuracy +│ +([\d.]+)", finished.output)
    assert float(accuracy) > 0.85


def test_a_gan_draws_digits():
    flags = ["--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--max_epochs", "2"]
    finished = run_command([sys.executable, EXAMPLES / "gan.py", *flags])
    assert finished.returncode == 0, finished.output
    assert "generator/loss" in finished.output
    drawn = re.findall(r"^[ .+#@]{70}$", finished.output, re.MULTILINE)
    assert len(drawn) == 8, finished.output


def test_a_recurrent_network_learns_from_a_stream():
    flags = ["--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--max_steps", "60"]
    finished = run_command([sys.executable, EXAMPLES / "stream.py", *flags])
    assert finished.returncode == 0, finished.output
    found = {name: float(value) for name, value in re.findall(r"(test/loss\w*) +│ +([\d.]+)", finished.output)}
    assert found["test/loss"] < 0.5 * found["test/loss_of_the_last_value"], found


@pytest.mark.timeout(240)
def test_the_notebook_runs_from_its_first_cell_to_its_last(monkeypatch):
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "outputs are left out"
    NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "") or output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )
    assert len(re.findall(r"^epoch \d/5  [\d.]+ s  loss \S+  val/loss \S+", printed, re.MULTILINE)) == 5, printed
    assert float(re.findall(r"mean squared error ([\d.]+)", printed)[0]) < 0.1
    assert "equal to one process" in printed


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


@pytest.mark.parametrize(
    "path",
    sorted(path for path in EXAMPLES.iterdir() if path.is_file() and path.suffix != ".ipynb"),
    ids=lambda path: path.name,
)
def test_examples_stay_short(path):
    assert len(path.read_text().splitlines()) < 80


def test_the_list_has_every_example():
    listed = re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert set(listed) == {path.name for path in EXAMPLES.iterdir() if path.name not in ("README.md", "__pycache__")}
