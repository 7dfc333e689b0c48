"""What scripts written for Lightning's trainer read, hand over or rely on."""

import sys
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from polyphase.callbacks import ConsoleLogger, ProgressBar
from polyphase.engine import Engine

from ..tiny import Regression, engine, rows
from .stock_comparison import TRAINERS, Small, exactly, trainer_of
from .stock_comparison import rows as stock_rows


@pytest.mark.parametrize("bar_of", [ConsoleLogger, ProgressBar])
def test_our_bars_have_the_counts_of_tqdms(bar_of):
    run = engine(callbacks=[bar_of()], enable_progress_bar=True, max_epochs=-1, max_steps=2, limit_val_batches=3)
    run.fit(BoringModel())
    bar = run.progress_bar_callback
    assert (bar.train_progress_bar.n, bar.train_progress_bar.total) == (2, 2)
    run.validate(BoringModel(), verbose=False)
    assert (bar.val_progress_bar.n, bar.val_progress_bar.total) == (3, 3)
    run.test(BoringModel(), verbose=False)
    assert (bar.test_progress_bar.n, bar.test_progress_bar.total) == (64, 64)
    assert not hasattr(bar.train_progress_bar, "set_postfix")
    with pytest.raises(AttributeError, match=r"callbacks=\[TQDMProgressBar\(\)\]"):
        bar.train_progress_bar.set_postfix()


def test_a_tqdm_bar_of_the_users_is_the_bar_without_a_terminal(capsys):
    assert not sys.stdout.isatty()
    bar = TQDMProgressBar()
    run = engine(callbacks=[bar], enable_progress_bar=True, max_steps=1)
    run.fit(Regression(), rows())
    assert run.progress_bar_callback is bar
    assert "Epoch 0" in capsys.readouterr().out


def test_a_checkpoint_io_that_a_strategy_is_registered_with_stays():
    class Mine(TorchCheckpointIO): ...

    mine = Mine()
    StrategyRegistry.register("single_of_mine", SingleDeviceStrategy, device="cpu", checkpoint_io=mine)
    try:
        assert engine(strategy="single_of_mine").strategy.checkpoint_io is mine
    finally:
        StrategyRegistry.remove("single_of_mine")


class Batches:
    """Any iterable is a loader; this one can't be a key of a dict."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, num_batches):
        self.batches = list(stock_rows(num_batches))

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 2}], ids=str)
def test_any_iterable_of_batches_is_a_loader(flags):
    weights = []
    for trainer_class in TRAINERS:
        module = Small()
        trainer = trainer_of(trainer_class, Path(trainer_class.__name__), max_epochs=2, **flags)
        trainer.fit(module, Batches(4), Batches(2))
        weights.append(exactly(module.state_dict()))
    assert weights[0] == weights[1]


@pytest.mark.parametrize("flags", [{"gradient_clip_val": 1.0}, {"accumulate_grad_batches": 2}], ids=str)
def test_flags_that_manual_optimization_can_not_have_leave_no_folder(flags):
    module = Regression()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match=r"is not supported for manual optimization"):
        Engine(accelerator="cpu", devices=1, enable_progress_bar=False, **flags).fit(module, rows())
    assert not list(Path().iterdir())


def test_a_run_has_no_warning_of_others_even_as_an_error(tmp_path):
    run = engine(max_steps=1, limit_val_batches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "The '.*_dataloader' does not have many workers")
        warnings.filterwarnings("ignore", "The number of training batches .* is smaller than the logging interval")
        run.fit(BoringModel())
        run.save_checkpoint(tmp_path / "saved.ckpt")
        engine(max_steps=2).fit(BoringModel(), ckpt_path=tmp_path / "saved.ckpt")
        run.predict(BoringModel())


def test_a_strategy_of_the_users_is_handed_the_optimizers_state(tmp_path):
    class Mine(SingleDeviceStrategy):
        def load_optimizer_state_dict(self, checkpoint):
            self.num_states = len(checkpoint["optimizer_states"])
            super().load_optimizer_state_dict(checkpoint)

    run = engine(max_steps=1)
    run.fit(BoringModel())
    run.save_checkpoint(tmp_path / "saved.ckpt")
    mine = Mine("cpu")
    engine(max_steps=2, strategy=mine).fit(BoringModel(), ckpt_path=tmp_path / "saved.ckpt")
    assert mine.num_states == 1


def test_what_is_put_in_the_place_of_a_trainers_method_is_called(monkeypatch):
    """As by ``mlflow.pytorch.autolog()``, which adds a callback before it goes on."""
    fit, callback = Trainer.fit, TQDMProgressBar()

    def adds(self, *args, **kwargs):
        self.callbacks.append(callback)
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "fit", adds)
    run = engine(max_epochs=1)
    run.fit(Regression(), rows(4))
    assert callback.trainer is run
