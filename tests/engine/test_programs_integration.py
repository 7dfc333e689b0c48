"""Programs that keep, decide or register something that a strategy would lose, one of each kind."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn

from polyphase.engine import Engine
from tests.engine.parity import largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.zoo.model import Model, build, loader
from tests.zoo.plain import rows
from tests.zoo.run import run
from tests.zoo.unusual import WIDTH, Blocks


class _Counted(torch.autograd.Function):
    num_backwards = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _Counted.num_backwards += 1
        return gradient / _Counted.num_backwards


class CountsOnAClass(Blocks):
    """Its own autograd function counts on its class, which the copy of the check of the first steps shares."""

    def __init__(self):
        super().__init__()
        _Counted.num_backwards = 0

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(_Counted.apply(self(batch[0])), batch[1])


class Transposed(Blocks):
    """Weights that are views of others, and an empty one."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = nn.Parameter(torch.randn(WIDTH, 32).t() / 4)
        self.skip, self.nothing = nn.Parameter(torch.randn(4, 8).t()), nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        return super().forward(x) + x @ self.skip + self.nothing.sum()


class SeveralAtOnce(Blocks):
    """A hook that gets several gradients together."""

    def __init__(self):
        super().__init__()
        torch.autograd.graph.register_multi_grad_hook(list(self.head.parameters()), lambda gradients: None)


@pytest.mark.parametrize(
    ("make", "strategy", "kind", "detail"),
    [
        (CountsOnAClass, "zero1", "equal", ""),
        (Transposed, "fsdp", "equal", ""),
        (SeveralAtOnce, "ddp", "refused", "on 'head.weight' and others is called within backward"),
    ],
)
def test_a_program_is_as_in_one_process_or_refused(make, strategy, kind, detail):
    cell = run(Model(make, rows()), strategy)
    assert (cell.kind, detail in cell.detail) == (kind, True), cell


# --- learning rates that depend on what ranks have logged


class ByItsLoss(Blocks):
    """Logs its loss without `sync_dist`, and lowers its learning rate unless the loss falls."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss"},
        }


class ChangesOnOneRank(Callback):
    """Raises a hyperparameter in some steps where it is not the first rank."""

    def __init__(self, name, steps):
        self.name, self.steps = name, steps

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups if trainer.global_rank else ():
            begins = (trainer.global_step in self.steps) - (trainer.global_step - 1 in self.steps)
            group[self.name] = group[self.name] + 0.01 * begins


def fit(kind, make, callbacks=(), max_epochs=1, **flags):
    model = Model(make, rows())
    module = build(model)
    trainer = kind(accelerator="cpu", max_epochs=max_epochs, callbacks=list(callbacks), **QUIET, **flags)
    trainer.fit(module, loader(model, getattr(trainer, "data_size", 1)))
    return copy.deepcopy(module.state_dict())


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")
@pytest.mark.parametrize("strategy", ["fsdp_fork", "zero1_fork"])
def test_a_scheduler_steps_by_what_all_ranks_have_logged(strategy):
    actual = fit(Engine, ByItsLoss, strategy=strategy, devices=2)
    assert largest_difference(actual, fit(Trainer, ByItsLoss, devices=1)) <= 1e-5


@pytest.mark.parametrize(
    ("strategy", "name", "steps", "message"),
    [
        ("fsdp_fork", "lr", [3], r"different values of the learning rates of the steps of group 0 of \w+, and train"),
        ("fsdp_fork", "lr", range(2, 9), r"different values of 'lr' in group 0 of \w+ and the"),
        ("zero1_fork", "weight_decay", range(2, 9), r"different values of 'weight_decay' in group 0 of \w+, and"),
    ],
)
def test_ranks_with_other_rates_are_said(strategy, name, steps, message):
    with pytest.raises(Exception, match=message):
        fit(Engine, Blocks, [ChangesOnOneRank(name, steps)], max_epochs=2, strategy=strategy, devices=2)


class LeavesOutOnOneRank(Callback):
    """Drops the gradients of a step where it is not the first rank, as one does by a rank's own loss."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 3 and trainer.global_rank:
            pl_module.zero_grad()


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork", "zero1_fork"])
def test_a_step_that_one_rank_leaves_out_is_said(strategy):
    with pytest.raises(Exception, match=r"different values of the number of gradients of group 0 of \w+, and train"):
        fit(Engine, Blocks, [LeavesOutOnOneRank()], max_epochs=2, strategy=strategy, devices=2)


# --- state of an optimizer that is no parameter's


class CountsUnderAWord(torch.optim.SGD):
    """Keeps a number of its steps under a word, beside the state of each parameter."""

    def step(self, closure=None):
        own = self.state["all"]
        own["num_steps"] = own.get("num_steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 0.1 / own["num_steps"]
        return super().step(closure)


class CountedSteps(Blocks):
    def configure_optimizers(self):
        return CountsUnderAWord(self.parameters(), lr=0.1, momentum=0.9)


class SavesBefore(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")
def test_what_an_optimizer_keeps_under_a_word_is_saved(tmp_path):
    path = tmp_path / "two.ckpt"
    fit(Engine, CountedSteps, [SavesBefore(path)], strategy="fsdp_fork", devices=2)
    resumed = fit(Engine, CountedSteps, strategy="zero1_fork", devices=2, resume=str(path))
    assert largest_difference(resumed, fit(Trainer, CountedSteps, devices=1)) <= 1e-5


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*log_every_n_steps")
def test_weights_of_64_bits_come_back_whole():
    actual = fit(Engine, Blocks, strategy="ddp_fork", devices=2, precision="64-true")
    assert largest_difference(actual, fit(Trainer, Blocks, devices=1, precision="64-true")) <= 1e-12
