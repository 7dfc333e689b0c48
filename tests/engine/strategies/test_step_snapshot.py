"""A step that is undone leaves no trace."""

import collections
import copy
import random

import numpy as np
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
from torch import nn
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision

from polyphase.engine.strategies.step_guard import StepSnapshot


class Keeps(nn.Module):
    """Something of everything that a step may change."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.mean, self.cat = MeanMetric(), CatMetric()
        self.metrics = MetricCollection([MulticlassAccuracy(3), MulticlassPrecision(3)])
        self.seen, self.by_name, self.ids = [1], collections.defaultdict(list, a=[1]), {1, 2}
        self.recent = collections.deque([1], maxlen=2)
        self.unregistered = [MeanMetric()]
        self.total, self.count = torch.zeros(()), 0

    def step(self):
        self.norm(torch.randn(4, 2))
        self.norm.running_var = self.norm.running_var * 2  # another tensor in its place
        self.mean.update(3.0)
        self.cat.update(torch.ones(2))
        self.unregistered[0].update(1.0)
        self.metrics.update(torch.tensor([0, 1]), torch.tensor([0, 2]))
        self.seen.append(2)
        self.by_name["a"].append(2)
        self.by_name["b"].append(2)
        self.ids.clear()
        self.recent.extend([2, 3])
        self.total += 1
        self.count += 1
        self.later = [1]
        self.eval()
        random.random(), np.random.rand()


def state(module):
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    metrics = {
        name: (metric.metric_state, metric._update_count, metric._computed)
        for name, metric in [*module.named_modules(), ("", module.unregistered[0])]
        if isinstance(metric, Metric)
    }
    plain = (module.seen, module.by_name, module.ids, module.recent, module.total, module.count, module.training)
    generators = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    return copy.deepcopy((buffers, metrics, plain, generators, hasattr(module, "later")))


def same(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_module_is_as_it_was():
    module = Keeps()
    module.step()  # so that there is something to put back
    module.train()
    del module.later
    before, seen, buffer = state(module), module.seen, module.norm.running_mean
    undo = StepSnapshot(module)
    module.step()
    assert not same(before, state(module))
    undo.undo()
    assert same(before, state(module))
    assert module.seen is seen, "the same objects"
    assert module.norm.running_mean is buffer
    expected = copy.deepcopy(module)
    module.step(), expected.step()
    for one, other in zip(module.metrics.compute().items(), expected.metrics.compute().items(), strict=True):
        assert one == other


def test_a_module_is_as_it_was_in_inference_mode():
    module = Keeps()
    before = state(module)
    with torch.inference_mode():
        undo = StepSnapshot(module)
        module.step()
        undo.undo()
    assert same(before, state(module))


def log(results, name, value):
    results.log("validation_step", name, torch.tensor(value), on_step=True, batch_size=2)


def test_results_are_as_they_were():
    results = _ResultCollection(training=False)
    log(results, "loss", 3.0)
    before = repr(results)
    undo = StepSnapshot(results)
    log(results, "loss", 4.0)
    log(results, "other", 4.0)
    results.dataloader_idx = 1
    assert repr(results) != before
    undo.undo()
    assert repr(results) == before
    assert results.dataloader_idx is None
    assert results["validation_step.loss"].compute() == 3
    assert results["validation_step.loss"]._forward_cache == 3


def test_the_random_state_can_be_left_out():
    undo = StepSnapshot(nn.Linear(1, 1), random=False)
    drawn = torch.rand(3)
    undo.undo()
    assert not torch.equal(drawn, torch.rand(3))
