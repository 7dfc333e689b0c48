"""What a rank holds, counted from tensors."""

import torch
from torch import nn

from polyphase.engine.loop.out_of_memory import held_bytes


def test_parameters_gradients_state_and_buffers_are_counted():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).requires_grad_(False))
    trained, frozen = 4 * (3 * 4 + 4 + 2 * 4), 4 * (4 * 2 + 2)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad])
    held = held_bytes(module, [optimizer])
    assert held["parameters"] == trained + frozen
    assert held["gradients"] == trained, "as many as there will be"
    assert held["optimizer state"] == 0
    assert held["buffers"] == 4 * (4 + 4) + 8
    module(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    steps = 4 * 4  # a number for each of four parameters
    assert held_bytes(module, [optimizer])["optimizer state"] == 2 * trained + steps


def test_what_another_rank_holds_does_not_count():
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, device="meta"))
    held = held_bytes(module, [])
    assert held["parameters"] == held["gradients"] == 4 * (3 * 4 + 4)


def test_tied_parameters_count_once():
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    module[1].weight = module[0].weight
    assert held_bytes(module, [])["parameters"] == 4 * 4 * 4
