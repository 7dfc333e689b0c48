"""The server of `ps`: keeps a share of the parameters, collects gradients, steps, and says who may go on.

Two rules, both from the literature:

- **when it steps**: once as many gradients have arrived as there are workers, whoever sent them, with their mean
  (n-softsync with n = 1: Zhang et al. 2016, arXiv:1511.05950). So that a step has as many samples as one of `ddp`, and
  learning rate, momenta and weight decay mean the same. (Downpour SGD, Dean et al. 2012, applies each gradient by
  itself: under Adam, which does not care for the size of a gradient, that would go as many times as far.)
- **who may go on**: a worker that has pushed c gradients gets parameters as soon as every living worker has pushed
  c - staleness (stale synchronous parallel, Ho et al. 2013). With a staleness of 0 a step has one gradient of each
  worker, summed in the order of their ranks, and nobody goes on before it is done: synchronous training.

A worker that need not wait waits a little all the same, for the step that its own gradient is in: the delay that
workers of one speed have without that, two thirds of a step for three of them, costs a small GPT some of its loss.

A rank that was lost is not waited for, and those of its gradients that wait for a step are dropped.
"""

import threading
from collections import Counter
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future

from .rpc import ALLOWED
from .shard import Shard

__all__ = ["Server", "exchange", "hurry", "install", "pull", "push", "refresh", "state"]


class _Push(NamedTuple):
    rank: int
    gradients: list[Tensor]
    present: list[bool]
    settings: list[dict[str, Any]]
    most: float | None


class _Pull(NamedTuple):
    which: int
    rank: int
    parameters: Future
    patient: bool


class _Queue:
    """The gradients that have been pushed to a shard and wait for its step."""

    def __init__(self, shard: Shard, *, copies: bool) -> None:
        self.shard = shard
        self._needs_copies = copies
        self.pushes: list[_Push] = []
        self.held: list[dict[str, Any]] | None = None
        """Settings of a step whose gradients are ready, and wait for the norm of all shards' gradients."""
        self.norms: list[Future] = []
        self.copies: list[Tensor] | None = None
        """Copies of the parameters, for the workers that ask for them."""

    def complete(self, *, holds: bool) -> float:
        """Makes the mean of what waits the gradients, and steps unless it `holds`; returns the square of their norm."""
        last = self.pushes[-1]
        self.pushes.sort(key=lambda each: each.rank)  # a sum of floats depends on its order
        total = self.shard.set_gradients([(each.gradients, each.present) for each in self.pushes])
        self.pushes = []
        if last.most is not None:
            self.shard.clip_by_value(last.most)
        self.held = last.settings
        if not holds:
            self.step(1.0)
        return total

    def step(self, scale: float) -> None:
        """The step that was held, if no other worker has asked for it yet."""
        if self.held is not None:
            self.shard.step(self.held, scale)
            self.held = self.copies = None

    def parameters(self) -> list[Tensor]:
        """Copies, the same for all who ask between two steps, where the next may come while they are being sent."""
        if not self._needs_copies:
            return self.shard.buffers
        if self.copies is None:
            self.copies = [buffer.clone() for buffer in self.shard.buffers]
        return self.copies


class Server:
    """One rank's share.

    Args:
        shards: one of each optimizer; None where this server has none of its parameters.
        workers: their ranks.
        staleness: by how many gradients a worker may be ahead of the slowest.
    """

    def __init__(self, shards: list[Shard | None], workers: list[int], staleness: int) -> None:
        # Synchronous workers have all got them before any pushes again.
        self._queues = [None if shard is None else _Queue(shard, copies=staleness > 0) for shard in shards]
        self._staleness = staleness
        self._lock = threading.RLock()
        self._done = dict.fromkeys(workers, 0)
        self._hurried: dict[int, int] = {}
        self._waiting: list[_Pull] = []
        self._seen: Counter[int] = Counter()

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters, their copies and optimizer state that it holds; without waiting gradients."""
        queues = [queue for queue in self._queues if queue is not None]
        copies = [copy for queue in queues for copy in queue.copies or ()]
        return sum(queue.shard.held_bytes for queue in queues) + sum(copy.nbytes for copy in copies)

    def staleness(self) -> dict[int, int]:
        """The number of times a worker got parameters, by the gradients the slowest was behind it."""
        with self._lock:
            return dict(self._seen)

    def push(self, which: int, what: _Push, *, holds: bool = False) -> Future:
        """Takes gradients.

        Args:
            which: optimizer.
            what: is pushed.
            holds: the step waits until the norm of all shards' gradients is known, and comes with a `pull`.

        Returns:
            The square of the norm of this shard's mean gradient, once it is known; if it `holds`, else 0.
        """
        norm: Future = Future()
        queue = self._queue(which)
        with self._lock:
            self._check(what.rank)
            queue.pushes.append(what)
            self._done[what.rank] += 1
            if holds:
                queue.norms.append(norm)
        if not holds:
            norm.set_result(0.0)
        self._go_on()
        return norm

    def pull(self, which: int, rank: int, scale: float = 1.0, *, patient: bool = False) -> Future:
        """Parameters for a worker's next gradient, once it may go on.

        Args:
            which: optimizer.
            rank: of the worker.
            scale: of the gradients of a step that was held.
            patient: wait for the step that the worker's last gradient is in, or for a `hurry`.

        Returns:
            The buffers.
        """
        parameters: Future = Future()
        with self._lock:
            self._check(rank)
            self._queue(which).step(scale)
            self._waiting.append(_Pull(which, rank, parameters, patient))
        self._go_on()
        return parameters

    def hurry(self, rank: int, number: int) -> None:
        """Lets a worker go on as soon as the bound allows it.

        Args:
            rank: of the worker.
            number: of its pushes so far. This message may overtake the last of them.
        """
        with self._lock:
            self._hurried[rank] = number
        self._go_on()

    def refresh(self, which: int) -> list[Tensor]:
        """Parameters as they are when all workers have stopped pushing: a step of what is left over comes first."""
        queue = self._queue(which)
        with self._lock:
            if queue.pushes:
                queue.complete(holds=False)
            return queue.parameters()

    def state(self, which: int) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter."""
        with self._lock:
            return self._queue(which).shard.state()

    def lose(self, ranks: list[int]) -> None:
        """Goes on without these."""
        with self._lock:
            for rank in ranks:
                self._done.pop(rank, None)
            for queue in filter(None, self._queues):
                queue.pushes = [each for each in queue.pushes if each.rank not in ranks]
            self._waiting = [each for each in self._waiting if each.rank not in ranks]
        self._go_on()

    def _check(self, rank: int) -> None:
        if rank not in self._done:
            raise RuntimeError(f"rank {rank} was taken for lost, and the others have gone on without it")

    def _queue(self, which: int) -> _Queue:
        queue = self._queues[which]
        assert queue is not None
        return queue

    def _go_on(self) -> None:
        """Does the steps that are due, and lets those go on who may."""
        answers: list[tuple[Future, Any]] = []
        with self._lock:
            for queue in filter(None, self._queues):
                if queue.pushes and len(queue.pushes) >= len(self._done):
                    total = queue.complete(holds=bool(queue.norms))
                    answers += [(norm, total) for norm in queue.norms]
                    queue.norms = []
            slowest = min(self._done.values(), default=0)
            still = []
            for pull in self._waiting:
                behind, queue = self._done[pull.rank] - slowest, self._queue(pull.which)
                is_patient = pull.patient and self._hurried.get(pull.rank, 0) < self._done[pull.rank]
                if behind > self._staleness or (is_patient and any(e.rank == pull.rank for e in queue.pushes)):
                    still.append(pull)
                else:
                    self._seen[behind] += 1
                    answers.append((pull.parameters, queue.parameters()))
            self._waiting = still
        for future, value in answers:  # not under the lock, since it sends
            future.set_result(value)


_served: dict[str, Server] = {}
"""This process's."""


def install(server: Server | None) -> None:
    """Makes `server` the one that answers here; None for no one."""
    _served.clear()
    if server is not None:
        _served["here"] = server


def _answered(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


@rpc.functions.async_execution
def push(which: int, *what: Any) -> Future:
    """`Server.push` of gradients that are held; arguments: those of `_Push`."""
    return _served["here"].push(which, _Push(*what), holds=True)


@rpc.functions.async_execution
def pull(which: int, rank: int, scale: float) -> Future:
    """`Server.pull`."""
    return _served["here"].pull(which, rank, scale)


@rpc.functions.async_execution
def exchange(which: int, *what: Any) -> Future:
    """A push and the patient pull that follows it, in one message."""
    server, pushed = _served["here"], _Push(*what)
    server.push(which, pushed)
    return server.pull(which, pushed.rank, patient=True)


@rpc.functions.async_execution
def hurry(rank: int, number: int) -> Future:
    """`Server.hurry`."""
    _served["here"].hurry(rank, number)
    return _answered(None)


@rpc.functions.async_execution
def refresh(which: int) -> Future:
    """`Server.refresh`."""
    return _answered(_served["here"].refresh(which))


@rpc.functions.async_execution
def state(which: int) -> Future:
    """`Server.state`."""
    return _answered(_served["here"].state(which))


for function in (push, pull, exchange, hurry, refresh, state):
    ALLOWED[__name__, function.__name__] = function
