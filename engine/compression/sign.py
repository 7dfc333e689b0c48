"""`sign`: one bit a value, and one scale a parameter (EF-signSGD, Karimireddy et al. 2019, arXiv:1901.09847).

Phases: 1. signs, eight in a byte, and the mean magnitude of each parameter (local); 2. all-gather of n/8 bytes and 4
bytes a parameter, in one message; 3. the mean of all ranks' signs times scales (local). Bytes grow with the number of
ranks, W-1 times n/8: half as much as a plain all-reduce of fp32 at W = 32.
"""

import functools

import torch
from torch import Tensor

from .bucket import Bucket
from .feedback import LossyHook
from .wire import Wire, aligned

__all__ = ["Sign", "pack", "unpack"]


class Sign(LossyHook):
    """Send signs; see `LossyHook` for the argument."""

    name = "sign"
    description = "one bit a value and a scale a parameter, with error feedback"

    def exchange(self, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """See the phases above."""
        # Phase 1. Parameter by parameter, so that what is made in between stays in the cache.
        parts = total.split(bucket.numels)
        norms = torch._foreach_norm(parts, ord=1, dtype=torch.promote_types(total.dtype, torch.float32))
        means = [norm / max(part.numel(), 1) for norm, part in zip(norms, parts, strict=True)]
        scales = torch.stack(means).float()
        bits = [pack(part >= 0) for part in parts]
        # Phase 2.
        everyones = wire.all_gather(torch.cat([scales.view(torch.uint8), *bits]))
        # Phase 3.
        all_scales = aligned(everyones[:, : 4 * len(parts)]).view(torch.float32).to(total.dtype)
        all_bits = everyones[:, 4 * len(parts) :].split([packed.numel() for packed in bits], dim=1)
        averages = bucket.gradients.split(bucket.numels)
        for index, (part, average, of_ranks) in enumerate(zip(parts, averages, all_bits, strict=True)):
            average.zero_()
            for rank, packed in enumerate(of_ranks):
                decoded = unpack(packed, part.numel(), part.dtype).mul_(all_scales[rank, index])
                average.add_(decoded, alpha=1 / wire.size)
                if rank == wire.rank:
                    part.sub_(decoded)


def pack(bits: Tensor) -> Tensor:
    """Booleans [n] as bytes [ceil(n / 8)], the first one in the lowest bit; what is left over is False."""
    padded = torch.nn.functional.pad(bits.view(torch.uint8), (0, -bits.numel() % 8))
    # Eight bytes of 0 or 1 as one number: this product has all of them in its highest byte.
    words = padded.view(torch.int64)
    return ((words * 0x0102040810204080) >> 56).to(torch.uint8)


def unpack(packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The inverse: `n` values of 1 for True and -1 for False."""
    return _table(packed.device, dtype).index_select(0, packed.int()).view(-1)[:n]


@functools.cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Eight signs for each byte: [256, 8]."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return ((byte >> torch.arange(8, device=device)) & 1).to(dtype) * 2 - 1
