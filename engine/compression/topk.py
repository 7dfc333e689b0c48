"""`topk[:density]`: the largest values of each parameter and their indices (Lin et al. 2018, arXiv:1712.01887).

Phases: 1. find the k = density x n values of largest magnitude of each parameter (local); 2. all-gather of 8 bytes per
value, values and indices in one message; 3. add up the received values (local). Bytes grow with the number of ranks,
W-1 times 8 k: beyond W = 1/density ranks a plain all-reduce sends less.

Biases and gains of norms are sent completely, without indices, in the same message: sending them late cost a small GPT
8 % of its loss (benchmarks/convergence.py at density 0.01), and they are only some thousandths of a model.
"""

import itertools
from typing import ClassVar

import torch
from torch import Tensor

from ..flags import check_number
from .counting_group import Bucket, CountingGroup, ParamSlice, aligned
from .feedback import ErrorFeedbackHook

__all__ = ["TopK", "largest"]

_RUN = 2**20
"""Smallest number of values whose largest are sent in one message."""
_LEAST = 64
"""Smallest number of values to send of each parameter, if it has that many."""
_SAMPLE = 2**13


class TopK(ErrorFeedbackHook):
    """Sends only the largest gradients.

    Args:
        density: share of each parameter that is sent, greater than 0 and at most 1.
        start: see `ErrorFeedbackHook`.
        feedback: see `ErrorFeedbackHook`.
    """

    name = "topk"
    description = "the largest values and their places, with error feedback: topk[:density][,start=steps]; density 0.01"
    takes_dtype: ClassVar[bool] = True

    def __init__(self, density: float = 0.01, start: int = 0, feedback: bool = True) -> None:
        super().__init__(feedback, start)
        self.density = check_number("topk:density", density, above=0, most=1)

    def exchange(self, total: Tensor, bucket: Bucket, wire: CountingGroup) -> None:
        """See the phases above."""
        # Phases 1 and 2, one run of parameters after the other; each is sent while the next one is searched.
        pending = []
        for position, run in bucket.cut(_RUN):
            run_total = total[position]
            whole, chosen = self._places(run_total, run)
            places = torch.cat([whole, chosen])
            exact = run_total[places]
            values = exact.to(self.send_dtype or total.dtype)
            run_total[places] = exact - values.to(total.dtype)
            payload = torch.cat([chosen.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])
            pending.append((run.gradients, whole, 4 * chosen.numel(), wire.start_all_gather(payload)))
        # Phase 3. In the order of the ranks, so that all ranks get bitwise equal sums.
        for average, whole, end, receive in pending:
            gathered = receive()
            all_chosen = aligned(gathered[:, :end], torch.int32)
            all_values = aligned(gathered[:, end:], self.send_dtype or total.dtype).to(total.dtype)
            average.zero_()
            for chosen, values in zip(all_chosen, all_values, strict=True):
                average.index_add_(0, torch.cat([whole, chosen]), values, alpha=1 / wire.size)

    def _places(self, total: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Returns the indices of the values that all ranks send, and the indices that this rank has chosen."""
        offsets = itertools.accumulate(bucket.numels, initial=0)
        whole, chosen = ([torch.empty(0, dtype=torch.int64, device=total.device)] for _ in range(2))
        for member, part, offset in zip(bucket.members, total.split(bucket.numels), offsets, strict=False):
            if member.is_short_vector:
                whole.append(torch.arange(offset, offset + member.numel, device=total.device))
            else:
                chosen.append(largest(part, self._num_sent(member)).add_(offset))
        return torch.cat(whole), torch.cat(chosen)

    def _num_sent(self, member: ParamSlice) -> int:
        return min(member.numel, max(_LEAST, round(member.numel * self.density)))


def largest(flat: Tensor, k: int) -> Tensor:
    """Returns the indices of the `k` values of largest magnitude in `flat` [n], unordered; NaN counts as largest."""
    magnitudes = flat.abs()
    n = flat.numel()
    if flat.device.type == "cpu" and n > 4 * _SAMPLE and k < n // 8:
        # A sample gives an approximate threshold, so that a CPU need not sort all values.
        stride = n // _SAMPLE
        sample = magnitudes[::stride]
        expected = k / stride
        # Five standard deviations more than expected: fewer than k values exceed this once in millions of steps.
        rank = min(sample.numel(), round(expected + 5 * expected**0.5 + 5))
        threshold = sample.topk(rank, sorted=False).values.min()
        above = (~(magnitudes < threshold)).nonzero().view(-1)
        if k <= above.numel() < n // 2:
            return above[magnitudes[above].topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices
