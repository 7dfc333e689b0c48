"""Numbers of few bits: as many bytes as they need, and the same numbers again."""

import pytest
import torch

from polyphase.engine.compression.packing import pack, packed_bytes, unpack


@pytest.mark.parametrize("bits", [1, 2, 3, 8, 9, 12, 16, 31, 32])
@pytest.mark.parametrize("numel", [0, 1, 7, 8, 1001])
def test_numbers_return_from_the_bytes_that_they_need(bits, numel):
    most = 2 ** min(bits, 31) - 1
    numbers = torch.randint(0, most + 1, (numel,), generator=torch.Generator().manual_seed(numel))
    numbers[:1], numbers[1:2] = most, 0
    packed = pack(numbers, bits)
    assert packed.dtype == torch.uint8
    assert packed.numel() == packed_bytes(numel, bits) == -(-numel * bits // 8)
    assert torch.equal(unpack(packed, numel, bits).long(), numbers)
