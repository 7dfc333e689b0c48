"""Without torch's labels, `step` and `zero_grad` do all else that torch, or a user, has put there."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, TensorDataset

from ..tiny import engine

NUM_BATCHES = 6
BEGINS_AT = 2


class Net(LightningModule):
    def __init__(self, make=lambda parameters: torch.optim.SGD(parameters, lr=0.1)):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.make = make

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return self.make(self.parameters())


class AtBatch(Callback):
    """Calls a function at the start of batch `BEGINS_AT`."""

    def __init__(self, function):
        self.function = function

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == BEGINS_AT:
            self.function(trainer)


def fit(module, *callbacks, **flags):
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(2 * NUM_BATCHES, 4)), batch_size=2)
    engine(callbacks=[*callbacks], **flags).fit(module, data)


HOOKS = {
    "before steps of one": lambda optimizer: optimizer.register_step_pre_hook,
    "after steps of one": lambda optimizer: optimizer.register_step_post_hook,
    "before steps of all": lambda optimizer: register_optimizer_step_pre_hook,
    "after steps of all": lambda optimizer: register_optimizer_step_post_hook,
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_a_hook_of_steps_is_called_from_when_it_is_set(register):
    seen, handles = [], []
    fit(Net(), AtBatch(lambda trainer: handles.append(register(trainer.optimizers[0])(lambda *_: seen.append(1)))))
    handles[0].remove()
    assert len(seen) == NUM_BATCHES - BEGINS_AT


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_a_scheduler_is_told_of_the_step():
    module = Scheduled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch: "Detected call of `lr_scheduler.step()` before `optimizer.step()`"
        fit(module)
    assert module.optimizers().param_groups[0]["lr"] == 0.1 * 0.5**NUM_BATCHES


class Counting(torch.optim.SGD):
    """Has a `step` and a `zero_grad` of its own."""

    num_steps = num_zeroed = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.num_zeroed += 1
        super().zero_grad(set_to_none)


def test_methods_of_a_users_optimizer_are_called():
    module = Net(lambda parameters: Counting(parameters, lr=0.1))
    fit(module)
    optimizer = module.optimizers().optimizer
    assert (optimizer.num_steps, optimizer.num_zeroed) == (NUM_BATCHES, NUM_BATCHES)


def test_an_optimizer_that_a_callback_puts_in_place_of_the_first_steps():
    def replace(trainer):
        trainer.strategy.optimizers = [Counting(trainer.lightning_module.parameters(), lr=0.1)]

    module = Net()
    fit(module, AtBatch(replace))
    assert module.trainer.optimizers[0].num_steps == NUM_BATCHES - BEGINS_AT


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_weights_are_those_of_a_loop_by_hand(name, scheduled):
    def make(parameters):
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1)
        if scheduled:
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # it wraps `step`
        return optimizer

    module, by_hand = Net(make), Net(make)
    by_hand.load_state_dict(module.state_dict())
    fit(module)
    torch.manual_seed(0)
    optimizer = by_hand.configure_optimizers()
    for batch in torch.randn(2 * NUM_BATCHES, 4).split(2):
        optimizer.zero_grad()
        by_hand.training_step([batch], 0).backward()
        optimizer.step()
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict(), rtol=0, atol=0)
