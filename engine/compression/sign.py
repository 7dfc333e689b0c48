"""`sign`: one bit per value, one scale per row of each matrix (EF-signSGD, Karimireddy et al. 2019, arXiv:1901.09847).

Phases: 1. compute signs (eight per byte) and the mean magnitude of each row (local); 2. all-gather of n/8 bytes and 2
bytes per row, in one message; 3. average all ranks' signs times scales (local). Bytes grow with the number of ranks,
W-1 times n/8: half as much as a plain fp32 all-reduce at W = 32.

The paper has one scale per layer. If rows differ in magnitude, like rows of an embedding for rare and frequent tokens,
most rows would be sent many times too large, and the errors to correct would accumulate. For the same reason biases and
gains of norms are sent uncompressed, in bfloat16.
"""

import functools

import torch
from torch import Tensor

from .counting_group import Bucket, CountingGroup, ParamSlice, accumulation_dtype, aligned
from .feedback import ErrorFeedbackHook
from .packing import pack_booleans

__all__ = ["Sign"]

_RUN = 2**20
"""Smallest number of values in a message."""
_SHORT_ROW = 32
"""Shorter rows share one scale, since scales would otherwise be a large part of the bytes."""


class Sign(ErrorFeedbackHook):
    """Sends the signs of the gradients.

    Args:
        start: see `ErrorFeedbackHook`.
        feedback: see `ErrorFeedbackHook`.
    """

    name = "sign"
    description = "one bit a value and a scale a row, with error feedback: sign[:start=steps]"

    def __init__(self, start: int = 0, feedback: bool = True) -> None:
        super().__init__(feedback, start)

    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """See the phases above."""
        # Phases 1 and 2, one run of parameters after the other; each is sent while the next one is packed.
        runs = [(total[position], run) for position, run in bucket.cut(_RUN)]
        pending = [wire.start_all_gather(_packed(_parts(values, run))) for values, run in runs]
        # Phase 3.
        for (values, run), receive in zip(runs, pending, strict=True):
            _average(_parts(values, run), run, receive(), wire)


def _parts(flat: Tensor, run: Bucket) -> list[Tensor]:
    """Returns each parameter's values, as rows that have one scale each."""
    return [part.view(_rows(m), -1) for part, m in zip(flat.split(run.numels), run.members, strict=True)]


def _packed(parts: list[Tensor]) -> Tensor:
    """Packs all scales, then all signs; parameter by parameter, so that temporaries stay in the cache."""
    scales, signs = [], []
    for part in parts:
        scales.append(part.abs().mean(1, dtype=accumulation_dtype(part.dtype)).bfloat16())
        signs.append(pack_booleans(part >= 0))
    return torch.cat([torch.cat(scales).view(torch.uint8), *signs])


def _average(parts: list[Tensor], run: Bucket, gathered: Tensor, wire: CountingGroup) -> None:
    """Writes the mean of all ranks' messages to the run's gradients; subtracts this rank's message from `parts`."""
    rows = [part.size(0) for part in parts]
    scales = aligned(gathered[:, : 2 * sum(rows)], torch.bfloat16).to(run.gradients.dtype)
    signs = gathered[:, 2 * sum(rows) :].split([-(-part.numel() // 8) for part in parts], dim=1)
    by_member = zip(parts, run.gradients.split(run.numels), scales.split(rows, dim=1), signs, strict=True)
    for part, average, of_rows, bits in by_member:
        average = average.view_as(part)
        for rank in range(wire.size):
            signs_of_rank = _unpack(bits[rank], part.numel(), part.dtype).view_as(part)
            scale = of_rows[rank].unsqueeze(1)
            if rank == wire.rank:
                part.addcmul_(signs_of_rank, scale, value=-1)
            if rank == 0:
                torch.mul(signs_of_rank, scale / wire.size, out=average)
            else:
                average.addcmul_(signs_of_rank, scale, value=1 / wire.size)


def _rows(member: ParamSlice) -> int:
    """Returns the number of rows of a parameter that have their own scale."""
    if member.is_short_vector:
        return max(1, member.numel)
    rows, columns = member.matrix_shape
    return rows if len(member.shape) > 1 and columns >= _SHORT_ROW else 1


def _unpack(packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Reverses `pack_booleans`: returns `n` values, 1 for True and -1 for False."""
    return _table(packed.device, dtype).index_select(0, packed.int()).view(-1)[:n]


@functools.cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the eight signs of each byte value, [256, 8]."""
    byte = torch.arange(256, device=device).unsqueeze(1)
    return ((byte >> torch.arange(8, device=device)) & 1).to(dtype) * 2 - 1
