"""A worker of `ps`: pushes its gradients to the servers, and pulls parameters from them.

Communication per step, where the servers of other ranks have Q bytes of the parameters:
1. push: the Q bytes of gradients, one message per server;
2. pull: the Q bytes of parameters, in the answer (blocks until the staleness bound lets this worker continue). The
   server waits for the step that has this worker's gradient; when the worker's patience ends, it sends an empty message
   that ends this wait.
To clip by the norm of the mean gradient, 1 and 2 are separate messages, and 1 blocks until all workers have pushed.
"""

import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .rpc import Connection
from .server import Server, exchange, pull, push, refresh, release_early, state
from .shard import Packing, Shard, partition, settings_of

__all__ = ["Clipping", "Worker"]


_NEW_SHARE = 0.1
"""The weight of the newest time in the running mean of compute times."""


class Clipping(NamedTuple):
    """How the mean gradient is clipped."""

    algorithm: str
    """``"norm"`` or ``"value"``."""
    limit: float
    """The largest norm, or the largest absolute value of an element."""


class _Share(NamedTuple):
    """The parameters of one optimizer that one server holds."""

    server: int
    """The rank of the server."""
    indices: list[int]
    """Indices of the parameters within the optimizer."""
    parameters: list[Tensor]
    packing: Packing


class Worker:
    """Makes the servers do the steps of this rank's optimizers.

    Args:
        connection: to the other ranks.
        optimizers: optimizers of the module: their parameters, settings and state.
        num_servers: ranks 0 to ``num_servers - 1`` serve the parameters.
        patience: how long to wait for the step that has the pushed gradient, as a share of the time that the gradient
            took to compute; after that, older parameters are taken.
    """

    def __init__(
        self, connection: Connection, optimizers: list[Optimizer], num_servers: int, patience: float = 0.0
    ) -> None:
        self._connection = connection
        self._patience = patience
        self._num_pushes: Counter[int] = Counter()
        self._compute_s = 0.0
        self._began = time.monotonic()
        self._optimizers = optimizers
        self._parameters = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
        sizes = [[p.numel() * p.element_size() for p in parameters] for parameters in self._parameters]
        self._shares: list[list[_Share]] = [[] for _ in optimizers]
        for server, share in enumerate(partition(sizes, num_servers)):
            for optimizer_index, indices in enumerate(share):
                parameters = [self._parameters[optimizer_index][index] for index in indices]
                if parameters:
                    self._shares[optimizer_index].append(_Share(server, indices, parameters, Packing(parameters)))

    def make_server(self, staleness: int) -> Server | None:
        """Returns the server of this rank; None if this rank serves no parameters."""
        own_shares = [next((s for s in shares if s.server == self._connection.rank), None) for shares in self._shares]
        if not any(own_shares):
            return None
        shards = [
            None if share is None else Shard(optimizer, share.parameters)
            for share, optimizer in zip(own_shares, self._optimizers, strict=True)
        ]
        return Server(shards, self._connection.surviving, staleness)

    def step(self, optimizer: Optimizer, clipping: Clipping | None) -> Tensor | None:
        """Pushes the gradients, and waits for the parameters of the next forward pass.

        Returns:
            The norm of the mean gradient before it was clipped; None unless it was clipped by its norm.

        Raises:
            RuntimeError: a server can't be reached, or the optimizer has other parameters than at the start.
        """
        self._note_time()
        optimizer_index = self._optimizers.index(optimizer)
        if sum(len(group["params"]) for group in optimizer.param_groups) != len(self._parameters[optimizer_index]):
            raise RuntimeError(
                "the optimizer has got other parameters while training, which under `ps` have no server: give it all of"
                " them at the start, those to be trained later with requires_grad=False."
            )
        connection, shares = self._connection, self._shares[optimizer_index]
        settings = settings_of(optimizer)
        by_norm = clipping is not None and clipping.algorithm == "norm"
        clip_value = clipping.limit if clipping is not None and not by_norm else None
        calls = {}
        for share in shares:  # phase 1
            present = [p.grad is not None for p in share.parameters]
            gradients = share.packing.pack([p.grad for p in share.parameters])
            function = push if by_norm else exchange
            arguments = (optimizer_index, connection.rank, gradients, present, settings, clip_value)
            self._num_pushes[share.server] += 1
            calls[share.server] = connection.call(share.server, function, *arguments)
        norm = None
        if by_norm:
            assert clipping is not None
            squares = connection.wait(calls, "for the norm of its share of the mean gradient")
            total_norm = sum(squares.values()) ** 0.5
            norm = torch.tensor(total_norm)
            # As torch.nn.utils.clip_grad_norm_ computes it.
            scale = min(1.0, clipping.limit / (total_norm + 1e-6))
            calls = {s.server: connection.call(s.server, pull, optimizer_index, connection.rank, scale) for s in shares}
        for server in connection.late_ranks(calls, self._patience * self._compute_s):
            connection.call(server, release_early, connection.rank, self._num_pushes[server])
        self._update_parameters(optimizer_index, connection.wait(calls, "for its share of the parameters"))  # phase 2
        self._began = time.monotonic()
        return norm

    def _note_time(self) -> None:
        took_s = time.monotonic() - self._began
        self._compute_s += (took_s - self._compute_s) * (_NEW_SHARE if self._compute_s else 1.0)

    def refresh(self) -> None:
        """Pulls the current parameters; all ranks call it when none pushes."""
        for index, shares in enumerate(self._shares):
            calls = {share.server: self._connection.call(share.server, refresh, index) for share in shares}
            self._update_parameters(index, self._connection.wait(calls, "for its share of the parameters"))

    def states_of(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Gets an optimizer's state from the servers, by the index of the parameter."""
        optimizer_index = self._optimizers.index(optimizer)
        shares = self._shares[optimizer_index]
        calls = {share.server: self._connection.call(share.server, state, optimizer_index) for share in shares}
        answers = self._connection.wait(calls, "for its share of the optimizer's state")
        states = {i: values for s in shares for i, values in zip(s.indices, answers[s.server], strict=True) if values}
        return dict(sorted(states.items()))

    @torch.no_grad()
    def _update_parameters(self, optimizer_index: int, buffers: dict[int, list[Tensor]]) -> None:
        for share in self._shares[optimizer_index]:
            # One copy to the accelerator for each buffer, rather than one for each parameter.
            on_device = [buffer.to(share.parameters[0].device) for buffer in buffers[share.server]]
            torch._foreach_copy_(share.parameters, share.packing.unpack(on_device))
