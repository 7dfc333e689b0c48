"""A hook that raises leaves no patched class of loaders behind."""

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import BatchSampler, DataLoader

from polyphase.engine import Engine
from tests.engine.strategies.test_ddp_integration import QUIET


class Loader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class NoFile(BoringModel):
    def train_dataloader(self):
        raise FileNotFoundError("no such data")

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


@pytest.mark.parametrize("method", ["fit", "validate", "test", "predict"])
def test_classes_of_loaders_are_their_own_after_a_hook_has_raised(method):
    classes = (Loader, DataLoader, BatchSampler)
    engine = Engine(**QUIET, accelerator="cpu", devices=1, fast_dev_run=True)
    engine.validate(BoringModel(), verbose=False)  # Lightning leaves inherited methods in BatchSampler after the first
    before = [dict(vars(cls)) for cls in classes]
    with pytest.raises(FileNotFoundError, match="no such data"):
        getattr(engine, method)(NoFile())
    assert [dict(vars(cls)) for cls in classes] == before
