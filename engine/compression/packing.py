"""Whole numbers of few bits, packed into bytes: eight booleans a byte, or n numbers of b bits in n b / 8 bytes."""

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["pack", "pack_booleans", "packed_bytes", "unpack"]


def pack_booleans(booleans: Tensor) -> Tensor:
    """Packs booleans into bytes [ceil(n / 8)], the first one in the lowest bit; padded with False."""
    padded = functional.pad(booleans.flatten().view(torch.uint8), (0, -booleans.numel() % 8))
    # Eight bytes of 0 or 1 are read as one integer; this product collects their bits in the highest byte.
    words = padded.view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def packed_bytes(numel: int, bits: int) -> int:
    """The number of bytes that `pack` makes."""
    return -(-numel * bits // 8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Packs `numbers` [n], from 0 to 2**bits - 1, into bytes: first the lowest bit of all of them, then the next."""
    if bits == 32:
        return numbers.to(torch.int32).view(torch.uint8)
    # Bit by bit, each with n bytes: all bits of a number at once would take `bits` times the memory of the numbers.
    planes = [(numbers >> bit) & 1 for bit in range(bits)]
    return pack_booleans(torch.cat([plane.to(torch.bool) for plane in planes]))


def unpack(packed: Tensor, numel: int, bits: int) -> Tensor:
    """Reverses `pack`: returns `numel` integers."""
    if bits == 32:
        return packed.clone().view(torch.int32)  # a view needs aligned bytes
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    planes = ((packed.unsqueeze(1) >> places) & 1).view(-1)[: numel * bits].view(bits, numel)
    numbers = torch.zeros(numel, dtype=torch.int32, device=packed.device)
    for bit, plane in enumerate(planes.unbind()):
        numbers |= plane.to(torch.int32) << bit
    return numbers
