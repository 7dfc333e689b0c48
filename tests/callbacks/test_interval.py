import pytest
from lightning.pytorch.callbacks import Callback

from polyphase.callbacks import ConsoleLogger, MemoryMonitor, ThroughputMonitor
from polyphase.callbacks._interval import IntervalCallback

from .runs import MemoryLogger, TinyModule, batches, loader, quiet_trainer


class StepMonitor(IntervalCallback):
    """Measures the step at which it is asked."""

    def __init__(self, *args):
        super().__init__(*args)
        self.steps = []

    def on_train_batch_end(self, trainer, *args):
        self.log_if_due(trainer)

    def measure(self, trainer):
        self.steps.append(trainer.global_step)
        return {"step": float(trainer.global_step)}


class TwoOptimizers(TinyModule):
    """`global_step` moves by two a batch, so that it is never a multiple of an odd interval when that ends."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch["x"]).mean())
            optimizer.step()

    def configure_optimizers(self):
        return [super(TwoOptimizers, self).configure_optimizers() for _ in range(2)]


@pytest.mark.parametrize("monitor", [ConsoleLogger, MemoryMonitor, ThroughputMonitor])
@pytest.mark.parametrize("wrong", [0, -1, 2.5, "10", True])
def test_an_interval_must_be_a_positive_whole_number(monitor, wrong):
    with pytest.raises(ValueError, match=rf"whole number of at least 1.*but got {wrong!r}"):
        monitor(every_n_steps=wrong)


def test_the_error_says_that_none_is_allowed_where_it_is():
    with pytest.raises(ValueError, match=r"None: the trainer's"):
        MemoryMonitor(0)


def test_without_an_interval_the_trainers_is_used_and_loggers_get_each_figure_once():
    logger, monitor = MemoryLogger(), StepMonitor()
    quiet_trainer(monitor, logger=logger, log_every_n_steps=3).fit(TinyModule(), loader(batches(*[2] * 7)))
    assert monitor.steps == [3, 6]
    assert logger.of("step") == [(2, {"step": 3.0}), (5, {"step": 6.0})]


def test_steps_are_optimizer_steps():
    monitor = StepMonitor(2)
    quiet_trainer(monitor, accumulate_grad_batches=3).fit(TinyModule(), loader(batches(*[2] * 13)))
    assert monitor.steps == [2, 4]  # 13 micro-batches: 5 steps, the last of one micro-batch


def test_an_interval_that_the_step_jumps_over_is_logged():
    monitor = StepMonitor(3)
    quiet_trainer(monitor).fit(TwoOptimizers(), loader(batches(*[2] * 5)))
    assert monitor.steps == [4, 6, 10]


def test_nothing_is_measured_where_the_trainer_logs_nothing():
    monitor = StepMonitor()
    quiet_trainer(monitor, log_every_n_steps=0).fit(TinyModule(), loader(batches(2, 2)))
    assert monitor.steps == []


def test_a_second_fit_goes_on_at_its_step_with_no_figures_of_the_first():
    class Look(Callback):
        def on_train_batch_start(self, trainer, *args):
            seen.setdefault(trainer.global_step, dict(monitor.last))

    seen: dict[int, dict[str, float]] = {}
    monitor = StepMonitor(2)
    trainer = quiet_trainer(monitor, Look())
    module = TinyModule()
    trainer.fit(module, loader(batches(2, 2, 2)))
    assert monitor.last == {"step": 2.0}
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(batches(2, 2, 2)))
    assert monitor.steps == [2, 4, 6]
    assert seen[3] == {}
