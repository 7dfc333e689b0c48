"""ByteGPT: sizes, optimizer groups, schedule, and that it learns."""

import math

import pytest
import torch
from lightning.pytorch import Trainer

from polyphase.models import SIZES, ByteGPT, PythonSource

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
