"""What `fit`, `validate`, `test` and `predict` were called with, and runs that train nothing."""

import re

import pytest
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from polyphase.engine.errors import RefusedError
from polyphase.engine.loop.fit import NothingTrainedError
from polyphase.engine.loop.runs import why_empty
from tests.engine.tiny import Positions, Regression, Stream, engine, rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:Total length of .* across ranks is zero"),
]


class NoStep(LightningModule):
    def configure_optimizers(self): ...


class NoData(LightningDataModule):
    pass


# By its name another package's.
Stranger = type("LightningModule", (nn.Module,), {"__module__": "pytorch_lightning.core.module"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: run.fit(None, rows()), r"`model` must be a `LightningModule`, got `None`; fit needs one"),
        (lambda run: run.fit(nn.Linear(2, 2), rows()), "`model` must be a `LightningModule`, got `Linear`; fit needs"),
        (
            lambda run: run.fit(type("Mine", (Stranger,), {})(), rows()),
            "got `Mine` of another package, pytorch_lightning.core.module: import it from lightning.pytorch",
        ),
        (
            lambda run: run.fit(NoStep(), rows()),
            r"No `training_step\(\)` method defined in NoStep: .* returns the loss",
        ),
        (
            lambda run: run.validate(Regression(), rows()),
            r"No `validation_step\(\)` method defined to run `Trainer.validate` in Regression: add one",
        ),
        (lambda run: run.test(Regression(), rows()), r"No `test_step\(\)` method defined to run `Trainer.test`"),
        (
            lambda run: run.fit(Regression()),
            r"fit has no data: `train_dataloader` must be implemented in Regression, .* engine.fit\(regression, load",
        ),
        (lambda run: run.fit(Regression(), NoData()), "`train_dataloader` must be implemented in NoData"),
        (lambda run: run.fit(Regression(), datamodule=NoData()), "`train_dataloader` must be implemented in NoData"),
        (
            lambda run: run.fit(Regression(), rows(0)),
            "fit has nothing to train on: the data set, Tensor, has 0 samples",
        ),
    ],
)
def test_what_can_not_be_run_is_refused_in_a_line(call, message):
    run = engine()
    with pytest.raises(RefusedError, match=message) as refused:
        call(run)
    assert "\n" not in str(refused.value)
    assert run.state.fn is None


def test_no_model_is_a_type_error_as_lightnings_is():
    with pytest.raises(TypeError):
        engine().fit(nn.Linear(2, 2), rows())


def test_what_is_not_used_is_not_asked_for():
    engine(limit_train_batches=0).fit(Regression())
    engine(limit_train_batches=0).fit(Regression(), rows(0))
    engine(max_steps=0).fit(Regression(), rows())
    engine(fast_dev_run=True).fit(Regression(), rows())


# --- empty data


class Nothing(nn.Module):
    """A sampler of no sample."""

    def __len__(self):
        return 0

    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Positions(0)), "the data set, Positions, has 0 samples"),
        (DataLoader(Positions(3), batch_size=4, drop_last=True), "the 3 samples of Positions fill no batch of 4, and"),
        (DataLoader(Positions(3), sampler=Nothing()), "the sampler of the DataLoader gives none of the 3 samples of"),
        (DataLoader(Positions(3), batch_size=4), None),
        (DataLoader(Stream(0)), None),
        ([], None),
    ],
)
def test_why_a_loader_is_empty(loader, reason):
    assert why_empty(loader) is None if reason is None else why_empty(loader).startswith(reason)


class Given(LightningDataModule):
    """Its loader is known only when the run is on."""

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader


class Stopped(IterableDataset):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (rows(0), "fit has nothing to train on: the data set, Tensor, has 0 samples"),
        (rows(3, drop_last=True), "fit has nothing to train on: the 3 samples of Tensor fill no batch of 4"),
        (DataLoader(Stopped()), r"fit has nothing to train on: the training data \(Stopped\) yielded no batch"),
        ([], "fit has nothing to train on: the training data .* yielded no batch"),
    ],
)
def test_empty_training_data_are_an_error(loader, message):
    with pytest.raises(NothingTrainedError, match=message) as error:
        engine().fit(Regression(), datamodule=Given(loader))
    assert isinstance(error.value, ValueError)
    assert isinstance(error.value, MisconfigurationException)


def test_empty_data_that_the_user_allows():
    module = Regression()
    module.allow_zero_length_dataloader_with_multiple_devices = True
    engine().fit(module, datamodule=Given(rows(0)))


def test_a_loader_that_is_set_up_by_hand_may_be_empty():
    run = engine()
    run.strategy.connect(Regression())
    run._data_connector.attach_data(run.lightning_module, train_dataloaders=rows(0))
    with pytest.warns(UserWarning, match="Total length of `CombinedLoader` across ranks is zero"):
        run.fit_loop.setup_data()
    assert run.num_training_batches == 0


# --- no loss


class Silent(Regression):
    """Returns no loss in some epochs."""

    def __init__(self, *, lossless: range, manual: bool = False):
        super().__init__()
        self.lossless, self.automatic_optimization = lossless, not manual

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.current_epoch in self.lossless else loss


@pytest.mark.parametrize("profiler", [None, "simple"], ids=["flat", "lightning's loop"])
@pytest.mark.parametrize("flags", [{"max_epochs": 1}, {"max_epochs": 9, "max_steps": 4}], ids=str)
def test_a_run_without_a_loss_is_an_error(flags, profiler):
    with pytest.raises(NothingTrainedError, match=r"of Silent returned None for each of the 4 batches so far: nothing"):
        engine(**flags, profiler=profiler).fit(Silent(lossless=range(9)), rows())


def test_after_the_first_epoch_it_is_a_warning_after_the_second_an_error():
    run = engine(max_epochs=9)
    with (
        pytest.warns(UserWarning, match="if the next epoch has no loss either, the run ends with an error"),
        pytest.raises(NothingTrainedError, match="None for each of the 8 batches so far"),
    ):
        run.fit(Silent(lossless=range(9)), rows())
    assert run.current_epoch == 1


def test_some_batches_and_one_epoch_may_be_skipped():
    with pytest.warns(UserWarning, match="if the next epoch has no loss either"):
        engine(max_epochs=3).fit(Silent(lossless=range(1)), rows())
    engine(max_epochs=3).fit(Silent(lossless=range(1, 3)), rows())  # and later any number
    engine(fast_dev_run=True).fit(Silent(lossless=range(9)), rows())


def test_manual_optimization_whose_steps_do_not_count_is_warned_of():
    """As with optimizers that the module makes and steps itself."""
    with pytest.warns(UserWarning, match="Silent has made no step of an optimizer in its first 4 batches: global_step"):
        engine(max_epochs=2).fit(Silent(lossless=range(9), manual=True), rows())


def test_without_optimizers_nothing_is_to_be_trained():
    module = Silent(lossless=range(9))
    module.configure_optimizers = lambda: None
    with pytest.warns(UserWarning, match=re.escape("`LightningModule.configure_optimizers` returned `None`")):
        engine().fit(module, rows())
