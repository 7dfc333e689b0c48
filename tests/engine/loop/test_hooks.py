"""Only hooks that somebody overrode are called, in Lightning's order."""

import functools

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from polyphase.engine.loop.hooks import Hooks, overridden

from ..tiny import Positions, Seen, engine


class Notes(Callback):
    def __init__(self, name, notes):
        self.name, self.notes = name, notes

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.notes.append((self.name, pl_module._current_fx_name))


class Module(LightningModule):
    def __init__(self, notes):
        super().__init__()
        self.notes = notes

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.notes.append(("module", self._current_fx_name))
        return "of the module"


def hooks_of(module, *callbacks):
    trainer = engine(callbacks=list(callbacks))
    trainer.strategy.connect(module)
    return Hooks(trainer), trainer


def test_callbacks_come_first_in_their_order_then_the_module():
    notes: list = []
    hooks, _ = hooks_of(Module(notes), Notes("a", notes), Callback(), Notes("b", notes))
    assert hooks.call("on_train_batch_end", None, None, 0) == "of the module"
    assert notes == [(name, "on_train_batch_end") for name in ("a", "b", "module")]


def test_the_place_of_a_log_call_is_that_of_the_caller_again_afterwards():
    module = Module([])
    hooks, _ = hooks_of(module)
    module._current_fx_name = "training_step"
    hooks.call("on_train_batch_end", None, None, 0)
    assert module._current_fx_name == "training_step"
    assert hooks.in_hook("backward", lambda: module._current_fx_name) == "backward"
    assert module._current_fx_name == "training_step"


@pytest.mark.parametrize("name", ["on_train_batch_start", "on_before_zero_grad", "on_after_backward"])
def test_what_nobody_overrode_is_not_there(name):
    assert overridden(Module([]), LightningModule, name) is None
    assert overridden(Callback(), Callback, name) is None
    assert hooks_of(Module([]), Notes("a", []))[0].call(name, None) is None


def test_a_hook_set_on_the_object_or_decorated_is_an_override():
    def hook(*args):
        return None

    callback = LambdaCallback(on_after_backward=hook)
    assert overridden(callback, Callback, "on_after_backward") is hook

    class Decorated(Callback):
        @functools.wraps(Callback.on_after_backward)
        def on_after_backward(self, trainer, pl_module):
            raise NotImplementedError

    assert overridden(Decorated(), Callback, "on_after_backward") is not None


@pytest.mark.parametrize("change", ["add", "swap", "remove"])
def test_a_change_of_callbacks_in_mid_epoch_is_seen_at_the_next_step(change):
    notes: list = []
    other = Notes("other", notes)

    class Changes(Notes):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx != 2:
                return
            if change == "add":
                trainer.callbacks.append(other)
            elif change == "swap":
                trainer.callbacks[trainer.callbacks.index(self)] = other
            else:
                trainer.callbacks.remove(self)

    engine(callbacks=Changes("first", notes)).fit(Seen(), DataLoader(Positions(5)))
    names = [name for name, _ in notes]
    before = ["first"] * 3  # batches 0 and 1, and the end of batch 2, where it was on the list when the batch began
    after = {"add": ["first", "other"] * 2, "swap": ["other"] * 2, "remove": []}[change]
    assert names == before + after
