"""Products in float8: how far from those in bfloat16, in which layers, and what of it outlasts a run: nothing."""

import copy
import sys

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.utils.data import DataLoader

from polyphase.engine.precision import FLOAT8
from polyphase.engine.strategies import STRATEGIES
from polyphase.engine.strategies.float8 import Float8Precision

from ..eager_graphs import eager_graphs
from ..tiny import Regression, engine, rows

# torch's compiler looks at the gradients of all that enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

DIM = 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.up, self.down, self.odd = nn.Linear(DIM, 64), nn.Linear(64, DIM, bias=False), nn.Linear(DIM, 3)

    def forward(self, x):
        x = self.norm(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(self.up(x).relu()) + self.odd(x).mean(-1, keepdim=True)


class Blocks(LightningModule):
    """Predicts the sums of its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        loss = (self(batch).mean(-1) - batch.sum(-1)).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self(batch).abs().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def data(batch_size: int = 5) -> DataLoader:
    """Batches of 35 tokens, which is no multiple of 16, and a short last one."""
    return DataLoader(torch.randn(22, 7, DIM, generator=torch.Generator().manual_seed(1)), batch_size=batch_size)


def fit(module: LightningModule, precision: str, **flags) -> dict[str, torch.Tensor]:
    resume = flags.pop("resume", None)
    trainer = engine(precision=precision, max_epochs=flags.pop("max_epochs", 2), **flags)
    trainer.fit(module, data(), data(), ckpt_path=resume)
    return module.state_dict()


def distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference in parts of the norm."""
    return float((ours - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    # Seen are 0.037, and for gradients 0.060 and 0.037: gradients have 2 bits after the first one in "float8", where
    # everything else has 3, and a scale of each row loses less than one of all.
    ("name", "of_output", "of_gradients"),
    [("float8", 0.045, 0.07), ("float8-rowwise", 0.045, 0.045)],
)
@pytest.mark.parametrize("num_rows", [32, 7])
def test_a_layer_is_this_close_to_bfloat16(name, of_output, of_gradients, num_rows):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    layers = copy.deepcopy(plain)
    plugin = Float8Precision(name, "cpu")
    plugin.convert_module(layers)
    x, gradient = torch.randn(num_rows, 64), torch.randn(num_rows, 64)
    results = []
    for layer in (layers[0], plain[0]):
        inputs = x.clone().requires_grad_()
        with plugin.forward_context():
            output = layer(inputs)
        assert output.dtype == torch.bfloat16
        output.backward(gradient.bfloat16())
        results.append((output.detach().float(), inputs.grad, layer.weight.grad, layer.bias.grad))
    (output, *gradients), (expected, *all_expected) = results
    assert 0 < distance(output, expected) < of_output
    for ours, theirs in zip(gradients[:2], all_expected[:2], strict=True):
        assert ours.dtype == torch.float32
        assert 0 < distance(ours, theirs) < of_gradients
    assert torch.equal(gradients[2], all_expected[2]), "the gradient of a bias is no product"


@pytest.mark.parametrize("name", FLOAT8)
def test_a_layer_is_the_same_where_no_gradient_can_be_kept(name):
    layers = nn.Sequential(nn.Linear(DIM, 64), nn.Linear(64, DIM))
    plugin = Float8Precision(name, "cpu")
    plugin.convert_module(layers)
    x = torch.randn(2, 7, DIM)
    with plugin.forward_context():
        expected = layers(x)
        with torch.inference_mode():
            assert torch.equal(layers(x), expected)
            assert torch.equal(layers(x.clone()), expected)


@pytest.mark.parametrize("name", FLOAT8)
def test_a_run_learns_as_in_bfloat16(name):
    losses = {}
    for precision in (name, "bf16-mixed"):
        trainer = engine(precision=precision, max_epochs=6)
        trainer.fit(Blocks(), data())
        losses[precision] = float(trainer.callback_metrics["loss"])
    assert losses[name] != losses["bf16-mixed"]
    assert losses[name] == pytest.approx(losses["bf16-mixed"], rel=0.05)


class Converted(Callback):
    """The layers that multiply in another way, and how many parts a copy of the module has that do."""

    def on_train_start(self, trainer, pl_module):
        self.names = {name for name, layer in pl_module.named_modules() if "forward" in vars(layer)}
        copied = copy.deepcopy(pl_module.blocks)
        self.forwards = {type(m.forward.__func__).__name__ for m in copied.modules() if "forward" in vars(m)}


def test_layers_of_blocks_whose_sizes_fit_until_the_run_ends():
    module, seen = Blocks(), Converted()
    hook_calls = []
    module.blocks[0].up.register_forward_hook(lambda *_: hook_calls.append(1))
    layers = list(module.modules())
    fit(module, "float8", callbacks=[seen])
    # Attention computes with the weight of its output layer by itself, and the head is no block's.
    assert seen.names == {f"blocks.{index}.{name}" for index in range(3) for name in ("up", "down")}
    assert seen.forwards == {"function"}, "a copy has the layers' own forward"
    assert hook_calls
    assert list(map(type, layers)) == list(map(type, module.modules()))
    assert not any("forward" in vars(part) for part in module.modules())


def test_outside_of_autocast_a_layer_computes_in_its_own_precision():
    plain, module = Blocks(), Blocks()
    Float8Precision("float8", "cpu").convert_module(module)
    x = torch.randn(2, 4, DIM)
    assert torch.equal(module(x), plain(x))


@pytest.mark.parametrize("name", FLOAT8)
def test_a_resumed_run_has_the_same_bits(name, tmp_path):
    whole = fit(Blocks(), name, max_epochs=3)
    trainer = engine(precision=name, max_epochs=2)
    trainer.fit(Blocks(), data(), data())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = fit(Blocks(), name, max_epochs=3, resume=tmp_path / "two.ckpt")
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())


@pytest.mark.parametrize(
    ("first", "then"), [("float8", "32-true"), ("float8-rowwise", "bf16-mixed"), ("32-true", "float8")]
)
def test_any_precision_continues_a_checkpoint(first, then, tmp_path):
    module = Blocks()
    trainer = engine(precision=first)
    trainer.fit(module, data())
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    assert {key: (value.shape, value.dtype) for key, value in saved.items()} == {
        key: (value.shape, value.dtype) for key, value in Blocks().state_dict().items()
    }
    again = Blocks()
    engine(precision=then, max_epochs=1).fit(again, data(), ckpt_path=tmp_path / "one.ckpt")  # it is over
    assert all(torch.equal(saved[key], value) for key, value in again.state_dict().items())
    assert not torch.equal(fit(Blocks(), then, resume=tmp_path / "one.ckpt")["head.weight"], saved["head.weight"])


@pytest.mark.parametrize("kind", ["none", "selective"])
def test_compiled_it_is_the_same_without_a_graph_break(kind, monkeypatch, caplog):
    torch._dynamo.reset()
    graphs = eager_graphs(monkeypatch)
    flags = {"activation_checkpointing": kind}
    expected, compiled = fit(Blocks(), "float8", **flags), fit(Blocks(), "float8", compile=True, **flags)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-4)
    assert graphs.frame_count == 2, "training and validation, of full and short batches"
    assert "is split by" not in caplog.text


# --- words and refusals


@pytest.mark.parametrize(
    "name", [name for name in STRATEGIES if name not in ("single", "ddp", "zero1", "fsdp", "hsdp")]
)
def test_other_strategies_refuse_it(name):
    with pytest.raises(
        ValueError, match=r"can't do precision 'float8': those of blocks work with single, ddp, zero1, fsdp"
    ):
        engine(strategy=name, devices=4, precision="float8")


def test_it_is_not_joined_with_blocks_in_bfloat16():
    with pytest.raises(ValueError, match=r"'float8\+bf16-blocks' is invalid.* Allowed: .*bf16-blocks, .*float8, "):
        engine(precision="float8+bf16-blocks")


def test_a_module_without_such_layers_is_refused_before_it_runs():
    with pytest.raises(ValueError, match=r"'float8' finds no nn\.Linear whose sizes .* 16 .* of Regression: choose"):
        engine(precision="float8").fit(Regression(), rows())


def test_without_torchao_it_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        ValueError, match=r"'float8-rowwise' needs the package torchao: pip install 'polyphase\[float8\]'"
    ):
        engine(precision="float8-rowwise")


def test_a_device_without_such_numbers_is_refused():
    with pytest.raises(ValueError, match="'float8' can't be done on 'mps': choose precision='bf16-mixed'"):
        Float8Precision("float8", "mps")


@pytest.mark.parametrize(("compile", "num_lines"), [(False, 2), (True, 1)])
def test_what_gains_nothing_is_said(compile, num_lines, caplog, monkeypatch):
    torch._dynamo.reset()
    eager_graphs(monkeypatch)
    caplog.set_level("INFO")
    fit(Blocks(), "float8", compile=compile, max_epochs=1)
    said = [record.getMessage() for record in caplog.records if "float8" in record.getMessage()]
    assert len(said) == num_lines
    assert "6 of 6 layers of the blocks are too small to be faster" in said[-1]
    assert compile or "slower than 'bf16-mixed' without compile=True" in said[0]
