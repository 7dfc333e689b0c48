"""Several optimizers in automatic optimization, under every strategy: the weights of a plain loop that steps each."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException

from polyphase.engine import Engine
from polyphase.engine.errors import RefusedError
from tests.pairs import nightly

from .parity import (
    MLP,
    QUIET,
    STRATEGIES,
    TOLERANCE,
    adamw_of,
    build,
    differences,
    largest_difference,
    loader,
    muon_and_adamw,
    sgd_and_adamw,
    suffixed,
    two_of_sgd,
)

NUM_STEPS = 4

COMPOSED = (
    "hsdp+tp:replicate=2,tp=2",
    "pp+ddp:pipeline_size=2,microbatches=2",
    "pp+fsdp:pipeline_size=2,microbatches=2",
)
"""What these consist of, others have."""


@pytest.mark.parametrize("make", [muon_and_adamw, sgd_and_adamw])
@pytest.mark.parametrize("flag", [*(flag for flag in STRATEGIES if flag not in (*COMPOSED, "ps")), *nightly(*COMPOSED)])
def test_equal_a_plain_loop(flag, make):
    flags = {"make_optimizer": make, "num_steps": NUM_STEPS}
    assert differences(suffixed(flag, "fork"), STRATEGIES[flag], "mlp", 2, 0.05, **flags) <= TOLERANCE


@pytest.mark.parametrize(
    ("flag", "devices", "subject"),
    [
        ("tp", 2, "gpt, tied"),
        ("pp", 2, "gpt of four blocks, tied"),
        ("cp", 2, "gpt, tied"),
        *nightly(("ddp+cp", 4, "gpt, tied"), ("fsdp+cp", 4, "gpt, tied")),
    ],
)
def test_equal_a_plain_loop_of_a_language_model(flag, devices, subject):
    flags = {"make_optimizer": muon_and_adamw, "num_steps": NUM_STEPS}
    assert differences(suffixed(flag, "fork"), devices, subject, 1, 0.05, **flags) <= TOLERANCE


@pytest.mark.parametrize("flags", [{"gradient_clip_val": None}, {"gradient_clip_algorithm": "value"}])
def test_equal_a_plain_loop_behind_a_server(flags):
    clip = None if "gradient_clip_val" in flags else 1e-3
    module = build("mlp", sgd_and_adamw)
    flags = {"gradient_clip_val": clip, **flags}
    Engine(strategy="ps_fork", accelerator="cpu", devices=2, max_epochs=1, **flags, **QUIET).fit(
        module, loader("mlp", 1, 2, NUM_STEPS)
    )
    reference = build("mlp")
    optimizers, schedules = sgd_and_adamw(reference)
    for batch in loader("mlp", 1, num_steps=NUM_STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        reference.training_step(batch, 0).backward()
        if clip is not None:
            nn.utils.clip_grad_value_(reference.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule["scheduler"].step()
    assert largest_difference(module.state_dict(), reference.state_dict()) <= TOLERANCE


def test_servers_refuse_to_clip_several_by_one_norm():
    engine = Engine(strategy="ps_fork", accelerator="cpu", devices=2, max_epochs=1, gradient_clip_val=1.0, **QUIET)
    with pytest.raises(ProcessRaisedException, match="several that step together can't be clipped by one norm"):
        engine.fit(build("mlp", sgd_and_adamw), loader("mlp", 1, 2, NUM_STEPS))


@pytest.mark.parametrize("flag", ["local_sgd_fork:sync_every=1", "local_sgd_fork:sync_every=1,warmup=2"])
def test_replicas_exchange_once_after_the_last_of_them(flag):
    # Linear in the gradients, and without clipping, which is by the norm on each rank.
    assert differences(flag, 2, "mlp", 1, None, make_optimizer=two_of_sgd, num_steps=NUM_STEPS) <= TOLERANCE


def one_of_sgd(module: nn.Module) -> Any:
    first, *others = module.parameters()
    groups = [{"params": [first]}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05)


def each_of_sgd(module: nn.Module) -> Any:
    first, *others = module.parameters()
    return [torch.optim.SGD([first], lr=0.05), torch.optim.SGD(others, lr=0.05)]


def test_an_outer_step_with_momentum_is_taken_once_for_all():
    def weights(make: Any) -> dict[str, torch.Tensor]:
        module = build("mlp", make)
        flags = {"strategy": "diloco_fork:sync_every=1", "accelerator": "cpu", "devices": 2, "max_epochs": 1}
        Engine(**flags, **QUIET).fit(module, loader("mlp", 1, 2, NUM_STEPS))
        return module.state_dict()

    assert largest_difference(weights(each_of_sgd), weights(one_of_sgd)) == 0


class Sharp(MLP):
    """The loss is so large that a first loss scale overflows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * 8

    def configure_optimizers(self) -> Any:
        return sgd_and_adamw(self)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_scaler_unscales_each_and_updates_once(accumulate):
    torch.manual_seed(1)
    module = Sharp()
    engine = Engine(
        accelerator="cpu",
        max_epochs=1,
        precision="16-mixed",
        gradient_clip_val=0.05,
        accumulate_grad_batches=accumulate,
        **QUIET,
    )
    engine.fit(module, loader("mlp", accumulate, num_steps=8))
    torch.manual_seed(1)
    reference = Sharp()
    (optimizers, schedules), scaler = reference.configure_optimizers(), torch.amp.GradScaler("cpu")
    batches = iter(loader("mlp", accumulate, num_steps=8))
    for _ in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for _ in range(accumulate):
            with torch.autocast("cpu", torch.float16, cache_enabled=False):
                loss = reference.training_step(next(batches), 0)
            scaler.scale(loss / accumulate).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for schedule in schedules:
            schedule["scheduler"].step()
    assert largest_difference(module.state_dict(), reference.state_dict()) < 1e-7  # norms of other orders
    assert engine.precision_plugin.scaler.get_scale() == scaler.get_scale() < 2**16


class Told(MLP):
    """Notes the hooks around a step."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def configure_optimizers(self) -> Any:
        return sgd_and_adamw(self)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        self.told.append(("step", type(optimizer).__name__, self.trainer.global_step))
        optimizer.step(closure=optimizer_closure)

    def on_before_zero_grad(self, optimizer):
        self.told.append(("zero", type(optimizer).__name__))

    def on_before_optimizer_step(self, optimizer):
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.told.append(("ready", type(optimizer).__name__, bool(norm > 0.01)))

    def on_after_backward(self):
        self.told.append("backward")


@pytest.mark.parametrize("flags", [{}, {"profiler": SimpleProfiler()}], ids=["plain", "profiled"])
def test_hooks_are_called_for_each_and_the_step_counts_once(flags):
    module = Told()
    engine = Engine(accelerator="cpu", max_steps=2, gradient_clip_val=0.01, **flags, **QUIET)
    engine.fit(module, loader("mlp", 1))
    each = [
        [("step", "LightningSGD", step), "zero", "backward", "ready", ("step", "LightningAdamW", step)]
        for step in range(2)
    ]
    expected: list[Any] = []
    for first, _, backward, _, second in each:
        both = ("SGD", "AdamW")
        expected += [first, *(("zero", name) for name in both), backward, *(("ready", n, True) for n in both), second]
    assert module.told == expected
    assert engine.global_step == 2
    assert [type(optimizer) for optimizer in engine.optimizers] == [torch.optim.SGD, torch.optim.AdamW]


class EachClips(Told):
    """Clips the gradients of each optimizer by their own norm."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        self.told.append(nn.utils.get_total_norm([p.grad for g in optimizer.param_groups for p in g["params"]]))


def test_a_hook_that_clips_is_called_for_each_before_the_first_steps():
    module = EachClips()
    Engine(accelerator="cpu", max_steps=1, **QUIET).fit(module, loader("mlp", 1))
    *_, first, second, last = module.told
    assert first == pytest.approx(0.01, rel=1e-3)
    assert second == pytest.approx(0.01, rel=1e-3)
    assert last[1] == "LightningAdamW"


class LeavesOut(Told):
    """Steps the first optimizer every second time, as Lightning's documentation does."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if isinstance(optimizer, torch.optim.SGD) and batch_idx % 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


def test_the_module_may_leave_out_the_step_of_one():
    torch.manual_seed(1)
    module = LeavesOut()
    Engine(accelerator="cpu", max_epochs=1, gradient_clip_val=0.05, **QUIET).fit(module, loader("mlp", 1, num_steps=4))
    torch.manual_seed(1)
    reference = LeavesOut()
    (first, second), schedules = reference.configure_optimizers()
    for number, batch in enumerate(loader("mlp", 1, num_steps=4)):
        first.zero_grad()
        second.zero_grad()
        reference.training_step(batch, 0).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        if number % 2 == 0:
            first.step()
        second.step()
        for schedule in schedules:
            schedule["scheduler"].step()
    assert largest_difference(module.state_dict(), reference.state_dict()) == 0


# --- what is refused


class Refused(MLP):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def shares(module: nn.Module) -> Any:
    return [torch.optim.SGD(module.net[0].parameters(), 0.1), adamw_of(module.parameters())]


def with_lbfgs(module: nn.Module) -> Any:
    return [adamw_of(module.net[0].parameters()), torch.optim.LBFGS(module.net[2].parameters())]


class Twice(torch.optim.SGD):
    def step(self, closure=None):
        closure()
        return super().step(closure)


def with_two_losses(module: nn.Module) -> Any:
    return [adamw_of(module.net[0].parameters()), Twice(module.net[2].parameters(), 0.1)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (shares, r"the optimizers SGD and AdamW both have the parameter 'net\.0\.weight'"),
        (with_lbfgs, "LBFGS computes the loss several times in a step"),
        (with_two_losses, "Twice calls its closure several times in a step"),
    ],
)
def test_what_can_not_step_together_is_refused_by_name(make, message):
    module = Refused(make)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(RefusedError, match=message):
        Engine(accelerator="cpu", max_steps=1, **QUIET).fit(module, loader("mlp", 1))
    if make is not with_two_losses:
        assert largest_difference(before, module.state_dict()) == 0


def test_a_parameter_in_shards_is_refused_by_its_name():
    with pytest.raises(ProcessRaisedException, match=r"both have the parameter 'net\.0\.weight'"):
        Engine(strategy="fsdp_fork", devices=2, accelerator="cpu", max_steps=1, **QUIET).fit(
            Refused(shares), loader("mlp", 1, 2)
        )


class OwnPrecision(Precision):
    pass


def test_a_precision_of_the_users_own_is_refused_by_name():
    with pytest.raises(RefusedError, match="several optimizers can't step together under OwnPrecision"):
        Engine(accelerator="cpu", max_steps=1, plugins=OwnPrecision(), **QUIET).fit(Told(), loader("mlp", 1))


class StocksOwn(Callback):
    """Runs a stock trainer while the engine's run has optimizers."""

    def on_train_start(self, trainer, pl_module):
        if isinstance(trainer, Engine):
            with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
                pl.Trainer(accelerator="cpu", max_steps=1, **QUIET).fit(Told(), loader("mlp", 1))


def test_a_stock_trainer_refuses_them_as_ever():
    Engine(accelerator="cpu", max_steps=1, callbacks=[StocksOwn()], **QUIET).fit(Told(), loader("mlp", 1))
    with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
        pl.Trainer(accelerator="cpu", max_steps=1, **QUIET).fit(Told(), loader("mlp", 1))
