"""A block that is computed again in backward computes the same, and leaves no trace of having run twice."""

import copy
import io
import random

import lightning.pytorch.strategies as lightnings
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from polyphase.engine.errors import RefusedError
from polyphase.engine.strategies.dp import DP
from polyphase.engine.strategies.recompute import check_recompute

from ..tiny import Regression, engine, rows

KINDS = ("full", "selective")
NUM_BLOCKS, DIM, BATCH, STEPS = 3, 8, 4, 6


class Block(nn.Module):
    """Has all that a second forward could do differently, or twice."""

    def __init__(self, calls: io.StringIO) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.register_buffer("scale", torch.ones(DIM))
        self.decay = torch.ones(DIM)
        self.auxiliary: list = []
        self.by_name: dict = {"seen": []}
        self.generator = torch.Generator().manual_seed(5)
        self.num_calls = 0
        vars(self)["calls"] = calls.write  # a stream, which nothing puts back

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        self.calls("1")
        self.num_calls += 1
        noise = random.random() + np.random.rand() + torch.rand((), generator=self.generator).item()
        y = self.up(self.norm(x) + shift)
        y = nn.functional.dropout(y.tanh() * noise, 0.3, self.training)
        self.auxiliary.append(y.square().mean())
        self.by_name["seen"].append(self.num_calls)
        y = self.down(y) * self.scale.clone() * self.decay.clone()
        if self.training:
            self.scale.mul_(0.9)  # of which the next forward, and none of this step's backward, is to know
            self.decay.mul_(0.9)
        return x + y / self.num_calls


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.calls = io.StringIO()
        self.blocks = nn.ModuleList(Block(self.calls) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, 1)
        self.saved: list[torch.Size] = []
        self.has_saved: list[bool] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.saved.append(tensor.shape)
        return tensor

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor):
            for block in self.blocks:
                block.auxiliary.clear()
                x = block(x, shift=torch.full((DIM,), 0.1))
        auxiliary = sum(block.auxiliary[0] for block in self.blocks)
        return self.head(x).square().mean() + 0.1 * auxiliary

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.blocks[0](batch[0], shift=torch.zeros(DIM))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader:
    inputs = torch.randn(STEPS * BATCH, DIM, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs), batch_size=BATCH)


def trained(kind: str = "none", make: type[LightningModule] = Net, **flags: object) -> LightningModule:
    module = make()
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    engine(activation_checkpointing=kind, **flags).fit(module, data())
    return module


FLAGS = [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, {"precision": "bf16-mixed"}]


@pytest.mark.parametrize("flags", FLAGS, ids=["plain", "accumulate, clip", "bf16-mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_to_the_bit_whatever_a_block_draws_and_writes(kind, flags):
    expected, module = trained(**flags), trained(kind, **flags)
    drawn = random.random(), np.random.rand(), torch.rand(())
    trained(**flags)
    assert drawn == (random.random(), np.random.rand(), torch.rand(()))
    assert all(
        torch.equal(a, b) for a, b in zip(expected.state_dict().values(), module.state_dict().values(), strict=True)
    )
    for a, b in zip(expected.blocks, module.blocks, strict=True):
        assert b.norm.num_batches_tracked == a.norm.num_batches_tracked == STEPS
        assert (b.num_calls, b.by_name, len(b.auxiliary)) == (a.num_calls, a.by_name, len(a.auxiliary))
        assert torch.equal(a.decay, b.decay)
        assert torch.equal(a.generator.get_state(), b.generator.get_state())


@pytest.mark.parametrize("kind", KINDS)
def test_each_forward_runs_twice_a_step(kind):
    assert len(trained().calls.getvalue()) == NUM_BLOCKS * STEPS
    assert len(trained(kind).calls.getvalue()) == 2 * NUM_BLOCKS * STEPS


def test_full_keeps_the_inputs_of_blocks_and_nothing_else():
    assert len(trained().saved) > 10 * NUM_BLOCKS * STEPS
    inputs = [torch.Size([BATCH, DIM]), torch.Size([DIM])]
    saved = trained("full").saved
    # The input of the first block comes from no forward; each block's is kept with what is given to it by name.
    assert saved == [*inputs] * NUM_BLOCKS * STEPS


def test_selective_computes_no_matrix_product_again():
    num_flops = {}
    for kind in ("none", *KINDS):
        with FlopCounterMode(display=False) as counter:
            trained(kind)
        num_flops[kind] = counter.get_total_flops()
    assert num_flops["selective"] == num_flops["none"] < num_flops["full"]


class KeepsNone(Net):
    def kept_operators(self):
        return []


class KeepsSome(Net):
    def kept_operators(self):
        return [torch.ops.aten.addmm, torch.ops.aten.tanh.default]


class KeepsWords(Net):
    def kept_operators(self):
        return ["aten::mm"]


class KeepsDropout(Net):
    def kept_operators(self):
        return [torch.ops.aten.native_dropout]


def test_a_module_says_which_operators_are_kept():
    expected, num_flops = trained(), {}
    for make in (Net, KeepsSome, KeepsNone):
        with FlopCounterMode(display=False) as counter:
            module = trained("selective", make=make)
        num_flops[make] = counter.get_total_flops()
        assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))
    assert num_flops[Net] == num_flops[KeepsSome] < num_flops[KeepsNone]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (KeepsWords, r"kept_operators\(\) must return operators such as torch.ops.aten.mm, but there is 'aten::mm'"),
        (KeepsDropout, r"kept_operators\(\) has aten.native_dropout.*, which draws random numbers"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_the_run(make, said):
    with pytest.raises(RefusedError, match=said):
        trained("selective", make=make)


def test_evaluation_is_left_alone():
    module = Net()
    trainer = engine(activation_checkpointing="full")
    trainer.fit(module, data(), data())
    before = len(module.calls.getvalue())
    trainer.validate(module, data(), verbose=False)
    assert len(module.calls.getvalue()) == before + STEPS


class Looks(Callback):
    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def on_train_batch_end(self, trainer, pl_module, *args) -> None:
        assert "forward" in vars(pl_module.blocks[0])
        pl_module.blocks[0].auxiliary.clear()  # tensors of a graph, which have no copy
        self.copied = copy.deepcopy(pl_module.blocks[0])
        if self.fails:
            raise KeyError("mine")


@pytest.mark.parametrize("fails", [False, True])
def test_the_module_is_left_as_it_was(fails):
    module, looks = Net(), Looks(fails)
    names, kinds = list(module.state_dict()), [type(part) for part in module.modules()]
    trainer = engine(activation_checkpointing="full", callbacks=[looks])
    if fails:
        with pytest.raises(KeyError, match="mine"):
            trainer.fit(module, data())
    else:
        trainer.fit(module, data())
    assert names == list(module.state_dict())
    assert kinds == [type(part) for part in module.modules()]
    assert all("forward" not in vars(block) for block in module.blocks)
    # A copy that was made while it ran runs its own parameters, once.
    num_calls, x = len(module.calls.getvalue()), torch.ones(2, DIM)
    with torch.no_grad():
        looks.copied.down.weight.fill_(torch.nan)
    assert looks.copied(x, shift=x[0]).isnan().all()
    assert not module.blocks[0](x, shift=x[0]).isnan().any()
    assert len(module.calls.getvalue()) == num_calls + 2


class DrawsInAttention(Net):
    """Its attention draws, and its dropout after that."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AttentionBlock() for _ in range(NUM_BLOCKS))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class AttentionBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)[None, None].chunk(3, dim=-1)
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2)[0, 0]
        return x + nn.functional.dropout(y, 0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_that_draws(kind):
    expected, module = trained(make=DrawsInAttention), trained(kind, make=DrawsInAttention)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))


class WritesOver(DrawsInAttention):
    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(inplace=True)) for _ in range(NUM_BLOCKS))
        self.blocks = nn.ModuleList(layers)


def test_selective_finds_what_writes_over_what_it_keeps():
    expected, module = trained(make=WritesOver), trained("full", make=WritesOver)
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="cached during selective activation checkpoint has been mutated"):
        trained("selective", make=WritesOver)


class OwnUnits(Regression):
    def shard_units(self):
        return [self.net]


def test_blocks_are_those_of_the_hook():
    module = OwnUnits()
    with pytest.raises(RefusedError, match=r"has no ModuleList or Sequential of one class: .* shard_units\(\)"):
        engine(activation_checkpointing="full").fit(Regression(), rows())
    engine(activation_checkpointing="full").fit(module, rows())
    expected = Regression()
    engine().fit(expected, rows())
    assert all(torch.equal(a, b) for a, b in zip(expected.parameters(), module.parameters(), strict=True))


class NeverCalls(OwnUnits):
    def training_step(self, batch, batch_idx):
        x = batch
        for layer in self.net:
            x = layer(x)
        return x.square().mean()


def test_blocks_that_are_never_called_are_an_error():
    with pytest.raises(RuntimeError, match=r"has not called the forward of any block \(Sequential\)"):
        engine(activation_checkpointing="full").fit(NeverCalls(), rows())


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"strategy": "fsdp:activation_checkpointing=true", "activation_checkpointing": "selective"}, "contradicts"),
        ({"strategy": "pp:schedule=zero-bubble", "devices": 2, "activation_checkpointing": "selective"}, "zero-bubble"),
        (
            {"strategy": lightnings.ModelParallelStrategy(), "activation_checkpointing": "full"},
            "Lightning's own ModelParallelStrategy",
        ),
        ({"activation_checkpointing": "some"}, "full"),
    ],
    ids=["option", "zero-bubble", "lightning", "unknown"],
)
def test_what_cannot_be_done_is_refused(flags, said):
    with pytest.raises(RefusedError, match=said):
        engine(**flags)


def test_copies_of_a_block_cannot_share_a_forward():
    with pytest.raises(ValueError, match="strategy 'dp' can't do activation_checkpointing"):
        check_recompute(DP(), None, "full")
