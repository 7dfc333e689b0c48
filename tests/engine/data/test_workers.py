"""What workers draw at random: a run that goes on draws what the uninterrupted one has drawn."""

import json
import multiprocessing
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from polyphase.engine.data.workers import _InWorker
from tests.pairs import alternating, nightly

from ..tiny import SavesIn, engine
from .runs import Trains, assert_goes_on, combined, train


class Augmented(Dataset[torch.Tensor]):
    """Draws from all generators that torch seeds in a worker."""

    def __init__(self, size: int = 14) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = get_worker_info()
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([index, *drawn, 0 if worker is None else worker.seed % 1000], dtype=torch.float64)


class InOrder(Augmented):
    """Draws nothing."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


def batches(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples) + torch.rand(())


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")


LOADER = partial(DataLoader, batch_size=2, shuffle=True, num_workers=2)
LOADERS = {
    "new in each epoch": lambda: LOADER(Augmented()),
    "persistent": lambda: LOADER(Augmented(), persistent_workers=True),
    "torchdata's": lambda: StatefulDataLoader(Augmented(), 2, shuffle=True, num_workers=2),
    "torchdata's, persistent": lambda: StatefulDataLoader(
        Augmented(), 2, shuffle=True, num_workers=2, persistent_workers=True
    ),
    "in the collation": lambda: LOADER(InOrder(), collate_fn=batches),
    "without batches": lambda: LOADER(Augmented(6), batch_size=None),
    "one that begins again beside a longer one": lambda: combined(
        "max_size_cycle", a=LOADER(Augmented()), b=LOADER(Augmented(7), persistent_workers=True)
    ),
}


WINDOW = {"accumulate_grad_batches": 3}
BEGINNING = {"hook": "on_train_start"}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test
@pytest.mark.parametrize(
    ("at", "flags", "name"),
    [
        *alternating([(3, {}), (1, {"hook": "on_train_epoch_end"})], LOADERS),
        (4, WINDOW, "persistent"),
        (1, BEGINNING, "new in each epoch"),
        *nightly(
            *((4, WINDOW, name) for name in LOADERS if name != "persistent"),
            *((1, BEGINNING, name) for name in LOADERS if name != "new in each epoch"),
        ),
    ],
)
def test_goes_on(name, at, flags, tmp_path):
    flags = {**flags, "max_epochs": 2}
    if flags.get("hook") == "on_train_start":
        saves = SavesIn("on_train_start", at, tmp_path / "saved")
        whole = train(LOADERS[name], callbacks=[saves], max_epochs=2)
        assert train(LOADERS[name], tmp_path / "saved", max_epochs=2) == whole
        return
    assert_goes_on(LOADERS[name], tmp_path, at, **flags)


def _draws_once(worker: int) -> None:
    torch.rand(())


def test_goes_on_with_an_initialization_of_the_users(tmp_path):
    assert_goes_on(lambda: LOADER(Augmented(), worker_init_fn=_draws_once), tmp_path, 3, max_epochs=2)


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_epoch_start"])
def test_what_workers_that_stay_have_fetched_in_vain_counts(hook, tmp_path):
    assert_goes_on(LOADERS["persistent"], tmp_path, 1 + (hook[-1] == "t"), hook=hook, limit_train_batches=2)


def test_what_runs_in_workers_can_be_sent_to_spawned_ones():
    inside = _InWorker(LOADER(Augmented(), worker_init_fn=_draws_once), None)
    collate, begin = pickle.loads(pickle.dumps((inside.collate, inside.begin)))  # noqa: S301
    assert collate.__self__ is begin.__self__  # as begin notes what collate compares with


def test_a_second_run_on_workers_that_stayed_goes_on_too(tmp_path):
    def twice(ckpt_path: Path | None = None) -> list[Any]:
        seed_everything(7 if ckpt_path is None else 8, verbose=False)
        loader, seen = LOADER(Augmented(), persistent_workers=True), []
        for number in range(2):
            module = Trains()
            saves = SavesIn("on_train_batch_end", 3, tmp_path / "saved")
            if number or ckpt_path is None:
                run = engine(max_epochs=2, callbacks=[saves] if number and ckpt_path is None else [])
                run.fit(module, loader, ckpt_path=ckpt_path)
            seen.append(module.seen)
        return seen[1]

    whole = twice()
    assert twice(tmp_path / "saved") == whole[3:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, of torch
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_second_run_after_one_that_was_stopped_in_mid_epoch_goes_on_too(persistent_workers, tmp_path):
    def make() -> StatefulDataLoader:
        shared: Any = {"num_workers": 1, "persistent_workers": persistent_workers}
        return StatefulDataLoader(range(14), 3, shuffle=True, **shared)  # type: ignore[arg-type]

    seed_everything(7, verbose=False)
    loader, module = make(), Trains()
    engine(max_epochs=2, max_steps=2).fit(Trains(), loader)
    saves = SavesIn("on_train_batch_end", 3, tmp_path / "saved")
    engine(max_epochs=3, callbacks=[saves]).fit(module, loader)
    assert train(make, tmp_path / "saved") == module.seen[3:]


def test_other_workers_begin_anew(tmp_path):
    def indices(seen: list[Any]) -> list[Any]:
        return [[sample[0] for sample in batch] for _, _, batch in seen]

    whole = train(LOADERS["new in each epoch"], callbacks=[SavesIn("on_train_batch_end", 3, tmp_path / "saved")])
    rest = train(lambda: LOADER(Augmented(), num_workers=1), tmp_path / "saved")
    assert indices(rest) == indices(whole[3:])
    assert rest != whole[3:]


def test_nothing_is_sent_where_nothing_is_drawn(tmp_path):
    saved = tmp_path / "saved.ckpt"
    for data, drawn in ((Augmented(), {0, 1}), (InOrder(), set())):
        train(lambda data=data: LOADER(data), callbacks=[SavesIn("on_train_batch_end", 3, saved)])
        (rank,) = torch.load(saved, weights_only=True)["polyphase"]["ranks"]
        assert rank["data"]["loaders"][0]["workers"]["states"].keys() == drawn


class Writes(Trains):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        (self.path / f"{self.trainer.global_rank}.json").write_text(json.dumps(self.seen))


def test_each_rank_goes_on_with_its_own(tmp_path):
    def run(seed: int, ckpt_path: Path | None = None) -> list[list[Any]]:
        seed_everything(seed, verbose=False)
        saves = SavesIn("on_train_batch_end", 2, tmp_path / "saved")
        callbacks = [saves] if ckpt_path is None else []
        fits = engine(strategy="ddp_fork", devices=2, max_epochs=2, callbacks=callbacks)
        fits.fit(Writes(tmp_path), LOADER(Augmented()), ckpt_path=ckpt_path)
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]

    whole = run(7)
    assert run(8, tmp_path / "saved") == [rank[2:] for rank in whole]


@pytest.mark.parametrize("draws", [True, False])
def test_a_save_after_the_run_says_what_ended_workers_may_have_drawn(draws, tmp_path):
    def load():
        data = Augmented if draws else InOrder
        more = {"longer": LOADER(data(30), persistent_workers=True), "shorter": LOADER(data(6))}
        return combined("min_size", **more)

    expected = train(load)
    seed_everything(7, verbose=False)
    run = engine(max_epochs=3, max_steps=3)
    run.fit(Trains(), load())
    with pytest.warns(UserWarning, match="persistent workers have ended with unread batches"):
        run.save_checkpoint(tmp_path / "saved")
    rest = train(load, tmp_path / "saved")
    numbers = [[[item[0] for item in batch[name]] for name in batch] for *_, batch in rest]
    assert numbers == [[[item[0] for item in batch[name]] for name in batch] for *_, batch in expected[3:]]
    if not draws:
        assert rest == expected[3:]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("limit", [2, 1.0])
def test_workers_of_torchdatas_loader_end_with_the_run(limit, persistent):
    loader = StatefulDataLoader(Augmented(), 2, num_workers=1, persistent_workers=persistent)
    before = set(multiprocessing.active_children())  # of loaders of earlier tests, which nothing has collected yet
    for _ in range(2):
        engine(max_epochs=1, limit_train_batches=limit).fit(Trains(), loader)
        assert set(multiprocessing.active_children()) <= before


def test_workers_end_when_another_loader_replaces_theirs():
    """Else the garbage collector waits for 5 s for each of them, at any moment of the run."""
    before = set(multiprocessing.active_children())

    class Module(Trains):
        def train_dataloader(self) -> Any:
            return DataLoader(Augmented(), 2, num_workers=2, persistent_workers=True)

        def on_train_epoch_end(self) -> None:
            assert len(set(multiprocessing.active_children()) - before) == 2

    engine(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Module())
    assert set(multiprocessing.active_children()) <= before


def test_workers_stay_when_the_same_loader_is_returned_again():
    loader, workers = DataLoader(Augmented(), 2, num_workers=1, persistent_workers=True), set()

    class Module(Trains):
        def train_dataloader(self) -> Any:
            return loader

        def on_train_epoch_end(self) -> None:
            workers.update(process.pid for process in loader._iterator._workers)

    engine(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Module())
    assert len(workers) == 1
