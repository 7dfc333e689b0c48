"""What is another thing in micro-batches is found out, and what is not is left in peace."""

import pytest
import torch
from torch import nn

from polyphase.engine.strategies.pipeline.attribute_writes import WriteRecorder
from polyphase.engine.strategies.pipeline.micro_batches import (
    batch_norm_warning,
    buffers_warning,
    loss_warning,
    split_batch,
)

from .relay import Relay

BATCH = {"x": torch.linspace(-1, 1, 32).view(8, 4), "y": torch.tensor([0, 1, 2, 1, 2, 0, 0, 0])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        for block in self.blocks:
            x = x + block(x)  # of one size with what earlier stages have
        return x


def mean(net, batch):
    return nn.functional.cross_entropy(net(batch["x"]), batch["y"])


def masked(net, batch):
    return nn.functional.cross_entropy(net(batch["x"]), batch["y"], ignore_index=0)


def weighted(net, batch):
    return {"loss": masked(net, batch), "weight": (batch["y"] != 0).sum()}


def contrasted(net, batch):
    found = net(batch["x"])
    return nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))


def summed(net, batch):
    return net(batch["x"]).square().sum()


def noisy(net, batch):
    return (net(batch["x"]) + torch.randn_like(batch["x"])).square().mean()


def one_size(net, batch):
    assert len(batch["x"]) == 2
    return mean(net, batch)


def tried_out(step):
    relay = Relay(Net(), 2, lambda net: step(net, split_batch(BATCH, 4)[0]))
    part = relay.parts[-1]
    net = part.partitioned.module
    part.partitioned.job.begin = lambda index, stage: torch.manual_seed(index)
    before = (net.num_calls, part.partitioned.job, part.partitioned.failure, dict(part.partitioned.written))
    text = loss_warning(part, lambda batch: step(net, batch), BATCH, 4)
    assert (net.num_calls, part.partitioned.job, part.partitioned.failure, part.partitioned.written) == before
    assert all(module.training for module in net.modules())
    return text


@pytest.mark.parametrize("step", [mean, weighted, noisy, one_size])
def test_nothing_is_said_of_a_mean_nor_of_what_can_not_be_known(step):
    assert tried_out(step) is None


@pytest.mark.parametrize("step", [masked, contrasted, summed])
def test_a_loss_that_is_no_mean_of_its_micro_batches_is_said(step):
    assert "the loss of 4 samples (" in tried_out(step)


def test_batch_norm_that_is_trained_is_said():
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert "the BatchNorm '1' normalises each micro-batch of 2 samples" in batch_norm_warning(net, 4, 8)
    assert batch_norm_warning(net, 1, 8) is None
    assert batch_norm_warning(net.eval(), 4, 8) is None


def test_buffers_that_a_step_writes_are_written_for_each_micro_batch():
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    module.register_buffer("scale", torch.ones(1))
    notes = WriteRecorder(module)
    module(torch.ones(2, 4) * module.scale)
    written = set(notes.end().around[0])
    text = buffers_warning(module, written, 4)
    assert "'0.parametrizations.weight.0._u' and 1 more (as a spectral norm does), in a pipeline 4 times" in text
    assert buffers_warning(module, written, 1) is None
    assert buffers_warning(module, set(), 4) is None
