"""Accumulation is honest: each window is divided by the number of micro-batches that it has."""

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import DataLoader, Dataset

from tests.pairs import paired

from ..tiny import Positions, Regression, Seen, StepsByHand, Stream, engine, rows

ONE = [1.0]


class Gradients(Seen):
    """Notes the gradient of its weight before each step; the gradient of each loss is 1."""

    def __init__(self):
        super().__init__()
        self.gradients = []

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.weight.grad.item())


def gradients(data, **flags):
    module = Gradients()
    engine(**flags).fit(module, DataLoader(data))
    return module.gradients


@pytest.mark.parametrize(("data", "accumulate", "size"), paired([Positions, Stream], [1, 2, 3, 4, 7], [1, 4, 5, 7, 8]))
def test_the_mean_of_gradients_of_one_is_one_in_every_window(data, size, accumulate):
    found = gradients(data(size), accumulate_grad_batches=accumulate, max_epochs=2)
    assert found == ONE * (2 * -(-size // accumulate))


@pytest.mark.parametrize(
    ("data", "flags", "windows"),
    [
        (Positions(20), {"limit_train_batches": 5}, 2),
        (Stream(20), {"limit_train_batches": 5}, 2),
        (Positions(20), {"limit_train_batches": 0.25}, 2),
        (Positions(20), {"overfit_batches": 5}, 2),
        (Positions(20), {"max_steps": 3}, 3),
        (Positions(5), {"max_steps": 3, "max_epochs": -1}, 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Dataset) else str(value),
)
def test_so_it_is_where_a_flag_cuts_the_epoch(data, flags, windows):
    assert gradients(data, accumulate_grad_batches=4, **flags) == ONE * windows


@pytest.mark.parametrize(("size", "limit"), [(5, 7), (6, 50), (9, 10)])
def test_so_it_is_where_a_stream_ends_before_its_limit(size, limit):
    # Lightning believes the limit and so never sees the end: it takes no step for the window that is cut there.
    found = gradients(Stream(size), accumulate_grad_batches=4, limit_train_batches=limit, max_epochs=2)
    assert found == ONE * (2 * (size // 4))


@pytest.mark.parametrize("data", [Positions, Stream])
def test_so_it_is_where_a_callback_changes_the_windows(data):
    scheduler = GradientAccumulationScheduler({0: 1, 1: 4, 2: 3})
    assert gradients(data(5), max_epochs=3, callbacks=scheduler) == ONE * (5 + 2 + 2)


@pytest.mark.parametrize("data", [Positions, Stream])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "64-true"])
def test_so_it_is_under_each_precision(data, precision):
    module = Gradients()
    run = engine(accumulate_grad_batches=4, precision=precision, gradient_clip_val=1e6)
    run.fit(module, DataLoader(data(5)))
    assert float(run.grad_norm) == pytest.approx(1.0)
    assert module.weight.item() == pytest.approx(-0.2)  # two steps of 0.1


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("unsized", [False, True])
def test_an_epoch_equals_a_plain_loop(accumulate, unsized):
    batches = list(rows(20, batch_size=4))
    expected, found = Regression(), Regression()
    optimizer = expected.configure_optimizers()
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        optimizer.zero_grad()
        for batch in window:
            (expected.training_step(batch, 0) / len(window)).backward()
        optimizer.step()
    loader = (batch for batch in batches) if unsized else rows(20, batch_size=4)
    engine(accumulate_grad_batches=accumulate).fit(found, loader)
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_micro_batch_without_a_loss_is_skipped():
    class Skips(Seen):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 1 else loss

    module = Skips()
    engine().fit(module, DataLoader(Positions(4)))
    assert module.weight.item() == pytest.approx(-0.3)  # three steps of 0.1


def test_manual_optimization_is_left_alone():
    class ByHand(StepsByHand, Gradients):
        pass

    module = ByHand()
    engine().fit(module, DataLoader(Positions(3)))
    assert module.gradients == ONE * 3


@pytest.mark.parametrize("data", [Positions(5), Stream(5)])
def test_the_epochs_batches_are_all_seen(data):
    module = Gradients()
    engine(accumulate_grad_batches=4).fit(module, DataLoader(data))
    assert module.epochs == [[[0], [1], [2], [3], [4]]]
