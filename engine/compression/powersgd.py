"""`powersgd[:rank]`: each matrix of gradients is sent as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

The mathematics and the communication are torch's `powerSGD_hook`, with error feedback and warm-started factors. Phases
after the warm-up: 1. all-reduce the vectors raw; 2. all-reduce P, rank x rows a matrix; 3. orthogonalise (local);
4. all-reduce Q, rank x columns a matrix. Before that, plain all-reduce, since early gradients change too fast.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    _should_compress,  # which tensors are matrices worth two factors
    powerSGD_hook,
)
from torch.futures import Future

from ..flags import check_count
from .base import CommHook

__all__ = ["PowerSGD"]

_MIN_RATE = 2.0
"""A matrix is sent as factors if that is less than half of it; torch's default."""


class PowerSGD(CommHook):
    """PowerSGD with error feedback.

    Args:
        rank: rank of the approximation; bytes grow with it, the error shrinks.
        start: steps of plain all-reduce before compression begins; at least 2, since DDP rebuilds its buckets after
            the first.
    """

    name = "powersgd"
    description = "low-rank factors with error feedback: powersgd[:rank][,start=steps]; rank 4, start 10"

    def __init__(self, rank: int = 4, start: int = 10) -> None:
        super().__init__()
        self.rank = check_count("the rank of powersgd", rank)
        self.start = check_count("powersgd:start", start, least=2)
        self._state: PowerSGDState | None = None
        self._first_iter = 0
        self._members: dict[int, list[Tensor]] = {}
        # What is to be put into buckets that were not reduced yet, by the names of parameters.
        self._residuals: dict[str, Tensor] = {}
        self._factors: dict[str, Tensor] = {}

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Torch's hook; the state is made at the first bucket, when the process group exists."""
        if self._state is None:
            self._state = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=self.start,
                min_compression_rate=_MIN_RATE,
                orthogonalization_epsilon=1e-8,  # a matrix of zeros (a frozen expert, say) must not divide by zero
            )
            self._state.iter = self._first_iter
        state = self._state
        gradients = bucket.buffer()
        members = bucket.parameters()
        if state.iter >= self.start and not _same(self._members.get(bucket.index()), members):
            self._fill(bucket.index(), members, gradients)
        if state.iter < self.start:
            num_sent = gradients.numel()
            future = powerSGD_hook(state, bucket)
        else:
            already = state.total_numel_after_compression
            future = powerSGD_hook(state, bucket)
            num_sent = state.total_numel_after_compression - already
        self.num_bytes += num_sent * gradients.element_size()
        return future

    def state_dict(self) -> dict[str, Any]:
        """Each parameter's residual, and the factor Q of those that are sent as matrices."""
        residuals, factors = self._collected()
        iteration = self._first_iter if self._state is None else self._state.iter
        return {"iter": iteration, "residuals": residuals, "factors": factors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with these residuals and factors at the next step, however its buckets are."""
        self._first_iter = state["iter"]
        self._residuals, self._factors = dict(state["residuals"]), dict(state["factors"])
        self._state, self._members = None, {}

    def _collected(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Residuals and factors by name, of torch's buckets and of what has not got into one yet."""
        residuals, factors = dict(self._residuals), dict(self._factors)
        for index, members in self._members.items():
            assert self._state is not None
            parts = self._state.error_dict[index].split([member.numel() for member in members])
            residuals |= {self.names[m]: part.view_as(m) for m, part in zip(members, parts, strict=True)}
            matrices = self._matrices(members)
            parts = self._state.q_memory_dict[index].split([rows * columns for _, rows, columns in matrices])
            factors |= {
                self.names[m]: part.view(rows, columns)
                for (m, rows, columns), part in zip(matrices, parts, strict=True)
            }
        return residuals, factors

    def _fill(self, index: int, members: list[Tensor], gradients: Tensor) -> None:
        """Puts residuals and factors into a bucket that is new, or has other members than before.

        DDP rebuilds its buckets after the first step of each run, so a run that goes on has two of them to fill.
        """
        state = self._state
        assert state is not None
        if index in self._members:
            self._residuals, self._factors = self._collected()
            self._members.clear()
            for memory in (state.error_dict, state.p_memory_dict, state.q_memory_dict):
                memory.clear()
        self._members[index] = members
        matrices = self._matrices(members)
        if not self._residuals and not self._factors:
            return
        empty, zero = gradients.new_empty(0), gradients.new_zeros(())
        residuals = [self._residuals.pop(self.names[m], zero.expand(m.numel())) for m in members]
        state.error_dict[index] = torch.cat([residual.to(gradients).flatten() for residual in residuals])
        factors = [self._factors.pop(self.names[m]) for m, _, _ in matrices]
        state.q_memory_dict[index] = torch.cat([empty, *(factor.to(gradients).flatten() for factor in factors)])
        state.p_memory_dict[index] = gradients.new_empty(sum(m.shape[0] * columns for m, _, columns in matrices))

    def _matrices(self, members: list[Tensor]) -> list[tuple[Tensor, int, int]]:
        """The parameters of a bucket that torch sends as factors, in its order, each with the shape of its Q."""
        by_shape: dict[tuple[int, int], list[Tensor]] = {}
        for member in members:
            rows, columns = member.shape[0], member.numel() // member.shape[0]
            if _should_compress(rows, columns, min(rows, columns, self.rank), _MIN_RATE)[0]:
                by_shape.setdefault((rows, columns), []).append(member)
        return [
            (member, columns, min(rows, columns, self.rank))
            for (rows, columns), same_shape in by_shape.items()
            for member in same_shape
        ]


def _same(a: list[Tensor] | None, b: list[Tensor]) -> bool:
    return a is not None and len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
