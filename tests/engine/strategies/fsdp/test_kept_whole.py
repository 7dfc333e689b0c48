"""Which parameters every rank keeps whole, and how their gradients are averaged."""

import pytest
import torch
from torch import nn

from polyphase.engine.compression.counting_group import SimulatedGroup
from polyphase.engine.strategies.fsdp.comm import KeptWhole, kept_whole, refuse_fused


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.blocks[0].warmth = nn.Parameter(torch.tensor(1.0))
        self.head, self.exact = nn.Linear(4, 4), nn.Linear(4, 2).double()
        self.filter = nn.Parameter(torch.zeros(90, dtype=torch.cfloat))
        self.frozen = nn.Linear(9, 9).half().requires_grad_(False)


def test_they_are_those_that_cannot_be_cut():
    module = Several()
    with pytest.warns(UserWarning, match=r"filter \(torch\.complex64\), exact\.weight \(torch\.float64\)"):
        found = kept_whole(module, set(module.blocks))
    assert set(found) == {"blocks.0.warmth", "filter", "exact.weight", "exact.bias"}
    del module.filter
    assert set(kept_whole(module, {*module.blocks, module.exact})) == {"blocks.0.warmth"}  # and no warning


def test_a_gradient_is_averaged_when_it_is_complete_and_not_before():
    first, frozen = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(1.0), requires_grad=False)
    wire = SimulatedGroup(2)  # as if the other rank had zeros
    whole = KeptWhole({"first": first, "frozen": frozen}, wire, None)
    assert not frozen.requires_grad
    whole.is_held = True
    (3 * first).backward()
    assert (first.grad.item(), len(wire.messages)) == (3, 0)
    whole.is_held = False
    (3 * first).backward()
    assert (first.grad.item(), len(wire.messages)) == (3, 1)
    frozen.requires_grad_(True)  # as a callback does that unfreezes layers
    (4 * frozen).backward()
    assert frozen.grad.item() == 2
    whole.end()
    (4 * frozen).backward()
    assert frozen.grad.item() == 6


@pytest.mark.parametrize("asked", ["foreach", "fused"])
def test_an_optimizer_that_takes_both_in_one_operation_is_refused(asked):
    scale, weight = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([scale, weight], **{asked: True})
    with pytest.raises(ValueError, match=f"Adam was given {asked}=True, but under 'fsdp' every rank keeps scale whole"):
        refuse_fused([optimizer], {"scale": scale}, "'fsdp'")
    apart = torch.optim.Adam([{"params": [scale]}, {"params": [weight]}], **{asked: True})
    refuse_fused([apart], {"scale": scale}, "'fsdp'")
