"""What a program attaches to its parameters, and where it keeps them, has the effect that it has in one process."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine import Engine
from tests.engine.parity import TOLERANCE
from tests.engine.tiny import QUIET

BATCH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(LightningModule):
    """Blocks and an output layer; `groups` gives the slow parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.out = nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.out(x), classes)

    def is_slow(self, parameter: Tensor) -> bool:
        return False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        slow = [p for p in self.parameters() if self.is_slow(p)]
        rest = [p for p in self.parameters() if not self.is_slow(p)]
        return torch.optim.SGD([{"params": rest}, {"params": slow, "lr": 0.01}], lr=0.5)


def masks(module: Net) -> None:
    rows = (torch.arange(32) % 3 > 0).float()[:, None]
    for block in module.blocks:
        block.up.weight.register_hook(lambda gradient: gradient * rows)


def clamps(module: Net) -> None:
    """Hooks that are not linear: of a part, or of one rank's gradient, they would have another result."""
    for block in module.blocks:
        block.up.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        block.down.weight.register_hook(lambda gradient: 0.1 * gradient / (gradient.norm() + 1e-3))
    module.out.bias.register_hook(torch.sign)


def in_place(module: Net) -> None:
    def zero(gradient: Tensor) -> None:
        gradient[::2] = 0

    for block in module.blocks:
        block.up.weight.register_hook(zero)
        block.down.weight.register_hook(lambda gradient: gradient * 100).remove()


def after_sum(module: Net) -> None:
    def clip(parameter: Tensor) -> None:
        nn.utils.clip_grad_norm_([parameter], 1e-2)

    def clamp(parameter: Tensor) -> None:
        parameter.grad.clamp_(-1e-3, 1e-3)

    for block in module.blocks:
        block.up.weight.register_post_accumulate_grad_hook(clip)
        block.down.weight.register_post_accumulate_grad_hook(clamp)


def steps_in_backward(module: Net) -> None:
    """An optimizer for each parameter, kept by parameter, that steps when the gradient is there."""
    optimizers = {p: torch.optim.SGD([p], lr=0.5) for p in module.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in module.parameters():
        p.register_post_accumulate_grad_hook(step)


def all_at_once(module: Net) -> None:
    for attach in (masks, clamps, after_sum):
        attach(module)


def in_process(module: Net, accumulate: int = 1) -> dict[str, Tensor]:
    """The weights of a plain loop."""
    optimizer = module.configure_optimizers()
    for index, batch in enumerate(batches(BATCH)):
        if index % accumulate == 0:
            optimizer.zero_grad()
        (module.training_step(batch, index) / accumulate).backward()
        if index % accumulate == accumulate - 1:
            optimizer.step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def batches(size: int) -> DataLoader:
    torch.manual_seed(2)
    return DataLoader(TensorDataset(torch.randn(32, 16), torch.arange(32) % 4), batch_size=size)


def fit(module: Net, strategy: str, **flags: Any) -> dict[str, Tensor]:
    num_devices = 4 if "+" in strategy or "hsdp" in strategy else 2
    engine = Engine(**{**QUIET, "strategy": strategy, "devices": num_devices, "max_epochs": 1, **flags})
    engine.fit(module, batches(BATCH // engine.data_size))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def make(attach: Callable[[Net], Any], kind: type[Net] = Net) -> Net:
    torch.manual_seed(1)
    module = kind()
    attach(module)
    return module


def assert_equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert max(float((weights[name] - value).abs().max()) for name, value in expected.items()) <= TOLERANCE


HOOKS = [
    ("ddp_fork", all_at_once, 2),
    ("zero1_fork", all_at_once, 1),
    ("fsdp_fork", all_at_once, 2),
    ("tp_fork", all_at_once, 2),
    ("pp_fork", all_at_once, 2),
    ("ps_fork", all_at_once, 1),
    ("fsdp+tp_fork", all_at_once, 1),
    ("pp+ddp_fork", all_at_once, 2),
    ("pp+fsdp_fork", all_at_once, 1),
    ("fsdp_fork", in_place, 1),
    ("ddp_fork", steps_in_backward, 1),
    ("fsdp_fork", steps_in_backward, 1),
    ("pp_fork", steps_in_backward, 1),
]


@pytest.mark.parametrize(("strategy", "attach", "accumulate"), HOOKS)
def test_hooks_have_the_gradients_of_one_process(strategy, attach, accumulate):
    weights = fit(make(attach), strategy, accumulate_grad_batches=accumulate)
    assert_equal(weights, in_process(make(attach), accumulate))


class RemovesHooks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.handles = [block.up.weight.register_hook(torch.zeros_like) for block in self.blocks]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            for handle in self.handles:
                handle.remove()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self._trainer is None:  # in the plain loop nobody calls the hook
            self.on_train_batch_start(batch, batch_idx)
        return super().training_step(batch, batch_idx)


def test_a_handle_removes_its_hook_in_mid_run():
    nothing: Callable[[Net], None] = lambda module: None  # noqa: E731
    assert_equal(fit(make(nothing, RemovesHooks), "fsdp_fork"), in_process(make(nothing, RemovesHooks)))


class HooksLate(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            clamps(self)


def test_a_hook_that_comes_in_mid_run_has_whole_gradients_or_is_refused():
    nothing: Callable[[Net], None] = lambda module: None  # noqa: E731
    assert_equal(fit(make(nothing, HooksLate), "ddp_fork"), in_process(make(clamps)))
    late = r"'blocks\.0\.up\.weight' was registered after training had begun"
    with pytest.raises(ProcessRaisedException, match=late):
        fit(make(nothing, HooksLate), "fsdp_fork")
    with pytest.raises(ProcessRaisedException, match="was registered after training had begun"):
        fit(make(nothing, HooksLate), "ddp_fork", accumulate_grad_batches=2)


class HooksOnARank(Net):
    """Rank 0 alone has the hook, whose result is a new tensor: its ranks would compare gradients by themselves."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == 0:
            self.out.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 0.5))


class RemovesOnARank(RemovesHooks):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == 0:
            super().on_train_batch_start(batch, batch_idx)


def test_a_hook_that_one_rank_alone_removes_is_named():
    nothing: Callable[[Net], None] = lambda module: None  # noqa: E731
    with pytest.raises(
        ProcessRaisedException, match=r"up\.weight' was registered or removed in mid-run on 1 of 2 ranks"
    ):
        fit(make(nothing, RemovesOnARank), "fsdp_fork")


def registers_again(module: Net) -> None:
    """All ranks know of a hook, so that more of them may come."""
    module.out.weight.register_hook(lambda gradient: gradient * 0.5)


@pytest.mark.parametrize("strategy", ["ddp_fork", "zero1_fork", "fsdp_fork", "tp_fork"])
def test_a_hook_that_one_rank_alone_gets_in_mid_run_is_named(strategy):
    with pytest.raises(
        ProcessRaisedException, match=r"'out\.weight' was registered or removed in mid-run on 1 of 2 ranks"
    ):
        fit(make(registers_again, HooksOnARank), strategy)


def test_a_first_hook_that_one_rank_alone_gets_in_mid_run_is_named():
    nothing: Callable[[Net], None] = lambda module: None  # noqa: E731
    with pytest.raises(
        ProcessRaisedException, match=r"'out\.weight' was registered or removed in mid-run on 1 of 2 ranks"
    ):
        fit(make(nothing, HooksOnARank), "ddp_fork")


class Slow(nn.Parameter):
    """A parameter that has a learning rate of its own."""


class Box:
    """Keeps a parameter outside of its dict."""

    __slots__ = ("parameter",)


class Remembers(Net):
    """Finds its slow parameters by attribute, class, containers, ids, a closure: each kind for one of them."""

    def __init__(self) -> None:
        super().__init__()
        ups = [block.up for block in self.blocks]
        ups[0].weight._lr_factor = 0.5
        ups[1].weight = Slow(ups[1].weight.detach())
        self.by_list = [ups[2].weight]
        self.by_tuple = {"deep": (ups[3].weight, 1)}
        self.by_key = {ups[0].bias: 0.01}
        box = Box()
        box.parameter = ups[3].bias
        self.boxes = [box]
        self.by_partial = functools.partial(torch.Tensor.is_set_to, self.out.bias)
        self.out.weight._penalty = 0.1

    def is_slow(self, parameter: Tensor) -> bool:
        return (
            hasattr(parameter, "_lr_factor")
            or isinstance(parameter, Slow)
            or any(parameter is other for other in (*self.by_list, self.by_tuple["deep"][0], self.boxes[0].parameter))
            or parameter in self.by_key
            or self.by_partial.args[0] is parameter
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalties = [p._penalty * p.square().sum() for p in self.out.parameters() if hasattr(p, "_penalty")]
        return super().training_step(batch, batch_idx) + sum(penalties)


@pytest.mark.parametrize("strategy", ["fsdp_fork", "tp_fork", "pp_fork", "fsdp_fork:meta_init=true"])
def test_attributes_classes_and_references_lead_to_the_present_parameters(strategy):
    nothing: Callable[[Net], None] = lambda module: None  # noqa: E731
    assert_equal(fit(make(nothing, Remembers), strategy), in_process(make(nothing, Remembers)))


def by_closure(module: Net) -> None:
    slow = module.blocks[3].up.weight
    module.ids = {id(module.blocks[0].up.weight)}
    module.is_slow = lambda parameter: parameter is slow or id(parameter) in module.ids


@pytest.mark.parametrize("strategy", ["fsdp_fork", "tp_fork", "pp_fork"])
def test_a_closure_and_collections_of_ids_have_the_present_parameters(strategy):
    # The check's copy of the module has the same closure, and the ids of the module's parameters.
    weights = fit(make(by_closure), strategy, check_first_steps=False)
    assert_equal(weights, in_process(make(by_closure)))


class OptimizerFromTheStart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.optimizer = super().configure_optimizers()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


@pytest.mark.parametrize("strategy", ["fsdp_fork", "pp_fork"])
def test_an_optimizer_of_the_constructor_trains_the_present_parameters(strategy):
    nothing: Callable[[Net], None] = lambda module: None  # noqa: E731
    assert_equal(fit(make(nothing, OptimizerFromTheStart), strategy), in_process(make(nothing)))
