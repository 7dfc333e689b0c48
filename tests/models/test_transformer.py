"""Laws of the transformer: causality, tying, packed sequences, and weights that can be drawn again."""

import math

import pytest
import torch
from torch import library
from torch._dynamo.testing import CompileCounter

from polyphase.engine.data import PackSequences
from polyphase.models import ByteGPT, Transformer


def net(**shape: object) -> Transformer:
    torch.manual_seed(0)
    return Transformer(**{"num_tokens": 17, "context_length": 8, "dim": 12, "num_heads": 3, "num_layers": 2, **shape})


@pytest.mark.parametrize("position", [1, 4, 7])
def test_a_token_changes_nothing_before_it(position):
    model = net().eval()
    tokens = torch.randint(0, 17, (2, 8))
    changed = tokens.clone()
    changed[:, position] = (changed[:, position] + 1) % 17
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :position], after[:, :position])
    assert not torch.allclose(before[:, position:], after[:, position:])


def test_embeddings_are_tied():
    model = net()
    assert model.head.weight is model.token_embedding.weight
    assert sum("weight" in name and p.shape == (17, 12) for name, p in model.named_parameters()) == 1


def test_every_parameter_has_a_gradient():
    model = net()
    model(torch.randint(0, 17, (2, 8))).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_shorter_sequences_are_fine_and_longer_ones_are_not():
    model = net()
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 17)
    with pytest.raises(ValueError, match="9 tokens does not fit the model's context_length=8"):
        model(torch.zeros(1, 9, dtype=torch.long))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="dim must be a multiple of num_heads, but 12 is not a multiple of 5"):
        net(num_heads=5)


def test_dropout_acts_in_training_only():
    model = net(dropout=0.5)
    tokens = torch.randint(0, 17, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


# --- packed sequences, by boundaries: torch has a kernel for GPUs alone, so here is one for CPUs, as it documents it


def of_sequences(cu_seq, q, k, scale):
    """For each sequence its slice, and the weights [heads, queries, keys] of its causal attention."""
    for start, end in zip(cu_seq[:-1].tolist(), cu_seq[1:].tolist(), strict=True):
        if start < end:
            scores = torch.einsum("qhd,khd->hqk", q[start:end], k[start:end]) * scale
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            yield slice(start, end), scores.masked_fill(future, -math.inf).softmax(-1)


def forward_kernel(q, k, v, cu_seq, _cu_seq_k, max_q, _max_k, is_causal=False, scale=None, *_):
    assert is_causal
    assert cu_seq.dtype == torch.int32
    assert int(cu_seq.diff().max()) <= max_q
    out = torch.empty_like(q)
    for some, weights in of_sequences(cu_seq, q, k, scale or q.size(-1) ** -0.5):
        out[some] = torch.einsum("hqk,khd->qhd", weights, v[some])
    return out, q.new_empty(q.size(1), q.size(0), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def backward_kernel(gradient, q, k, v, _out, _lse, cu_seq, _cu_seq_k, _max_q, _max_k, _causal, _rng, scale=None, *_):
    scale = scale or q.size(-1) ** -0.5
    dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
    for some, weights in of_sequences(cu_seq, q, k, scale):
        of_weights = torch.einsum("qhd,khd->hqk", gradient[some], v[some])
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        dq[some] = torch.einsum("hqk,khd->qhd", of_scores, k[some])
        dk[some] = torch.einsum("hqk,qhd->khd", of_scores, q[some])
        dv[some] = torch.einsum("hqk,qhd->khd", weights, gradient[some])
    return dq, dk, dv


@pytest.fixture
def kernel(monkeypatch):
    library.register_kernel("torch_attn::_varlen_attn", "cpu", forward_kernel)
    library.register_kernel("torch_attn::_varlen_attn_backward", "cpu", backward_kernel)
    monkeypatch.setattr(Transformer, "_has_kernel", lambda *_: True)


def packed(lengths):
    generator = torch.Generator().manual_seed(0)
    texts = [{"input_ids": torch.randint(256, (length,), generator=generator).tolist()} for length in lengths]
    return PackSequences(16)(texts)


def test_packed_sequences_by_boundaries_are_those_by_a_mask(kernel):
    torch.manual_seed(0)
    module, batch = ByteGPT(num_layers=2, num_heads=2, dim=16, context_length=16), packed([7, 3, 12, 1, 5, 9, 2, 4])
    results = []
    for has_boundaries in (False, True):
        module.zero_grad()
        loss = module._loss({name: t for name, t in batch.items() if has_boundaries or name != "sequence_lengths"})
        loss.backward()
        results.append([loss, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=1e-6)


def test_with_boundaries_nothing_has_the_size_of_a_mask(kernel):
    module, batch = ByteGPT(num_layers=2, num_heads=2, dim=24, context_length=16), packed([7, 9, 16])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        module._loss(batch)
    assert not [shape for shape in kept if shape[-2:] == (16, 16) and len(shape) > 2]


def test_boundaries_of_any_values_are_one_graph(kernel):
    compiler = CompileCounter()
    step = torch.compile(ByteGPT(num_layers=2, num_heads=2, dim=16, context_length=16)._loss, backend=compiler)
    for lengths in ([7, 9, 16], [16, 16], [2, 3, 4, 5, 1, 16]):
        step(packed(lengths))
    assert compiler.frame_count == 1
