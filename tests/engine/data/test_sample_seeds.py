"""With `seed_samples`, what is drawn for a sample depends on seed, epoch and index alone."""

import json
import pickle
import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from polyphase.engine.data import LengthBucketing
from polyphase.engine.data.sample_seeds import SeededSamples

from ..tiny import SavesIn, Stream, engine
from .runs import Trains, combined, train

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's, in loaders made by a test

SIZE = 14


class Augmented(Dataset[Tensor]):
    """Sample i is i, and a draw from each of the global generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        drawn = [float(torch.rand(())), float(np.random.rand()), random.random()]
        return torch.tensor([index, *drawn], dtype=torch.float64)


class InBatches(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        assert get_worker_info() is None or get_worker_info().dataset is self
        draws = torch.rand(len(indices), 3, dtype=torch.float64)
        return [torch.tensor([index, *draw]) for index, draw in zip(indices, draws.tolist(), strict=True)]


class Stateful(Augmented):
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class OwnIteration(DataLoader):
    def __iter__(self) -> Any:
        return iter([self.dataset[0]])


SHUFFLED = partial(DataLoader, shuffle=True)


def draws(seen: list[Any]) -> dict[tuple[int, float], list[float]]:
    """What was drawn by (epoch, index of the sample); each is seen once in an epoch."""
    samples = [(epoch, sample) for epoch, _, batch in seen for sample in (batch if _is_batch(batch) else [batch])]
    found = {(epoch, sample[0]): sample[1:] for epoch, sample in samples}
    assert len(found) == len(samples)
    return found


def _is_batch(batch: list[Any]) -> bool:
    return isinstance(batch[0], list)


def seeded(make_loader: Any, *args: Any, **flags: Any) -> dict[tuple[int, float], list[float]]:
    return draws(train(make_loader, *args, **{"max_epochs": 2, "seed_samples": True, **flags}))


EXPECTED = partial(seeded, lambda: SHUFFLED(Augmented(), batch_size=4))


def test_each_sample_of_each_epoch_has_draws_of_its_own():
    found = EXPECTED()
    assert found.keys() == {(epoch, float(index)) for epoch in range(2) for index in range(SIZE)}
    values = [value for drawn in found.values() for value in drawn]
    assert len(set(values)) == len(values)
    assert EXPECTED() == found


def halves() -> ConcatDataset[Tensor]:
    return ConcatDataset([Subset(Augmented(), range(SIZE // 2)), Subset(Augmented(), range(SIZE // 2, SIZE))])


@pytest.mark.parametrize(
    "make_loader",
    [
        lambda: SHUFFLED(Augmented(), batch_size=3, num_workers=2),
        lambda: SHUFFLED(Augmented(), batch_size=5, num_workers=2, persistent_workers=True),
        lambda: SHUFFLED(Augmented(), batch_size=None),
        lambda: SHUFFLED(halves(), batch_size=2),
        lambda: StatefulDataLoader(Augmented(), batch_size=3, shuffle=True),
        lambda: StatefulDataLoader(Augmented(), batch_size=3, num_workers=1, persistent_workers=True),
        lambda: DataLoader(Augmented(), batch_sampler=LengthBucketing(range(1, SIZE + 1), max_tokens=30)),
    ],
    ids=["workers", "persistent", "no batches", "Concat of Subsets", "torchdata", "its workers", "bucketing"],
)
def test_any_loader_draws_the_same(make_loader):
    assert seeded(make_loader) == EXPECTED()


def test_a_global_batch_size_changes_no_draw():
    loader = lambda: SHUFFLED(Augmented(), batch_size=4, num_workers=1, persistent_workers=True)  # noqa: E731
    assert seeded(loader, global_batch_size=6) == EXPECTED()


def test_data_sets_read_in_batches_draw_by_sample():
    whole = seeded(lambda: SHUFFLED(InBatches(), batch_size=4))
    assert seeded(lambda: SHUFFLED(InBatches(), batch_size=3, num_workers=1)) == whole


@pytest.mark.parametrize(
    ("loader_class", "arguments"),
    [
        (DataLoader, {"batch_size": 2, "num_workers": 2, "persistent_workers": True}),
        (DataLoader, {"batch_size": 4}),
        (StatefulDataLoader, {"batch_size": 2}),
    ],
    ids=["workers", "as before", "torchdata"],
)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_a_resumed_run_draws_the_same_in_any_layout(loader_class, arguments, hook, tmp_path):
    saves = SavesIn(hook, 1 + (hook == "on_train_batch_end"), tmp_path / "saved")
    whole = seeded(lambda: loader_class(Augmented(), batch_size=4, shuffle=True), callbacks=[saves])
    assert whole == EXPECTED()
    make_loader = lambda: loader_class(Augmented(), shuffle=True, **arguments)  # noqa: E731
    rest = seeded(make_loader, tmp_path / "saved")  # under another global seed
    assert len(rest) == len(whole) - (8 if hook == "on_train_batch_end" else SIZE)
    assert rest.items() <= whole.items()


class Writes(Trains):
    def __init__(self, path: Any) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        (self.path / f"{self.trainer.global_rank}.json").write_text(json.dumps(self.seen))


def test_two_ranks_draw_what_one_draws(tmp_path):
    seed_everything(7, verbose=False)
    run = engine(strategy="ddp_fork", devices=2, max_epochs=2, seed_samples=True)
    run.fit(Writes(tmp_path), SHUFFLED(Augmented(), batch_size=1, num_workers=1, persistent_workers=True))
    ranks = [draws(json.loads((tmp_path / f"{rank}.json").read_text())) for rank in range(2)]
    assert not ranks[0].keys() & ranks[1].keys()
    assert ranks[0] | ranks[1] == EXPECTED()


def test_two_ranks_that_resume_the_run_of_one_draw_what_it_would_have_drawn(tmp_path):
    saved = tmp_path / "saved"
    whole = EXPECTED(callbacks=[SavesIn("on_train_batch_end", 2, saved)])
    seed_everything(8, verbose=False)
    run = engine(strategy="ddp_fork", devices=2, max_epochs=2, seed_samples=True)
    run.fit(Writes(tmp_path), SHUFFLED(Augmented(), batch_size=3, num_workers=1), ckpt_path=saved)
    ranks = [draws(json.loads((tmp_path / f"{rank}.json").read_text())) for rank in range(2)]
    assert not ranks[0].keys() & ranks[1].keys()
    rest = ranks[0] | ranks[1]
    assert len(rest) == len(whole) - 2 * 4
    assert rest.items() <= whole.items()


def test_the_loaders_of_a_step_draw_differently():
    def loaders() -> Any:
        return combined("min_size", a=DataLoader(Augmented(), num_workers=1), b=DataLoader(Augmented()))

    seen = train(loaders, max_epochs=1, seed_samples=True)
    a, b = (draws([(epoch, index, batch[name]) for epoch, index, batch in seen]) for name in "ab")
    assert a.keys() == b.keys()
    assert not {tuple(drawn) for drawn in a.values()} & {tuple(drawn) for drawn in b.values()}


class Evaluates(Trains):
    def __init__(self) -> None:
        super().__init__()
        self.drawn_by_step: list[float] = []
        self.evaluated: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn_by_step += [float(torch.rand(())), float(np.random.rand()), random.random()]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluated.append((self.trainer.current_epoch, batch_idx, batch.tolist()))


def test_each_evaluation_draws_the_same_and_other_than_training():
    seed_everything(7, verbose=False)
    module = Evaluates()
    val = DataLoader(Augmented(), batch_size=4, num_workers=1)
    run = engine(max_epochs=2, num_sanity_val_steps=0, seed_samples=True)
    run.fit(module, SHUFFLED(Augmented(), batch_size=4), val)
    epochs = draws(module.evaluated)
    first, second = ([epochs[epoch, float(index)] for index in range(SIZE)] for epoch in range(2))
    assert first == second
    assert first[0] != draws(module.seen)[0, 0.0]
    module.evaluated.clear()
    run.validate(module, DataLoader(Augmented()), verbose=False)
    assert [drawn for _, drawn in sorted(draws(module.evaluated).items())] == first


def test_order_and_module_draw_as_without_it():
    runs = []
    for seeds in (False, True):
        seed_everything(7, verbose=False)
        module, loader = Evaluates(), SHUFFLED(torch.arange(SIZE), batch_size=3)  # which draws nothing
        engine(max_epochs=2, seed_samples=seeds).fit(module, loader)
        runs.append((module.seen, module.drawn_by_step, torch.rand(()), np.random.rand(), random.random()))
    assert runs[0] == runs[1]


def test_the_data_set_stays_the_users():
    data = Augmented()
    loader = SHUFFLED(data, num_workers=1, persistent_workers=True)
    for seeds in (False, True):
        run = engine(seed_samples=seeds)
        run.fit(Trains(), loader)
        assert (run.train_dataloader is loader) is not seeds  # a copy of it, since it iterates otherwise
        assert type(run.train_dataloader.dataset) is Augmented
        assert run.train_dataloader.dataset is data
    assert loader.dataset is data


def test_what_is_sent_to_spawned_workers_keeps_its_seeds():
    samples = SeededSamples(InBatches(), (3,), is_shared=False)
    samples.set_epoch(2)
    sent = pickle.loads(pickle.dumps(samples))  # noqa: S301
    assert torch.equal(torch.stack(sent.__getitems__([1, 2])), torch.stack(samples.__getitems__([1, 2])))


def test_indices_need_not_be_numbers():
    samples = SeededSamples(dict.fromkeys(["a", ("a", 1), np.int64(5), 5]), (3,), is_shared=False)
    assert samples["a"] is samples["a", 1] is samples[torch.tensor(5).item()] is None
    with pytest.raises(TypeError, match=r"seeds each sample by its index, but got the index 0.5"):
        samples[0.5]


@pytest.mark.parametrize(
    ("make_loader", "why"),
    [
        (lambda: DataLoader(Stream(4)), "Stream is an IterableDataset, whose samples have no index"),
        (lambda: range(4), "range is no DataLoader over a data set with indices"),
        (lambda: OwnIteration(Augmented()), "OwnIteration has its own `__iter__`"),
        (lambda: StatefulDataLoader(Stateful()), "Stateful has a state of its own"),
    ],
)
def test_what_has_no_indices_is_refused(make_loader, why):
    module, loader = Trains(), make_loader()
    for loaders in ((loader, None), (DataLoader(Augmented()), loader)):
        with pytest.raises(ValueError, match=f"seed_samples=True seeds .* but {why}"):
            engine(seed_samples=True).fit(module, *loaders)
    assert not module.seen


def test_a_resumed_run_without_it_says_so(tmp_path):
    EXPECTED(callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "saved")])
    with pytest.warns(UserWarning, match="of a run with seed_samples=True. This run does not have it"):
        train(lambda: SHUFFLED(Augmented(), batch_size=4), tmp_path / "saved")
