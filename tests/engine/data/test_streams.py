"""Streams that several ranks read: their parts, and their common end."""

import math
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.multiprocessing import ProcessRaisedException
from torch.utils.data import DataLoader, DistributedSampler

from polyphase.engine.data.clone_loader import clone_loader
from polyphase.engine.data.streams import (
    UnevenEvalLoader,
    check_made_for,
    check_own_part,
    check_script_makes_none,
    shard_of,
)
from polyphase.engine.errors import RefusedError

from ..tiny import Regression, Stream, engine, rows


def said(*others):
    """What the ranks say at each batch: this one first, then `others`, by their numbers of batches."""
    asked = iter(range(100))

    def agree(mine):
        at = next(asked)
        return [mine, *(at < number for number in others)]

    return agree


def as_uneven_eval(loader, agree, length):
    return clone_loader(loader, UnevenEvalLoader, all_gather_bools=agree, length=length)


def test_a_stream_goes_on_until_no_rank_has_a_batch():
    loader = as_uneven_eval(DataLoader(Stream(5), batch_size=2), said(5, 1), None)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4], [4], [4]]
    assert loader.num_real == 3


def test_none_of_a_streams_batches_is_padding_while_there_are_more():
    loader = as_uneven_eval(DataLoader(Stream(4), batch_size=2), said(1), None)
    batches = iter(loader)
    next(batches)
    assert loader.num_real == math.inf
    assert [batch.tolist() for batch in batches] == [[2, 3]]


def test_streams_that_are_empty_on_all_ranks():
    assert list(as_uneven_eval(DataLoader(Stream(0)), said(0), None)) == []


@pytest.mark.parametrize(("mine", "other", "lacks"), [(0, 1, 0), (1, 0, 1)])
def test_a_rank_without_any_batch_is_named_on_all_ranks(mine, other, lacks):
    with pytest.raises(ValueError, match=rf"\(Stream\) has no batch at all on rank\(s\) \[{lacks}\] of 2"):
        list(as_uneven_eval(DataLoader(Stream(mine)), said(other), None))


def test_the_length_is_that_of_all_ranks():
    assert len(as_uneven_eval(DataLoader(Stream(4)), said(), 7)) == 7
    with pytest.raises(TypeError, match="has no length on every rank"):
        len(as_uneven_eval(DataLoader(Stream(4)), said(), None))


def test_a_data_set_that_cannot_be_sharded():
    assert shard_of(DataLoader(Stream(4)), 2, 0) is None


class Sharded(Stream):
    num_shards = 2

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.size // num_shards)


def test_fewer_shards_than_ranks_are_refused():
    part = shard_of(DataLoader(Sharded(4), batch_size=None), 2, 0)
    assert part is not None
    assert list(part) == [0, 1]
    with pytest.raises(ValueError, match=r"Sharded has 2 shard\(s\), which 3 ranks can't share: give it as many"):
        shard_of(DataLoader(Sharded(4)), 3, 0)


def _hugging_faces(kind: str, **attributes: Any) -> Sharded:
    """A stream of the name and the attributes that Hugging Face's has."""
    data: Any = Sharded(4)
    data._ex_iterable = type("MappedExamplesIterable", (), {})()
    data._ex_iterable.ex_iterable = type(kind, (), {})()
    vars(data._ex_iterable.ex_iterable).update(attributes)
    return data


@pytest.mark.parametrize(
    ("kind", "attributes", "named"),
    [
        ("TakeExamplesIterable", {"n": 2, "split_when_sharding": True}, "take"),
        ("SkipExamplesIterable", {"n": 2}, "skip"),
        ("FilteredExamplesIterable", {"with_indices": True}, r"filter\(..., with_indices=True\)"),
    ],
)
def test_streams_whose_samples_are_counted_are_refused_on_several_ranks(kind, attributes, named):
    loader = DataLoader(_hugging_faces(kind, **attributes), batch_size=None)
    with pytest.raises(ValueError, match=f"its `{named}` counts only the samples of one rank's"):
        shard_of(loader, 2, 0)
    assert shard_of(loader, 1, 0) is not None


@pytest.mark.parametrize(
    ("kind", "attributes"),
    [
        # What `split_dataset_by_node` has given a rank, of which it takes its own.
        ("TakeExamplesIterable", {"n": 2, "split_when_sharding": False}),
        ("FilteredExamplesIterable", {"with_indices": False}),
    ],
)
def test_streams_that_choose_samples_otherwise_are_shared(kind, attributes):
    part = shard_of(DataLoader(_hugging_faces(kind, **attributes), batch_size=None), 2, 0)
    assert part is not None
    assert list(part) == [0, 1]


@pytest.mark.parametrize("kind", ["CyclingMultiSourcesExamplesIterable", "RandomlyCyclingMultiSourcesExamplesIterable"])
def test_a_mixture_that_ends_with_a_source_is_told_on_several_ranks(kind):
    def told(strategy: str, num_ranks: int) -> list[str]:
        loader = DataLoader(_hugging_faces(kind, stopping_strategy=strategy), batch_size=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert shard_of(loader, num_ranks, 0) is not None
        return [str(warning.message) for warning in caught]

    for strategy in ("first_exhausted", "all_exhausted"):
        (warning,) = told(strategy, 2)
        assert "mixes sources until one of them ends, and each of the 2 ranks mixes its own shards" in warning
        assert told(strategy, 1) == []
    assert told("all_exhausted_without_replacement", 2) == []


def test_a_data_set_of_a_package_that_shards_itself_is_left_as_it_is():
    cls = type("StreamingDataset", (Stream,), {"__module__": "litdata.streaming.dataset"})
    loader = DataLoader(cls(4))
    assert shard_of(loader, 2, 0) is loader


class OwnRanks(Stream):
    """Reads the samples of its rank among all of them."""

    shards_itself = True

    def __iter__(self):
        return iter(range(dist.get_rank(), self.size, dist.get_world_size()))


class Replayed(Stream):
    shards_itself = False


class Stock(OwnRanks):
    """As Hugging Face's is after `split_dataset_by_node`."""

    shards_itself = None
    _distributed = SimpleNamespace(rank=0, world_size=1)


@pytest.mark.parametrize("data", [Replayed(4), Stream(4), Stock(4)], ids=lambda data: type(data).__name__)
def test_data_that_ranks_which_compute_together_may_share(data):
    check_own_part(DataLoader(data), 1, 0, 2)


def test_data_that_deals_itself_to_all_ranks_is_refused_where_some_compute_together():
    check_own_part(DataLoader(OwnRanks(4)), 2, 1, 2)
    with pytest.raises(ValueError, match="OwnRanks splits itself over all 4 ranks"):
        check_own_part(DataLoader(OwnRanks(4)), 2, 1, 4)


@pytest.mark.parametrize(("rank", "size", "is_right"), [(1, 2, True), (0, 1, False), (0, 2, False)])
def test_mosaicmls_stream_knows_its_rank_by_the_environment(rank, size, is_right):
    names = {"__module__": "streaming.base.dataset"}
    data = type("StreamingDataset", (Stream,), names)(4)
    data._parallel_rank_world = SimpleNamespace(rank=rank, num_ranks=size)
    assert shard_of(DataLoader(data), 2, 1) is not None
    if is_right:
        return check_own_part(DataLoader(data), 2, 1, 2)
    with pytest.raises(ValueError, match=f"rank {rank} of {size}, but this process is rank 1 of 2 of the run"):
        check_own_part(DataLoader(data), 2, 1, 2)
    return None


def _mosaicmls(size, rank=0, num_ranks=1, ranks_per_node=1):
    """A data set as MosaicML's: its class is of that module, and it knows its rank by the environment alone."""
    data = type("StreamingDataset", (Stream,), {"__module__": "streaming.base.dataset"})(size)
    world = SimpleNamespace(rank=rank, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    data._parallel_rank_world = data._unique_rank_world = world
    return data


class _Made(LightningDataModule):
    def __init__(self, made):
        super().__init__()
        self.made = made

    def train_dataloader(self):
        raise AssertionError("a rank was started")


@pytest.mark.parametrize("place", ["loader", "dict", "CombinedLoader", "datamodule"])
def test_mosaicmls_stream_that_is_made_before_the_ranks_is_refused_before_they_start(place):
    loader = DataLoader(_mosaicmls(8), batch_size=2)
    loaders = {"a": rows(), "b": loader}
    places = {"loader": loader, "dict": loaders, "CombinedLoader": CombinedLoader(loaders)}
    given = {**places, "datamodule": _Made(loader.dataset)}[place]
    with pytest.raises(RefusedError, match=r"rank 0 of 1, but .* rank 0 of 2 of the run\. MosaicML's (.*\n)+.*--nproc"):
        engine(strategy="ddp_fork", devices=2).fit(Regression(), given)


def test_mosaicmls_stream_may_be_made_before_ranks_that_share_samples():
    check_made_for([_mosaicmls(8), DataLoader(_mosaicmls(8)), DataLoader(Stream(8)), 3, None], 1)
    check_made_for([_mosaicmls(8, num_ranks=2), Replayed(4)], 2)


def test_mosaicmls_stream_that_the_script_makes_is_refused_before_the_script_starts_again(monkeypatch):
    """Its loader is no argument of the run, and each rank would make the stream before it is connected."""
    stream = _mosaicmls(8)
    monkeypatch.setitem(sys.modules, "streaming", SimpleNamespace(StreamingDataset=type(stream)))
    check_script_makes_none(1)
    message = r"StreamingDataset was created before the 2 ranks (.*\n)+`train_dataloader\(\)` or `setup\(\)`"
    with pytest.raises(RefusedError, match=message):
        engine(strategy="ddp", devices=2).fit(Regression(), rows())
    del stream
    check_script_makes_none(2)


class Evaluated(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", ["tp_fork", "pp_fork:microbatches=2"])
@pytest.mark.parametrize("validates", [False, True])
def test_such_data_is_refused_by_a_run(strategy, validates):
    run = engine(strategy=strategy, devices=2)
    loader = DataLoader(OwnRanks(8), batch_size=2)
    with pytest.raises(ProcessRaisedException, match="OwnRanks splits itself over all 2 ranks"):
        run.validate(Evaluated(), loader, verbose=False) if validates else run.fit(Evaluated(), loader)


def test_a_distributed_sampler_for_all_ranks_is_refused_where_some_compute_together():
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=2, rank=0))
    with pytest.raises(
        ProcessRaisedException, match=r"DistributedSampler deals to 2 rank\(s\), where samples are shared by 1"
    ):
        engine(strategy="tp_fork", devices=2).fit(Regression(), loader)
