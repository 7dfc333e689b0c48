"""The noise of int8, and how its passes are compiled."""

import pytest
import torch
from torch import Tensor

from polyphase.engine.compression.int8 import _Fused, _Noise, passes_of


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
