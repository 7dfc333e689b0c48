"""The engine is a Trainer: same arguments, same defaults, same loggers; and what it adds to one."""

import inspect
import re

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
from polyphase.engine.old_names import warn_of_old_name
from polyphase.engine.strategies import adapt

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


# --- verify


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"max_epochs": 1, "callbacks": Callback()},
    ],
    ids=lambda flags: re.sub(" object at 0x[0-9a-f]+", "", str(flags)),  # the same in each run
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_one_process_under_the_engine_equals_one_process_of_lightnings(flags, shuffle):
    module = Regression()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = engine(**flags)
    certificate = run.verify(module, rows(18, shuffle=shuffle), steps=6)
    assert certificate.equal, certificate
    assert certificate is run.certificate
    assert len(certificate.differences) == 6
    assert max(certificate.differences) <= certificate.tolerance
    assert str(certificate).startswith("equal to one process within 1e-05")
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items()), "left as it is"


@pytest.mark.parametrize(
    "flags", [{"global_batch_size": 6, "micro_batch_size": 4}, {"accumulate_grad_batches": 3}, {"global_batch_size": 7}]
)
@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("ddp_fork", 2)])
def test_verify_knows_how_much_short_batches_count(strategy, devices, flags):
    run = Engine(strategy=strategy, devices=devices, **QUIET, **flags)
    assert run.verify(Regression(), rows(17, shuffle=True), steps=5).equal


class SeesHowItComputes(Regression):
    """Learns more where numbers may be rounded, or summed in another order."""

    def training_step(self, batch, batch_idx):
        cudnn = torch.backends.cudnn
        flags = cudnn.allow_tf32, cudnn.benchmark, not cudnn.deterministic
        assert not any(flags), flags
        assert torch.get_float32_matmul_precision() == "highest"
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("ddp_spawn", 2)])
def test_verify_computes_exactly_on_gpus_and_leaves_the_flags_as_they_are(strategy, devices):
    cudnn = torch.backends.cudnn

    def flags():
        return cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, torch.get_float32_matmul_precision()

    torch.set_float32_matmul_precision("high")
    try:
        before = flags()
        run = Engine(strategy=strategy, devices=devices, benchmark=True, **QUIET)
        before = (before[0], cudnn.benchmark, *before[2:])  # which the engine's flag has set
        assert run.verify(SeesHowItComputes(), rows(8), steps=2).equal
        assert flags() == before == (True, True, False, "high")
    finally:
        torch.set_float32_matmul_precision("highest")
        cudnn.benchmark = False


def test_verify_with_a_data_module():
    assert engine().verify(Regression(), datamodule=Rows()).equal


class DiffersUnderTheEngine(Regression):
    """In its third step and under the engine only, one bias gets another gradient."""

    def on_before_optimizer_step(self, optimizer):
        if isinstance(self.trainer, Engine) and self.trainer.global_step == 2:
            self.net[2].bias.grad += 5.0


def test_a_difference_is_reported_by_step_and_first_tensor():
    certificate = engine().verify(DiffersUnderTheEngine(), rows(), steps=4)
    assert (certificate.equal, certificate.step, certificate.tensor) == (False, 3, "net.2.bias")
    assert certificate.differences[:3] == (0.0, 0.0, pytest.approx(0.5, abs=1e-6))  # the learning rate is 0.1
    assert "differs from one process: first 'net.2.bias', after step 3, by 5.00e-01, more than 1e-05" in str(
        certificate
    )


class AddsToABuffer(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("other", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.other += 1
        self.count += 1 + (isinstance(self.trainer, Engine) and self.trainer.global_step == 2)
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_differs_is_the_first_tensor_where_the_weights_agree():
    certificate = engine().verify(AddsToABuffer(), rows(), steps=4)
    assert (certificate.equal, certificate.step, certificate.tensor) == (False, 3, "count")
    assert certificate.differences == (0.0, 0.0, 1.0, 1.0)


def test_not_a_number_is_a_difference():
    class Nan(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1.0)

    certificate = engine(nonfinite="ignore").verify(Nan(), rows(), steps=2)
    assert (certificate.equal, certificate.step) == (False, 2)


def test_a_tolerance_of_the_users_decides():
    assert engine().verify(AddsToABuffer(), rows(), steps=4, tolerance=1.0).equal


def test_a_lower_precision_shows():
    class Cast(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch.to(self.net[0].weight.dtype), batch_idx)

    certificate = engine(precision="bf16-true").verify(Cast(), rows(), steps=2)
    assert not certificate.equal
    assert "so does a precision below float32" in str(certificate)
    assert engine(precision="bf16-true").verify(Cast(), rows(), steps=2, tolerance=0.1).equal


@pytest.mark.parametrize(
    ("strategy", "equals"),
    [
        *(("ddp", True), ("fsdp", True), ("ps", True), ("single", True)),
        *(("ps:staleness=1", False), ("local_sgd:sync_every=2", False), ("diloco", False)),
    ],
)
def test_which_strategies_are_to_equal_one_process(strategy, equals):
    made = engine(strategy=strategy, devices=1 if strategy == "single" else 2).strategy
    assert adapt(made).expects_parity is equals


def test_a_strategy_that_is_made_to_differ_is_the_reason():
    flag = "local_sgd_fork:sync_every=2"
    certificate = engine(strategy=flag, devices=2).verify(Regression(), rows(), steps=1)
    assert not certificate.equal
    assert f"(strategy '{flag}' is made to compute something else)" in str(certificate)
    assert "dropout" not in str(certificate)


@pytest.mark.parametrize("strategy", ["fsdp_fork", "local_sgd_fork"])
def test_bench_comm_names_the_strategies_that_it_can_forecast_under(strategy):
    message = f"bench-comm can't forecast under strategy '{strategy}': choose ddp, zero1 or hsdp"
    with pytest.raises(RefusedError, match=message):
        engine(strategy=strategy, devices=2).bench_comm(Regression(), rows())


def test_bench_comm_can_be_called_by_its_old_name():
    warn_of_old_name.cache_clear()
    flags = engine(strategy="fsdp_fork", devices=2)
    message = "the method Engine.wire is now called Engine.bench_comm"
    with pytest.warns(FutureWarning, match=message), pytest.raises(RefusedError, match="bench-comm can't forecast"):
        flags.wire(Regression(), rows())


def test_a_strategy_that_can_not_repeat_steps_says_so_before_sizes_are_asked_for():
    with pytest.raises(ValueError, match="micro_batch_size='auto' can't repeat a step under tensor parallelism"):
        engine(strategy="tp", devices=2, micro_batch_size="auto")


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_the_number_of_steps_is_a_count(steps):
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1"):
        engine().verify(Regression(), rows(), steps=steps)


def test_verify_needs_a_batch_size():
    with pytest.raises(ValueError, match=r"verify needs a DataLoader with a batch_size"):
        engine().verify(Regression(), DataLoader(torch.randn(5, 4, 4), batch_size=None))


def test_verify_equals_with_a_generator_of_the_users():
    loader = rows(18, shuffle=True, generator=torch.Generator().manual_seed(5))
    certificate = engine().verify(Regression(), loader)
    assert certificate.equal, certificate


@pytest.mark.parametrize(
    "flags",
    [
        {"limit_train_batches": 2},
        {"overfit_batches": 2},
        {"fast_dev_run": True},
        {"detect_anomaly": True},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly")
def test_verify_equals_under_each_flag_that_says_which_batches_are_seen(flags):
    certificate = engine(**flags).verify(Regression(), rows(18))
    assert certificate.equal, certificate


def test_verify_leaves_the_engine_as_it_was():
    run = engine(max_epochs=2)
    run.verify(Regression(), rows(), steps=2)
    assert run.global_step == 0
    module = Regression()
    run.fit(module, rows())
    assert run.global_step == 8
