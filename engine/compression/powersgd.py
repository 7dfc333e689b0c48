"""`powersgd[:rank]`: each matrix of gradients is sent as two thin factors (Vogels et al. 2019, arXiv:1905.13727).

The mathematics and the communication are torch's `powerSGD_hook`, with error feedback and warm-started factors. Phases
after the warm-up: 1. all-reduce the vectors raw; 2. all-reduce P, rank x rows a matrix; 3. orthogonalise (local);
4. all-reduce Q, rank x columns a matrix. Before that, plain all-reduce, since early gradients change too fast.
"""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from ..flags import check_count
from .base import CommHook

__all__ = ["PowerSGD"]


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

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Torch's hook; the state is made at the first bucket, when the process group exists."""
        if self._state is None:
            self._state = PowerSGDState(
                process_group=None,
                matrix_approximation_rank=self.rank,
                start_powerSGD_iter=self.start,
                orthogonalization_epsilon=1e-8,  # a matrix of zeros (a frozen expert, say) must not divide by zero
            )
        state = self._state
        gradients = bucket.buffer()
        if state.iter < self.start:
            num_sent = gradients.numel()
            future = powerSGD_hook(state, bucket)
        else:
            already = state.total_numel_after_compression
            future = powerSGD_hook(state, bucket)
            num_sent = state.total_numel_after_compression - already
        self.num_bytes += num_sent * gradients.element_size()
        return future
