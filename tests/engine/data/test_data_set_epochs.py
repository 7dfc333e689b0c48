"""A data set with indices and a `set_epoch`: a resumed run reads the right epoch's samples, or says why it can't."""

import pytest
from lightning.pytorch import Callback, seed_everything
from torch.utils.data import DataLoader, IterableDataset

from ..tiny import Positions, SavesIn, engine
from .runs import Trains


class Epochs(Positions):
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return self.epoch * 100 + index


class Attribute(Epochs):
    """Told by its attribute alone."""

    set_epoch = None


class Tells(Callback):
    def on_train_epoch_start(self, trainer, module):
        data = trainer.train_dataloader.dataset
        if data.set_epoch is None:
            data.epoch = trainer.current_epoch
        else:
            data.set_epoch(trainer.current_epoch)


class Counting(IterableDataset):
    """A stream that counts its epochs itself."""

    epoch = -1

    def __iter__(self):
        self.epoch += 1
        return (self.epoch * 100 + i for i in range(6))


class Told(Counting):
    """A stream that is told, by its attribute."""

    epoch, set_epoch = 0, None

    def __iter__(self):
        return (self.epoch * 100 + i for i in range(6))


def run(folder, hook, at, cls=Epochs, **arguments):
    """What the run trained on after it was saved, and what one that continues from there trains on."""
    saves, seen = SavesIn(hook, at, folder / "saved"), []
    for seed, path in ((7, None), (8, folder / "saved")):
        seed_everything(seed, verbose=False)
        module = Trains()
        tells = [] if cls is Counting else [Tells()]
        callbacks = [*tells, saves] if path is None else tells
        data = cls(6) if issubclass(cls, Epochs) else cls()
        loader = DataLoader(data, batch_size=2, shuffle=issubclass(cls, Epochs) or None, **arguments)
        engine(max_epochs=3, callbacks=callbacks).fit(module, loader, ckpt_path=path)
        seen.append(module.seen)
    return seen[0][saves.num_seen :], seen[1]


@pytest.mark.parametrize(
    ("hook", "at", "num_workers"),
    [("on_train_epoch_end", 2, 0), ("on_train_batch_end", 4, 0), ("on_train_batch_end", 4, 1)],
)
def test_goes_on_in_the_right_epoch(hook, at, num_workers, tmp_path):
    whole, resumed = run(tmp_path, hook, at, num_workers=num_workers)
    assert resumed == whole


@pytest.mark.parametrize("cls", [Attribute, Counting, Told])
@pytest.mark.parametrize(("hook", "at"), [("on_train_epoch_end", 2), ("on_train_batch_end", 4)])
def test_an_attribute_counts_as_told(cls, hook, at, tmp_path):
    whole, resumed = run(tmp_path, hook, at, cls)
    assert resumed == whole


@pytest.mark.parametrize("cls", [Attribute, Told])
def test_an_attribute_reaches_workers_that_begin_in_mid_epoch(cls, tmp_path):
    whole, resumed = run(tmp_path, "on_train_batch_end", 4, cls, num_workers=1)
    assert resumed == whole


def test_workers_that_did_not_hear_of_an_attribute_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Attribute was set to epoch 2 by its attribute `epoch` .* with epoch 1"):
        run(tmp_path, "on_train_epoch_end", 2, Attribute, num_workers=1)


def test_workers_that_were_started_before_the_epoch_was_told_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Epochs was set to epoch 2 by set_epoch .* started with epoch 1"):
        run(tmp_path, "on_train_epoch_end", 2, num_workers=1)


@pytest.mark.parametrize(("hook", "at"), [("on_train_epoch_end", 2), ("on_train_batch_end", 4)])
def test_workers_that_stay_are_refused(hook, at, tmp_path):
    with pytest.raises(ValueError, match=r"set to epoch 1 by set_epoch, but workers that stay .* is unknown"):
        run(tmp_path, hook, at, num_workers=1, persistent_workers=True)
