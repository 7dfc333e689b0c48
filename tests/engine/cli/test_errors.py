"""What only LightningCLI can find, and is told in a line all the same."""

import sys
from pathlib import Path

import pytest

from polyphase.engine.cli.lightning_cli import in_a_line, run
from tests.distributed import run_command
from tests.pairs import nightly

MODEL = """
from lightning.pytorch import LightningModule

class Net(LightningModule):
    def __init__(self, lr: float = 1e-3, **more): super().__init__()

class Needs(LightningModule):
    def __init__(self, size: int, on: bool = True, sizes: list[int] = [1], ratio: float | None = None): ...

class NoModel: ...
"""
NET = ["--model", "their_nets.Net"]
NEEDS = ["--model", "their_nets.Needs", "--model.size", "3"]
BYTES = ["--model", "ByteGPT"]


@pytest.fixture
def refused(monkeypatch, capsys):
    """What LightningCLI is handed, though it is wrong, is refused with this."""
    Path("their_nets.py").write_text(MODEL)
    monkeypatch.setattr(sys, "argv", ["polyphase"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def call(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            run(words)
        assert ended.value.code == 2
        return capsys.readouterr().err

    yield call
    sys.modules.pop("their_nets", None)


CASES = [
    (["fit", *NEEDS, "--model.szie", "3"], "--model.szie: Needs has no 'szie'. Did you mean 'size'?"),
    (["fit", *NEEDS, "--model.on", "maybe"], "--model.on: 'maybe' is not true or false."),
    (["fit", *NEEDS, "--model.sizes", "[a]"], "--model.sizes: 'a' is not a whole number."),
    (["fit", *NEEDS, "--model.ratio", "x"], "--model.ratio: 'x' is not a number or null."),
    (["fit", *NEEDS[:2]], "--model.size: needed by Needs, whose constructor has no default for it."),
    (["fit", "--model", "their_nets.NoModel"], "--model: their_nets.NoModel is no subclass of LightningModule."),
    (["fit", "--model", "their_nets.Ned"], "--model: module their_nets has no Ned. Did you mean Needs?"),
    (
        ["fit", *BYTES, "--model.size", "11M"],
        "--model.size: '11M' is not one of 'tiny', '10M', '124M'. Did you mean '10M'?",
    ),
    (["fit", *BYTES, "--data", "Digits", "--data.batch", "3"], "--data.batch: Digits has no 'batch'."),
    (["fit", *BYTES, "--callbacks", "MemryMonitor"], "--callbacks: unknown class 'MemryMonitor'. Did you mean 'Mem"),
    (["fit", *BYTES, "--callbacks", "MemoryMonitor", "--callbacks.n", "3"], "--callbacks.n: MemoryMonitor has no 'n'"),
    (["fit", *BYTES, "--logger", "CSVLoger"], "--logger: unknown class 'CSVLoger'. Did you mean 'CSVLogger'?"),
    (["fit", *BYTES, "--max_stpes", "3"], "fit has no flag --max_stpes. Did you mean --max_steps?"),
    (["fit", "--max_steps", "3"], "fit needs --model."),
    *nightly(
        (["fit", *NEEDS, "--model.size", "1.5"], "--model.size: '1.5' is not a whole number."),
        (["fit", *NET, "--model.lr", "x"], "--model.lr: 'x' is not a number."),
        (["fit", *BYTES, "--callbacks", "nowhere.X"], "--callbacks: No module named 'nowhere' in "),
        (["fit", *BYTES, "--optimizer", "Adm"], "--optimizer: unknown class 'Adm'. Did you mean 'Adam'?"),
        (["verify", *BYTES, "--steps", "x"], "--steps: 'x' is not a whole number."),
    ),
]


@pytest.mark.parametrize(
    ("words", "message"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_it_names_the_flag_and_the_closest_match(words, message, refused):
    error = refused(*words)
    assert error.startswith(f"polyphase: error: {message}")
    assert error.count("\n") <= 3


def test_an_unknown_key_of_a_file(refused):
    Path("run.yaml").write_text("trainer:\n  max_epochz: 3\nmodel: their_nets.Net\n")
    assert "unknown key 'trainer.max_epochz'. Did you mean 'trainer.max_epochs'?" in refused(
        "fit", "--config", "run.yaml"
    )


def test_of_a_message_that_is_not_known_the_lines_that_say_something_are_kept():
    message = "Parser key \"trainer.plugins\":\n  Errors:\n    - The moon is full\n    - Expected a <class 'NoneType'>"
    assert in_a_line("fit", message) == "--plugins: The moon is full\nAll flags: polyphase fit --help"


OWN = """
from lightning.pytorch.demos.boring_classes import BoringModel
from polyphase.engine.cli.lightning_cli import EngineCLI
EngineCLI(BoringModel)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trainer.stratgy", "ddp"], "fit has no flag --trainer.stratgy. Did you mean --trainer.strategy?"),
        (["--trainer.fp16", "true"], "fit has no flag --trainer.fp16. Did you mean --trainer.precision 16-mixed?"),
        (["--trainer.gradient_accumulation_steps=4"], "Did you mean --trainer.accumulate_grad_batches?"),
    ],
)
def test_a_cli_of_the_users_own_tells_it_in_two_lines(words, message, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    finished = run_command([sys.executable, "own.py", "fit", *words], cwd=tmp_path)
    assert finished.returncode == 2
    *_, said, more = finished.output.strip().splitlines()
    assert said.startswith("own.py: error: fit has no flag ")
    assert message in said
    assert more == "All flags: own.py fit --help"
    assert "usage" not in finished.output


def test_a_cli_of_the_users_own_trains(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    finished = run_command(
        [sys.executable, "own.py", "fit", "--trainer.max_steps", "1", "--trainer.accelerator", "cpu"], cwd=tmp_path
    )
    assert finished.returncode == 0, finished.output
    assert "1 step in " in finished.output
