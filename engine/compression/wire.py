"""A process group that counts: whatever a compression sends goes through one of these.

Bytes are those that this rank puts on the wire by the usual algorithms (W ranks): a ring all-reduce of n bytes sends
2 n (W-1)/W, an all-gather of n bytes from each rank n (W-1), an all-to-all or a ring reduce-scatter of n bytes
n (W-1)/W, a broadcast as much on the average of the ranks. Gloo and NCCL (without trees and multicast) send just that,
but for gloo's reduce-scatter, which is an all-reduce inside.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices import module_of, wait_for

__all__ = ["DryWire", "Message", "Sent", "Wire", "aligned", "busy_s", "clock_s", "mark", "seconds_between"]


class Sent(NamedTuple):
    """Key of a count of bytes: by which collective they were sent, and for which bucket."""

    collective: str
    bucket: int
    """Number of the bucket of gradients, or under sharded strategies of the unit of the module."""


class Wire:
    """A process group's collectives, with a count of what they send.

    Args:
        group: None for all ranks.

    Attributes:
        size: number of ranks.
        rank: this one's.
        sent: bytes this rank has sent.
        bucket: which one is being sent.
        spans: start and end of each collective since it was last cleared, in seconds or as CUDA events; None: not kept.
        num_calls: collectives so far.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.sent: Counter[Sent] = Counter()
        self.bucket = 0
        self.spans: list[tuple[Any, Any]] | None = None
        self.num_calls = 0
        self._num_muted = 0

    def mute(self, num_calls: int) -> None:
        """Skips the next `num_calls` collectives: this rank repeats a step in which it has done them already.

        What they return has the right shape, and no meaning.
        """
        self._num_muted = num_calls

    def _speaks(self) -> bool:
        self.num_calls += 1
        self._num_muted -= (was_muted := self._num_muted > 0)
        return not was_muted

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if not self._speaks():
            return tensor
        started = self._start(tensor)
        dist.all_reduce(tensor, group=self.group)
        self._end(started, tensor)
        self._count("all_reduce", tensor, 2 * (self.size - 1) / self.size)
        return tensor

    def all_gather(self, payload: Tensor) -> Tensor:
        """Every rank's `payload` [n], by rank: [W, n]."""
        return self.start_all_gather(payload)()

    def start_all_gather(self, payload: Tensor) -> Callable[[], Tensor]:
        """The same; waited for by calling what is returned. Several of them overlap, if begun in one order everywhere.

        Gloo sends a large message in one direction after the other, so several are faster than one.
        """
        # Before the call is counted: where there is no memory for it, none has been made.
        everyones = payload.new_empty(self.size, payload.numel())
        if not self._speaks():
            everyones.copy_(payload.expand(self.size, -1))
            return lambda: everyones
        started = self._start(payload)
        work = dist.all_gather_single(everyones.view(-1), payload, group=self.group, async_op=True)
        self._count("all_gather", payload, self.size - 1)
        return lambda: self._finished(work, started, everyones)

    def all_gather_into(self, everyones: Tensor, payload: Tensor, async_op: bool = False) -> dist.Work | None:
        """The same into a given tensor [W n]."""
        if not self._speaks():
            everyones.view(self.size, -1).copy_(payload.expand(self.size, -1))
            return None
        started = self._start(payload)
        work = dist.all_gather_single(everyones, payload, group=self.group, async_op=async_op)
        self._end(started, payload)
        self._count("all_gather", payload, self.size - 1)
        return work

    def all_to_all(self, payload: Tensor) -> Tensor:
        """Row i of `payload` [W, n] goes to rank i; row i of the result came from rank i."""
        return self.start_all_to_all(payload)()

    def start_all_to_all(self, payload: Tensor) -> Callable[[], Tensor]:
        """The same; see `start_all_gather`."""
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
        """This rank's part [n] of the reduction of `whole` [W n]."""
        if not self._speaks():
            shard.copy_(whole.view(self.size, -1)[self.rank])
            return None
        started = self._start(whole)
        work = dist.reduce_scatter_single(shard, whole, op=op, group=self.group, async_op=async_op)
        self._end(started, whole)
        self._count("reduce_scatter", whole, self.reduce_scatter_share)
        return work

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], Tensor]:
        """Rank `source`'s `tensor`, in place on all others; waited for by calling what is returned."""
        if not self._speaks():
            return lambda: tensor
        started = self._start(tensor)
        work = dist.broadcast(tensor, group_src=source, group=self.group, async_op=True)
        self._count("broadcast", tensor, (self.size - 1) / self.size)
        return lambda: self._finished(work, started, tensor)

    @property
    def reduce_scatter_share(self) -> float:
        """Bytes that a reduce-scatter sends for each byte it is given."""
        return (2 if self._is_gloo else 1) * (self.size - 1) / self.size

    def _count(self, collective: str, tensor: Tensor, factor: float) -> None:
        self.sent[Sent(collective, self.bucket)] += round(tensor.numel() * tensor.element_size() * factor)

    def _start(self, tensor: Tensor) -> Any:
        return None if self.spans is None else mark(tensor.device)

    def _end(self, started: Any, tensor: Tensor) -> None:
        if self.spans is not None:
            self.spans.append((started, mark(tensor.device)))


def mark(device: torch.device) -> Any:
    """This moment: in seconds, or an event on the current stream of an accelerator."""
    module = module_of(device)
    if not hasattr(module, "Event"):
        return time.perf_counter()
    event = module.Event(enable_timing=True)
    event.record()
    return event


def clock_s(device: torch.device) -> float:
    """Now, when all that was launched is done."""
    wait_for(device)
    return time.perf_counter()


def seconds_between(start: Any, end: Any) -> float:
    """Between two marks; waits for the device if they are events."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def busy_s(spans: Iterable[tuple[Any, Any]]) -> float:
    """Seconds in which any of these spans, from mark to mark, was under way; what overlaps counts once."""
    origin, total_s, until_s = None, 0.0, float("-inf")
    moments = []
    for start, end in spans:
        origin = start if origin is None else origin
        moments.append((seconds_between(origin, start), seconds_between(origin, end)))
    for start_s, end_s in sorted(moments):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def aligned(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Some columns of a message [rows, n] as numbers of several bytes: a copy, which begins where such numbers may."""
    numbers = part.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
    return numbers.view(part.size(0), part.size(1) // dtype.itemsize)


@dataclasses.dataclass
class Message:
    """A message that a `DryWire` was given to send, and when."""

    collective: str
    num_bytes: int
    begun_s: float
    needed_s: float
    """When it was waited for."""


class DryWire(Wire):
    """Simulates a wire of W ranks that all send the same: nothing is sent, messages and times are noted.

    Attributes:
        messages: handed to it, in order.
    """

    def __init__(self, size: int) -> None:
        self.group, self.size, self.rank, self._is_gloo = None, size, 0, False
        self.sent, self.bucket, self.spans = Counter(), 0, None
        self.messages: list[Message] = []

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As if all other ranks had zeros."""
        self._begin("all_reduce", tensor, 2 * (self.size - 1) / self.size)
        return tensor

    def start_all_gather(self, payload: Tensor) -> Callable[[], Tensor]:
        """As if all other ranks had the same."""
        message = self._begin("all_gather", payload, self.size - 1)
        return lambda: self._needed(message, payload.expand(self.size, -1).contiguous())

    def start_all_to_all(self, payload: Tensor) -> Callable[[], Tensor]:
        """As if all other ranks had the same."""
        message = self._begin("all_to_all", payload, (self.size - 1) / self.size)
        return lambda: self._needed(message, payload.clone())

    def _begin(self, collective: str, tensor: Tensor, factor: float) -> Message:
        self._count(collective, tensor, factor)
        now = clock_s(tensor.device)
        self.messages.append(Message(collective, tensor.nbytes, now, now))
        return self.messages[-1]

    def _needed(self, message: Message, received: Tensor) -> Tensor:
        message.needed_s = clock_s(received.device)
        return received
