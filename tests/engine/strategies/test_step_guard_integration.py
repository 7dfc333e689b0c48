"""`nonfinite="skip"` and `"error"`: a run with a bad batch, beside one that never had it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset

from polyphase.callbacks import Snapshot
from polyphase.engine import Engine
from polyphase.engine.checkpoint import set_random_state
from polyphase.engine.reliability import nonfinite
from polyphase.engine.reliability.nonfinite import NonFiniteError
from polyphase.engine.strategies import step_guard
from tests.engine.eager_graphs import eager_graphs
from tests.engine.parity import MICRO_BATCH, MLP, QUIET, SUBJECTS, adamw, largest_difference, sgd_and_adamw, suffixed
from tests.pairs import nightly

BAD_STEP = 3
STEPS = 7

STRATEGIES = {
    "single": 1,
    "ddp": 2,
    "zero1": 2,
    "fsdp": 2,
    "tp": 2,
    "pp:microbatches=2": 2,
    "ps": 2,
}
"""World size by flag."""
MORE = {"hsdp:replicate=2,shard=2": 4, "fsdp+tp:tp=2": 4, "pp+ddp:pipeline_size=2,microbatches=2": 4}


class Scheduled(MLP):
    """Each step has another learning rate."""

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Spikes(MLP):
    """The bad sample's loss is finite; one element of a gradient is infinite, and none is NaN."""

    value = torch.inf

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, classes = batch
        loss = super().training_step([images.nan_to_num(), classes], batch_idx)
        if images.isnan().any():
            value = self.net[-1].bias[0] * 1
            value.register_hook(lambda gradient: torch.full_like(gradient, self.value))
            loss = loss + value - value.detach()
        return loss


def batches(world_size: int, accumulate: int, *, has_bad: bool, samples: Sequence[int] = (1,)) -> DataLoader:
    """Batches of which one micro-batch has a sample that is not finite, or the same without that step's samples."""
    per_step = MICRO_BATCH * accumulate
    images, classes = SUBJECTS["mlp"].data(STEPS * per_step).tensors
    first = BAD_STEP * per_step
    if has_bad:
        images = images.clone()
        images[[first + sample for sample in samples]] = float("nan")
    else:
        images, classes = (torch.cat([rows[:first], rows[first + per_step :]]) for rows in (images, classes))
    return DataLoader(TensorDataset(images, classes), batch_size=MICRO_BATCH // world_size)


def fit(
    module: LightningModule | type[LightningModule],
    strategy: str,
    devices: int,
    *,
    has_bad: bool = True,
    samples: Sequence[int] = (1,),
    **flags: Any,
) -> Any:
    """Trains a module, which it returns; a class is of one that begins with the same weights each time."""
    torch.manual_seed(1)
    module = module().train() if isinstance(module, type) else module
    engine = Engine(
        **{
            **QUIET,
            "accelerator": "cpu",
            "strategy": suffixed(strategy, "fork"),
            "devices": devices,
            "max_epochs": 1,
            "nonfinite": "skip",
            "check_first_steps": False,
            **flags,
        }
    )
    accumulate = flags.get("accumulate_grad_batches", 1)
    engine.fit(module, batches(engine.data_size, accumulate, has_bad=has_bad, samples=samples))
    return module


def difference(module_class: type[LightningModule], strategy: str, devices: int, **flags: Any) -> float:
    """The largest difference of any value of the module from a run that never had the step with the bad batch."""
    with_it, without = (fit(module_class, strategy, devices, has_bad=has_bad, **flags) for has_bad in (True, False))
    return largest_difference(with_it.state_dict(), without.state_dict())


@pytest.mark.parametrize(("strategy", "devices"), [*STRATEGIES.items(), *nightly(*MORE.items())])
def test_a_bad_batch_leaves_no_trace(strategy, devices):
    assert difference(Scheduled, strategy, devices) == 0


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        ("ddp", {"accumulate_grad_batches": 2}),
        ("fsdp", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        ("pp:microbatches=2", {"gradient_clip_val": 0.05}),
        ("ps", {"gradient_clip_val": 0.05}),
        ("zero1", {"gradient_clip_val": 0.05}),
        ("tp", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("ddp", {"precision": "bf16-mixed"}),
        ("ddp", {"precision": "16-mixed"}),
        ("fsdp", {"precision": "16-mixed", "gradient_clip_val": 0.05}),
        ("pp:microbatches=2", {"precision": "16-mixed"}),
        ("ps", {"precision": "16-mixed"}),
    ],
    ids=str,
)
def test_nor_with_accumulation_clipping_and_a_loss_scale(strategy, flags):
    assert difference(Scheduled, strategy, 2, **flags) == 0


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_nor_does_a_gradient_that_clipping_would_make_finite(algorithm):
    flags = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    assert difference(Spikes, "ddp", 2, **flags) == 0
    assert difference(SpikesByHand, "single", 1) == 0


class JumpsAlone(MLP):
    """Its loss is finite, and that of the bad sample makes gradients many times larger than the others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, classes = batch
        loss = super().training_step([images.nan_to_num(), classes], batch_idx)
        return loss * 1000 if images.isnan().any() else loss


class Jumps(JumpsAlone, Scheduled):
    """With a schedule, which goes on where ranks train alone."""


@pytest.mark.parametrize(
    ("strategy", "devices", "flags"),
    [
        ("single", 1, {"gradient_clip_val": 0.05}),
        ("ddp", 2, {"accumulate_grad_batches": 2}),
        ("ddp", 2, {"precision": "16-mixed", "gradient_clip_val": 0.05}),
        ("ddp", 2, {"compression": "topk:0.3"}),
        ("fsdp", 2, {}),
        ("tp", 2, {}),
        ("pp:microbatches=2", 2, {}),
        ("ps", 2, {}),
        ("local_sgd:sync_every=1", 2, {"samples": (0, 1)}),
    ],
    ids=str,
)
def test_a_spike_leaves_no_trace(monkeypatch, strategy, devices, flags):
    monkeypatch.setattr(step_guard, "_FIRST_NORMS", 2)
    module = JumpsAlone if strategy.startswith("local_sgd") else Jumps
    assert difference(module, strategy, devices, skip_spikes=20.0, **flags) == 0


def test_a_spike_by_hand_is_judged_before_it_is_clipped(monkeypatch):
    class JumpsByHand(SpikesByHand):
        value = 1e6

    monkeypatch.setattr(step_guard, "_FIRST_NORMS", 2)
    for precision in ("32-true", "16-mixed"):
        assert difference(JumpsByHand, "single", 1, skip_spikes=20.0, precision=precision) == 0


def test_spikes_are_told_and_counted_from_a_number_of_norms_on(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="polyphase.engine")
    assert fit(Jumps, "single", 1, skip_spikes=20.0).trainer.num_skipped_steps == 0, "after three steps"
    monkeypatch.setattr(step_guard, "_FIRST_NORMS", 3)
    assert fit(Jumps, "single", 1, skip_spikes=20.0).trainer.num_skipped_steps == 1
    (message,) = [r.getMessage() for r in caplog.records if r.name == "polyphase.engine"]
    assert f"of batch {BAD_STEP} had a norm of more than 20.0 times the mean at step {BAD_STEP}" in message


def test_a_resumed_run_judges_spikes_by_the_norms_before_it(monkeypatch, tmp_path):
    monkeypatch.setattr(step_guard, "_FIRST_NORMS", 3)
    path = tmp_path / "saved.ckpt"
    fit(Jumps, "single", 1, skip_spikes=20.0, max_steps=BAD_STEP).trainer.save_checkpoint(path)
    resumed = fit(Jumps, "single", 1, skip_spikes=20.0, resume=path)
    assert resumed.trainer.num_skipped_steps == 1
    assert largest_difference(resumed.state_dict(), fit(Jumps, "single", 1, skip_spikes=20.0).state_dict()) == 0


def test_a_limit_for_spikes_that_can_not_be_honoured_is_refused():
    with pytest.raises(ValueError, match=r"skip_spikes=20.0 .* larger than 1, and nonfinite='skip'"):
        fit(Jumps, "single", 1, nonfinite="warn", skip_spikes=20.0)
    with pytest.raises(ValueError, match=r"skip_spikes=0.5 .* larger than 1"):
        fit(Jumps, "single", 1, skip_spikes=0.5)
    with pytest.raises(ValueError, match=r"skip_spikes needs the gradients of all optimizers at once.*bf16-mixed"):
        fit(Together, "single", 1, skip_spikes=20.0, precision="16-mixed")


COMPRESSIONS = ["bf16", "int8:16,feedback=true", "powersgd:2,start=1", "sign", "topk:0.3"]


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [*(("ddp", flag) for flag in COMPRESSIONS), ("hsdp:replicate=2", "topk:0.3"), ("fsdp", "int8:16")],
)
def test_nor_in_what_a_compression_remembers(strategy, compression):
    assert difference(Scheduled, strategy, 2, compression=compression) == 0
    assert difference(Spikes, strategy, 2, compression=compression) == 0


def test_nor_in_residuals_under_a_loss_scale():
    assert difference(Scheduled, "ddp", 2, compression="topk:0.3", precision="16-mixed") == 0


class Normed(MLP):
    """Its statistics are not finite after a forward with a bad sample."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(32))


@pytest.mark.parametrize(("strategy", "devices", "accumulate"), [("single", 1, 2), ("ddp", 2, 1)])
def test_nor_in_buffers(strategy, devices, accumulate):
    flags = {"sync_batchnorm": devices > 1, "accumulate_grad_batches": accumulate}
    assert difference(Normed, strategy, devices, **flags) == 0


class Together(Spikes):
    """Of two optimizers one has the bad gradient, and the other one would step with its own."""

    def configure_optimizers(self) -> Any:
        return sgd_and_adamw(self)


@pytest.mark.parametrize(
    ("strategy", "devices", "flags"),
    [
        ("single", 1, {}),
        ("fsdp", 2, {"gradient_clip_val": 0.05}),
        ("ddp", 2, {"accumulate_grad_batches": 2}),
        ("ps", 2, {}),
        ("single", 1, {"precision": "16-mixed", "gradient_clip_val": 0.05}),
    ],
)
def test_several_optimizers_leave_out_the_whole_step(strategy, devices, flags):
    assert difference(Together, strategy, devices, **flags) == 0


class ByHand(Scheduled):
    """Steps two optimizers by hand, after two backwards, of which one has the bad sample."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        half = len(batch[1]) // 2
        for rows in (slice(half), slice(half, None)):
            self.manual_backward(super().training_step([tensor[rows] for tensor in batch], batch_idx) / 2)
        self.clip_gradients(first, 0.01, "value")
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        layers = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        return [
            torch.optim.AdamW(layers[0].parameters()),
            torch.optim.SGD(nn.ModuleList(layers[1:]).parameters(), 0.1, 0.9),
        ]


class SpikesByHand(Spikes):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, 0.01, "value")
        optimizer.step()


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_nor_with_optimizers_that_are_stepped_by_hand(strategy, devices):
    assert difference(ByHand, strategy, devices) == 0


def test_nor_by_hand_under_a_loss_scale():
    assert difference(ByHand, "ddp", 2, precision="16-mixed") == 0


def test_nor_in_a_mean_of_weights():
    def mean(has_bad: bool) -> dict[str, torch.Tensor]:
        average = EMAWeightAveraging(decay=0.5)
        return fit(Scheduled, "single", 1, has_bad=has_bad, callbacks=[average]).state_dict()

    assert largest_difference(mean(True), mean(False)) == 0


def test_nor_in_a_compiled_step(monkeypatch):
    graphs = eager_graphs(monkeypatch)
    assert difference(Scheduled, "single", 1, compile=True) == 0
    assert graphs.frame_count


def test_ranks_that_train_alone_leave_out_their_own_steps():
    assert difference(MLP, "local_sgd:sync_every=1", 2, samples=(0, 1)) == 0
    alone = fit(MLP, "local_sgd:sync_every=2", 2, compression="topk:0.5")
    assert all(value.isfinite().all() for value in alone.state_dict().values())


class ComparesWeights(Scheduled):
    """Writes whether the step that fails has changed a weight."""

    folder: Path

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        before = [_local(p).clone() for p in self.parameters()]
        try:
            super().optimizer_step(*args, **kwargs)
        except NonFiniteError:
            is_same = all(map(torch.equal, before, map(_local, self.parameters())))
            (self.folder / f"rank{self.global_rank}").write_text(str(is_same))
            raise


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("ps", 2)])
def test_error_ends_before_the_weights_change(strategy, devices, tmp_path, monkeypatch):
    monkeypatch.setattr(ComparesWeights, "folder", tmp_path, raising=False)
    message = rf"the loss was not finite at step {BAD_STEP} \(epoch 0\) on rank {devices - 1}"
    with pytest.raises((NonFiniteError, ProcessRaisedException), match=message):
        fit(ComparesWeights, strategy, devices, nonfinite="error")
    assert {path.read_text() for path in tmp_path.glob("rank*")} == {"True"}


class Divides(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values / (torch.rand(()) > 0.2)


class Unlucky(MLP):
    """Some steps divide by zero, as the random numbers of a rank have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, Divides())


@pytest.mark.filterwarnings("ignore:.* is not saved")
@pytest.mark.parametrize(("strategy", "devices"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_error_with_snapshots_writes_what_repeats_it(strategy, devices, tmp_path):
    flags = {"nonfinite": "error", "accumulate_grad_batches": 2, "callbacks": [Snapshot(tmp_path / "snapshots")]}
    with pytest.raises((NonFiniteError, ProcessRaisedException), match=r"has the batch, the random states") as raised:
        fit(Unlucky, strategy, devices, has_bad=False, **flags)
    paths = sorted((tmp_path / "nonfinite").glob("step=*-rank=*.pt"))
    assert len(paths) == devices
    assert str(tmp_path / "nonfinite") in str(raised.value)
    saved = [torch.load(path, weights_only=True) for path in paths]
    culprits = [one for one in saved if one["module"] is not None]
    assert {one["module"] for one in culprits} == {"net.1 (Divides)"}
    for one in culprits:
        assert len(one["micro_batches"]) == 2
        module = Unlucky()
        if strategy != "fsdp":
            module.load_state_dict(one["weights"])
        losses = []
        for batch in one["micro_batches"]:
            set_random_state(batch["random"])
            losses.append(module.training_step(*batch["arguments"]))
        assert not torch.stack(losses).isfinite().all()


class Broken(MLP):
    """Its loss is not finite from a step on."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + (float("nan") if batch_idx >= 1 else 0)


def test_a_run_that_leaves_out_all_its_steps_ends(monkeypatch):
    monkeypatch.setattr(nonfinite, "MOST_IN_A_ROW", 4)
    module = Broken()
    with pytest.raises(NonFiniteError, match="4 steps in a row were not finite and left out, the last one at step 4"):
        fit(module, "single", 1)
    assert module.trainer.global_step == 4


def test_a_step_that_is_left_out_is_told_and_counted(caplog):
    caplog.set_level(logging.WARNING, logger="polyphase.engine")
    module = fit(MLP, "single", 1)
    (message,) = [r.getMessage() for r in caplog.records if r.name == "polyphase.engine"]
    assert f"a loss or gradient of batch {BAD_STEP} was not finite at step {BAD_STEP} (epoch 0) on rank 0" in message
    assert message.endswith(f" Its samples: {', '.join(str(BAD_STEP * MICRO_BATCH + i) for i in range(MICRO_BATCH))}.")
    assert module.trainer.num_skipped_steps == 1
    assert module.trainer.global_step == STEPS, "the batch was one of the run's"


def test_its_samples_are_named_by_their_indices_in_any_order(capfd):
    devices = 2
    torch.manual_seed(2)
    images, classes = SUBJECTS["mlp"].data(4 * MICRO_BATCH).tensors
    images = images.clone()
    images[7] = torch.nan
    loader = DataLoader(TensorDataset(images, classes), batch_size=MICRO_BATCH // devices // 2, shuffle=True)
    flags = {**QUIET, "max_epochs": 2, "nonfinite": "skip", "accumulate_grad_batches": 2, "check_first_steps": False}
    Engine(accelerator="cpu", strategy="ddp_spawn", devices=devices, **flags).fit(MLP(), loader)
    found = [line.rpartition(": ")[2] for line in capfd.readouterr().err.splitlines() if "Its samples" in line]
    assert len(found) == 2, "once in each epoch"
    for samples in found:
        numbers = [int(number) for number in samples.rstrip(".").split(", ")]
        assert len(numbers) == MICRO_BATCH // devices, "those of the rank that had a loss that is not finite"
        assert 7 in numbers


def test_an_optimizer_that_computes_gradients_itself_is_refused():
    class Searches(MLP):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with pytest.raises(ValueError, match=r"LBFGS calls the closure itself.* nonfinite='warn'"):
        fit(Searches, "single", 1)
