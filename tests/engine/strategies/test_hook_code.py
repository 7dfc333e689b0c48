"""Code of hooks that reads optimizers' state, or compares types with Parameter, is found before it runs."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from polyphase.engine.strategies.hook_code import check_types, reader_of_state

# --- state


def norm_of(optimizer):
    return sum(float(values["exp_avg"].norm()) for values in optimizer.state.values())


class ReadsItself(Callback):
    def on_train_batch_end(self, trainer, *_):
        return [p for p in trainer.model.parameters() if p in trainer.optimizers[0].state]


class CallsAFunction(Callback):
    def on_train_batch_end(self, trainer, *_):
        return norm_of(trainer.optimizers[0])


class Tracker:
    def update(self, optimizer):
        for p, values in optimizer.state.items():
            p.data.sub_(values["exp_avg"])


class CallsAnObject(Callback):
    def __init__(self):
        self.tracker = Tracker()

    def on_train_batch_end(self, trainer, *_):
        self.tracker.update(trainer.optimizers[0])


class Copies(Callback):
    def on_train_batch_end(self, trainer, *_):
        return trainer.optimizers[0].state_dict()["state"]


class OfModule(LightningModule):
    def on_train_batch_end(self, *_):
        return len(self.optimizers().state)


class HasAState(Callback):
    state = 0

    def on_train_batch_end(self, trainer, module, *_):
        self.state += trainer.state.fn == "fit"
        return [self.state for _ in range(2)], module.state_dict()


class PlaysAGame(LightningModule):
    def training_step(self, batch, batch_idx):
        return self.layer(batch.state).sum() + self.game.env.state


class Knows(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        own = [p for p in module.parameters() if trainer.engine_strategy.keeps_state_of(p)]
        return [trainer.optimizers[0].state[p] for p in own]


@pytest.mark.parametrize(
    ("owner", "place"),
    [
        (ReadsItself(), "in on_train_batch_end"),
        (CallsAFunction(), "in norm_of"),
        (CallsAnObject(), "in update"),
        (Copies(), "in on_train_batch_end"),
        (OfModule(), "in on_train_batch_end"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_reads_an_optimizers_state_is_named(owner, place):
    line = reader_of_state([owner], [])
    assert line.startswith(__file__)
    assert place in line
    assert "state" in line


@pytest.mark.parametrize(
    "owner", [HasAState(), PlaysAGame(), Knows(), Callback(), LightningModule()], ids=lambda o: type(o).__name__
)
def test_a_state_of_ones_own_is_another_one(owner):
    assert reader_of_state([owner], []) == ""


def test_hooks_of_an_optimizer_count():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters())
    assert not reader_of_state([], [optimizer])
    optimizer.register_step_post_hook(lambda of, *_: len(of.state))
    assert "len(of.state)" in reader_of_state([], [optimizer])


# --- types


class Is(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        return [p for p in module.parameters() if type(p) is nn.Parameter]


class IsNot(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        return [p for p in module.parameters() if type(p) is not torch.nn.parameter.Parameter]


class OneOf(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        return [p for p in module.parameters() if type(p) in (torch.Tensor, nn.Parameter)]


class OfData(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        return [p for p in module.parameters() if type(p.data) is torch.Tensor]


class TheOtherWay(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        return [p for p in module.parameters() if nn.Parameter == p.__class__]


class ByName(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        return [p for p in module.parameters() if type(p).__name__ == "Parameter"]


class IsAnInstance(Callback):
    def __init__(self):
        self.whole = type(nn.Parameter()) is nn.Parameter

    def on_train_batch_end(self, trainer, module, outputs, batch, *_):
        if type(batch) is torch.Tensor:
            return ()
        found = [p for p in module.parameters() if isinstance(p, nn.Parameter) and type(p.grad) is not int]
        return found, type(module) is LightningModule, nn.Parameter(torch.ones(1)), type(found) is list


@pytest.mark.parametrize("kind", [Is, IsNot, OneOf, OfData, TheOtherWay, ByName])
def test_a_comparison_of_types_with_parameter_is_refused(kind):
    with pytest.raises(TypeError, match=r"in .*: .* compares the type .* under 'fsdp' .* Write `isinstance\("):
        check_types([kind()], "'fsdp'")


def test_other_comparisons_are_not():
    check_types([IsAnInstance()], "'fsdp'")
