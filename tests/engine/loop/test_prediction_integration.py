"""Predictions come back in order from all ranks, whoever started them, and writers are told whose they are."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from polyphase.engine.distributed.object_group import ObjectGroup
from tests.distributed import run_ranks

from ..tiny import Positions, Seen, as_rank, engine

SIZE = 13


class Predicts(Seen):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))  # FSDP shards no scalars

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"ids": batch, "name": f"batch {batch_idx}"}


def ids(predictions):
    return [batch["ids"].tolist() for batch in predictions]


ALONE = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12]]


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("strategy", ["single", "ddp_fork", "ddp_spawn", "fsdp_fork"])
def test_predictions_come_back_in_order(strategy):
    num_ranks = 1 if strategy == "single" else 2
    trainer = engine(strategy=strategy, devices=num_ranks)
    assert ids(trainer.predict(Predicts(), DataLoader(Positions(SIZE), batch_size=3))) == ALONE
    trainer = engine(strategy=strategy, devices=num_ranks)
    assert trainer.predict(Predicts(), DataLoader(Positions(SIZE)), return_predictions=False) is None


def test_launchers_of_lightnings_own_still_refuse():
    trainer = engine(strategy=DDPStrategy(start_method="fork"), devices=2)
    with pytest.raises(MisconfigurationException, match="`return_predictions` should be set to `False`"):
        trainer.predict_loop.return_predictions = True


class Writes(BasePredictionWriter):
    """Notes what it is told."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert prediction["ids"].tolist() == batch_indices == batch.tolist()
        self.batches.append(batch_indices)

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        assert ids(predictions) == batch_indices[0], "those of this rank"
        self.epochs += batch_indices


def writers(rank, tmp_path):
    as_rank(rank)
    for shuffle in (False, True):
        writer = Writes()
        torch.manual_seed(0)
        loader = DataLoader(Positions(SIZE), batch_size=3, shuffle=shuffle)
        trainer = engine(strategy="ddp", devices=2, callbacks=[writer])
        found = trainer.predict(Predicts(), loader, return_predictions=not shuffle)
        assert writer.epochs == [writer.batches]
        (tmp_path / f"{rank}-{shuffle}").write_text(json.dumps(writer.batches))
        assert found is None if shuffle else ids(found) == ALONE


@pytest.mark.timeout(100)
@pytest.mark.filterwarnings("ignore:Your `predict_dataloader`'s sampler has shuffling")
def test_writers_are_told_the_indices_of_each_batch(tmp_path):
    run_ranks(writers, 2, tmp_path, timeout_s=90, start_method="fork")
    assert json.loads((tmp_path / "0-False").read_text()) == [[0, 1, 2], [6, 7, 8], [12]]
    assert json.loads((tmp_path / "1-False").read_text()) == [[3, 4, 5], [9, 10, 11]]
    shuffled = [i for rank in range(2) for batch in json.loads((tmp_path / f"{rank}-True").read_text()) for i in batch]
    assert sorted(shuffled) == list(range(SIZE))


def several_loaders_and_nothing_gathered(rank):
    as_rank(rank)
    loaders = [DataLoader(Positions(SIZE), batch_size=3), DataLoader(Positions(1))]
    found = engine(strategy="ddp", devices=2).predict(Predicts(), loaders)
    assert [ids(of_loader) for of_loader in found] == [ALONE, [[0]]]

    class Refuses(ObjectGroup):
        def gathered(self, mine):
            raise AssertionError("nothing is asked for")

    trainer = engine(strategy="ddp", devices=2)
    trainer.strategy.data_ranks = Refuses()
    assert trainer.predict(Predicts(), loaders, return_predictions=False) is None


@pytest.mark.timeout(100)
def test_several_loaders_and_nothing_gathered():
    run_ranks(several_loaders_and_nothing_gathered, 2, timeout_s=90, start_method="fork")
