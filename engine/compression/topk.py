"""`topk[:density]`: the largest values of each parameter and their indices (Lin et al. 2018, arXiv:1712.01887).

Phases: 1. find the k = density x n values of largest magnitude of each parameter, or of each of its chunks (local);
2. all-gather of 8 bytes per value, values and indices in one message; 3. add up the received values (local). Bytes grow
with the number of ranks, W-1 times 8 k: beyond W = 1/density ranks a plain all-reduce sends less.

With `chunk`, an index counts from the start of its chunk, in as few bits as that needs. With `bits`, a value is a sign
and a magnitude between two scales in bfloat16 that its chunk has, or its parameter. Both, a `decay`, and no outer
momentum are SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706) under `local_sgd`. What differs: the two scales are means
of the smallest and of the largest values that the chunk sends, and short vectors are sent completely, see below.

Biases and gains of norms are sent completely, without indices, in the same message: sending them late cost a small GPT
8 % of its loss (benchmarks/convergence.py at density 0.01), and they are only some thousandths of a model.
"""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..flags import check_count, check_number
from .counting_group import Bucket, CountingGroup, accumulation_dtype, aligned
from .feedback import ErrorFeedbackHook
from .packing import pack, packed_bytes, unpack

__all__ = ["TopK", "largest"]

_RUN = 2**20
"""Smallest number of values whose largest are sent in one message."""
_LEAST = 64
"""Smallest number of values to send of each parameter that is not cut into chunks, if it has that many."""
# Few beside the pass over all values, of which there are at least four times as many.
_SAMPLE = 2**13


class TopK(ErrorFeedbackHook):
    """Sends only the largest gradients.

    Args:
        density: share of each parameter that is sent, greater than 0 and at most 1.
        chunk: number of values of a parameter among which the largest are searched; 0 for all of them.
        bits: number of bits of each value; 0 for all bits of its dtype.
        decay: see `ErrorFeedbackHook`.
        start: see `ErrorFeedbackHook`.
        feedback: see `ErrorFeedbackHook`.
    """

    name = "topk"
    description = (
        "the largest values (of chunks, in few bits) and their places, with error feedback:"
        " topk[:density][,chunk=values][,bits=bits][,decay=factor][,start=steps]; density 0.01"
    )
    takes_dtype: ClassVar[bool] = True

    def __init__(
        self,
        density: float = 0.01,
        chunk: int = 0,
        bits: int = 0,
        decay: float = 1.0,
        start: int = 0,
        feedback: bool = True,
    ) -> None:
        super().__init__(feedback, start, decay)
        self.density = check_number("topk:density", density, above=0, most=1)
        self.chunk = check_count("topk:chunk", chunk, least=0, most=2**31)
        self.bits = check_count("topk:bits", bits, least=0, most=8)

    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """See the phases above."""
        # Phases 1 and 2, one run of parameters after the other; each is sent while the next one is searched.
        pending = []
        for position, run in bucket.cut(_RUN):
            message = _Message(self, run, self.send_dtype or total.dtype)
            pending.append(
                (total[position], run.gradients, message, wire.start_all_gather(message.of(total[position])))
            )
        # Phase 3. In the order of the ranks, so that all ranks get bitwise equal sums.
        for run_total, average, message, receive in pending:
            average.zero_()
            for rank, payload in enumerate(receive()):
                places, values = message.read(payload, total.dtype)
                average.index_add_(0, places, values, alpha=1 / wire.size)
                if rank == wire.rank:
                    run_total.index_add_(0, places, values, alpha=-1)


class _Chunks(NamedTuple):
    """Chunks of one parameter that have the same length."""

    start: int
    """Place of the first one in the run."""
    rows: int
    length: int
    num_sent: int
    """Number of values that are sent of each."""


class _Message:
    """The message for a run of parameters: its parts follow from their shapes, so that all ranks agree on them."""

    def __init__(self, hook: TopK, run: Bucket, dtype: torch.dtype) -> None:
        self._bits, self._dtype = hook.bits, dtype
        # 32 bits are not packed, so whole parameters are sent as fast as before there were chunks.
        self._index_bits = max(1, (hook.chunk - 1).bit_length()) if hook.chunk else 32
        device = run.gradients.device
        none = torch.empty(0, dtype=torch.int64, device=device)
        self._chunks: list[_Chunks] = []
        whole, starts, chunk_of, offset, num_chunks = [none], [none], [none], 0, 0
        for member in run.members:
            if member.is_short_vector:
                whole.append(torch.arange(offset, offset + member.numel, device=device))
            else:
                for chunks in _cut(hook, offset, member.numel):
                    numbers = torch.arange(chunks.rows, device=device)
                    self._chunks.append(chunks)
                    starts.append(chunks.start + chunks.length * numbers)
                    chunk_of.append((num_chunks + numbers).repeat_interleave(chunks.num_sent))
                    num_chunks += chunks.rows
            offset += member.numel
        self._whole = torch.cat(whole)
        """Places of the values that all ranks send."""
        self._chunk_of = torch.cat(chunk_of)
        """The chunk of each value that is chosen."""
        self._starts = torch.cat(starts)[self._chunk_of]
        """The place from which the index of each of them counts."""
        num_chosen = self._chunk_of.numel()
        of_values = packed_bytes(num_chosen, self._bits) if self._bits else num_chosen * dtype.itemsize
        self._sizes = [
            4 * num_chunks if self._bits else 0,
            of_values,
            packed_bytes(num_chosen, self._index_bits),
            self._whole.numel() * dtype.itemsize,
        ]

    def of(self, total: Tensor) -> Tensor:
        """Returns the payload of this rank: scales, values, indices, values without an index."""
        none = torch.empty(0, dtype=torch.int64, device=total.device)
        indices, scales = [none], [total.new_empty(0, 2, dtype=torch.bfloat16)]
        for chunks in self._chunks:
            part = total[chunks.start : chunks.start + chunks.rows * chunks.length].view(chunks.rows, chunks.length)
            chosen = _largest_of_each(part, chunks.num_sent)
            indices.append(chosen.view(-1))
            if self._bits:
                scales.append(_scales(part.gather(1, chosen), 2 ** (self._bits - 1)).bfloat16())
        index = torch.cat(indices)
        values = total[self._starts + index]
        if self._bits:
            parts = [
                torch.cat(scales).view(-1).view(torch.uint8),
                pack(self._codes(values, torch.cat(scales)), self._bits),
            ]
        else:
            parts = [values.to(self._dtype).view(torch.uint8)]
        parts += [pack(index, self._index_bits), total[self._whole].to(self._dtype).view(torch.uint8)]
        return torch.cat(parts)

    def read(self, payload: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns the places in the run and the values of the payload of any rank."""
        scales, values, indices, whole = payload.split(self._sizes)
        num_chosen = self._chunk_of.numel()
        if self._bits:
            codes = unpack(values, num_chosen, self._bits)
            chosen = self._values(codes, aligned(scales[None], torch.bfloat16).view(-1, 2), dtype)
        else:
            chosen = aligned(values[None], self._dtype)[0].to(dtype)
        places = self._starts + unpack(indices, num_chosen, self._index_bits)
        exact = aligned(whole[None], self._dtype)[0].to(dtype)
        return torch.cat([self._whole, places]), torch.cat([exact, chosen])

    # A code has the sign in its highest bit, and below it the number of one of the levels from the low to the high
    # scale.

    def _codes(self, values: Tensor, scales: Tensor) -> Tensor:
        most = 2 ** (self._bits - 1) - 1
        low, high = scales.to(accumulation_dtype(values.dtype))[self._chunk_of].unbind(1)
        # Where all values of a chunk have one magnitude, any level is the right one.
        level = (values.abs() - low) * (most / (high - low).clamp_min(torch.finfo(low.dtype).tiny))
        return (values < 0).to(torch.uint8) * (most + 1) + level.round_().clamp_(0, most).nan_to_num_(0).to(torch.uint8)

    def _values(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        most = 2 ** (self._bits - 1) - 1
        low, high = scales.to(accumulation_dtype(dtype))[self._chunk_of].unbind(1)
        magnitudes = low + (high - low) * ((codes & most) / max(1, most))
        return torch.where(codes > most, -magnitudes, magnitudes).to(dtype)


def _cut(hook: TopK, start: int, numel: int) -> Iterator[_Chunks]:
    """Yields the whole chunks of a parameter together, and a shorter one at its end."""
    length = hook.chunk or max(1, numel)
    least = 1 if hook.chunk else _LEAST
    for rows, columns in ((numel // length, length), (1, numel % length)):
        if rows and columns:
            yield _Chunks(start, rows, columns, min(columns, max(least, round(columns * hook.density))))
        start += rows * columns


def _largest_of_each(part: Tensor, k: int) -> Tensor:
    """Returns the indices of the `k` largest values of each row of `part` [rows, n]."""
    return largest(part[0], k)[None] if part.size(0) == 1 else part.abs().topk(k, dim=1, sorted=False).indices


def _scales(values: Tensor, num_levels: int) -> Tensor:
    """Returns the lowest and the highest magnitude [rows, 2] that stand for those of `values` [rows, k]."""
    magnitudes = values.abs().to(accumulation_dtype(values.dtype)).sort(dim=1).values
    share = max(1, values.size(1) // num_levels)
    return torch.stack([magnitudes[:, :share].mean(1), magnitudes[:, -share:].mean(1)], dim=1)


def largest(flat: Tensor, k: int) -> Tensor:
    """Returns the indices of the `k` values of largest magnitude in `flat` [n], unordered; NaN counts as largest."""
    magnitudes = flat.abs()
    n = flat.numel()
    if flat.device.type == "cpu" and n > 4 * _SAMPLE and k < n // 8:
        # A sample gives an approximate threshold, so that a CPU need not sort all values.
        stride = n // _SAMPLE
        sample = magnitudes[::stride]
        expected = k / stride
        # Five standard deviations more than expected: fewer than k values exceed this once in millions of steps.
        rank = min(sample.numel(), round(expected + 5 * expected**0.5 + 5))
        threshold = sample.topk(rank, sorted=False).values.min()
        above = (~(magnitudes < threshold)).nonzero().view(-1)
        if k <= above.numel() < n // 2:
            return above[magnitudes[above].topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices
