"""Operations against a count by hand; what is sharded, computed again, or compiled; the rate of the device."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from polyphase.callbacks import Doctor
from polyphase.doctor import judge, read_run
from polyphase.doctor.figures import figures_of
from polyphase.doctor.flops import StepFlops, dtype_of, matmul_rate, peak_flops_per_s
from polyphase.doctor.verdict import rate_text
from tests.engine.tiny import Regression, engine, rows

BATCH = 8
SIZES = 64 * 128 + 128 * 32


def counted(step):
    flops = StepFlops()
    flops.begin()
    try:
        step()
    finally:
        flops.close()
    return flops


@pytest.fixture
def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def test_a_perceptron_has_six_a_weight_and_sample(mlp):
    x = torch.ones(BATCH, 64, requires_grad=True)
    flops = counted(lambda: mlp(x).sum().backward())
    assert (flops.model, flops.recomputed, flops.is_known) == (6 * SIZES * BATCH, 0, True)


def test_without_a_gradient_of_the_input_there_are_fewer(mlp):
    flops = counted(lambda: mlp(torch.ones(BATCH, 64)).sum().backward())
    assert flops.model == 6 * SIZES * BATCH - 2 * 64 * 128 * BATCH


def test_what_is_computed_again_is_counted_by_itself(mlp):
    x = torch.ones(BATCH, 64, requires_grad=True)
    flops = counted(lambda: checkpoint(mlp, x, use_reentrant=False).sum().backward())
    assert flops.model == 6 * SIZES * BATCH
    assert flops.recomputed == 2 * 64 * 128 * BATCH, "the last layer's output is not needed again"


def test_the_largest_logits_of_a_loss():
    x, layer, classes = torch.randn(8, 16), nn.Linear(16, 500), torch.arange(8)
    assert counted(lambda: nn.functional.cross_entropy(layer(x), classes).backward()).logits_mb == 8 * 500 * 4 / 1e6
    assert counted(lambda: layer(x).softmax(-1).sum().backward()).logits_mb == 0
    chunks = nn.LinearCrossEntropyOptions(batch_chunk_size=2)
    in_chunks = counted(lambda: nn.functional.linear_cross_entropy(x, layer.weight, classes, options=chunks).backward())
    assert in_chunks.logits_mb <= 2 * 500 * 4 / 1e6


def test_attention(monkeypatch):
    batch, heads, length, size = 2, 4, 16, 8
    query, key, value = (torch.randn(batch, heads, length, size, requires_grad=True) for _ in range(3))
    product = 2 * batch * heads * length * length * size
    forward = counted(lambda: nn.functional.scaled_dot_product_attention(query, key, value))
    assert forward.model == 2 * product
    both = counted(lambda: nn.functional.scaled_dot_product_attention(query, key, value).sum().backward())
    assert both.model == (2 + 5) * product, "backward has the scores again, and four more"
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        plain = counted(lambda: nn.functional.scaled_dot_product_attention(query, key, value).sum().backward())
    assert plain.model == (2 + 4) * product


def test_compiled_code_is_counted_and_still_compiled_afterwards(mlp):
    from torch._dynamo.testing import CompileCounter

    frames = CompileCounter()
    compiled = torch.compile(mlp, backend=frames)
    x = torch.ones(BATCH, 64, requires_grad=True)
    assert counted(lambda: compiled(x).sum().backward()).model == 6 * SIZES * BATCH
    assert frames.frame_count == 0
    compiled(x)
    assert frames.frame_count == 1


def test_what_can_not_be_counted_does_not_end_the_step(mlp):
    flops = StepFlops()

    def fails(*args, **kwargs):
        raise AssertionError("by intention")

    flops.flop_registry[torch.ops.aten.addmm] = fails
    flops.begin()
    with pytest.warns(UserWarning, match="Doctor can't count the operations of aten.addmm"):
        mlp(torch.ones(BATCH, 64))
    flops.close()
    assert not flops.is_known


def test_a_cpu_is_measured():
    rates = [matmul_rate(torch.float32), peak_flops_per_s(torch.device("cpu"), "fp32")]
    assert 1e8 < min(rates) <= max(rates) < 1e14
    assert peak_flops_per_s(torch.device("cpu"), None) is None


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", "fp32"), ("bf16-mixed", "bf16"), ("bf16-true", "bf16"), ("16-mixed", "fp16"), ("64-true", None)],
)
def test_the_type_of_matrix_products(precision, dtype, tmp_path):
    assert dtype_of(engine(precision=precision, default_root_dir=tmp_path)) == dtype


def test_a_run_has_them_by_the_sample(tmp_path):
    class Wide(Regression):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))

        def training_step(self, batch, batch_idx):
            return self.mlp(torch.ones(len(batch[0]), 64)).square().mean()

    trainer = engine(callbacks=[Doctor(every_n_steps=5)], max_steps=20, max_epochs=-1, default_root_dir=tmp_path)
    data = rows(4 * 20)
    trainer.fit(Wide(), data)
    run = read_run(str(tmp_path))
    num_samples = sum(each.num_samples for each in run.intervals[0])
    total = sum(each.flops for each in run.intervals[0])
    assert total == pytest.approx(num_samples * (6 * SIZES - 2 * 64 * 128))
    figures = figures_of(run)
    assert figures.mfu(0) == pytest.approx(figures.flops_per_s(0) / run.ranks[0].peak_flops_per_s)
    assert 0.0 < figures.mfu(0) < 1.0
    assert "% of the measured peak" in rate_text(figures)
    assert "FLOP/s" in judge(run).lines()[0]
    assert judge(run).plain()["rates"][0]["flops_per_s"] == figures.flops_per_s(0)
