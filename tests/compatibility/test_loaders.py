"""Loaders of every kind, and what callbacks do with them."""

import math

from lightning.pytorch import Callback
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from .small import ROWS, Small, loader


def test_loaders_of_several_shapes(make):
    class Takes(Small):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch["a"], batch_idx) + self._loss(batch["b"])

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("val_loss", self._loss(batch))

    trainer = make(max_epochs=1)
    trainer.fit(Takes(), {"a": loader(), "b": loader(8)}, [loader(), loader(8)])
    assert trainer.num_training_batches == 6
    assert trainer.num_val_batches == [6, 3]
    assert set(trainer.callback_metrics) >= {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"}
    combined = CombinedLoader({"a": loader(), "b": loader(8)}, "min_size")
    trainer = make(max_epochs=1, limit_val_batches=0)
    trainer.fit(Takes(), combined)
    assert trainer.num_training_batches == 3
    assert trainer.train_dataloader == combined.iterables


def test_a_stream(make):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(row,) for row in ROWS])

    trainer = make(max_epochs=2, limit_val_batches=0)
    trainer.fit(Small(), DataLoader(Stream(), batch_size=4))
    assert math.isinf(trainer.num_training_batches)
    assert trainer.global_step == 12


def test_any_iterable(make):
    class Batches:
        def __iter__(self):
            return iter([(ROWS[:4],), (ROWS[4:8],)])

        def __len__(self):
            return 2

    trainer = make(max_epochs=1, limit_val_batches=0)
    trainer.fit(Small(), Batches())
    assert trainer.global_step == 2


def test_the_loader_stays_the_users(make):
    mine = loader(shuffle=True)
    trainer = make(max_epochs=1)
    trainer.fit(Small(), mine, val := loader())
    assert trainer.train_dataloader is mine
    assert trainer.val_dataloaders is val
    assert isinstance(mine.sampler, RandomSampler)


def test_a_batch_size_that_a_callback_changes(make):
    class Doubles(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 1:
                trainer.train_dataloader.batch_sampler.batch_size = 8

    batches = BatchSampler(RandomSampler(ROWS), 4, drop_last=False)
    data = DataLoader([(row,) for row in ROWS], batch_sampler=batches)
    sizes = []

    class Notes(Small):
        def training_step(self, batch, batch_idx):
            sizes.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    make(max_epochs=2, callbacks=[Doubles()], limit_val_batches=0).fit(Notes(), data)
    assert sizes[:6] == [4] * 6
    assert set(sizes[6:]) == {8}


def test_loaders_that_change_from_epoch_to_epoch(make):
    class Changes(Small):
        def train_dataloader(self):
            return loader(4 + 4 * self.trainer.current_epoch)

    trainer = make(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Changes())
    assert trainer.global_step == 6 + 3
