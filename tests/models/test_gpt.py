"""ByteGPT: sizes, optimizer groups, schedule, and that it learns."""

import math

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional

from polyphase.engine.data import PackSequences
from polyphase.models import SIZES, ByteGPT, PythonSource, TokenGPT, chunked_cross_entropy

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def test_124m_is_gpt2s_shape_with_bytes():
    with torch.device("meta"):
        model = ByteGPT("124M")
    # GPT-2 has 124 M parameters, of which 50257 - 256 embeddings of 768 are not needed for bytes.
    num = sum(p.numel() for p in model.parameters())
    assert num == 124_439_808 - (50257 - 256) * 768


def test_a_shape_overrides_the_size():
    model = ByteGPT("tiny", dim=32)
    assert model.net.token_embedding.embedding_dim == 32
    assert len(model.net.blocks) == SIZES["tiny"]["num_layers"]


def test_biases_and_norms_do_not_decay_and_all_is_optimized():
    model = ByteGPT(num_layers=1, dim=16, num_heads=2, context_length=8)
    model.trainer = Trainer(max_steps=10, **QUIET)
    decayed, kept = model.configure_optimizers()["optimizer"].param_groups
    assert all(p.dim() >= 2 for p in decayed["params"])
    assert all(p.dim() < 2 for p in kept["params"])
    assert kept["weight_decay"] == 0 < decayed["weight_decay"]
    assert len(decayed["params"]) + len(kept["params"]) == len(list(model.parameters()))


def test_it_learns_and_its_schedule_ends_at_a_tenth():
    torch.manual_seed(0)
    model = ByteGPT(num_layers=1, dim=32, num_heads=2, context_length=32, lr=1e-2, warmup_steps=5)
    data = PythonSource(batch_size=8, context_length=32, max_bytes=32 * 8 * 40 + 1, max_val_bytes=4000)
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(model, datamodule=data)
    metrics = trainer.callback_metrics
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"].item() / math.log(2))
    assert metrics["val/bits_per_byte"] < 6 < 8
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-3, rel=0.05)


def test_without_an_end_the_rate_stays():
    model = ByteGPT(num_layers=1, dim=16, num_heads=2, context_length=8, warmup_steps=4)
    model.trainer = Trainer(max_epochs=-1, **QUIET)
    assert [model._lr_factor(step) for step in (0, 1, 3, 4, 10**6)] == [0.25, 0.5, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("kind", "fused"), [("cuda", True), ("cpu", None), ("mps", None)])
def test_its_optimizer_steps_in_one_kernel_on_a_gpu(kind, fused):
    class There(ByteGPT):
        device = torch.device(kind)

    model = There()
    model.trainer = Trainer(max_steps=8, **QUIET)
    optimizer = model.configure_optimizers()["optimizer"]
    assert [group["fused"] for group in optimizer.param_groups] == [fused, fused]


# --- tokens of two bytes


class WithLogits(TokenGPT):
    """With all logits."""

    _loss = ByteGPT._loss


@pytest.mark.parametrize("packs", [False, True])
def test_its_loss_is_that_of_logits(packs):
    results = []
    for make in (TokenGPT, WithLogits):
        torch.manual_seed(0)
        module = make(num_layers=1, dim=16, num_heads=2, context_length=8)
        assert module.net.head.weight.shape == (65_536, 16)
        batch = torch.randint(65_536, (3, 9))
        if packs:
            batch = PackSequences(8)(
                [{"input_ids": row[:length]} for row, length in zip(batch, (3, 5, 8), strict=True)]
            )
        loss = module._loss(batch)
        loss.backward()
        results.append([loss, *(p.grad for p in module.parameters())])
    # Sums of 65,536 numbers in another order.
    torch.testing.assert_close(*results, rtol=1e-6, atol=5e-6)


def test_it_learns_with_pairs_of_bytes():
    torch.manual_seed(0)
    model = TokenGPT(num_layers=1, dim=16, num_heads=2, context_length=16, lr=1e-2, warmup_steps=5)
    data = PythonSource(batch_size=8, context_length=16, max_bytes=10_000, max_val_bytes=1_001, bytes_per_token=2)
    trainer = Trainer(max_epochs=1, **QUIET)
    trainer.fit(model, datamodule=data)
    metrics = trainer.callback_metrics
    assert metrics["val/bits_per_byte"] == pytest.approx(metrics["val/loss"].item() / math.log(2) / 2)
    assert metrics["val/bits_per_byte"] < 7.5 < 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_in_chunks_computes_in_the_dtype_of_autocast(dtype):
    torch.manual_seed(0)
    features, weight = torch.randn(2, 5, 16, requires_grad=True), torch.randn(40, 16, requires_grad=True)
    targets = torch.randint(40, (2, 5))
    targets[0, 0] = -100
    is_half = dtype == torch.bfloat16
    with torch.autocast("cpu", dtype, enabled=is_half):
        loss = chunked_cross_entropy(features, weight, targets)
    ours = loss, *torch.autograd.grad(loss, (features, weight))
    loss = functional.cross_entropy((features.to(dtype) @ weight.to(dtype).T).float().flatten(0, 1), targets.flatten())
    expected = loss, *torch.autograd.grad(loss, (features, weight))
    assert {value.dtype for value in ours} == {torch.float32}
    torch.testing.assert_close(ours, expected, rtol=0, atol=2e-2 if is_half else 1e-6)
