"""Ranks that call the blocks of a module in different orders: named before any weight is wrong, and otherwise free."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.parity import largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

ROWS = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))


class Skipping(LightningModule):
    """Blocks of one size, some of which are skipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.heads = nn.ModuleDict({"a": nn.Linear(8, 1), "b": nn.Linear(8, 1)})

    def skips(self, block: int, batch_idx: int) -> bool:
        return False

    def head(self, batch_idx: int) -> str:
        return "a"

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            if not self.skips(number, batch_idx):
                batch = batch + torch.tanh(block(batch))
        return self.heads[self.head(batch_idx)](batch).square().mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.loss(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class FromTheFirst(Skipping):
    def skips(self, block, batch_idx):
        return self.global_rank == 1 and block == 2


class LayerDrop(Skipping):
    def skips(self, block, batch_idx):
        return self.training and self.global_rank == 1 and block == 2 and batch_idx == 3


class TheLast(Skipping):
    def skips(self, block, batch_idx):
        return self.training and self.global_rank == 0 and block == 3 and batch_idx == 3


class InEvaluation(Skipping):
    def skips(self, block, batch_idx):
        return not self.training and self.global_rank == 1 and block == 1 and batch_idx == 1


class Experts(Skipping):
    """Each rank's batch goes to another block."""

    def skips(self, block, batch_idx):
        return block != (self.global_rank + batch_idx) % 4


class Heads(Skipping):
    def head(self, batch_idx):
        return "ab"[self.global_rank] if batch_idx == 2 else "a"


class OnOneRankAlone(Skipping):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3 and self.global_rank == 0:
            self(batch)

    def forward(self, batch):
        return self.loss(batch, 0)


def fit(module: LightningModule, strategy: str = "fsdp_fork", devices: int = 2, **flags: object) -> None:
    engine = Engine(strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, **QUIET, **flags)
    engine.fit(module, DataLoader(ROWS, 8 // devices), DataLoader(ROWS[:16], 8 // devices))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (FromTheFirst, r"rank [01] gathers blocks\.[23], where rank [01] .* it gathers blocks\.[23]"),
        (LayerDrop, r"rank 1 gathers blocks\.3, where rank 0 .* it gathers blocks\.2.*LayerDrop"),
        (TheLast, r"rank 0 gathers blocks\.2, where rank 1 .* it gathers blocks\.3"),
        (InEvaluation, r"rank [01] gathers blocks\.[12], where rank [01] .* it gathers blocks\.[12]"),
        (Experts, r"rank [01] gathers blocks\.[01], where rank [01] .* it gathers blocks\.[01]"),
        (Heads, r"averages .* without those of heads\.a\.weight.*, where rank 0 .* without those of heads\.b\.weight"),
        (OnOneRankAlone, r"rank 0 gathers what .* outside of its blocks, where rank 1 .* is at the end of the step"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_ranks_that_differ_are_named_before_shards_are_mixed(module, text):
    with pytest.raises(ProcessRaisedException, match=text):
        fit(module())


class AllAlike(Skipping):
    """All ranks skip the same blocks, in some steps."""

    def skips(self, block, batch_idx):
        return block == 2 and batch_idx % 3 == 1

    def head(self, batch_idx):
        return "b" if batch_idx == 4 else "a"


@pytest.mark.parametrize(("strategy", "devices"), [("fsdp_fork", 2), *nightly(("hsdp_fork:replicate=2", 4))])
def test_ranks_that_skip_the_same_blocks_equal_a_plain_loop(strategy, devices):
    module, plain = AllAlike(), AllAlike()
    optimizer = plain.configure_optimizers()
    for number, batch in enumerate(ROWS.split(8)):
        optimizer.zero_grad()
        plain.loss(batch, number).backward()
        optimizer.step()
    fit(module, strategy, devices)
    assert largest_difference(module.state_dict(), plain.state_dict()) < 1e-6
