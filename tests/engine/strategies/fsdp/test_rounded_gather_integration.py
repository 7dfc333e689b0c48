"""What autocast would round is gathered in 16 bits: half the bytes, and every weight the same to the bit."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn import functional
from torch.utils.data import DataLoader

from polyphase.callbacks import CommunicationMonitor
from polyphase.engine import Engine
from polyphase.engine.strategies.fsdp.rounded_gather import Rounded, check_uses, gather_rounded
from polyphase.engine.strategies.units import CompiledBlock
from tests.distributed import run_ranks
from tests.engine.eager_graphs import eager_graphs
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

# torch's compiler looks at the gradients of all that enters a graph.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

DIM = 8


class Block(nn.Module):
    """Attention, a convolution and a layer that is called twice, beside norms and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.shift = nn.LayerNorm(DIM), nn.Parameter(torch.randn(DIM))
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.convolution = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.twice = nn.Linear(DIM, DIM)

    def forward(self, x):
        normed = self.norm(x) + self.shift
        x = x + self.attention(normed, normed, normed)[0]
        x = x + self.twice(self.twice(x).relu())
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)


class Reader(LightningModule):
    """An embedding and a head that are one, and blocks, through which each sample goes twice."""

    fused = penalty = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding, self.head = nn.Embedding(32, DIM), nn.Linear(DIM, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.learning_rate = 0.01

    def forward(self, x):
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        embedded = self.embedding(batch)
        loss = functional.cross_entropy(self(embedded).flatten(0, 1), batch.flatten())
        if self.penalty:  # a backward through a backward
            (gradient,) = torch.autograd.grad(loss * len(batch), embedded, create_graph=True)
            loss = loss + gradient.pow(2).sum() / len(batch)  # a mean over samples
        return loss

    def validation_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self(self.embedding(batch)).flatten(0, 1), batch.flatten())
        self.log("loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=self.fused)


class Penalised(Reader):
    penalty = True


class BlockOnce(Block):
    """Calls each layer once: a graph adds up two gradients of a weight before they are float32, and so rounds them."""

    def forward(self, x):
        x = x + self.twice(self.attention(x, self.norm(x), x)[0] + self.shift)
        return x + self.convolution(x.transpose(1, 2)).transpose(1, 2)


class InGraphs(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BlockOnce() for _ in range(3))


class Fused(Reader):
    fused = True


class InFloat32(Callback):
    """Has all parameters gathered as they are, which the 16-bit gathers are compared with."""

    def on_fit_start(self, trainer, pl_module):
        gather_rounded(pl_module, None)


@pytest.fixture(autouse=True)
def graphs(monkeypatch):
    torch._dynamo.reset()
    return eager_graphs(monkeypatch)


class Notes(Callback):
    """Writes how many bytes of all-gathers rank 0 sent in a step, and how many parameters are gathered in 16 bits."""

    def __init__(self, path: Path, monitor: CommunicationMonitor | None) -> None:
        self.path, self.monitor = path, monitor

    def on_train_end(self, trainer, pl_module):
        loss = float(trainer.callback_metrics.get("loss", torch.nan))
        sent = None if self.monitor is None else self.monitor.last["communication/sent_mb/all_gather"]
        groups = [g for block in pl_module.blocks for g in block._get_fsdp_state()._fsdp_param_groups]
        gathered = [p._unsharded_param for group in groups for p in group.fsdp_params]
        num_rounded = sum(isinstance(p, Rounded) or p.dtype != torch.float32 for p in gathered)
        if trainer.global_rank == 0:
            self.path.write_text(json.dumps([loss, sent, num_rounded]))


def train(folder, kind, strategy, rounds, counts=False, **flags):
    """The weights after some steps, the loss of a validation, the bytes gathered in a step, and what was rounded."""
    module, path = kind(), folder / "notes.json"
    monitor = CommunicationMonitor(every_n_steps=5) if counts else None
    callbacks = [Notes(path, monitor), *([] if rounds else [InFloat32()]), *([monitor] if monitor else [])]
    flags = {**QUIET, "devices": 2, "max_steps": 5, "precision": "bf16-mixed", "val_check_interval": 4, **flags}
    engine = Engine(strategy=strategy, accelerator="cpu", callbacks=callbacks, **flags)
    tokens = torch.randint(0, 32, (64, 6), generator=torch.Generator().manual_seed(4))
    engine.fit(module, DataLoader(tokens, batch_size=4), DataLoader(tokens[:8], batch_size=4))
    return module.state_dict(), *json.loads(path.read_text())


@pytest.fixture
def without_onednn():
    """Where a CPU has instructions for bf16, oneDNN's kernels depend on strides, which are others in a graph."""
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(was_enabled)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize(
    ("kind", "strategy", "flags"),
    [
        (Reader, "fsdp_fork", {"max_steps": 2, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
        *nightly((Fused, "fsdp_fork:no_sync=false", {"accumulate_grad_batches": 2})),
        *nightly((Reader, "fsdp_fork:activation_checkpointing=true", {"precision": "16-mixed", "compression": "bf16"})),
        pytest.param(
            Reader,
            "fsdp_fork:reshard_after_forward=false",
            {"global_batch_size": 8, "micro_batch_size": 2},
            marks=pytest.mark.nightly,
        ),
        (InGraphs, "fsdp_fork", {"max_steps": 3, "compile": True, "accumulate_grad_batches": 2}),
        *nightly((InGraphs, "hsdp_fork:replicate=2", {"devices": 4, "compile": True, "precision": "16-mixed"})),
        *nightly((Penalised, "fsdp_fork", {})),
        *nightly((Reader, "hsdp_fork:replicate=2", {"devices": 4, "compression": "topk:0.5"})),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_weights_and_losses_are_the_same_to_the_bit(kind, strategy, flags, tmp_path):
    weights, loss, _, num_rounded = train(tmp_path, kind, strategy, True, **flags)
    expected, expected_loss, _, none_rounded = train(tmp_path, kind, strategy, False, **flags)
    # Two of attention's input projection, its output layer, the convolution and the linear layer; a block has 11.
    assert (num_rounded, none_rounded) == (3 * 8, 0)
    assert loss == expected_loss
    for name, weight in expected.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weights[name], weight), name
    assert not torch.equal(weights["blocks.0.twice.weight"], kind().state_dict()["blocks.0.twice.weight"])


@pytest.mark.parametrize("compile", [False, True])
def test_what_is_rounded_is_half_the_bytes(compile, tmp_path):
    flags = {"limit_val_batches": 0, "compile": compile}
    sent = {rounds: train(tmp_path, Reader, "fsdp_fork", rounds, True, **flags)[2] for rounds in (True, False)}
    block = Block()
    num_values = sum(p.numel() for p in block.parameters())
    num_as_they_are = sum(p.numel() for p in (*block.norm.parameters(), block.shift))
    # Of each block two gathers in forward and two in backward, but for the last one, which is kept for backward; of the
    # rest one in all. Half of it is on each rank's wire.
    num_gathers = 3 * 4 - 2
    in_float32 = (num_gathers * 4 * num_values + 4 * 32 * DIM) / 2
    assert sent[False] == pytest.approx(in_float32 / 1e6)
    assert sent[True] == pytest.approx((in_float32 - num_gathers * 2 * (num_values - num_as_they_are) / 2) / 1e6)


class Pair(nn.Module):
    """Two layers, of which a subclass reads the weights in some other way than by calling them under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        return self.second(self.first(x).relu())


class OutsideOfAutocast(Pair):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.second(self.first(x.float()))


class Norms(Pair):
    def forward(self, x):
        return (
            super().forward(x) * self.first.weight.norm()
            + self.second.weight.data.mean()
            + float(self.first.bias[0].detach())
        )


class Views(Pair):
    def forward(self, x):
        return torch.addmm(self.first.bias, x, self.first.weight.t()) + super().forward(
            x
        ) @ self.second.weight.t().narrow(0, 0, DIM)


class Copies(Pair):
    """Casts by itself, and changes the copy."""

    def forward(self, x):
        doubled = self.first.weight.to(torch.bfloat16).mul_(2)
        return functional.linear(x, doubled.to(x.dtype)) + super().forward(x)


class Tables(Pair):
    def forward(self, x):
        return super().forward(x) + functional.embedding(torch.arange(len(x)), self.first.weight)


class Mapped(Pair):
    def forward(self, x):
        both = torch.vmap(self.first)(x) + torch.func.grad(lambda y: self.second(y).sum())(x)
        return both + torch.func.functional_call(self.first, dict(self.second.named_parameters()), (x,))


class Renormed(Pair):
    """Layers that other code computes the weights of, or that are of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(self.first)
        self.second = nn.utils.spectral_norm(self.second)
        self.memory = nn.LSTM(DIM, DIM)
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, DIM, dropout=0.0, batch_first=True)

    def forward(self, x):
        return super().forward(x) + self.memory(x[None])[0][0] + self.encoder(x[None])[0]


ODD = [OutsideOfAutocast, Norms, Views, Copies, Tables, Mapped, Renormed]


class Clamps(Pair):
    def forward(self, x):
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Scales(Pair):
    def forward(self, x):
        with torch.no_grad():
            torch._foreach_mul_([self.second.bias], 2.0)
        return super().forward(x)


class Addresses(Pair):
    def forward(self, x):
        assert self.first.weight.clone().data_ptr() != 0
        return super().forward(x) * self.first.weight.data_ptr()


def train_pair(rank, kind, dtype, compiles=False):
    """What such blocks compute after three steps, their weights, and whether a layer that is a unit is rounded."""
    torch._dynamo.reset()  # whose limit of graphs of one function would be met
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), kind(), nn.Linear(DIM, DIM))
    backend = lambda graph, inputs: check_uses(graph, model) or graph  # noqa: E731
    compiled = {model[1]: CompiledBlock(model[1], partial(torch.compile, backend=backend))} if compiles else {}
    for part in (model[1], model[2], model):
        fully_shard(part)
    gather_rounded(model, dtype, compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draws = torch.Generator().manual_seed(rank)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(4, DIM, generator=draws)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outside = model.eval()(torch.ones(4, DIM))  # of autocast
    (unit,) = model[2]._get_fsdp_state()._fsdp_param_groups
    weights = [p.full_tensor() for p in model.state_dict().values() if hasattr(p, "full_tensor")]
    return [outside, *weights], isinstance(unit.fsdp_params[0]._unsharded_param, Rounded)


def check_odd_blocks(rank: int) -> None:
    for kind in (OutsideOfAutocast, Norms, Views, Copies, Tables, Mapped, Renormed):
        expected, is_rounded = train_pair(rank, kind, None)
        assert not is_rounded
        found, is_rounded = train_pair(rank, kind, torch.bfloat16)
        assert is_rounded
        assert all(map(torch.equal, expected, found)), kind.__name__
    for kind, name in ((Clamps, "1.first.weight"), (Scales, "1.second.bias")):
        with pytest.raises(RuntimeError, match=f"writes into '{name}' while its block runs"):
            train_pair(rank, kind, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"the address of '1\.first\.weight' was requested"):
        train_pair(rank, Addresses, torch.bfloat16)


def test_what_else_reads_such_weights_has_all_their_bits():
    run_ranks(check_odd_blocks, 2, timeout_s=120, start_method="fork")


class Reads(Pair):
    def forward(self, x):
        return super().forward(x.to(self.first.weight.dtype))


class All(Pair):
    def forward(self, x):
        return super().forward(x) * sum(p.norm() for p in self.parameters())


class Hooked(Pair):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, args, output: output * module.first.weight.norm())


class Inside(Pair):
    """A hook of one of its layers reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_hook(lambda module, args, output: output * module.weight.norm())


def check_compiled_blocks(rank: int) -> None:
    for kind in (Pair, Norms, Views, Tables, Reads, All, Hooked, Renormed):
        expected, _ = train_pair(rank, kind, None, True)
        found, _ = train_pair(rank, kind, torch.bfloat16, True)
        assert all(map(torch.equal, expected, found)), kind.__name__
    with pytest.raises(Exception, match=r"uses '1\.second\.weight' without its layer.*leave out compile"):
        train_pair(rank, Inside, torch.bfloat16, True)


def test_compiled_blocks_compute_the_same_or_are_refused():
    run_ranks(check_compiled_blocks, 2, timeout_s=120, start_method="fork")


class Kept(list[torch.Tensor]):
    def keep(self, tensor):
        self.append(tensor)
        return tensor


def check_memory(rank: int) -> None:
    """Of the weights that autograd keeps for backward, none has memory between a block's forward and its backward."""
    sizes = {}
    for dtype in (None, torch.bfloat16):
        model = nn.Sequential(nn.Linear(DIM, DIM), Pair(), Pair())
        for part in (model[1], model[2], model):
            fully_shard(part)
        gather_rounded(model, dtype)
        kept = Kept()
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.autograd.graph.saved_tensors_hooks(kept.keep, lambda tensor: tensor),
        ):
            loss = model(torch.ones(4, DIM)).float().sum()
        cast = [t for t in kept if t.shape == (DIM, DIM) and t.dtype == torch.bfloat16]
        sizes[dtype] = [t.untyped_storage().size() > 0 for t in cast]
        loss.backward()
    # The root's layer, whose input needs no gradient, keeps none; the blocks have four.
    assert sizes == {None: [True] * 4, torch.bfloat16: [False] * 4}


def test_no_second_copy_is_kept_for_backward():
    run_ranks(check_memory, 2, timeout_s=120, start_method="fork")


class Differs(Reader):
    """A block's weight is read by one of the ranks alone."""

    def forward(self, x):
        if self.global_rank == 1:
            self.blocks[1].register_forward_pre_hook(lambda block, _: block.twice.weight.norm())
        return super().forward(x)


def test_a_rank_that_alone_reads_a_weight_is_named(tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"gathers blocks\.1\b"):
        train(tmp_path, Differs, "fsdp_fork", True)
