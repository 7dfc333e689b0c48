"""The engine is a Trainer: same arguments, same defaults, same loggers; and what it adds to one."""

import inspect

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

import polyphase.engine
from polyphase.engine import Engine, fit
from polyphase.engine.errors import RefusedError
from polyphase.engine.flags import Layout

from .tiny import QUIET, Positions, Regression, Seen, engine, rows

EPOCH = [[0, 1], [2, 3], [4]]


class Numbers(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(Positions(5), batch_size=2)


class Rows(LightningDataModule):
    def train_dataloader(self):
        return rows(shuffle=True)


# --- as a Trainer


def test_the_public_face():
    named = {"Engine", "__version__", "fit", "read_weights", "register_comm_hook", "register_strategy"}
    assert set(polyphase.engine.__all__) == named
    assert issubclass(Engine, Trainer)


def parameters(cls):
    return {name: p for name, p in inspect.signature(cls.__init__).parameters.items() if name != "self"}


def test_trainers_defaults_written_out_are_accepted():
    defaults = {name: p.default for name, p in parameters(Trainer).items()}
    run = Engine(**{**defaults, **QUIET, "devices": 1})
    assert run.max_epochs == Trainer(**QUIET, devices=1).max_epochs


@pytest.mark.parametrize("name", ["fit", "validate", "test", "predict"])
def test_the_methods_take_trainers_arguments_in_its_order(name):
    ours, theirs = (inspect.signature(getattr(cls, name)).parameters for cls in (Engine, Trainer))
    assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs.values()]


def test_the_default_logger_and_checkpoints_are_lightnings(tmp_path):
    flags = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "default_root_dir": tmp_path}
    ours, theirs = Engine(**flags), Trainer(**flags)
    (our_logger,), (their_logger,) = ours.loggers, theirs.loggers
    assert isinstance(our_logger, type(their_logger))
    assert our_logger.log_dir == their_logger.log_dir
    assert [type(c) for c in ours.checkpoint_callbacks] == [ModelCheckpoint]


def test_loggers_as_trainer_takes_them(tmp_path):
    logger = CSVLogger(tmp_path)
    assert engine(logger=logger).loggers == [logger]
    assert engine(logger=[logger]).loggers == [logger]
    assert engine(logger=False).loggers == []


# --- fit


def test_fit_with_a_loader():
    module = Seen()
    assert engine().fit(module, DataLoader(Positions(5), batch_size=2)) is None
    assert module.epochs == [EPOCH]


def test_fit_with_a_data_module():
    module = Seen()
    engine().fit(module, datamodule=Numbers())
    assert module.epochs == [EPOCH]


@pytest.mark.parametrize("data", [Numbers(), DataLoader(Positions(5), batch_size=2)], ids=["data module", "loader"])
def test_the_function_fit_builds_an_engine_and_returns_it(data):
    module = Seen()
    run = fit(module, data, **QUIET, devices=1, max_epochs=2)
    assert type(run) is Engine
    assert run.global_step == 6
    assert module.epochs == [EPOCH, EPOCH]


def test_the_function_fit_refuses_flags_as_the_engine_does():
    with pytest.raises(ValueError, match=r"Did you mean 'fsdp'\?"):
        fit(Seen(), Numbers(), strategy="fdsp", accelerator="cpu")


def test_a_module_without_an_optimizer_is_refused():
    class NoOptimizer(LightningModule):
        def training_step(self, batch, batch_idx): ...

    with pytest.raises(MisconfigurationException, match=r"No `configure_optimizers\(\)` method defined in NoOptimizer"):
        engine().fit(NoOptimizer(), DataLoader(Positions(5)))


def test_what_is_no_lightning_module_is_refused_as_by_lightning():
    with pytest.raises(TypeError, match=r"`model` must be a `LightningModule`"):
        engine().fit(nn.Linear(2, 2), DataLoader(Positions(5)))


def test_one_engine_fits_twice():
    run = engine()
    for _ in range(2):
        module = Regression()
        run.fit_loop.epoch_progress.reset()
        run.fit(module, rows())
        assert not torch.equal(module.net[0].weight, Regression().net[0].weight)


# --- what it adds


@pytest.mark.parametrize(
    ("flags", "layout"),
    [
        ({}, Layout()),
        ({"strategy": "single"}, Layout()),
        ({"strategy": "ddp", "devices": 3}, Layout(replicate=3)),
        ({"strategy": "fsdp", "devices": 3}, Layout(shard=3)),
        ({"strategy": "hsdp:shard=2", "devices": 6}, Layout(replicate=3, shard=2)),
    ],
    ids=str,
)
def test_the_layout(flags, layout):
    run = engine(**flags)
    assert run.layout == layout
    assert run.layout.world_size == run.world_size


def test_a_single_callback_needs_no_list():
    class Counts(Callback):
        num = 0

        def on_train_batch_end(self, *args):
            self.num += 1

    for wrap in (lambda c: c, lambda c: [c], lambda c: (c,)):
        counts = Counts()
        engine(callbacks=wrap(counts)).fit(Seen(), DataLoader(Positions(3)))
        assert counts.num == 3


def test_the_callbacks_are_the_users_own():
    mine = Callback()
    assert engine(callbacks=mine).callbacks == [mine]


def test_the_users_list_of_callbacks_is_not_changed():
    mine = [Callback()]
    engine(callbacks=mine, enable_progress_bar=True)
    assert len(mine) == 1


def bars(run):
    return [c for c in run.callbacks if isinstance(c, ProgressBar)]


def test_one_progress_bar_unless_there_is_to_be_none():
    bar = RichProgressBar()
    assert len(bars(engine(enable_progress_bar=None))) == 1
    assert len(bars(engine(enable_progress_bar=True))) == 1
    assert bars(engine(enable_progress_bar=True, callbacks=bar)) == [bar]
    assert bars(engine(enable_progress_bar=False)) == []


@pytest.mark.filterwarnings("ignore:.*barebones=True")
def test_barebones_runs():
    module = Seen()
    run = Engine(accelerator="cpu", devices=1, barebones=True, max_epochs=1)
    run.fit(module, DataLoader(Positions(5), batch_size=2))
    assert module.epochs == [EPOCH]
    assert bars(run) == []


@pytest.mark.parametrize("strategy", ["fsdp_fork", "local_sgd_fork"])
def test_bench_comm_names_the_strategies_that_it_can_forecast_under(strategy):
    message = f"bench-comm can't forecast under strategy '{strategy}': choose ddp, zero1 or hsdp"
    with pytest.raises(RefusedError, match=message):
        engine(strategy=strategy, devices=2).bench_comm(Regression(), rows())


def test_a_strategy_that_can_not_repeat_steps_says_so_before_sizes_are_asked_for():
    with pytest.raises(ValueError, match="micro_batch_size='auto' can't repeat a step under tensor parallelism"):
        engine(strategy="tp", devices=2, micro_batch_size="auto")
