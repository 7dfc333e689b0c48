"""Which optimizers step each parameter by itself is found out by trying them."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from polyphase.engine.strategies.optimizer_trial import habits_of
from tests.zoo.model import Model
from tests.zoo.plain import rows
from tests.zoo.run import run
from tests.zoo.unusual import Blocks


class Lamb(torch.optim.Optimizer):
    """As timm's: gradients are divided by their norm over all parameters, then a layer-wise trust ratio."""

    def __init__(self, params, lr=1e-2, max_grad_norm=1.0):
        super().__init__(params, {"lr": lr, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        known = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in known]).norm()
        for group in self.param_groups:
            limit = group["max_grad_norm"]
            scale = 1.0 if limit is None else 1 / torch.clamp(norm / limit, min=1.0)
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad * scale, 0.1)
                    p.add_(average, alpha=-group["lr"] * float(p.norm() / average.norm().clamp(min=1e-6)))


class SAM(torch.optim.Optimizer):
    """Two gradients a step, the second one at a point in the direction of the first, over all parameters."""

    def __init__(self, params, **kwargs):
        super().__init__(params, kwargs)
        self.base = torch.optim.SGD(self.param_groups, **kwargs)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        known = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in known]).norm()
        moves = [p.grad / norm for p in known]
        for p, move in zip(known, moves, strict=True):
            p.add_(move)
        with torch.enable_grad():
            closure()
        for p, move in zip(known, moves, strict=True):
            p.sub_(move)
        self.base.step()


class Lion(torch.optim.Optimizer):
    """Each parameter by itself, by the sign of an average; and noise, as in Langevin dynamics."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.add_(torch.sign(average.lerp_(p.grad, 0.1)), alpha=-group["lr"])
                    if p.grad.numel() > 1:
                        p.add_(torch.randn_like(p), alpha=1e-3)


class Named(Lion):
    def step(self, closure=None):
        self.lock = type(self).lock
        super().step(closure)


def parameters():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(8, 300))
    return [{"params": [p for p in net.parameters() if (p.dim() > 1) == is_matrix]} for is_matrix in (True, False)]


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        Lion,
        lambda groups: Lamb(groups, max_grad_norm=None),
        lambda groups: Lion([{"params": [groups[0]["params"][0]]}]),
    ],
)
def test_what_steps_each_parameter_by_itself_is_allowed_and_left_as_it_was(make):
    groups = parameters()
    before = [p.detach().clone() for group in groups for p in group["params"]]
    optimizer = make(groups)
    LambdaLR(optimizer, lambda step: 1.0)
    optimizer.register_step_post_hook(lambda *args: pytest.fail("another's hook was called"))
    state = torch.get_rng_state()
    habits = habits_of(optimizer)
    assert not habits.of_others_or_state
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip((p for g in groups for p in g["params"]), before, strict=True))


class Scaled(torch.optim.Optimizer):
    """Gradient descent, with `scale(p)`, which subclasses take from other parameters now and then."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * self.scale(group, p), alpha=-group["lr"])

    def norm(self, belongs=lambda p: True, groups=slice(None)):
        parameters = [p for group in self.param_groups[groups] for p in group["params"] if p.grad is not None]
        return torch.stack([p.grad.norm() if belongs(p) else torch.zeros((), dtype=p.dtype) for p in parameters]).norm()


class NormOfMatrices(Scaled):
    def scale(self, group, p):
        return 1.0 if p.dim() < 2 else 1 / self.norm(lambda p: p.dim() > 1)


class NormInTheLastGroup(Scaled):
    def scale(self, group, p):
        return 1 / self.norm(groups=slice(-1, None)) if group is self.param_groups[-1] else 1.0


class NormFromStep30(Scaled):
    def scale(self, group, p):
        return 1.0 if self.num_steps < 30 else 1 / self.norm()


class NormOfLargeOnes(Scaled):
    def scale(self, group, p):
        return 1.0 if p.numel() <= 3000 else 1 / self.norm(lambda p: p.numel() > 3000)


class ClipsSeldom(Scaled):
    def scale(self, group, p):
        return min(1.0, 200.0 / float(self.norm()))


class ByTheNumberOfGradients(Scaled):
    def scale(self, group, p):
        return 1 / sum(p.grad is not None for group in self.param_groups for p in group["params"])


class ByTheValuesOfOthers(Scaled):
    def scale(self, group, p):
        return 1 / sum(float(p.abs().max()) for group in self.param_groups for p in group["params"])


class InPairs(Scaled):
    def scale(self, group, p):
        both = group["params"]
        place = next(i for i, other in enumerate(both) if other is p) ^ 1
        return 1.0 if place >= len(both) or both[place].grad is None else both[place].grad.norm()


class BeginsAtZero(Lamb):
    def __init__(self, params):
        super().__init__(params)
        LambdaLR(self, lambda step: step / 10)


def three_groups(width):
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    parameters = list(net.parameters())
    return [{"params": parameters[:2][::-1]}, {"params": parameters[2:4]}, {"params": parameters[4:]}]


READERS = (NormOfMatrices, NormInTheLastGroup, NormFromStep30, NormOfLargeOnes, ClipsSeldom)
READERS += (ByTheNumberOfGradients, ByTheValuesOfOthers, InPairs, BeginsAtZero)


@pytest.mark.parametrize("width", [8, 300])
@pytest.mark.parametrize("make", READERS)
def test_what_reads_other_parameters_now_and_then_is_seen(make, width):
    if (make, width) == (NormOfLargeOnes, 8):
        width = 60
    assert "steps a parameter by what it knows of others too" in habits_of(make(three_groups(width))).of_others


class NormAfterWarmUp(Scaled):
    """Counts in its own attribute, long after any trial of single steps has ended."""

    def scale(self, group, p):
        return 1.0 if self.num_steps < 5000 else 1 / self.norm()


class NormAtIntervals(Scaled):
    """Counts in a tensor of each parameter's state, as Adam does."""

    def scale(self, group, p):
        count = self.state[p].setdefault("step", torch.zeros(()))
        count += 1
        return 1.0 if count % 500 else 1 / self.norm()


class NormByGroupCount(Scaled):
    def scale(self, group, p):
        if p is group["params"][0]:
            group["count"] = group.get("count", 0) + 1
        return 1.0 if group["count"] < 200 else 1 / self.norm()


class SkipsWhatIsNotFinite(Scaled):
    def scale(self, group, p):
        return 1.0 if self.norm().isfinite() else 0.0


class NormOfMarkedOnes(Scaled):
    """Goes by an attribute that its user has given to some parameters."""

    def __init__(self, params):
        super().__init__(params)
        for group in self.param_groups:
            group["params"][-1].is_last = True

    def scale(self, group, p):
        return 1 / self.norm(lambda p: hasattr(p, "is_last")) if hasattr(p, "is_last") else 1.0


LATE_READERS = (NormAfterWarmUp, NormAtIntervals, NormByGroupCount, SkipsWhatIsNotFinite, NormOfMarkedOnes)


@pytest.mark.parametrize("width", [8, 300])
@pytest.mark.parametrize("make", LATE_READERS)
def test_what_reads_others_late_or_by_what_parameters_are_is_seen(make, width):
    assert "steps a parameter by what it knows of others too" in habits_of(make(three_groups(width))).of_others


class NormOfVeryLargeOnes(Scaled):
    def scale(self, group, p):
        return 1.0 if p.numel() <= 10**6 else 1 / self.norm(lambda p: p.numel() > 10**6)


def test_what_reads_others_of_a_million_values_is_seen():
    assert "by what it knows of others too" in habits_of(NormOfVeryLargeOnes(three_groups(1100))).of_others


class Extrapolates(Scaled):
    """Each parameter by its own gradient, but at the place where all have been moved to, as SAM without its norm."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        known = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in known]
        for p in known:
            p.add_(p.grad, alpha=0.01)
        with torch.enable_grad():
            closure()
        for p, value in zip(known, before, strict=True):
            p.copy_(value - 0.05 * p.grad)


def test_what_has_gradients_computed_at_other_weights_needs_all_parameters():
    habits = habits_of(Extrapolates(three_groups(8)))
    assert not habits.of_others  # each stage of a pipeline moves its own
    assert habits.of_others_or_state == (
        "Extrapolates changes all parameters within a step, and then computes gradients there"
    )


class CountsOften(Scaled):
    """Each parameter by itself, by numbers that look like counters: a bias correction, a list of its steps."""

    def __init__(self, params):
        super().__init__(params)
        self.history = []

    def scale(self, group, p):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        self.history.append(state["step"])
        return 1 / (1 - 0.9 ** state["step"]) + 1 / len(self.history[-1:])


@pytest.mark.parametrize("width", [8, 300])
def test_counters_of_parameters_that_are_stepped_alone_are_no_others(width):
    assert not habits_of(CountsOften(three_groups(width))).of_others_or_state


class Averages(Scaled):
    """Keeps averages of the weights, as schedule-free optimizers do, and those with an exponential moving average."""

    def scale(self, group, p):
        self.state[p].setdefault("average", p.detach().clone()).lerp_(p, 0.1)
        return 1.0

    @torch.no_grad()
    def eval(self):
        for p, state in self.state.items():
            p.copy_(state["average"])


class AveragesInContext(Averages):
    eval = None

    @contextlib.contextmanager
    def averaged(self):
        weights = {p: p.detach().clone() for p in self.state}
        with torch.no_grad():
            for p, state in self.state.items():
                p.copy_(state["average"])
            yield
            for p, weight in weights.items():
                p.copy_(weight)


@pytest.mark.parametrize(("make", "method"), [(Averages, "eval"), (AveragesInContext, "averaged")])
def test_what_changes_weights_outside_of_a_step_is_seen(make, method):
    habits = habits_of(make(three_groups(8)))
    assert not habits.of_others
    assert habits.of_others_or_state == (
        f"{make.__name__}.{method}() changes parameters by the optimizer's state, outside of step()"
    )


def with_another_step(groups):
    optimizer = torch.optim.SGD(groups, 0.1)
    optimizer.step = lambda closure=None: pytest.fail("the user's function was called on the user's parameters")
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Lamb, "Lamb steps a parameter by what it knows of others too"),
        (lambda groups: SAM(groups, lr=0.1), "SAM steps a parameter by what it knows of others too"),
        (lambda groups: torch.optim.LBFGS(groups[0]["params"]), "LBFGS steps a parameter by what it knows of others"),
        (Named, r"whether Named steps each parameter by itself could not be tried out \(AttributeError: .*lock"),
        (with_another_step, r"whether SGD .* could not be tried out \(its `step` was replaced by a function"),
    ],
)
def test_what_looks_at_all_parameters_or_can_not_be_tried_out_is_said(make, reason):
    assert re.match(reason, habits_of(make(parameters())).of_others)


class Shares(Scaled):
    """Each rank steps every W-th parameter, and all send each other what they have, as some of Muon's do."""

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            closure()
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for index, p in enumerate(p for group in self.param_groups for p in group["params"]):
            if index % world_size == rank:
                p.add_(torch.zeros_like(p) if p.grad is None else p.grad, alpha=-0.05)
            if world_size > 1:
                dist.broadcast(p, src=index % world_size)


class WithShares(Blocks):
    def configure_optimizers(self):
        return Shares(self.parameters())


@pytest.mark.parametrize("strategy", ["zero1", "pp"])
def test_an_optimizer_that_communicates_is_not_divided(strategy):
    found = run(Model(WithShares, rows()), strategy)  # of zero1 a warning, which these tests make an error
    assert "Shares communicates with other ranks in its step, each of which has to have all" in found.detail, found


@pytest.mark.filterwarnings("ignore:strategy 'zero1_fork'. Shares communicates")
def test_the_step_of_one_that_communicates_is_that_of_ddp():
    assert run(Model(WithShares, rows()), "zero1").kind == "equal"


class NormedByAHook(Blocks):
    """A hook before the step that is registered last of all divides by one norm of all gradients."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 0:
            optimizer = self.optimizers()
            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(self.divided)

    @staticmethod
    def divided(optimizer, args, kwargs):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient.div_(norm)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def test_a_late_hook_before_the_step_sees_all_gradients():
    assert run(Model(NormedByAHook, rows()), "zero1").kind == "equal"
