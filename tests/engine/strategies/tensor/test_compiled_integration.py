"""Compiled blocks: one graph for all of them, without a break, also beside other flags, and weights of eager steps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from polyphase.engine import Engine
from polyphase.engine.loop import compile
from polyphase.models import ByteGPT
from tests.engine.eager_graphs import eager_graphs
from tests.engine.strategies.test_ddp_integration import QUIET

pytestmark = [
    # torch's compiler looks at the gradients of all that enters a graph,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # and makes an object of a function of autograd's.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


class Counts(Callback):
    """Writes how many graphs rank 0 has compiled after each step, and how often a graph was split."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.graphs: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def on_train_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            breaks = list(torch._dynamo.utils.counters["graph_break"])
            self.path.write_text(json.dumps([self.graphs, breaks]))


def weights(strategy: str, devices: int, compile: bool, path: Path, **more: Any) -> dict[str, torch.Tensor]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    module = ByteGPT(num_layers=3, num_heads=2, dim=16, context_length=16)
    tokens = torch.randint(
        0, 255, (7 * devices, 17), generator=torch.Generator().manual_seed(1)
    )  # the last batch is shorter
    flags = {**QUIET, "max_steps": 4, "accelerator": "cpu", "callbacks": [Counts(path)], **more}
    engine = Engine(strategy=strategy, devices=devices, compile=compile, **flags)
    engine.fit(module, torch.utils.data.DataLoader(tokens, batch_size=4), torch.utils.data.DataLoader(tokens[:4]))
    return module.state_dict()


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("tp_fork", 2), ("tp_fork:sequence_parallel=true", 2), ("fsdp+tp_fork:tp=2", 4)],
)
def test_blocks_share_one_graph(strategy, devices, tmp_path, monkeypatch):
    expected = weights(strategy, devices, False, tmp_path / "eager.json")
    eager_graphs(monkeypatch)
    compiled = weights(strategy, devices, True, tmp_path / "graphs.json")
    assert json.loads((tmp_path / "graphs.json").read_text()) == [[2] * 4, []]  # one of them for validation
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "devices", "flags"),
    [
        ("tp_fork", 2, {"activation_checkpointing": "selective"}),
        ("fsdp_fork", 2, {"compression": "int8"}),
        ("hsdp_fork:replicate=2", 4, {"compression": "bf16", "activation_checkpointing": "selective"}),
    ],
)
def test_flags_beside_compile_need_no_other_graphs(strategy, devices, flags, tmp_path, monkeypatch):
    expected = weights(strategy, devices, False, tmp_path / "eager.json", **flags)
    eager_graphs(monkeypatch)
    compiled = weights(strategy, devices, True, tmp_path / "graphs.json", **flags)
    graphs, breaks = json.loads((tmp_path / "graphs.json").read_text())
    assert graphs[1:] == [graphs[1]] * 3
    assert not breaks
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-6)


def test_no_process_waits_for_a_graph_that_the_first_one_can_not_compile(tmp_path, monkeypatch):
    expected = weights("ddp_fork", 2, False, tmp_path / "eager.json")

    def fail(*_: Any) -> None:  # as torch does of what depends on values: it goes on without this graph
        raise torch._subclasses.fake_tensor.DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)

    monkeypatch.setattr(compile._Backend, "_compile_graph", fail)
    monkeypatch.setattr(compile, "_TIMEOUT_S", 1e9)  # the test's own is shorter
    compiled = weights("ddp_fork", 2, True, tmp_path / "graphs.json")
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-6)
