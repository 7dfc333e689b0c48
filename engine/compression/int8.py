"""`int8`: eight bits a value and a scale for each block, rounded at random so that the mean is right.

A sum of bytes would overflow, so the all-reduce is done by hand. Phases: 1. quantise (local); 2. all-to-all: each rank
gets everybody's values of one part of each parameter, (1 + 4/block) n (W-1)/W bytes; 3. average that part and quantise
it (local); 4. all-gather of the parts, as many bytes again; 5. dequantise (local). What phase 3 rounds off is kept by
the rank that did so. Parameters are filled up to a multiple of W blocks.

Stochastic rounding: Alistarh et al. 2017, arXiv:1610.02132.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..flags import check_count
from ..seeds import mixed
from .bucket import Bucket
from .feedback import LossyHook
from .wire import Wire, aligned

__all__ = ["Int8", "dequantize", "quantize"]

_RUN = 2**21
"""Least number of values that are sent together."""
_SMALL = 2**14
"""Parameters with fewer values are worked on together."""
_LARGEST = 127


class _Piece(NamedTuple):
    """Parameters that are quantised together. Of each, every rank averages as many, whatever bucket it is in."""

    places: list[slice]
    """Of each in its run."""
    sizes: list[int]
    """Numbers that each rank averages, filled up to whole blocks."""
    num_ranks: int
    is_small: bool

    def rows(self, flat: Tensor) -> Tensor:
        """The numbers for each rank: [W, n]."""
        rows = []
        for place, size in zip(self.places, self.sizes, strict=True):
            missing = self.num_ranks * size - (place.stop - place.start)
            part = functional.pad(flat[place], (0, missing)) if missing else flat[place]
            rows.append(part.view(self.num_ranks, size))
        return torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]

    def noise(self, blocks: Tensor) -> Tensor:
        """Of `blocks`, as many for each parameter as it has: the same whatever it is worked on together with."""
        if len(self.sizes) == 1:
            return blocks
        return torch.cat([blocks[: size // blocks.size(1)] for size in self.sizes])

    def values(self, rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The inverse: each parameter's place and numbers."""
        for place, part in zip(self.places, rows.split(self.sizes, dim=1), strict=True):
            yield place, part.reshape(-1)[: place.stop - place.start]


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
        runs = [(total[place], run, self._pieces(run, wire.size)) for place, run in bucket.cut(_RUN)]
        num_blocks = total.numel() // self.block + 1  # of a parameter, at most
        noise, owners_noise = (self._noise(total.device, stream, num_blocks) for stream in (wire.rank, wire.size))
        # Phases 1 and 2, a run of parameters after the other, each of which travels while the next one is quantised.
        payloads = [[quantize(piece.rows(mine), piece.noise(noise)) for piece in pieces] for mine, _, pieces in runs]
        received = [wire.start_all_to_all(torch.cat(payload, dim=1)) for payload in payloads]
        # Phases 3 and 4.
        averages, gathered = [], []
        for (_, _, pieces), payload, receive in zip(runs, payloads, received, strict=True):
            theirs = receive().split([packed.size(1) for packed in payload], dim=1)
            averages.append([_mean(dequantize(packed, self.block, total.dtype)) for packed in theirs])
            parts = zip(pieces, averages[-1], strict=True)
            packed = torch.cat([quantize(mean[None], piece.noise(owners_noise)) for piece, mean in parts], dim=1)
            gathered.append(wire.start_all_gather(packed.view(-1)))
        # Phase 5.
        for (mine, run, pieces), payload, exact, gather in zip(runs, payloads, averages, gathered, strict=True):
            everyones = gather().split([packed.size(1) for packed in payload], dim=1)
            for piece, own, of_part, theirs in zip(pieces, payload, exact, everyones, strict=True):
                means = dequantize(theirs, self.block, total.dtype)
                sent = dequantize(own, self.block, total.dtype)
                # What phase 3 has lost of the sum, this rank has not sent.
                sent[wire.rank].sub_(of_part.sub_(means[wire.rank]), alpha=wire.size)
                for place, values in piece.values(means):
                    run.gradients[place].copy_(values)
                for place, values in piece.values(sent):
                    mine[place].sub_(values)

    def _pieces(self, run: Bucket, num_ranks: int) -> list["_Piece"]:
        """Parameters one by one, so that what is made of them stays in the cache, small ones together."""
        pieces: list[_Piece] = []
        start = 0
        for numel in run.numels:
            size = -(-numel // (num_ranks * self.block)) * self.block
            if not pieces or numel >= _SMALL or not pieces[-1].is_small:
                pieces.append(_Piece([], [], num_ranks, numel < _SMALL))
            pieces[-1].places.append(slice(start, start + numel))
            pieces[-1].sizes.append(size)
            start += numel
        return pieces

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: Wire) -> None:
        """Phases 1 and 2, and the average of 3."""
        n = shard.numel()
        padded = functional.pad(whole.view(wire.size, n), (0, -n % self.block))
        payload = quantize(padded, self._noise(whole.device, wire.rank, padded.size(1) // self.block))
        shard.copy_(_mean(dequantize(wire.all_to_all(payload), self.block, shard.dtype))[:n])

    def _noise(self, device: torch.device, stream: int, num_blocks: int) -> Tensor:
        """What to add before rounding down so many blocks.

        It depends on the step and the rank alone, so a resumed run draws the same. Drawing one for each number would
        take longer than all else here: a block takes its own from where the block before it does, but for one.
        """
        generator = torch.Generator(device).manual_seed(mixed(self.step, stream))
        noise = torch.rand(self.block + num_blocks, device=device, generator=generator)
        return noise.unfold(0, self.block, 1)


def _mean(rows: Tensor) -> Tensor:
    """Over the ranks, in their order; several times faster on a CPU than `mean(0)`."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total.div_(rows.size(0))


def quantize(values: Tensor, noise: Tensor) -> Tensor:
    """Rows of numbers [rows, n] as rows of bytes [rows, n + 4 n / block]: the numbers, then a float32 scale a block.

    Args:
        values: n is a multiple of the block.
        noise: [at least n / block, block], uniform in [0, 1).
    """
    rows, n = values.shape
    blocks = values.float().view(rows, -1, noise.size(1))
    # A little more than the greatest, so that no sum with the noise is rounded up to 128.
    scales = blocks.abs().amax(2, keepdim=True) * ((1 + 1e-5) / _LARGEST)
    # Of a block of zeros, nothing is divided by zero.
    factors = scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal_()
    total = torch.addcmul(noise[: blocks.size(1)], blocks, factors, out=torch.empty_like(blocks))
    numbers = total.floor_().to(torch.int8)
    return torch.cat([numbers.view(rows, n).view(torch.uint8), scales.view(rows, -1).view(torch.uint8)], dim=1)


def dequantize(packed: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """The inverse, up to the rounding: [rows, n]."""
    rows, num_bytes = packed.shape
    num_blocks = num_bytes // (block + 4)
    scales = aligned(packed[:, block * num_blocks :]).view(torch.float32)
    numbers = packed[:, : block * num_blocks].view(torch.int8).float().view(rows, num_blocks, block)
    return numbers.mul_(scales.unsqueeze(2)).view(rows, -1).to(dtype)
