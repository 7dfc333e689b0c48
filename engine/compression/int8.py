"""`int8`: eight bits per value and a scale per block, with stochastic rounding so that the mean is unbiased.

A sum of bytes would overflow, so the all-reduce consists of these phases: 1. quantise (local); 2. all-to-all: each rank
gets all ranks' values of one part of each parameter, (1 + 4/block) n (W-1)/W bytes; 3. average that part and quantise
it (local); 4. all-gather of the parts, the same number of bytes; 5. dequantise (local). The rank that rounds in phase 3
keeps the rounding error. Parameters are padded to a multiple of W blocks.

Stochastic rounding: Alistarh et al. 2017, arXiv:1610.02132.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..flags import check_count
from ..seeds import derive_seed
from .bucket import Bucket, accumulation_dtype
from .counting_group import CountingGroup, aligned
from .feedback import ErrorFeedbackHook

__all__ = ["Int8", "Noise", "quantize"]

_RUN = 2**20
"""Smallest number of values in a message. Under gloo, several messages use both directions of a slow link at once, and
one message does not; on a fast link more messages bring no gain."""
_SMALL = 2**14
"""Parameters with fewer values are processed together."""
_CHUNK = 2**22
"""Number of values processed at a time; temporary tensors for a whole embedding would be larger than the embedding."""
_NUM_ROWS = 2**14
_LARGEST = 127


class _Piece(NamedTuple):
    """Parameters that are quantised together. Every rank averages the same number of values of each parameter."""

    places: list[slice]
    """The slice of each parameter in its run."""
    sizes: list[int]
    """Number of values of each parameter that a rank averages, padded to whole blocks."""
    num_ranks: int

    def rows(self, flat: Tensor) -> Tensor:
        """Returns the values for each rank [W, n]: a view for one parameter without padding, else a copy."""
        rows = []
        for position, size in zip(self.places, self.sizes, strict=True):
            missing = self.num_ranks * size - (position.stop - position.start)
            values = functional.pad(flat[position], (0, missing)) if missing else flat[position]
            rows.append(values.view(self.num_ranks, size))
        return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]

    def put(self, rows: Tensor, flat: Tensor) -> None:
        """Writes a result of the method `rows` back to `flat`, unless it is a view of `flat`."""
        if rows.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
            return
        for position, values in zip(self.places, rows.split(self.sizes, dim=1), strict=True):
            flat[position] = values.reshape(-1)[: position.stop - position.start]

    def noise(self, noise: "Noise") -> "Noise":
        """Returns the noise of each block; a parameter's noise does not depend on how parameters are grouped."""
        starts = [noise.starts[: size // noise.rows.size(1)] for size in self.sizes]
        return Noise(noise.rows, torch.cat(starts) if len(starts) > 1 else starts[0])


class Noise(NamedTuple):
    """Random numbers to add before rounding down."""

    rows: Tensor
    """Uniform in [0, 1), [_NUM_ROWS, block]; each row is the previous one shifted by one number."""
    starts: Tensor
    """The index of the row that each block uses."""


class Int8(ErrorFeedbackHook):
    """Sends eight bits per value.

    Args:
        block: number of values that share a scale, a multiple of 4.
        feedback: see `ErrorFeedbackHook`. Off by default: the rounding is unbiased, so the errors average out, and with
            feedback some runs at the edge of stability diverged.
    """

    name = "int8"
    description = "8 bits a value and a scale a block, stochastic rounding: int8[:block][,feedback=true]; block 256"

    reduces_shards = True

    def __init__(self, block: int = 256, feedback: bool = False) -> None:
        super().__init__(feedback)
        self.block = check_count("int8:block", block)
        if block % 4:
            raise ValueError(f"int8:block must be a multiple of 4, but got {block}.")

    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """See the phases above."""
        runs = [(total[position], run, self._pieces(run, wire.size)) for position, run in bucket.cut(_RUN)]
        num_blocks = total.numel() // self.block + 1  # the most that one parameter can have
        noise, owners_noise = (self._noise(total.device, stream, num_blocks) for stream in (wire.rank, wire.size))
        # Phases 1 and 2, one run of parameters after the other; each is sent while the next one is quantised.
        received = []
        for values, _, pieces in runs:
            payload, parts = self._payload(wire.size, pieces, total.device)
            for piece, packed in zip(pieces, parts, strict=True):
                rows = piece.rows(values)
                quantize(rows, piece.noise(noise), packed)
                piece.put(rows, values)
            received.append(wire.start_all_to_all(payload))
        # Phases 3 and 4.
        gathered = []
        for (values, _, pieces), receive in zip(runs, received, strict=True):
            payload, parts = self._payload(1, pieces, total.device)
            by_piece = receive().split([packed.size(1) for packed in parts], dim=1)
            for piece, of_ranks, packed in zip(pieces, by_piece, parts, strict=True):
                average = _mean(of_ranks, self.block, accumulation_dtype(total.dtype))
                quantize(average, piece.noise(owners_noise), packed)
                rows = piece.rows(values)
                rows[wire.rank].add_(average[0], alpha=wire.size)  # the rounding error of the sum stays on this rank
                piece.put(rows, values)
            gathered.append(wire.start_all_gather(payload.view(-1)))
        # Phase 5.
        for (_, run, pieces), gather in zip(runs, gathered, strict=True):
            of_ranks = gather()
            for piece, packed in zip(pieces, of_ranks.split(self._num_bytes(pieces), dim=1), strict=True):
                rows = piece.rows(run.gradients)
                _dequantize(packed, self.block, rows)
                piece.put(rows, run.gradients)

    def _pieces(self, run: Bucket, num_ranks: int) -> list[_Piece]:
        """Returns large parameters one by one, so that temporaries stay in the cache, and small ones together."""
        pieces, small = [], _Piece([], [], num_ranks)
        starts = itertools.accumulate(run.numels, initial=0)
        for numel, start in zip(run.numels, starts, strict=False):
            piece = small if numel < _SMALL else _Piece([], [], num_ranks)
            piece.places.append(slice(start, start + numel))
            piece.sizes.append(-(-numel // (num_ranks * self.block)) * self.block)
            if len(piece.sizes) == 1:
                pieces.append(piece)
        return pieces

    def _num_bytes(self, pieces: list[_Piece]) -> list[int]:
        """Returns the number of bytes that each rank gets of each piece."""
        return [sum(piece.sizes) // self.block * (self.block + 4) for piece in pieces]

    def _payload(self, num_rows: int, pieces: list[_Piece], device: torch.device) -> tuple[Tensor, Sequence[Tensor]]:
        """Allocates a message; returns it and the parts for each piece."""
        num_bytes = self._num_bytes(pieces)
        payload = torch.empty(num_rows, sum(num_bytes), dtype=torch.uint8, device=device)
        return payload, payload.split(num_bytes, dim=1)

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: CountingGroup) -> None:
        """Runs phases 1 and 2, and the average of phase 3."""
        n = shard.numel()
        padded = functional.pad(whole.view(wire.size, n), (0, -n % self.block))
        num_blocks = padded.size(1) // self.block
        payload = padded.new_empty(wire.size, num_blocks * (self.block + 4), dtype=torch.uint8)
        noise = self._noise(whole.device, wire.rank, num_blocks)
        quantize(padded, noise, payload)
        shard.copy_(_mean(wire.all_to_all(payload), self.block, accumulation_dtype(shard.dtype))[0, :n])

    def _noise(self, device: torch.device, stream: int, num_blocks: int) -> Noise:
        """Returns the noise for at most `num_blocks` blocks of a parameter.

        It depends only on the step and the rank, so a resumed run draws the same. One random number for each value
        would take longer than everything else here, so blocks use parts of one long row. They start at random
        positions, because successive positions made the errors of neighbouring blocks similar.
        """
        generator = torch.Generator(device).manual_seed(derive_seed(self.step, stream))
        noise = torch.rand(_NUM_ROWS + self.block - 1, device=device, generator=generator)
        starts = torch.randint(_NUM_ROWS, (num_blocks,), device=device, generator=generator)
        return Noise(noise.unfold(0, self.block, 1), starts)


def quantize(values: Tensor, noise: Noise, packed: Tensor) -> None:
    """Quantises rows of values [rows, n] to rows of bytes: one byte per value, then a float32 scale per block.

    Args:
        values: n is a multiple of the block size; the rounding errors are left in this tensor.
        noise: noise of n / block blocks.
        packed: the output, [rows, n + 4 n / block].
    """
    n, block = values.size(1), noise.rows.size(1)
    blocks, numbers = values.unflatten(1, (-1, block)), packed[:, :n].view(torch.int8).unflatten(1, (-1, block))
    scales = packed[:, n:].unflatten(1, (-1, 4))
    at_a_time = max(1, _CHUNK // (values.size(0) * block))
    for start in range(0, n // block, at_a_time):
        some = slice(start, start + at_a_time)
        _quantize_blocks(blocks[:, some], noise.rows[noise.starts[some]], numbers[:, some], scales[:, some])


def _quantize_blocks(blocks: Tensor, noise: Tensor, numbers: Tensor, packed_scales: Tensor) -> None:
    """Quantises blocks [rows, n, block] to `numbers` of the same shape and `packed_scales` [rows, n, 4] bytes."""
    singles = blocks.float()
    # Slightly more than the largest value, so that no sum with the noise is rounded up to 128.
    scales = singles.abs().amax(2, keepdim=True) * ((1 + 1e-5) / _LARGEST)
    # The clamp avoids a division by zero for a block of zeros.
    factors = scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal_()
    rounded = torch.addcmul(noise, singles, factors).floor_()
    blocks.addcmul_(rounded, scales, value=-1)
    numbers.copy_(rounded)
    packed_scales.copy_(scales.view(torch.uint8))


def _dequantize(packed: Tensor, block: int, values: Tensor) -> None:
    """Reverses `quantize` up to the rounding; writes to `values` [rows, n]."""
    rows, n = values.shape
    values.copy_(packed[:, :n].view(torch.int8))
    values.view(rows, -1, block).mul_(aligned(packed[:, n:], torch.float32).unsqueeze(2))


def _mean(packed: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Returns the mean of the quantised rows [1, n], added in the order of the ranks."""
    n = packed.size(1) // (block + 4) * block
    scales = aligned(packed[:, n:], torch.float32).to(dtype).div_(packed.size(0))
    numbers = packed[:, :n].view(torch.int8)
    mean = numbers[0].to(dtype).view(-1, block).mul_(scales[0].unsqueeze(1))
    for row, of_row in zip(numbers[1:], scales[1:], strict=True):
        mean.addcmul_(row.to(dtype).view(-1, block), of_row.unsqueeze(1))
    return mean.view(1, n)
