"""A rank runs out of memory, and the result is that of a run in which none did."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from polyphase.engine import Engine
from tests.pairs import alternating, nightly

from ..parity import TOLERANCE, adamw, largest_difference, suffixed
from ..tiny import QUIET

# Each rank counts its own samples in a buffer of the modules here, to show what a filler or a repeated step leaves.
pytestmark = pytest.mark.filterwarnings("ignore:Under .* the ranks have different values of")

BATCH, SIZE = 24, 61
EPOCHS = 2


class Scarce(torch.autograd.Function):
    """Runs out of memory in backward, above a number of samples."""

    @staticmethod
    def forward(ctx, inputs, most):
        ctx.most = most
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.most:
            raise torch.OutOfMemoryError("out of memory, in backward")
        return gradient, None


class Block(nn.Module):
    """One of the units that fsdp shards; the memory of the second one is scarce."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.most = {"forward": SIZE, "backward": SIZE, "cublas": SIZE}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most["forward"]:
            raise torch.OutOfMemoryError("out of memory, in forward")
        if len(x) > self.most["cublas"]:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return Scarce.apply(self.layer(x).tanh(), self.most["backward"]) if x.requires_grad else self.layer(x).tanh()


class Hungry(LightningModule):
    """Takes more memory than there is for more than `most` samples, on the last rank, from one step on."""

    def __init__(self, most: int = SIZE, where: str = "forward", from_step: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.last = nn.Sequential(nn.Dropout(dropout), nn.Linear(16, 1))
        self.most, self.where, self.from_step = most, where, from_step
        self.mean = MeanMetric()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).squeeze(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        if self.global_rank == self.trainer.world_size - 1 and self.trainer.global_step >= self.from_step:
            self.blocks[1].most[self.where] = self.most
        self.seen += len(inputs)
        self.mean.update(targets)
        self.log("targets", self.mean, on_step=False, on_epoch=True)
        loss = (self(inputs) - targets).square().mean()
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class Notes(Callback):
    """Writes rank 0's metrics of each epoch to a file, and how many micro-batches the steps had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.epochs: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        draw = float(torch.rand(()))
        seen, window = pl_module.seen.item(), trainer.accumulate_grad_batches
        self.epochs.append({**metrics, "window": window, "seen": seen, "draw": draw})
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.epochs))


def data() -> TensorDataset:
    inputs = torch.randn(SIZE, 8, generator=torch.Generator().manual_seed(3))
    return TensorDataset(inputs, inputs.sum(1).sin())


def fit(module: Hungry, flag: str, devices: int, **flags: object) -> Engine:
    arguments = {"global_batch_size": BATCH, "micro_batch_size": "auto", "max_epochs": EPOCHS, **flags}
    engine = Engine(strategy=suffixed(flag, "fork"), devices=devices, **{**QUIET, **arguments})
    engine.fit(module, DataLoader(data(), batch_size=4))
    return engine


def plain_loop() -> dict[str, Tensor]:
    module, samples = Hungry(), data()
    optimizer = adamw(module)
    for _ in range(EPOCHS):
        for first in range(0, SIZE, BATCH):
            inputs, targets = samples[first : first + BATCH]
            optimizer.zero_grad()
            (module(inputs) - targets).square().mean().backward()
            optimizer.step()
    return {name: p.detach() for name, p in module.named_parameters()}


def weights(module: Hungry) -> dict[str, Tensor]:
    names = dict(module.named_parameters())
    return {name: tensor for name, tensor in module.state_dict().items() if name in names}


STRATEGIES = [("single", 1), ("ddp", 3), ("fsdp:no_sync=false", 2)]
MORE_STRATEGIES = [("ddp", 2), ("fsdp", 2), ("fsdp:no_sync=false", 3), ("hsdp:replicate=2", 4)]
WAYS = [("forward", 0), ("backward", 3)]


@pytest.mark.parametrize(
    ("flag", "devices", "where", "from_step"),
    [
        *alternating(STRATEGIES, WAYS),
        *nightly(*((*ranks, *way) for ranks in STRATEGIES for way in (("forward", 3), ("backward", 0)))),
        *nightly(
            *(
                (*ranks, where, step)
                for ranks in MORE_STRATEGIES
                for where in ("forward", "backward")
                for step in (0, 3)
            )
        ),
    ],
)
def test_the_weights_are_those_of_a_plain_loop(flag, devices, where, from_step):
    module = Hungry(most=3, where=where, from_step=from_step)
    fit(module, flag, devices)
    assert largest_difference(weights(module), plain_loop()) <= TOLERANCE


def test_memory_that_cublas_does_not_get_is_out_of_memory():
    module = Hungry(most=5, where="cublas")
    fit(module, "single", 1)
    assert largest_difference(weights(module), plain_loop()) <= TOLERANCE


@pytest.mark.parametrize("compression", ["powersgd:2,start=0,min_ratio=1", "topk:0.5", *nightly("bf16")])
def test_what_a_comm_hook_keeps_is_as_if_it_had_not_happened(compression):
    scarce, ample = Hungry(most=3, where="backward"), Hungry()
    fit(scarce, "ddp:bucket_cap_mb=0.001", 2, compression=compression)
    fit(ample, "ddp:bucket_cap_mb=0.001", 2, compression=compression, micro_batch_size=3)
    assert largest_difference(weights(scarce), weights(ample)) == 0


@pytest.mark.parametrize(
    ("flag", "devices", "where"),
    alternating([("single", 1), ("ddp", 2)], ["forward", "backward"])
    + nightly(("fsdp", 2, "forward"), ("fsdp", 2, "backward")),
)
def test_all_else_is_as_if_it_had_not_happened(flag, devices, where, tmp_path):
    found = []
    for most, micro in ((3, "auto"), (SIZE, 3)):
        module, notes = Hungry(most=most, where=where, dropout=0.3), Notes(tmp_path / str(micro))
        torch.manual_seed(8)
        fit(module, flag, devices, micro_batch_size=micro, callbacks=[notes])
        found.append((module.state_dict(), json.loads(notes.path.read_text())))
    (state, epochs), (expected, expected_epochs) = found
    assert epochs == expected_epochs
    assert largest_difference(state, expected) == 0


class LogsLate(Hungry):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step >= self.from_step:
            self.log("late", batch[1].mean(), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_value_that_is_first_logged_in_a_step_that_is_made_again_is_kept():
    engine = fit(LogsLate(most=3, from_step=1), "single", 1, max_epochs=1)
    torch.testing.assert_close(engine.callback_metrics["late"], data().tensors[1][BATCH:].mean())


def test_what_was_found_is_remembered_by_checkpoints(tmp_path):
    module = Hungry(most=3)
    fit(module, "single", 1, max_epochs=1).save_checkpoint(tmp_path / "saved")
    events: list[int] = []
    again = Hungry()
    engine = Engine(global_batch_size=BATCH, micro_batch_size="auto", max_epochs=2, **QUIET)
    again.on_train_batch_start = lambda batch, batch_idx: events.append(len(batch[0]))
    engine.fit(again, DataLoader(data(), batch_size=4), ckpt_path=tmp_path / "saved")
    assert max(events) == 3


def test_it_grows_again_when_told_to():
    sizes: list[int] = []

    class Grows(Hungry):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            sizes.append(len(batch[0]))
            if self.trainer.global_step == 1:
                self.blocks[1].most["forward"] = self.most = SIZE
                self.trainer.micro_batch_size = 8

    module = Grows(most=3)
    engine = fit(module, "single", 1, max_epochs=1)
    assert sizes == [24, 12, 6, *[3] * (2 * BATCH // 3), 7, 6]
    assert engine.micro_batch_size == 8


def test_one_sample_that_does_not_fit_is_an_error_with_a_table():
    with pytest.raises(torch.OutOfMemoryError, match=r"one sample(.|\n)*optimizer state(.|\n)*strategy='fsdp'"):
        fit(Hungry(most=0), "single", 1)


def test_and_so_it_is_on_one_rank_of_several():
    with pytest.raises(ProcessRaisedException, match=r"out of memory on rank\(s\) 1 with a micro-batch of one sample"):
        fit(Hungry(most=0), "ddp", 2)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"strategy": "ddp:static_graph=true"}, "under ddp:static_graph=true"),
        ({"strategy": "ddp", "sync_batchnorm": True}, "under sync_batchnorm=True"),
        ({"strategy": DDPStrategy()}, "under DDPStrategy"),
    ],
)
def test_what_can_not_be_repeated_is_refused(flags, why):
    with pytest.raises(ValueError, match=f"micro_batch_size='auto' can't repeat a step {why}"):
        Engine(devices=2, global_batch_size=BATCH, micro_batch_size="auto", **QUIET, **flags)


def test_a_step_that_a_profiler_times_is_repeated():
    module = Hungry(most=3)
    fit(module, "single", 1, profiler="simple")
    assert largest_difference(weights(module), plain_loop()) <= TOLERANCE


def test_the_first_step_of_a_resumed_run_is_repeated(tmp_path):
    fit(Hungry(), "single", 1, max_epochs=-1, max_steps=1).save_checkpoint(tmp_path / "saved")
    module = Hungry(most=3, from_step=1)
    engine = Engine(global_batch_size=BATCH, micro_batch_size="auto", max_epochs=EPOCHS, **QUIET)
    engine.fit(module, DataLoader(data(), batch_size=4), ckpt_path=tmp_path / "saved")
    assert largest_difference(weights(module), plain_loop()) <= TOLERANCE


def test_steps_by_hand_are_refused():
    class ByHand(Hungry):
        automatic_optimization = False

    with pytest.raises(ValueError, match="can't repeat a step that is done with manual optimization"):
        fit(ByHand(), "single", 1)


def test_other_errors_stay_what_they_are():
    class Fails(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes do not fit"):
        fit(Fails(), "single", 1)
