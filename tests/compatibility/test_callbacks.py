"""Callbacks of Lightning's, and of others."""

import warnings
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.optim.swa_utils import get_ema_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from .small import ROWS, Small, SmallData


def test_early_stopping(make):
    class Worse(Small):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(self.current_epoch))

    stopping = EarlyStopping("val_loss", patience=2)
    trainer = make(max_epochs=9, callbacks=[stopping])
    trainer.fit(Worse())
    assert (trainer.current_epoch, stopping.stopped_epoch, trainer.early_stopping_callback) == (3, 2, stopping)


def test_pruning_of_a_sweep(make):
    """As Optuna's: an exception of its own ends the trial, and the next one begins."""

    class PrunedError(Exception): ...

    class Prunes(Callback):
        def on_validation_end(self, trainer, pl_module):
            if not trainer.sanity_checking and trainer.callback_metrics["val_loss"] > 0:
                raise PrunedError

    for _ in range(2):
        with pytest.raises(PrunedError):
            make(max_epochs=2, callbacks=[Prunes()]).fit(Small())


def test_learning_rates_are_logged(make, tmp_path):
    logger = CSVLogger(tmp_path)
    monitor = LearningRateMonitor("step")
    make(max_epochs=1, logger=logger, log_every_n_steps=1, callbacks=[monitor]).fit(Small())
    assert "lr-Adam" in (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "callback",
    [
        lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1),
        lambda: WeightAveraging(avg_fn=get_ema_avg_fn(0.9)),
        lambda: GradientAccumulationScheduler({0: 2, 1: 3}),
        lambda: Timer({"hours": 1}),
        lambda: ModelPruning("l1_unstructured", amount=0.5),
        ModelSummary,
        RichModelSummary,
        DeviceStatsMonitor,
        lambda: LambdaCallback(on_train_start=lambda trainer, module: None),
    ],
)
def test_lightnings_own(make, callback, tmp_path):
    flags = {"enable_model_summary": None} if callback in (ModelSummary, RichModelSummary) else {}
    trainer = make(max_epochs=3, callbacks=[callback()], logger=CSVLogger(tmp_path), **flags)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Small())
    assert trainer.current_epoch >= 3  # averaging weights takes one more


def test_finetuning_of_a_backbone(make):
    class TwoParts(Small):
        def __init__(self):
            super().__init__()
            self.backbone = self.net[0]

        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)

    trainer = make(max_epochs=3, callbacks=[BackboneFinetuning(1)])
    trainer.fit(module := TwoParts())
    assert all(parameter.requires_grad for parameter in module.backbone.parameters())
    assert len(trainer.optimizers[0].param_groups) == 2


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_bars(make, bar):
    mine = bar()
    trainer = make(max_epochs=1, callbacks=[mine], enable_progress_bar=True)
    trainer.fit(Small())
    assert trainer.progress_bar_callback is mine
    assert mine.total_train_batches == 6
    assert "train_loss" in mine.get_metrics(trainer, trainer.lightning_module)


def test_predictions_are_written(make):
    class Writes(BasePredictionWriter):
        def __init__(self, interval):
            super().__init__(interval)
            self.written = []

        def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
            self.written.append(batch_indices)

        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            self.written.append((len(predictions), batch_indices))

    writes = Writes("batch_and_epoch")
    make(callbacks=[writes]).predict(Small(), return_predictions=False)
    expected = [list(range(first, first + 4)) for first in range(0, 24, 4)]
    assert writes.written[:6] == expected
    assert writes.written[6][0] == 6


def test_callbacks_of_the_module(make):
    class Mine(Callback):
        def on_train_start(self, trainer, pl_module):
            self.has_begun = True

    mine = Mine()

    class Brings(Small):
        def configure_callbacks(self):
            return [mine, EarlyStopping("val_loss")]

    trainer = make(max_epochs=1)
    trainer.fit(Brings())
    assert mine.has_begun
    assert len(trainer.early_stopping_callbacks) == 1


def test_callbacks_that_are_added_by_hand(make):
    class Notes(Callback):
        steps = 0

        def on_train_batch_end(self, *_):
            self.steps += 1

    trainer, notes = make(max_epochs=1), Notes()
    trainer.callbacks.append(notes)
    trainer.fit(Small())
    assert notes.steps == 6


class Replaces(Callback):
    """Puts other optimizers in the place of the module's."""

    def on_fit_start(self, trainer, pl_module):
        trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.0)]
        trainer.strategy.lr_scheduler_configs.clear()


class SetsRate(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.0


@pytest.mark.parametrize("callback", [Replaces, SetsRate])
def test_optimizers_that_a_callback_changes(make, callback):
    module = Small()
    before = module.net[0].weight.clone()
    make(max_epochs=1, callbacks=[callback()]).fit(module)
    assert torch.equal(module.net[0].weight, before)


def test_an_average_of_weights_in_a_callback(make):
    class Average(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if not hasattr(self, "weights"):
                self.weights = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
            for name, tensor in pl_module.state_dict().items():
                if tensor.is_floating_point():
                    self.weights[name].lerp_(tensor, 0.1)

        def on_train_end(self, trainer, pl_module):
            pl_module.load_state_dict(self.weights)

    average = Average()
    make(max_epochs=1, callbacks=[average]).fit(module := Small())
    assert torch.equal(module.net[0].weight, average.weights["net.0.weight"])


def test_a_loader_that_a_callback_asks_for(make):
    class Evaluates(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.rows = sum(len(batch[0]) for batch in trainer.val_dataloaders)

    evaluates = Evaluates()
    make(max_epochs=1, callbacks=[evaluates]).fit(Small())
    assert evaluates.rows == 24


def test_the_learning_rate_finder(make):
    class Takes(Small):
        def train_dataloader(self):
            return DataLoader(TensorDataset(ROWS.repeat(5, 1)), batch_size=2, shuffle=True)

    trainer, module = make(max_epochs=1), Takes()
    found = Tuner(trainer).lr_find(module, num_training=30, attr_name="lr")
    assert module.lr == found.suggestion()
    make(max_epochs=1, callbacks=[LearningRateFinder(num_training_steps=30, attr_name="lr")]).fit(Takes())


@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_the_batch_size_finder(make, mode):
    data = SmallData(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make(max_epochs=1)
        found = Tuner(trainer).scale_batch_size(
            Small(), datamodule=data, mode=mode, max_trials=2, steps_per_trial=1, init_val=3
        )
        assert trainer.train_dataloader.batch_size == data.batch_size == found
        make(max_epochs=1, callbacks=[BatchSizeFinder(mode, max_trials=2, steps_per_trial=1)]).fit(
            Small(), datamodule=SmallData(2)
        )
    assert data.batch_size > 2


def test_callbacks_after_a_finder_are_those_from_before(make):
    finder = BatchSizeFinder("power", max_trials=1, steps_per_trial=1)
    trainer = make(max_epochs=1, callbacks=[finder], enable_checkpointing=False)
    before = list(trainer.callbacks)
    trainer.fit(Small(), datamodule=SmallData(2))
    assert trainer.callbacks == before


def test_stand_ins_of_a_tests(make):
    callback = Mock(spec=Callback, **{"state_dict.return_value": {}, "state_key": "stand-in"})
    make(max_epochs=1, callbacks=[callback]).fit(Small())
    assert callback.on_train_batch_end.call_count == 6


def test_stand_ins_for_a_checkpoint_callback(make):
    callback = Mock(spec=ModelCheckpoint, **{"state_dict.return_value": {}, "state_key": "stand-in"})
    make(max_epochs=1, callbacks=[callback]).fit(Small())
    assert callback.on_train_batch_end.call_count == 6
