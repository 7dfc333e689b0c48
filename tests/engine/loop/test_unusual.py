"""What few modules and loaders do comes out as under the stock trainer."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from .stock_comparison import TRAINERS, Notes, Small, error_of, exactly, outcome, rows, trainer_of


class ByHand(Notes):
    def __init__(self, num_optimizers: int = 1, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num_optimizers, self.every = num_optimizers, every

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        optimizers = self.optimizers()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            loss = self.loss(batch)
            self.manual_backward(loss / self.every)
            if (batch_idx + 1) % self.every == 0:
                self.clip_gradients(optimizer, 0.5, "norm")
                optimizer.step()
                optimizer.zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()
        self.log("loss", loss, prog_bar=True)
        return {"loss": loss, "more": batch_idx}

    def configure_optimizers(self) -> Any:
        parts = [self.backbone, self.head] if self.num_optimizers == 2 else [self]
        optimizers = [torch.optim.SGD(part.parameters(), 0.05) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizers[0], 1)]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((outputs, self.trainer.global_step))


@pytest.mark.parametrize(("num_optimizers", "every"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_manual_optimization(same, num_optimizers, every):
    found = same(lambda: ByHand(num_optimizers, every), log_every_n_steps=2, max_epochs=2)
    assert found["step"] == 8 * num_optimizers / every


class Overrides(Notes):
    """Each of the hooks around a step does a little more than Lightning's."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.seen.append(("optimizer_step", epoch, batch_idx))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (batch_idx + 1)
        if batch_idx == 2:
            optimizer_closure()  # and no step
        else:
            optimizer.step(closure=optimizer_closure)

    def backward(self, loss, *args, **kwargs):
        self.seen.append(("backward", loss))
        (loss * 2).backward()

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.seen.append(("clipping", gradient_clip_val, gradient_clip_algorithm))
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.seen.append(("zero", [p.grad is None for p in self.parameters()]))
        optimizer.zero_grad(set_to_none=False)

    def lr_scheduler_step(self, scheduler, metric):
        self.seen.append(("schedule", metric))
        scheduler.step(epoch=self.trainer.global_step)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.seen.append(("before transfer", self.trainer.state.stage.value, dataloader_idx))
        return batch + 0.1

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        self.seen.append(("transfer", str(device)))
        return super().transfer_batch_to_device(batch, device, dataloader_idx) * 2

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch - 0.1

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


HOOKS = [name for name in vars(Overrides) if not name.startswith("_") and name != "configure_optimizers"]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # what the hook above is for
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("hook", [*HOOKS, "all of them"])
def test_overridden_hooks(same, hook, accumulate):
    def make():
        others = set() if hook == "all of them" else {*HOOKS} - {hook}
        return type("Some", (Overrides,), {name: getattr(Small, name) for name in others})()

    found = same(make, accumulate_grad_batches=accumulate)
    assert found["seen"] or hook == "on_after_batch_transfer"


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
def test_hooks_of_a_data_module(tmp_path):
    class Data(pl.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Any] = []

        def train_dataloader(self):
            return rows()

        def val_dataloader(self):
            return [rows(1), rows(2)]

        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.seen.append(("before", dataloader_idx))
            return batch + 1

        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.seen.append(("after", exactly(batch)))
            return batch * 2

    class Takes(Small):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch))

    found = []
    for trainer_class in TRAINERS:
        data, module = Data(), Takes()
        trainer = trainer_of(trainer_class, tmp_path / trainer_class.__name__)
        trainer.fit(module, datamodule=data)
        found.append((data.seen, outcome(trainer, module, tmp_path / trainer_class.__name__)))
    assert found[0] == found[1]
    assert ("before", 1) in found[0][0]


def test_clipping_that_is_an_attribute_of_the_object(same):
    def make():
        module = Notes()
        module.configure_gradient_clipping = lambda optimizer, **named: module.seen.append(named)
        return module

    assert len(same(make)["seen"]) == 8


@pytest.mark.parametrize("late", ["on_after_backward", "on_train_batch_start", "training_step", "other arguments"])
def test_hooks_that_are_attributes_of_the_object_and_change_in_mid_epoch(same, late):
    def make():
        module = Notes()
        module.on_before_zero_grad = lambda optimizer: module.seen.append("zero")
        changed = {
            "on_after_backward": ("on_after_backward", lambda: module.seen.append("late")),
            "on_train_batch_start": ("on_train_batch_start", lambda batch, batch_idx: module.seen.append("late")),
            "training_step": ("training_step", lambda batch, batch_idx: module.loss(batch * 2)),
            "other arguments": ("training_step", lambda batch: module.loss(batch * 2)),
        }

        def on_train_batch_end(outputs, batch, batch_idx):
            module.seen.append(outputs)
            if batch_idx == 1:
                setattr(module, *changed[late])

        module.on_train_batch_end = on_train_batch_end
        return module

    found = same(make)
    assert found["seen"].count("zero") == 8
    assert found["seen"].count("late") == (6 if late.startswith("on_") else 0)


class LogsItsWay(Notes):
    """Its class has a `log` of its own."""

    def log(self, name, value, *args, **kwargs):
        self.seen.append((name, value))
        super().log(f"my_{name}", value, *args, **kwargs)


def logs_by_its_object():
    module = Notes()
    usual = module.log

    def log(name, value, **named):
        module.seen.append((name, value))
        usual(name, value, **named)

    module.log = log
    return module


@pytest.mark.parametrize("make", [LogsItsWay, logs_by_its_object])
def test_a_log_of_the_users(same, make):
    assert len(same(make)["seen"]) == 12


def test_a_copy_made_in_mid_run_is_like_the_module(same):
    class Copies(Notes):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            trainer, self.trainer = self.trainer, None
            other = copy.deepcopy(self)
            self.trainer = trainer
            self.seen = [exactly(other.state_dict()), other.training, error_of(other.log, "a", "text")]

    assert same(Copies)["seen"]


@pytest.mark.parametrize("mode", ["sequential", "max_size", "min_size", "max_size_cycle"])
def test_several_validation_loaders(tmp_path, mode):
    class Takes(Notes):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            parts = [part for part in (batch if isinstance(batch, list) else [batch]) if part is not None]
            self.seen.append((len(parts), batch_idx, dataloader_idx))
            loss = sum(self.loss(part) for part in parts)
            self.log("val_loss", loss, on_step=True, on_epoch=True, batch_size=4)
            self.log(f"alone_{dataloader_idx}", loss, add_dataloader_idx=False, batch_size=2)

    found = []
    for trainer_class in TRAINERS:
        module, folder = Takes(), tmp_path / trainer_class.__name__
        trainer = trainer_of(trainer_class, folder, val_check_interval=2)
        trainer.fit(module, rows(), CombinedLoader([rows(2), rows(3)], mode))
        found.append((exactly(module.seen), outcome(trainer, module, folder)))
    assert found[0] == found[1]
    assert len(found[0][0]) == 4 * {"sequential": 5, "min_size": 2}.get(mode, 3)


class LBFGS(Notes):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=3)

    def on_before_optimizer_step(self, optimizer):
        self.seen.append(len(self.seen))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_lbfgs_calls_its_closure_several_times(same, accumulate):
    found = same(LBFGS, accumulate_grad_batches=accumulate)
    assert len(found["seen"]) > found["step"]


def actions(tmp_path, make: Any, loader: Any = None, **flags: Any) -> dict[str, int]:
    """How often a profiler has seen each action, which is the same under both trainers."""
    found = []
    tmp_path.mkdir(exist_ok=True)
    for trainer_class in TRAINERS:
        profiler = SimpleProfiler()
        trainer = trainer_of(trainer_class, tmp_path / trainer_class.__name__, profiler=profiler, **flags)
        trainer.fit(make(), rows() if loader is None else loader(), rows(2))
        durations = profiler.recorded_durations
        # The engine has a callback of its own, which the stock trainer lacks.
        found.append({_named(n): len(durations[n]) for n in durations if "RunSummary" not in n})
    assert found[0] == found[1]
    return found[1]


def test_simple_profiler_sees_the_same_actions(tmp_path):
    found = actions(tmp_path, Small)
    assert found["run_training_batch"] == 8
    assert found["[LightningModule]Small.optimizer_step"] == 8
    assert found["[TrainingEpochLoop].train_dataloader_next"] == 8


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter` argument")
def test_so_it_does_in_unusual_runs(tmp_path):
    assert actions(tmp_path / "by hand", ByHand)["optimizer_step"] == 8
    windows = actions(tmp_path / "windows", Small, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert windows["[LightningModule]Small.configure_gradient_clipping"] == 4
    assert actions(tmp_path / "iterator", lambda: TakesIterator())["run_training_batch"] == 8
    assert actions(tmp_path / "stream", Small, lambda: DataLoader(Stream(), batch_size=4))["run_training_batch"] == 8


def _named(action: str) -> str:
    # Actions are named after the classes of Lightning's parts, which the engine's have names of their own for.
    return action.replace("[_EvaluationLoop]", "[EvaluationLoop]").replace(
        "[_TrainingEpochLoop]", "[TrainingEpochLoop]"
    )


class TakesIterator(Notes):
    def training_step(self, dataloader_iter):
        batch, batch_idx, dataloader_idx = next(dataloader_iter)
        self.seen.append((batch_idx, dataloader_idx))
        loss = self.loss(batch)
        self.log("loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        self.seen.append(("validation", batch_idx))
        self.log("val_loss", self.loss(batch), batch_size=len(batch))


# Lightning's, at each use of it.
@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter` argument")
def test_a_step_that_takes_the_iterator(same):
    assert len(same(TakesIterator)["seen"]) == 12


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter` argument")
@pytest.mark.parametrize("flags", [{}, {"limit_train_batches": 2}], ids=str)
def test_a_step_that_reads_until_its_stream_has_ended(same, flags):
    same(TakesIterator, lambda: DataLoader(Stream(), batch_size=4), **flags)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter` argument")
def test_a_step_that_takes_the_iterator_is_asked_for_the_size_of_each_batch_that_it_logs(same):
    class LogsTwice(TakesIterator):
        def training_step(self, dataloader_iter):
            loss = self.loss(next(dataloader_iter)[0])
            self.log("loss", loss, batch_size=4)
            self.seen.append(error_of(self.log, "loss", loss))
            return loss

    assert [type_and_text[0] for type_and_text in same(LogsTwice)["seen"][:4]] == ["MisconfigurationException"] * 4


class StepsItself(SingleDeviceStrategy):
    """Called after each micro-batch, as DeepSpeed's strategy is; steps after every second one."""

    handles_gradient_accumulation = True

    def __init__(self) -> None:
        super().__init__(device="cpu")
        self.seen: list[int] = []

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **_: Any) -> Any:
        loss = closure()
        self.seen.append(self.lightning_module.global_step)
        if len(self.seen) % 2 == 0:
            optimizer.step()
        return loss


def test_a_strategy_that_accumulates_gradients_itself(tmp_path):
    class Schedules(Notes):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_before_zero_grad(self, optimizer):
            self.seen.append("zero")

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append((outputs["loss"], self.trainer.global_step))

    found = []
    for trainer_class in TRAINERS:
        strategy, module, folder = StepsItself(), Schedules(), tmp_path / trainer_class.__name__
        trainer = trainer_of(trainer_class, folder, strategy=strategy, accumulate_grad_batches=2)
        trainer.fit(module, rows(), rows(2))
        found.append((strategy.seen, exactly(module.seen), outcome(trainer, module, folder)))
    assert found[0] == found[1]
    assert found[0][0] == [0, 0, 1, 1, 2, 2, 3, 3]


class TakesBatchOnly(Notes):
    def training_step(self, batch):
        self.seen.append(len(batch))
        return self.loss(batch)

    def validation_step(self, batch):
        self.log("val_loss", self.loss(batch))


class NamesIndexDifferently(Notes):
    def training_step(self, data, i):
        self.seen.append(i)
        return self.loss(data)


@pytest.mark.parametrize("make", [TakesBatchOnly, NamesIndexDifferently])
def test_other_signatures(same, make):
    assert len(same(make)["seen"]) == 8


class TakesDict(Notes):
    def training_step(self, batch, batch_idx):
        parts = [part for part in batch.values() if part is not None]
        self.seen.append([len(part) for part in parts])
        loss = sum(self.loss(part) for part in parts)
        self.log("loss", loss, on_epoch=True, batch_size=4)
        return loss


@pytest.mark.parametrize("mode", [None, "max_size_cycle", "min_size", "max_size"])
def test_several_training_loaders(same, mode):
    def loaders():
        several = {"a": rows(4), "b": rows(2, batch_size=3)}
        return several if mode is None else CombinedLoader(several, mode)

    assert same(TakesDict, loaders)["step"] == (4 if mode == "min_size" else 8)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(16, 4, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"limit_train_batches": 2},
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 2},
        {"max_steps": 6, "max_epochs": -1},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
def test_streams_without_length(same, flags):
    same(Notes, lambda: DataLoader(Stream(), batch_size=4), **flags)


def test_a_generator_is_a_loader(same):
    same(Notes, lambda: (batch for batch in rows(3)), max_epochs=1)


@dataclass
class Pair:
    rows: Tensor
    names: list[str]


class Box:
    """Moves itself, and says so."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.moved = rows, 0

    def to(self, device: Any, **_: Any) -> "Box":
        self.moved += 1
        return self


# Lightning's, about the two kinds of batches that are meant here.
@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`", "ignore:train_dataloader yielded None")
@pytest.mark.parametrize("kind", ["dict", "dataclass", "object", "nested", "tuple", "none in between"])
def test_batches_of_any_kind(same, kind):
    wrap = {
        "dict": lambda b: {"rows": b, "index": 3},
        "dataclass": lambda b: Pair(b, ["a"]),
        "object": Box,
        "nested": lambda b: [{"x": (b, "text")}, None],
        "tuple": lambda b: (b, 1.5),
        "none in between": lambda b: None if b[0, 0] > 0.5 else b,
    }[kind]

    class Takes(Notes):
        def training_step(self, batch, batch_idx):
            found = batch[0]["x"][0] if kind == "nested" else batch[0] if kind == "tuple" else batch
            found = found["rows"] if kind == "dict" else getattr(found, "rows", found)
            self.seen.append((type(batch).__name__, getattr(batch, "moved", None)))
            loss = self.loss(found)
            self.log("loss", loss, on_epoch=True, batch_size=4 if kind == "object" else None)
            return loss

    same(Takes, lambda: DataLoader(list(rows(5)), batch_size=None, collate_fn=wrap))
