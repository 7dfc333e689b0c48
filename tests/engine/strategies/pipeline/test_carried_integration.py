"""Values carried past stages and parameters that are lent, under each schedule: the weights of a plain loop."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.pairs import nightly

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Head(nn.Module):
    """With a statistic of its own, which only the stage knows that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.largest.copy_(torch.maximum(self.largest, x.detach().abs().max()))
        return self.linear(x)


class Net(LightningModule):
    """An output layer before the blocks, a norm behind them that is used before, a skip past all of them."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.embed = Head(), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_blocks))
        self.norm, self.unused = nn.LayerNorm(4), nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (rows,) = batch
        x = skip = self.norm(self.embed(rows))
        for number, block in enumerate(self.blocks):
            x = block(x).tanh() + (skip.sin() if number == 2 else 0)
        return self.head(x + skip).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class Towers(Net):
    """The second tower knows nothing of the first, and comes in the order of `pipeline_stages`."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.last = nn.Linear(4, 4)

    def pipeline_stages(self) -> list[list[nn.Module]]:
        return [[*self.blocks], [*self.others]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (rows,) = batch
        x, y = self.embed(rows), rows
        for block in self.blocks:
            x = block(x).tanh()
        for block in self.others:
            y = block(y).tanh()
        return (self.last(y) * x).sum(1).square().mean()


class Normed(nn.Linear):
    """A block that normalises its input by a module which all blocks have."""

    norm: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Normed(4, 4) for _ in range(4))
        for block in self.blocks:
            block.norm = self.norm


def loader(ranks: int) -> DataLoader:
    """With a short last batch where that is one process's."""
    rows = torch.randn(20 if ranks == 1 else 24, 4, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(rows), batch_size=8 // ranks)


def by_hand(make: Any, rows: Any) -> dict[str, Tensor]:
    module = make()
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(DataLoader(rows, batch_size=8)):
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
    return module.state_dict()


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:the step writes into the buffer 'head.largest':UserWarning")
@pytest.mark.filterwarnings("ignore:(?s).*the ranks have different values of 'head.largest':UserWarning")
@pytest.mark.parametrize(
    ("strategy", "devices", "make"),
    [
        ("pp_fork", 2, Net),
        ("pp_fork:schedule=interleaved,virtual_stages=2", 2, Net),
        ("pp_fork:schedule=zero-bubble", 3, Net),
        ("pp_fork", 2, Shared),
        ("pp+fsdp_fork:pipeline_size=2", 4, Towers),
        *nightly(
            ("pp+ddp_fork:pipeline_size=2", 4, Net), ("pp_fork", 3, Shared), ("pp_fork:schedule=zero-bubble", 2, Towers)
        ),
    ],
)
def test_weights_and_buffers_are_those_of_a_plain_loop(strategy, devices, make):
    engine = Engine(strategy=strategy, accelerator="cpu", devices=devices, max_epochs=1, gradient_clip_val=0.5, **QUIET)
    module = make()
    engine.fit(module, loader(engine.data_size))
    found = module.state_dict()
    for name, expected in by_hand(make, loader(engine.data_size).dataset).items():
        if name == "head.largest" and engine.data_size > 1:  # each pipeline has that of its own samples
            continue
        torch.testing.assert_close(found[name], expected, msg=lambda text, name=name: f"{name}: {text}")


class Batches(Net):
    """A BatchNorm that is registered before the blocks, called behind them, and in another model before them too."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        self.shared, self.twice = nn.BatchNorm1d(4), twice
        self.blocks = self._modules.pop("blocks")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (rows,) = batch
        x = self.embed(rows)
        if self.twice:
            x = self.shared(x)
        for block in self.blocks:
            x = block(x).tanh()
        return self.shared(x).sin().square().mean()


def _one_micro_batch() -> Engine:
    flags = {"strategy": "pp_fork:microbatches=1,schedule=gpipe", "accelerator": "cpu", "devices": 2}
    return Engine(max_epochs=1, gradient_clip_val=0.5, **flags, **QUIET)


@pytest.mark.timeout(120)
def test_statistics_are_those_of_the_stage_that_calls_the_module():
    module = Batches()
    _one_micro_batch().fit(module, loader(1))
    torch.testing.assert_close(module.state_dict(), by_hand(Batches, loader(1).dataset))


@pytest.mark.timeout(120)
def test_statistics_of_two_stages_end_the_run_before_weights_change():
    module = Batches(twice=True)
    with pytest.raises(
        ProcessRaisedException, match=r"the buffer 'shared.running_mean' of BatchNorm1d is written by .* stage 0"
    ):
        _one_micro_batch().fit(module, loader(1))
