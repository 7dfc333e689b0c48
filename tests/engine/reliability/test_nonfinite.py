"""A loss or gradient norm that is not finite: named by its step, once, and handled by the policy."""

import logging
import re

import pytest
import torch
from torch.utils.data import DataLoader

from polyphase.engine.reliability.nonfinite import NonFiniteError

from ..tiny import Positions, Seen, engine

NUM_BATCHES = 6


class Breaks(Seen):
    """Its loss is `value` in some batches of each epoch; its gradient stays 1, so no other batch is spoilt."""

    def __init__(self, at, value=float("nan")):
        super().__init__()
        self.at, self.value = at, value
        self.num_steps = 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        loss = super().training_step(batch, batch_idx)
        return loss + self.value if batch_idx in self.at else loss


def run(module, **flags):
    trainer = engine(log_every_n_steps=50, **flags)
    trainer.fit(module, DataLoader(Positions(NUM_BATCHES)))
    return trainer


def warnings(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "polyphase.engine" and r.levelno == logging.WARNING]


@pytest.fixture(autouse=True)
def _listen(caplog):
    caplog.set_level(logging.WARNING, logger="polyphase.engine")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("step", range(NUM_BATCHES))
def test_the_step_of_a_bad_loss_is_named(caplog, step, value):
    module = Breaks([step], value)
    run(module)
    assert module.num_steps == NUM_BATCHES, "training continues"
    (message,) = warnings(caplog)
    assert f"the loss was not finite at step {step} (epoch 0) on rank 0" in message
    assert "set nonfinite='error' to stop there" in message


@pytest.mark.parametrize("interval", [1, 2, 50])
def test_it_is_said_once_for_each_epoch_whatever_the_logging_interval(caplog, interval):
    trainer = engine(log_every_n_steps=interval, max_epochs=2)
    trainer.fit(Breaks(range(1, NUM_BATCHES)), DataLoader(Positions(NUM_BATCHES)))
    found = [re.search(r"at step (\d+) \(epoch (\d+)\)", message).groups() for message in warnings(caplog)]
    assert found == [("1", "0"), (str(NUM_BATCHES + 1), "1")]


@pytest.mark.parametrize("accumulate", [2, 3])
def test_steps_are_counted_in_optimizer_steps(caplog, accumulate):
    run(Breaks([3]), accumulate_grad_batches=accumulate)
    (message,) = warnings(caplog)
    assert f"at step {3 // accumulate} (epoch 0)" in message


class BadGradient(Seen):
    """The gradient of one batch is infinite while its loss is not; the weight is then infinite as well."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return loss


def test_a_bad_gradient_norm_is_named_by_the_step_that_had_it():
    with pytest.raises(NonFiniteError, match=r"the gradient norm was not finite at step 3 \(epoch 0\) on rank 0"):
        run(BadGradient(), nonfinite="error", gradient_clip_val=1.0)


def test_error_stops_with_the_step_named():
    with pytest.raises(NonFiniteError, match=r"the loss was not finite at step 2 \(epoch 0\) on rank 0.*learning rate"):
        run(Breaks([2]), nonfinite="error")


def test_error_stops_within_a_logging_interval():
    module = Breaks([1])
    trainer = engine(nonfinite="error", log_every_n_steps=2)
    with pytest.raises(NonFiniteError, match="at step 1"):
        trainer.fit(module, DataLoader(Positions(NUM_BATCHES)))
    assert module.num_steps <= 4


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_a_run_that_stays_finite_hears_nothing(caplog, policy):
    module = Breaks([])
    run(module, nonfinite=policy, gradient_clip_val=1.0, max_epochs=2)
    assert module.num_steps == 2 * NUM_BATCHES
    assert not warnings(caplog)


def test_ignore_says_nothing(caplog):
    module = Breaks(range(NUM_BATCHES))
    run(module, nonfinite="ignore", gradient_clip_val=1.0)
    assert module.num_steps == NUM_BATCHES
    assert not warnings(caplog)


def test_a_loss_scale_that_overflows_is_no_bad_gradient():
    class Overflows(Seen):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * 1e36  # finite, until it is scaled

    trainer = run(Overflows(), precision="16-mixed", nonfinite="error", gradient_clip_val=1.0)
    assert trainer.precision_plugin.scaler.get_scale() < torch.amp.GradScaler("cpu").get_scale()


def test_a_second_run_of_one_engine_forgets_the_first(caplog):
    class Interrupted(Breaks):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 2:
                raise ArithmeticError("stop here")

    trainer = engine(log_every_n_steps=50)
    with pytest.raises(ArithmeticError, match="stop here"):
        trainer.fit(Interrupted([0]), DataLoader(Positions(NUM_BATCHES)))
    assert not warnings(caplog), "it was stopped before it was read"
    module = Breaks([])
    trainer.fit(module, DataLoader(Positions(NUM_BATCHES)))
    assert module.num_steps > 0
    assert not warnings(caplog)
