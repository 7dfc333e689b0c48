"""Modules that optimize by hand: under strategies that rewrite them, the same weights as by a plain loop."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests import pairs
from tests.engine.parity import largest_difference
from tests.engine.strategies.test_ddp_integration import QUIET

ROWS = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))


class Nets(nn.Module):
    """A generator, a discriminator of repeated blocks, and a parameter that belongs to neither."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(8))
        self.generator = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))

    def optimizers(self) -> list[torch.optim.Optimizer]:
        generators = torch.optim.Adam([*self.generator.parameters(), self.scale], lr=0.02, eps=1e-4)
        return [generators, torch.optim.SGD(self.discriminator.parameters(), lr=0.05)]


class Hands:
    """What a step works with: by the module's own methods, or in a plain loop."""

    optimizers: list[Any]
    backward: Callable[[Tensor], None]
    toggle: Callable[[Any], None]
    untoggle: Callable[[Any], None]


def real_or_not(scores: Tensor, is_real: bool) -> Tensor:
    return binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def faked(nets: Any, batch: Tensor) -> Tensor:
    return nets.generator(batch.flip(1)) * nets.scale


def alternating(nets: Any, batch: Tensor, hands: Hands) -> None:
    first, second = hands.optimizers
    hands.toggle(first)
    first.zero_grad()
    hands.backward(real_or_not(nets.discriminator(faked(nets, batch)), True))
    first.step()
    hands.untoggle(first)
    hands.toggle(second)
    second.zero_grad()
    real, fake = nets.discriminator(batch), nets.discriminator(faked(nets, batch).detach())
    hands.backward(real_or_not(real, True) + real_or_not(fake, False))
    second.step()
    hands.untoggle(second)


def frozen_by_hand(nets: Any, batch: Tensor, hands: Hands) -> None:
    """Without `toggle_optimizer`; the generator is still frozen when the next step begins."""
    first, second = hands.optimizers
    generator, discriminator = [*nets.generator.parameters(), nets.scale], [*nets.discriminator.parameters()]
    for trained, frozen, optimizer, is_real in (
        (generator, discriminator, first, True),
        (discriminator, generator, second, False),
    ):
        for parameter in (*trained, *frozen):
            parameter.requires_grad_(any(parameter is p for p in trained))
        optimizer.zero_grad()
        hands.backward(real_or_not(nets.discriminator(faked(nets, batch)), is_real))
        optimizer.step()


def toggled_later(nets: Any, batch: Tensor, hands: Hands) -> None:
    """The first step trains all parameters by one backward; the moments of both optimizers stay."""
    if torch.equal(batch[0], ROWS[0]) or torch.equal(batch[0], ROWS[1]):
        return at_once(nets, batch, hands)
    return alternating(nets, batch, hands)


def without_toggling(nets: Any, batch: Tensor, hands: Hands) -> None:
    """The discriminator's step also has the gradients that the generator's has left it."""
    first, second = hands.optimizers
    fake = faked(nets, batch)
    hands.backward(real_or_not(nets.discriminator(fake), True))
    first.step()
    first.zero_grad()
    hands.backward(real_or_not(nets.discriminator(batch), True) + real_or_not(nets.discriminator(fake.detach()), False))
    second.step()
    second.zero_grad()


def accumulating(nets: Any, batch: Tensor, hands: Hands) -> None:
    """Two backwards of each optimizer, the second discriminator's through the weights of after the generator's step."""
    first, second = hands.optimizers
    nets.generator.zero_grad()
    first.zero_grad()
    for scale in (0.25, 0.75):
        hands.backward(scale * real_or_not(nets.discriminator(faked(nets, batch)), True))
    nn.utils.clip_grad_norm_(nets.generator.parameters(), 0.01)
    first.step()
    second.zero_grad()
    for scale in (0.25, 0.75):
        hands.backward(scale * real_or_not(nets.discriminator(faked(nets, batch)), False))
    second.step()


def critic(nets: Any, batch: Tensor, hands: Hands) -> None:
    """Wasserstein: weights are clipped."""
    first, second = hands.optimizers
    second.zero_grad()
    hands.backward(nets.discriminator(faked(nets, batch)).mean() - nets.discriminator(batch).mean())
    second.step()
    with torch.no_grad():
        for parameter in nets.discriminator.parameters():
            parameter.clamp_(-0.3, 0.3)
    first.zero_grad()
    hands.backward(-nets.discriminator(faked(nets, batch)).mean())
    first.step()


def penalised_loss(nets: Any, batch: Tensor) -> Tensor:
    """Wasserstein with a gradient penalty: a backward through a backward."""
    fake = faked(nets, batch).detach()
    between = (0.5 * (batch + fake)).requires_grad_()
    scores = torch.tanh(nets.discriminator(between))
    (slope,) = torch.autograd.grad(scores.sum(), between, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return nets.discriminator(fake).mean() - nets.discriminator(batch).mean() + penalty


def penalised(nets: Any, batch: Tensor, hands: Hands) -> None:
    _, second = hands.optimizers
    second.zero_grad()
    hands.backward(penalised_loss(nets, batch))
    second.step()


class ByHand(LightningModule):
    def __init__(self, step: Callable[..., None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        nets = Nets()
        self.make_optimizers, self.step = nets.optimizers, step
        self.scale, self.generator, self.discriminator = nets.scale, nets.generator, nets.discriminator

    def training_step(self, batch, batch_idx):
        hands = Hands()
        hands.optimizers, hands.backward = self.optimizers(), self.manual_backward
        hands.toggle, hands.untoggle = self.toggle_optimizer, self.untoggle_optimizer
        self.step(self, batch, hands)

    def configure_optimizers(self):
        return Nets.optimizers(self)


def plain(step: Callable[..., None]) -> dict[str, Tensor]:
    nets, hands = Nets(), Hands()
    hands.optimizers = nets.optimizers()

    def toggle(optimizer: Any) -> None:
        mine = {p for group in optimizer.param_groups for p in group["params"]}
        for parameter in nets.parameters():
            parameter.requires_grad = parameter in mine

    hands.backward, hands.toggle = Tensor.backward, toggle
    hands.untoggle = lambda _: [parameter.requires_grad_() for parameter in nets.parameters()]
    for batch in ROWS.split(8):
        step(nets, batch, hands)
    return nets.state_dict()


STEPS = [alternating, without_toggling, accumulating, critic, penalised]


def run(strategy: str, step: Callable[..., None]) -> ByHand:
    module = ByHand(step)
    # It knows its batches by their samples, not those that the check mixes.
    check = False if step is toggled_later else "auto"
    engine = Engine(strategy=strategy, devices=2, accelerator="cpu", max_epochs=1, check_first_steps=check, **QUIET)
    engine.fit(module, DataLoader(ROWS, batch_size=4))
    return module


@pytest.mark.parametrize(
    ("strategy", "step"),
    pairs.alternating(
        ["fsdp_fork", "ddp_fork:find_unused_parameters=true", "zero1_fork:find_unused_parameters=true"], STEPS
    ),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_equals_a_plain_loop(strategy, step):
    check(strategy, step)


@pytest.mark.parametrize(
    ("strategy", "step"),
    pairs.alternating(["ddp_fork", "zero1_fork"], [alternating, frozen_by_hand, toggled_later]),
    ids=lambda value: getattr(value, "__name__", None),
)
def test_parameters_that_a_step_freezes_are_known_to_have_no_part_in_the_loss(strategy, step):
    check(strategy, step)


def test_parameters_that_a_step_freezes_are_known_in_a_warm_up():
    check("local_sgd_fork:warmup=100", alternating)


def check(strategy: str, step: Callable[..., None]) -> None:
    expected = plain(step)
    assert largest_difference(expected, Nets().state_dict()) > 1e-2
    assert largest_difference(run(strategy, step).state_dict(), expected) < 1e-6


def last(nets: Any, batch: Tensor, hands: Hands) -> None:
    """Only the last backward of the run leaves the generator out."""
    is_last = torch.equal(batch[-1], ROWS[-1]) or torch.equal(batch[-1], ROWS[-2])
    for optimizer in hands.optimizers:
        optimizer.zero_grad()
    hands.backward(real_or_not(nets.discriminator(batch if is_last else faked(nets, batch)), True))
    for optimizer in hands.optimizers:
        optimizer.step()


@pytest.mark.parametrize("strategy", ["ddp_fork", "zero1_fork"])
@pytest.mark.parametrize(("step", "unused"), [(penalised, "scale, generator"), (last, "scale")])
def test_what_an_optimizer_leaves_out_is_named_with_the_flag(strategy, step, unused):
    with pytest.raises(ProcessRaisedException, match=f"no part in the loss: {unused}.*find_unused_parameters=true"):
        run(strategy, step)


def by_backward_alone(nets: Any, batch: Tensor, hands: Hands) -> None:
    (nets.scale * batch).sum().backward()
    hands.optimizers[0].step()


def writing(nets: Any, batch: Tensor, hands: Hands) -> None:
    with torch.no_grad():
        nets.scale.clamp_(-0.3, 0.3)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (by_backward_alone, r"gradients of scale were not averaged.*self\.manual_backward\(loss\)"),
        (writing, "`training_step` wrote to scale, .* discards its copy"),
    ],
)
def test_what_fsdp_would_lose_is_refused_by_name(step, text):
    with pytest.raises(ProcessRaisedException, match=text):
        run("fsdp_fork", step)


class SteppedLater(ByHand):
    """Its optimizers step in a hook."""

    def __init__(self) -> None:
        super().__init__(later)

    def on_train_batch_end(self, *_: Any) -> None:
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


def later(nets: Any, batch: Tensor, hands: Hands) -> None:
    hands.backward(real_or_not(nets.discriminator(faked(nets, batch)), True))


def at_once(nets: Any, batch: Tensor, hands: Hands) -> None:
    later(nets, batch, hands)
    for optimizer in hands.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def test_optimizers_may_step_in_a_hook():
    module = SteppedLater()
    Engine(strategy="fsdp_fork", devices=2, accelerator="cpu", max_epochs=1, **QUIET).fit(module, DataLoader(ROWS, 4))
    assert largest_difference(module.state_dict(), plain(at_once)) < 1e-6


class Automatic(ByHand):
    def __init__(self) -> None:
        super().__init__(penalised)
        self.automatic_optimization = True
        self.generator.requires_grad_(False)
        self.scale.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        return penalised_loss(self, batch)

    def configure_optimizers(self):
        return Nets.optimizers(self)[1]


def test_gradients_of_gradients_under_automatic_optimization():
    module = Automatic()
    Engine(strategy="fsdp_fork", devices=2, accelerator="cpu", max_epochs=1, **QUIET).fit(module, DataLoader(ROWS, 4))
    assert largest_difference(module.state_dict(), plain(penalised)) < 1e-6


def test_a_gradient_of_a_gradient_is_refused_under_tp():
    with pytest.raises(ProcessRaisedException, match=r"can't give the gradient of a gradient.*such as 'fsdp'"):
        run("tp_fork", penalised)


def test_what_a_forward_gathered_is_not_kept_amid_a_step():
    with pytest.raises(ValueError, match=r"ByHand optimizes by hand.*Leave out reshard_after_forward=false"):
        run("fsdp_fork:reshard_after_forward=false", alternating)


def test_parts_that_are_gathered_when_called_are_not_one_unit():
    with pytest.raises(ValueError, match=r"ByHand optimizes by hand.*Leave out units=module"):
        run("fsdp_fork:units=module", alternating)
