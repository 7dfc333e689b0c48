"""`StopIteration` of user code ends no epoch: it is an error with the user's line, wherever user code is called."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader, Dataset, IterableDataset

from polyphase.engine.data.exhausted import ExhaustedIteratorError

from ..tiny import engine

LINE = r"test_exhausted_integration\.py"
NUM_BATCHES = 6


def reads_an_exhausted_iterator():
    return next(iter(()))


class Samples(Dataset):
    """Samples, of which one reads an exhausted iterator."""

    def __init__(self, bad=None):
        self.bad = bad

    def __len__(self):
        return 2 * NUM_BATCHES

    def __getitem__(self, index):
        return reads_an_exhausted_iterator() if index == self.bad else torch.ones(3)


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.ones(3) for _ in range(2 * NUM_BATCHES))


class Batches:
    """A loader that is an iterator of its own, without a length."""

    def __iter__(self):
        self.num_left = NUM_BATCHES
        return self

    def __next__(self):
        if not self.num_left:
            raise StopIteration
        self.num_left -= 1
        return torch.ones(2, 3)


class Collate:
    """Reads an exhausted iterator in its third batch."""

    def __init__(self):
        self.num_batches = 0

    def __call__(self, samples):
        self.num_batches += 1
        return reads_an_exhausted_iterator() if self.num_batches == 3 else torch.stack(samples)


class Net(LightningModule):
    """Reads an exhausted iterator in the method `where`, in its third call."""

    def __init__(self, where="", automatic=True):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
        self.where, self.num_calls, self.num_batches = where, 0, 0
        self.automatic_optimization = automatic

    def reach(self, where):
        self.num_calls += where == self.where
        if where == self.where and self.num_calls == 3:
            reads_an_exhausted_iterator()

    def training_step(self, batch, batch_idx):
        self.num_batches += 1
        self.reach("training_step")
        loss = self.layer(batch).mean()
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
            return None
        return loss

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.reach("on_before_batch_transfer")
        return batch

    def on_after_backward(self):
        self.reach("on_after_backward")

    def on_train_batch_end(self, *_):
        self.reach("on_train_batch_end")

    def on_train_epoch_start(self):
        self.reach("on_train_epoch_start")

    def on_train_epoch_end(self):
        self.reach("on_train_epoch_end")

    def on_validation_epoch_start(self):
        self.reach("on_validation_epoch_start")

    def validation_step(self, batch, batch_idx):
        self.reach("validation_step")

    def predict_step(self, batch, batch_idx):
        self.reach("predict_step")
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


IN_TRAINING = [
    "training_step",
    "on_before_batch_transfer",
    "on_after_backward",
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_epoch_start",
    "validation_step",
]


def fit(module, data, *callbacks, **flags):
    validation = DataLoader(Samples(), batch_size=2)
    flags = {"max_epochs": 3, "num_sanity_val_steps": 0, "callbacks": list(callbacks), **flags}
    engine(**flags).fit(module, data, validation)


@pytest.mark.parametrize("where", IN_TRAINING)
def test_in_the_module(where):
    with pytest.raises(ExhaustedIteratorError, match=rf"{LINE}:\d+ in reads_an_exhausted_iterator"):
        fit(Net(where), DataLoader(Samples(), batch_size=2))


@pytest.mark.parametrize("where", ["training_step", "on_train_batch_end"])
def test_in_lightnings_own_loop(where):
    with pytest.raises(ExhaustedIteratorError, match=LINE):
        fit(Net(where, automatic=False), DataLoader(Samples(), batch_size=2))


def test_in_a_prediction():
    with pytest.raises(ExhaustedIteratorError, match=LINE):
        engine().predict(Net("predict_step"), DataLoader(Samples(), batch_size=2))


class Ends(Callback):
    def on_train_batch_end(self, *_):
        reads_an_exhausted_iterator()


def test_in_a_callback():
    with pytest.raises(ExhaustedIteratorError, match=LINE):
        fit(Net(), DataLoader(Samples(), batch_size=2), Ends())


FORKED = {"num_workers": 1}
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}


@pytest.mark.parametrize(
    ("what", "workers"),
    [
        ("sample", {}),
        ("sample", FORKED),
        pytest.param("sample", SPAWNED, marks=pytest.mark.nightly),
        ("collate_fn", {}),
        ("collate_fn of a stream", {}),
        ("collate_fn of a stream", FORKED),
        pytest.param("collate_fn of a stream", SPAWNED, marks=pytest.mark.nightly),
    ],
)
def test_in_the_data(what, workers):
    if what == "sample":
        data = DataLoader(Samples(bad=5), batch_size=2, **workers)
    else:
        data = DataLoader(Stream() if "stream" in what else Samples(), batch_size=2, collate_fn=Collate(), **workers)
    with pytest.raises(ExhaustedIteratorError, match=LINE):
        fit(Net(), data)


@pytest.mark.parametrize("workers", [{}, FORKED])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_in_the_data_of_an_evaluation(stage, workers):
    module = Net()
    module.test_step = module.validation_step
    with pytest.raises(ExhaustedIteratorError, match=LINE):
        getattr(engine(), stage)(module, DataLoader(Stream(), batch_size=2, collate_fn=Collate(), **workers))


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_the_end_of_the_data_is_still_no_error():
    class TakesTheLoader(Net):
        def training_step(self, dataloader_iter):
            batch, batch_idx, _ = next(dataloader_iter)
            return super().training_step(batch, batch_idx)

    for module, data in [
        (Net(), Batches()),
        (Net(), DataLoader(Stream(), batch_size=2)),
        (Net(), DataLoader(Stream(), batch_size=None)),
        (Net(), DataLoader(Stream(), batch_size=2, num_workers=1)),
        (TakesTheLoader(), DataLoader(Stream(), batch_size=2)),
    ]:
        fit(module, data, limit_val_batches=0)
        assert module.num_batches == 3 * (2 * NUM_BATCHES if getattr(data, "batch_size", 0) is None else NUM_BATCHES)


def test_an_epoch_that_a_hook_cancels_is_no_error():
    class Cancels(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    for module in (Cancels(), Cancels(automatic=False)):
        fit(module, DataLoader(Samples(), batch_size=2))
        assert module.num_batches == 3 * 3
