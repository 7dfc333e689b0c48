"""Compiled steps compute the same, leave the module as it was, and say what splits their graph."""

import logging

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from polyphase.engine.strategies.ddp import DDP
from polyphase.engine.strategies.fsdp.strategy import FSDP
from polyphase.engine.strategies.options import DDPOptions, FSDPOptions

from ..eager_graphs import eager_graphs
from ..tiny import engine

pytestmark = [
    # torch's compiler still has scripted functions of its own,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    # and looks at the gradients of all that enters a graph.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).abs().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LogsInTheMiddle(Net):
    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch[0])
        self.log("hidden", hidden.mean())
        return self.net[2](hidden.relu()).pow(2).mean()


class Breaks(Net):
    def training_step(self, batch, batch_idx):
        hidden = self.net[0](batch[0])
        torch._dynamo.graph_break()
        return self.net[2](hidden.relu()).pow(2).mean()


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(24, 4, generator=generator)), batch_size=4)


def run(module, **flags):
    trainer = engine(max_epochs=2, **flags)
    trainer.fit(module, data(), data())
    return trainer


@pytest.fixture(autouse=True)
def _no_graphs_of_earlier_tests():
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _compiles_in_this_process():
    """Few small graphs: to start another process for them takes longer, and so does the code for vectors."""
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.simdlen": 1}):
        yield


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, logger="polyphase.engine")
    return lambda: [r.getMessage() for r in caplog.records if "compile" in r.getMessage()]


@pytest.mark.nightly
def test_compiled_steps_compute_the_same(said):
    plain, compiled = Net(), Net()
    expected, ours = run(plain), run(compiled, compile=True)
    torch.testing.assert_close(compiled.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    assert ours.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        torch.testing.assert_close(ours.callback_metrics[name], value, rtol=1e-5, atol=1e-6)
    assert said() == [], "a log after the computation costs nothing"
    assert not {"log", "training_step", "validation_step"} & vars(compiled).keys()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2, "training and validation were compiled"


@pytest.mark.nightly
def test_a_log_in_the_middle_is_named_once(said):
    run(LogsInTheMiddle(), compile=True, limit_val_batches=0)
    (message,) = said()
    assert message.startswith("compile: the graph of a step is split by self.log at ")
    assert 'self.log("hidden", hidden.mean())' in message


def test_a_graph_break_is_named_once(said, graphs):
    run(Breaks(), compile="reduce-overhead", limit_val_batches=0)
    (message,) = said()
    assert "torch._dynamo.graph_break()" in message
    assert "test_compile.py" in message


MEMORY = torch.zeros(4)


class InOneGraph(torch.autograd.Function):
    """The weight, whose gradient is in memory that the next forward writes over, as a CUDA graph's is."""

    @staticmethod
    def forward(ctx, weight):
        MEMORY.fill_(torch.nan)
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return MEMORY.copy_(gradient).view(4)


class Recorded(Net):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    @torch._dynamo.disable
    def of_graph(self):
        return InOneGraph.apply(self.weight)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0] * self.of_graph()).pow(2).mean()


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_gradients_that_are_added_to_are_none_of_a_graphs(mode, monkeypatch):
    recorded, plain = Recorded(), Recorded()
    run(recorded, compile=mode, accumulate_grad_batches=3, limit_val_batches=0)
    monkeypatch.setattr(Recorded, "of_graph", lambda module: module.weight)
    run(plain, accumulate_grad_batches=3, limit_val_batches=0)
    torch.testing.assert_close(recorded.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("mode", "kept"), [("reduce-overhead", 0), ("default", 1)])
def test_a_run_leaves_no_graphs_that_another_module_might_replay(mode, kept):
    run(Net(), compile=mode, limit_val_batches=0)
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(Net.training_step.__code__)) == kept


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("fsdp", "shard=2.* gathers its parameters into other memory"),
        ("pp+fsdp:pipeline_size=2", "pp=2.* has several micro-batches on their way"),
    ],
)
def test_graphs_of_what_moves_are_refused(mode, strategy, why):
    with pytest.raises(ValueError, match=f"compile='{mode}' records CUDA graphs.*{why}.*: choose compile=True"):
        engine(compile=mode, strategy=strategy, devices=4 if "pp" in strategy else 2)


def test_a_wrong_mode_is_an_error_before_anything_runs():
    with pytest.raises(ValueError, match=r"compile='reduce-overhed': .*Did you mean 'reduce-overhead'\?$"):
        engine(compile="reduce-overhed")


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        return nn.functional.dropout(x @ self.weight, 0.5) + 0 * self.norm(x)


class Gates(Net):
    """Its loss is linear in the weight of each block, whose product with its gradient is therefore the loss."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList(Gate() for _ in range(3))
        self.found = []

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for gate in self.net:
            x = gate(x)
        return x.sum()

    def validation_step(self, batch, batch_idx):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)

    def on_before_backward(self, loss):
        self.loss = loss.detach()

    def on_after_backward(self):
        for gate in self.net:
            torch.testing.assert_close((gate.weight * gate.weight.grad).sum(), self.loss, rtol=1e-4, atol=1e-5)
        self.found.append(self.loss.item())


@pytest.mark.nightly
def test_blocks_that_are_computed_again_drop_the_same_and_split_no_graph(said):
    module = Gates()
    run(module, compile=True, activation_checkpointing="full", limit_val_batches=0)
    assert len(set(module.found)) == 12
    assert [gate.norm.num_batches_tracked.item() for gate in module.net] == [12] * 3
    assert said() == []


@pytest.fixture
def graphs(monkeypatch):
    return eager_graphs(monkeypatch, "aot_eager_decomp_partition")


MAKE = {"single": lambda: "single", "ddp": lambda: DDP(DDPOptions()), "fsdp": lambda: FSDP(FSDPOptions())}
"""Strategies of one process, with their collectives."""


class Wide(nn.Module):
    """Its activation function writes over the output of a matrix product, and others are cheap to compute."""

    def __init__(self):
        super().__init__()
        self.up, self.relu, self.down = nn.Linear(4, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)

    def forward(self, x):
        return x + self.down(self.relu(self.up(x)).sin().cos())


class Deep(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(3))

    def training_step(self, batch, batch_idx):
        x = batch[0].repeat(2, 1)  # a shape that no weight has
        for block in self.blocks:
            x = block(x)
        return self.net(x).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.training_step(batch, batch_idx), sync_dist=True)


class Saved(Callback):
    """The sizes of what a step of training keeps for backward."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.shapes = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)
        self.hooks.__enter__()

    def on_before_backward(self, trainer, pl_module, loss):
        self.hooks.__exit__()

    def keep(self, tensor):
        self.shapes.append(tuple(tensor.shape))
        return tensor


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_what_graphs_compute_again(make, precision, graphs, request):
    request.addfinalizer(lambda: dist.is_initialized() and dist.destroy_process_group())
    torch._dynamo.utils.counters.clear()
    flags = {"precision": precision, "limit_val_batches": 0}
    expected, num_wide = Deep(), {}
    run(expected, strategy=make(), **flags)
    for kind in ("none", "full", "selective"):
        module, saved = Deep(), Saved()
        run(module, strategy=make(), compile=True, activation_checkpointing=kind, callbacks=[saved], **flags)
        torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=0, atol=1e-6)
        num_wide[kind] = saved.shapes.count((8, 16))
    # "selective" keeps the output of the first product of each block, and "full" nothing inside of a block.
    assert num_wide["full"] == 0
    assert num_wide["selective"] == 3 < num_wide["none"]
    assert not torch._dynamo.utils.counters["graph_break"]


class Graphs(Callback):
    """The number of graphs after each batch."""

    def __init__(self, compiled):
        self.compiled, self.train, self.validation = compiled, [], []

    def on_train_batch_end(self, *unused):
        self.train.append(self.compiled.frame_count)

    def on_validation_batch_end(self, *unused):
        self.validation.append(self.compiled.frame_count)


@pytest.mark.parametrize("kind", ["none", "selective"])
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_short_batches_validation_and_resumption_need_no_other_graphs(make, kind, graphs, request, tmp_path):
    request.addfinalizer(lambda: dist.is_initialized() and dist.destroy_process_group())
    rows = DataLoader(data().dataset, batch_size=5)  # the last batch has four
    flags = {"compile": True, "activation_checkpointing": kind}
    seen = Graphs(graphs)
    trainer = engine(max_epochs=2, strategy=make(), callbacks=[seen], **flags)
    module = Deep()
    trainer.fit(module, rows, rows)
    assert seen.train[1:] == [seen.train[1]] * 9, "all are there after the second step"
    assert seen.validation[-1] == seen.train[-1], "those of validation are there since its first batch, before training"
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    plain, resumed = Deep(), Deep()
    before = graphs.frame_count
    for again, more in ((plain, {}), (resumed, flags)):
        engine(max_epochs=3, strategy=make(), **more).fit(again, rows, rows, ckpt_path=tmp_path / "last.ckpt")
    torch.testing.assert_close(resumed.state_dict(), plain.state_dict(), rtol=0, atol=1e-6)
    # Whole steps are compiled under the others: their graphs belong to the wrappers of the blocks, which are new ones.
    assert graphs.frame_count == before + (2 if kind == "selective" and make is not MAKE["fsdp"] else 0)
