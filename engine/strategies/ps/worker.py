"""A worker of `ps`: pushes its gradients to the servers, and gets parameters from them.

P bytes of parameters that are trained, of which another rank's server has the share Q:
1. push: the Q bytes of gradients, one message per server;
2. pull: the Q bytes of parameters, in the answer (blocks until the staleness bound lets this worker go on);
   where that would be sooner than the step that its gradient is in, a message without content after its patience ends.
Where the norm of the mean gradient is needed, to clip it, 1 and 2 are messages of their own, and 1 blocks until all
workers have pushed.
"""

import time
from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .rpc import Connection
from .server import Server, exchange, hurry, pull, push, refresh, state
from .shard import Packing, Shard, dealt, settings_of

__all__ = ["Clipping", "Worker"]


_NEW_SHARE = 0.1
"""The weight of the newest time in the running mean of compute times."""


class Clipping(NamedTuple):
    """The way in which the mean gradient is clipped."""

    by: str
    """``"norm"`` or ``"value"``."""
    most: float


class _Share(NamedTuple):
    """Those of an optimizer's parameters that one server holds."""

    server: int
    numbers: list[int]
    parameters: list[Tensor]
    packing: Packing


class Worker:
    """Trains what an optimizer was made for, at the servers.

    Args:
        connection: to the other ranks.
        optimizers: of the module: their parameters, settings and state.
        num_servers: the first ranks, which share the parameters.
        patience: how long to wait for the step that a gradient is in, as a share of the time that it took to compute;
            from then on, older parameters will do.
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
        for server, share in enumerate(dealt(sizes, num_servers)):
            for of, numbers in enumerate(share):
                parameters = [self._parameters[of][number] for number in numbers]
                if parameters:
                    self._shares[of].append(_Share(server, numbers, parameters, Packing(parameters)))

    def serve(self, staleness: int) -> Server | None:
        """The server of this rank's share; None if it has none."""
        mine = [next((s for s in shares if s.server == self._connection.rank), None) for shares in self._shares]
        if not any(mine):
            return None
        shards = [
            None if share is None else Shard(optimizer, share.parameters)
            for share, optimizer in zip(mine, self._optimizers, strict=True)
        ]
        return Server(shards, self._connection.living, staleness)

    def step(self, optimizer: Optimizer, clipping: Clipping | None) -> Tensor | None:
        """Pushes the gradients, and waits for the parameters that the next ones are to be computed with.

        Returns:
            The norm of the mean gradient before it was clipped; None unless it was clipped by its norm.

        Raises:
            RuntimeError: a server can't be reached, or the optimizer has other parameters than at the start.
        """
        self._note_time()
        which = self._optimizers.index(optimizer)
        if sum(len(group["params"]) for group in optimizer.param_groups) != len(self._parameters[which]):
            raise RuntimeError(
                "the optimizer has got other parameters while training, which under `ps` have no server: give it all of"
                " them at the start, those to be trained later with requires_grad=False."
            )
        connection, shares = self._connection, self._shares[which]
        settings = settings_of(optimizer)
        by_norm = clipping is not None and clipping.by == "norm"
        most = clipping.most if clipping is not None and not by_norm else None
        calls = {}
        for share in shares:
            present = [p.grad is not None for p in share.parameters]
            gradients = share.packing.packed([p.grad for p in share.parameters])
            function = push if by_norm else exchange
            what = (which, connection.rank, gradients, present, settings, most)
            self._num_pushes[share.server] += 1
            calls[share.server] = connection.call(share.server, function, *what)
        norm = None
        if by_norm:
            assert clipping is not None
            squares = connection.wait(calls, "for the norm of its share of the mean gradient")
            total = sum(squares.values()) ** 0.5
            norm = torch.tensor(total)
            # As torch.nn.utils.clip_grad_norm_ has it.
            scale = min(1.0, clipping.most / (total + 1e-6))
            calls = {s.server: connection.call(s.server, pull, which, connection.rank, scale) for s in shares}
        for server in connection.late(calls, self._patience * self._compute_s):
            connection.call(server, hurry, connection.rank, self._num_pushes[server])
        self._take(which, connection.wait(calls, "for its share of the parameters"))
        self._began = time.monotonic()
        return norm

    def _note_time(self) -> None:
        took_s = time.monotonic() - self._began
        self._compute_s += (took_s - self._compute_s) * (_NEW_SHARE if self._compute_s else 1.0)

    def refresh(self) -> None:
        """Gets the parameters as they are; all ranks call it when none pushes."""
        for which, shares in enumerate(self._shares):
            calls = {share.server: self._connection.call(share.server, refresh, which) for share in shares}
            self._take(which, self._connection.wait(calls, "for its share of the parameters"))

    def state_of(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """An optimizer's state at the servers, by the number of the parameter."""
        which = self._optimizers.index(optimizer)
        shares = self._shares[which]
        calls = {share.server: self._connection.call(share.server, state, which) for share in shares}
        states = self._connection.wait(calls, "for its share of the optimizer's state")
        found = {n: each for s in shares for n, each in zip(s.numbers, states[s.server], strict=True) if each}
        return dict(sorted(found.items()))

    @torch.no_grad()
    def _take(self, which: int, buffers: dict[int, list[Tensor]]) -> None:
        for share in self._shares[which]:
            # To an accelerator one copy of each buffer, rather than one of each parameter.
            here = [buffer.to(share.parameters[0].device) for buffer in buffers[share.server]]
            torch._foreach_copy_(share.parameters, share.packing.unpacked(here))
