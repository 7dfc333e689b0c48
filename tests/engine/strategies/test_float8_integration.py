"""Products in float8 on two ranks: each has the scales of its own samples, and shards change nothing."""

import pytest
import torch
import torch.distributed as dist

from polyphase.engine import Engine
from tests.pairs import nightly

from ..eager_graphs import eager_graphs
from ..tiny import QUIET
from .test_float8 import Blocks, data

# torch's compiler looks at the gradients of all that enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def train(strategy: str, devices: int, **flags) -> dict[str, torch.Tensor]:
    module = Blocks()
    flags = {"precision": "float8", "max_steps": 4, "limit_val_batches": 1, **flags}
    engine = Engine(**{**QUIET, "strategy": strategy, "devices": devices, **flags})
    engine.fit(module, data(4 // devices), data())
    return module.state_dict()


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    torch._dynamo.reset()
    eager_graphs(monkeypatch)
    yield
    assert not dist.is_initialized()


@pytest.mark.timeout(300)  # seven runs of one or two processes, two of them compiled
@pytest.mark.parametrize("name", ["float8-rowwise", *nightly("float8")])
def test_shards_change_no_bit_and_several_ranks_little(name):
    alone, copies = train("single", 1, precision=name), train("ddp_fork", 2, precision=name)
    ways = [("fsdp_fork", False), ("fsdp_fork", True), ("ddp_fork", True), ("hsdp_fork:replicate=2", False)]
    for strategy, compiles in [*ways, ("zero1_fork", False)]:
        shards = train(strategy, 2, precision=name, compile=compiles)
        for key, value in copies.items():
            # Two sums of a gradient have one order or the other.
            torch.testing.assert_close(shards[key], value, rtol=0, atol=1e-6, msg=f"{strategy} {compiles} {key}")
    for key, value in alone.items():
        # Four steps of AdamW are at most 4e-3, each way.
        torch.testing.assert_close(copies[key], value, rtol=0, atol=8e-3)
