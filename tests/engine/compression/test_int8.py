"""The noise of int8, and how its passes are compiled."""

import pytest
import torch
from torch import Tensor

from polyphase.engine.compression.int8 import _Fused, _Noise, _Passes, passes_of


def test_the_rounding_is_unbiased():
    # Values of each fraction of a step of the scale, quantised in many steps with the noise of one block.
    block, num_steps = 64, 4096
    values = torch.linspace(-1, 1, block).expand(1, num_steps, block).reshape(1, -1)
    message = torch.empty(1, num_steps * (block + 4), dtype=torch.uint8)
    rounded = torch.empty_like(values)
    passes_of(block).quantize(values, _Noise(torch.arange(num_steps, dtype=torch.int32), 7), message, keeps_rest=False)
    passes_of(block).dequantize(message, rounded)
    step = 1 / 127
    errors = (rounded - values).view(num_steps, block)
    assert errors.abs().max() < 1.001 * step
    # The standard deviation of a mean of that many errors, which are at most half a step on average.
    assert errors.mean(0).abs().max() < 4 * 0.5 * step / num_steps**0.5


@pytest.mark.parametrize("keeps_rest", [True, False])
def test_compiled_passes_have_equal_bits_and_one_graph_for_all_sizes(keeps_rest, monkeypatch):
    num_ranks, block, passes = 4, 256, _Passes(256)
    for name in ("_quantize", "_requantize", "_mean", "_dequantize"):
        fused = getattr(passes, name)  # by torch's graphs alone: there may be no compiler of C++
        fused._compiled = torch.compile(fused.function, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(_Fused, "is_possible", staticmethod(lambda tensor: True))

    def computed(values: Tensor) -> list[Tensor]:
        num_blocks = values.size(1) // block
        noise = _Noise(torch.arange(num_blocks, dtype=torch.int32), 12345)
        sent, again = (values.new_empty(rows, (block + 4) * num_blocks, dtype=torch.uint8) for rows in (num_ranks, 1))
        left, back = values.clone(), torch.empty_like(values)
        passes.quantize(left, noise, sent, keeps_rest)
        rest = passes.requantize(sent, noise, again, torch.float32, keeps_rest)
        passes.dequantize(sent, back)
        results = [sent, again, passes.average(sent, torch.float32), back]
        return [*results, left, rest] if rest is not None else results

    with torch._dynamo.config.patch(error_on_recompile=True):
        passes.compile(torch.empty(0), num_ranks, keeps_rest=keeps_rest)
        assert passes.is_compiled
        for num_blocks in (2, 77):
            values = torch.randn(num_ranks, block * num_blocks, generator=torch.Generator().manual_seed(num_blocks))
            compiled = computed(values)
            with monkeypatch.context() as eager:
                eager.setattr(_Fused, "is_wanted", False)
                expected = computed(values)
            assert all(map(torch.equal, compiled, expected))
    torch._dynamo.reset()


def test_what_cannot_be_compiled_is_computed_as_it_is(monkeypatch):
    def decide(values: Tensor) -> float:
        return 6.0 if values.sum() == 3 else 0.0  # the host decides, which is no kernel

    monkeypatch.setattr(_Fused, "_why_not", None)
    fused = _Fused(decide)
    with pytest.warns(UserWarning, match="kernels can't be compiled"):
        fused.compile(torch.ones(3))
    assert not fused.is_compiled
    assert fused(torch.ones(3)) == 6
    another = _Fused(decide)
    another.compile(torch.ones(3))  # without another warning
    assert another(torch.ones(3)) == 6
