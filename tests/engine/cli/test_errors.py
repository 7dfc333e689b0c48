"""What only LightningCLI can find, and is told in a line all the same."""

import sys
from pathlib import Path

import pytest

from polyphase.engine.cli.lightning_cli import run
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
    (["fit", *NEEDS, "--model.szie", "3"], "Parser key \"model\": Option 'szie' is not accepted. Did you mean 'size'?"),
    (["fit", *NEEDS, "--model.on", "maybe"], "Parser key \"model\": Expected a <class 'bool'>. Got value: maybe."),
    (["fit", *NEEDS, "--model.sizes", "[a]"], "Parser key \"model\": Expected a <class 'int'>. Got value: a."),
    (["fit", *NEEDS, "--model.ratio", "x"], "Parser key \"model\": Expected a <class 'float'>. Got value: x."),
    (["fit", *NEEDS[:2]], 'Parser key "model": the following arguments are required: size.'),
    (
        ["fit", "--model", "their_nets.NoModel"],
        'Parser key "model": Import path their_nets.NoModel does not correspond to a subclass of LightningModule.',
    ),
    (["fit", "--model", "their_nets.Ned"], "--model: module their_nets has no Ned. Did you mean 'Needs'?"),
    (
        ["fit", *BYTES, "--model.size", "11M"],
        "Parser key \"model\": Expected a typing.Literal['tiny', '10M', '124M']. Got value: 11M. Did you mean '10M'?",
    ),
    (["fit", *BYTES, "--data", "Digits", "--data.batch", "3"], "Parser key \"data\": Option 'batch' is not accepted."),
    (
        ["fit", *BYTES, "--callbacks", "MemryMonitor"],
        'Parser key "trainer.callbacks": Expected a dot import path string: MemryMonitor. Did you mean',
    ),
    (
        ["fit", *BYTES, "--callbacks", "MemoryMonitor", "--callbacks.n", "3"],
        "Parser key \"trainer.callbacks\": Option 'n' is not accepted",
    ),
    (
        ["fit", *BYTES, "--logger", "CSVLoger"],
        "Parser key \"trainer.logger\": Expected a dot import path string: CSVLoger. Did you mean 'CSVLogger'?",
    ),
    (["fit", *BYTES, "--max_stpes", "3"], "unrecognized arguments: --max_stpes 3. Did you mean 'max_steps'?"),
    (["fit", "--max_steps", "3"], "the following arguments are required: fit.model."),
    *nightly(
        (["fit", *NEEDS, "--model.size", "1.5"], "Parser key \"model\": Expected a <class 'int'>. Got value: 1.5."),
        (["fit", *NET, "--model.lr", "x"], "Parser key \"model\": Expected a <class 'float'>. Got value: x."),
        (["fit", *BYTES, "--callbacks", "nowhere.X"], "Parser key \"trainer.callbacks\": No module named 'nowhere'."),
        (
            ["fit", *BYTES, "--optimizer", "Adm"],
            "Parser key \"optimizer\": Expected a dot import path string: Adm. Did you mean 'Adam'?",
        ),
        (["verify", *BYTES, "--steps", "x"], "Parser key \"steps\": Expected a <class 'int'>. Got value: x."),
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
    assert "does not accept option 'trainer.max_epochz'. Did you mean 'max_epochs'?" in refused(
        "fit", "--config", "run.yaml"
    )


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
        (["--config", "run.yaml"], "does not accept option 'trainer.max_epochz'. Did you mean 'max_epochs'?"),
    ],
)
def test_a_cli_of_the_users_own_tells_it_in_two_lines(words, message, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "run.yaml").write_text("trainer:\n  max_epochz: 3\n")
    finished = run_command([sys.executable, "own.py", "fit", *words], cwd=tmp_path)
    assert finished.returncode == 2
    *_, said, more = finished.output.strip().splitlines()
    assert said.startswith("own.py: error: ")
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
