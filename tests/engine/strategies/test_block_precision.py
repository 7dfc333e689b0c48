"""Blocks in bfloat16: FSDP2's own policy by hand is the reference; what is kept for backward, what outlasts a run."""

import copy

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader

from polyphase.engine.strategies import STRATEGIES
from polyphase.engine.strategies.block_precision import BF16Blocks
from polyphase.models import ByteGPT

from ..eager_graphs import eager_graphs
from ..tiny import Regression, engine, rows

# torch's compiler looks at the gradients of all that enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

NAME = "bf16-blocks"
DATA = torch.randint(256, (22, 9), generator=torch.Generator().manual_seed(1))


class GPT(ByteGPT):
    """Small, and with plain gradient descent."""

    def __init__(self, **shape) -> None:
        torch.manual_seed(0)
        super().__init__(**{"num_layers": 3, "num_heads": 2, "dim": 32, "context_length": 8, **shape})

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(batch_size: int = 5) -> DataLoader:
    """With a short last batch."""
    return DataLoader(DATA, batch_size=batch_size)


def fit(module: LightningModule, precision: str = NAME, **flags) -> dict[str, torch.Tensor]:
    resume = flags.pop("resume", None)
    trainer = engine(precision=precision, max_epochs=flags.pop("max_epochs", 2), **flags)
    trainer.fit(module, data(), data(), ckpt_path=resume)
    return module.state_dict()


def by_fsdp2() -> dict[str, torch.Tensor]:
    """The weights of a plain loop."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    by_hand = GPT()
    # On the CPU autocast leaves the policy's blocks alone: no operation in them is one that it would do in float32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in by_hand.net.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    optimizer = by_hand.configure_optimizers()
    for batch in (*data(), *data()):
        with torch.autocast("cpu", torch.bfloat16):
            loss = by_hand._loss(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in by_hand.state_dict().items()}
    dist.destroy_process_group()
    return weights


def test_it_is_the_policy_of_fsdp2():
    own, expected = GPT(), by_fsdp2()
    torch.testing.assert_close(fit(own), expected, rtol=0, atol=1e-6)
    assert all(t.dtype == torch.float32 for t in own.state_dict().values())


class Seen(Callback):
    """The dtypes of what leaves blocks, and the number of float32 tensors of its shape that backward needs."""

    def __init__(self) -> None:
        self.dtypes = set()

    def on_train_start(self, trainer, pl_module):
        for block in pl_module.net.blocks:
            block.register_forward_hook(lambda _, args, output: self.dtypes.update([output.dtype]))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.num_kept = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)
        self.hooks.__enter__()

    def on_before_backward(self, trainer, pl_module, loss):
        self.hooks.__exit__()

    def keep(self, tensor):
        self.num_kept += tensor.shape == (5, 8, 32) and tensor.dtype == torch.float32
        return tensor


def test_what_runs_through_the_blocks_has_16_bits():
    seen = {}
    for name in ("32-true", "bf16-mixed", NAME):
        seen[name] = Seen()
        engine(precision=name, max_steps=2, callbacks=[seen[name]]).fit(GPT(), data())
    assert {name: one.dtypes for name, one in seen.items()} == {
        "32-true": {torch.float32},
        "bf16-mixed": {torch.float32},
        NAME: {torch.bfloat16},
    }
    # The inputs of two norms of each block, and of the last norm.
    assert seen[NAME].num_kept == 0 < 3 * 2 + 1 <= seen["bf16-mixed"].num_kept


def test_a_run_learns_as_in_32_bits():
    losses = {}
    for precision in (NAME, "32-true"):
        trainer = engine(precision=precision, max_epochs=6)
        trainer.fit(GPT(), data())
        losses[precision] = float(trainer.callback_metrics["train/loss"])
    assert losses[NAME] != losses["32-true"]
    assert losses[NAME] == pytest.approx(losses["32-true"], rel=0.01)


def test_a_resumed_run_has_the_same_bits_and_any_precision_continues_it(tmp_path):
    whole = fit(GPT(), max_epochs=3)
    trainer = engine(precision=NAME, max_epochs=2)
    trainer.fit(GPT(), data(), data())
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = fit(GPT(), max_epochs=3, resume=tmp_path / "two.ckpt")
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    other = fit(GPT(), "32-true", max_epochs=3, resume=tmp_path / "two.ckpt")
    torch.testing.assert_close(other, whole, rtol=0, atol=1e-2)


def test_a_module_is_its_own_again_after_each_run():
    module, expected = GPT(), GPT()
    copies = []

    class Copies(Callback):
        def on_train_start(self, trainer, pl_module):
            copies.append(copy.deepcopy(pl_module.net.blocks[0]))

    for _ in range(2):
        fit(module, max_epochs=1, callbacks=[Copies()])
        assert not any("forward" in vars(part) for part in module.modules())
    again = GPT()
    again.load_state_dict(fit(expected, max_epochs=1))
    assert all(torch.equal(t, module.state_dict()[key]) for key, t in fit(again, max_epochs=1).items())
    x = torch.randn(2, 8, 32)
    assert torch.equal(copies[0](x), copies[0].forward.__func__(copies[0], x))
    assert copies[0](x).dtype == torch.float32


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_compiled_or_computed_again_it_is_the_same_in_one_graph(kind, monkeypatch, caplog):
    torch._dynamo.reset()
    graphs = eager_graphs(monkeypatch)
    expected = fit(GPT())
    eager = fit(GPT(), activation_checkpointing=kind)
    assert all(torch.equal(eager[key], value) for key, value in expected.items())
    compiled = fit(GPT(), compile=True, activation_checkpointing=kind)
    torch.testing.assert_close(compiled, expected, rtol=0, atol=1e-4)
    assert graphs.frame_count == 2, "training and validation, of full and short batches"
    assert "is split by" not in caplog.text


class Norms(nn.Module):
    """Statistics stay in float32; a tuple, a keyword, integers and a tied layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.again = nn.Linear(32, 32)
        self.again.weight = self.up.weight
        self.writes = False

    def forward(self, inputs, *, scale, places):
        (x,) = inputs
        if self.writes:
            self.up.weight.data.clamp_(-1, 1)
        self.dtypes = x.dtype, scale.dtype, places.dtype, self.up.weight.dtype, self.norm.weight.dtype
        assert self.up.weight is self.again.weight or torch.equal(self.up.weight, self.again.weight)
        return x + self.again(self.up(self.norm(x).relu())) * scale


def called(*, writes: bool = False) -> tuple[nn.Module, torch.Tensor]:
    blocks = nn.ModuleList(Norms() for _ in range(2))
    blocks[0].writes = writes
    plugin = BF16Blocks(NAME, "cpu")
    plugin.convert_module(blocks)
    x = torch.randn(4, 32, requires_grad=True)
    with plugin.forward_context():
        output = blocks[0]((x,), scale=torch.ones(32), places=torch.arange(4))
    output.float().sum().backward()
    assert x.grad.dtype == blocks[0].up.weight.grad.dtype == torch.float32
    return blocks[0], output


def test_what_is_cast():
    block, output = called()
    half, single = torch.bfloat16, torch.float32
    assert output.dtype == half
    assert block.dtypes == (half, half, torch.int64, half, single)
    assert block.norm.running_mean.abs().sum() > 0


def test_a_forward_that_writes_into_its_weights_is_refused():
    with pytest.raises(RuntimeError, match=r"the forward of Norms writes into 'up\.weight', of which it has a copy"):
        called(writes=True)


@pytest.mark.parametrize(
    "name", [name for name in STRATEGIES if name not in ("single", "ddp", "zero1", "fsdp", "hsdp")]
)
def test_other_strategies_refuse_it(name):
    with pytest.raises(ValueError, match=r"can't do precision 'bf16-blocks': those of blocks work with single, ddp"):
        engine(strategy=name, devices=4, precision=NAME)


def test_a_module_without_blocks_is_refused_before_it_runs():
    with pytest.raises(ValueError, match=r"'bf16-blocks' finds no repeated blocks in Regression, .*: choose"):
        engine(precision=NAME).fit(Regression(), rows())
