"""A wrong `self.log` is the same error under both trainers, at the first batch and later."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torchmetrics import MeanMetric, Metric

from tests.pairs import alternating, nightly

from .stock_comparison import TRAINERS, Small, error_of, exactly, outcome, rows, trainer_of


class Words(Metric):
    """Computes something that is no number."""

    def update(self, *_: Any) -> None: ...

    def compute(self) -> str:
        return "words"


class OfOnesOwn:
    """A reduction."""

    def __call__(self, values: Any) -> Any:
        return values

    def __repr__(self) -> str:
        return "mine"


class Unhashable(OfOnesOwn):
    __hash__ = None  # type: ignore[assignment]


WRONG: dict[str, Any] = {
    # What the module does in one of its hooks.
    "a nested dict": lambda self: self.log("a", {"b": {"c": 1.0}}),
    "a dict": lambda self: self.log("a", {"b": 1.0}),
    "a string": lambda self: self.log("a", "value"),
    "None": lambda self: self.log("a", None),
    "a list": lambda self: self.log("a", [1.0]),
    "a tensor of two": lambda self: self.log("a", torch.zeros(2)),
    "an empty tensor": lambda self: self.log("a", torch.zeros(0)),
    "neither step nor epoch": lambda self: self.log("a", 1.0, on_step=False, on_epoch=False),
    "an unknown reduction": lambda self: self.log("a", 1.0, reduce_fx="median"),
    "a reduction of one's own": lambda self: self.log("a", 1.0, reduce_fx=OfOnesOwn()),
    "a reduction without a hash": lambda self: self.log("a", 1.0, reduce_fx=Unhashable()),
    "an index in the name": lambda self: self.log("a/dataloader_idx_0", 1.0),
    "a name that is no string": lambda self: self.log(3, 1.0),
    "other arguments": lambda self: (self.log("a", 1.0), self.log("a", 1.0, prog_bar=True)),
    "another reduction": lambda self: (self.log("a", 1.0), self.log("a", 1.0, reduce_fx="max")),
    "the same twice": lambda self: (self.log("a", 1.0), self.log("a", 3.0)),
    "a number, then a metric": lambda self: (self.log("a", 1.0), self.log("a", self.mean)),
    "a metric, then a number": lambda self: (self.log("a", self.mean), self.log("a", 1.0)),
    "a metric, then another one": lambda self: (self.log("a", self.mean), self.log("a", self.other)),
    "a metric that is no attribute": lambda self: self.log("a", MeanMetric()),
    "a metric by its attribute": lambda self: self.log("a", self.mean, metric_attribute="mean"),
    "a metric of words": lambda self: self.log("a", self.words, on_epoch=True),
    "a metric of words in each step": lambda self: (self.words(1.0), self.log("a", self.words, on_step=True)),
    "an unknown argument": lambda self: self.log("a", 1.0, on_batch=True),
    "no value": lambda self: self.log("a"),
    "log_dict of a nested dict": lambda self: self.log_dict({"a": {"b": 1.0}}),
    "log_dict of a string": lambda self: self.log_dict({"a": 1.0, "b": "c"}),
    "a complex number": lambda self: self.log("a", torch.tensor(1j)),
    "a boolean tensor": lambda self: self.log("a", torch.tensor(True)),
    "a large integer": lambda self: self.log("a", 2**70),
    "a batch size of zero": lambda self: self.log("a", 1.0, batch_size=0, on_epoch=True),
}
ACCEPTED = {
    "the same twice",
    "a metric by its attribute",
    "a complex number",
    "a boolean tensor",
    "a large integer",
    "a batch size of zero",
}

PLACES = (
    # A hook, and the call of it from which on the wrong one is made.
    ("training_step", 2),
    ("validation_step", 2),
    ("on_before_optimizer_step", 2),
)
MORE_PLACES = (("training_step", 0), ("on_train_batch_end", 2), ("on_train_epoch_end", 1))
FORBIDDEN = (
    "on_fit_start",
    "on_train_end",
    "on_validation_end",
    "on_validation_model_eval",
    "on_before_batch_transfer",
    "on_after_batch_transfer",
    "lr_scheduler_step",
    "configure_optimizers",
    "teardown",
)


def logging_in(hook: str, does: Any, at: int) -> pl.LightningModule:
    """A module that does it in the call number `at` of a hook, after a usual value in all of them."""

    class Wrong(Small):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.other, self.words = MeanMetric(), MeanMetric(), Words()
            self.mean.update(1.0)
            self.other.update(2.0)
            self.calls = 0

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    base = getattr(Wrong, hook)

    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls > at:
            does(self)
        return base(self, *arguments, **named)

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        return method(self, batch, batch_idx)

    setattr(Wrong, hook, step if hook.endswith("ing_step") or hook == "validation_step" else method)
    return Wrong()


def both(tmp_path: Any, make: Any, **flags: Any) -> list[Any]:
    found = []
    for trainer_class in TRAINERS:
        module, folder = make(), tmp_path / trainer_class.__name__
        trainer = trainer_of(trainer_class, folder, **flags)
        raised = error_of(trainer.fit, module, rows(), rows(3))
        left = outcome(trainer, module, folder) if raised is None else {"weights": exactly(module.state_dict())}
        found.append({"raised": raised, **left})
    return found


# What Lightning only warns of, it warns of once in a process: both do, or this test would depend on their order.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("hook", "at", "what"),
    [
        *alternating(PLACES, WRONG),
        *((*place, "a metric, then a number") for place in MORE_PLACES),
        *nightly(*((*place, what) for place in MORE_PLACES for what in WRONG if what != "a metric, then a number")),
    ],
)
def test_a_wrong_call(tmp_path, what, hook, at):
    stock, engine = both(tmp_path, lambda: logging_in(hook, WRONG[what], at), max_epochs=2)
    assert engine == stock
    # A metric is computed where it is read, which no epoch may get to.
    assert (stock["raised"] is None) == (what in ACCEPTED) or "words" in what


@pytest.mark.parametrize("hook", FORBIDDEN)
def test_a_call_in_a_hook_where_nothing_may_be_logged(tmp_path, hook):
    stock, engine = both(tmp_path, lambda: logging_in(hook, lambda self: self.log("a", 1.0), 0))
    assert engine == stock
    assert stock["raised"] is not None


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")  # as it says
def test_a_call_without_a_trainer_and_after_the_run(tmp_path):
    found = []
    for trainer_class in TRAINERS:
        module, trainer = Small(), trainer_of(trainer_class, tmp_path / trainer_class.__name__)
        module.log("before", 1.0)
        trainer.fit(module, rows())
        found.append((error_of(module.log, "after", 1.0), exactly(trainer.callback_metrics), "log" in vars(module)))
    assert found[0] == found[1]
    assert found[0][0] is not None
