"""Experts in 3-D parameters, by the plan of transformers, and a padded embedding: as in one process."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from polyphase.engine.strategies.tensor.plan import make_plan
from tests.engine.parity import TOLERANCE, largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET

WIDTH, HIDDEN, VOCABULARY, PADDING = 8, 12, 16, 3
PLAN = {
    "layers.*.experts": "moe_tp_experts",
    "layers.*.experts.gate_up_proj": "packed_colwise",
    "layers.*.experts.down_proj": "rowwise",
}


class Experts(nn.Module):
    """As transformers has them."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 2 * hidden, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(4, WIDTH, hidden) / 3)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(4):
            rows, place = torch.where(chosen == expert)
            gate, up = nn.functional.linear(x[rows], self.gate_up_proj[expert]).chunk(2, dim=-1)
            found = nn.functional.linear(nn.functional.silu(gate) * up, self.down_proj[expert])
            out.index_add_(0, rows, found * weights[rows, place, None])
        return out


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, chosen, weights).view_as(x)


class Decoder(nn.Module):
    _tp_plan = PLAN

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)
        nn.init.normal_(self.embed.weight)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.model = Decoder()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _loader(ranks: int = 1) -> DataLoader:
    tokens = torch.randint(0, VOCABULARY, (24, 6), generator=torch.Generator().manual_seed(2))
    assert (tokens == PADDING).any()
    return DataLoader(TensorDataset(tokens), batch_size=8 // ranks)


@pytest.mark.parametrize(("flag", "devices"), [("tp_fork", 2), ("fsdp+tp_fork", 4)])
def test_equal_to_the_plain_loop(flag, devices):
    plain, module = Model(), Model()
    optimizer = plain.configure_optimizers()
    for batch in _loader():
        optimizer.zero_grad()
        plain.training_step(batch, 0).backward()
        optimizer.step()
    engine = Engine(strategy=flag, devices=devices, accelerator="cpu", max_epochs=1, **QUIET)
    engine.fit(module, _loader(engine.data_size))
    assert largest_difference(module.state_dict(), plain.state_dict()) <= TOLERANCE
    assert largest_difference(module.state_dict(), Model().state_dict()) > 100 * TOLERANCE


def test_the_plan_splits_all_but_norms_and_routers_or_says_why_not():
    plan = make_plan(Model(), 2)
    assert plan.replicated_share < 0.06
    assert "model.layers.*.experts   of each expert 6 of 12 hidden units, as transformers' plan has it" in str(plan)
    other = Model()
    other.model._tp_plan = {**PLAN, "layers.*.experts.gate_up_proj": "packed_rowwise"}
    [(_, why), *_] = make_plan(other, 2).skipped
    assert why.startswith("transformers' plan for its parameters is not known here (gate_up_proj 'packed_rowwise'")
    odd = Model()
    odd.model.layers[0].experts = Experts(9)
    assert make_plan(odd, 2).skipped == (("model.layers.0.experts", "9 hidden units are no multiple of 2"),)
