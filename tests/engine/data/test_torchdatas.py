"""torchdata's classes are recognized where the user has them, and nothing needs them elsewhere."""

import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler

from polyphase.engine.data.clone_loader import classes_of_torchdata, is_torchdata_loader
from tests.distributed import run_command

WITHOUT = """
import sys

sys.modules["torchdata"] = None  # an import of it fails
import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, IterableDataset
from polyphase.engine import Engine

assert not [name for name in sys.modules if name.startswith("torchdata.")]


class Count(IterableDataset):
    def __iter__(self):
        return iter(range(10))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen = []

    def training_step(self, batch, _):
        self.seen += batch.tolist()
        return self.weight * 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def train(num_workers, steps, path=None):
    model = Model()
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    engine = Engine(accelerator="cpu", max_steps=steps, **quiet)
    engine.fit(model, DataLoader(Count(), 2, num_workers=num_workers), ckpt_path=path)
    engine.save_checkpoint(sys.argv[1])
    return model.seen


for num_workers in (0, 1):
    assert train(num_workers, 3) + train(num_workers, 5, sys.argv[1]) == list(range(10))
model = torch.utils.data.DataLoader(list(range(4)), 2, shuffle=True)
Engine(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_checkpointing=False).fit(
    Model(), model
)
"""


def test_a_stream_is_continued_where_there_is_no_torchdata(tmp_path: Path):
    finished = run_command([sys.executable, "-c", WITHOUT, tmp_path / "saved.ckpt"], timeout_s=150)
    assert finished.returncode == 0, finished.output


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, of torch
def test_the_users_loader_is_recognized():
    loader = StatefulDataLoader(range(4), shuffle=True)
    assert is_torchdata_loader(loader)
    assert isinstance(loader.sampler, classes_of_torchdata("sampler", "RandomSampler"))
    assert classes_of_torchdata("sampler", "RandomSampler") == (RandomSampler,)
    assert not is_torchdata_loader(DataLoader(range(4)))


def test_what_was_not_imported_has_no_classes(monkeypatch):
    monkeypatch.delitem(sys.modules, "torchdata.stateful_dataloader.sampler")
    assert classes_of_torchdata("sampler", "RandomSampler") == ()
