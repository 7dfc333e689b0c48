"""`Engine.verify`: a run equals one process of stock Lightning step by step, or the first difference is named."""

import logging
import re
import sys

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from torch.utils.data import DataLoader, random_split

from polyphase.engine import Engine
from polyphase.engine.strategies import adapt

from .tiny import QUIET, Regression, engine, rows


class Rows(LightningDataModule):
    def train_dataloader(self):
        return rows(shuffle=True)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"accumulate_grad_batches": 3},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"max_epochs": 1, "callbacks": Callback()},
    ],
    ids=lambda flags: re.sub(" object at 0x[0-9a-f]+", "", str(flags)),  # the same in each run
)
@pytest.mark.parametrize("shuffle", [False, True])
def test_one_process_under_the_engine_equals_one_process_of_lightnings(flags, shuffle):
    module = Regression()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    run = engine(**flags)
    certificate = run.verify(module, rows(18, shuffle=shuffle), steps=6)
    assert certificate.equal, certificate
    assert certificate is run.certificate
    assert len(certificate.differences) == 6
    assert max(certificate.differences) <= certificate.tolerance
    assert str(certificate).startswith("equal to one process within 1e-05")
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items()), "left as it is"


@pytest.mark.parametrize(
    "flags", [{"global_batch_size": 6, "micro_batch_size": 4}, {"accumulate_grad_batches": 3}, {"global_batch_size": 7}]
)
@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("ddp_fork", 2)])
def test_verify_knows_how_much_short_batches_count(strategy, devices, flags):
    run = Engine(strategy=strategy, devices=devices, **QUIET, **flags)
    assert run.verify(Regression(), rows(17, shuffle=True), steps=5).equal


class SeesHowItComputes(Regression):
    """Learns more where numbers may be rounded, or summed in another order."""

    def training_step(self, batch, batch_idx):
        cudnn = torch.backends.cudnn
        flags = cudnn.allow_tf32, cudnn.benchmark, not cudnn.deterministic
        assert not any(flags), flags
        assert torch.get_float32_matmul_precision() == "highest"
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("ddp_spawn", 2)])
def test_verify_computes_exactly_on_gpus_and_leaves_the_flags_as_they_are(strategy, devices):
    cudnn = torch.backends.cudnn

    def flags():
        return cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic, torch.get_float32_matmul_precision()

    torch.set_float32_matmul_precision("high")
    try:
        before = flags()
        run = Engine(strategy=strategy, devices=devices, benchmark=True, **QUIET)
        before = (before[0], cudnn.benchmark, *before[2:])  # which the engine's flag has set
        assert run.verify(SeesHowItComputes(), rows(8), steps=2).equal
        assert flags() == before == (True, True, False, "high")
    finally:
        torch.set_float32_matmul_precision("highest")
        cudnn.benchmark = False


def test_verify_with_a_data_module():
    assert engine().verify(Regression(), datamodule=Rows()).equal


class MadeInSetup(LightningDataModule):
    """Splits its data in `setup`, as most do, by the global generator."""

    def setup(self, stage):
        self.train, _ = random_split(rows(24).dataset, [16, 8])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=4, shuffle=True)


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp_fork", 2)])
def test_verify_with_data_that_are_made_in_setup(strategy, devices):
    assert engine(strategy=strategy, devices=devices).verify(Regression(), datamodule=MadeInSetup()).equal


class DiffersUnderTheEngine(Regression):
    """In its third step and under the engine only, one bias gets another gradient."""

    def on_before_optimizer_step(self, optimizer):
        if isinstance(self.trainer, Engine) and self.trainer.global_step == 2:
            self.net[2].bias.grad += 5.0


def test_a_difference_is_reported_by_step_and_first_tensor():
    certificate = engine().verify(DiffersUnderTheEngine(), rows(), steps=4)
    assert (certificate.equal, certificate.step, certificate.tensor) == (False, 3, "net.2.bias")
    assert certificate.differences[:3] == (0.0, 0.0, pytest.approx(0.5, abs=1e-6))  # the learning rate is 0.1
    assert "differs from one process: first 'net.2.bias', after step 3, by 5.00e-01, more than 1e-05" in str(
        certificate
    )


class AddsToABuffer(Regression):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("other", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.other += 1
        self.count += 1 + (isinstance(self.trainer, Engine) and self.trainer.global_step == 2)
        return super().training_step(batch, batch_idx)


def test_a_buffer_that_differs_is_the_first_tensor_where_the_weights_agree():
    certificate = engine().verify(AddsToABuffer(), rows(), steps=4)
    assert (certificate.equal, certificate.step, certificate.tensor) == (False, 3, "count")
    assert certificate.differences == (0.0, 0.0, 1.0, 1.0)


def test_not_a_number_is_a_difference():
    class Nan(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 1 else 1.0)

    certificate = engine(nonfinite="ignore").verify(Nan(), rows(), steps=2)
    assert (certificate.equal, certificate.step) == (False, 2)


def test_a_tolerance_of_the_users_decides():
    assert engine().verify(AddsToABuffer(), rows(), steps=4, tolerance=1.0).equal


def test_a_lower_precision_shows():
    class Cast(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch.to(self.net[0].weight.dtype), batch_idx)

    certificate = engine(precision="bf16-true").verify(Cast(), rows(), steps=2)
    assert not certificate.equal
    assert "so do a precision below float32, and BatchNorm without" in str(certificate)
    assert engine(precision="bf16-true").verify(Cast(), rows(), steps=2, tolerance=0.1).equal


@pytest.mark.parametrize(
    ("strategy", "equals"),
    [
        *(("ddp", True), ("fsdp", True), ("ps", True), ("single", True)),
        *(("ps:staleness=1", False), ("local_sgd:sync_every=2", False), ("diloco", False)),
    ],
)
def test_which_strategies_are_to_equal_one_process(strategy, equals):
    made = engine(strategy=strategy, devices=1 if strategy == "single" else 2).strategy
    assert adapt(made).expects_parity is equals


def test_a_strategy_that_is_made_to_differ_is_the_reason():
    flag = "local_sgd_fork:sync_every=2"
    certificate = engine(strategy=flag, devices=2).verify(Regression(), rows(), steps=1)
    assert not certificate.equal
    assert f"(strategy '{flag}' computes something else by design)" in str(certificate)
    assert "dropout" not in str(certificate)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_the_number_of_steps_is_a_count(steps):
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1"):
        engine().verify(Regression(), rows(), steps=steps)


def test_verify_needs_a_batch_size():
    with pytest.raises(ValueError, match=r"verify needs a DataLoader with a batch_size"):
        engine().verify(Regression(), DataLoader(torch.randn(5, 4, 4), batch_size=None))


def test_verify_equals_with_a_generator_of_the_users():
    loader = rows(18, shuffle=True, generator=torch.Generator().manual_seed(5))
    certificate = engine().verify(Regression(), loader)
    assert certificate.equal, certificate


@pytest.mark.parametrize(
    "flags",
    [
        {"limit_train_batches": 2},
        {"overfit_batches": 2},
        {"fast_dev_run": True},
        {"detect_anomaly": True},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:You have turned on `Trainer.detect_anomaly")
def test_verify_equals_under_each_flag_that_says_which_batches_are_seen(flags):
    certificate = engine(**flags).verify(Regression(), rows(18))
    assert certificate.equal, certificate


def test_verify_leaves_the_engine_as_it_was():
    run = engine(max_epochs=2)
    run.verify(Regression(), rows(), steps=2)
    assert run.global_step == 0
    module = Regression()
    run.fit(module, rows())
    assert run.global_step == 8


@pytest.mark.parametrize("strategy", ["auto", "fsdp_fork"])
def test_only_the_verdict_is_printed(strategy, capfd, monkeypatch):
    for name in ("lightning.pytorch", "lightning.fabric"):
        handler = logging.StreamHandler(sys.stderr)  # Lightning's own holds the stream of its import
        monkeypatch.setattr(logging.getLogger(name), "handlers", [handler])
        monkeypatch.setattr(logging.getLogger(name), "propagate", False)
    certificate = Engine(strategy=strategy, devices=2 if strategy != "auto" else 1, accelerator="cpu").verify(
        Regression(), rows(), steps=2
    )
    out, err = capfd.readouterr()
    assert (out + err).splitlines() == str(certificate).splitlines()


class ByMuon(Regression):
    """Muon for the matrices, AdamW for the rest; stock Lightning can't step both on one loss."""

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__()
        self.wrong = wrong
        """By how much a weight is moved in each step of several ranks."""

    def configure_optimizers(self):
        matrices = [p for p in self.parameters() if p.dim() == 2]
        others = [p for p in self.parameters() if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3, eps=1e-4)]

    def on_after_backward(self):
        if self.trainer.world_size > 1:
            with torch.no_grad():
                self.net[0].bias.add_(self.wrong)


LONGEST = 0.02 * 2**0.5
"""Muon's step of a matrix of 8 rows and 4 columns."""


@pytest.mark.parametrize("strategy", ["ddp_fork", "fsdp_fork"])
def test_what_muon_rounds_is_added_to_the_tolerance_and_said(strategy):
    run = Engine(strategy=strategy, devices=2, **QUIET, gradient_clip_val=0.5, accumulate_grad_batches=2)
    certificate = run.verify(ByMuon(), rows(34), steps=4)
    assert certificate.equal, certificate
    assert certificate.rounding == pytest.approx([2**-8 * LONGEST * step for step in range(1, 5)])
    said = f"equal to one process within 1e-05 and {4 * 2**-8 * LONGEST:.1e}, by which Muon rounds in 4 steps"
    assert str(certificate).startswith(said)


def test_what_is_more_than_muon_rounds_is_a_difference():
    run = Engine(strategy="ddp_fork", devices=2, check_first_steps=False, **QUIET)
    certificate = run.verify(ByMuon(wrong=1e-3), rows(18))
    assert (certificate.step, certificate.tensor) == (1, "net.0.bias")
    assert re.search(r"by 1\.\d+e-03, more than 1e-05 and 1\.1e-04, by which Muon rounds in 1 steps", str(certificate))
