"""`sign`: one bit a value, and one scale a row of each matrix (EF-signSGD, Karimireddy et al. 2019, arXiv:1901.09847).

Phases: 1. signs, eight in a byte, and the mean magnitude of each row (local); 2. all-gather of n/8 bytes and 2 bytes a
row, in one message; 3. the mean of all ranks' signs times scales (local). Bytes grow with the number of ranks, W-1
times n/8: half as much as a plain all-reduce of fp32 at W = 32.

The paper has one scale a layer. Where rows differ, as those of an embedding do by how often a token occurs, most are
then sent many times too large, and what has to be taken back piles up. For the same reason each value of a bias, or of
a norm's gains, has a scale of its own: it is sent as it is, in bfloat16.
"""

import functools

import torch
from torch import Tensor

from .bucket import Bucket, Member, wide
from .feedback import LossyHook
from .wire import Wire, aligned

__all__ = ["Sign", "pack", "unpack"]

_RUN = 2**20
"""Least number of values that are sent together."""
_SHORT_ROW = 32
"""Shorter rows share one scale, which would otherwise be a good part of the bytes."""


class Sign(LossyHook):
    """Send signs.

    Args:
        start: see `LossyHook`.
        feedback: see `LossyHook`.
    """

    name = "sign"
    description = "one bit a value and a scale a row, with error feedback: sign[:start=steps]"

    def __init__(self, start: int = 0, feedback: bool = True) -> None:
        super().__init__(feedback, start)

    def exchange(self, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """See the phases above."""
        # Phases 1 and 2, a run of parameters after the other, each of which travels while the next one is packed.
        runs = [(total[place], run) for place, run in bucket.cut(_RUN)]
        pending = [wire.start_all_gather(_packed(_parts(mine, run))) for mine, run in runs]
        # Phase 3.
        for (mine, run), receive in zip(runs, pending, strict=True):
            _average(_parts(mine, run), run, receive(), wire)


def _parts(flat: Tensor, run: Bucket) -> list[Tensor]:
    """Each parameter's values, by the rows that have a scale."""
    return [part.view(_rows(m), -1) for part, m in zip(flat.split(run.numels), run.members, strict=True)]


def _packed(parts: list[Tensor]) -> Tensor:
    """All scales, then all signs. Parameter by parameter, so that what is made in between stays in the cache."""
    scales, signs = [], []
    for part in parts:
        scales.append(part.abs().mean(1, dtype=wide(part.dtype)).bfloat16())
        signs.append(pack(part >= 0))
    return torch.cat([torch.cat(scales).view(torch.uint8), *signs])


def _average(parts: list[Tensor], run: Bucket, everyones: Tensor, wire: Wire) -> None:
    """The mean of what all ranks have sent, into the run's gradients; takes what this rank has sent from `parts`."""
    rows = [part.size(0) for part in parts]
    scales = aligned(everyones[:, : 2 * sum(rows)], torch.bfloat16).to(run.gradients.dtype)
    signs = everyones[:, 2 * sum(rows) :].split([-(-part.numel() // 8) for part in parts], dim=1)
    by_member = zip(parts, run.gradients.split(run.numels), scales.split(rows, dim=1), signs, strict=True)
    for part, average, of_rows, bits in by_member:
        average = average.view_as(part)
        for rank in range(wire.size):
            theirs = unpack(bits[rank], part.numel(), part.dtype).view_as(part)
            scale = of_rows[rank].unsqueeze(1)
            if rank == wire.rank:
                part.addcmul_(theirs, scale, value=-1)
            if rank == 0:
                torch.mul(theirs, scale / wire.size, out=average)
            else:
                average.addcmul_(theirs, scale, value=1 / wire.size)


def _rows(member: Member) -> int:
    """Number of parts of a parameter that have a scale of their own."""
    if member.is_short_vector:
        return max(1, member.numel)
    rows, columns = member.matrix_shape
    return rows if len(member.shape) > 1 and columns >= _SHORT_ROW else 1


def pack(bits: Tensor) -> Tensor:
    """Booleans as bytes [ceil(n / 8)], the first one in the lowest bit; what is left over is False."""
    padded = torch.nn.functional.pad(bits.flatten().view(torch.uint8), (0, -bits.numel() % 8))
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
