"""Sequences split over ranks: what code computes of a length, a mask, a loss or a position is that of one process."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError

from polyphase.engine import Engine
from polyphase.engine.data.packing import PackSequences
from polyphase.engine.strategies.fsdp.written_parameters import give_back_numbers, read_whole_numbers
from polyphase.engine.strategies.operator_rules import install_operator_rules
from polyphase.engine.strategies.tensor.context import SequenceFunctions, weighing_absolute_errors
from polyphase.engine.strategies.tensor.ring import ring_attention
from polyphase.engine.strategies.whole_steps import plain_as_replicas
from polyphase.models import ByteGPT
from tests.distributed import run_ranks
from tests.engine.strategies.test_ddp_integration import QUIET
from tests.pairs import nightly

BATCH, CLASSES = 3, 5


def functions(time: int) -> dict[str, Callable[[Tensor], Tensor]]:
    """Scalars of a tensor [3, time, 5], each computed in a way that code has for sequences."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(BATCH, time, CLASSES, generator=generator)
    target = torch.randint(0, CLASSES, (BATCH, time), generator=generator)
    target[0, :3] = -100  # more of them on one rank than on another
    index = target.clamp(0)[..., None].expand(-1, -1, CLASSES)
    weight = torch.arange(1.0, 1.0 + CLASSES)
    lengths = torch.full((BATCH,), time), torch.full((BATCH,), 2)

    def cross_entropy(x: Tensor, **options: Any) -> Tensor:
        return functional.cross_entropy(x.flatten(0, 1), target.flatten(), **options)

    def attention(x: Tensor) -> Tensor:
        scores = (x @ x.mT).masked_fill(torch.ones(time, time).triu(1).bool(), -1e9)
        return (scores.softmax(-1) @ x * y).sum()

    def one_by_one(x: Tensor) -> Tensor:
        state = torch.zeros(())
        for step in range(x.size(1)):
            state = torch.tanh(state + x[:, step])
        return state.sum()

    def recurrent(x: Tensor) -> Tensor:
        return nn.LSTM(CLASSES, 4, batch_first=True)(x)[0].square().sum()

    def linear_cross_entropy(x: Tensor, **options: Any) -> Tensor:
        scores = torch.linspace(-1, 1, CLASSES * CLASSES).view(CLASSES, CLASSES).requires_grad_()
        return functional.linear_cross_entropy(x.flatten(0, 1), scores, target.flatten(), **options)

    def attention_layer(
        dropout: float, batch_first: bool = True, is_causal: bool = False
    ) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            layer = nn.TransformerEncoderLayer(CLASSES, 1, 8, dropout, batch_first=batch_first)
            mask = nn.Transformer.generate_square_subsequent_mask(time) if is_causal else None
            x = x if batch_first else x.transpose(0, 1)
            return (layer(x, mask, is_causal=is_causal) * (y if batch_first else y.transpose(0, 1))).sum()

        return run

    def attention_weights(x: Tensor) -> Tensor:
        result, weights = nn.MultiheadAttention(CLASSES, 1, dropout=0.2, batch_first=True)(x, x, x)
        return (result * y).sum() + weights.square().sum()

    def first_set_to_zero(x: Tensor) -> Tensor:
        z = x * 1
        z[:, 0] = 0
        return (z * y).sum()

    def into_a_plain_one(x: Tensor) -> Tensor:
        state = torch.zeros(BATCH, CLASSES)
        state += x.detach().mean(1)
        return (x.mean(1) * state).sum()

    return {
        "mean": lambda x: x.mean(),
        "mean over time": lambda x: x.mean(1).square().sum(),
        "mean over samples and time": lambda x: x.mean((0, 1)).square().sum(),
        "variance": lambda x: x.var(1).sum(),
        "norm": lambda x: x.norm(),
        "maximum": lambda x: x.max(1).values.sum(),
        "median": lambda x: x.median(1).values.sum(),
        "product": lambda x: x.prod(1).sum(),
        "log of sums of exponentials": lambda x: x.logsumexp(1).sum(),
        "squared error": lambda x: functional.mse_loss(x, y),
        "squared error of two numbers": lambda x: functional.mse_loss(x.mean(), y.mean()),
        "sum of squared errors": lambda x: functional.mse_loss(x, y, reduction="sum"),
        "absolute error": lambda x: functional.l1_loss(x, y),
        "smooth error": lambda x: functional.smooth_l1_loss(x, y),
        "huber": lambda x: functional.huber_loss(x, y),
        "binary": lambda x: functional.binary_cross_entropy_with_logits(x, y.sigmoid()),
        "binary, of probabilities": lambda x: functional.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
        "divergence": lambda x: functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="sum"),
        "divergence of samples": lambda x: functional.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        "gaussian": lambda x: functional.gaussian_nll_loss(x, y, y.abs() + 1),
        "cross entropy": cross_entropy,
        "cross entropy, summed": lambda x: cross_entropy(x, reduction="sum"),
        "cross entropy, of each": lambda x: cross_entropy(x, reduction="none").square().sum(),
        "cross entropy, weighted": lambda x: cross_entropy(x, weight=weight),
        "cross entropy, smoothed": lambda x: cross_entropy(x, label_smoothing=0.1, weight=weight),
        "cross entropy of three dims": lambda x: functional.cross_entropy(x.mT, target),
        "cross entropy of three dims, of each": lambda x: (
            functional.cross_entropy(x.mT, target, reduction="none").square().sum()
        ),
        "cross entropy, of probabilities": lambda x: functional.cross_entropy(x.mT, y.softmax(-1).mT),
        "likelihood": lambda x: functional.nll_loss(x.log_softmax(-1).view(-1, CLASSES), target.view(-1)),
        "alignment": lambda x: functional.ctc_loss(
            x.log_softmax(-1).transpose(0, 1), torch.ones(BATCH, 2, dtype=torch.long), *lengths
        ),
        "by a mask": lambda x: (x * (target != -100)[..., None]).sum() / (target != -100).sum(),
        "chosen by a mask": lambda x: x[target != -100].square().sum(),
        "shifted": lambda x: (x[:, 1:] * x[:, :-1]).sum(),
        "the first": lambda x: x[:, 0].square().sum(),
        "the last": lambda x: x[:, -1].square().sum(),
        "flipped": lambda x: (x.flip(1) * y).sum(),
        "rolled": lambda x: (x.roll(1, 1) * y).sum(),
        "running sums": lambda x: (x.cumsum(1) * y).sum(),
        "running maxima": lambda x: x.cummax(1).values.sum(),
        "sorted": lambda x: (x.sort(1).values * y).sum(),
        "softmax over time": lambda x: (x.softmax(1) * y).sum(),
        "joined": lambda x: torch.cat([x[:, :1], x], 1).square().sum(),
        "padded": lambda x: functional.pad(x, (0, 0, 1, 0)).square().sum(),
        "gathered": lambda x: x.gather(1, index).square().sum(),
        "scattered": lambda x: torch.zeros(BATCH, time, CLASSES).scatter_add(1, index, x).square().sum(),
        "flattened": lambda x: (x.reshape(BATCH, -1) * y.reshape(BATCH, -1)).sum(),
        "in parts": lambda x: x.chunk(3, 1)[0].square().sum() + x.split([3, time - 3], 1)[1].sum(),
        "windows": lambda x: x.unfold(1, 3, 1).mean(-1).square().sum(),
        "spectrum": lambda x: torch.fft.rfft(x, dim=1).abs().sum(),
        "convolution": lambda x: (functional.conv1d(x.mT, torch.ones(5, 5, 3), padding=1).mT * y).sum(),
        "pooling": lambda x: functional.avg_pool1d(x.mT, 2).square().mean(),
        "group norm": lambda x: (functional.group_norm(x.mT, 1).mT * y).sum(),
        "layer norm": lambda x: (functional.layer_norm(x, (CLASSES,)) * y).sum(),
        "attention written out": attention,
        "squared error, weighted": lambda x: functional.mse_loss(x, y, weight=y.abs()),
        "squared error, by a weight of x": lambda x: functional.mse_loss(x, y, weight=x.abs()),
        "absolute error, weighted": lambda x: functional.l1_loss(x, y, weight=y.abs()),
        "huber, weighted": lambda x: functional.huber_loss(x, y, weight=y.abs()),
        "binary, weighted": lambda x: functional.binary_cross_entropy_with_logits(
            x, y.sigmoid(), weight=y.abs(), pos_weight=weight
        ),
        "divergence of logarithms": lambda x: functional.kl_div(
            x.log_softmax(-1), y.softmax(-1).log(), reduction="batchmean", log_target=True
        ),
        "cross entropy, ignoring a class": lambda x: functional.cross_entropy(
            x.mT, target.clamp(0), ignore_index=1, weight=weight
        ),
        "cross entropy, of weighted probabilities": lambda x: functional.cross_entropy(
            x.mT, y.softmax(-1).mT, weight=weight, label_smoothing=0.1
        ),
        "poisson": lambda x: functional.poisson_nll_loss(x, y.abs(), full=True),
        "gaussian, full": lambda x: functional.gaussian_nll_loss(x, y, y[..., :1].abs(), full=True, eps=0.5),
        "margins of classes": lambda x: functional.multi_margin_loss(
            x.flatten(0, 1), target.clamp(0).flatten(), weight=weight
        ),
        "margins of labels": lambda x: functional.multilabel_margin_loss(
            x.flatten(0, 1), index.flatten(0, 1).contiguous()
        ),
        "soft margins of labels": lambda x: functional.multilabel_soft_margin_loss(x, (y > 0).float(), weight),
        "triplets": lambda x: functional.triplet_margin_loss(x, y, y.flip(1)),
        "cosines": lambda x: functional.cosine_embedding_loss(
            x.flatten(0, 1), y.flatten(0, 1), target.clamp(0, 1).flatten() * 2 - 1
        ),
        "linear cross entropy": linear_cross_entropy,
        "linear cross entropy, weighted": lambda x: linear_cross_entropy(x, ignore_index=-100, weight=weight),
        "linear cross entropy in chunks": lambda x: linear_cross_entropy(
            x, weight=weight, options=nn.LinearCrossEntropyOptions(batch_chunk_size=4)
        ),
        "linear cross entropy in chunks, of each": lambda x: (
            linear_cross_entropy(x, reduction="none", options=nn.LinearCrossEntropyOptions(batch_chunk_size=4))
            .square()
            .sum()
        ),
        "hard functions": lambda x: (
            (functional.hardswish(x) + functional.hardtanh(x) + functional.hardsigmoid(x) + functional.relu6(x)) * y
        ).sum(),
        "shrinking functions": lambda x: ((functional.hardshrink(x) + functional.softshrink(x)) * y).sum(),
        "a learned slope": lambda x: (functional.prelu(x, torch.tensor([0.2])) * y).sum(),
        "learned slopes": lambda x: (functional.prelu(x.mT, weight).mT * y).sum(),
        "local response": lambda x: (functional.local_response_norm(x.mT, 3).mT * y).sum(),
        "taken": lambda x: x.take(index.flatten()).square().sum(),
        "norms over time": lambda x: x.norm(dim=1).sum().square(),
        "log of sigmoids": lambda x: functional.logsigmoid(x).sum(),
        "dropout": lambda x: (functional.dropout(x, 0.3) * y).sum(),
        "dropout of another layout": lambda x: (
            functional.dropout(x.transpose(0, 1) + 0, 0.3) * y.transpose(0, 1)
        ).sum(),
        "dropout in place": lambda x: (functional.dropout(x * 1, 0.3, inplace=True) * y).sum(),
        "alpha dropout": lambda x: (functional.alpha_dropout(x, 0.3, True) * y).sum(),
        "feature alpha dropout": lambda x: (functional.feature_alpha_dropout(x, 0.3, True) * y).sum(),
        "dropout of channels": lambda x: (functional.dropout1d(x.mT, 0.3) * y.mT).sum(),
        "dropout of two dims": lambda x: (functional.dropout2d(x[:, :, None], 0.3) * y[:, :, None]).sum(),
        "random leaks": lambda x: (functional.rrelu(x, training=True) * y).sum(),
        "random classes": lambda x: (functional.gumbel_softmax(x, hard=True) * y).sum(),
        "random numbers": lambda x: (
            x * (torch.rand_like(x) + torch.randn_like(x) + torch.randint_like(x, 5) + torch.rand(x.shape))
        ).sum(),
        "random numbers in place": lambda x: (
            (
                x * torch.zeros_like(x).normal_()
                + x * torch.empty_like(x).uniform_() * torch.empty_like(x).exponential_()
            )
            .square()
            .sum()
        ),
        "random truths": lambda x: (x * x.detach().sigmoid().bernoulli() * torch.empty_like(x).bernoulli_(0.3)).sum(),
        "random by means": lambda x: (x * torch.normal(x.detach(), 1.0) * torch.poisson(x.detach().abs())).sum(),
        "random of a sum": lambda x: (x * torch.rand_like(x.sum(1, keepdim=True))).sum(),
        "random indices": lambda x: (
            x * torch.multinomial(x.detach().softmax(-1).flatten(0, 1), 1).view(BATCH, time, 1)
        ).sum(),
        "random distribution": lambda x: (x * torch.distributions.Gamma(x.detach().abs() + 1, 1.0).sample()).sum(),
        "attention layer": attention_layer(0.0),
        "attention layer, causal": attention_layer(0.0, is_causal=True),
        "attention layer, time first": attention_layer(0.0, batch_first=False),
        "attention weights": attention_weights,
        "one by one": one_by_one,
        "recurrent": recurrent,
        "first set to zero": first_set_to_zero,
        "into a plain one": into_a_plain_one,
    }


def _compared(rank: int, time: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    install_operator_rules()
    read_whole_numbers(None)
    wrong = []
    for name, function in functions(time).items():
        torch.manual_seed(1)
        whole = torch.randn(BATCH, time, CLASSES).requires_grad_()
        state = torch.get_rng_state()
        expected = function(whole)
        expected.backward()
        state_after = torch.get_rng_state()
        torch.set_rng_state(state)
        split: Any = distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_()
        with plain_as_replicas(), SequenceFunctions(), weighing_absolute_errors():
            value: Any = function(split)
            value = value.full_tensor() if isinstance(value, DTensor) else value
            value.backward()
        gradient = split.grad.full_tensor()
        is_alike = torch.equal(torch.get_rng_state(), state_after)
        if not is_alike or not (
            torch.allclose(value, expected, rtol=1e-5) and torch.allclose(gradient, whole.grad, atol=1e-5)
        ):
            wrong.append(name)
        dist.barrier()
    give_back_numbers()
    (folder / str(rank)).write_text(repr(wrong))


@pytest.mark.parametrize("time", [8, 7])
def test_functions_of_a_split_sequence_are_those_of_the_whole(time, tmp_path):
    run_ranks(_compared, 2, time, tmp_path, start_method="fork", timeout_s=100)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["[]", "[]"]


class Block(nn.Module):
    """Attention of few heads of keys and values, with positions from the length that it sees, and a running mean."""

    def __init__(self, num_heads: int, num_key_heads: int, kind: str) -> None:
        super().__init__()
        self.num_heads, self.num_key_heads, self.kind = num_heads, num_key_heads, kind
        self.q, self.k = nn.Linear(12, 4 * num_heads), nn.Linear(12, 4 * num_key_heads)
        self.v, self.out = nn.Linear(12, 4 * num_key_heads), nn.Linear(4 * num_heads, 12)
        self.norm = nn.LayerNorm(12)
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x: Tensor, is_kept: Tensor) -> Tensor:
        batch, time, _ = x.shape
        y = self.norm(x) + torch.arange(time)[:, None] / time
        if self.training:
            self.mean.mul_(0.5).add_(y.detach().mean((0, 1)), alpha=0.5)
        q = self.q(y).view(batch, time, self.num_heads, 4).transpose(1, 2)
        k, v = (layer(y).view(batch, time, self.num_key_heads, 4).transpose(1, 2) for layer in (self.k, self.v))
        mask = is_kept[:, None, None, :] & torch.ones(time, time).tril().bool()
        if self.kind == "flex attention":
            with torch.no_grad():  # torch: on the CPU it has no backward
                flex_attention(q, k, v, block_mask=create_block_mask(_is_past, None, None, time, time, "cpu"))
        dropout = 0.1 if self.kind == "attention dropout" and self.training else 0.0
        options = {"causal": {"is_causal": True}, "of all": {}}.get(self.kind, {"attn_mask": mask})
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, enable_gqa=True, **options)
        if self.kind == "a write into a slice":
            y[:, :, :1].mul_(0)
        return x + self.out(y.transpose(1, 2).reshape(batch, time, -1)) - self.mean


def _is_past(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


class Reader(LightningModule):
    """Predicts the next value of each sequence, where it is known, and a value of the whole sequence by its first."""

    def __init__(self, num_heads: int = 4, num_key_heads: int = 2, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(1, 12)
        self.blocks = nn.ModuleList(Block(num_heads, num_key_heads, kind) for _ in range(2))
        self.head, self.pooled = nn.Linear(12, 1), nn.Linear(12, 1)
        self.error = MeanSquaredError()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        is_kept = batch[..., 0] > -1.5
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x, is_kept)
        wrong = functional.mse_loss(self.head(x)[:, :-1], batch[:, 1:], reduction="none")
        self.error(self.pooled(x[:, 0]), batch.mean(1))
        self.log("error", self.error, on_step=False, on_epoch=True)
        known = is_kept[:, 1:, None]
        return (wrong * known).sum() / known.sum() + functional.mse_loss(self.pooled(x[:, 0]), batch.mean(1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(time: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(3, 4, time, 1, generator=generator))


def by_hand(module: Reader, time: int) -> Iterator[tuple[str, Tensor]]:
    module.log = lambda *args, **kwargs: None
    optimizer = module.configure_optimizers()
    torch.manual_seed(5)
    for batch in batches(time):
        optimizer.zero_grad()
        module.training_step(batch, 0).backward()
        optimizer.step()
    return module.named_parameters()


def fit(module: LightningModule, time: int, strategy: str = "cp_fork", devices: int = 2, **flags: Any) -> Engine:
    engine = Engine(strategy=strategy, devices=devices, accelerator="cpu", max_epochs=1, **{**QUIET, **flags})
    torch.manual_seed(5)
    engine.fit(module, DataLoader(torch.cat(batches(time)), batch_size=4, shuffle=False))
    return engine


@pytest.mark.parametrize(
    ("arguments", "time"),
    [
        ({}, 8),
        ({"num_heads": 3, "num_key_heads": 1}, 7),  # samples are dealt, and the parts of a sequence are unequal
        ({"num_key_heads": 1}, 8),
    ],
    ids=["heads", "unequal parts", "few heads of keys"],
)
def test_equals_a_plain_loop(arguments, time):
    module, reference = Reader(**arguments), Reader(**arguments)
    engine = fit(module, time)
    expected = dict(by_hand(reference, time))
    assert max((p - expected[name]).abs().max().item() for name, p in module.named_parameters()) <= 1e-6
    torch.testing.assert_close(dict(module.named_buffers()), dict(reference.named_buffers()))
    torch.testing.assert_close(engine.callback_metrics["error"], reference.error.compute())


@pytest.mark.parametrize(
    ("options", "devices", "arguments"),
    [
        ("", 2, {"kind": "causal"}),
        ("", 2, {"kind": "of all"}),
        (",activation_checkpointing=true", 3, {"kind": "causal", "num_heads": 2, "num_key_heads": 1}),
        *nightly(("", 4, {"kind": "causal", "num_heads": 3, "num_key_heads": 1})),
    ],
    ids=str,
)
def test_rings_equal_a_plain_loop(options, devices, arguments):
    module, reference = Reader(**arguments), Reader(**arguments)
    fit(module, 24, f"cp_fork:attention=ring{options}", devices)
    expected = dict(by_hand(reference, 24))
    assert max((p - expected[name]).abs().max().item() for name, p in module.named_parameters()) <= 1e-6


@pytest.mark.parametrize(
    ("kind", "time", "message"),
    [
        ("", 8, "attention=ring can't be used here: the attention has a mask"),
        ("causal", 6, "2 ranks need 4 equal parts of a sequence, but its length is 6"),
    ],
)
def test_what_a_ring_can_not_do_is_an_error_that_says_so(kind, time, message):
    with pytest.raises(Exception, match=message):
        fit(Reader(kind=kind), time, "cp_fork:attention=ring")


def _refused(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    whole: Any = distribute_tensor(torch.zeros(1, 2, 8, 4), mesh, [Shard(2)])
    said = []
    for tensors, options in (
        ((whole, whole, whole), {"dropout_p": 0.1}),
        ((whole[0], whole[0], whole[0]), {}),
        ((whole[:, :, :4], whole, whole), {"is_causal": True}),
        ((whole.to("meta"), whole, whole), {}),
    ):
        with pytest.raises(ValueError, match="attention=ring can't be used here") as error:
            ring_attention(*tensors, **options)  # type: ignore[arg-type]
        said.append(str(error.value))
    (folder / "said").write_text("\n".join(said))


def test_a_ring_names_what_it_refuses(tmp_path):
    run_ranks(_refused, 1, tmp_path, start_method="fork", timeout_s=100)
    reasons = ("has dropout", r"must be \[batch", "causal attention of 4 queries to 8 keys", "does not run on meta")
    for reason, line in zip(reasons, (tmp_path / "said").read_text().splitlines(), strict=True):
        assert re.search(reason, line)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("attention dropout", "attention with dropout can't be split along the sequence"),
        ("flex attention", "flex_attention can't be computed of a sequence that is split over ranks. Use scaled_dot"),
        ("a write into a slice", "mul_ writes to a part of a sequence that is split over ranks"),
    ],
)
def test_what_can_not_be_split_is_an_error_that_says_so(kind, message):
    with pytest.raises(Exception, match=message):
        fit(Reader(kind=kind), 8)


def test_a_module_without_blocks_is_refused_before_any_process_starts():
    module = Reader()
    module.blocks = module.blocks[0]
    with pytest.raises(ValueError, match="no blocks of Reader are known"):
        fit(module, 8)


def test_a_compiled_module_is_refused_before_any_process_starts():
    with pytest.raises(ValueError, match="can't be compiled: the functions of a split sequence"):
        fit(Reader(), 8, compile=True)


class Packed(ByteGPT):
    """Trains on packed sequences, by the mean over the tokens that are predicted."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(context_length=32, dim=32, num_heads=4, num_layers=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("strategy", "devices", "num_ranks"), [("cp_fork", 2, 1), *nightly(("ddp+cp_fork:cp=2", 4, 2))]
)
def test_packed_sequences_count_by_their_tokens(strategy, devices, num_ranks):
    generator = torch.Generator().manual_seed(2)
    in_step = 2 * 6 * num_ranks
    lengths = torch.randint(2, 17, (3 * in_step,), generator=generator).tolist()
    samples = [{"input_ids": torch.randint(256, (length,), generator=generator)} for length in lengths]
    module, reference = Packed(), Packed()
    loader = DataLoader(samples, batch_size=6, shuffle=False, collate_fn=PackSequences(32))  # type: ignore[arg-type]
    flags = {"accumulate_grad_batches": 2, "max_epochs": 1, **QUIET}
    Engine(strategy=strategy, devices=devices, accelerator="cpu", **flags).fit(module, loader)
    reference.log = lambda *args, **kwargs: None
    optimizer = reference.configure_optimizers()
    for first in range(0, len(samples), in_step):
        optimizer.zero_grad()
        reference.training_step(PackSequences(32)(samples[first : first + in_step]), 0)["loss"].backward()
        optimizer.step()
    expected = dict(reference.named_parameters())
    assert max((p - expected[name]).abs().max().item() for name, p in module.named_parameters()) <= 1e-6


class Kept(Callback):
    """Writes down how many bytes a step keeps for backward on the first rank: each storage once, no parameters."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Engine, module: LightningModule) -> None:
        own = {self._place(parameter) for parameter in module.parameters()}
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            if self._place(tensor) not in own:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                storages[self._place(tensor)] = local.untyped_storage().nbytes()
            return tensor

        forward = module.training_step

        def step(*args: Any) -> Tensor:
            storages.clear()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = forward(*args)
            if trainer.is_global_zero:
                self.path.write_text(str(sum(storages.values())))
            return loss

        module.training_step = step

    @staticmethod
    def _place(tensor: Tensor) -> int:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.untyped_storage().data_ptr()


OF_THE_PAGE = {1: 17.9, 2: 9.5, 4: 4.7}
"""MB by number of ranks, as in docs/howto/long-sequences.md."""


@pytest.mark.parametrize(
    ("cp", "options", "num_heads"), [(2, "", 4), (4, "", 4), (4, ":attention=ring", 2)], ids=["2", "4", "4, ring"]
)
def test_a_rank_keeps_its_part_of_the_activations(cp, options, num_heads, tmp_path):
    kept = {}
    for devices in (1, cp):
        torch.manual_seed(0)
        module = ByteGPT(context_length=256, dim=128, num_heads=num_heads, num_layers=4)
        callbacks = [Kept(tmp_path / str(devices))]
        engine = Engine(
            strategy=f"cp_fork{options}" if devices > 1 else "single",
            devices=devices,
            accelerator="cpu",
            max_steps=1,
            callbacks=callbacks,
            **QUIET,
        )
        engine.fit(module, DataLoader(torch.randint(0, 256, (2, 257)), batch_size=2))
        kept[devices] = int((tmp_path / str(devices)).read_text())
    # What the embeddings keep is whole on each rank.
    assert kept[cp] <= 1.15 * kept[1] / cp
    if not options:
        assert {devices: num / 1e6 for devices, num in kept.items()} == pytest.approx(
            {devices: OF_THE_PAGE[devices] for devices in kept}, rel=0.02
        )
