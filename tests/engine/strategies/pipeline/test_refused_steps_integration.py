"""What a pipeline refuses by name: steps that stages can't do, batches that can't be cut, a CheckpointIO."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from polyphase.engine import Engine
from tests.engine.parity import MLP, largest_difference, loader
from tests.engine.strategies.test_ddp_integration import QUIET

from ..test_optimizer_trial import Lamb
from .test_strategy_integration import data


class WeighsSome(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "weight": 1} if 0 in batch[1] else loss


class ReturnsNothing(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class LogsAbsent(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("norm", self.net[0].weight.norm())
        return super().training_step(batch, batch_idx)


class LogsAnother(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mean", MeanMetric())
        return loss


class Expert(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return super().forward(x)


class KeepsAux(MLP):
    """Blocks keep a part of the loss on themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Expert(64, 64) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + sum(block.aux for block in self.net)


class KeepsOutputs(MLP):
    """The losses of an epoch, kept in a list by a step, are read in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.losses).mean())


class ScalesByBatch(MLP):
    """Multiplies gradients by what the step has noted of its batch, which is a micro-batch in a pipeline."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale = batch[0].abs().mean()
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.scale)


class ScalesByOwn(ScalesByBatch):
    """By what is the same in each micro-batch, and by what the hook itself has put in the place of another value."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.half = torch.tensor(0.5)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.scale = self.half * 0.5
        super().on_after_backward()


class Communicates(MLP):
    """Averages its loss over the job by itself, of which only the last stage has one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        total = loss.detach().clone()
        dist.all_reduce(total)
        return loss + 0 * total


class Waits(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


class WaitsLater(MLP):
    """Asks who it is in each batch, which is no communication."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx and dist.get_world_size() > 1:
            functional_collectives.all_reduce(loss.detach(), "sum", dist.group.WORLD)
        return loss


class Reduces(torch.autograd.Function):
    """Reduces its gradient over the job, as sequence-parallel layers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient)
        return gradient


class ReducesInBackward(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return Reduces.apply(loss) if batch_idx else loss


class ReducesInAHook(MLP):
    """A hook of a parameter, which waits for the end of the schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.register_hook(lambda gradient: Reduces.backward(None, gradient))


class SumsGradients(MLP):
    """Averages the gradients of the ranks by hand, in the hook after backward."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


class TwoViews(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, classes = batch
        return nn.functional.cross_entropy(self.net(x) + self.net(-x), classes)


class Gathers(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0 * self.all_gather(loss.detach()).sum()


class HooksContainer(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net.register_full_backward_hook(lambda module, inputs, outputs: None)


class WithLamb(MLP):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Lamb(self.parameters())


class ClipsByHand(MLP):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.1)


class Distils(MLP):
    """A teacher that follows the student, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(64, 32)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for mine, other in zip(self.teacher.parameters(), self.net[0].parameters(), strict=True):
            mine.data.lerp_(other.data, 0.01)


class Fails(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net(batch[0].flatten(1))
        raise KeyError("mine")


class Contrasts(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found = self.net(batch[0])
        return nn.functional.cross_entropy(found @ found.T, torch.arange(len(found)))


class Normalises(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)))


class Asserts(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert len(batch[0]) == 8
        return super().training_step(batch, batch_idx)


class ReadsInBackward(MLP):
    """A backward hook of the last block uses a weight of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.net[-1].register_full_backward_hook(self._scale)

    def _scale(self, block: nn.Module, inputs: Any, outputs: Any) -> Any:
        return (inputs[0] / (1 + self.net[0].weight.abs().sum()),)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (ReadsInBackward, r"in _scale: .* needs the values of 'net.0.weight', which another pipeline stage has"),
        (
            Asserts,
            r'(?s)AssertionError.*, .* in training_step: "assert len.*". The step ran with a micro-batch of 2 of .* 8',
        ),
        (WeighsSome, "returned a weight for some micro-batches of a batch and none for others"),
        (ReturnsNothing, "`training_step` must return a loss in a pipeline, .* returned NoneType"),
        (LogsAbsent, "in training_step: .* logs 'norm', which depends on parameters of another pipeline stage"),
        (LogsAnother, r"self.log\('mean', ...\) was given a MeanMetric that is no attribute of the module"),
        (KeepsAux, r"in <genexpr>: .* reads 'aux' of 'net.0', which the block 'net.0' writes on another"),
        (KeepsOutputs, "the attribute 'losses' of KeepsOutputs is changed by each micro-batch, .* 4 times a batch"),
        (
            ScalesByBatch,
            r"in on_after_backward: .* reads 'scale' of ScalesByBatch, which `training_step` writes in each micro",
        ),
        (Communicates, r"in training_step: .* communicates with other ranks \(all_reduce\), which"),
        (Waits, r"in training_step: .* communicates with other ranks \(barrier\), which"),
        (WaitsLater, r"in training_step: .* communicates with other ranks \(all_reduce\), which"),
        (TwoViews, r"calls 'net.0' out of order, or once more .* Two views of a batch can go through the blocks"),
        (SumsGradients, r"communicates with other ranks \(all_reduce\), in on_after_backward, where the stages of"),
        (ReducesInBackward, r"in backward: .* communicates with other ranks \(all_reduce\), which"),
        (ReducesInAHook, r"in backward: .* communicates with other ranks \(all_reduce\), which"),
        (
            HooksContainer,
            "a backward hook of 'net', which contains the blocks of a pipeline, would get the gradient of",
        ),
        (WithLamb, "Lamb steps a parameter by what it knows of others too"),
        (
            ClipsByHand,
            r"in configure_gradient_clipping: .* reads the gradient of 'net..*', which another pipeline stage",
        ),
        (Distils, r"in on_train_batch_end: .* needs the values of '.*', which another pipeline stage has"),
        (Fails, "KeyError: 'mine'"),
        # Warnings, which are errors in tests.
        (
            Contrasts,
            r"the loss of 4 samples \(.*, with random activations\) is not the mean of that of two micro-batches",
        ),
        (Normalises, "the BatchNorm 'net.0.1' and 3 more normalises each micro-batch of 2 samples by itself"),
    ],
)
def test_what_a_step_does_that_stages_can_not(module, message):
    engine = Engine(strategy="pp_fork:pipeline_size=2", accelerator="cpu", devices=2, max_steps=2, **QUIET)
    with pytest.raises(Exception, match=message):
        engine.fit(module(), data())


def test_a_hook_reads_what_is_no_micro_batchs_own():
    states = []
    for strategy, devices in (("pp_fork", 2), ("single", 1)):
        torch.manual_seed(1)
        module = ScalesByOwn()
        Engine(strategy=strategy, accelerator="cpu", devices=devices, max_steps=2, **QUIET).fit(module, data(16))
        states.append(module.state_dict())
    assert largest_difference(*states) < 1e-5


def test_gathering_with_other_numbers_of_micro_batches_is_refused():
    engine = Engine(strategy="pp+ddp_fork:pipeline_size=2", accelerator="cpu", devices=4, max_epochs=1, **QUIET)
    with pytest.raises(
        Exception, match=r"in training_step: .* have cut their batches into \[3, 2\] micro-batches, and"
    ):
        engine.fit(Gathers(), data(5, 4))


def test_a_hook_of_all_modules_is_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        engine = Engine(strategy="pp_fork", accelerator="cpu", devices=2, max_steps=1, **QUIET)
        with pytest.raises(Exception, match=r"is registered for all modules \(register_module_forward_hook\), but"):
            engine.fit(MLP(), data())
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(8, 64), torch.zeros(3)), r"each batch of 8 samples into micro-batches, but .* tensor \[3\]"),
        (("a", {"b": 1}), "the number of samples does not show in this list"),
    ],
)
def test_batches_that_can_not_be_cut(batch, message):
    engine = Engine(strategy="pp_fork", accelerator="cpu", devices=2, max_steps=1, **QUIET)
    with pytest.raises(Exception, match=message):
        engine.fit(MLP(), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


class OwnIO(TorchCheckpointIO):
    """Anything that is not ours."""


def test_a_checkpoint_io_of_the_users_own_is_refused(tmp_path):
    engine = Engine(
        strategy="pp_fork",
        accelerator="cpu",
        devices=2,
        max_steps=1,
        plugins=[OwnIO()],
        callbacks=[ModelCheckpoint(tmp_path)],
        **QUIET | {"enable_checkpointing": True},
    )
    with pytest.raises(Exception, match="'pp_fork' can't save through a CheckpointIO of your own"):
        engine.fit(MLP(), data())


class Rows(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return loader("mlp", 1)


def test_micro_batches_must_divide_the_batches_of_a_data_module_too():
    engine = Engine(strategy="pp_fork:microbatches=3", devices=2, max_steps=1, **QUIET)
    with pytest.raises(ProcessRaisedException, match=r"pp:microbatches=3 does not divide the DataLoader's batch_size="):
        engine.fit(MLP(), datamodule=Rows())
