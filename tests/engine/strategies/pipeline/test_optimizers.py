"""Which optimizers a stage can step by itself is found out by trying them."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from polyphase.engine.strategies.pipeline.optimizers import check_optimizer


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
    check_optimizer(optimizer)
    assert torch.equal(torch.get_rng_state(), state)
    assert not optimizer.state
    assert all(torch.equal(p, b) for p, b in zip((p for g in groups for p in g["params"]), before, strict=True))


@pytest.mark.parametrize(("make", "name"), [(Lamb, "Lamb"), (lambda groups: SAM(groups, lr=0.1), "SAM")])
def test_what_looks_at_all_parameters_is_refused(make, name):
    with pytest.raises(ValueError, match=f"{name} steps a parameter by what it knows of others too"):
        check_optimizer(make(parameters()))


def test_lbfgs_is_refused():
    with pytest.raises(ValueError, match="LBFGS looks at all parameters as one vector"):
        check_optimizer(torch.optim.LBFGS([nn.Parameter(torch.ones(1))]))


def test_what_can_not_be_tried_out_is_said():
    with pytest.warns(UserWarning, match=r"whether Named gives the same result .* tried out \(AttributeError: .*lock"):
        check_optimizer(Named(parameters()))
