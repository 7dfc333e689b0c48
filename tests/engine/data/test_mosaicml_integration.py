"""MosaicML's own streams, of an MDS folder, under the launcher that runs the script once more for each other rank."""

import sys
from pathlib import Path

import pytest

from tests.distributed import Finished, run_command

pytest.importorskip("streaming", reason="mosaicml-streaming requires torchvision, which not all machines have")
pytestmark = pytest.mark.timeout(400)

_WRITE = """\
import streaming

with streaming.MDSWriter(out="mds", columns={"x": "int"}, size_limit=200) as writer:
    for i in range(48):
        writer.write({"x": i})
"""

_TRAIN = """\
import streaming
from lightning.pytorch import LightningModule
from torch import nn, optim
from polyphase import Engine


def make():
    return streaming.StreamingDataset(local="mds", batch_size=4, shuffle=True)

%s

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def train_dataloader(self):
        return streaming.StreamingDataLoader(%s, batch_size=4)

    def training_step(self, batch, batch_idx):
        with open(f"epoch{self.current_epoch}-{self.global_rank}", "a") as file:
            print(*batch["x"].flatten().tolist(), file=file)
        return self.layer(batch["x"].view(-1, 1) / 48).pow(2).mean()

    def configure_optimizers(self):
        return optim.SGD(self.parameters(), 0.01)


Engine(strategy="ddp", devices=2, accelerator="cpu", max_epochs=2, logger=False).fit(Net())
"""


def run(at_the_top: str, data: str) -> Finished:
    for name, text in {"write.py": _WRITE, "train.py": _TRAIN % (at_the_top, data)}.items():
        Path(name).write_text(text)
    written = run_command([sys.executable, "write.py"], cold=True)
    assert written.returncode == 0, written.output
    return run_command([sys.executable, "train.py"], timeout_s=240, cold=True)


def test_a_stream_that_the_script_makes_first_is_refused_by_name():
    finished = run("data = make()", "data")
    assert finished.returncode == 1, finished.output
    assert "RefusedError: StreamingDataset was created before the 2 ranks of this run" in finished.output
    assert "FileExistsError" not in finished.output
    assert not list(Path().glob("epoch*"))


def test_streams_that_the_ranks_make_themselves_give_each_sample_once():
    finished = run("", "make()")
    assert finished.returncode == 0, finished.output
    for epoch in range(2):
        of_ranks = [Path(f"epoch{epoch}-{rank}").read_text().split() for rank in range(2)]
        assert [len(samples) for samples in of_ranks] == [24, 24]
        assert sorted(map(int, of_ranks[0] + of_ranks[1])) == list(range(48))
