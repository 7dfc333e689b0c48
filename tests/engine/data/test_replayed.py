"""One process, whole fits: streams whose state leaves out a shuffle buffer, as Hugging Face's, go on exactly."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from ..tiny import SavesIn
from .runs import assert_goes_on, train

SIZE = 23


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")


class BufferShuffledExamplesIterable:
    """Of the name and the attributes that Hugging Face's has."""

    def __init__(self, seed: int | None, buffer_size: int = 8) -> None:
        self.generator = np.random.default_rng(seed)
        self.buffer_size = buffer_size
        self.read = 0

    def examples(self, epoch: int) -> Iterator[int]:
        draws = np.random.default_rng([epoch, *self.generator.bit_generator.state["state"].values()])
        buffer: list[int] = []
        while self.read < SIZE or buffer:
            while self.read < SIZE and len(buffer) < self.buffer_size:
                buffer.append(self.read)
                self.read += 1
            yield buffer.pop(int(draws.integers(len(buffer))))


class Buffered(IterableDataset[int]):
    """Speaks as Hugging Face's: a state is of an epoch, waits for all iterators to come, and knows no buffer."""

    waiting: dict[str, int] | None = None

    def __init__(self, seed: int | None = 3) -> None:
        self._ex_iterable = BufferShuffledExamplesIterable(seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        state = self.waiting or {}
        self._ex_iterable.read = state["read"] if state.get("epoch") == self.epoch else 0
        yield from self._ex_iterable.examples(self.epoch)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "read": self._ex_iterable.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.waiting = state


class Within(IterableDataset[int]):
    """A data set of the user's that has such a one."""

    def __init__(self) -> None:
        self.inner = Buffered()

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)

    def state_dict(self) -> dict[str, int]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.inner.load_state_dict(state)


class TellsTheEpoch(Callback):
    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)


LOADERS: dict[str, Any] = {
    "plain": lambda: DataLoader(Buffered(), batch_size=4),
    "torchdata's": lambda: StatefulDataLoader(Buffered(), batch_size=4),
    "a worker": lambda: DataLoader(Buffered(), batch_size=4, num_workers=1),
}
HOOKS = [
    ("on_train_batch_end", 2),
    ("on_train_batch_end", 6),
    ("on_train_batch_end", 8),
    ("on_train_epoch_end", 2),
    ("on_train_epoch_start", 2),
]


def of_epochs(name: str, hook: str, at: int, folder: Any) -> None:
    """`assert_goes_on`, with a callback of the user's that tells the data set its epoch."""
    whole = train(LOADERS[name], callbacks=[TellsTheEpoch()])
    saves = SavesIn(hook, at, folder / "s")
    assert train(LOADERS[name], callbacks=[TellsTheEpoch(), saves]) == whole
    assert train(LOADERS[name], folder / "s", callbacks=[TellsTheEpoch()]) == whole[saves.num_seen :]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("name", LOADERS)
def test_goes_on(name, tmp_path):
    assert_goes_on(LOADERS[name], tmp_path, 2)


@pytest.mark.parametrize(("hook", "at"), HOOKS)
def test_goes_on_in_the_epoch_that_a_callback_told(hook, at, tmp_path):
    of_epochs("plain", hook, at, tmp_path)


@pytest.mark.parametrize(("hook", "at"), [HOOKS[2], HOOKS[3]])
def test_goes_on_in_the_epoch_that_a_callback_told_in_a_worker(hook, at, tmp_path):
    of_epochs("a worker", hook, at, tmp_path)


def test_a_shuffle_without_a_seed_is_refused(tmp_path):
    train(lambda: DataLoader(Buffered(None), 4), callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "s")])
    with pytest.raises(ValueError, match=r"shuffled with other random numbers .* give its `shuffle` the same `seed`"):
        train(lambda: DataLoader(Buffered(None), 4), tmp_path / "s")


def test_a_buffer_within_a_data_set_of_the_users_is_refused_in_mid_epoch(tmp_path):
    def make():
        return DataLoader(Within(), 4)

    train(make, callbacks=[SavesIn("on_train_batch_end", 2, tmp_path / "s")])
    with pytest.raises(
        ValueError, match=r"Within has a `state_dict` that leaves out .*Give the DataLoader that data set"
    ):
        train(make, tmp_path / "s")


def test_a_loader_shows_the_users_data_set():
    module_epochs = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            module_epochs.append(trainer.train_dataloader.dataset.epoch)

    train(lambda: DataLoader(Buffered(), 4), callbacks=[Looks()])
    assert module_epochs == [0]
