"""What is refused before any process starts, and what is not."""

import functools

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from polyphase.engine.errors import RefusedError
from polyphase.engine.select import check_module
from tests.engine.tiny import Regression, engine, rows

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")


class Automatic(LightningModule):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(Automatic):
    """Steps by itself, past the loss scale."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        batch.sum().backward()


class ByHandScaled(ByHand):
    def training_step(self, batch, batch_idx):
        self.manual_backward(batch.sum())


class ByHandInHelper(ByHand):
    def training_step(self, batch, batch_idx):
        self.step(batch)

    def step(self, batch):
        self.manual_backward(batch.sum())


class ByHandInClosure(ByHand):
    def training_step(self, batch, batch_idx):
        def closure():
            return [self.manual_backward(part) for part in batch]

        closure()


class Inherits(ByHandScaled):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


def _decorated(method):
    @functools.wraps(method)
    def timed(*args):
        return method(*args)

    return timed


class ByHandDecorated(ByHand):
    @_decorated
    def training_step(self, batch, batch_idx):
        self.manual_backward(batch.sum())


class Mixin:
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FromMixin(Mixin, LightningModule): ...


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_module_without_an_optimizer_is_refused(precision):
    class NoOptimizer(LightningModule): ...

    with pytest.raises(MisconfigurationException, match=r"No `configure_optimizers\(\)` method defined in NoOptimizer"):
        check_module(NoOptimizer(), precision=precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("cls", [Automatic, FromMixin, ByHandScaled])
def test_a_module_with_an_optimizer_passes(cls, precision):
    check_module(cls(), precision=precision)


def test_an_optimizer_set_on_the_instance_counts():
    module = LightningModule()
    module.configure_optimizers = lambda: None
    check_module(module, precision="32-true")


def test_a_backward_that_bypasses_the_loss_scale_is_refused():
    with pytest.raises(MisconfigurationException, match=r"ByHand optimizes by hand.*self\.manual_backward\(loss\)"):
        check_module(ByHand(), precision="16-mixed")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-true", "64-true"])
def test_without_a_loss_scale_any_backward_will_do(precision):
    check_module(ByHand(), precision=precision)


@pytest.mark.parametrize("cls", [ByHandScaled, ByHandInHelper, ByHandInClosure, Inherits, ByHandDecorated])
def test_manual_backward_is_found_wherever_a_method_calls_it(cls):
    check_module(cls(), precision="16-mixed")


class ReadsScale(ByHandScaled):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        return self.trainer.precision_plugin.scaler.get_scale()


def test_a_step_that_reads_the_loss_scale_is_told_that_gradients_are_unscaled():
    with pytest.warns(UserWarning, match=r"ReadsScale reads the loss scale. Gradients are unscaled when `self.manual_"):
        check_module(ReadsScale(), precision="16-mixed")


class Lazy(Regression):
    """Its only layer has no size; it may be called on a batch as it is set up."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(1)
        self.calls = calls

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.layer(batch).square().mean()


class LaterComplete(Lazy):
    def setup(self, stage: str) -> None:
        if self.calls:
            self.layer(torch.zeros(1, 4))


PARALLEL = ["ddp", "zero1", "local_sgd", "fsdp", "tp", "pp", "ps"]


@pytest.mark.parametrize("strategy", PARALLEL)
def test_lazy_layers_are_named_before_processes_start(strategy):
    made = LaterComplete if strategy in ("tp", "pp") else Lazy  # whose plans are made before setup
    with pytest.raises(RefusedError, match=r"layer\.weight of (Lazy|LaterComplete), a parameter of"):
        engine(strategy=strategy, devices=2).fit(made(calls=False), rows(8))


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork", "ps_fork"])
def test_layers_that_setup_leaves_lazy_are_named_by_the_ranks(strategy):
    with pytest.raises(ProcessRaisedException, match=r"layer\.weight of LaterComplete, a parameter of LazyLinear"):
        engine(strategy=strategy, devices=2).fit(LaterComplete(calls=False), rows(8))
    engine(strategy=strategy, devices=2).fit(LaterComplete(calls=True), rows(8))
