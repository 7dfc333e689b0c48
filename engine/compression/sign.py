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
        # Phase 1.
        parts = total.split(bucket.numels)
        means = [
            norm / max(part.numel(), 1) for norm, part in zip(torch._foreach_norm(parts, ord=1), parts, strict=True)
        ]
        scales = torch.stack(means).float()
        bits = pack(total >= 0)
        # Phase 2.
        everyones = wire.all_gather(torch.cat([scales.view(torch.uint8), bits]))
        # Phase 3.
        own = _decode(bits, scales, bucket)
        average = bucket.gradients
        average.zero_()
        all_scales = aligned(everyones[:, : 4 * len(parts)]).view(torch.float32)
        for rank in range(wire.size):
            theirs = everyones[rank, 4 * len(parts) :]
            decoded = own if rank == wire.rank else _decode(theirs, all_scales[rank], bucket)
            average.add_(decoded, alpha=1 / wire.size)
        total.sub_(own)


def _decode(bits: Tensor, scales: Tensor, bucket: Bucket) -> Tensor:
    values = unpack(bits, bucket.gradients.numel(), bucket.gradients.dtype)
    torch._foreach_mul_(values.split(bucket.numels), scales.to(values.dtype).unbind())
    return values


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
