"""`16-mixed` with manual optimization: the weights are those of a plain loop that unscales before it uses gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.engine.parity import QUIET, largest_difference, suffixed
from tests.pairs import alternating

CLIP = 0.05
X = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
Y = {
    # Some of the first steps overflow float16, and are skipped.
    "overflows": X.sum(1, keepdim=True),
    # None overflows. Ranks sum other parts of a batch in float16, and would skip other steps than one process.
    "fits": 0.1 * X.sum(1, keepdim=True),
}


class ByEngine:
    """How a step does its parts in an engine's `training_step`."""

    def __init__(self, optimizers: Any, backward: Callable[[Tensor], None], clip: Callable[..., None]) -> None:
        self.optimizers, self.backward, self.clip = optimizers, backward, clip

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def unscale(self) -> None: ...

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def update(self) -> None: ...


class ByTorch(ByEngine):
    """The same in a plain loop, as torch's notes on automatic mixed precision say."""

    def __init__(self, optimizers: Any) -> None:
        self.scaler = torch.amp.GradScaler("cpu")

        def backward(loss: Tensor) -> None:
            self.scaler.scale(loss).backward()

        def clip(optimizer: Any, gradient_clip_val: float, gradient_clip_algorithm: str) -> None:
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], gradient_clip_val)

        super().__init__(optimizers, backward, clip)

    def unscale(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

    def step(self) -> None:
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)

    def update(self) -> None:
        self.scaler.update()


class ByHand(LightningModule):
    """Two layers, each with an optimizer, stepped after one backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(self.second(torch.tanh(self.first(x))), y)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.first, self.second)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.run(*batch, ByEngine(self.optimizers(), self.manual_backward, self.clip_gradients))

    def run(self, x: Tensor, y: Tensor, by: ByEngine) -> None:
        by.zero_grad()
        by.backward(self.loss(x, y))
        by.unscale()
        self.use_gradients(by)
        by.step()

    def use_gradients(self, by: ByEngine) -> None: ...


class ClipsByModule(ByHand):
    def use_gradients(self, by: ByEngine) -> None:
        for optimizer in by.optimizers:
            by.clip(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")


class ClipsByTorch(ByHand):
    def use_gradients(self, by: ByEngine) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)


class ClipsValues(ByHand):
    def use_gradients(self, by: ByEngine) -> None:
        nn.utils.clip_grad_value_(self.parameters(), CLIP)  # an infinity becomes a number


class Accumulates(ByHand):
    """The second backward adds to gradients that are there."""

    def run(self, x: Tensor, y: Tensor, by: ByEngine) -> None:
        by.zero_grad()
        for part in zip(x.chunk(2), y.chunk(2), strict=True):
            by.backward(self.loss(*part) / 2)
        by.unscale()
        by.step()


class StepsTwice(ByHand):
    """Each optimizer steps twice within one `training_step`."""

    def run(self, x: Tensor, y: Tensor, by: ByEngine) -> None:
        super().run(x, y, by)
        by.update()
        super().run(x, y, by)


class Fused(ByHand):
    """torch's fused optimizers unscale by themselves gradients that are not unscaled yet."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters(), 0.01, eps=1e-3, fused=True) for layer in (self.first, self.second)]


class Adds(ByHand):
    """Adds to its gradients what has the size of gradients, as weight decay and noise by hand do."""

    def use_gradients(self, by: ByEngine) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach(), alpha=0.5)


def build(kind: type[ByHand]) -> ByHand:
    torch.manual_seed(1)
    return kind()


def loader(targets: str, num_ranks: int = 1) -> DataLoader:
    return DataLoader(TensorDataset(X, Y[targets]), 8 // num_ranks)


def plain_loop(kind: type[ByHand], targets: str) -> dict[str, Tensor]:
    module = build(kind)
    by = ByTorch(module.configure_optimizers())
    for _ in range(4):
        for x, y in loader(targets):
            # A cache would keep casts of the weights from before a step.
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                module.run(x, y, by)
            by.update()
    return module.state_dict()


def train(flag: str, num_ranks: int, kind: type[ByHand], targets: str) -> tuple[dict[str, Tensor], Engine]:
    module = build(kind)
    engine = Engine(
        strategy=suffixed(flag, "fork"),
        accelerator="cpu",
        devices=num_ranks,
        precision="16-mixed",
        max_epochs=4,
        **QUIET,
    )
    engine.fit(module, loader(targets, num_ranks))
    return module.state_dict(), engine


KINDS = [ByHand, ClipsByModule, ClipsByTorch, ClipsValues, Accumulates, StepsTwice, Fused, Adds]


# Within a `training_step` the scale changes before the second step of an optimizer, not before its backward.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not StepsTwice])
def test_one_process_has_a_plain_loops_weights(kind):
    weights, engine = train("single", 1, kind, "overflows")
    assert engine.precision_plugin.scaler.get_scale() < 2**16  # steps were skipped
    assert largest_difference(weights, plain_loop(kind, "overflows")) == 0


# float16 has 11 bits: a gradient of a half batch is rounded by up to 5e-4 of its size.
@pytest.mark.parametrize(("flag", "kind"), alternating(["ddp", "zero1", "fsdp"], KINDS))
def test_ranks_have_a_plain_loops_weights(flag, kind):
    weights, _ = train(flag, 2, kind, "fits")
    assert largest_difference(weights, plain_loop(kind, "fits")) <= 2e-3


def test_a_parameter_of_two_optimizers_is_unscaled_once():
    class Shared(ByHand):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(parameters, 0.1) for parameters in (self.parameters(), self.first.parameters())]

    module = build(Shared)
    optimizers = module.configure_optimizers()
    for _ in range(4):
        for x, y in loader("fits"):
            module.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = module.loss(x, y)
            (loss * 2**16).backward()
            for parameter in module.parameters():
                parameter.grad /= 2**16
            for optimizer in optimizers:
                optimizer.step()
    weights, _ = train("single", 1, Shared, "fits")
    assert largest_difference(weights, module.state_dict()) == 0


class StepsAlone(ByHand):
    """Steps the first optimizer without gradients; as torch's scaler does, it calls the second one's `unscale_`."""

    def run(self, x: Tensor, y: Tensor, by: ByEngine) -> None:
        by.zero_grad()
        by.backward(mse_loss(self.second(torch.tanh(self.first(x).detach())), y))
        self.trainer.precision_plugin.scaler.unscale_(by.optimizers[1].optimizer)
        by.step()


def test_an_optimizer_may_step_without_gradients_and_be_unscaled_by_hand():
    weights, _ = train("single", 1, StepsAlone, "fits")
    assert torch.equal(weights["first.weight"], build(StepsAlone).first.weight)
    assert not torch.equal(weights["second.weight"], build(StepsAlone).second.weight)
