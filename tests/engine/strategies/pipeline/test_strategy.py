"""What the flags of pipelines refuse before there are processes."""

from collections import OrderedDict

import pytest
import torch
from lightning.pytorch.plugins import Precision
from torch import nn
from torch.utils.data import DataLoader

from polyphase.engine import Engine
from tests.engine.parity import MLP
from tests.engine.strategies.test_ddp_integration import QUIET


def engine(strategy: str, devices: int = 2, **flags: object) -> Engine:
    return Engine(strategy=strategy, accelerator="cpu", devices=devices, **QUIET, **flags)


@pytest.mark.parametrize(
    ("strategy", "devices", "sizes"),
    [
        ("pp", 4, "pp=4"),
        ("pp:pipeline_size=2", 2, "pp=2"),
        ("pp+ddp:pipeline_size=2", 6, "pp=2 x replicate=3"),
        ("pp+ddp:replicate=2", 6, "pp=3 x replicate=2"),
        ("pp+fsdp_spawn:pipeline_size=2,shard=2", 4, "pp=2 x shard=2"),
        ("pp", 1, "one device"),
        ("pp+ddp", 4, "pp=2 x replicate=2"),
    ],
)
def test_sizes_that_are_left_out_are_derived(strategy, devices, sizes):
    found = engine(strategy, devices)
    assert str(found.layout) == sizes
    assert found.data_size * found.layout.pp == devices


@pytest.mark.parametrize(
    ("strategy", "devices", "flags", "message"),
    [
        ("pp:pipeline_size=3", 2, {}, r"the layout pp=3 = 3 does not fit 2 process"),
        ("pp+ddp", 3, {}, r"the layout pp=2 = 2 does not fit 3 process"),
        ("pp+fsdp:pipeline_size=2,shard=3", 4, {}, r"pp=2 x shard=3 = 6 does not fit 4"),
        ("pp:schedule=1f2b", 2, {}, r"unknown value of .*'1f2b'. Did you mean '1f1b'\?"),
        ("pp:microbatches=0", 2, {}, r"pp:microbatches must be a whole number of at least 1"),
        ("pp:microbatches=1", 2, {}, r"at least as many micro-batches, but microbatches=1: ask for 2"),
        ("pp:virtual_stages=2", 2, {}, r"pp:virtual_stages=2 needs schedule=interleaved or zero-bubble"),
        ("pp+fsdp:pipeline_size=2,schedule=interleaved", 4, {}, r"'pp\+fsdp' can't do schedule=interleaved"),
        ("pp+ddp:pipeline_size=2", 4, {"compression": "powersgd:2"}, r"'pp\+ddp' can't do compression 'powersgd:2'"),
        ("pp", 2, {"micro_batch_size": "auto", "global_batch_size": 8}, r"can't repeat a step under a pipeline"),
    ],
)
def test_flags_that_can_not_be_honoured(strategy, devices, flags, message):
    with pytest.raises(ValueError, match=message):
        engine(strategy, devices, **flags)


class ByHand(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Whole(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)


class Around(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class OwnBackward(MLP):
    def backward(self, loss, *args, **kwargs):
        (loss * 0.5).backward()


class Sharing(MLP):
    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(64)
        blocks = ({"norm": norm, "linear": nn.Linear(64, 64)} for _ in range(4))
        self.net = nn.Sequential(*(nn.Sequential(OrderedDict(block)) for block in blocks))


@pytest.mark.parametrize(
    ("strategy", "module", "flags", "message"),
    [
        ("pp", ByHand, {}, "ByHand optimizes by hand"),
        ("pp", OwnBackward, {}, "OwnBackward has a `backward` of its own"),
        ("pp", Whole, {}, "Whole has no repeated blocks that a pipeline could be cut at"),
        (
            "pp:pipeline_size=2,schedule=interleaved,virtual_stages=4",
            MLP,
            {},
            "MLP can't be cut into 8 stages: .* 'net', has 5",
        ),
        ("pp:microbatches=3", MLP, {}, "pp:microbatches=3 does not divide the DataLoader's batch_size=8"),
        ("pp", MLP, {"sync_batchnorm": True}, "sync_batchnorm=True can't be honoured in a pipeline"),
        ("pp", MLP, {"plugins": [Precision()]}, "Precision, a precision plugin of your own, can't clip gradients"),
        ("pp:schedule=zero-bubble", MLP, {"compile": True}, "schedule=zero-bubble can't be honoured with compile"),
        ("pp+fsdp:pipeline_size=2", Around, {}, "'pp\\+fsdp' can't shard scale of 'Around', around the blocks"),
        ("pp+fsdp:pipeline_size=2", Sharing, {}, "can't shard weight, bias of 'net.0.norm', which blocks of several"),
    ],
)
def test_modules_and_data_that_can_not_be_run_in_stages(strategy, module, flags, message):
    loader = DataLoader(torch.zeros(16, 64), batch_size=8)
    with pytest.raises(ValueError, match=message):
        engine(strategy, **flags).fit(module(), loader)
