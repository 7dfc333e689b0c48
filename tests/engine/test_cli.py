"""The `polyphase` command as a user types it."""

import os
import re
import sys
from pathlib import Path

import pytest

from polyphase.engine.cli import main
from polyphase.engine.cli.lightning_cli import SHORT, expand
from polyphase.engine.cli.runs import NAMES_MODEL
from polyphase.engine.version import __version__
from tests.distributed import run_command
from tests.pairs import nightly

MODULE = [sys.executable, "-m", "polyphase.engine"]
SCRIPT = Path(sys.executable).parent / "polyphase"
GPT = ["--model", "ByteGPT", "--data", "PythonSource", "--accelerator", "cpu"]
SMALL = [
    "--model.dim=16",
    "--model.num_layers=2",
    "--model.context_length=32",
    "--data.context_length=32",
    "--data.max_bytes=20000",
    "--data.max_val_bytes=4000",
]
QUIET = ["--trainer.logger=false", "--trainer.enable_model_summary=false", "--trainer.enable_checkpointing=false"]
OWN = """
from polyphase.models import Digits, DigitsClassifier

class Mine(DigitsClassifier): ...

class BrokenConstructor(DigitsClassifier):
    def __init__(self):
        raise ValueError("broken by its author")

class BrokenStep(DigitsClassifier):
    def training_step(self, batch, batch_idx):
        raise ValueError("broken by its author")

class BrokenPlan(DigitsClassifier):
    def tensor_parallel_plan(self):
        raise ValueError("broken by its author")

class WithData(DigitsClassifier):
    def train_dataloader(self):
        data = Digits()
        data.setup("fit")
        return data.train_dataloader()
"""


@pytest.fixture
def command(monkeypatch):
    """Calls the command in this process, which is left as it was."""

    def call(*arguments: str | Path) -> None:
        monkeypatch.setattr(sys, "argv", ["polyphase", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        main()

    # Lightning still calls jsonargparse by its former names.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    yield call
    sys.modules.pop("mine", None)


def own_module() -> None:
    Path("mine.py").write_text(OWN)


def test_short_flags_are_the_engines():
    words = ["fit", "--strategy", "ddp", "--devices=2", "--trainer.max_steps", "3", "--model", "A", "--seed", "1"]
    assert expand(words) == [
        *("fit", "--trainer.strategy", "ddp", "--trainer.devices=2", "--trainer.max_steps", "3"),
        *("--model", "A", "--seed", "1"),
    ]
    assert expand([f"--{name}" for name in SHORT]) == [f"--trainer.{name}" for name in SHORT]


def test_short_flags_may_be_added_to_and_have_options_of_their_own():
    words = ["fit", "--callbacks+=A", "--callbacks.every_n_steps", "3"]
    assert expand(words) == ["fit", "--trainer.callbacks+=A", "--trainer.callbacks.every_n_steps", "3"]


def test_expanding_twice_changes_nothing():
    words = expand(["fit", "--strategy", "ddp", "--model.strategy", "x", "--strategy_of_mine", "y", "strategy"])
    assert expand(words) == words
    assert words[3:] == ["--model.strategy", "x", "--strategy_of_mine", "y", "strategy"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fti"], "unknown command 'fti'. Did you mean 'fit'?"),
        (["strategies", "fsdp", "ddp"], "strategies takes one NAME, but got fsdp ddp"),
        (["strategies", "--explain"], "--explain takes one: a MODEL"),
        (["strategies", "--explain", "ByteGTP"], "unknown model 'ByteGTP'. Did you mean 'ByteGPT'?"),
        (
            ["fit", "--data", "PythonSource"],
            "fit needs a model: --model NAME of polyphase.models, or --model package.Class.",
        ),
        (["fit", "--model", "ByteGTP"], "unknown model class 'ByteGTP'. Did you mean 'ByteGPT'?"),
        (["fit", "--model", "Other"], "Name your own class by its import path: --model package.Class."),
        (
            ["fit", "--model=ByteGPT", "--data=PythonSorce"],
            "unknown data class 'PythonSorce'. Did you mean 'PythonSource'",
        ),
        (["fit", *GPT, "--max_step", "3"], "Did you mean --max_steps?"),
        (["fit", *GPT, "--limit_val_batch", "3"], "Did you mean --limit_val_batches?"),
        (["fit", *GPT, "--max_steps", "some"], "--max_steps: max_steps='some': a whole number of at least -1"),
        (["fit", "--config", "absent.yaml"], "File does not exist"),
        (["fit", *GPT, "--strategy", "fdsp"], "unknown strategy 'fdsp'. Did you mean 'fsdp'?"),
        (["fit", *GPT, "--strategy", "fsdp", "--compression", "powersgd"], "'fsdp' can't do compression 'powersgd'"),
        (["fit", *GPT, "--strategy", "hsdp:replicate=3", "--devices", "4"], "replicate=3 = 3 does not fit 4"),
        (["fit", *GPT, "--devices", "some"], "devices='some': a number, 'auto' or a list of indices"),
        (["verify", *GPT, "--steps", "0"], "steps must be a whole number of at least 1"),
        (["verify", "--model", "ByteGPT", "--accelerator", "cpu"], "verify needs data"),
        (["bench-comm", "--devices", "1", "--accelerator", "cpu"], "bench-comm measures the network between"),
        (["bench-comm", *GPT, "--devices", "2", "--strategy", "fsdp"], "can't forecast under strategy 'fsdp': choose"),
        (["verify", *GPT, "--devices", "8", "--strategy", "pp:pipeline_size=8"], "ByteGPT can't be cut into 8 stages"),
        (["fit", *GPT, "--devices", "2", "--num_nodes", "2"], "`polyphase launch --nnodes 2`"),
        (["fit", *GPT, "--devices", "1", "--resume", "atuo"], "Checkpoint file not found: "),
        (["validate", *GPT, "--devices", "1", "--ckpt_path", "mine"], "Checkpoint file not found: "),
        (["fit", "--model", "ByteGPT", "--accelerator", "cpu"], "fit needs data: --data NAME or --data package.Class."),
        *nightly(
            (["fit", *GPT, "--model.size", "11M"], "Did you mean '10M'?"),
            (["bench-comm", "--model", "ByteGPT", "--devices", "2", "--accelerator", "cpu"], "bench-comm needs data"),
            (["bench-comm", *GPT, "--devices", "2", "--compressions", "[topk:2]"], "topk:density must be greater than"),
            (
                ["fit", *GPT, "--devices", "3", "--strategy", "tp:tp=3"],
                "which 3 tensor-parallel ranks can't share equally",
            ),
            (["fit", *GPT, "--devices", "2", "--strategy", "pp", "--trainer.sync_batchnorm=true"], "in a pipeline"),
            (["fit", *GPT, "--devices", "1", "--ckpt_path", "mine"], "Checkpoint file not found: "),
            (["validate", "--model", "ByteGPT", "--accelerator", "cpu"], "validate needs data"),
        ),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments, message, capsys, command):
    with pytest.raises(SystemExit) as ended:
        command(*arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "polyphase: error: " in error
    assert message in error
    assert "Traceback" not in error
    assert "usage:" not in error
    assert not Path("failures").exists()


@pytest.mark.parametrize("name", ["BrokenConstructor", "BrokenStep", "BrokenPlan"])
def test_errors_of_the_users_own_code_stay_errors(name, command):
    own_module()
    flags = ["--accelerator", "cpu", "--max_epochs", "1", *QUIET]
    strategy = ["--strategy", "tp", "--devices", "2"] if name == "BrokenPlan" else ["--devices", "1"]
    with pytest.raises(ValueError, match="broken by its author"):
        command("fit", "--model", f"mine.{name}", "--data", "Digits", *flags, *strategy)


def test_a_model_may_bring_its_own_data(command, tmp_path):
    own_module()
    flags = ["--devices", "1", "--accelerator", "cpu", "--max_steps", "1", "--trainer.limit_val_batches", "0", *QUIET]
    command("fit", "--model", "mine.WithData", *flags)
    assert (tmp_path / "config.yaml").exists()


def test_without_jsonargparse_it_says_what_to_install(capsys, command, monkeypatch):
    monkeypatch.setattr("lightning.pytorch.cli._JSONARGPARSE_SIGNATURES_AVAILABLE", False)
    with pytest.raises(SystemExit) as ended:
        command("fit", *GPT)
    assert ended.value.code == 2
    assert 'pip install "polyphase[cli]"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_teaches(arguments, capsys, command):
    command(*arguments)
    assert "polyphase fit --model" in capsys.readouterr().out


def test_version(capsys, command):
    command("--version")
    assert capsys.readouterr().out == f"polyphase {__version__}\n"


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # Lightning's, as testing makes a new version_N
def test_fit_then_test_from_its_checkpoint(capsys, command, tmp_path):
    digits = ["--model", "DigitsClassifier", "--data", "Digits", "--accelerator", "cpu", "--devices", "1"]
    command("fit", *digits, "--max_epochs", "1", "--trainer.log_every_n_steps", "5")
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    assert (checkpoint.parents[1] / "config.yaml").exists()
    command("test", *digits, "--ckpt_path", checkpoint, "--trainer.logger=false")
    assert "test/accuracy" in capsys.readouterr().out


def test_print_config_is_a_config_and_runs_over_and_over(capsys, command, tmp_path):
    flags = ["--max_steps", "1", "--trainer.default_root_dir", tmp_path, *QUIET]
    with pytest.raises(SystemExit) as ended:
        command("fit", *GPT, *SMALL, *flags, "--devices", "1", "--print_config")
    assert ended.value.code == 0
    config = tmp_path / "run.yaml"
    config.write_text(capsys.readouterr().out)
    for _ in range(2):
        command("fit", "--config", config)
    assert (tmp_path / "config.yaml").exists()


def test_verify_exits_with_1_and_names_the_first_tensor_that_differs(command, capsys, caplog):
    with pytest.raises(SystemExit) as ended:
        command("verify", *GPT, *SMALL, "--devices", "1", "--precision", "bf16-true", "--steps", "1")
    assert ended.value.code == 1
    assert "differs from one process: first 'net." in caplog.text + capsys.readouterr().err


def test_verify_gives_the_certificate():
    flags = ["--strategy", "fsdp", "--devices", "2", "--steps", "2"]
    finished = run_command([*MODULE, "verify", *GPT, *SMALL, *flags])
    assert finished.returncode == 0, finished.output
    assert "equal to one process within 1e-05" in finished.output


@pytest.mark.parametrize(
    ("word", "is_named"),
    [
        ("--model", True),
        ("--model=ByteGPT", True),
        ("--model.depth=2", True),
        ("-c", True),
        ("--config=run.yaml", True),
        ("--help-all", True),
        ("--hang_timeout_s", False),
        ("--model_registry", False),
    ],
)
def test_bench_comm_brings_a_model_unless_one_is_named(word, is_named):
    assert bool(NAMES_MODEL.fullmatch(word)) == is_named


def test_wire_measures_forecasts_and_recommends():
    flags = ["--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--compressions", "[none,sign]"]
    finished = run_command([*MODULE, "bench-comm", *flags])
    assert finished.returncode == 0, finished.output
    assert "compression='auto' uses '" in finished.output
    for line in (r"between 2 ranks +latency +bandwidth", r"all_reduce +[\d.]+ ms", r"none .* 1\.000 ", r"sign .* MB"):
        assert re.search(line, finished.output), line
    assert re.search(r"recommended: compression='(none|sign)'", finished.output)


def test_python_m_starts_the_other_processes_itself():
    flags = ["--strategy", "hsdp:replicate=2,shard=1", "--devices", "2", "--precision", "bf16-mixed"]
    finished = run_command([*MODULE, "fit", *GPT, *SMALL, *flags, "--trainer.max_epochs", "1"])
    assert finished.returncode == 0, finished.output
    assert re.search(r"^polyphase \S+ \| hsdp, replicate=2 on cpu \| bf16-mixed \| ", finished.output, re.MULTILINE)
    assert "val/bits_per_byte" in finished.output


@pytest.mark.skipif(not os.access(SCRIPT, os.X_OK), reason="the package is not installed with its command")
def test_the_command_starts_the_other_processes_itself_with_a_module_of_the_users_own(tmp_path):
    own_module()
    flags = ["--strategy", "ddp", "--devices", "2", "--accelerator", "cpu", "--max_steps", "2"]
    finished = run_command([SCRIPT, "fit", "--model", "mine.Mine", "--data", "mine.Digits", *flags, *QUIET])
    assert finished.returncode == 0, finished.output
    assert re.search(r"^polyphase \S+ \| ddp, replicate=2 on cpu \| 32-true \| ", finished.output, re.MULTILINE)
