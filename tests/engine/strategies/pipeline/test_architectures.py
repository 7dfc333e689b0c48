"""Modules of other people's shapes: cut and equal to the whole, or refused with the name of what is in the way."""

import pytest
import torch
from torch import Tensor, nn

from polyphase.engine.strategies.callers import CutError

from .relay import Relay

ROWS = torch.linspace(-1, 1, 8).view(2, 4)
IDS = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]])


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.embed = nn.Linear(4, 3), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self) -> Tensor:
        x = self.embed(ROWS)
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x).square().mean()


class InDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({f"layer{number}": nn.Linear(4, 4) for number in range(4)})
        self.head = nn.Linear(4, 3)

    def forward(self) -> Tensor:
        x = ROWS
        for layer in self.layers.values():
            x = layer(x).tanh()
        return self.head(x).square().mean()


class Translates(nn.Module):
    def __init__(self, num_encoder_layers: int, num_decoder_layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 8)
        self.transformer = nn.Transformer(
            8, 2, num_encoder_layers, num_decoder_layers, 16, dropout=0.0, batch_first=True
        )
        self.head = nn.Linear(8, 7)

    def forward(self) -> Tensor:
        x = self.embed(IDS)
        mask = nn.Transformer.generate_square_subsequent_mask(5)
        x = self.transformer(x, x, tgt_mask=mask, src_key_padding_mask=IDS == 0)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), IDS.flatten())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.downs = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self) -> Tensor:
        x, skips = ROWS, []
        for down in self.downs:
            x = down(x).tanh()
            skips.append(x)
        for up in self.ups:
            x = up(torch.cat([x, skips.pop()], -1)).tanh()
        return x.square().mean()


class UNetInTwo(UNet):
    def pipeline_stages(self) -> list[list[nn.Module]]:
        return [[*self.downs], [*self.ups]]


class NormFirst(nn.Module):
    """As in BART: what stands before the decoder's blocks is registered behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm_first, self.norm_last = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self) -> Tensor:
        x = self.norm_first(self.embed(IDS))
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.norm_last(x).sin().mean()


class Towers(nn.Module):
    """Two encoders, one behind the other, each of which knows nothing of the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.right = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self) -> Tensor:
        x = y = ROWS
        for block in self.left:
            x = block(x).tanh()
        for block in self.right:
            y = block(y).tanh()
        return (self.scale * x * y).sum(-1).exp().mean()


class OneForAll(nn.Module):
    """Views of one condition, which stand in every block and behind them; and a part of a block used outside of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.condition = nn.Linear(4, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(4, 3)

    def forward(self) -> Tensor:
        shift, scale, gate = self.condition(ROWS).chunk(3, -1)
        x = ROWS
        for number, block in enumerate(self.blocks):
            x = block(x * scale if number % 2 else x + shift)
        return (self.head(self.blocks[0][0](x)) * gate[:, :1]).square().mean()


class Penalty(HeadFirst):
    def forward(self) -> Tensor:
        return super().forward() + self.embed.weight.square().mean()


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        *(InDict, HeadFirst, NormFirst, UNet, Towers, OneForAll, Penalty),
        *(lambda: Translates(3, 3), lambda: Translates(2, 3), lambda: Translates(4, 2)),
    ],
)
def test_they_are_equal_to_the_whole(make, num_stages):
    net = make()
    expected = net()
    expected.backward()
    relay = Relay(make(), num_stages, lambda own: own())
    torch.testing.assert_close(relay.run(), expected)
    found = relay.gradients()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_a_skip_is_carried_past_the_stages_in_between_and_nothing_else_is():
    relay = Relay(UNetInTwo(), 2, lambda own: own())
    assert [len(relay.shapes.sent(stage)) for stage in (0,)] == [3]
    relay = Relay(InDict(), 4, lambda own: own())
    assert [len(relay.shapes.sent(stage)) for stage in range(3)] == [1, 1, 1]


class WritesIntoAView(OneForAll):
    def forward(self) -> Tensor:
        shift, scale, gate = self.condition(ROWS).chunk(3, -1)
        x = ROWS
        for block in self.blocks:
            x = block(x + shift)
        scale += 1
        return (self.head(x) * scale[:, :3]).mean() + gate.mean()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_view_that_is_written_in_place_is_refused(context):
    with context(), pytest.raises(CutError, match=r"writes in place, on pipeline stage 1, into one of several views"):
        Relay(WritesIntoAView(), 2, lambda own: own()).run(backward=False)
