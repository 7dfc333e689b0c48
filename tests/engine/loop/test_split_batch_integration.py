"""Steps that are not the mean of steps on the ranks' samples are named by default; those that are, are left alone.

A warning is an error in the workers of these tests.
"""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, IterableDataset

from tests.engine.parity import largest_difference
from tests.engine.tiny import Regression, StepsByHand, engine, rows

SEEN = {"loss": 0.0, "shown": [0.0]}
"""What some of the modules remember, each process by itself."""
INPUTS = next(iter(rows(32, batch_size=32)))


class Sum(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return 0.1 * (self.net(batch) - batch.sum(1, keepdim=True)).square().sum()


class Contrastive(Regression):
    """Its dropout draws other numbers on each rank."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        codes = dropout(torch.cat([self.net(batch), self.net(-batch)], 1), 0.1)
        return cross_entropy(codes @ codes.detach().T, torch.arange(len(codes)))


class CountsInItsMean(Regression):
    """As a language model leaves out padding."""

    gives_weight = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        counts = batch[:, 0] > 0.3
        loss = (super_loss(self, batch) * counts).sum() / counts.sum().clamp(min=1)
        return {"loss": loss, "weight": counts.sum()} if self.gives_weight else loss


class GivesItsWeight(CountsInItsMean):
    gives_weight = True


class IsNaNWithoutACount(GivesItsWeight):
    """Every second sample of the first rank counts for nothing."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        counts = ~(batch[:, None] == INPUTS[None, ::4]).all(2).any(1)
        loss = (super_loss(self, batch) * counts).sum() / counts.sum()
        return {"loss": loss, "weight": counts.sum()}


class Clamps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.05, 0.05)


class ClampsInBackward(Regression):
    """Its losses are means, and only gradients differ."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = Clamps.apply(self.net[:2](batch))
        return (self.net[2](hidden) - batch.sum(1, keepdim=True)).square().mean()


class HookOfAnActivation(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.net[:2](batch)
        hidden.register_hook(lambda gradient: gradient / (gradient.norm() + 0.1))
        return (self.net[2](hidden) - batch.sum(1, keepdim=True)).square().mean()


class RunningMean:
    def __init__(self) -> None:
        self.mean = torch.zeros(4)


class RemembersInAnObject(Regression):
    """No attribute of the module is another one, only what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = RunningMean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        centred = batch - self.seen.mean
        self.seen.mean = 0.5 * self.seen.mean + 0.5 * batch.mean(0)
        return super().training_step(centred, batch_idx)


class RemembersInAGlobal(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scale, SEEN["loss"] = 1 + SEEN["loss"], loss.item()
        SEEN["shown"].append(loss.item())
        return loss / scale


class Watches(Callback):
    largest = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.largest = float(batch.max())


class Averages(Callback):
    """Keeps what the module holds: under fsdp, shards that a rank can't compare by itself."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.means = {name: p.detach().clone() for name, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, p in pl_module.named_parameters():
            self.means[name].lerp_(p.detach(), 0.5)


class AsksACallback(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        [watches] = [c for c in self.trainer.callbacks if isinstance(c, Watches)]
        return super().training_step(batch, batch_idx) / (1 + watches.largest)


class AsksMetrics(Regression):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        scale = 1 + self.trainer.callback_metrics.get("loss", 0.0)
        self.log("loss", loss.detach())
        return loss / scale


def super_loss(module: Regression, batch: Tensor) -> Tensor:
    """The loss of each sample."""
    return (module.net(batch) - batch.sum(1, keepdim=True)).square().mean(1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork", "ps_fork"])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Sum, "the loss of step 1 is"),
        (Contrastive, "the loss of step 1 is"),
        (CountsInItsMean, "the loss of step 1 is"),
        (ClampsInBackward, "the gradient of 'net.0"),
        (HookOfAnActivation, "the gradient of 'net.0"),
    ],
)
def test_what_is_no_mean_over_samples_is_named(strategy, make, text):
    with pytest.raises(Exception, match=rf"(?s)in two parts, {text}|are not those of one process: .*{text[:8]}"):
        engine(strategy=strategy, devices=2).fit(make(), rows(32))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (RemembersInAnObject, "the attribute 'mean' of the attribute 'seen'"),
        (RemembersInAGlobal, "the global 'SEEN'"),
        (AsksACallback, "the attribute 'largest' of the callback Watches: "),
        (AsksMetrics, "`self.trainer.callback_metrics`"),
    ],
)
def test_what_a_rank_remembers_is_named(strategy, make, text):
    with pytest.raises(Exception, match=rf"the ranks train \w+ by different values of ({text})"):
        engine(strategy=strategy, devices=2, callbacks=[Watches()]).fit(make(), rows(32))


class OfTexts(Regression):
    """Its samples are texts, or records of Python's numbers: no batch has a tensor."""

    adds_up = False

    def training_step(self, batch: list[Any], batch_idx: int) -> Tensor:
        values = [item["values"] if isinstance(item, dict) else map(float, item.split()) for item in batch]
        losses = super_loss(self, torch.tensor([list(row) for row in values]))
        return losses.sum() if self.adds_up else losses.mean()


class SumOfTexts(OfTexts):
    adds_up = True


NUMBERS = INPUTS.tolist()
TEXTS = [" ".join(map(str, row)) for row in NUMBERS]
RECORDS = [{"values": row} for row in NUMBERS]


def unchanged(batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
@pytest.mark.parametrize("samples", [TEXTS, RECORDS], ids=["texts", "records"])
def test_samples_without_a_tensor_are_parts_of_a_batch(strategy, samples):
    with pytest.raises(Exception, match=r"in two parts, the loss of step 1 is|not those of one process: the loss"):
        engine(strategy=strategy, devices=2).fit(SumOfTexts(), DataLoader(samples, 4, collate_fn=unchanged))
    engine(strategy=strategy, devices=2).fit(OfTexts(), DataLoader(samples, 4, collate_fn=unchanged))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("samples", [TEXTS, RECORDS], ids=["texts", "records"])
@pytest.mark.parametrize(("strategy", "size"), [("ddp_fork", 4), ("pp_fork", 8)])
def test_samples_without_a_tensor_train_as_in_one_process(strategy, size, samples):
    alone, together = Blocks(), Blocks()
    engine().fit(alone, DataLoader(samples, 8, collate_fn=unchanged))
    engine(strategy=strategy, devices=2).fit(together, DataLoader(samples, size, collate_fn=unchanged))
    assert largest_difference(alone.state_dict(), together.state_dict()) <= 1e-6


class Blocks(OfTexts):
    """With blocks, for the stages of a pipeline."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)), nn.Linear(4, 1))


class Draws(Regression):
    """Draws in many ways, has a BatchNorm and a teacher, and keeps what it shows: its loss is a mean all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.num_steps = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            for mean, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mean.lerp_(parameter, 0.5)
        self.num_steps += 1
        SEEN["shown"].append(float(batch.sum()))
        values = self.norm(batch) + 0.1 * torch.randn_like(batch) + torch.rand(len(batch), 1)
        values = values[torch.randperm(len(values))] * torch.empty_like(values).uniform_(0.5, 1.5)
        values = values + self.attention(values[:, None], values[:, None], values[:, None])[0][:, 0]
        times = torch.randint(1, 5, (len(batch),)) * (1 + torch.bernoulli(torch.full((len(batch),), 0.5)))
        values = dropout(values, 0.3) * times[:, None] * self.num_steps
        return (self.net(values) - self.teacher(values) - batch.sum(1, keepdim=True)).square().mean() * 0.01


class Stream(IterableDataset):
    shards_itself = True

    def __iter__(self):
        yield from torch.randn(32, 4, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_means_over_samples_are_left_alone(strategy):
    for module, loader in [(Draws(), rows(32)), (Regression(), DataLoader(Stream(), batch_size=4))]:
        callbacks = [Watches(), Averages()]
        engine(strategy=strategy, devices=2, callbacks=callbacks, gradient_clip_val=0.1).fit(module, loader)


@pytest.mark.timeout(60)
def test_a_part_that_counts_for_nothing_is_left_alone():
    engine(strategy="ddp_fork", devices=2).fit(IsNaNWithoutACount(), rows(32))


@pytest.mark.timeout(60)
def test_a_sum_in_a_stream_is_named():
    with pytest.raises(Exception, match="in two parts, the loss of step 1 is"):
        engine(strategy="ddp_fork", devices=2).fit(Sum(), DataLoader(Stream(), batch_size=4))


@pytest.mark.timeout(60)
def test_a_mean_over_counts_with_its_weight_is_that_of_one_process():
    alone, together = GivesItsWeight(), GivesItsWeight()
    engine().fit(alone, rows(32, batch_size=8))
    engine(strategy="ddp_fork", devices=2).fit(together, rows(32))
    assert largest_difference(alone.state_dict(), together.state_dict()) <= 1e-6


@pytest.mark.timeout(60)
def test_the_run_is_the_same_bit_for_bit():
    found = []
    for check in ("auto", False):
        torch.manual_seed(5)
        module = Draws()
        engine(strategy="ddp_fork", devices=2, check_first_steps=check).fit(module, rows(32))
        found.append(module.state_dict())
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


class SumByHand(StepsByHand, Sum):
    pass


class ClampsByHand(StepsByHand, ClampsInBackward):
    pass


class GAN(Regression):
    """Clips by hand, draws noise, and clamps weights after its step: a mean all the same."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(4, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        of_critic, of_net = self.optimizers()
        made = self.net[0](torch.randn_like(batch))[:, :4]
        self.toggle_optimizer(of_critic)
        of_critic.zero_grad()
        self.manual_backward(self.critic(made.detach()).mean() - self.critic(batch).mean())
        nn.utils.clip_grad_norm_(self.critic.parameters(), 0.01)
        of_critic.step()
        with torch.no_grad():
            self.critic.weight.clamp_(-0.3, 0.3)
        self.untoggle_optimizer(of_critic)
        self.toggle_optimizer(of_net)
        of_net.zero_grad()
        self.manual_backward(-self.critic(self.net[0](torch.randn_like(batch))[:, :4]).mean())
        of_net.step()
        self.untoggle_optimizer(of_net)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.critic, self.net[0])]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("make", "name"), [(SumByHand, "net.0"), (ClampsByHand, "net.0")])
def test_the_gradients_of_a_backward_by_hand_are_named(make, name):
    with pytest.raises(Exception, match=rf"in two parts, the gradient of '{name}\.\w+ \(update 1\)' in step 1"):
        engine(strategy="ddp_fork", devices=2).fit(make(), rows(32))


@pytest.mark.timeout(60)
def test_several_backwards_by_hand_are_left_alone():
    module = GAN()
    for part in (module.net[1], module.net[2]):
        part.requires_grad_(False)
    engine(strategy="ddp_fork", devices=2).fit(module, rows(32))
