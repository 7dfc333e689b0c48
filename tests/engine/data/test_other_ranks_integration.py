"""A run in mid-epoch goes on with other ranks or batches: that epoch and all later ones are whole."""

import itertools
from collections import Counter
from typing import Any

import pytest
from torch.utils.data import DataLoader

from ..tiny import Positions, SavesIn
from .sharded import run

SIZE, STOP, EPOCHS = 101, 4, 4


def loader(batch_size: int, num_workers: int = 0) -> Any:
    return lambda: DataLoader(Positions(SIZE), batch_size, shuffle=True, num_workers=num_workers)


@pytest.mark.parametrize(
    ("then", "now"),
    [
        ({"ranks": 2}, {"ranks": 3}),
        ({"ranks": 2}, {"ranks": 1, "batch_size": 7, "num_workers": 1}),
        ({"ranks": 1}, {"ranks": 2, "batch_size": 7}),
    ],
    ids=["2 to 3", "2 to 1, other batches", "1 to 2, other batches"],
)
def test_each_sample_once_in_the_epoch_that_was_stopped_and_in_three_later_ones(then, now, tmp_path, monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # taken back after the test
    counts = {"batch_size": 4, **then}, {"batch_size": 4, **now}
    ranks = [each.pop("ranks") for each in counts]
    saved = tmp_path / "saved"
    saves = SavesIn("on_train_batch_end", STOP, saved)
    whole = run(tmp_path / "first", loader(**counts[0]), ranks[0], callbacks=[saves], max_epochs=1)
    done = [item for rank in whole for item in rank[:STOP]]
    rest = run(tmp_path / "second", loader(**counts[1]), ranks[1], saved, max_epochs=EPOCHS)
    seen = itertools.chain(done, *rest)
    epochs = [Counter() for _ in range(EPOCHS)]
    for epoch, batch in seen:
        epochs[epoch].update(batch)
    assert epochs == [Counter(range(SIZE))] * EPOCHS
