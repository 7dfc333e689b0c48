"""`int8`: eight bits per value and a scale per block, with stochastic rounding so that the mean is unbiased.

A sum of bytes would overflow, so the all-reduce consists of these phases: 1. quantise (local); 2. all-to-all: each rank
gets all ranks' values of one part of each parameter, (1 + 4/block) n (W-1)/W bytes; 3. average that part and quantise
it (local); 4. all-gather of the parts, the same number of bytes; 5. dequantise (local). The rank that rounds in phase 3
keeps the rounding error. Parameters are padded to a multiple of W blocks. On a GPU each local phase is one kernel: 5,
1 + 2/W and 5 bytes moved a value.

Stochastic rounding: Alistarh et al. 2017, arXiv:1610.02132.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.nn import functional

from ..checkpoint.rng import derive_seed
from ..flags import check_count
from .counting_group import Bucket, CountingGroup, ParamSlice, accumulation_dtype
from .feedback import ErrorFeedbackHook

__all__ = ["Int8", "passes_of"]


# --- functions that `torch.compile` fuses to one kernel on a GPU, and that run operator by operator elsewhere
# They are compiled for any size when a run is set up, so that no rank compiles while others wait for it. Results are
# bitwise equal to those without a compiler: a product that is added is written as `addcmul`, which torch rounds once in
# both cases, and divisions are rounded as torch's.


_Result = TypeVar("_Result")

_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "assert_indirect_indexing": False,  # rows of a table, whose indices are computed beside it
}
_OLDEST_CAPABILITY = (7, 0)
"""The oldest GPUs that Triton has code for."""


class _Fused(Generic[_Result]):
    """A function of tensors, numbers and dtypes that is one kernel on a GPU.

    Args:
        function: writes to its arguments or returns new tensors; tensor arguments don't overlap.

    Attributes:
        is_wanted: whether any function is compiled; the GPU suite compares both ways.
    """

    is_wanted = True
    _why_not: str | None = None
    """Why functions can't be compiled here, once that is known."""

    def __init__(self, function: Callable[..., _Result]) -> None:
        self.function = function
        self._compiled: Callable[..., _Result] | None = None

    def __call__(self, *args: Any) -> _Result:
        """Calls the function with these arguments."""
        if self._compiled is None or not _Fused.is_wanted:
            return self.function(*args)
        with torch.no_grad():  # else it is compiled once more where a hook is called with gradients enabled
            # No views, for which the compiler has other code, by the size of what they are views of.
            return self._compiled(*(arg.data if isinstance(arg, Tensor) else arg for arg in args))

    @property
    def is_compiled(self) -> bool:
        """Whether a call is one kernel."""
        return self._compiled is not None and _Fused.is_wanted

    @staticmethod
    def is_possible(tensor: Tensor) -> bool:
        """Whether functions of `tensor` are compiled, as far as is known."""
        return (
            _Fused.is_wanted
            and _Fused._why_not is None
            and tensor.device.type == "cuda"
            and torch.cuda.get_device_capability(tensor.device) >= _OLDEST_CAPABILITY
            and importlib.util.find_spec("triton") is not None
        )

    def compile(self, *args: Any) -> None:
        """Compiles the function and calls it with these arguments; warns once if it can't be compiled."""
        if _Fused._why_not is not None:
            return
        if self._compiled is None:
            self._compiled = torch.compile(self.function, dynamic=True, fullgraph=True, options=_OPTIONS)
        try:
            self(*args)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler may raise
            self._compiled = None
            _Fused._why_not = f"{type(error).__name__}: {error}".splitlines()[0]
            rank_zero_warn(
                "compression: its kernels can't be compiled, so each takes several times as long"
                f" ({_Fused._why_not}). Install the Triton that belongs to this torch, and a C compiler."
            )


_RUN = 2**20
"""Smallest number of values in a message. Under gloo, several messages use both directions of a slow link at once, and
one message does not; on a fast link more messages bring no gain."""
_SMALL, _SMALL_ON_DEVICE = 2**14, 2**22
"""Parameters with fewer values are processed together. To copy 16 MB takes a GPU as long as to launch the kernels."""
_CHUNK = 2**22
"""Number of values processed at a time without a compiler; temporary tensors for a whole embedding would be larger
than the embedding."""
_NUM_LEVELS = 2**14
"""Number of different random numbers: their mean is exactly 1/2 for each value of a block; all fit in the cache."""
# Not -128, of which int8 has no positive counterpart.
_LARGEST = 127
_MOST_RANKS = 64
"""The kernel of the average has code for each rank."""
_EXAMPLE_BLOCKS = 2**14
"""Number of blocks of the example to compile for, 16 MB: the compiler chooses the number of threads by it."""


class _Noise(NamedTuple):
    """Random numbers to add before rounding down. They depend on the step, the rank, and the place in the parameter."""

    indices: Tensor
    """int32: the index of each block in its parameter."""
    seed: int


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

    def space(self, flat: Tensor) -> Tensor:
        """Returns a tensor as `rows` does, whose values don't matter."""
        n = self.num_ranks * sum(self.sizes)
        is_view = len(self.sizes) == 1 and self.places[0].stop - self.places[0].start == n
        return (flat[self.places[0]] if is_view else flat.new_empty(n)).view(self.num_ranks, -1)

    def put(self, rows: Tensor, flat: Tensor) -> None:
        """Writes a result of the method `rows` back to `flat`, unless it is a view of `flat`."""
        if rows.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr():
            return
        for position, values in zip(self.places, rows.split(self.sizes, dim=1), strict=True):
            flat[position] = values.reshape(-1)[: position.stop - position.start]

    def blocks(self, block: int, device: torch.device) -> Tensor:
        """Returns the index of each block in its parameter, so that its noise is the same however they are grouped."""
        indices = [torch.arange(size // block, dtype=torch.int32, device=device) for size in self.sizes]
        return torch.cat(indices) if len(indices) > 1 else indices[0]

    def num_bytes(self, block: int) -> int:
        """Returns the number of bytes that each rank gets."""
        return sum(self.sizes) // block * (block + 4)


class _Run(NamedTuple):
    """Pieces that are sent in one message."""

    position: slice
    """Its place in the bucket."""
    pieces: list[tuple[_Piece, Tensor]]
    """With the `_Noise.indices` of each."""


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
    works_in_place: ClassVar[bool] = True

    def __init__(self, block: int = 256, feedback: bool = False) -> None:
        super().__init__(feedback)
        self.block = check_count("int8:block", block)
        if block % 4:
            raise ValueError(f"int8:block must be a multiple of 4, but got {block}.")
        self._layouts: dict[int, tuple[tuple[ParamSlice, ...], list[_Run]]] = {}

    def prepare(self, like: Tensor, num_ranks: int) -> None:
        """Compiles the kernels."""
        passes_of(self.block).compile(like, num_ranks, keeps_rest=self.feedback)

    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """See the phases above; `total` may be the gradients themselves, and the rounding errors are lost then."""
        keeps_rest, dtype = total is not bucket.gradients, accumulation_dtype(total.dtype)
        passes, runs = passes_of(self.block), self._runs(bucket, wire.size)
        seed, owners_seed = self._seed(wire.rank), self._seed(wire.size)
        # Phases 1 and 2, one run of parameters after the other; each is sent while the next one is quantised.
        received = []
        for position, pieces in runs:
            payload, parts = self._payload(wire.size, pieces, total.device)
            for (piece, blocks), packed in zip(pieces, parts, strict=True):
                rows = piece.rows(total[position])
                passes.quantize(rows, _Noise(blocks, seed), packed, keeps_rest)
                if keeps_rest:
                    piece.put(rows, total[position])
            received.append(wire.start_all_to_all(payload))
        # Phases 3 and 4.
        gathered = []
        for position, pieces in runs:
            payload, parts = self._payload(1, pieces, total.device)
            by_piece = received.pop(0)().split([packed.size(1) for packed in parts], dim=1)
            for (piece, blocks), of_ranks, packed in zip(pieces, by_piece, parts, strict=True):
                rest = passes.requantize(of_ranks, _Noise(blocks, owners_seed), packed, dtype, keeps_rest)
                if rest is not None:  # the rounding error of the sum stays on this rank
                    rows = piece.rows(total[position])
                    rows[wire.rank].add_(rest[0], alpha=wire.size)
                    piece.put(rows, total[position])
            gathered.append(wire.start_all_gather(payload.view(-1)))
        # Phase 5.
        for position, pieces in runs:
            by_piece = gathered.pop(0)().split([piece.num_bytes(self.block) for piece, _ in pieces], dim=1)
            for (piece, _), packed in zip(pieces, by_piece, strict=True):
                rows = piece.space(bucket.gradients[position])
                passes.dequantize(packed, rows)
                piece.put(rows, bucket.gradients[position])

    def _runs(self, bucket: Bucket, num_ranks: int) -> list[_Run]:
        """Returns what is sent together: on a device the pieces one by one, each large enough for a message."""
        members, runs = self._layouts.get(bucket.index, ((), []))
        if members != bucket.members:
            device = bucket.gradients.device
            if device.type == "cpu":
                runs = [_Run(position, self._pieces(run, num_ranks, _SMALL)) for position, run in bucket.cut(_RUN)]
                runs = [run for run in runs if run.pieces]  # else a shard without values
            else:
                whole = slice(0, bucket.gradients.numel())
                runs = [_Run(whole, [piece]) for piece in self._pieces(bucket, num_ranks, _SMALL_ON_DEVICE)]
            self._layouts[bucket.index] = bucket.members, runs
        return runs

    def _pieces(self, run: Bucket, num_ranks: int, least_numel: int) -> list[tuple[_Piece, Tensor]]:
        """Returns large parameters one by one, and small ones together."""
        pieces, small = [], _Piece([], [], num_ranks)
        starts = itertools.accumulate(run.numels, initial=0)
        for numel, start in zip(run.numels, starts, strict=False):
            if numel == 0:
                continue
            piece = small if numel < least_numel else _Piece([], [], num_ranks)
            piece.places.append(slice(start, start + numel))
            piece.sizes.append(-(-numel // (num_ranks * self.block)) * self.block)
            if len(piece.sizes) == 1:
                pieces.append(piece)
        return [(piece, piece.blocks(self.block, run.gradients.device)) for piece in pieces]

    def _payload(
        self, num_rows: int, pieces: list[tuple[_Piece, Tensor]], device: torch.device
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Allocates a message; returns it and the parts for each piece."""
        num_bytes = [piece.num_bytes(self.block) for piece, _ in pieces]
        payload = torch.empty(num_rows, sum(num_bytes), dtype=torch.uint8, device=device)
        return payload, payload.split(num_bytes, dim=1)

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: CountingGroup) -> None:
        """Runs phases 1 and 2, and the average of phase 3."""
        passes, n = passes_of(self.block), shard.numel()
        padded = functional.pad(whole.view(wire.size, n), (0, -n % self.block))
        blocks = torch.arange(padded.size(1) // self.block, dtype=torch.int32, device=whole.device)
        payload = padded.new_empty(wire.size, blocks.numel() * (self.block + 4), dtype=torch.uint8)
        passes.quantize(padded, _Noise(blocks, self._seed(wire.rank)), payload, False)
        shard.copy_(passes.average(wire.all_to_all(payload), accumulation_dtype(shard.dtype))[:n])

    def _seed(self, stream: int) -> int:
        """The noise depends only on the step and the rank, so a resumed run draws the same."""
        return derive_seed(self.step, stream) % 2**31


class _Passes:
    """The local phases, for blocks of one size. Each is one kernel where `_Fused` compiles it.

    Without a compiler, a pass works on some blocks after the other, so that its temporary tensors stay small.
    """

    def __init__(self, block: int) -> None:
        self.block = block

        # `index` has the compiler take the size of a block as it is, else as an argument: a known size is read once.
        def mean(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
            """Returns the mean of the rows [n / block, block], added in the order of the ranks."""
            by_rank = numbers.unflatten(1, (-1, index(block))).unbind()
            shares = (scales.to(dtype) * (1 / len(by_rank))).unsqueeze(2).unbind()
            total = by_rank[0].to(dtype) * shares[0]
            for of_rank, share in zip(by_rank[1:], shares[1:], strict=True):
                total.addcmul_(of_rank.to(dtype), share)
            return total

        def quantize(
            values: Tensor, indices: Tensor, seed: int, table: Tensor, numbers: Tensor, keeps_rest: bool
        ) -> Tensor:
            """Writes the numbers, and the rounding errors to `values` if `keeps_rest`; returns the scales."""
            return quantize_blocks(values.unflatten(1, (-1, index(block))), indices, seed, table, numbers, keeps_rest)

        def quantize_blocks(
            blocks: Tensor, indices: Tensor, seed: int, table: Tensor, numbers: Tensor, keeps_rest: bool
        ) -> Tensor:
            singles = blocks.float()
            # Slightly more than the largest value, so that no sum with the noise is rounded up to 128.
            scales = singles.abs().amax(2, keepdim=True) * ((1 + 1e-5) / _LARGEST)
            # The clamp avoids a division by zero for a block of zeros.
            factors = scales.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
            noise = table.unfold(0, block, 1)[_starts(indices, seed)]  # a number for each value would take longer
            rounded = noise.addcmul(singles, factors).floor_()
            if keeps_rest:
                blocks.addcmul_(rounded, -scales)  # with a factor the compiler would round the product, too
            numbers.unflatten(1, (-1, block)).copy_(rounded)
            return scales.squeeze(2)

        def requantize(
            numbers: Tensor,
            scales: Tensor,
            indices: Tensor,
            seed: int,
            table: Tensor,
            out: Tensor,
            rest: Tensor | None,
            dtype: torch.dtype,
        ) -> Tensor:
            """Writes the numbers of the mean, and its rounding errors to `rest`; returns the scales."""
            average = mean(numbers, scales, dtype)
            out_scales = quantize_blocks(average.unsqueeze(0), indices, seed, table, out, rest is not None)
            if rest is not None:
                rest.unflatten(1, (-1, block)).copy_(average)
            return out_scales

        def dequantize(values: Tensor, numbers: Tensor, scales: Tensor) -> None:
            values.copy_(numbers)
            values.unflatten(1, (-1, index(block))).mul_(scales.unsqueeze(2))

        self._mean, self._quantize = _Fused(mean), _Fused(quantize)
        self._requantize, self._dequantize = _Fused(requantize), _Fused(dequantize)

    def compile(self, like: Tensor, num_ranks: int, *, keeps_rest: bool) -> None:
        """Compiles the passes for gradients with the dtype and device of `like`."""
        if not _Fused.is_possible(like):
            return
        dtype, table = accumulation_dtype(like.dtype), _table(like.device, self.block)
        # No two sizes are equal, and none is 1: the compiler would take that for a rule.
        num_blocks = _EXAMPLE_BLOCKS // num_ranks + 3
        n, num_bytes = num_blocks * self.block, num_blocks * (self.block + 4)
        indices = torch.arange(num_blocks, dtype=torch.int32, device=like.device)
        of_ranks = self._views(like.new_zeros(num_ranks, num_bytes + 4, dtype=torch.uint8)[:, :num_bytes])
        packed = self._views(like.new_zeros(1, num_bytes, dtype=torch.uint8))
        rest = like.new_zeros(1, n, dtype=dtype) if keeps_rest else None
        values = like.new_zeros(num_ranks, n)
        self._quantize.compile(values, indices, 2, table, of_ranks[0], keeps_rest)
        self._dequantize.compile(values, *of_ranks)
        if num_ranks <= _MOST_RANKS:
            self._requantize.compile(*of_ranks, indices, 2, table, packed[0], rest, dtype)
            self._mean.compile(*of_ranks, dtype)

    @property
    def is_compiled(self) -> bool:
        """Whether each pass is one kernel."""
        return self._quantize.is_compiled

    def quantize(self, values: Tensor, noise: _Noise, message: Tensor, keeps_rest: bool) -> None:
        """Quantises rows of values [rows, n] to rows of bytes: one byte per value, then a float32 scale per block.

        Args:
            values: n is a multiple of the block size.
            noise: for n / block blocks.
            message: the output, [rows, (1 + 4/block) n].
            keeps_rest: the rounding errors are left in `values`.
        """
        numbers, scales = self._views(message)
        table = _table(values.device, self.block)
        for some, places in self._parts(self._quantize, scales):
            scales[:, some] = self._quantize(
                values[:, places], noise.indices[some], noise.seed, table, numbers[:, places], keeps_rest
            )

    def requantize(
        self, received: Tensor, noise: _Noise, message: Tensor, dtype: torch.dtype, keeps_rest: bool
    ) -> Tensor | None:
        """Quantises the mean of the rows of bytes `received` to one row of bytes; returns its errors [1, n]."""
        (numbers, scales), (out, out_scales) = self._views(received), self._views(message)
        table = _table(received.device, self.block)
        rest = torch.empty(out.shape, dtype=dtype, device=out.device) if keeps_rest else None
        for some, places in self._parts(self._requantize, scales):
            part = None if rest is None else rest[:, places]
            out_scales[:, some] = self._requantize(
                numbers[:, places], scales[:, some], noise.indices[some], noise.seed, table, out[:, places], part, dtype
            )
        return rest

    def average(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the mean of the rows of bytes, [n]."""
        return self._mean(*self._views(received), dtype).view(-1)

    def dequantize(self, message: Tensor, values: Tensor) -> None:
        """Reverses `quantize` up to the rounding; writes to `values` [rows, n]."""
        self._dequantize(values, *self._views(message))

    def _views(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the numbers and the scales in a message."""
        n = message.size(1) // (self.block + 4) * self.block
        return message[:, :n].view(torch.int8), message[:, n:].view(torch.float32)

    def _parts(self, fused: _Fused[Tensor], scales: Tensor) -> list[tuple[slice, slice]]:
        """Returns the blocks of each call, and the places of their values."""
        num_rows, num_blocks = scales.shape
        at_a_time = num_blocks if fused.is_compiled else max(1, _CHUNK // (num_rows * self.block))
        starts = range(0, num_blocks, at_a_time) if at_a_time else ()
        ends = (min(start + at_a_time, num_blocks) for start in starts)
        return [
            (slice(start, end), slice(start * self.block, end * self.block))
            for start, end in zip(starts, ends, strict=True)
        ]


passes_of = functools.cache(_Passes)


def _starts(indices: Tensor, seed: int) -> Tensor:
    """Returns a random place in the table of noise for each block: successive ones would make errors similar."""
    mixed = (indices.long() * 0x9E3779B1 + seed) & 0xFFFFFFFF
    for _ in range(2):
        mixed = (((mixed >> 16) ^ mixed) * 0x45D9F3B) & 0xFFFFFFFF
    return ((mixed >> 16) ^ mixed) % _NUM_LEVELS


@functools.cache
def _table(device: torch.device, block: int) -> Tensor:
    """Returns noise in (0, 1): each of _NUM_LEVELS numbers once, in random order, and again for a block from each."""
    levels = (torch.randperm(_NUM_LEVELS, generator=torch.Generator().manual_seed(0)) + 0.5) / _NUM_LEVELS
    repeated = levels.repeat(2 + block // _NUM_LEVELS)[: _NUM_LEVELS + block - 1]
    return repeated.to(device)  # waits, so that any stream can read it
