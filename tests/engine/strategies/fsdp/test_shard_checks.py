"""What can't be sharded is refused by name; what only looks alike equals a plain loop."""

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from polyphase.engine.errors import RefusedError
from polyphase.engine.strategies.fsdp.shard_checks import check_tensor_parallel
from polyphase.engine.strategies.layout import check_dense_gradients
from tests.engine.parity import largest_difference
from tests.engine.strategies.fsdp.test_unit_order_integration import ROWS, Skipping, fit
from tests.engine.strategies.test_ddp_integration import QUIET


def test_a_sparse_gradient_is_named():
    module = Skipping()
    module.part = nn.Embedding(4, 8, sparse=True)
    with pytest.raises(ValueError, match=r"sparse gradient of part\.weight: build Embedding with sparse"):
        check_dense_gradients(module, "'fsdp'")


def test_beside_split_layers_nothing_is_kept_whole():
    check_tensor_parallel([], 2, "'fsdp+tp'")
    check_tensor_parallel(["part.scale"], 1, "'fsdp+tp'")
    with pytest.raises(ValueError, match=r"'fsdp\+tp' can't shard part\.scale: .*\[1\]"):
        check_tensor_parallel(["part.scale"], 2, "'fsdp+tp'")


def test_a_run_checks_it_before_its_first_step():
    module = Skipping()
    module.part = nn.Embedding(4, 8, sparse=True)
    with pytest.raises(ProcessRaisedException, match=r"'fsdp_fork' can't average the sparse gradient of part\.weight"):
        fit(module)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp:replicate=1", "tp", "pp", "fsdp+tp", "pp+ddp", "pp+fsdp"])
def test_pruning_of_whole_tensors_is_refused_where_a_rank_has_a_part_of_them(strategy):
    engine = Engine(
        strategy=strategy, accelerator="cpu", devices=4, callbacks=[ModelPruning("l1_unstructured")], **QUIET
    )
    with pytest.raises(RefusedError, match=r"ModelPruning replaces parameters by products with masks .* prune before"):
        engine.fit(Skipping(), DataLoader(ROWS))


class Penalised(Skipping):
    def loss(self, batch, batch_idx):
        return super().loss(batch, batch_idx) + 0.01 * sum(p.square().sum() for p in self.parameters())


class Block(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.norm = nn.LayerNorm(8)


class FromOutside(Skipping):
    """Calls a part of a block, as DiT does."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def loss(self, batch, batch_idx):
        for block in self.blocks:
            batch = batch + block(block.norm(batch))
        return self.heads["a"](batch).square().mean()


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Penalised, r"a penalty over `self\.parameters\(\)`.*units=module"),
        (FromOutside, r"blocks\.0\.norm was called from outside of it.*units=module"),
    ],
)
def test_what_uses_shards_is_named(module, text):
    with pytest.raises(ProcessRaisedException, match=text):
        fit(module())


class WholePenalised(Penalised):
    def shard_units(self):
        return []


class WholeFromOutside(FromOutside):
    def shard_units(self):
        return []


class Doubled(Skipping):
    """A sub-module of another dtype, which is a unit of its own; blocks in a `ModuleDict`."""

    def __init__(self) -> None:
        super().__init__()
        named = nn.ModuleDict({str(number): block for number, block in enumerate(self.blocks)})
        del self.blocks
        self.named = named
        self.wide = nn.Linear(8, 1).double()

    def shard_units(self):
        return [self.wide]

    def loss(self, batch, batch_idx):
        for block in self.named.values():
            batch = batch + torch.tanh(block(batch))
        return self.heads["a"](batch).square().mean() + self.wide(batch.double()).square().mean()


@pytest.mark.parametrize("module", [WholePenalised, WholeFromOutside, Doubled])
def test_what_the_refusals_say_equals_a_plain_loop(module):
    sharded, plain = module(), module()
    plain.load_state_dict(sharded.state_dict())
    optimizer = plain.configure_optimizers()
    for number, batch in enumerate(ROWS.split(8)):
        optimizer.zero_grad()
        plain.loss(batch, number).backward()
        optimizer.step()
    engine = Engine(strategy="fsdp_fork", devices=2, accelerator="cpu", max_epochs=1, **QUIET)
    engine.fit(sharded, DataLoader(ROWS, 4))
    assert largest_difference(sharded.state_dict(), plain.state_dict()) < 1e-6
