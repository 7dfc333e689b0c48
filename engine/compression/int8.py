"""`int8`: eight bits a value and a scale for each block, rounded at random so that the mean is right.

A sum of bytes would overflow, so the all-reduce is done by hand. Phases: 1. quantise (local); 2. all-to-all: each rank
gets everybody's values of one part of each parameter, (1 + 4/block) n (W-1)/W bytes; 3. average that part and quantise
it (local); 4. all-gather of the parts, as many bytes again; 5. dequantise (local). What phase 3 rounds off is kept by
the rank that did so. Parameters are filled up to a multiple of W blocks.

Stochastic rounding: Alistarh et al. 2017, arXiv:1610.02132.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..flags import check_count
from ..seeds import mixed
from .bucket import Bucket, wide
from .feedback import LossyHook
from .wire import Wire, aligned

__all__ = ["Int8", "Noise", "dequantize", "quantize"]

_RUN = 2**20
"""Least number of values that are sent together. Several messages fill a slow wire in both directions at once, as one
does not under gloo; on a fast one each costs as much as it saves."""
_SMALL = 2**14
"""Parameters with fewer values are worked on together."""
_CHUNK = 2**22
"""Values whose temporary tensors are in memory at a time: those of an embedding would be larger than it is."""
_NUM_ROWS = 2**14
_LARGEST = 127


class _Piece(NamedTuple):
    """Parameters that are quantised together. Of each, every rank averages as many, whatever bucket it is in."""

    places: list[slice]
    """The place of each parameter in its run."""
    sizes: list[int]
    """Numbers that each rank averages, filled up to whole blocks."""
    num_ranks: int

    def rows(self, flat: Tensor) -> Tensor:
        """The numbers for each rank [W, n]: of one parameter without gaps a view, else a copy."""
        rows = []
        for place, size in zip(self.places, self.sizes, strict=True):
            missing = self.num_ranks * size - (place.stop - place.start)
            part = functional.pad(flat[place], (0, missing)) if missing else flat[place]
            rows.append(part.view(self.num_ranks, size))
        return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]

    def put(self, rows: Tensor, flat: Tensor) -> None:
        """Writes them back, where they are a copy."""
        if rows.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
            return
        for place, part in zip(self.places, rows.split(self.sizes, dim=1), strict=True):
            flat[place] = part.reshape(-1)[: place.stop - place.start]

    def noise(self, noise: "Noise") -> "Noise":
        """For each block, of each parameter the first ones: the same whatever it is worked on together with."""
        starts = [noise.starts[: size // noise.rows.size(1)] for size in self.sizes]
        return Noise(noise.rows, torch.cat(starts) if len(starts) > 1 else starts[0])


class Noise(NamedTuple):
    """Random numbers that are added before rounding down."""

    rows: Tensor
    """Uniform in [0, 1), each row the one before it but for one number: [_NUM_ROWS, block]."""
    starts: Tensor
    """Which of them each block takes."""


class Int8(LossyHook):
    """Send eight bits a value.

    Args:
        block: number of values that share a scale, a multiple of 4.
        feedback: see `LossyHook`. Not by default: the rounding is without bias, so nothing is lost for good, and with
            it some runs at the edge of stability diverged.
    """

    name = "int8"
    description = "8 bits a value and a scale a block, stochastic rounding: int8[:block][,feedback=true]; block 256"

    reduces_shards = True

    def __init__(self, block: int = 256, feedback: bool = False) -> None:
        super().__init__(feedback)
        self.block = check_count("int8:block", block)
        if block % 4:
            raise ValueError(f"int8:block must be a multiple of 4, but got {block}.")

    def exchange(self, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """See the phases above."""
        runs = [(total[place], run, self._pieces(run, wire.size)) for place, run in bucket.cut(_RUN)]
        num_blocks = total.numel() // self.block + 1  # of a parameter, at most
        noise, owners_noise = (self._noise(total.device, stream, num_blocks) for stream in (wire.rank, wire.size))
        # Phases 1 and 2, a run of parameters after the other, each of which travels while the next one is quantised.
        received = []
        for mine, _, pieces in runs:
            payload, parts = self._payload(wire.size, pieces, total.device)
            for piece, packed in zip(pieces, parts, strict=True):
                rows = piece.rows(mine)
                quantize(rows, piece.noise(noise), packed)
                piece.put(rows, mine)
            received.append(wire.start_all_to_all(payload))
        # Phases 3 and 4.
        gathered = []
        for (mine, _, pieces), receive in zip(runs, received, strict=True):
            payload, parts = self._payload(1, pieces, total.device)
            theirs = receive().split([packed.size(1) for packed in parts], dim=1)
            for piece, everyones, packed in zip(pieces, theirs, parts, strict=True):
                average = _mean(everyones, self.block, wide(total.dtype))
                quantize(average, piece.noise(owners_noise), packed)
                rows = piece.rows(mine)
                rows[wire.rank].add_(average[0], alpha=wire.size)  # what is lost of the sum, this rank has not sent
                piece.put(rows, mine)
            gathered.append(wire.start_all_gather(payload.view(-1)))
        # Phase 5.
        for (_, run, pieces), gather in zip(runs, gathered, strict=True):
            everyones = gather()
            for piece, packed in zip(pieces, everyones.split(self._num_bytes(pieces), dim=1), strict=True):
                rows = piece.rows(run.gradients)
                dequantize(packed, self.block, rows)
                piece.put(rows, run.gradients)

    def _pieces(self, run: Bucket, num_ranks: int) -> list[_Piece]:
        """Parameters one by one, so that what is made of them stays in the cache, small ones together."""
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
        """Room for a message, and the parts of it."""
        num_bytes = self._num_bytes(pieces)
        payload = torch.empty(num_rows, sum(num_bytes), dtype=torch.uint8, device=device)
        return payload, payload.split(num_bytes, dim=1)

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: Wire) -> None:
        """Phases 1 and 2, and the average of 3."""
        n = shard.numel()
        padded = functional.pad(whole.view(wire.size, n), (0, -n % self.block))
        num_blocks = padded.size(1) // self.block
        payload = padded.new_empty(wire.size, num_blocks * (self.block + 4), dtype=torch.uint8)
        noise = self._noise(whole.device, wire.rank, num_blocks)
        quantize(padded, noise, payload)
        shard.copy_(_mean(wire.all_to_all(payload), self.block, wide(shard.dtype))[0, :n])

    def _noise(self, device: torch.device, stream: int, num_blocks: int) -> Noise:
        """For so many blocks of a parameter, at most.

        It depends on the step and the rank alone, so a resumed run draws the same. Drawing one for each number would
        take longer than all else here, so blocks take parts of one long row. From random places: where each began one
        number behind the one before it, the errors of neighbours were alike.
        """
        generator = torch.Generator(device).manual_seed(mixed(self.step, stream))
        noise = torch.rand(_NUM_ROWS + self.block - 1, device=device, generator=generator)
        starts = torch.randint(_NUM_ROWS, (num_blocks,), device=device, generator=generator)
        return Noise(noise.unfold(0, self.block, 1), starts)


def quantize(values: Tensor, noise: Noise, packed: Tensor) -> None:
    """Writes rows of numbers [rows, n] as rows of bytes: a number in each, then a float32 scale for each block.

    Args:
        values: n is a multiple of the block; what the bytes don't say of them is left there.
        noise: of n / block blocks.
        packed: where to write, [rows, n + 4 n / block].
    """
    n, block = values.size(1), noise.rows.size(1)
    blocks, numbers = values.unflatten(1, (-1, block)), packed[:, :n].view(torch.int8).unflatten(1, (-1, block))
    scales = packed[:, n:].unflatten(1, (-1, 4))
    at_a_time = max(1, _CHUNK // (values.size(0) * block))
    for start in range(0, n // block, at_a_time):
        some = slice(start, start + at_a_time)
        _quantize_blocks(blocks[:, some], noise.rows[noise.starts[some]], numbers[:, some], scales[:, some])


def _quantize_blocks(blocks: Tensor, noise: Tensor, numbers: Tensor, packed_scales: Tensor) -> None:
    """The same with blocks [rows, n, block]; `numbers` are as many, `packed_scales` [rows, n, 4] bytes."""
    singles = blocks.float()
    # A little more than the greatest, so that no sum with the noise is rounded up to 128.
    scales = singles.abs().amax(2, keepdim=True) * ((1 + 1e-5) / _LARGEST)
    # Of a block of zeros, nothing is divided by zero.
    factors = scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal_()
    rounded = torch.addcmul(noise, singles, factors).floor_()
    blocks.addcmul_(rounded, scales, value=-1)
    numbers.copy_(rounded)
    packed_scales.copy_(scales.view(torch.uint8))


def dequantize(packed: Tensor, block: int, values: Tensor) -> None:
    """The inverse, up to the rounding, into `values` [rows, n]."""
    rows, n = values.shape
    values.copy_(packed[:, :n].view(torch.int8))
    values.view(rows, -1, block).mul_(aligned(packed[:, n:], torch.float32).unsqueeze(2))


def _mean(packed: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Returns the mean of the rows of bytes, added in their order: [1, n]."""
    n = packed.size(1) // (block + 4) * block
    scales = aligned(packed[:, n:], torch.float32).to(dtype).div_(packed.size(0))
    numbers = packed[:, :n].view(torch.int8)
    mean = numbers[0].to(dtype).view(-1, block).mul_(scales[0].unsqueeze(1))
    for row, of_row in zip(numbers[1:], scales[1:], strict=True):
        mean.addcmul_(row.to(dtype).view(-1, block), of_row.unsqueeze(1))
    return mean.view(1, n)
