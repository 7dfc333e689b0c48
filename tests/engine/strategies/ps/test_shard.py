"""A server's optimizer does to its share what the module's own would do to it."""

import pytest
import torch
from torch import nn

from polyphase.engine.strategies.ps.server import Packing, Shard, partition, settings_of

OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.1)),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1, amsgrad=True),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
}


def made(kind: str) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((3, 4), (4,), (2, 2), (5,))]
    groups = [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]
    return parameters, OPTIMIZERS[kind](groups)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_shards_step_as_the_whole_does(kind):
    whole, own = made(kind)
    parameters, optimizer = made(kind)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (own, optimizer)]
    numbers = [[0, 3], [1, 2]]
    shards = [Shard(optimizer, [parameters[n] for n in each]) for each in numbers]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        gradients = [torch.randn(p.shape, generator=generator) for p in whole]
        for p, gradient in zip(whole, gradients, strict=True):
            p.grad = gradient
        own.step()
        optimizer._opt_called = True
        for shard, each in zip(shards, numbers, strict=True):
            shard.set_gradients([(shard.packing.pack([gradients[n] for n in each]), [True] * len(each))])
            shard.step(settings_of(optimizer))
        for scheduler in schedulers:
            scheduler.step()
    for shard, each in zip(shards, numbers, strict=True):
        for n, parameter, state in zip(each, shard.parameters, shard.state(), strict=True):
            torch.testing.assert_close(parameter.detach(), whole[n].detach(), rtol=0, atol=1e-6)
            assert state.keys() == own.state[whole[n]].keys()


def test_state_is_taken_over_and_given_back():
    parameters, optimizer = made("AdamW")
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = Shard(optimizer, parameters[1:3]).state()
    for each, p in zip(state, parameters[1:3], strict=True):
        assert each.keys() == optimizer.state[p].keys()
        assert all(torch.equal(each[key], optimizer.state[p][key]) for key in each)
        assert each["exp_avg"].data_ptr() != optimizer.state[p]["exp_avg"].data_ptr()


def test_gradients_are_the_mean_and_one_that_nobody_has_stays_none():
    parameters, optimizer = made("SGD")
    shard = Shard(optimizer, parameters[1:4])
    ones, twos = ([torch.full(p.shape, value) for p in parameters[1:4]] for value in (1.0, 2.0))
    first = (shard.packing.pack([ones[0], None, None]), [True, False, False])
    second = (shard.packing.pack([twos[0], twos[1], None]), [True, True, False])
    assert shard.set_gradients([first, second]) == pytest.approx(4 * 1.5**2 + 4 * 1.0)
    assert [None if p.grad is None else p.grad.flatten()[0].item() for p in shard.parameters] == [1.5, 1.0, None]
    shard.clip_by_value(1.2)
    assert shard.parameters[0].grad.max() == pytest.approx(1.2)


def test_packing_keeps_dtypes_apart():
    tensors = [torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.bfloat16), torch.tensor(7.0)]
    packing = Packing(tensors)
    buffers = packing.pack(tensors)
    assert [buffer.numel() for buffer in buffers] == [7, 4]
    assert all(torch.equal(a, b) for a, b in zip(packing.unpack(buffers), tensors, strict=True))


def test_parameters_are_dealt_whole_and_evenly():
    shares = partition([[10, 40, 20], [30]], 2)
    assert shares == [[[1, 0], []], [[2], [0]]] or shares == [[[0, 1], []], [[2], [0]]]
    assert partition([[5]], 3) == [[[0]], [[]], [[]]]


def test_settings_are_plain_values():
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([parameter], lr=torch.tensor(0.5))
    (settings,) = settings_of(optimizer)
    assert (settings["lr"], settings["betas"]) == (0.5, (0.9, 0.999))
    assert "params" not in settings
