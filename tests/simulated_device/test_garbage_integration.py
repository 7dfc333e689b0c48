"""Garbage is collected at the same batches on all ranks, and as ever where that would keep memory."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from polyphase.engine import Engine
from tests.engine.parity import QUIET

from . import in_a_child

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute

NUM_BATCHES = 45


class Rows(Dataset[Tensor]):
    """Each row says whether the process that makes it collects by itself."""

    def __len__(self) -> int:
        return 2 * NUM_BATCHES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), float(gc.isenabled()))


class Collections(LightningModule):
    """Notes after which batches all garbage is collected, and where Python collects by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.collected: list[int] = []
        self.is_automatic: dict[str, set[bool]] = {"training": set(), "validation": set(), "epoch end": set()}
        self.by_workers: set[float] = set()

    def note(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start" and not gc.isenabled():
            self.collected.append(self.trainer.fit_loop.epoch_loop.batch_progress.total.ready)

    def on_train_start(self) -> None:
        gc.callbacks.append(self.note)

    def on_train_epoch_end(self) -> None:
        self.is_automatic["epoch end"].add(gc.isenabled())

    def on_train_end(self) -> None:
        gc.callbacks.remove(self.note)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.is_automatic["training"].add(gc.isenabled())
        self.by_workers |= set(batch.flatten().tolist())
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.is_automatic["validation"].add(gc.isenabled())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Leaves(Collections):
    """A step leaves a tensor of the device in a cycle, which only a collection frees."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        cycle = [torch.zeros(1000, device=self.device)]
        cycle.append(cycle)  # type: ignore[arg-type]
        return super().training_step(batch, batch_idx)


class Fails(Collections):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            raise KeyError("the user's")


class Enables(Collections):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            gc.enable()


def _fit(kind: Callable[[], Collections], **flags: Any) -> tuple[Collections, Engine]:
    module = kind()
    flags = {"accelerator": "sim", "devices": 1, "max_epochs": 2, "num_sanity_val_steps": 0, **QUIET, **flags}
    engine = Engine(**flags)
    loaders = [DataLoader(Rows(), 2 // engine.data_size, num_workers=n) for n in (1, 0)]
    engine.fit(module, *loaders)
    return module, engine


def _seen(kind: Callable[[], Collections], **flags: Any) -> Any:
    gc.unfreeze()  # what was frozen before the fork
    module, _ = _fit(kind, **flags)
    return module.collected, module.is_automatic, module.by_workers, (gc.isenabled(), gc.get_freeze_count())


def test_all_garbage_is_collected_after_the_first_batch_and_every_twentieth() -> None:
    collected, is_automatic, by_workers, after = in_a_child(_seen, Collections, val_check_interval=15)
    assert collected == [1, 20, 40, 46, 60, 80]
    assert is_automatic == {"training": {False}, "validation": {True}, "epoch end": {True}}
    assert by_workers == {1.0}, "a loader's workers collect by themselves"
    assert after == (True, 0)


def test_steps_that_leave_tensors_in_cycles_are_followed_by_a_collection() -> None:
    collected, *_ = in_a_child(_seen, Leaves, max_epochs=1)
    assert collected == list(range(1, NUM_BATCHES + 1))


def _after_an_error() -> tuple[bool, int]:
    gc.unfreeze()
    with pytest.raises(KeyError, match="the user's"):
        _fit(Fails)
    return gc.isenabled(), gc.get_freeze_count()


def test_python_collects_again_after_an_error() -> None:
    assert in_a_child(_after_an_error) == (True, 0)


def test_who_turns_automatic_collection_on_has_it() -> None:
    collected, is_automatic, _, after = in_a_child(_seen, Enables, max_epochs=1)
    assert (collected[0], is_automatic["training"], after) == (1, {False, True}, (True, 0))


def _disabled_and_frozen() -> Any:
    gc.disable()
    gc.freeze()
    off, _ = _fit(Collections)
    gc.enable()
    on, _ = _fit(Collections)
    is_frozen = gc.get_freeze_count() > 0
    return off.collected, off.is_automatic["training"], off.is_automatic["epoch end"], is_frozen, on.collected


def test_what_the_user_has_turned_off_or_frozen_stays_so() -> None:
    assert in_a_child(_disabled_and_frozen) == ([], {False}, {False}, True, [1, 20, 40, 46, 60, 80])


def _on_a_cpu() -> Any:
    module, _ = _fit(Collections, accelerator="cpu")
    return module.is_automatic["training"]


def test_on_a_cpu_python_collects() -> None:
    assert in_a_child(_on_a_cpu) == {True}


class SaysSo(Collections):
    def on_train_end(self) -> None:
        super().on_train_end()
        of_ranks = self.trainer.all_ranks.all_gather_object(self.collected)  # type: ignore[attr-defined]
        assert of_ranks == [[1, 20, 40, 46, 60, 80]] * 2


def test_ranks_collect_after_the_same_batches() -> None:
    in_a_child(_fit_two)


def _fit_two() -> None:
    _fit(SaysSo, strategy="ddp_fork", devices=2)
