"""The `polyphase` command as a user types it."""

import sys
from pathlib import Path

import pytest

from polyphase.engine.cli import SHORT, expand, main
from tests.distributed import run_command

COMMAND = [sys.executable, "-m", "polyphase.engine"]
GPT = ["--model", "ByteGPT", "--data", "PythonSource", "--accelerator", "cpu"]
SMALL = [
    "--model.dim=16",
    "--model.num_layers=2",
    "--model.context_length=32",
    "--data.context_length=32",
    "--data.max_bytes=20000",
    "--data.max_val_bytes=4000",
]


def command(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["polyphase", *arguments])
    main()


def test_short_flags_are_the_engines():
    words = ["fit", "--strategy", "ddp", "--devices=2", "--trainer.max_steps", "3", "--model", "A", "--seed", "1"]
    assert expand(words) == [
        *("fit", "--trainer.strategy", "ddp", "--trainer.devices=2", "--trainer.max_steps", "3"),
        *("--model", "A", "--seed", "1"),
    ]
    assert expand([f"--{name}" for name in SHORT]) == [f"--trainer.{name}" for name in SHORT]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fti"], "unknown command 'fti'. Did you mean 'fit'?"),
        (["fit", "--model", "ByteGTP"], "unknown model class 'ByteGTP'. Did you mean 'ByteGPT'?"),
        (
            ["fit", "--model=ByteGPT", "--data=PythonSorce"],
            "unknown data class 'PythonSorce'. Did you mean 'PythonSource'",
        ),
        (["fit", *GPT, "--strategy", "fdsp"], "unknown strategy 'fdsp'. Did you mean 'fsdp'?"),
        (["fit", *GPT, "--strategy", "fsdp", "--compression", "powersgd"], "'fsdp' can't do compression 'powersgd'"),
        (["fit", *GPT, "--strategy", "hsdp:replicate=3", "--devices", "4"], "replicate=3 = 3 does not fit 4"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments, message, capsys, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        command(monkeypatch, *arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_help_teaches(capsys, monkeypatch):
    command(monkeypatch, "--help")
    assert "polyphase fit --model" in capsys.readouterr().out


def test_strategies_prints_all_that_flags_can_be(capsys, monkeypatch):
    command(monkeypatch, "strategies")
    shown = capsys.readouterr().out
    for word in ("single", "ddp", "fsdp", "hsdp", "reshard_after_forward=true", "16-mixed", "powersgd", "_spawn"):
        assert word in shown


@pytest.mark.parametrize("strategy", ["fsdp", "ddp", "hsdp:replicate=2,shard=1"])
def test_fit_starts_the_other_processes_itself(strategy):
    flags = ["--strategy", strategy, "--devices", "2", "--precision", "bf16-mixed", "--trainer.max_epochs", "1"]
    finished = run_command([*COMMAND, "fit", *GPT, *SMALL, *flags])
    assert finished.returncode == 0, finished.output
    assert "val/bits_per_byte" in finished.output


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_verify_gives_the_certificate(strategy):
    finished = run_command([*COMMAND, "verify", *GPT, *SMALL, "--strategy", strategy, "--devices", "2", "--steps", "2"])
    assert finished.returncode == 0, finished.output
    assert "equal to one process within 1e-05" in finished.output


def test_verify_names_the_first_tensor_that_differs():
    finished = run_command([*COMMAND, "verify", *GPT, *SMALL, "--precision", "bf16-true", "--steps", "2"])
    assert finished.returncode == 1, finished.output
    assert "differs from one process: first 'net.token_embedding.weight', after step 1" in finished.output


def test_a_module_of_the_users_own(tmp_path: Path):
    (tmp_path / "mine.py").write_text("from polyphase.models import ByteGPT\nclass Mine(ByteGPT): ...\n")
    arguments = ["fit", "--model", "mine.Mine", *GPT[2:], *SMALL, "--max_steps", "2"]
    finished = run_command([*COMMAND, *arguments], cwd=tmp_path)
    assert finished.returncode == 0, finished.output


def test_print_config_is_a_config(tmp_path: Path):
    shown = run_command([*COMMAND, "fit", *GPT, *SMALL, "--max_steps", "2", "--print_config"])
    assert shown.returncode == 0, shown.output
    config = tmp_path / "run.yaml"
    config.write_text(shown.output)
    finished = run_command([*COMMAND, "fit", "--config", config])
    assert finished.returncode == 0, finished.output
