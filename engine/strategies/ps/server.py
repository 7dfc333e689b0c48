"""The server of `ps`: keeps a share of the parameters, collects gradients, steps, and bounds the staleness of workers.

Two rules, both from the literature:

- **when it steps**: once as many gradients have arrived as there are workers, no matter from which ones. It uses their
  mean (n-softsync with n = 1: Zhang et al. 2016, arXiv:1511.05950). So a step has as many samples as a step of `ddp`,
  and learning rate, momenta and weight decay mean the same. (Downpour SGD, Dean et al. 2012, applies each gradient by
  itself: with Adam, whose update does not depend on the gradient's scale, this multiplies the step by the number of
  workers.)
- **which worker continues**: a worker that has pushed c gradients gets parameters as soon as every surviving worker has
  pushed c - staleness (stale synchronous parallel, Ho et al. 2013). With a staleness of 0 a step has one gradient of
  each worker, summed in the order of their ranks, and no worker continues before it is done: synchronous training.

A worker within the bound still waits a little for the step that has its own gradient. Without this wait, workers of
equal speed are late by two thirds of a step (with three workers), which costs a small GPT some of its loss.

The server does not wait for a rank that was lost, and drops those of its gradients that wait for a step.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.futures import Future
from torch.optim import Optimizer

from .rpc import ALLOWED

__all__ = [
    "Packing",
    "Server",
    "Shard",
    "exchange",
    "install_server",
    "partition",
    "pull",
    "push",
    "refresh",
    "release_early",
    "settings_of",
    "state",
]


def partition(sizes: list[list[int]], num_servers: int) -> list[list[list[int]]]:
    """Assigns whole parameters to servers, the largest first, each to the server with the fewest bytes.

    Parameters stay whole, since not every optimizer works element by element.

    Args:
        sizes: bytes of each parameter of each optimizer.
        num_servers: number of servers.

    Returns:
        For each server and each optimizer, the indices of its parameters.
    """
    shares: list[list[list[int]]] = [[[] for _ in sizes] for _ in range(num_servers)]
    loads_bytes = [0] * num_servers
    parameters = [(optimizer, index) for optimizer, row in enumerate(sizes) for index in range(len(row))]
    for optimizer, index in sorted(parameters, key=lambda parameter: -sizes[parameter[0]][parameter[1]]):
        server = loads_bytes.index(min(loads_bytes))
        loads_bytes[server] += sizes[optimizer][index]
        shares[server][optimizer].append(index)
    return [[sorted(indices) for indices in share] for share in shares]


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the settings of an optimizer's groups (learning rate, ...) as plain values; schedulers change them."""
    return [
        {key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if _is_plain(value)}
        for group in optimizer.param_groups
    ]


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return all(isinstance(item, (int, float, str, type(None))) for item in (value if type(value) is tuple else [value]))


class Packing:
    """Packs tensors into one flat buffer per dtype, as they are sent.

    Args:
        tensors: any tensors of the shapes and dtypes that are to be packed.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [tensor.shape for tensor in tensors]
        self._indices: dict[torch.dtype, list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            self._indices[tensor.dtype].append(index)

    def pack(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Copies the tensors into 1-d buffers on the CPU; zeros in place of None."""
        device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))

        def flat(index: int, dtype: torch.dtype) -> Tensor:
            tensor = tensors[index]
            if tensor is None:
                return torch.zeros(self._shapes[index].numel(), dtype=dtype, device=device)
            return tensor.detach().reshape(-1)

        return [torch.cat([flat(index, dtype) for index in indices]).cpu() for dtype, indices in self._indices.items()]

    def unpack(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """Returns views of the buffers, in the shapes and the order of the tensors."""
        views: list[Tensor] = [torch.empty(0)] * len(self._shapes)
        for buffer, indices in zip(buffers, self._indices.values(), strict=True):
            sizes = [self._shapes[index].numel() for index in indices]
            for index, view in zip(indices, buffer.split(sizes), strict=True):
                views[index] = view.view(self._shapes[index])
        return views


class Shard:
    """A server's copies of some of an optimizer's parameters, on the CPU, with an optimizer of the same class for them.

    Args:
        optimizer: optimizer of the module; its state of these parameters is copied.
        parameters: parameters of the shard, as the module has them.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[Tensor]) -> None:
        self.packing = Packing(parameters)
        self.buffers = self.packing.pack(parameters)
        self.parameters = [view.requires_grad_() for view in self.packing.unpack(self.buffers)]
        counterparts = dict(zip(parameters, self.parameters, strict=True))
        self._optimizer, self._group_indices = _optimizer_of(optimizer, counterparts)

    @torch.no_grad()
    def set_gradients(self, pushed: list[tuple[list[Tensor], list[bool]]]) -> float:
        """Makes the mean of the pushed gradients the gradients of the shard.

        Args:
            pushed: for each push the buffers of gradients, and whether each parameter has one. A gradient that only
                some pushes have is zero in the others, as under ddp.

        Returns:
            The squared 2-norm of the gradients.
        """
        means = [torch.stack(column).mean(0) if len(column) > 1 else column[0] for column in _columns(pushed)]
        has_gradient = [any(column) for column in zip(*(present for _, present in pushed), strict=True)]
        squared_norm = 0.0
        gradients = self.packing.unpack(means)
        for parameter, gradient, present in zip(self.parameters, gradients, has_gradient, strict=True):
            parameter.grad = gradient if present else None
            squared_norm += float(torch.linalg.vector_norm(gradient)) ** 2 if present else 0.0
        return squared_norm

    def clip_by_value(self, clip_value: float) -> None:
        """Clamps each element of the gradients to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(self.parameters, clip_value)

    @torch.no_grad()
    def step(self, settings: list[dict[str, Any]], scale: float = 1.0) -> None:
        """Does one step of the optimizer.

        Args:
            settings: settings of the groups of the worker's optimizer, see `settings_of`.
            scale: factor on the gradients, to clip them by their norm.
        """
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, scale)
        for group, index in zip(self._optimizer.param_groups, self._group_indices, strict=True):
            for key, value in settings[index].items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = value
        self._optimizer.step()
        self._optimizer.zero_grad()

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters and optimizer state that this shard holds."""
        states = [value for values in self._optimizer.state.values() for value in values.values()]
        return sum(tensor.nbytes for tensor in (*self.buffers, *states) if isinstance(tensor, Tensor))

    def state(self) -> list[dict[str, Any]]:
        """Returns a copy of the optimizer's state of each parameter."""
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in values.items()}
            for values in (self._optimizer.state.get(parameter, {}) for parameter in self.parameters)
        ]


def _columns(pushed: list[tuple[list[Tensor], list[bool]]]) -> list[tuple[Tensor, ...]]:
    return list(zip(*(buffers for buffers, _ in pushed), strict=True))


def _optimizer_of(optimizer: Optimizer, counterparts: dict[Tensor, Tensor]) -> tuple[Optimizer, list[int]]:
    """Returns an optimizer of the same class and state for the counterparts, and the indices of its groups."""
    groups = [
        (index, {**group, "params": [counterparts[p] for p in group["params"] if p in counterparts]})
        for index, group in enumerate(optimizer.param_groups)
    ]
    groups = [(index, group) for index, group in groups if group["params"]]
    # Without its constructor, whose arguments are not known. torch: a scheduler sets `step` on the instance.
    new: Any = object.__new__(type(optimizer))
    new.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    new.param_groups = [{key: _own(value) for key, value in group.items()} for _, group in groups]
    new.state = defaultdict(dict)
    for original, counterpart in counterparts.items():
        if original in optimizer.state:
            new.state[counterpart] = {key: _own(value) for key, value in optimizer.state[original].items()}
    return new, [index for index, _ in groups]


def _own(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


class _Push(NamedTuple):
    """The gradients of one worker."""

    rank: int
    gradients: list[Tensor]
    """Flat buffers, see `Packing`."""
    present: list[bool]
    """Whether each parameter has a gradient."""
    settings: list[dict[str, Any]]
    """Settings of the optimizer's groups, see `settings_of`."""
    clip_value: float | None
    """The largest absolute value of an element; None for no clipping by value."""


class _Pull(NamedTuple):
    """A request of one worker for parameters."""

    optimizer_index: int
    rank: int
    parameters: Future
    patient: bool
    """Whether it waits for the step that has the worker's last gradient."""


class _Queue:
    """The gradients that have been pushed to a shard and wait for its step."""

    def __init__(self, shard: Shard, *, copies: bool) -> None:
        self.shard = shard
        self._needs_copies = copies
        self.pushes: list[_Push] = []
        self.held_settings: list[dict[str, Any]] | None = None
        """Settings of a step that waits for the norm over all shards' gradients; None if no step waits."""
        self.norms: list[Future] = []
        self.copies: list[Tensor] | None = None
        """Copies of the parameters as they are since the last step; None until a worker asks for them."""

    def average(self, *, holds: bool) -> float:
        """Averages the pushes into the shard's gradients, and steps unless it `holds`; returns their squared norm."""
        last = self.pushes[-1]
        self.pushes.sort(key=lambda push: push.rank)  # a sum of floats depends on its order
        squared_norm = self.shard.set_gradients([(push.gradients, push.present) for push in self.pushes])
        self.pushes = []
        if last.clip_value is not None:
            self.shard.clip_by_value(last.clip_value)
        self.held_settings = last.settings
        if not holds:
            self.step(1.0)
        return squared_norm

    def step(self, scale: float) -> None:
        """Does the step that was held, unless the pull of another worker has already done it."""
        if self.held_settings is not None:
            self.shard.step(self.held_settings, scale)
            self.held_settings = self.copies = None

    def parameters(self) -> list[Tensor]:
        """Returns the flat buffers of the parameters: copies, if the next step may come while they are being sent."""
        if not self._needs_copies:
            return self.shard.buffers
        if self.copies is None:
            self.copies = [buffer.clone() for buffer in self.shard.buffers]
        return self.copies


class Server:
    """The server of one rank: its shards of the optimizers, and the queues of gradients for them.

    Args:
        shards: one for each optimizer; None where this server has none of its parameters.
        workers: the ranks that train.
        staleness: the number of gradients that a worker may be ahead of the slowest.
    """

    def __init__(self, shards: list[Shard | None], workers: list[int], staleness: int) -> None:
        # With staleness 0 all workers have received the parameters before one pushes again: no copies are needed.
        self._queues = [None if shard is None else _Queue(shard, copies=staleness > 0) for shard in shards]
        self._staleness = staleness
        self._lock = threading.RLock()
        self._num_pushed = dict.fromkeys(workers, 0)
        self._released: dict[int, int] = {}
        """The number of the push up to which a worker waits no longer, by rank; see `release_early`."""
        self._waiting: list[_Pull] = []
        self._staleness_counts: Counter[int] = Counter()

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters, their copies and optimizer state on this server, without queued gradients."""
        queues = [queue for queue in self._queues if queue is not None]
        copies = [copy for queue in queues for copy in queue.copies or ()]
        return sum(queue.shard.held_bytes for queue in queues) + sum(copy.nbytes for copy in copies)

    def staleness(self) -> dict[int, int]:
        """Maps a staleness, in gradients, to the number of pulls that had it."""
        with self._lock:
            return dict(self._staleness_counts)

    def push(self, optimizer_index: int, gradients: _Push, *, holds: bool = False) -> Future:
        """Queues the gradients of a worker.

        Args:
            optimizer_index: position of the optimizer in the trainer's list.
            gradients: the gradients.
            holds: hold the step until the norm over all shards' gradients is known: until a `pull`.

        Returns:
            The squared norm of this shard's mean gradient, once it is known; 0 unless it `holds`.
        """
        norm: Future = Future()
        queue = self._queue(optimizer_index)
        with self._lock:
            self._check(gradients.rank)
            queue.pushes.append(gradients)
            self._num_pushed[gradients.rank] += 1
            if holds:
                queue.norms.append(norm)
        if not holds:
            norm.set_result(0.0)
        self._advance()
        return norm

    def pull(self, optimizer_index: int, rank: int, scale: float = 1.0, *, patient: bool = False) -> Future:
        """Asks for the parameters for a worker's next gradient.

        Args:
            optimizer_index: position of the optimizer in the trainer's list.
            rank: rank of the worker.
            scale: factor on the gradients of a step that was held.
            patient: wait for the step that has the worker's last gradient, or for `release_early`.

        Returns:
            The flat buffers of the parameters, once the staleness bound lets the worker continue.
        """
        parameters: Future = Future()
        with self._lock:
            self._check(rank)
            self._queue(optimizer_index).step(scale)
            self._waiting.append(_Pull(optimizer_index, rank, parameters, patient))
        self._advance()
        return parameters

    def release_early(self, rank: int, number: int) -> None:
        """Ends the patience of a worker's pull: it is answered as soon as the staleness bound allows it.

        Args:
            rank: rank of the worker.
            number: number of its pushes so far. This message may overtake the last of them.
        """
        with self._lock:
            self._released[rank] = number
        self._advance()

    def refresh(self, optimizer_index: int) -> list[Tensor]:
        """Steps with the gradients that are still queued and returns the parameters; called when no worker pushes."""
        queue = self._queue(optimizer_index)
        with self._lock:
            if queue.pushes:
                queue.average(holds=False)
            return queue.parameters()

    def state(self, optimizer_index: int) -> list[dict[str, Any]]:
        """Returns the optimizer's state of each parameter of this server."""
        with self._lock:
            return self._queue(optimizer_index).shard.state()

    def lose(self, ranks: list[int]) -> None:
        """Continues without ranks that were lost, and drops their queued gradients and pulls."""
        with self._lock:
            for rank in ranks:
                self._num_pushed.pop(rank, None)
            for queue in filter(None, self._queues):
                queue.pushes = [push for push in queue.pushes if push.rank not in ranks]
            self._waiting = [pull for pull in self._waiting if pull.rank not in ranks]
        self._advance()

    def _check(self, rank: int) -> None:
        if rank not in self._num_pushed:
            raise RuntimeError(f"rank {rank} was taken for lost, and the others have gone on without it")

    def _queue(self, optimizer_index: int) -> _Queue:
        queue = self._queues[optimizer_index]
        assert queue is not None
        return queue

    def _advance(self) -> None:
        """Does the steps that are due, and answers the pulls that have waited long enough."""
        answers: list[tuple[Future, Any]] = []
        with self._lock:
            for queue in filter(None, self._queues):
                if queue.pushes and len(queue.pushes) >= len(self._num_pushed):
                    squared_norm = queue.average(holds=bool(queue.norms))
                    answers += [(norm, squared_norm) for norm in queue.norms]
                    queue.norms = []
            slowest = min(self._num_pushed.values(), default=0)
            still_waiting = []
            for pull in self._waiting:
                num_ahead, queue = self._num_pushed[pull.rank] - slowest, self._queue(pull.optimizer_index)
                is_patient = pull.patient and self._released.get(pull.rank, 0) < self._num_pushed[pull.rank]
                if num_ahead > self._staleness or (is_patient and any(push.rank == pull.rank for push in queue.pushes)):
                    still_waiting.append(pull)
                else:
                    self._staleness_counts[num_ahead] += 1
                    answers.append((pull.parameters, queue.parameters()))
            self._waiting = still_waiting
        for future, value in answers:  # not under the lock, since it sends
            future.set_result(value)


_servers: list[Server] = []
"""The server of this process, if it has one."""


def install_server(server: Server | None) -> None:
    """Makes `server` answer the calls of other ranks to this process; None: no server does."""
    _servers[:] = [] if server is None else [server]


def _answered(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


@rpc.functions.async_execution
def push(optimizer_index: int, *fields: Any) -> Future:
    """Calls `Server.push` with a step that is held; the arguments are the fields of `_Push`."""
    return _servers[0].push(optimizer_index, _Push(*fields), holds=True)


@rpc.functions.async_execution
def pull(optimizer_index: int, rank: int, scale: float) -> Future:
    """Calls `Server.pull`."""
    return _servers[0].pull(optimizer_index, rank, scale)


@rpc.functions.async_execution
def exchange(optimizer_index: int, *fields: Any) -> Future:
    """Pushes, and pulls patiently, in one message; the arguments are the fields of `_Push`."""
    server, gradients = _servers[0], _Push(*fields)
    server.push(optimizer_index, gradients)
    return server.pull(optimizer_index, gradients.rank, patient=True)


@rpc.functions.async_execution
def release_early(rank: int, number: int) -> Future:
    """Calls `Server.release_early`."""
    _servers[0].release_early(rank, number)
    return _answered(None)


@rpc.functions.async_execution
def refresh(optimizer_index: int) -> Future:
    """Calls `Server.refresh`."""
    return _answered(_servers[0].refresh(optimizer_index))


@rpc.functions.async_execution
def state(optimizer_index: int) -> Future:
    """Calls `Server.state`."""
    return _answered(_servers[0].state(optimizer_index))


for function in (push, pull, exchange, release_early, refresh, state):
    ALLOWED[__name__, function.__name__] = function
