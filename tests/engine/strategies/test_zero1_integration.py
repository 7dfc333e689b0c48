"""`zero1` through real runs: the very weights of ddp under any optimizer, with a share of its state on each rank."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from polyphase.callbacks import CommunicationMonitor
from polyphase.engine import Engine
from polyphase.models import ByteGPT
from tests.engine.loop import test_out_of_memory_integration as hungry
from tests.engine.parity import MLP, TOLERANCE, build, largest_difference, loader
from tests.engine.strategies.fsdp.test_strategy_integration import OneRankOverflows, ScaleWriter
from tests.engine.strategies.test_ddp_integration import ByHand
from tests.engine.test_uneven_integration import SIZES, Fits, Parts, plain_loop, steps_of
from tests.engine.test_uneven_integration import fit as fit_parts
from tests.engine.tiny import QUIET, Saves
from tests.pairs import nightly


def fit(module: LightningModule, strategy: str, **flags: Any) -> LightningModule:
    Engine(**{**QUIET, "strategy": strategy, "devices": 2, "max_steps": 6, **flags}).fit(module, loader("mlp", 1, 2))
    return module


def optimized_by(make: Callable[[nn.Module], Any]) -> LightningModule:
    module = build("mlp")
    module.configure_optimizers = lambda: make(module)
    return module


def two_groups_and_a_schedule(module: nn.Module) -> Any:
    groups = [{"params": list(module.parameters())[:3], "lr": 0.05}, {"params": list(module.parameters())[3:]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)]


OPTIMIZERS = {
    "groups, schedule": two_groups_and_a_schedule,
    "state from the start": lambda module: torch.optim.Adagrad(module.parameters(), initial_accumulator_value=0.1),
    "amsgrad": lambda module: torch.optim.Adam(module.parameters(), amsgrad=True),
    "fused": lambda module: torch.optim.AdamW(module.parameters(), fused=True),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_steps_as_under_ddp_bit_for_bit(name):
    ours, theirs = (fit(optimized_by(OPTIMIZERS[name]), flag) for flag in ("zero1_fork", "ddp_fork"))
    assert largest_difference(ours.state_dict(), theirs.state_dict()) == 0


@pytest.mark.parametrize(
    "flags",
    [
        {"compression": "powersgd:2,start=1", "gradient_clip_val": 0.05},
        {"compression": "topk:0.3", "precision": "bf16-mixed"},
        {"global_batch_size": 12, "micro_batch_size": "auto"},
    ],
    ids=str,
)
def test_what_ddp_can_do_it_can(flags):
    ours, theirs = (fit(build("mlp"), flag, **flags) for flag in ("zero1_fork", "ddp_fork"))
    assert largest_difference(ours.state_dict(), theirs.state_dict()) == 0


@pytest.mark.filterwarnings("ignore:Under .* the ranks have different values of")  # a count of samples
def test_a_rank_without_samples_has_no_part_in_the_weights(tmp_path):
    module = Fits(tmp_path)
    fit_parts(module, "zero1", Parts(SIZES))
    found = {name: p.detach() for name, p in module.named_parameters()}
    assert largest_difference(found, plain_loop(steps_of(SIZES, 1, "pad"))) <= TOLERANCE


@pytest.mark.filterwarnings("ignore:Under .* the ranks have different values of")  # a count of samples
def test_a_rank_that_lacks_memory_has_the_step_done_again():
    module = hungry.Hungry(most=3, where="backward", from_step=3)
    hungry.fit(module, "zero1", 2)
    assert largest_difference(hungry.weights(module), hungry.plain_loop()) <= TOLERANCE


def test_optimizers_by_hand_each_share_what_they_step_with():
    modules = []
    for strategy in ("zero1_fork", "ddp_fork"):
        torch.manual_seed(2)
        modules.append(ByHand())
        data = TensorDataset(torch.randn(32, 4, generator=torch.Generator().manual_seed(1)))
        Engine(**QUIET, strategy=strategy, devices=2, max_epochs=1).fit(modules[-1], DataLoader(data, batch_size=4))
    assert largest_difference(*(module.state_dict() for module in modules)) == 0


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path):
    fit(OneRankOverflows(), "zero1_fork", precision="16-mixed", nonfinite="ignore", callbacks=[ScaleWriter(tmp_path)])
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    scales, norms = zip(*first, strict=True)
    assert scales[2] == scales[1] / 2
    assert norms[2] == norms[1] != norms[3]


class Unfreezes(MLP):
    """Trains its first layer from the third step on; ddp can't average what it did not see at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.net[0].requires_grad_(True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([torch.ones_like(batch[0]), torch.zeros_like(batch[1])], batch_idx)


def test_a_parameter_that_begins_to_be_trained_gets_an_owner():
    torch.manual_seed(3)
    ours = fit(Unfreezes(), "zero1_fork")
    torch.manual_seed(3)
    theirs = fit(Unfreezes(), "ddp_fork")
    assert largest_difference(ours.state_dict(), theirs.state_dict()) == 0


# --- what it is for


class Holds(Callback):
    """Writes the bytes of optimizer state that this rank holds, whose gradients are there, and what was sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gradients: list[int] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients.append(sum(p.grad is not None for p in pl_module.parameters()))

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        kept = [p for p in pl_module.parameters() if trainer.engine_strategy.keeps_state_of(p)]
        state = trainer.optimizers[0].state
        assert set(state) == set(kept)
        num_bytes = sum(v.nbytes for each in state.values() for v in each.values() if v.dim())
        sent = Counter()
        for wire in trainer.strategy.wires:
            for each, count in wire.sent.items():
                sent[each.collective] += count
        num_values = sum(p.numel() for p in pl_module.parameters())
        found = [num_bytes, num_values, self.gradients, sent]
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("devices", [3, *nightly(2)])
def test_each_rank_has_its_share_of_the_state_and_all_gradients(devices, tmp_path):
    module = ByteGPT(num_layers=3, num_heads=2, dim=32, context_length=16)
    flags = {"callbacks": [Holds(tmp_path), CommunicationMonitor(1)], "max_steps": 3}
    engine = Engine(**QUIET, strategy="zero1_fork:bucket_cap_mb=0.01", devices=devices, **flags)
    engine.fit(module, loader("gpt, tied", 1, 2))
    rows = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(devices)]
    num_values = rows[0][1]
    assert sum(row[0] for row in rows) == 8 * num_values  # AdamW's two moments
    assert max(row[0] for row in rows) <= 1.05 * 8 * num_values / devices
    for _, _, gradients, sent in rows:
        assert gradients == [0] + 2 * [len(list(module.parameters()))]  # put back after each step
        # An all-reduce sends twice as much as a broadcast of as many bytes.
        assert sent["all_reduce"] == pytest.approx(3 * 8 * num_values * (devices - 1) / devices, rel=1e-3)
        assert sent["broadcast"] == pytest.approx(3 * 4 * num_values * (devices - 1) / devices, rel=1e-3)


# --- what needs more than its own parameters


class NormalizedDescent(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05, "momentum": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            average = self.state[p].setdefault("average", torch.zeros_like(p))
            p.sub_(average.mul_(0.5).add_(p.grad / norm), alpha=0.05)
        return loss


class Averaging(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("average", p.clone()).lerp_(p, 0.2)
        return loss

    @torch.no_grad()
    def use_averages(self) -> None:
        for p, state in self.state.items():
            p.copy_(state["average"])


class UsesAverages(Callback):
    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        trainer.optimizers[0].use_averages()


MANY: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "NormalizedDescent": NormalizedDescent,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
    "Averaging": lambda parameters: Averaging(parameters, lr=1e-3, eps=1e-4),
}


@pytest.mark.filterwarnings("ignore:strategy 'zero1_fork'")  # read by the next test, in this process
@pytest.mark.parametrize("name", MANY)
def test_an_optimizer_that_needs_all_parameters_steps_as_in_a_plain_loop_also_when_resumed(name, tmp_path):
    expected = build("mlp")
    optimizer = MANY[name](expected.parameters())
    for batch in list(loader("mlp", 1))[:6]:

        def closure(batch: Any = batch) -> Any:
            optimizer.zero_grad()
            loss = expected.training_step(batch, 0)
            loss.backward()
            return loss

        if name == "LBFGS":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    if name == "Averaging":
        optimizer.use_averages()
    path, averages = tmp_path / "a.ckpt", [UsesAverages()] if name == "Averaging" else []
    fit(
        optimized_by(lambda module: MANY[name](module.parameters())),
        "zero1_fork",
        callbacks=[Saves(path, 3)],
        max_steps=3,
    )
    module = optimized_by(lambda module: MANY[name](module.parameters()))
    engine = Engine(**QUIET, strategy="zero1_fork", devices=2, max_steps=6, callbacks=averages)
    engine.fit(module, loader("mlp", 1, 2), ckpt_path=path)
    assert largest_difference(module.state_dict(), expected.state_dict()) <= TOLERANCE


def test_it_is_said_that_such_an_optimizer_is_not_divided():
    message = (
        "'zero1_fork': NormalizedDescent steps a parameter by .* So each rank takes its whole step .* as under 'ddp'"
    )
    with pytest.raises(ProcessRaisedException, match=message):  # pytest makes errors of warnings, in ranks as well
        fit(optimized_by(lambda module: NormalizedDescent(module.parameters())), "zero1_fork", max_steps=1)


class Toggles(LightningModule):
    """Two optimizers in turn, each of which sees the other's parameters frozen; a third part is never trained."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            loss = (self.frozen(self.second(self.first(batch[0]).tanh())) - 1).square().mean()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 0.02, eps=1e-4) for part in (self.second, self.first)]


@pytest.mark.parametrize(
    ("then", "now"),
    [("zero1:2", "zero1:2"), ("zero1:2", "zero1:3"), ("ddp:2", "zero1:2"), ("zero1:2", "single:1")],
    ids=str,
)
def test_no_state_is_lost_on_resume_whatever_is_frozen_at_times(then, now, tmp_path):
    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    expected = Toggles()
    first, second = expected.configure_optimizers()
    for batch in rows.split(6):
        for optimizer in (first, second):
            expected.zero_grad()
            (expected.frozen(expected.second(expected.first(batch).tanh())) - 1).square().mean().backward()
            optimizer.step()
    for flag, max_steps, callbacks, path in (
        (then, 8, [Saves(tmp_path / "a.ckpt", 8)], None),
        (now, 16, [], tmp_path / "a.ckpt"),
    ):
        strategy, devices = flag.split(":")
        strategy = strategy if devices == "1" else f"{strategy}_fork:find_unused_parameters=true"
        module = Toggles()
        engine = Engine(**QUIET, strategy=strategy, devices=int(devices), max_steps=max_steps, callbacks=callbacks)
        engine.fit(module, DataLoader(TensorDataset(rows), batch_size=6 // int(devices)), ckpt_path=path)
    assert largest_difference(module.state_dict(), expected.state_dict()) <= TOLERANCE


def test_a_wrong_option_is_an_error_when_the_engine_is_built():
    with pytest.raises(ValueError, match=r"unknown option of strategy 'zero1' 'bucket_mb'\. Did you mean"):
        Engine(**QUIET, strategy="zero1:bucket_mb=3", devices=2)
