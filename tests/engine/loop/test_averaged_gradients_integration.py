"""Gradients that an optimizer uses are those of all ranks, however they came about; or the run is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.engine.parity import QUIET, TOLERANCE, largest_difference
from tests.pairs import alternating

BATCH = 8
NOT_AVERAGED = r"the gradients of net\.0\.weight and 3 more were not averaged over the ranks, which would train apart"

NO_OPTIMIZER = pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")


def data(num_ranks: int) -> DataLoader:
    samples = torch.randn(32, 6, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(samples, torch.arange(32) % 3), BATCH // num_ranks)


class Net(LightningModule):
    """Trains as `step` says, with the mean of a gradient over ranks as `mean` has it: itself, in a plain loop."""

    mean: Callable[[Tensor], Tensor] = staticmethod(lambda gradient: gradient)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


class ByHand(Net):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.set_gradients(batch, batch_idx)
        optimizer.step()

    def set_gradients(self, batch: Any, batch_idx: int) -> None:
        raise NotImplementedError


class Differentiates(ByHand):
    def set_gradients(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            p.grad = self.mean(gradient)


class ClipsEachSample(ByHand):
    """As differentially private training does."""

    def set_gradients(self, batch: Any, batch_idx: int) -> None:
        def loss(parameters: dict[str, Tensor], sample: Tensor, target: Tensor) -> Tensor:
            return cross_entropy(functional_call(self.net, parameters, (sample[None],)), target[None])

        named = dict(self.net.named_parameters())
        by_sample = vmap(grad(loss), (None, 0, 0))({name: p.detach() for name, p in named.items()}, *batch)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in by_sample.values()]).norm(dim=0)
        scale = (0.5 / norms).clamp(max=1)
        for name, p in named.items():
            p.grad = self.mean((by_sample[name] * scale.view(-1, *[1] * p.dim())).mean(0))


class Masks(ByHand):
    """Replaces averages by what each rank computes from them alike."""

    def set_gradients(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        for p in self.parameters():
            p.grad.mul_(0.5)
            p.grad = p.grad * (p.grad.abs() > p.grad.abs().mean())


class Automatic(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch = batch
        return self.loss(batch)


class AddsAfterBackward(Automatic):
    """In place, so that the gradients are still in the buckets."""

    def on_after_backward(self) -> None:
        (0.1 * self.loss(self.batch)).backward()


class ReplacesBeforeStep(Automatic):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = list(self.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(self.loss(self.batch), parameters), strict=True):
            p.grad = self.mean(gradient)


class ReplacesLater(ReplacesBeforeStep):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step >= 3:
            super().on_before_optimizer_step(optimizer)


class MasksInHook(Automatic):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad = p.grad * (p.grad.abs() > p.grad.abs().mean())


class StepsInBackward(Automatic):
    """Each weight is stepped as soon as its gradient is there, by an optimizer of its own."""

    def configure_optimizers(self) -> None:
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self.step_of(torch.optim.SGD([p], 0.1)))

    def step_of(self, optimizer: Any) -> Callable[[Tensor], None]:
        def step(p: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return step


class UpdatesInBackward(StepsInBackward):
    """And without an optimizer of torch."""

    def step_of(self, optimizer: Any) -> Callable[[Tensor], None]:
        def step(p: Tensor) -> None:
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None

        return step


IN_BACKWARD = [StepsInBackward, UpdatesInBackward]


def train(kind: type[Net], flag: str, mean: Any = None) -> dict[str, Tensor]:
    module = kind()
    engine = Engine(strategy=flag, accelerator="cpu", devices=2, max_epochs=1, **QUIET)
    if mean is not None:
        module.mean = lambda gradient: engine.strategy.reduce(gradient)
    engine.fit(module, data(engine.data_size))
    return module.state_dict()


def plain_loop(kind: type[Net]) -> dict[str, Tensor]:
    module = kind()
    optimizer = module.configure_optimizers()
    module.optimizers, module.manual_backward = lambda: optimizer, Tensor.backward  # type: ignore[method-assign]
    for index, batch in enumerate(data(1)):
        if not module.automatic_optimization:
            module.training_step(batch, index)
            continue
        optimizer.zero_grad()
        module.training_step(batch, index).backward()
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
    return module.state_dict()


@pytest.mark.parametrize(
    ("flag", "kind"),
    alternating(
        ["ddp_fork", "zero1_fork", "ddp_fork:gradient_as_bucket_view=false", "local_sgd_fork:warmup=100"],
        [Differentiates, ClipsEachSample, AddsAfterBackward, ReplacesBeforeStep],
    ),
)
def test_gradients_of_one_rank_are_refused(flag, kind):
    with pytest.raises(Exception, match=NOT_AVERAGED):
        train(kind, flag)


class RenormsRows(Automatic):
    """The forward writes into its weight: it rescales the row that this rank's first sample uses."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(3, 12, max_norm=1), nn.Linear(12, 3))

    def loss(self, batch: Any) -> Tensor:
        return cross_entropy(self.net(batch[1][:1]), batch[1][:1])


@pytest.mark.parametrize("flag", ["ddp_fork", "zero1_fork"])
def test_weights_that_a_rank_has_changed_by_itself_are_refused(flag):
    with pytest.raises(Exception, match=r"the ranks have different weights of net\.0\.weight before step 1"):
        train(RenormsRows, flag)


def test_gradients_of_one_rank_are_refused_in_later_steps():
    with pytest.raises(Exception, match=NOT_AVERAGED):
        train(ReplacesLater, "ddp_fork")


@NO_OPTIMIZER
@pytest.mark.parametrize(
    ("flag", "kind"), [("ddp_fork", kind) for kind in IN_BACKWARD] + [("zero1_fork", StepsInBackward)]
)
def test_steps_in_hooks_of_parameters_have_averaged_gradients(flag, kind):
    weights = {name: p.detach().clone() for name, p in kind().named_parameters()}
    module = kind()
    module.configure_optimizers()
    for index, batch in enumerate(data(1)):
        module.training_step(batch, index).backward()
    found = train(kind, flag)
    assert largest_difference(found, module.state_dict()) <= TOLERANCE
    assert largest_difference(found, weights) > 1e-3


@pytest.mark.parametrize(
    ("flag", "kind"),
    alternating(
        ["ddp_fork", "zero1_fork", "ddp_fork:gradient_as_bucket_view=false"],
        [Differentiates, ClipsEachSample, ReplacesLater],
    ),
)
def test_what_the_user_has_averaged_is_right(flag, kind):
    assert largest_difference(train(kind, flag, mean=True), plain_loop(kind)) <= 1e-6


@pytest.mark.parametrize(
    ("flag", "kind"),
    alternating(["ddp_fork", "zero1_fork", "fsdp_fork"], [Masks, MasksInHook]),
)
def test_what_each_rank_computes_from_averages_is_right(flag, kind):
    assert largest_difference(train(kind, flag), plain_loop(kind)) <= 1e-6


class SkipsUnused(ByHand):
    """Takes only the gradients that are there."""

    def set_gradients(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        gradients = torch.autograd.grad(self.loss(batch), parameters, allow_unused=True)
        for p, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                p.grad = gradient


class Adapts(Net):
    """MAML: the weights are adapted to each sample, and then trained by the loss of the adapted ones."""

    is_second_order = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = []
        for sample, target in zip(*batch, strict=True):
            named = {name: p.clone() for name, p in self.net.named_parameters()}

            def loss(weights: dict[str, Tensor], sample: Tensor = sample, target: Tensor = target) -> Tensor:
                return cross_entropy(functional_call(self.net, weights, (sample[None],)), target[None])

            gradients = torch.autograd.grad(loss(named), list(named.values()), create_graph=self.is_second_order)
            adapted = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
            losses.append(loss(adapted, sample=sample.flip(0)))
        return torch.stack(losses).mean()


class AdaptsToFirstOrder(Adapts):
    is_second_order = False


class AdaptsByHand(AdaptsToFirstOrder):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize(
    ("flag", "kind", "text"),
    [
        ("fsdp_fork", ClipsEachSample, r"has replaced '.*' for a call, as `torch.func.functional_call` does"),
        ("fsdp_fork", AdaptsByHand, r"has replaced '.*' for a call.* meta learning \(MAML\)"),
        ("fsdp_fork", Differentiates, r"`torch.autograd.grad` has no gradient for parameters of a block"),
        ("fsdp_fork", SkipsUnused, r"SGD steps without any gradient: each rank has shards.*manual_backward\(loss\)"),
        ("tp_fork", ClipsEachSample, r"under 'tp_fork' `torch.func` .* can't transform the collectives of a layer"),
        ("tp_fork", Adapts, r"can't give the gradient of a gradient.*such as 'fsdp'"),
    ],
)
def test_gradients_that_shards_can_not_have_are_refused(flag, kind, text):
    with pytest.raises(Exception, match=text):
        train(kind, flag)


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ("ddp_fork", Adapts),
        ("ddp_fork", AdaptsByHand),
        ("fsdp_fork", Adapts),  # without repeated blocks everything is whole during a step
        ("tp_fork", AdaptsToFirstOrder),
        ("tp_fork", Differentiates),
        ("tp_fork", SkipsUnused),
    ],
)
def test_gradients_within_a_step_are_right(flag, kind):
    assert largest_difference(train(kind, flag), plain_loop(kind)) <= 1e-6
