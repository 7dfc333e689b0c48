"""What micro-batches count for."""

import pytest
import torch
from torch import nn

from polyphase.engine.strategies.pipeline.run import Losses

HALF = torch.tensor(0.5)


def losses(number: int) -> Losses:
    return Losses(lambda weight: HALF if weight is None else torch.as_tensor(float(weight)), number, lambda loss: loss)


def test_without_weights_a_batch_is_the_mean_of_its_micro_batches():
    found = losses(2)
    assert [float(found.add(torch.tensor(value))) for value in (1.0, 3.0)] == [0.25, 0.75]
    assert found.mean() == (torch.tensor(2.0), None)


def test_each_counts_as_it_says():
    found = losses(3)
    outputs = [{"loss": torch.tensor(loss), "weight": weight} for loss, weight in [(1.0, 3), (3.0, torch.tensor(1))]]
    assert [float(found.add(output)) for output in outputs] == [3.0, 3.0]
    assert found.mean() == (torch.tensor(1.5), torch.tensor(4.0))


def test_nothing_counts_for_nothing():
    value = nn.Parameter(torch.tensor(float("nan")))
    found = losses(1)
    found.add({"loss": value, "weight": 0}).backward()
    assert value.grad == 0
    assert found.mean() == (torch.tensor(0.0), torch.tensor(0.0))


@pytest.mark.parametrize("first_weighs", [True, False])
def test_all_weigh_or_none(first_weighs):
    outputs = [{"loss": HALF, "weight": 1}, {"loss": HALF}]
    found = losses(2)
    found.add(outputs[not first_weighs])
    with pytest.raises(ValueError, match="a weight for some micro-batches of a batch and none for others"):
        found.add(outputs[first_weighs])


@pytest.mark.parametrize("output", [None, {"weight": 1}, 0.5])
def test_there_has_to_be_a_loss(output):
    with pytest.raises(ValueError, match="must return a loss in a pipeline"):
        losses(1).add(output)
