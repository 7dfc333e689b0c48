"""One process, whole fits over data of public libraries, where these are installed."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from polyphase.engine.data import LengthBucketing, PackSequences
from tests.docs import package_run
from tests.pairs import nightly

from ..tiny import SavesIn
from .runs import assert_goes_on, train

SIZE = package_run.SIZE


@pytest.fixture(autouse=True)
def _seed(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")


@pytest.fixture
def datasets(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("datasets")


@pytest.fixture
def parquet(tmp_path, datasets) -> Callable[[], Any]:
    """Eight files of six numbers each, as a stream."""
    package_run.write_parquet(tmp_path)
    return partial(package_run.hugging_face, tmp_path, streaming=True)


def numbers(samples: list[dict[str, Any]]) -> torch.Tensor:
    return torch.tensor([sample["id"] for sample in samples])


def is_once(seen: list[Any], num_epochs: int) -> bool:
    epochs = [Counter(i for epoch, _, batch in seen if epoch == n for i in batch) for n in range(num_epochs)]
    return epochs == [Counter(range(SIZE))] * num_epochs


@pytest.mark.parametrize(("at", "num_workers"), [(5, 2), (18, 0), *nightly((5, 0), (18, 2))])
def test_hugging_faces_stream_goes_on(at, num_workers, parquet, tmp_path):
    assert_goes_on(lambda: DataLoader(parquet(), 3, collate_fn=numbers, num_workers=num_workers), tmp_path, at)


def test_hugging_faces_stream_goes_on_with_other_workers_and_batches(parquet, tmp_path):
    saves = SavesIn("on_train_batch_end", 5, tmp_path / "saved")
    done = train(lambda: DataLoader(parquet(), 3, collate_fn=numbers), callbacks=[saves])[:5]
    rest = train(lambda: DataLoader(parquet(), 4, collate_fn=numbers, num_workers=2), tmp_path / "saved", max_epochs=4)
    assert is_once(done + rest, 4)


@pytest.mark.nightly  # the library sleeps for five seconds after each pass
@pytest.mark.parametrize("at", [5, 16, 18])
def test_hugging_faces_shuffle_buffer_goes_on(at, parquet, tmp_path):
    assert_goes_on(lambda: DataLoader(parquet().shuffle(seed=3, buffer_size=7), 3, collate_fn=numbers), tmp_path, at)


def test_hugging_faces_tokenised_sets_are_packed(datasets):
    texts = [list(range(1, 2 + i % 7)) for i in range(20)]
    plain = [{"input_ids": text, "attention_mask": [1] * len(text)} for text in texts]
    batches = LengthBucketing([len(text) for text in texts], 16, seed=3)
    found = datasets.Dataset.from_list(plain)
    expected = DataLoader(plain, batch_sampler=batches, collate_fn=PackSequences(16))  # type: ignore[arg-type]
    for data in (found, found.with_format("torch")):
        loader = DataLoader(data, batch_sampler=batches, collate_fn=PackSequences(16))
        for mine, other in zip(loader, expected, strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(mine[name], other[name]) for name in other)


@pytest.fixture
def tars(tmp_path) -> Iterator[Path]:
    pytest.importorskip("webdataset")
    package_run.write_tars(tmp_path)
    yield tmp_path
    gc.collect()  # webdataset leaves files open


UNCLOSED = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@UNCLOSED
@pytest.mark.parametrize("num_workers", [2, *nightly(0)])
def test_webdatasets_shuffle_with_a_seed_goes_on(num_workers, tars, tmp_path):
    def make() -> DataLoader:
        loader = package_run.webdataset_loader(tars, shuffle={"size": 7, "seed": 3})
        return DataLoader(loader.dataset, 3, num_workers=num_workers)

    assert_goes_on(make, tmp_path, 5)


@UNCLOSED
@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_webdatasets_shuffle_without_a_seed_is_refused_in_mid_epoch(workers, tars, tmp_path):
    def make() -> DataLoader:
        return DataLoader(package_run.webdataset_loader(tars, shuffle={"size": 7}).dataset, 3, **workers)

    train(make, callbacks=[SavesIn("on_train_batch_end", 5, tmp_path / "saved")], max_epochs=1)
    with pytest.raises(ValueError, match=r"has no `state_dict`.* has yielded other batches"):
        train(make, tmp_path / "saved")
