"""What other code reads of a trainer, writes to it, and does with it."""

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from polyphase.engine import Engine

from .small import ROWS, Small, SmallData, loader


class Reads(Callback):
    """What a function of the trainer gives after each batch."""

    def __init__(self, read) -> None:
        self.read = read
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.found.append(self.read(trainer))


COUNTERS = {
    "global_step": (lambda t: t.global_step, [1, 2, 3, 4]),
    "current_epoch": (lambda t: t.current_epoch, [0, 0, 1, 1]),
    "fit_loop.epoch_loop.batch_idx": (lambda t: t.fit_loop.epoch_loop.batch_idx, [0, 1, 0, 1]),
    "fit_loop.epoch_loop.total_batch_idx": (lambda t: t.fit_loop.epoch_loop.total_batch_idx, [0, 1, 2, 3]),
    "fit_loop.total_batch_idx": (lambda t: t.fit_loop.total_batch_idx, [0, 1, 2, 3]),
    "fit_loop.batch_idx": (lambda t: t.fit_loop.batch_idx, [0, 1, 0, 1]),
    "is_last_batch": (lambda t: t.is_last_batch, [False, True, False, True]),
    "num_training_batches": (lambda t: t.num_training_batches, [2] * 4),
    "estimated_stepping_batches": (lambda t: t.estimated_stepping_batches, [4] * 4),
    "fit_loop.max_batches": (lambda t: t.fit_loop.max_batches, [2] * 4),
    "fit_loop.max_epochs": (lambda t: t.fit_loop.max_epochs, [2] * 4),
    "optimizer_steps": (
        lambda t: t.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed,
        [1, 2, 3, 4],
    ),
    "batch_progress": (lambda t: t.fit_loop.epoch_loop.batch_progress.current.ready, [1, 2, 1, 2]),
    "epoch_progress": (lambda t: t.fit_loop.epoch_progress.current.completed, [0, 0, 1, 1]),
    "training": (lambda t: (t.training, t.validating, t.state.fn, t.state.stage), [(True, False, "fit", "train")] * 4),
    "accumulate_grad_batches": (lambda t: t.accumulate_grad_batches, [1] * 4),
}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters(make, name):
    read, expected = COUNTERS[name]
    reads = Reads(read)
    make(max_epochs=2, limit_train_batches=2, limit_val_batches=0, callbacks=[reads]).fit(Small())
    assert reads.found == expected


def test_metrics(make):
    trainer = make(max_epochs=1)
    trainer.fit(Small())
    assert set(trainer.callback_metrics) == {"train_loss", "val_loss"}
    assert isinstance(trainer.callback_metrics["val_loss"], torch.Tensor)
    assert {"train_loss", "val_loss"} <= set(trainer.progress_bar_metrics)
    assert set(trainer.logged_metrics) == {"train_loss", "val_loss"}


def test_results_of_every_stage(make):
    trainer, module = make(max_epochs=1), Small()
    trainer.fit(module)
    (validated,), (tested,) = trainer.validate(module, verbose=False), trainer.test(module, verbose=False)
    assert set(validated) == {"val_loss"}
    assert set(tested) == {"test_loss"}
    predicted = trainer.predict(module)
    assert [tuple(batch.shape) for batch in predicted] == [(4, 1)] * 6
    assert trainer.predict(module, return_predictions=False) is None


def test_the_losses_are_the_stock_trainers(make, tmp_path):
    losses = []
    for build in (make, lambda **flags: Trainer(**flags, accelerator="cpu", logger=False, default_root_dir=tmp_path)):
        seed_everything(3)
        module = Small()
        build(max_epochs=2, enable_checkpointing=False).fit(module)
        losses.append(module.losses)
    assert losses[0] == losses[1]


def test_a_second_fit_goes_on(make):
    trainer, module = make(max_epochs=1), Small()
    trainer.fit(module)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    assert (trainer.current_epoch, trainer.global_step, len(module.losses)) == (3, 18, 18)


def test_the_number_of_epochs_is_set_in_a_run(make):
    class Longer(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            trainer.fit_loop.max_epochs = 2

    trainer = make(max_epochs=1, callbacks=[Longer()])
    trainer.fit(Small())
    assert trainer.current_epoch == 2


def test_the_progress_is_written(make):
    trainer = make(max_epochs=4)
    trainer.fit_loop.epoch_progress.current.completed = 2
    trainer.fit_loop.epoch_progress.current.processed = 2
    trainer.fit(module := Small())
    assert len(module.losses) == 12


@pytest.mark.parametrize("where", ["on_train_batch_end", "on_validation_epoch_end", "on_train_epoch_end"])
def test_should_stop(make, where):
    class Stops(Callback): ...

    setattr(Stops, where, lambda self, trainer, *_: setattr(trainer, "should_stop", True))
    trainer = make(max_epochs=5, callbacks=[Stops()])
    trainer.fit(Small())
    assert trainer.global_step == (1 if where == "on_train_batch_end" else 6)


def test_a_batch_that_is_skipped(make):
    class Skips(Small):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    trainer = make(max_epochs=2)
    trainer.fit(Skips())
    assert trainer.global_step == 4


def test_a_step_without_a_loss(make):
    class Sometimes(Small):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 2 else {"loss": loss, "extra": 1}

    trainer = make(max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Sometimes())
    assert trainer.global_step == 6


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({"limit_train_batches": 0.5, "max_epochs": 1}, 3),
        ({"limit_train_batches": 2, "max_epochs": 2}, 4),
        ({"max_steps": 5}, 5),
        ({"min_epochs": 2, "max_steps": 3, "max_epochs": 2}, 3),
        ({"fast_dev_run": True}, 1),
        ({"fast_dev_run": 3}, 3),
        ({"overfit_batches": 2, "max_epochs": 2}, 4),
        ({"accumulate_grad_batches": 4, "max_epochs": 1}, 2),
        ({"max_epochs": 0}, 0),
        ({"max_steps": 0}, 0),
        ({"max_time": {"seconds": 0}, "max_epochs": 3}, 0),
        ({"val_check_interval": 2, "max_epochs": 1}, 6),
        ({"val_check_interval": 0.5, "max_epochs": 1}, 6),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4, "max_epochs": 2}, 12),
        ({"gradient_clip_val": 0.1, "max_epochs": 1}, 6),
        ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", "max_epochs": 1}, 6),
        ({"detect_anomaly": True, "max_epochs": 1}, 6),
        ({"deterministic": True, "max_epochs": 1}, 6),
        ({"inference_mode": False, "max_epochs": 1}, 6),
        ({"precision": "bf16-mixed", "max_epochs": 1}, 6),
        ({"precision": 64, "max_epochs": 1}, 6),
        ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, 12),
        ({"num_sanity_val_steps": 2, "max_epochs": 1}, 6),
        ({"barebones": True, "max_epochs": 1}, 6),
        ({"profiler": "simple", "max_epochs": 1}, 6),
    ],
    ids=str,
)
def test_flags(make, flags, steps):
    if flags.get("barebones"):
        flags = {**flags, "logger": None, "enable_progress_bar": None, "enable_model_summary": None}
        flags |= {"num_sanity_val_steps": None}
    trainer, module = make(**flags), Small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    assert trainer.global_step == steps


def test_a_gan(make):
    class Gan(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(4, 4), nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            one, two = self.lr_schedulers()
            self.toggle_optimizer(first)
            first.zero_grad()
            self.manual_backward(self.critic(self.generator(batch[0])).mean())
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            self.untoggle_optimizer(first)
            second.zero_grad()
            self.manual_backward(-self.critic(self.generator(batch[0]).detach()).mean())
            second.step()
            one.step()
            two.step()

        def configure_optimizers(self):
            optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (self.generator, self.critic)]
            return optimizers, [torch.optim.lr_scheduler.StepLR(each, 1) for each in optimizers]

    trainer = make(max_epochs=1)
    trainer.fit(module := Gan(), loader())
    assert trainer.global_step == 12
    assert module.optimizers()[0].param_groups[0]["lr"] == pytest.approx(1e-7)


def test_schedulers(make):
    class Plateau(Small):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    trainer = make(max_epochs=3)
    trainer.fit(Plateau())
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.1
    assert trainer.lr_scheduler_configs[0].monitor == "val_loss"

    class EachStep(Small):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), 0.1)
            steps = self.trainer.estimated_stepping_batches
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps)
            return [optimizer], [{"scheduler": cycle, "interval": "step"}]

    trainer = make(max_epochs=2)
    trainer.fit(EachStep())
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 12


def test_a_module_is_copied_while_it_is_attached(make):
    class Copies(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            self.copy = copy.deepcopy(pl_module.net)
            copy.deepcopy(pl_module)
            copy.deepcopy(trainer.callbacks)

    copies = Copies()
    make(max_epochs=1, callbacks=[copies], enable_progress_bar=True).fit(module := Small())
    assert torch.equal(copies.copy[0].weight, module.net[0].weight)
    copy.deepcopy(module)


def test_a_module_without_a_trainer(make):
    module = Small()
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        _ = module.trainer
    make(max_epochs=1).fit(module)
    assert module.trainer.global_step == 6
    assert module(ROWS).shape == (24, 1)


def test_other_stages_before_fit(make):
    trainer, module, data = make(max_epochs=1), Small(), SmallData()
    trainer.validate(module, datamodule=data, verbose=False)
    trainer.test(module, datamodule=data, verbose=False)
    trainer.fit(module, datamodule=data)
    assert data.stages == ["validate", "test", "fit"]


def test_a_class_of_ones_own(trainer_class, tmp_path):
    class Mine(trainer_class):
        def __init__(self, *arguments, extra=3, **named):
            super().__init__(*arguments, **named)
            self.extra = extra

        def fit(self, *arguments, **named):
            self.has_begun = True
            return super().fit(*arguments, **named)

    trainer = Mine(extra=5, max_epochs=1, accelerator="cpu", logger=False, default_root_dir=tmp_path)
    trainer.fit(Small())
    assert (trainer.extra, trainer.has_begun, trainer.global_step) == (5, True, 6)


def test_ctrl_c_stops_the_run(make):
    class Interrupts(Callback):
        def on_train_batch_end(self, *_):
            raise KeyboardInterrupt

        def on_exception(self, trainer, pl_module, exception):
            self.seen = type(exception)

    interrupts = Interrupts()
    trainer = make(max_epochs=1, callbacks=[interrupts])
    with pytest.raises(SystemExit):
        trainer.fit(Small())
    assert interrupts.seen is KeyboardInterrupt
    assert trainer.interrupted


def test_a_failed_run_leaves_the_process_usable(make):
    class Fails(Small):
        def training_step(self, batch, batch_idx):
            raise ValueError("mine")

    trainer = make(max_epochs=1)
    with pytest.raises(ValueError, match=r"^mine$"):
        trainer.fit(Fails())
    make(max_epochs=1).fit(Small())


def test_hooks_in_order(make):
    called = []

    class Notes(Callback):
        def __getattribute__(self, name):
            if name.startswith(("on_", "setup", "teardown")) and name != "on_exception":
                called.append(name)
            return super().__getattribute__(name)

    make(max_epochs=1, limit_train_batches=1, limit_val_batches=1, callbacks=[Notes()]).fit(Small())
    hooks = [name for name in called if "state_dict" not in name]
    order = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"]
    order += ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
    order += ["on_train_batch_end", "on_validation_start", "on_validation_end", "on_train_epoch_end"]
    order += ["on_train_end", "on_fit_end", "teardown"]
    places = [hooks.index(name) for name in order]
    assert places == sorted(places)


def test_attributes_of_the_trainer(make):
    trainer = make(max_epochs=1, max_steps=7)
    assert (trainer.max_epochs, trainer.max_steps, trainer.min_epochs) == (1, 7, None)
    assert (trainer.world_size, trainer.num_devices, trainer.num_nodes) == (1, 1, 1)
    assert (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.is_global_zero) == (0, 0, 0, True)
    assert trainer.strategy.root_device == torch.device("cpu")
    assert trainer.device_ids == [0]
    assert trainer.precision == "32-true"
    assert trainer.sanity_checking is False
    assert trainer.received_sigterm is False
    assert trainer.checkpoint_callback in trainer.callbacks
    assert trainer.early_stopping_callbacks == []
    assert trainer.logger is None
    assert trainer.loggers == []
    assert trainer.profiler is not None
    assert trainer.lightning_module is None
    assert trainer.ckpt_path is None
    assert trainer.fit_loop.min_epochs is None
    assert isinstance(trainer, Trainer)
    assert type(trainer) in (Trainer, Engine)
