"""Only hooks that somebody overrode are called, in Lightning's order."""

import functools

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine.loop.hooks import Hooks, overridden

from ..tiny import QUIET, Positions, Seen, engine


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
@pytest.mark.parametrize("kind", [Trainer, engine])
def test_a_change_of_callbacks_in_mid_epoch_is_seen_at_once(change, kind):
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

    flags = QUIET if kind is engine else {**QUIET, "max_epochs": 1, "devices": 1}
    kind(**flags, callbacks=Changes("first", notes)).fit(Seen(), DataLoader(Positions(5)))
    names = [name for name, _ in notes]
    assert names == ["first"] * 2 + {"add": ["first", "other"] * 3, "swap": ["other"] * 3, "remove": []}[change]


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.line.weight)

    def training_step(self, batch, batch_idx):
        self.log("loss", loss := self.line(batch[0]).mean())  # its gradient is 1
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.125)


def gives_itself_a_hook(callback, trainer, module, patch):
    callback.on_before_optimizer_step = lambda *_: [p.grad.mul_(2) for p in module.parameters()]


def replaces_its_hook(callback, trainer, module, patch):
    callback.on_after_backward = lambda *_: [p.grad.mul_(2) for p in module.parameters()]


def patches_the_class_of_a_callback(callback, trainer, module, patch):
    patch(type(callback), "on_after_backward", lambda *_: [p.grad.mul_(2) for p in module.parameters()])


def patches_lightnings_callback(callback, trainer, module, patch):
    doubles = lambda *_: [p.grad.mul_(2) for p in module.parameters()]  # noqa: E731
    patch(Callback, "on_before_optimizer_step", lambda self, *_: doubles() if self is callback else None)


def patches_the_class_of_the_module(callback, trainer, module, patch):
    patch(type(module), "on_after_backward", lambda self: [p.grad.mul_(2) for p in self.parameters()], raising=False)


def patches_lightnings_module(callback, trainer, module, patch):
    backward = LightningModule.backward
    patch(LightningModule, "backward", lambda self, loss: backward(self, 2 * loss))


def patches_the_class_of_the_strategy(callback, trainer, module, patch):
    backward = Strategy.backward
    patch(Strategy, "backward", lambda self, loss, *rest: backward(self, 2 * loss, *rest))


def patches_the_class_of_the_optimizer(callback, trainer, module, patch):
    step = torch.optim.SGD.step
    patch(torch.optim.SGD, "step", lambda self, closure: (step(self, closure), step(self)))


def patches_zero_grad_of_all_optimizers(callback, trainer, module, patch):
    patch(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)  # so that gradients add up


def patches_the_copy_of_batches(callback, trainer, module, patch):
    patch(type(module), "on_after_batch_transfer", lambda self, batch, _: [2 * batch[0]], raising=False)


def patches_log(callback, trainer, module, patch):
    patch(LightningModule, "log", lambda self, *_, **__: self.line.weight.data.add_(1))


CHANGES = [
    gives_itself_a_hook,
    replaces_its_hook,
    patches_the_class_of_a_callback,
    patches_lightnings_callback,
    patches_the_class_of_the_module,
    patches_lightnings_module,
    patches_the_class_of_the_strategy,
    patches_the_class_of_the_optimizer,
    patches_zero_grad_of_all_optimizers,
    patches_the_copy_of_batches,
    patches_log,
]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_replaced_in_mid_epoch_has_the_effect_that_it_has_on_lightnings_trainer(change):
    class Changes(Callback):
        def on_after_backward(self, trainer, pl_module):
            pass

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                change(self, trainer, pl_module, patch)

    weights = []
    for kind, flags in [(Trainer, {"max_epochs": 1, "devices": 1}), (engine, {})]:
        module, data = Line(), DataLoader(TensorDataset(torch.ones(6, 1)))
        with pytest.MonkeyPatch.context() as context:
            patch = context.setattr
            kind(**QUIET, **flags, callbacks=Changes()).fit(module, data)
        weights.append(float(module.line.weight.detach()))
    unchanged = 1 - 6 * 0.125
    assert weights[0] == weights[1] != unchanged
