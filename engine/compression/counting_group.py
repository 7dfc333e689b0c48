"""A process group that counts the bytes it sends; compression methods communicate through it.

It counts the bytes that this rank sends with the usual algorithms (W ranks): a ring all-reduce of n bytes sends
2 n (W-1)/W, an all-gather of n bytes from each rank n (W-1), an all-to-all or a ring reduce-scatter of n bytes
n (W-1)/W, a broadcast the same on average over the ranks. Gloo and NCCL (without trees and multicast) send exactly
that, except that gloo implements reduce-scatter as an all-reduce.
"""

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import module_of, wait_for

__all__ = [
    "Bucket",
    "CountingGroup",
    "Message",
    "ParamSlice",
    "SimulatedGroup",
    "TrafficKey",
    "accumulation_dtype",
    "aligned",
    "busy_s",
    "clock_s",
    "seconds_between",
    "timestamp",
]

_SHORT = 2**16
"""Vectors with more values are compressed like matrices, since they may be most of a model."""


class ParamSlice(NamedTuple):
    """A parameter, or this rank's shard of one."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows (the first dim) and columns (the product of all other dims)."""
        rows = self.shape[0] if self.shape else 1
        return rows, self.numel // max(rows, 1)

    @property
    def is_short_vector(self) -> bool:
        """Whether the parameter is a bias or the gains of a norm: few values, each of them important."""
        return len(self.shape) < 2 and self.numel <= _SHORT


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Gradients of several parameters as one flat tensor."""

    index: int
    gradients: Tensor
    """[numel], the members one after the other; replaced by the average over the ranks."""
    members: tuple[ParamSlice, ...]

    def cut(self, least_numel: int) -> "Iterator[tuple[slice, Bucket]]":
        """Splits the bucket into runs of members with at least `least_numel` values each; the last may have fewer.

        Yields each run with its position in the bucket.
        """
        start = numel = 0
        run: list[ParamSlice] = []
        for position, member in enumerate(self.members, start=1):
            run.append(member)
            numel += member.numel
            if numel >= least_numel or position == len(self.members):
                span = slice(start, start + numel)
                yield span, Bucket(self.index, self.gradients[span], tuple(run))
                start, numel, run = start + numel, 0, []

    @property
    def numels(self) -> list[int]:
        """The number of values of each member."""
        return [member.numel for member in self.members]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype for sums of tensors of `dtype`: at least fp32, since a sum may exceed the range of 16 bit."""
    return torch.promote_types(dtype, torch.float32)


class TrafficKey(NamedTuple):
    """The key of a byte count: the collective and the bucket."""

    collective: str
    bucket: int
    """Index of the bucket of gradients, or of the module's unit under sharded strategies."""


class CountingGroup:
    """The collectives of a process group, with a count of the bytes that they send.

    Args:
        group: None for all ranks.

    Attributes:
        size: number of ranks.
        rank: this rank's index in the group.
        sent: number of bytes that this rank has sent, by `TrafficKey`.
        bucket: index of the bucket that is being sent.
        collective_times: start and end of each collective since the list was last cleared, in seconds or as CUDA
            events; None: times are not recorded.
        num_calls: number of collectives so far.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.sent: Counter[TrafficKey] = Counter()
        self.bucket = 0
        self.collective_times: list[tuple[Any, Any]] | None = None
        self.num_calls = 0
        self._num_skipped = 0

    def join(self, group: dist.ProcessGroup | None) -> None:
        """Sends to the ranks of another group from now on; None for all ranks, of which fewer may be left."""
        self.group, self.size, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def skip_next(self, num_calls: int) -> None:
        """Skips the next `num_calls` collectives, because this rank repeats a step and has already done them.

        Their results have the right shape, but no meaning.
        """
        self._num_skipped = num_calls

    def _speaks(self) -> bool:
        self.num_calls += 1
        self._num_skipped -= (was_muted := self._num_skipped > 0)
        return not was_muted

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sums a tensor over all ranks, in place."""
        if not self._speaks():
            return tensor
        started = self._start(tensor)
        dist.all_reduce(tensor, group=self.group)
        self._end(started, tensor)
        self._count("all_reduce", tensor, 2 * (self.size - 1) / self.size)
        return tensor

    def all_gather(self, payload: Tensor) -> Tensor:
        """Gathers the `payload` [n] of every rank; returns [W, n]."""
        return self.start_all_gather(payload)()

    def start_all_gather(self, payload: Tensor) -> Callable[[], Tensor]:
        """Starts an all-gather; the returned function waits for it. Several overlap if all ranks use the same order.

        Gloo sends a large message in one direction at a time, so several messages are faster than one.
        """
        # Allocated before the call is counted: if memory runs out, no call was made.
        gathered = payload.new_empty(self.size, payload.numel())
        if not self._speaks():
            gathered.copy_(payload.expand(self.size, -1))
            return lambda: gathered
        started = self._start(payload)
        work = dist.all_gather_single(gathered.view(-1), payload, group=self.group, async_op=True)
        self._count("all_gather", payload, self.size - 1)
        return lambda: self._finished(work, started, gathered)

    def all_gather_into(self, gathered: Tensor, payload: Tensor, async_op: bool = False) -> dist.Work | None:
        """Gathers the `payload` [n] of every rank into `gathered` [W n]."""
        if not self._speaks():
            gathered.view(self.size, -1).copy_(payload.expand(self.size, -1))
            return None
        started = self._start(payload)
        work = dist.all_gather_single(gathered, payload, group=self.group, async_op=async_op)
        self._end(started, payload)
        self._count("all_gather", payload, self.size - 1)
        return work

    def all_to_all(self, payload: Tensor) -> Tensor:
        """Sends row i of `payload` [W, n] to rank i; row i of the result comes from rank i."""
        return self.start_all_to_all(payload)()

    def start_all_to_all(self, payload: Tensor) -> Callable[[], Tensor]:
        """Starts an `all_to_all`; see `start_all_gather`."""
        received = torch.empty_like(payload)
        if not self._speaks():
            return lambda: received.copy_(payload)
        started = self._start(payload)
        work = dist.all_to_all_single(received, payload, group=self.group, async_op=True)
        self._count("all_to_all", payload, (self.size - 1) / self.size)
        return lambda: self._finished(work, started, received)

    def _finished(self, work: Any, started: Any, received: Tensor) -> Tensor:
        work.wait()
        self._end(started, received)
        return received

    def reduce_scatter_into(self, shard: Tensor, whole: Tensor, op: Any, async_op: bool = False) -> dist.Work | None:
        """Writes this rank's part [n] of the reduction of `whole` [W n] to `shard`."""
        if not self._speaks():
            shard.copy_(whole.view(self.size, -1)[self.rank])
            return None
        started = self._start(whole)
        work = dist.reduce_scatter_single(shard, whole, op=op, group=self.group, async_op=async_op)
        self._end(started, whole)
        self._count("reduce_scatter", whole, self.reduce_scatter_share)
        return work

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        """Starts to broadcast rank `source`'s `tensor`, in place; the returned function waits for it."""
        if not self._speaks():
            return lambda: tensor
        started = self._start(tensor)
        work = dist.broadcast(tensor, group_src=source, group=self.group, async_op=True)
        self._count("broadcast", tensor, (self.size - 1) / self.size)
        return lambda: self._finished(work, started, tensor)

    @property
    def reduce_scatter_share(self) -> float:
        """Number of bytes that a reduce-scatter sends for each input byte."""
        return (2 if self._is_gloo else 1) * (self.size - 1) / self.size

    def _count(self, collective: str, tensor: Tensor, factor: float) -> None:
        self.sent[TrafficKey(collective, self.bucket)] += round(tensor.numel() * tensor.element_size() * factor)

    def _start(self, tensor: Tensor) -> Any:
        return None if self.collective_times is None else timestamp(tensor.device)

    def _end(self, started: Any, tensor: Tensor) -> None:
        if self.collective_times is not None:
            self.collective_times.append((started, timestamp(tensor.device)))


def timestamp(device: torch.device) -> Any:
    """Returns the current time in seconds, or an event on the current stream of an accelerator."""
    module = module_of(device)
    if not hasattr(module, "Event"):
        return time.perf_counter()
    event = module.Event(enable_timing=True)
    event.record()
    return event


def clock_s(device: torch.device) -> float:
    """Waits for all launched work and returns the time in seconds."""
    wait_for(device)
    return time.perf_counter()


def seconds_between(start: Any, end: Any) -> float:
    """Returns the seconds between two timestamps; waits for the device if they are events."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def busy_s(spans: Iterable[tuple[Any, Any]]) -> float:
    """Returns the seconds covered by at least one of the spans; overlapping spans count once."""
    origin, total_s, until_s = None, 0.0, float("-inf")
    times_s = []
    for start, end in spans:
        origin = start if origin is None else origin
        times_s.append((seconds_between(origin, start), seconds_between(origin, end)))
    for start_s, end_s in sorted(times_s):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def aligned(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Views bytes of a message [rows, n] as `dtype`, on a copy because the columns may not be aligned."""
    numbers = part.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
    return numbers.view(part.size(0), part.size(1) // dtype.itemsize)


@dataclasses.dataclass
class Message:
    """A message that a `SimulatedGroup` was asked to send, with its times."""

    collective: str
    num_bytes: int
    begun_s: float
    needed_s: float
    """Time at which the result was waited for."""


class SimulatedGroup(CountingGroup):
    """Simulates a group of W ranks that all send the same; sends nothing, and records messages and times.

    Attributes:
        messages: the messages in order.
    """

    def __init__(self, size: int) -> None:
        self.group, self.size, self.rank, self._is_gloo = None, size, 0, False
        self.sent, self.bucket, self.collective_times = Counter(), 0, None
        self.num_calls = self._num_skipped = 0
        self.messages: list[Message] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Returns the sum as if all other ranks had zeros."""
        self._begin("all_reduce", tensor, 2 * (self.size - 1) / self.size)
        return tensor

    def start_all_gather(self, payload: Tensor) -> Callable[[], Tensor]:
        """Gathers as if all other ranks had the same payload."""
        message = self._begin("all_gather", payload, self.size - 1)
        return lambda: self._needed(message, payload.expand(self.size, -1).contiguous())

    def start_all_to_all(self, payload: Tensor) -> Callable[[], Tensor]:
        """Exchanges as if all other ranks had the same payload."""
        message = self._begin("all_to_all", payload, (self.size - 1) / self.size)
        return lambda: self._needed(message, payload.clone())

    def all_gather_into(self, gathered: Tensor, payload: Tensor, async_op: bool = False) -> None:
        """Gathers as if all other ranks had the same payload."""
        message = self._begin("all_gather", payload, self.size - 1)
        gathered.view(self.size, -1).copy_(payload.expand(self.size, -1))
        self._needed(message, gathered)

    def reduce_scatter_into(self, shard: Tensor, whole: Tensor, op: Any, async_op: bool = False) -> None:
        """Writes this rank's part as if all other ranks had zeros."""
        message = self._begin("reduce_scatter", whole, self.reduce_scatter_share)
        shard.copy_(whole.view(self.size, -1)[self.rank])
        self._needed(message, shard)

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        """Leaves the tensor as it is, as if this rank were the source."""
        message = self._begin("broadcast", tensor, (self.size - 1) / self.size)
        return lambda: self._needed(message, tensor)

    def _begin(self, collective: str, tensor: Tensor, factor: float) -> Message:
        self._count(collective, tensor, factor)
        now = clock_s(tensor.device)
        self.messages.append(Message(collective, tensor.nbytes, now, now))
        return self.messages[-1]

    def _needed(self, message: Message, received: Tensor) -> Tensor:
        message.needed_s = clock_s(received.device)
        return received
