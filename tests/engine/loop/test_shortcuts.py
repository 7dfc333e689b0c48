"""What anybody puts in the place of one of Lightning's functions is called, also from the middle of an epoch on."""

import functools

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine.strategies.compressing import CommHookMixin

from ..tiny import engine

NUM_BATCHES = 6
PATCHED_AT = 2

OWNERS = {
    "module": lambda trainer: trainer.lightning_module,
    "strategy": lambda trainer: trainer.strategy,
    "precision": lambda trainer: trainer.precision_plugin,
    "optimizer": lambda trainer: trainer.lightning_module.optimizers(),
    "torch's optimizer": lambda trainer: trainer.optimizers[0],
}
CHAINS = [
    *(("module", name) for name in ("training_step", "backward", "optimizer_step", "optimizer_zero_grad")),
    *(("strategy", name) for name in ("training_step", "post_training_step", "optimizer_step")),
    *(("strategy", name) for name in ("backward", "pre_backward", "post_backward")),
    *(("precision", name) for name in ("train_step_context", "forward_context", "pre_backward", "backward")),
    *(("precision", name) for name in ("post_backward", "optimizer_step")),
    ("optimizer", "step"),
    ("torch's optimizer", "step"),
    ("torch's optimizer", "zero_grad"),
]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data():
    return DataLoader(TensorDataset(torch.randn(2 * NUM_BATCHES, 4)), batch_size=2)


def counting(function, seen):
    @functools.wraps(function)  # which makes it look like what it wraps
    def counted(*args, **kwargs):
        seen.append(function)
        return function(*args, **kwargs)

    return counted


class Patch(Callback):
    """Wraps a method of an object in mid-epoch."""

    def __init__(self, owner, name):
        self.owner, self.name, self.seen = owner, name, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == PATCHED_AT:
            owner = OWNERS[self.owner](trainer)
            setattr(owner, self.name, counting(getattr(owner, self.name), self.seen))


@pytest.mark.parametrize(("owner", "name"), CHAINS)
def test_a_method_that_an_object_gets_in_mid_epoch_is_called_from_the_next_batch_on(owner, name):
    patch = Patch(owner, name)
    engine(callbacks=[patch]).fit(Net(), data())
    assert len(patch.seen) >= NUM_BATCHES - PATCHED_AT - 1


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (LightningModule, "backward"),
        (LightningModule, "optimizer_step"),
        (LightningModule, "optimizer_zero_grad"),
        (Strategy, "training_step"),
        (Strategy, "backward"),
        (Strategy, "pre_backward"),
        (Strategy, "post_backward"),
        (Strategy, "optimizer_step"),
        (Precision, "backward"),
        (Precision, "optimizer_step"),
    ],
)
def test_a_patched_class_of_lightnings_is_called(owner, name, monkeypatch):
    seen = []
    monkeypatch.setattr(owner, name, counting(getattr(owner, name), seen))
    engine().fit(Net(), data())
    assert len(seen) == NUM_BATCHES


@pytest.fixture
def group_of_one():
    """For a run of `ddp` in this process, which leaves its group there, where later tests would find it."""
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("owner", [CommHookMixin, DDPStrategy, Strategy])
def test_a_patched_step_of_a_strategy_of_several_ranks_is_called(owner, monkeypatch):
    seen = []
    monkeypatch.setattr(owner, "optimizer_step", counting(owner.optimizer_step, seen))
    engine(strategy="ddp").fit(Net(), data())
    assert len(seen) == NUM_BATCHES


@pytest.mark.usefixtures("group_of_one")
def test_a_step_that_a_strategy_of_several_ranks_gets_in_mid_epoch_is_called():
    patch = Patch("strategy", "optimizer_step")
    engine(strategy="ddp", callbacks=[patch]).fit(Net(), data())
    assert len(patch.seen) >= NUM_BATCHES - PATCHED_AT - 1


class Counting(torch.optim.SGD):
    """Has a `step` and a `zero_grad` of its own."""

    num_steps = num_zeroed = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)

    def zero_grad(self, set_to_none=True):
        self.num_zeroed += 1
        super().zero_grad(set_to_none)


class Replace(Callback):
    """Puts another optimizer in place of the first one, in mid-epoch."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == PATCHED_AT:
            trainer.strategy.optimizers = [Counting(pl_module.parameters(), lr=0.1)]


def test_an_optimizer_that_a_callback_puts_in_place_of_the_first_is_called():
    trainer = engine(callbacks=[Replace()])
    trainer.fit(Net(), data())
    optimizer = trainer.optimizers[0]
    assert (optimizer.num_steps, optimizer.num_zeroed) == (NUM_BATCHES - PATCHED_AT, NUM_BATCHES - PATCHED_AT)


class Own(SingleDeviceStrategy):
    """Overrides the chain of a step in all places."""

    def __init__(self):
        super().__init__(device="cpu")
        self.seen = []

    def training_step(self, *args, **kwargs):
        self.seen.append("training_step")
        return super().training_step(*args, **kwargs)

    def backward(self, *args, **kwargs):
        self.seen.append("backward")
        return super().backward(*args, **kwargs)

    def pre_backward(self, closure_loss):
        self.seen.append("pre_backward")

    def post_backward(self, closure_loss):
        self.seen.append("post_backward")

    def optimizer_step(self, *args, **kwargs):
        self.seen.append("optimizer_step")
        return super().optimizer_step(*args, **kwargs)


def test_a_strategy_with_methods_of_its_own_is_called_in_lightnings_order():
    strategy = Own()
    engine(strategy=strategy).fit(Net(), data())
    assert (
        strategy.seen == ["optimizer_step", "training_step", "backward", "pre_backward", "post_backward"] * NUM_BATCHES
    )


class Rounds(Precision):
    """A plugin of a user's, whose context is around the forward alone."""

    def __init__(self):
        self.inside = 0

    def forward_context(self):
        plugin = self

        class Context:
            def __enter__(self):
                plugin.inside += 1

            def __exit__(self, *_):
                pass

        return Context()


def test_the_context_of_a_users_precision_is_entered():
    plugin = Rounds()
    engine(plugins=plugin).fit(Net(), data())
    assert plugin.inside == NUM_BATCHES
