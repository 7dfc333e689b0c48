"""What the flags of the batch sizes refuse, before any process starts."""

import pytest
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from polyphase.engine import Engine

from ..tiny import QUIET, Positions, Seen, Stream, engine


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be a whole number of at least 1, but got 0"),
        ({"global_batch_size": -8}, "at least 1, but got -8"),
        ({"global_batch_size": 2.5}, "whole number of at least 1, but got 2.5"),
        ({"global_batch_size": True}, "whole number of at least 1, but got True"),
        ({"global_batch_size": 3, "devices": 4, "strategy": "ddp"}, "smaller than the number of ranks, 4"),
        ({"global_batch_size": 8, "accumulate_grad_batches": 2}, "both say how many micro-batches a step has"),
        ({"global_batch_size": 8, "micro_batch_size": 9}, "micro_batch_size must be(.|\n)*at most 8, but got 9"),
        ({"global_batch_size": 8, "micro_batch_size": 0}, "micro_batch_size must be a whole number of at least 1"),
        (
            {"global_batch_size": 8, "micro_batch_size": "all"},
            "micro_batch_size='all': a whole number of at least 1, 'auto' or None",
        ),
        ({"micro_batch_size": 4}, "says how a global batch is cut: give global_batch_size"),
        ({"micro_batch_size": "auto"}, "says how a global batch is cut: give global_batch_size"),
    ],
)
def test_flags_that_can_not_be_honoured(flags, message):
    with pytest.raises(ValueError, match=message):
        Engine(**{**QUIET, "devices": 1, **flags})


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Positions(40), batch_size=16), "batch_size=16 is larger than global_batch_size=8"),
        (DataLoader(Positions(40), batch_size=None), "batch_size=None, whose samples may be batches already"),
        (DataLoader(Stream(40), batch_size=4), "Stream is a stream(.|\n)*weight"),
        (
            DataLoader(Positions(40), batch_size=4, sampler=DistributedSampler(Positions(40), 1, 0)),
            "the DataLoader's own DistributedSampler would both split the samples",
        ),
        ([1, 2, 3], "needs a DataLoader to take the samples from, but training data is a list"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_loaders_that_contradict_it(loader, message):
    with pytest.raises(ValueError, match=message):
        engine(global_batch_size=8).fit(Seen(), loader)


def test_a_micro_batch_of_its_own_takes_the_place_of_the_loaders():
    module = Seen()
    engine(global_batch_size=8, micro_batch_size=3).fit(module, DataLoader(Positions(19), batch_size=16))
    assert [len(batch) for batch in module.epochs[0]] == [3, 3, 2, 3, 3, 2, 3]


def test_batches_of_the_users_own_make_up_global_ones():
    class Pairs(BatchSampler):
        """Of samples that belong together."""

        def __iter__(self):
            return iter([[i, 12 - i] for i in range(6)])

        def __len__(self):
            return 6

    module = Seen()
    batches = Pairs(range(12), 2, False)
    engine(global_batch_size=4, micro_batch_size=3).fit(module, DataLoader(Positions(13), batch_sampler=batches))
    steps = [[*module.epochs[0][k], *module.epochs[0][k + 1]] for k in range(0, 6, 2)]
    assert steps == [[0, 12, 1, 11], [2, 10, 3, 9], [4, 8, 5, 7]]
