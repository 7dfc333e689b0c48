"""PythonSource: a split by file, windows that cover the text, the same everywhere."""

import sysconfig
from pathlib import Path

import pytest
import torch

from polyphase.models import PythonSource
from polyphase.models.python_source import Windows, source_files


def test_the_split_is_disjoint_and_complete():
    train, val = set(source_files(False)), set(source_files(True))
    assert not train & val
    assert len(val) > 20
    assert 0.05 < len(val) / len(train | val) < 0.2
    assert Path(sysconfig.get_paths()["stdlib"]) / "argparse.py" in train | val
    assert not any("site-packages" in path.parts for path in train | val)


def test_windows_predict_every_byte_once():
    text = torch.arange(1, 50, dtype=torch.uint8)
    windows = Windows(text, 8)
    targets = torch.cat([windows[i][1:] for i in range(len(windows))])
    assert torch.equal(targets, text[1 : 1 + len(targets)].long())
    assert len(text) - 1 - len(targets) < 8
    for index in (-1, len(windows)):
        with pytest.raises(IndexError, match="of 6"):
            windows[index]


def test_batches_are_what_the_model_takes():
    data = PythonSource(batch_size=4, context_length=16, max_bytes=5000, max_val_bytes=2000)
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    assert 0 <= batch.min() <= batch.max() < 256
    assert len(data.train.text) == 5000
    assert len(data.val.text) == 2000


def test_two_bytes_are_a_token():
    bytes_of, pairs = (PythonSource(max_bytes=1001, max_val_bytes=501, bytes_per_token=number) for number in (1, 2))
    bytes_of.setup("fit")
    pairs.setup("fit")
    first, second = bytes_of.train.text[:1000].long().view(-1, 2).unbind(1)
    assert torch.equal(pairs.train.text.long(), first + 256 * second)
    assert next(iter(pairs.val_dataloader())).shape == (1, 129)
    with pytest.raises(ValueError, match="bytes_per_token must be 1 or 2, but got 3"):
        PythonSource(bytes_per_token=3)


def test_it_is_the_same_each_time():
    one, two = PythonSource(max_bytes=3000), PythonSource(max_bytes=3000)
    one.setup("fit")
    two.setup("fit")
    assert torch.equal(one.train.text, two.train.text)
    assert torch.equal(one.val.text, two.val.text)


def test_without_sources_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(FileNotFoundError, match="found no source of the standard library"):
        PythonSource().setup("fit")
