"""Muon on several ranks: its products of 16 bits must not depend on where they are split, or which rank makes them."""

import math
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, library, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from polyphase.engine import Engine
from polyphase.engine.distributed.object_group import WORLD
from polyphase.engine.strategies.whole_steps import _Shared
from tests.engine.parity import largest_difference
from tests.engine.tiny import QUIET
from tests.pairs import nightly

ROWS = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Of sequences of two: q, k and v are one matrix."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False)

    def forward(self, x):
        pairs = x.view(-1, 2, 16)
        q, k, v = self.qkv(pairs).view(-1, 2, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return x + self.out(mixed.reshape(-1, 2, 16)).reshape(-1, 32)


class Net(LightningModule):
    def __init__(self, block=Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def training_step(self, batch, batch_idx):
        (rows,) = batch
        x, target = rows.split(32, dim=1)
        for block in self.blocks:
            x = block(x)
        return (x - target).square().mean()

    def configure_optimizers(self):
        return torch.optim.Muon(self.parameters(), lr=0.02)


def fit(strategy, samples, steps, devices=2, block=Block):
    module = Net(block)
    loader = DataLoader(TensorDataset(ROWS), batch_size=samples)
    Engine(**QUIET, strategy=strategy, devices=devices, max_steps=steps, max_epochs=1).fit(module, loader)
    return module.state_dict()


def test_fsdp_is_as_ddp():
    found = fit("fsdp_fork", samples=8, steps=2)
    assert largest_difference(found, fit("ddp_fork", samples=8, steps=2)) < 1e-7
    assert largest_difference(found, Net().state_dict()) > 1e-2


@pytest.mark.nightly  # the shards of a module are above, and those of stages in the parity tests
def test_stages_in_shards_are_as_whole_ones():
    # Micro-batches are summed in the same order; reduce-scatter and the mean of two pipelines are the same numbers.
    found = fit("pp+fsdp_fork:pipeline_size=2", samples=8, steps=2, devices=4)
    assert largest_difference(found, fit("pp+ddp_fork:pipeline_size=2", samples=8, steps=2, devices=4)) < 1e-7
    assert largest_difference(found, Net().state_dict()) > 1e-2


@pytest.mark.parametrize(
    ("strategy", "devices", "block"),
    [
        ("ddp_fork", 2, Block),
        ("tp_fork", 2, Block),
        ("tp_fork", 2, Attention),
        ("cp_fork", 2, Block),
        ("pp_fork", 2, Block),
        ("pp+ddp_fork:pipeline_size=2", 4, Block),
        ("fsdp+tp_fork:tp=2", 4, Block),
        ("fsdp+tp_fork:tp=2", 4, Attention),
        ("hsdp+tp_fork:replicate=2,tp=2", 4, Block),
        *nightly(("hsdp+tp_fork:replicate=2,shard=2,tp=2", 8, Attention), ("pp+fsdp_fork:pipeline_size=2", 4, Block)),
    ],
)
def test_a_step_is_as_in_a_plain_loop(strategy, devices, block):
    expected = Net(block)
    optimizer = expected.configure_optimizers()
    expected.training_step([ROWS[:16]], 0).backward()
    optimizer.step()
    # 1e-8 of a gradient, by which sums in another order differ, can be a bit of 16-bit numbers: 2**-8 of what moves.
    samples = 16 // {"d": 2, "f": 2, "h": devices // 2, "p": devices // 2}.get(strategy[0], 1)
    found = fit(strategy, samples=samples, steps=1, devices=devices, block=block)
    assert largest_difference(found, expected.state_dict()) < 2**-8 * 0.02


class Counted(Net):
    """Counts the collectives and floating-point operations of Muon's steps; the backward is in the other's."""

    def __init__(self, block) -> None:
        super().__init__(block)
        self.register_buffer("counts", torch.zeros(2, dtype=torch.float64))

    def configure_optimizers(self):
        first, *others = self.parameters()
        return [torch.optim.SGD([first], lr=0.02), torch.optim.Muon(others, lr=0.02)]

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if isinstance(optimizer, torch.optim.SGD):
            optimizer.step(closure=optimizer_closure)
            return
        with CommDebugMode() as sent, FlopCounterMode(display=False) as work:
            optimizer.step(closure=optimizer_closure)
        of_objects = sent.get_comm_counts().get(
            torch.ops.c10d.allgather_, 0
        )  # the engine's, at the end of the last step
        self.own = [sent.get_total_counts() - of_objects, work.get_total_flops()]

    def on_train_end(self):
        of_ranks = WORLD.all_gather_object(self.own) if dist.is_initialized() else [self.own]
        self.counts += torch.tensor(of_ranks).sum(0)


@pytest.mark.filterwarnings("ignore:check_first_steps=False")  # its own copy would be counted, too
@pytest.mark.parametrize(
    ("strategy", "devices", "block", "num_sent"),
    [
        ("ddp_fork", 2, Block, 1),  # all have the whole gradients: the results alone are sent
        ("cp_fork", 2, Block, 1),
        ("fsdp_fork", 2, Block, 2),
        ("tp_fork", 2, Block, 2),
        ("tp_fork", 2, Attention, 2),
        ("pp_fork", 2, Block, 0),  # each stage has matrices of its own
        ("pp+ddp_fork:pipeline_size=2", 4, Block, 1),
        ("pp+fsdp_fork:pipeline_size=2", 4, Block, 2),
        ("fsdp+tp_fork:tp=2", 4, Block, 2),
        ("fsdp+tp_fork:tp=2", 4, Attention, 2),
        ("hsdp+tp_fork:replicate=2,tp=2", 4, Attention, 2),
        *nightly(("fsdp_fork", 3, Block, 2), ("hsdp+tp_fork:replicate=2,tp=2", 4, Block, 2)),
    ],
)
def test_each_matrix_is_computed_once(strategy, devices, block, num_sent):
    def counts(strategy, devices):
        num_parts = {"c": 1, "t": 1}.get(strategy[0], devices) // (2 if "+tp" in strategy or "pp" in strategy else 1)
        loader = DataLoader(TensorDataset(ROWS[:12]), batch_size=12 // num_parts)
        module = Counted(block)
        flags = {"strategy": strategy, "devices": devices, "check_first_steps": False}
        Engine(**QUIET, **flags, max_steps=1).fit(module, loader)
        return module.counts.tolist()

    assert counts("single", 1)[1] > 0
    assert counts(strategy, devices) == [num_sent * devices, counts("single", 1)[1]]


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (1, 9), (3, 2)])
@pytest.mark.parametrize("cuts", [((0, 4),), ((1, 2), (0, 2)), ((0, 2), (0, 2)), ((0, 3), (1, 2))])
def test_parts_of_any_lengths_join_to_the_whole(shape, cuts):
    whole = torch.arange(math.prod(shape)).view(shape)
    numbers = [number for _, number in cuts]
    holders = torch.arange(math.prod(numbers)).view(numbers[-1], -1).T.flatten().tolist()
    for num_blocks in (number for number in (1, 2, 3) if shape[0] % number == 0):
        shared = _Shared(None, cuts, tuple(holders), num_blocks=num_blocks)
        parts = shared.parts(whole)
        assert torch.equal(shared.joined(parts), whole)


def test_matrices_that_ranks_have_unequal_parts_of():
    expected, module = Row(), Row()
    optimizer = torch.optim.Muon([p for p in expected.parameters() if p.dim() == 2], lr=0.02)
    module.configure_optimizers = MethodType(muon_of_matrices, module)
    # More samples than a matrix has rows: Muon blows up the directions of a gradient that are nothing but rounding.
    samples = torch.randn(96, 64, generator=torch.Generator().manual_seed(2))
    for rows in samples.split(48):
        optimizer.zero_grad()
        expected.training_step([rows], 0).backward()
        optimizer.step()
    loader = DataLoader(TensorDataset(samples), batch_size=16)
    Engine(**QUIET, strategy="fsdp_fork", devices=3, max_epochs=1).fit(module, loader)
    assert largest_difference(module.state_dict(), expected.state_dict()) < 2**-8 * 0.04


def muon_of_matrices(module):
    return torch.optim.Muon([p for p in module.parameters() if p.dim() == 2], lr=0.02)


# --- what torch can't do with parts of parameters is done on whole ones


class Optimizer(torch.optim.Optimizer):
    """Steps by `change(p, state)`."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in self.param_groups[0]["params"]:
            self.change(p, self.state[p])
        return loss


class Shampoo(Optimizer):
    def change(self, p, state):
        gradient = p.grad
        if p.dim() == 2:
            state.setdefault("left", torch.eye(len(p)) * 0.1).add_(gradient @ gradient.T)
            values, vectors = torch.linalg.eigh(state["left"])
            gradient = (vectors @ torch.diag(values.clamp(min=1e-3) ** -0.5) @ vectors.T) @ gradient
        p.add_(gradient, alpha=-0.01)


class OrthogonalSteps(Optimizer):
    """By a QR decomposition, whose signs are not unique, and with indices of the largest rows."""

    def change(self, p, state):
        step = p.grad
        if p.dim() == 2:
            q, r = torch.linalg.qr(p.grad.T @ p.grad + 0.1 * torch.eye(p.shape[1]))
            step = step @ (q * r.diagonal().sign())
            order = step.abs().sum(1).argsort()
            step = step[order][order.argsort()]
        p.sub_(step, alpha=0.02)


@library.custom_op("tests::halved", mutates_args=("values",))
def halved(values: Tensor, by: Tensor) -> None:
    """An operator of the user's own that writes, which no version of torch can know how to split."""
    values.sub_(by.round(decimals=3), alpha=0.02)


class OwnOperator(Optimizer):
    def change(self, p, state):
        halved(p, p.grad)


class Row(Net):
    """Its output layer has one row, of which one rank has none."""

    make = OwnOperator

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(32, 1)

    def training_step(self, batch, batch_idx):
        (rows,) = batch
        x, target = rows.split(32, dim=1)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - target.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self):
        return type(self).make([p for p in self.parameters() if p.dim() == 2 or self.make is not torch.optim.Muon])


class SomeRows(Optimizer):
    """Writes to some rows of each parameter, through a view."""

    def change(self, p, state):
        p[: len(p) // 4 + 1].sub_(p.grad[: len(p) // 4 + 1], alpha=0.01)


@pytest.mark.parametrize("make", [torch.optim.Muon, torch.optim.Rprop, Shampoo, OrthogonalSteps, OwnOperator, SomeRows])
def test_any_step_of_fsdp_is_as_in_a_plain_loop(make, monkeypatch):
    monkeypatch.setattr(Row, "make", make)
    expected, module = Row(), Row()
    optimizer = expected.configure_optimizers()
    for rows in ROWS[:32].split(16):
        optimizer.zero_grad()
        expected.training_step([rows], 0).backward()
        optimizer.step()
    loader = DataLoader(TensorDataset(ROWS[:32]), batch_size=8)
    Engine(**QUIET, strategy="fsdp_fork", devices=2, max_epochs=1, check_first_steps=False).fit(module, loader)
    assert largest_difference(module.state_dict(), Row().state_dict()) > 1e-3
    tolerance = 2**-8 * 0.04 if make is torch.optim.Muon else 1e-5  # a bit of 16 bits: as above
    assert largest_difference(module.state_dict(), expected.state_dict()) < tolerance


class Flattened(Optimizer):
    """Writes through a view, of which a shard of one row has no part."""

    def change(self, p, state):
        p.view(-1).sub_(p.grad.view(-1), alpha=0.01)


def test_a_write_through_a_view_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(Row, "make", Flattened)
    loader = DataLoader(TensorDataset(ROWS[:32]), batch_size=8)
    engine = Engine(**QUIET, strategy="fsdp_fork", devices=2, max_epochs=1, check_first_steps=False)
    with pytest.raises(ProcessRaisedException, match="the step of Flattened can't be done with parameters that"):
        engine.fit(Row(), loader)
