"""Steps and optimizers that use split parameters themselves, outside of the layers that they belong to."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.parity import TOLERANCE, largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

from .attentions import DIM, Residual

DATA = torch.randn(16, 4, DIM, generator=torch.Generator().manual_seed(0))


class LARS(torch.optim.Optimizer):
    """Reads norms as numbers: of the weights, and of their gradients."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                ratio = float(p.norm()) / (p.grad.norm().item() + float(p.abs().sum()) + 1e-3)
                p.add_(p.grad, alpha=-group["lr"] * ratio)
        return loss


class Penalised(LightningModule):
    """A loss with a penalty over all parameters, of which some are split and others not."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), Residual(), nn.Linear(DIM, 2))
        self.automatic_optimization = not by_hand

    def loss(self, batch: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in self.parameters()) + sum(p.norm() for p in self.net[2].parameters())
        return self.net(batch).square().mean() + 0.05 * penalty

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if self.automatic_optimization:
            return self.loss(batch)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LARS(self.parameters())


def fit(module: LightningModule, flag: str, devices: int, data_size: int) -> None:
    engine = Engine(strategy=flag, devices=devices, accelerator="cpu", max_epochs=1, **QUIET)
    engine.fit(module, DataLoader(DATA, batch_size=8 // data_size))


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    module = Penalised()
    optimizer = module.configure_optimizers()
    for batch in DATA.split(8):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(
    ("flag", "devices", "data_size", "by_hand"),
    [
        ("tp_fork", 2, 1, True),
        ("tp_fork:sequence_parallel=true", 2, 1, False),
        *nightly(("fsdp+tp_fork:tp=2", 4, 2, False)),
    ],
)
def test_penalties_and_norms_are_those_of_whole_parameters(flag, devices, data_size, by_hand, expected):
    module = Penalised(by_hand)
    fit(module, flag, devices, data_size)
    assert largest_difference(module.state_dict(), expected) <= TOLERANCE
    assert largest_difference(module.state_dict(), Penalised().state_dict()) > 100 * TOLERANCE


class GradientPenalty(Penalised):
    """With torch's own styles, whose outputs are plain."""

    def tensor_parallel_plan(self) -> dict[str, Any]:
        return {"net.2.up": ColwiseParallel(), "net.2.down": RowwiseParallel()}

    def loss(self, batch: Tensor) -> Tensor:
        batch.requires_grad_()
        (slope,) = torch.autograd.grad(self.net(batch).sum(), batch, create_graph=True)
        return slope.square().sum()


class Reweighted(Penalised):
    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean() * self.net[2].up.weight.detach().norm()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (GradientPenalty, "can't give the gradient of a gradient, as create_graph=True needs"),
        (Reweighted, r"the loss was multiplied by a number made of parameters that are split.*float\(\.\.\.\)"),
    ],
)
def test_what_has_no_right_gradient_is_refused(module, message):
    with pytest.raises(ProcessRaisedException, match=message):
        fit(module(), "tp_fork", 2, 1)
