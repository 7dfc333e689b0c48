"""Modules whose weights come from safetensors files: which tensor is which, and what does not fit."""

import copy
import json
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from polyphase.engine import read_weights
from polyphase.engine.initialization import check_stored, materialize, read_stored


class Net(nn.Module):
    """Tied ends, a buffer that is stored and one that is computed, and a number without a dim."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.arange(4).float(), persistent=False)


def stored(folder: Path, *, without: tuple[str, ...] = ("head.weight",), **more: torch.Tensor) -> dict:
    """The state that is in the files of `folder`, two with an index."""
    torch.manual_seed(3)
    net = Net()
    nn.init.normal_(net.scale)
    nn.init.normal_(net.norm.running_mean)
    state = {name: value.clone() for name, value in net.state_dict().items() if name not in without} | more
    index = {name: f"{number % 2}.safetensors" for number, name in enumerate(state)}
    for file in set(index.values()):
        save_file({name: state[name] for name in state if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return net.state_dict()


def test_read_from_several_files_by_their_index(tmp_path):
    expected = stored(tmp_path)
    net = read_weights(tmp_path, Net)
    assert net.embed.weight.is_meta
    copies = net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))  # noqa: S301 - as a worker gets it
    for module in copies:
        check_stored(module)
        weight = module.embed.weight
        read_stored(module)
        assert module.head.weight is module.embed.weight is weight
        assert module.positions.tolist() == [0, 1, 2, 3]
        torch.testing.assert_close(module.state_dict(), expected, rtol=0, atol=0)
        module.embed.weight.sum().backward()
    nn.init.zeros_(net.scale)
    read_stored(net)
    assert net.scale == 0, "once"


def test_one_file_a_prefix_other_dtypes_and_keys_to_ignore(tmp_path):
    torch.manual_seed(3)
    whole = nn.ModuleDict({"body": nn.Linear(3, 2), "old": nn.Linear(1, 1)}).bfloat16()
    save_file({f"model.{name}": value for name, value in whole.state_dict().items()}, tmp_path / "any.safetensors")
    for source in (tmp_path, tmp_path / "any.safetensors"):
        body = read_weights(source, lambda: nn.Linear(3, 2), prefix="model.body.")
        read_stored(body)
        torch.testing.assert_close(body.state_dict(), whole.float()["body"].state_dict(), rtol=0, atol=0)
    net = read_weights(tmp_path, lambda: nn.ModuleDict({"body": nn.Linear(3, 2)}), prefix="model.", ignore=["*.old.*"])
    read_stored(net)
    assert torch.equal(net["body"].weight, body.weight)


def test_what_does_not_fit_is_said_by_name(tmp_path):
    stored(tmp_path, without=("embed.weight", "head.weight"), **{"embed.wieght": torch.zeros(6, 4)})
    with pytest.raises(ValueError, match=r"no weights for 'embed.weight'. Did you mean 'embed.wieght'\?"):
        read_weights(tmp_path, Net)
    with pytest.raises(
        ValueError, match=r"It has 'embed.wieght', which Net does not have. Did you mean 'embed.weight'"
    ):
        read_weights(tmp_path, Net)
    stored(tmp_path, without=("scale", "head.weight"), scale=torch.zeros(2))
    with pytest.raises(ValueError, match=re.escape("'scale' of shape [2], where Net has [].")):
        read_weights(tmp_path, Net)


def test_files_that_are_not_what_they_should_be(tmp_path):
    with pytest.raises(ValueError, match=r"has no .safetensors file: give a folder"):
        read_weights(tmp_path, Net)
    stored(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    known = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": known | {"embed.weihgt": known["embed.weight"]}}))
    with pytest.raises(ValueError, match=r"has no 'embed.weihgt', though .* Did you mean 'embed.weight'"):
        read_weights(tmp_path, Net)
    index.write_text(json.dumps({"weight_map": {"scale": "../0.safetensors"}}))
    with pytest.raises(ValueError, match=r"must be in the same folder"):
        read_weights(tmp_path, Net)
    index.write_text("[]")
    with pytest.raises(ValueError, match=r"has no 'weight_map' of keys and files"):
        read_weights(tmp_path, Net)
    index.unlink()
    with pytest.raises(ValueError, match=r"has 0.safetensors, 1.safetensors: give"):
        read_weights(tmp_path, Net)
    (tmp_path / "0.safetensors").write_bytes(b"not one")
    with pytest.raises(ValueError, match=r"0.safetensors can't be read as a safetensors file"):
        read_weights(tmp_path / "0.safetensors", Net)


def test_tensors_without_a_file_or_a_value_are_named(tmp_path):
    expected = stored(tmp_path)

    class Filled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.empty(2, 2).fill_(1.0), persistent=False)

    with pytest.raises(ValueError, match=r"mask of Filled is on the meta device, and there is no file"):
        read_weights(tmp_path, Filled)
    net = read_weights(tmp_path, Net)
    net.adapter = nn.Linear(4, 4, device="meta")  # whose first values need not be those of its reset_parameters
    with pytest.raises(ValueError, match=r"adapter.weight of Linear is on the meta device"):
        materialize(net)
    net.adapter = nn.Linear(4, 4)
    materialize(net)
    assert net.embed.weight.is_meta, "left to be read"
    read_stored(net)
    assert torch.equal(net.embed.weight, expected["embed.weight"])
