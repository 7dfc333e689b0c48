"""Every run takes one way through its epochs, which leaves nothing behind."""

import copy
import pickle

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from polyphase.engine.loop.log import Log

from ..tiny import Positions, Seen, engine


class Manual(Seen):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()


class Iterates(Seen):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class Looks(Callback):
    """Whether the module's `log` was the engine's in each batch."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append(isinstance(vars(pl_module).get("log"), Log))


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter` argument", "ignore:You are using the `dataloader_iter`")
@pytest.mark.parametrize(
    ("module", "flags"),
    [(Seen, {}), (Manual, {}), (Iterates, {}), (Seen, {"profiler": "simple"})],
    ids=["usual", "manual", "dataloader_iter", "profiler"],
)
def test_every_run_takes_one_way_and_leaves_the_module_and_plugin_as_they_were(module, flags):
    looks = Looks()
    module = module()
    trainer = engine(max_epochs=3, callbacks=looks, **flags)
    trainer.fit(module, DataLoader(Positions(4)))
    assert module.epochs == [[[0], [1], [2], [3]]] * 3
    assert looks.seen == [True] * 12
    assert trainer.data_wait_s > 0
    assert "log" not in vars(module)
    assert "hooks" not in vars(trainer.precision_plugin)


def test_an_error_leaves_the_module_as_it_was():
    class Raises(Seen):
        def training_step(self, batch, batch_idx):
            raise LookupError("this step has had enough")

    module = Raises()
    trainer = engine()
    with pytest.raises(LookupError, match="this step has had enough"):
        trainer.fit(module, DataLoader(Positions(4)))
    assert "log" not in vars(module)
    assert "hooks" not in vars(trainer.precision_plugin)


def test_a_log_method_of_the_users_own_stays():
    class Own(Seen):
        def log(self, name, value, **kwargs):
            super().log(f"own/{name}", value, **kwargs)

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    trainer = engine()
    trainer.fit(Own(), DataLoader(Positions(4)))
    assert set(trainer.callback_metrics) == {"own/loss"}


@pytest.mark.parametrize("copies", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])  # noqa: S301
def test_a_copy_made_in_mid_run_logs_for_itself(copies):
    class Copies(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            self.copy = copies(pl_module)

    callback = Copies()
    engine(callbacks=callback).fit(Logs(), DataLoader(Positions(4)))
    log = callback.copy.log
    assert not isinstance(log, Log)
    assert log.__self__ is callback.copy


class Logs(Seen):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def test_a_logged_value_is_that_of_the_call_whatever_becomes_of_the_tensor():
    class Changes(Seen):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            value = torch.full((), float(batch_idx))
            self.log("value", value, on_step=True, on_epoch=True)
            value.fill_(-1.0)
            return loss

    trainer = engine()
    trainer.fit(Changes(), DataLoader(Positions(4)))
    assert trainer.callback_metrics["value_step"] == 3
    assert trainer.callback_metrics["value_epoch"] == 1.5
