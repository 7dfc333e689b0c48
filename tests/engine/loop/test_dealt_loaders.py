"""The samples that rank 0 of two is dealt of the user's order; no process is started for it."""

import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from polyphase.engine.data.global_order import GlobalOrder

from ..tiny import Positions, Stream, engine
from .test_data_connector import (
    SEED,
    SIZE,
    Backwards,
    Batches,
    EndlessBackwards,
    Pairs,
    Prefixed,
    by_class,
    of,
    order_in_one_process,
)


def rank_0_of_2(loader, stage=RunningStage.TRAINING):
    connector = engine(strategy="ddp", devices=2)._data_connector
    return connector._prepare_dataloader(loader, shuffle=stage == RunningStage.TRAINING, mode=stage)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(
    "sampler", [Backwards(), RandomSampler(range(SIZE)), SequentialSampler(range(SIZE))], ids=by_class
)
def test_rank_0_is_dealt_every_other_sample_of_the_users_order(sampler, drop_last):
    loader = DataLoader(Positions(SIZE), batch_size=2, sampler=sampler, drop_last=drop_last)
    order = order_in_one_process(sampler)
    torch.manual_seed(SEED)
    assert [i for batch in rank_0_of_2(loader) for i in batch.tolist()] == order[::2]


EVALUATIONS = [RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING, RunningStage.PREDICTING]


@pytest.mark.parametrize("cls", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("stage", EVALUATIONS)
@pytest.mark.parametrize(
    "sampler", [Backwards(), RandomSampler(range(SIZE)), SequentialSampler(range(SIZE))], ids=by_class
)
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_rank_0_evaluates_every_other_batch_of_the_users_order(sampler, stage, cls):
    order = order_in_one_process(sampler)
    torch.manual_seed(SEED)
    loader = cls(Positions(SIZE), batch_size=2, sampler=sampler)
    batches = rank_0_of_2(loader, stage)
    assert [batch.tolist() for batch in batches] == list(BatchSampler(order, 2, False))[::2]
    assert loader.sampler is sampler


@pytest.mark.parametrize("stage", EVALUATIONS)
def test_drop_last_leaves_out_what_one_process_leaves_out(stage):
    loader = DataLoader(Positions(11), batch_size=2, drop_last=True)
    expected = [[0, 1], [4, 5], [8, 9] if stage == RunningStage.PREDICTING else [8]]  # a prediction leaves out nothing
    assert [batch.tolist() for batch in rank_0_of_2(loader, stage)] == expected


@pytest.mark.parametrize("stage", EVALUATIONS)
def test_rank_0_evaluates_every_other_batch_of_the_users_batch_sampler(stage):
    loader = DataLoader(Positions(SIZE), batch_sampler=Pairs(Backwards()))
    assert [batch.tolist() for batch in rank_0_of_2(loader, stage)] == [[11, 10], [7, 6], [3, 2]]


@pytest.mark.parametrize("stage", EVALUATIONS)
def test_rank_0_evaluates_every_other_sample_of_a_loader_without_batches(stage):
    assert list(map(int, rank_0_of_2(DataLoader(Positions(5), batch_size=None), stage))) == [0, 2, 4]


class Unsized:
    """A batch sampler whose end nobody knows."""

    def __iter__(self):
        return iter([[0, 1], [2]])


@pytest.mark.parametrize(
    "loader",
    [DataLoader(Positions(SIZE), sampler=EndlessBackwards()), DataLoader(Positions(SIZE), batch_sampler=Unsized())],
    ids=["sampler", "batch sampler"],
)
@pytest.mark.parametrize("stage", [RunningStage.VALIDATING, RunningStage.TRAINING])
def test_an_order_without_an_end_that_is_known_cannot_be_shared(loader, stage):
    with pytest.raises(TypeError, match=r"has no __len__, which is needed to split it over the ranks. Give it one, or"):
        rank_0_of_2(loader, stage)


class Shards(Stream):
    """Has the method that Hugging Face's data sets have."""

    def shard(self, num_shards, index):
        return range(index, self.size, num_shards)


class ShardsItself(Stream):
    shards_itself = True


def test_a_stream_is_sharded_as_its_data_set_can():
    found = rank_0_of_2(DataLoader(Shards(6), batch_size=None), RunningStage.VALIDATING)
    assert list(found.dataset) == [0, 2, 4]
    itself = DataLoader(ShardsItself(6))
    assert rank_0_of_2(itself, RunningStage.VALIDATING).dataset is itself.dataset


@pytest.mark.parametrize("mode", [RunningStage.TRAINING, RunningStage.VALIDATING])
@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (DataLoader(Stream(6)), r"read all of Stream,.*: give it a method `shard\(num_shards, index\)`"),
        (Batches(), "read all of Batches,.*: put a DataLoader around it"),
    ],
    ids=["stream", "batches"],
)
def test_what_each_rank_would_read_whole_is_refused_in_a_run_with_remedies(loader, message, mode):
    connector = engine(strategy="ddp", devices=2)._data_connector
    connector.trainer.state.status = TrainerStatus.RUNNING
    with pytest.raises(ValueError, match=f"Each of the 2 ranks would {message}") as error:
        connector._prepare_dataloader(loader, shuffle=False, mode=mode)
    assert "`shards_itself = True`" in str(error.value)


@pytest.mark.parametrize("flags", [{"use_distributed_sampler": False}, {"strategy": "single", "devices": 1}])
def test_it_is_read_whole_in_one_process_and_without_the_engines_samplers(flags):
    connector = engine(**{"strategy": "ddp", "devices": 2} | flags)._data_connector
    connector.trainer.state.status = TrainerStatus.RUNNING
    for loader in (DataLoader(Stream(6)), Batches()):
        prepared = connector._prepare(loader, mode=RunningStage.VALIDATING)
        assert getattr(prepared, "dataset", prepared) is getattr(loader, "dataset", loader)


@pytest.mark.parametrize("shards_itself", [True, False])
def test_it_is_if_the_user_says_so(shards_itself):
    connector = engine(strategy="ddp", devices=2)._data_connector
    connector.trainer.state.status = TrainerStatus.RUNNING
    batches = Batches()
    batches.shards_itself = shards_itself
    assert connector._prepare(batches, mode=RunningStage.VALIDATING) is batches


@pytest.mark.parametrize(
    "sampler", [Backwards(), RandomSampler(range(SIZE)), SequentialSampler(range(SIZE))], ids=by_class
)
def test_rank_0_is_dealt_the_order_of_the_users_batch_sampler(sampler):
    dealt = rank_0_of_2(DataLoader(Positions(SIZE), batch_sampler=BatchSampler(sampler, 2, False)))
    order = order_in_one_process(sampler)
    torch.manual_seed(SEED)
    assert [batch.tolist() for batch in dealt] == list(BatchSampler(order[::2], 2, False))


@pytest.mark.parametrize(
    "sampler", [Backwards(), RandomSampler(range(SIZE)), SequentialSampler(range(SIZE))], ids=by_class
)
def test_of_a_batch_sampler_of_the_users_own_whole_batches_are_dealt(sampler):
    dealt = rank_0_of_2(DataLoader(Positions(SIZE), batch_sampler=Pairs(sampler)))
    order = order_in_one_process(sampler)
    torch.manual_seed(SEED)
    assert [batch.tolist() for batch in dealt] == list(BatchSampler(order, 2, False))[::2]


def test_a_distributed_sampler_is_left_alone():
    loader = DataLoader(Positions(SIZE), sampler=DistributedSampler(Positions(SIZE), num_replicas=2, rank=0))
    assert rank_0_of_2(loader) is loader


def test_several_ranks_have_the_attributes_of_the_users_sampler_and_refuse_another_batch_size():
    found = rank_0_of_2(of(WeightedRandomSampler([1.0, 3.0] * 6, SIZE)))
    assert found.sampler.weights.tolist() == [1.0, 3.0] * 6
    with pytest.raises(ValueError, match=r"batch_sampler.batch_size = 9: several ranks share these batches"):
        found.batch_sampler.batch_size = 9


def test_what_is_dealt_has_the_class_and_attributes_of_the_users_loader():
    found = rank_0_of_2(Prefixed("a", SIZE))
    assert type(found) is Prefixed
    assert found.prefix == "a"
    assert isinstance(found.sampler, GlobalOrder)
