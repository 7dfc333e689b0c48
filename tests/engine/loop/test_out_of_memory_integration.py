"""A rank runs out of memory, and the result is that of a run in which none did."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from polyphase.engine import Engine

from ..parity import TOLERANCE, adamw, largest_difference, suffixed
from ..tiny import QUIET

BATCH, SIZE = 24, 61
EPOCHS = 2


class Scarce(torch.autograd.Function):
    """Runs out of memory in backward, above a number of samples."""

    @staticmethod
    def forward(ctx, inputs, most):
        ctx.most = most
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("out of memory, in backward")
        return gradient, None


class Block(nn.Module):
    """One of the units that fsdp shards; the memory of the second one is scarce."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.most = {"forward": SIZE, "backward": SIZE}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most["forward"]:
            raise torch.OutOfMemoryError("out of memory, in forward")
        return Scarce.apply(self.layer(x).tanh(), self.most["backward"]) if x.requires_grad else self.layer(x).tanh()


class Hungry(LightningModule):
    """Takes more memory than there is for more than `most` samples, on one rank, from one step on."""

    def __init__(self, most: int = SIZE, where: str = "forward", rank: int = 1, from_step: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.last = nn.Linear(16, 1)
        self.scarcity = most, where, rank, from_step
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))
        self.logged: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        most, where, rank, from_step = self.scarcity
        if self.global_rank == min(rank, self.trainer.world_size - 1) and self.trainer.global_step >= from_step:
            self.blocks[1].most[where] = most
        if self.trainer.num_devices == 1:
            self.seen += len(inputs)
            self.mean.update(targets)
        x = self.first(inputs)
        for block in self.blocks:
            x = block(x)
        loss = (self.last(x).squeeze(1) - targets).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        self.logged.append(float(self.trainer.callback_metrics["loss"]) if self.trainer.num_devices == 1 else 0.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def data() -> TensorDataset:
    inputs = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1).sin())


def fit(module: Hungry, flag: str, devices: int, **flags: object) -> Engine:
    arguments = {"global_batch_size": BATCH, "micro_batch_size": "auto", "max_epochs": EPOCHS, **flags}
    engine = Engine(strategy=suffixed(flag, "fork"), devices=devices, **{**QUIET, **arguments})
    engine.fit(module, DataLoader(data(), batch_size=4))
    return engine


def plain_loop() -> dict[str, Tensor]:
    module, samples = Hungry(), data()
    optimizer = adamw(module)
    for _ in range(EPOCHS):
        for first in range(0, SIZE, BATCH):
            inputs, targets = samples[first : first + BATCH]
            optimizer.zero_grad()
            x = module.first(inputs)
            for block in module.blocks:
                x = block(x)
            (module.last(x).squeeze(1) - targets).square().mean().backward()
            optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("from_step", [0, 3], ids=["first step", "in the middle"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("flag", "devices"),
    [
        ("single", 1),
        ("ddp", 2),
        ("ddp", 3),
        ("fsdp", 2),
        ("fsdp", 3),
        ("fsdp:no_sync=false", 2),
        ("hsdp:replicate=2", 4),
    ],
)
def test_the_weights_are_those_of_a_plain_loop(flag, devices, where, from_step):
    module = Hungry(most=3, where=where, from_step=from_step)
    fit(module, flag, devices)
    found = {name: p for name, p in module.state_dict().items() if name in dict(module.named_parameters())}
    assert largest_difference(found, plain_loop()) <= TOLERANCE
