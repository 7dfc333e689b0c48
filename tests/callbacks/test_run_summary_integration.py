"""What several ranks print, by each way of starting them: rank 0 alone, each line once, and no noise."""

import re
import shlex
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine, __version__
from polyphase.engine.cli import main
from tests.distributed import run_command, torchrun
from tests.pairs import nightly

COMMAND = [sys.executable, "-m", "polyphase.engine"]
NOISE = re.compile(
    r"GPU available|TPU available|Tip:|litlogger|Seed set|FLOPs|\[Gloo\]|distributed_backend|GLOBAL_RANK"
    r"|Starting with|Loading `train_dataloader`|hp_metric"
)
END = re.compile(
    r"(\d+) steps? in ([\d.]+) s, (\d+)% of it waiting for data; ([\d.,]+) samples/s, peak memory .*"
    r" \(largest rank\)"
)


class Net(LightningModule):
    """Three blocks, and steps of a tenth of a second."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def tensor_parallel_plan(self):
        return {"blocks.0.0": ColwiseParallel(output_layouts=Replicate())}

    def training_step(self, batch, batch_idx):
        return self(batch[0]).pow(2).mean()

    def on_train_batch_end(self, *args):
        time.sleep(0.1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def lines_of(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.strip()]


def check(output: str, header: str) -> re.Match:
    """One header, as expected, one end, and nothing of the noise; returns the line of the end."""
    said = lines_of(output)
    assert [line for line in said if line.startswith("polyphase ")] == [header], output
    assert not NOISE.search(output), output
    (end,) = filter(None, map(END.fullmatch, said))
    for begin in ("logs: ", "to load it elsewhere"):
        assert len([line for line in said if line.startswith(begin)]) == 1, output
    return end


@pytest.mark.parametrize(
    ("strategy", "header"),
    [
        ("ddp_fork", "ddp_fork, replicate=2 on cpu | 32-true | global batch 8 = 2 x 4 x 1"),
        ("fsdp_fork", "fsdp_fork, shard=2 on cpu | 32-true | global batch 8 = 2 x 4 x 1"),
        ("pp_fork:pipeline_size=2", "pp_fork, pp=2 on cpu | 32-true | global batch 4 = 1 x 4 x 1"),
        ("local_sgd_fork:sync_every=2", "local_sgd_fork, replicate=2 on cpu | 32-true | batch 4 on each of 2 ranks"),
        ("ps_fork:staleness=1", "ps_fork, replicate=2 on cpu | 32-true | batch 4 on each of 2 ranks"),
        ("tp_fork", "tp_fork, tp=2 on cpu | 32-true | global batch 4 = 1 x 4 x 1"),
    ],
)
def test_figures_are_those_of_all_ranks(strategy, header, capfd, tmp_path):
    """18 samples, whoever has them; with several ranks that have their own, the last step is partly a filler's."""
    engine = Engine(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    engine.fit(Net(), DataLoader(TensorDataset(torch.ones(9, 4)), batch_size=4))
    output = capfd.readouterr().out
    header = f"polyphase {__version__} | {header} | logs: lightning_logs/version_0"
    _, seconds, share, samples_per_s = check(output, header).groups()
    assert float(samples_per_s) * float(seconds) == pytest.approx(18, rel=0.15)
    assert int(share) < 40
    assert max(map(len, lines_of(output)[1:])) <= 100


SCRIPT = """\
import sys
from polyphase.engine import fit
from polyphase.models import Digits, DigitsClassifier

if __name__ == "__main__":
    flags = {{"enable_progress_bar": False, "enable_model_summary": False, "logger": {logger}}}
    fit(DigitsClassifier(), Digits(), strategy=sys.argv[1], accelerator="cpu", devices=2, max_steps=2,
        limit_val_batches=0, log_every_n_steps=1, enable_run_summary={summary}, **flags)
"""


def script(logger: str, summary: str) -> Path:
    path = Path("train.py")
    path.write_text(SCRIPT.format(logger=logger, summary=summary))
    return path


@pytest.mark.parametrize("strategy", ["fsdp", *nightly("fsdp_spawn")])
def test_torchrun_and_spawn_say_it_once(strategy, tmp_path):
    path = script("True", "None")
    finished = torchrun(path, "fsdp") if strategy == "fsdp" else run_command([sys.executable, path, strategy])
    assert finished.returncode == 0, finished.output
    header = f"{strategy}, shard=2 on cpu | 32-true | global batch 64 = 2 x 32 x 1"
    check(finished.output, f"polyphase {__version__} | {header} | logs: lightning_logs/version_0")
    assert "    DigitsClassifier.load_from_checkpoint('model.ckpt')" in finished.output


def test_the_command_prints_few_lines(tmp_path):
    flags = ["--model", "DigitsClassifier", "--data", "Digits", "--strategy", "ddp", "--devices", "2"]
    more = ["--accelerator", "cpu", "--max_epochs", "1", "--trainer.log_every_n_steps", "10"]
    finished = run_command([*COMMAND, "fit", *flags, *more])
    assert finished.returncode == 0, finished.output
    header = (
        "ddp, replicate=2 on cpu | 32-true | global batch 64 = 2 x 32 x 1 | seed 0 | logs: lightning_logs/version_0"
    )
    end = check(finished.output, f"polyphase {__version__} | {header}")
    assert end[1] == "17"
    said = lines_of(finished.output)
    table = [line for line in said if line[0] in "┏┃┡│└"]
    assert len(table) == 7
    # The sum of the parameters, the header, BatchNorm's statistics, steps 10 and 17, the validation, Lightning's reason
    # to stop; and the end.
    assert len(said) - len(table) == 7 + 4, finished.output
    assert "to go on" not in finished.output, "its learning rate has come to its end"


# Lightning, where a run goes on in a new folder of logs.
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_the_command_to_go_on_goes_on(monkeypatch, capsys):
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning still calls it by former names
    model = ["--model=ByteGPT", "--model.dim=16", "--model.num_layers=2", "--model.context_length=32"]
    data = ["--data=PythonSource", "--data.context_length=32", "--data.max_bytes=20000", "--data.max_val_bytes=4000"]
    short = ["--accelerator=cpu", "--devices=1", "--trainer.limit_val_batches=1", "--config=run.yaml"]
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"max_steps": 2, "enable_model_summary": False}}))
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["polyphase", *words])
        main()
        return capsys.readouterr().out

    said = run("fit", *model, *data, *short)
    (resume,) = re.findall(r"the same command and (--ckpt_path \S+)$", said, re.MULTILINE)
    assert "to go on, with a larger max_steps:" in said
    again = run("fit", *model, *data, *short, "--max_steps=3", *shlex.split(resume))
    assert "1 step (3 in all) in " in again
