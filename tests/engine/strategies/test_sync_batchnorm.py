"""The layers of `sync_batchnorm=True` stay instances of their classes; what can't be synchronised is refused."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

from polyphase.engine.strategies.sync_batchnorm import SyncBatchNorm


class Activated(nn.BatchNorm2d):
    """Calls its base class, and does more."""

    def forward(self, input):
        return super().forward(input).relu()


class Itself(nn.BatchNorm1d):
    def forward(self, input):
        return functional.batch_norm(input, self.running_mean, self.running_var, training=self.training)


@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, Activated])
def test_a_layer_stays_an_instance_of_its_class(cls):
    model = nn.Sequential(nn.Linear(2, 2), cls(2))
    layer, hooks = model[1], model[1].register_forward_hook(lambda *_: None)
    SyncBatchNorm().apply(model)
    assert model[1] is layer
    assert isinstance(layer, cls)
    assert type(layer).__name__ == cls.__name__
    assert hooks.id in layer._forward_hooks
    hooks.remove()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(copy.deepcopy(layer)))):  # noqa: S301
        assert type(other) is type(layer)
        assert torch.equal(other.weight, layer.weight)
    SyncBatchNorm().revert(model)
    assert type(layer) is cls


def test_a_forward_of_its_own_still_runs():
    layer = Activated(2)
    SyncBatchNorm().apply(layer)
    assert layer(torch.randn(4, 2, 3, 3)).min() == 0, "without a group it is torch's own, and then the activation"


def test_a_forward_that_computes_batch_norm_itself_is_refused():
    with pytest.raises(ValueError, match=r"can't synchronise '1': Itself.forward computes batch norm itself"):
        SyncBatchNorm().apply(nn.Sequential(nn.Linear(2, 2), Itself(2)))
