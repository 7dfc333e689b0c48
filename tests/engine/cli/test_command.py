"""What the command answers at once: without torch, in a line, with the closest match."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from polyphase.engine.cli import main
from polyphase.engine.cli.runs import RUNS, check_names

MODEL = """
from lightning.pytorch import LightningModule
from polyphase.models import DigitsClassifier

class LitDigits(LightningModule):
    def __init__(self, lr: float = 1e-3, width: int | None = 32): ...

class Wider(LitDigits): ...

class Open(LitDigits):
    def __init__(self, **anything): ...

class Mine(DigitsClassifier): ...
"""
FILES = {
    "digits_l.py": MODEL,
    "star.py": "from digits_l import *",
    "package/__init__.py": "",
    "package/nets.py": "from digits_l import LitDigits as Base\nclass Deep(Base): ...",
    "run.yaml": "model: digits_l.LitDigits\ntrainer:\n  max_epochs: 1e3\n  limit_val_batches: 1e-1\n",
    "key.yaml": "trainer:\n  max_epochz: 3\nmodel: digits_l.LitDigits\n",
    "top.yaml": "modle: digits_l.LitDigits\n",
    "under.yaml": "strategy: ddp\n",
    "value.yaml": "trainer:\n  max_epochs: three\n",
    "switch.yaml": "trainer:\n  max_epochs: true\n",
    "strategy.yaml": "trainer:\n  strategy: fdsp\n",
    "broken.yaml": "trainer:\n  max_epochs: [3\nmodel: x\n",
    "list.yaml": "- 1\n",
    "argument.yaml": "model:\n  class_path: digits_l.LitDigits\n  init_args:\n    lrr: 3\n",
    "class.yaml": "model:\n  class_path: digits_l.LitDgits\n",
}
FIT = ["fit", "--model", "digits_l.LitDigits"]


@pytest.fixture
def files(tmp_path):
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


@pytest.fixture
def command(monkeypatch, capsys):
    """Calls the command in this process; returns its exit code and what it printed."""
    # Lightning still calls jsonargparse by its former names.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["polyphase", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    yield call
    for name in ("digits_l", "star", "package", "package.nets"):
        sys.modules.pop(name, None)


MISTAKES = [
    (["fti"], "unknown command 'fti'. Did you mean 'fit'? Allowed: bench-comm, ckpt, doctor,"),
    (["fit"], "fit needs a model: --model NAME of polyphase.models, or --model package.Class."),
    ([*FIT, "--stratgy", "ddp"], "fit has no flag --stratgy. Did you mean --strategy?"),
    ([*FIT, "--trainer.max_epoch", "3"], "fit has no flag --trainer.max_epoch. Did you mean --trainer.max_epochs?"),
    ([*FIT, "--modle.lr", "3"], "fit has no flag --modle.lr. Did you mean --model.lr?"),
    ([*FIT, "--steps", "3"], "fit has no flag --steps."),
    (["validate", "--model", "ByteGPT", "--verbos", "x"], "validate has no flag --verbos. Did you mean --verbose?"),
    (["strategies", "fdsp"], "unknown strategy, precision, compression or finetune 'fdsp'. Did you mean 'fsdp'?"),
    (["strategies", "--explian", "X"], "strategies takes one NAME, but got --explian X"),
    (["ckpt", "lst"], "unknown ckpt command 'lst'. Did you mean 'list'?"),
    (["launch", "--nproc", "2"], "launch needs -- in front of what it starts"),
    (["launch", "--", "digts.py"], "there is no script 'digts.py'; there are digits_l.py, star.py"),
    (["init"], "usage: polyphase init DIR"),
    (["init", "a", "b"], "init takes the name of one folder, but got a b"),
    (["--print_shtab", "bsh"], "unknown shell of --print_shtab 'bsh'. Did you mean 'bash'?"),
]
OF_VALUES = [
    ([*FIT, "3"], "unrecognized arguments: 3"),
    ([*FIT, "--max_epochs"], "expected one argument"),
    ([*FIT, "--max_epochs", "--devices", "2"], "expected one argument"),
    ([*FIT, "--max_epochs", "three"], "--max_epochs: max_epochs='three': a whole number of at least -1"),
    ([*FIT, "--max_epochs=1.5"], "max_epochs must be a whole number of at least -1, but got 1.5"),
    ([*FIT, "--trainer.max_steps", "x"], "max_steps='x': a whole number of at least -1"),
    ([*FIT, "--gradient_clip_val", "x"], "gradient_clip_val='x': a number or None"),
    ([*FIT, "--sync_batchnorm", "ture"], "sync_batchnorm='ture': True or False"),
    ([*FIT, "--deterministic", "wran"], "True, False, 'warn' or None. Did you mean 'warn'?"),
    ([*FIT, "--micro_batch_size", "auot"], "a whole number of at least 1, 'auto' or None. Did you mean 'auto'?"),
    ([*FIT, "--devices", "two"], "devices='two': a number, 'auto' or a list of indices"),
    ([*FIT, "--accelerator", "gup"], "`accelerator='gup'`. Did you mean 'gpu'?"),
    ([*FIT, "--strategy", "fdsp"], "unknown strategy 'fdsp'. Did you mean 'fsdp'? Allowed: auto, cp, ddp,"),
    ([*FIT, "--strategy", "fsdp_spwan"], "Did you mean 'fsdp_spawn'?"),
    ([*FIT, "--strategy", "single_spawn"], "unknown strategy 'single_spawn'. Did you mean 'single'?"),
    ([*FIT, "--strategy", "fsdp:no_snc=1"], "unknown option of strategy 'fsdp' 'no_snc'. Did you mean 'no_sync'?"),
    ([*FIT, "--strategy", "ddp:bucket_cap_mb=x"], "strategy 'ddp':bucket_cap_mb must be a number, but got 'x'"),
    ([*FIT, "--strategy", "ddp:5"], "write ddp:key=value; '5' has no key"),
    ([*FIT, "--precision", "bf61"], "Precision 'bf61' is invalid. Allowed: 16-mixed"),
    ([*FIT, "--compression", "powersdg:4"], "unknown compression 'powersdg'. Did you mean 'powersgd'?"),
    ([*FIT, "--uneven", "pda"], "--uneven: unknown value of uneven 'pda'. Did you mean 'pad'?"),
    ([*FIT, "--compile", "defualt"], "'max-autotune' or None. Did you mean 'default'?"),
    ([*FIT, "--data.batch_size", "3"], "--data.batch_size needs --data CLASS in front of it"),
    ([*FIT, "--model.lrr", "1"], "Parser key \"model\": Option 'lrr' is not accepted. Did you mean 'lr'?"),
    ([*FIT, "--model.lr", "abc"], "Expected a <class 'float'>. Got value: abc"),
    ([*FIT, "--model.width", "abc"], "Expected a <class 'int'>. Got value: abc"),
    (
        ["fit", "--model", "digits_l.Wider", "--model.lrr", "1"],
        "Parser key \"model\": Option 'lrr' is not accepted. Did you mean 'lr'?",
    ),
    (
        ["fit", "--model", "digits_l.Mine", "--model.widht", "1"],
        "Option 'widht' is not accepted. Did you mean 'width'?",
    ),
    (["fit", "--model", "digits_l.LitDgits"], "--model: module digits_l has no LitDgits. Did you mean 'LitDigits'?"),
    (["fit", "--model", "digits_l.Zzz"], "--model: module digits_l has no Zzz. It has LitDigits, Wider, Open, Mine."),
    (
        ["fit", "--model", "Xq9Zw"],
        "unknown model class 'Xq9Zw'. Name your own class by its import path: --model package.Class.",
    ),
    (["fit", "--model", "nowhere.Net"], "--model: No module named 'nowhere' in "),
    (["fit", "--model", "digts_l.LitDigits"], "No module named 'digts_l' in "),
    (["fit", "--model", "digts_l.LitDigits"], "Did you mean 'digits_l'?"),
    (["fit", "--model", "package.net.Deep"], "No module named 'package.net' in "),
    (["fit", "--model", "package.nets"], "package.nets is a module; name a class in it, as in --model package.nets.My"),
    ([*FIT, "--data", "Digts"], "--data: unknown data class 'Digts'. Did you mean 'Digits'?"),
    (["fit", "--config", "rnu.yaml"], "rnu.yaml'. Did you mean 'run.yaml'?"),
    (["fit", "--config", "key.yaml"], "does not accept option 'trainer.max_epochz'. Did you mean 'max_epochs'?"),
    (["fit", "--config", "top.yaml"], "does not accept option 'modle'. Did you mean 'model'?"),
    (["fit", "--config", "under.yaml"], "strategy belongs under trainer: write trainer: and, indented"),
    (
        ["fit", "--config", "value.yaml"],
        "Parser key \"trainer.max_epochs\": Expected a <class 'int'>. Got value: three",
    ),
    (["fit", "--config", "switch.yaml"], "Expected a <class 'int'>. Got value: True"),
    ([*FIT, "--config", "strategy.yaml"], "unknown strategy 'fdsp'. Did you mean 'fsdp'?"),
    (["fit", "--config", "broken.yaml"], "did not find expected ',' or ']'"),
    (["fit", "--config", "list.yaml"], "Unexpected config: - 1"),
    (["fit", "--config", "argument.yaml"], "Option 'lrr' is not accepted. Did you mean 'lr'?"),
    (["fit", "--config", "class.yaml"], "module 'digits_l' has no attribute 'LitDgits'. Did you mean 'LitDigits'?"),
    (["strategies", "--explain", "ByteGTP"], "unknown model 'ByteGTP'. Did you mean 'ByteGPT'?"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), [*MISTAKES, *OF_VALUES], ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
@pytest.mark.usefixtures("files")
def test_a_mistake_is_told_in_a_line(arguments, message, command):
    code, shown = command(*arguments)
    assert message in shown
    if arguments != ["init"]:
        assert code == 2
        assert shown.startswith("polyphase: error: ")
        assert shown.count("\n") <= 3


WITHOUT_TORCH = """
import sys
sys.path.insert(0, "")
from polyphase.engine.cli import main
for words in {cases!r}:
    sys.argv = ["polyphase", *words]
    try:
        main()
    except SystemExit:
        pass
    assert not {{"torch", "lightning", "jsonargparse"}} & set(sys.modules), words
"""


@pytest.mark.usefixtures("files")
def test_none_of_it_needs_torch():
    Path("snapshots").mkdir()
    right = [[], ["--help"], ["--version"], ["strategies"], ["strategies", "hsdp"], ["strategies", "int8"], ["init"]]
    right += [["ckpt", "verify", "nothing"], ["doctor", "nothing"], ["doctor", "--compare", "nothing", "nothing"]]
    right += [["ckpt"], ["ckpt", "list", "snapshots"], ["ckpt", "export", "--help"], ["launch"], ["init", "new"]]
    right += [[name, "--help"] for name in RUNS] + [["--print_shtab", "bash"]]
    code = WITHOUT_TORCH.format(cases=[*right, *(words for words, _ in MISTAKES)])
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


RIGHT = [
    FIT,
    [*FIT, "--config", "run.yaml"],
    ["fit", "--config", "run.yaml", "--data.batch_size", "3"],
    ["fit", "-c", "run.yaml", "--max_epochs", "-1", "--trainer.max_steps=1e3", "--limit_val_batches", "0.5"],
    [*FIT, "--strategy", "HSDP_spawn:replicate=2", "--precision", "16", "--compression", "powersgd:2+fp16"],
    [*FIT, "--strategy", "deepspeed_stage_2", "--devices", "[0,1]", "--accelerator", "gpu"],
    [*FIT, "--strategy", "ddp_spawn_find_unused_parameters_true", "--devices=0,1"],
    [*FIT, "--callbacks+=MemoryMonitor", "--callbacks.every_n_steps", "3", "--logger", "false"],
    [
        *FIT,
        "--fast_dev_run",
        "true",
        "--deterministic",
        "warn",
        "--compile",
        "reduce-overhead",
        "--seed_everything",
        "1",
    ],
    [*FIT, "--max_epochs", "null", "--gradient_clip_val", "1e-3", "--sync_batchnorm", "yes"],
    [*FIT, "--model.lr", "1e-3", "--model.width", "null", "--print_config"],
    [*FIT, "--model.help", "--data.help", "Digits", "--trainer.logger.help", "CSVLogger", "--print_config=skip_null"],
    [*FIT, "--optimizer", "Adam", "--optimizer.lr", "0.1", "--lr_scheduler", "StepLR", "--lr_scheduler.step_size", "3"],
    ["fit", "--model", "digits_l.Open", "--model.anything", "3", "--data", "Digits", "--data.batch_size", "4"],
    ["fit", "--model", "star.LitDigits", "--model.lr", "3"],
    ["fit", "--model", "package.nets.Deep", "--model.lr", "3"],
    ["fit", "--model", "lightning.pytorch.demos.boring_classes.BoringModel"],
    ["fit", "--model", '{"class_path": "digits_l.LitDigits"}'],
    ["fit", "--model", "polyphase.models.ByteGPT", "--model.size", "tiny"],
    ["verify", "--model", "ByteGPT", "--steps", "3", "--tolerance", "1e-4"],
    ["bench-comm", "--devices", "2", "--compressions", "[none,bf16]"],
]


@pytest.mark.parametrize("words", RIGHT, ids=" ".join)
def test_what_is_right_passes(words):
    check_names(words[0], words[1:])


def test_the_help_is_for_a_terminal(command):
    code, shown = command("--help")
    assert code == 0
    assert "polyphase fit --model" in shown
    assert max(map(len, shown.splitlines())) <= 100


@pytest.mark.parametrize("name", list(RUNS))
def test_the_help_of_a_command_has_the_projects_flags_first(name, command):
    code, shown = command(name, "--help")
    assert code == 0
    lines = shown.splitlines()
    assert len(lines) < 120
    assert max(map(len, lines)) <= 100
    headings = [line for line in lines if re.fullmatch(r"[A-Z][\w ]+:", line)]
    assert headings[:2] == ["What to run:", "How to run it:"]
    for flag in ("--model", "--strategy", "--devices", "--global_batch_size", "--resume", "--help-all"):
        assert re.search(rf"{flag}\b.*\S", shown)
    assert ("--steps" in shown) == (name == "verify")


@pytest.mark.usefixtures("files")
def test_with_a_class_the_help_has_its_arguments(command):
    _, shown = command(*FIT, "--data", "Digits", "--help")
    assert "Arguments of digits_l.LitDigits:\n  --model.lr: float = 0.001\n  --model.width: int | None = 32" in shown
    assert "Arguments of Digits:\n  --data.batch_size: int = 32" in shown
    assert command(*FIT, "--data=Digits", "--help")[1] == shown
