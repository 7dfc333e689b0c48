"""Modules of other people's shapes: cut and equal to the whole, or refused with the name of what is in the way."""

import pytest
import torch
from torch import Tensor, nn

from polyphase.engine.strategies.pipeline.absent import CutError

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


@pytest.mark.parametrize("make", [InDict, lambda: Translates(2, 2), lambda: Translates(1, 2)])
def test_they_are_equal_to_the_whole(make):
    net = make()
    expected = net()
    expected.backward()
    relay = Relay(make(), 2, lambda own: own())
    torch.testing.assert_close(relay.run(), expected)
    found = relay.gradients()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            HeadFirst,
            r"in forward: .* uses 'head.weight' behind the blocks, but what is registered before .* assign",
        ),
        (lambda: Translates(4, 2), r"needs what an earlier pipeline stage has \(it comes from 'embed.weight'\)"),
        (UNet, r"gives 'ups.2' a value that only an earlier pipeline stage has \(it comes from 'downs.0.weight'\)"),
        (
            UNetInTwo,
            r"gives 'ups.1' a value that only an earlier pipeline stage has \(it comes from 'downs.1'\)",
        ),
    ],
)
def test_or_what_is_in_the_way_is_named(make, message):
    with pytest.raises(CutError, match=message):
        Relay(make(), 2, lambda own: own()).run()
