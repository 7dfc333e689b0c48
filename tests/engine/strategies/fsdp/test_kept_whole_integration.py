"""Parameters that can't be cut into shards are whole on every rank, and train as in a plain loop."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.strategies.fsdp.test_strategy_integration import SaveAtEnd
from tests.engine.strategies.fsdp.test_unit_order_integration import ROWS, Skipping
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

pytestmark = pytest.mark.filterwarnings("ignore:every rank keeps the whole of")


class Warm(nn.Module):
    """A block with a number without a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.warmth = nn.Linear(8, 8), nn.Parameter(torch.tensor(1.3))

    def forward(self, x):
        return self.inner(x) * self.warmth


class Whole(Skipping):
    """Such numbers in the blocks and the root; a layer in float64 and a complex filter beside float32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Warm() for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.6))
        self.exact = nn.Linear(8, 8).double()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def loss(self, batch, batch_idx):
        batch = self.exact(batch.double()).float() + torch.fft.irfft(torch.fft.rfft(batch) * self.filter, n=8)
        return super().loss(batch * self.scale, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02, eps=1e-3)


class ByHand(Whole):
    """Two backward passes of half a batch each, and the step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for half in batch.chunk(2):
            self.manual_backward(self.loss(half, batch_idx) / 2)
        optimizer.step()


def plain_loop(module, clip=None, passes=1):
    optimizer = module.configure_optimizers()
    for _ in range(passes):
        for number, batch in enumerate(ROWS.split(16)):
            optimizer.zero_grad()
            module.loss(batch, number).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()
    return module


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().double().max().item() for name in a)


def engine(strategy, devices=2, **flags):
    return Engine(strategy=strategy, devices=devices, accelerator="cpu", **{"max_epochs": 1, **QUIET, **flags})


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [
        ("fsdp_fork", 2),
        ("hsdp_fork:replicate=2,shard=1", 2),
        *nightly(("hsdp_fork:replicate=2", 4), ("fsdp_fork:no_sync=true", 2)),
    ],
)
def test_equals_a_plain_loop_with_accumulation_and_clipping(strategy, devices):
    run = engine(strategy, devices, accumulate_grad_batches=2, gradient_clip_val=0.5)
    module = Whole()
    expected = plain_loop(Whole(), clip=0.5)
    moved = largest_difference(expected.state_dict(), module.state_dict())
    run.fit(module, DataLoader(ROWS, 8 // run.data_size))
    assert largest_difference(module.state_dict(), expected.state_dict()) < 1e-5
    assert moved > 1e-2


def test_equals_a_plain_loop_by_hand():
    module = ByHand()
    engine("fsdp_fork").fit(module, DataLoader(ROWS, 8))
    assert largest_difference(module.state_dict(), plain_loop(Whole()).state_dict()) < 1e-5


@pytest.mark.parametrize("saved", ["directory", *nightly("file")])
def test_a_checkpoint_goes_on_on_other_ranks(saved, tmp_path):
    expected = plain_loop(Whole(), passes=2).state_dict()
    path = tmp_path / f"{saved}.ckpt"
    engine("fsdp_fork", checkpoint_format=saved, callbacks=[SaveAtEnd(path)]).fit(Whole(), DataLoader(ROWS, 8))
    for strategy in ("single", "fsdp_fork"):
        run = engine(strategy, 1 if strategy == "single" else 2, max_epochs=2)
        module = Whole()
        run.fit(module, DataLoader(ROWS, 16 // run.data_size), ckpt_path=path)
        assert largest_difference(module.state_dict(), expected) < 1e-5, strategy
