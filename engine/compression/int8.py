"""`int8`: eight bits a value and a scale for each block, rounded at random so that the mean is right.

A sum of bytes would overflow, so the all-reduce is done by hand. Phases: 1. quantise (local); 2. all-to-all: each rank
gets everybody's values of one part of each parameter, (1 + 4/block) n (W-1)/W bytes; 3. average that part and quantise
it (local); 4. all-gather of the parts, as many bytes again; 5. dequantise (local). What phase 3 rounds off is kept by
the rank that did so. Parameters are filled up to a multiple of W blocks.

Stochastic rounding: Alistarh et al. 2017, arXiv:1610.02132.
"""

import torch
from torch import Tensor
from torch.nn import functional

from ..flags import check_count
from .bucket import Bucket
from .feedback import LossyHook
from .wire import Wire, aligned

__all__ = ["Int8", "dequantize", "quantize"]

_ZERO, _LARGEST = 128, 127
"""The byte of zero, and how far from it a byte may be."""


class Int8(LossyHook):
    """Send eight bits a value.

    Args:
        block: number of values that share a scale, a multiple of 4.
        feedback: see `LossyHook`; None: yes, except under `fsdp`, where each rank would have to keep what it has not
            sent of a whole unsharded model. The rounding is without bias, so it can do without.
    """

    name = "int8"
    description = "8 bits a value and a scale a block, stochastic rounding, error feedback: int8[:block]; block 256"

    reduces_shards = True

    def __init__(self, block: int = 256, feedback: bool | None = None) -> None:
        super().__init__(feedback is not False)
        self.asks_for_feedback = feedback is True
        self.block = check_count("int8:block", block)
        if block % 4:
            raise ValueError(f"int8:block must be a multiple of 4, but got {block}.")

    def exchange(self, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """See the phases above."""
        parts = total.split(bucket.numels)
        # Phase 1. Of each parameter, each rank gets an equal number of blocks, whatever bucket it is in.
        sizes = [-(-part.numel() // (wire.size * self.block)) * self.block for part in parts]
        rows = [
            (functional.pad(part, (0, missing)) if (missing := wire.size * size - part.numel()) else part).view(
                -1, size
            )
            for part, size in zip(parts, sizes, strict=True)
        ]
        noise = self._noise(total.device, wire.rank)
        payload = torch.cat([quantize(row, noise) for row in rows], dim=1)
        packed_sizes = [size + 4 * (size // self.block) for size in sizes]
        # Phase 2.
        received = wire.all_to_all(payload).split(packed_sizes, dim=1)
        # Phase 3.
        mine = [dequantize(theirs, self.block, total.dtype).mean(0) for theirs in received]
        noise = self._noise(total.device, wire.size)
        packed = torch.cat([quantize(average.unsqueeze(0), noise) for average in mine], dim=1)
        # Phase 4.
        everyones = wire.all_gather(packed.view(-1)).split(packed_sizes, dim=1)
        # Phase 5.
        gradients = bucket.gradients.split(bucket.numels)
        by_member = zip(parts, gradients, payload.split(packed_sizes, dim=1), mine, everyones, strict=True)
        for part, gradient, own, exact, theirs in by_member:
            averages = dequantize(theirs, self.block, total.dtype)
            sent = dequantize(own, self.block, total.dtype)
            # What phase 3 has lost of the sum, this rank has not sent.
            sent[wire.rank].sub_(exact.sub_(averages[wire.rank]), alpha=wire.size)
            part.sub_(sent.view(-1)[: part.numel()])
            gradient.copy_(averages.view(-1)[: part.numel()])

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: Wire) -> None:
        """Phases 1 and 2, and the average of 3."""
        n = shard.numel()
        padded = functional.pad(whole.view(wire.size, n), (0, -n % self.block))
        payload = quantize(padded, self._noise(whole.device, wire.rank))
        shard.copy_(dequantize(wire.all_to_all(payload), self.block, shard.dtype).mean(0)[:n])

    def _noise(self, device: torch.device, stream: int) -> Tensor:
        """What to add before rounding down, for one block.

        It depends on the step and the rank alone, so a resumed run draws the same. All blocks share it: each number is
        rounded without bias, which is what matters, and drawing others would take longer than all else here.
        """
        seed = hash((self.step, stream)) & 0x7FFF_FFFF_FFFF_FFFF  # of whole numbers: the same in all processes
        return torch.rand(self.block, device=device, generator=torch.Generator(device).manual_seed(seed))


def quantize(values: Tensor, noise: Tensor) -> Tensor:
    """Rows of numbers [rows, n] as rows of bytes [rows, n + 4 n / block]: the numbers, then a float32 scale a block.

    Args:
        values: n is a multiple of the block.
        noise: [block], uniform in [0, 1).
    """
    rows, n = values.shape
    blocks = values.float().view(rows, -1, noise.numel())
    # A little more than the greatest, so that no sum with the noise is rounded up to 256.
    scales = blocks.abs().amax(2, keepdim=True) * ((1 + 1e-5) / _LARGEST)
    # Of a block of zeros, nothing is divided by zero.
    factors = scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal_()
    numbers = torch.addcmul(noise + _ZERO, blocks, factors).to(torch.uint8)  # rounds down: all are positive
    return torch.cat([numbers.view(rows, n), scales.view(rows, -1).view(torch.uint8)], dim=1)


def dequantize(packed: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The inverse, up to the rounding: [rows, n]."""
    rows, num_bytes = packed.shape
    num_blocks = num_bytes // (block + 4)
    scales = aligned(packed[:, block * num_blocks :]).view(torch.float32)
    numbers = packed[:, : block * num_blocks].float().view(rows, num_blocks, block)
    return numbers.sub_(_ZERO).mul_(scales.unsqueeze(2)).view(rows, -1).to(dtype)
