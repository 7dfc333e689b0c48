"""Writes of a step, and of hooks, into parameters: as in one process, or refused by the parameter's name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.strategies.test_parameters_integration import (
    BATCH,
    Block,
    Net,
    assert_equal,
    batches,
    fit,
    in_process,
)

ONE = "pp_fork:microbatches=1,schedule=gpipe"


class Writes(Block):
    late = True
    """Whether the batch is not one of the first two."""

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return super().forward(x)

    def write(self, x: Tensor) -> None:
        pass


class Bounds(Writes):
    def write(self, x: Tensor) -> None:
        self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 0.5)
        self.down.weight.data.clamp_(-0.1, 0.1)


class BoundsInPlace(Writes):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        self.up.weight.renorm_(2, 0, 0.5)


class Shrinks(Writes):
    def write(self, x: Tensor) -> None:
        self.up.weight.data = self.up.weight.data * 0.9


class ShrinksLate(Writes):
    def write(self, x: Tensor) -> None:
        if self.late:
            self.up.weight.data.mul_(0.9)


class ShrinksLateInPlace(Writes):
    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        if self.late:
            self.up.weight.mul_(0.9)


class Initialises(Writes):
    """Its parameter itself says whether it has been."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        if not self.scale.any():
            self.scale.data.copy_(1 / (1 + x.detach().std(0)))
        return self.scale * super().forward(x)


class Replaces(Writes):
    def write(self, x: Tensor) -> None:
        self.up.weight = nn.Parameter(self.up.weight.detach() * 0.9)


class ReplacesLate(Writes):
    def write(self, x: Tensor) -> None:
        if self.late:
            self.up.weight = nn.Parameter(self.up.weight.detach() * 0.9)


class ReplacesInTheTable(Writes):
    def write(self, x: Tensor) -> None:
        self.up._parameters["weight"] = nn.Parameter(self.up.weight.detach())


class ReplacesInAHook(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_pre_hook(lambda up, args: setattr(up, "weight", nn.Parameter(up.weight.detach())))


class GrowsLate(Writes):
    def write(self, x: Tensor) -> None:
        if self.late and not hasattr(self, "more"):
            self.more = nn.Linear(16, 16)


class Own(Net):
    """Blocks of a class; `after` writes behind them, where another stage runs."""

    def __init__(self, kind: type[Block], after: bool = False) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(4))
        self.after = after

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            vars(block)["late"] = batch_idx >= 2  # no attribute that the guard of attributes knows
        loss = super().training_step(batch, batch_idx)
        if self.after:
            self.blocks[0].up.weight.data.copy_(self.blocks[0].up.weight.data.clamp(-0.1, 0.1))
        return loss


@pytest.mark.parametrize(
    ("strategy", "kind"), [("pp_fork", Bounds), (ONE, Bounds), (ONE, BoundsInPlace), (ONE, Shrinks), (ONE, Initialises)]
)
def test_writes_are_those_of_one_process(strategy, kind):
    """With one micro-batch nothing is left of the trial run."""
    assert_equal(fit(Own(kind), strategy), in_process(Own(kind)))


@pytest.mark.parametrize(
    ("strategy", "kind", "message"),
    [
        (
            "pp_fork",
            BoundsInPlace,
            "writes in place into the parameter 'blocks.*.up.weight', whose values the backward",
        ),
        ("pp_fork", Shrinks, "the parameter 'blocks.*.up.weight' is changed by each micro-batch"),
        ("pp_fork", ShrinksLate, "the parameter 'blocks.*.up.weight' is changed by each micro-batch"),
        ("pp_fork", ShrinksLateInPlace, "the parameter 'blocks.*.up.weight' is changed by each micro-batch"),
        ("pp_fork", Initialises, "the parameter 'blocks.*.scale' is changed by each micro-batch"),
        (ONE, Replaces, "in write: .* assigns another parameter to 'blocks.*.up.weight' within the step"),
        ("pp_fork", ReplacesLate, "in write: .* assigns another parameter to 'blocks.*.up.weight' within the step"),
        ("pp_fork", ReplacesInTheTable, "the step assigns another parameter to 'blocks.*.up.weight'"),
        ("pp_fork", ReplacesInAHook, "in <lambda>: .* assigns another parameter to 'blocks.*.up.weight'"),
        ("pp_fork", GrowsLate, "in write: .* assigns another parameter to 'blocks.*.more.weight' within the step"),
        ("pp+fsdp_fork", Bounds, "a forward writes into 'blocks.*.up.weight', and this rank has a shard"),
    ],
)
def test_other_writes_are_refused_by_name(strategy, kind, message):
    with pytest.raises(Exception, match=message):
        fit(Own(kind), strategy)


def test_a_write_where_another_stage_runs_is_refused():
    with pytest.raises(Exception, match=r"the parameter 'blocks.0.up.weight' of Linear is written by `training_step`"):
        fit(Own(Block, after=True), "pp_fork")


class InHooks(Net):
    """Changes each parameter and gradient by itself, on all stages alike."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.clamp_(-1e-2, 1e-2)
        for block in self.blocks:
            gradient = block.up.weight.grad
            block.up.weight.grad = gradient - gradient.mean(1, keepdim=True)
            block.down.weight.grad[::2] = 0

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for block in self.blocks:
            block.up.weight.data = torch.renorm(block.up.weight.data, 2, 0, 0.5)
            norm = block.down.weight.norm(dim=1, keepdim=True)
            block.down.weight.mul_(norm.clamp(max=0.4) / norm)
            block.up.weight[::3] = 0
            nn.init.zeros_(block.up.bias)
        for p in self.parameters():
            p.mul_(torch.arange(p.numel()).view(p.shape) % 5 > 0)
            p.clamp_(-0.2, 0.2)


def test_hooks_that_change_each_parameter_by_itself_do_so_on_each_stage():
    torch.manual_seed(1)
    net = InHooks()
    torch.manual_seed(1)
    expected = InHooks()
    optimizer = expected.configure_optimizers()
    for index, batch in enumerate(batches(BATCH)):
        optimizer.zero_grad()
        expected.training_step(batch, index).backward()
        expected.on_before_optimizer_step(optimizer)
        optimizer.step()
        expected.on_train_batch_end(None, batch, index)
    assert_equal(fit(net, "pp_fork"), expected.state_dict())


class LogsANorm(Net):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("norm", self.blocks[0].up.weight.norm())


class HooksInStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.out.weight.register_hook(lambda gradient: gradient * 0.5)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LogsANorm, "in on_train_batch_end: .* needs the values of 'blocks.0.up.weight', which another pipeline stage"),
        (HooksInStep, "a hook of 'out.weight' is registered within backward, or a step of a pipeline"),
    ],
)
def test_hooks_that_need_more_are_refused_by_name(kind, message):
    with pytest.raises(Exception, match=message):
        fit(kind(), "pp_fork")


class BetweenPasses(Net):
    """Writes between forward and backward; in one process the values of the forward do not change."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.blocks[0].up.weight.data.mul_(0.5)


class BeforeBackward(Net):
    def on_before_backward(self, loss: Tensor) -> None:
        self.out.weight.data = self.out.weight.data.clamp(-0.1, 0.1)


class LateBetweenPasses(Net):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()
        if batch_idx == 2:
            self.blocks[3].up.weight.data.mul_(0.5)


class Averages(Net):
    """Updates an average of its weights, which no step uses, in the usual hook."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(16, 4).requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for average, p in zip(self.average.parameters(), self.out.parameters(), strict=True):
            average.data.lerp_(p.data, 0.5)


@pytest.mark.parametrize("strategy", ["pp_fork", "pp+fsdp_fork"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (BetweenPasses, r"blocks\.0\.up\.weight"),
        (BeforeBackward, r"out\.weight"),
        (LateBetweenPasses, r"blocks\.3\.up\.weight"),
    ],
)
def test_hooks_that_write_between_forward_and_backward_are_refused(strategy, kind, name):
    written = f"a hook writes into the parameter '{name}', or freezes"
    with pytest.raises(Exception, match=f"{written}|`p.data = values` in on_before_backward"):
        fit(kind(), strategy)


def test_an_average_that_no_step_uses_may_be_written_there():
    torch.manual_seed(1)
    expected = Averages()
    optimizer = expected.configure_optimizers()
    for index, batch in enumerate(batches(BATCH)):
        loss = expected.training_step(batch, index)
        expected.on_before_zero_grad(optimizer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.manual_seed(1)
    assert_equal(fit(Averages(), "pp_fork"), expected.state_dict())


class Late(Block):
    """Keeps a mean of what it has seen, and uses it from some batch on; it does not use it in the batches before."""

    memory: Any = None
    first_write, first_read = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        batch_idx = vars(self)["batch_idx"]
        if batch_idx >= self.first_read and self.memory is not None:
            y = y + self.memory
        if batch_idx >= self.first_write:
            self.memory = y.detach().mean()
        return y


class WritesLate(Late):
    first_write = first_read = 2


class ReadsLate(Late):
    first_read = 3


class Batches(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for block in self.blocks:
            vars(block)["batch_idx"] = batch_idx  # no attribute that is written: the same number in a batch
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [WritesLate, ReadsLate])
def test_state_that_micro_batches_use_in_a_late_batch_is_refused(kind):
    with pytest.raises(Exception, match=r"the attribute 'blocks\.\d\.memory' is changed by each micro-batch"):
        fit(Batches(kind), "pp_fork")
