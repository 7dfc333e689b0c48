"""`topk[:density]`: the largest values of each parameter and their places (Lin et al. 2018, arXiv:1712.01887).

Phases: 1. find the k = density x n values of greatest magnitude of each parameter (local); 2. all-gather of 8 bytes
each, values and places in one message; 3. add up what came (local). Bytes grow with the number of ranks, W-1 times 8 k:
beyond W = 1/density ranks a plain all-reduce sends less.
"""

import itertools
from typing import ClassVar

import torch
from torch import Tensor

from ..flags import check_number
from .bucket import Bucket
from .feedback import LossyHook
from .wire import Wire, aligned

__all__ = ["TopK", "largest"]

_SAMPLE = 2**14


class TopK(LossyHook):
    """Send the largest gradients only.

    Args:
        density: share of each parameter that is sent, greater than 0 and at most 1.
        start: see `LossyHook`.
        feedback: see `LossyHook`.
    """

    name = "topk"
    description = "the largest values and their places, with error feedback: topk[:density][,start=steps]; density 0.01"
    takes_dtype: ClassVar[bool] = True

    def __init__(self, density: float = 0.01, start: int = 0, feedback: bool = True) -> None:
        super().__init__(feedback, start)
        self.density = check_number("topk:density", density, above=0, most=1)

    def exchange(self, total: Tensor, bucket: Bucket, wire: Wire) -> None:
        """See the phases above."""
        # Phase 1.
        offsets = itertools.accumulate(bucket.numels, initial=0)
        places = torch.cat(
            [
                largest(part, max(1, round(part.numel() * self.density))).add_(offset)
                for part, offset in zip(total.split(bucket.numels), offsets, strict=False)
                if part.numel()
            ]
        )
        num_sent = places.numel()
        exact = total[places]
        values = exact.to(self.send_dtype or total.dtype)
        total[places] = exact - values.to(total.dtype)
        # Phase 2.
        payload = torch.cat([places.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])
        everyones = wire.all_gather(payload)
        # Phase 3. In the order of the ranks, so that all of them get the same bits.
        all_places = aligned(everyones[:, : 4 * num_sent]).view(torch.int32)
        all_values = aligned(everyones[:, 4 * num_sent :]).view(values.dtype).to(total.dtype)
        bucket.gradients.zero_()
        for rank in range(wire.size):
            bucket.gradients.index_add_(0, all_places[rank], all_values[rank], alpha=1 / wire.size)


def largest(flat: Tensor, k: int) -> Tensor:
    """Places of the `k` values of greatest magnitude in `flat` [n], in no order; NaN counts as greatest."""
    magnitudes = flat.abs()
    n = flat.numel()
    if flat.device.type == "cpu" and n > 4 * _SAMPLE and k < n // 8:
        # A sample tells where about they begin, and spares a CPU the sorting of all the others.
        stride = n // _SAMPLE
        sample = magnitudes[::stride]
        expected = k / stride
        # Five standard deviations more than expected: fewer than k are above this in one of millions of steps.
        rank = min(sample.numel(), round(expected + 5 * expected**0.5 + 5))
        threshold = sample.topk(rank, sorted=False).values.min()
        above = (~(magnitudes < threshold)).nonzero().view(-1)
        if k <= above.numel() < n // 2:
            return above[magnitudes[above].topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices
