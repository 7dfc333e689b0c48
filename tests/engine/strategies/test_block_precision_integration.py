"""Blocks in bfloat16 on two ranks: shards change nothing, and their weights are gathered in 16 bits."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from polyphase.engine import Engine
from polyphase.engine.strategies.block_precision import BF16Blocks
from polyphase.engine.strategies.fsdp.rounded_gather import Rounded
from polyphase.engine.strategies.fsdp.strategy import FSDP
from polyphase.engine.strategies.options import FSDPOptions

from ..eager_graphs import eager_graphs
from ..tiny import QUIET
from .test_block_precision import GPT, NAME, data

# torch's compiler looks at the gradients of all that enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Gathered(Callback):
    """Weights and biases of four layers of each of three blocks; norms are gathered in float32."""

    def on_train_end(self, trainer, pl_module):
        groups = [g for block in pl_module.net.blocks for g in block._get_fsdp_state()._fsdp_param_groups]
        gathered = [p._unsharded_param for group in groups for p in group.fsdp_params]
        assert sum(isinstance(p, Rounded) or p.dtype != torch.float32 for p in gathered) == 3 * 8


def train(strategy: str, devices: int, module: GPT | None = None, **flags) -> dict[str, torch.Tensor]:
    module = module or GPT()
    flags = {"precision": NAME, "max_steps": 4, "limit_val_batches": 1, **flags}
    callbacks = [Gathered()] if strategy.startswith("fsdp") else []
    engine = Engine(**{**QUIET, "strategy": strategy, "devices": devices, "callbacks": callbacks, **flags})
    engine.fit(module, data(4 // devices), data())
    return module.state_dict()


@pytest.fixture(autouse=True)
def _graphs(monkeypatch):
    torch._dynamo.reset()
    eager_graphs(monkeypatch)
    yield
    assert not dist.is_initialized()


@pytest.mark.timeout(300)  # runs of one or two processes, some of them compiled
def test_shards_change_no_bit_and_several_ranks_little():
    alone, copies = train("single", 1), train("ddp_fork", 2)
    ways = [("fsdp_fork", False), ("fsdp_fork", True), *((p, False) for p in ("hsdp_fork:replicate=2", "zero1_fork"))]
    for strategy, compiles in ways:
        shards = train(strategy, 2, compile=compiles)
        for key, value in copies.items():
            # Two sums of a gradient have one order or the other; a graph rounds to 16 bits in fewer places.
            tolerance = 1e-4 if compiles else 1e-6
            torch.testing.assert_close(shards[key], value, rtol=0, atol=tolerance, msg=f"{strategy} {compiles} {key}")
    for key, value in alone.items():
        torch.testing.assert_close(copies[key], value, rtol=0, atol=1e-3)


def test_a_second_run_of_a_sharded_module_computes_alike():
    """Of one process, whose module stays sharded between runs."""
    results = []
    for make in (lambda: "single", lambda: FSDP(FSDPOptions())):
        module = GPT()
        for _ in range(2):
            plugin = BF16Blocks(NAME, "cpu")
            engine = Engine(strategy=make(), devices=1, plugins=[plugin], max_steps=3, **QUIET)
            engine.fit(module, data())
        results.append({name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in module.state_dict().items()})
    dist.destroy_process_group()
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
