"""Fillers: batches that a rank runs for its collectives only, because other ranks have samples left and it has none.

A filler is a copy of a sample that counts for nothing. The loops say when one runs; what communicates within a step
(`self.all_gather`, synchronised batch norms) asks here, and leaves the filler's values out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["among_fillers", "is_here", "leave_out_fillers", "rows_of_samples"]

_present: list[bool] = []
"""For each batch in progress that some rank has no sample of, whether this rank runs a filler. Not a context variable:
recomputation in backward may run in a thread of autograd."""


@contextmanager
def among_fillers(*, is_filler: bool) -> Iterator[None]:
    """Context of a batch that some rank has no sample of.

    Args:
        is_filler: this rank has none, and runs a filler.
    """
    _present.append(is_filler)
    try:
        yield
    finally:
        _present.pop()


def is_here() -> bool:
    """Whether this rank runs a filler now."""
    return bool(_present) and _present[-1]


def leave_out_fillers(gathered: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the rows of `gathered` [ranks of `group`, ...] whose ranks have samples: see `rows_of_samples`.

    Costs a collective of one number, and a read of the device, in batches that some rank has no sample of.
    """
    if not _present:
        return gathered
    flag = torch.tensor([is_here()], dtype=torch.uint8, device=gathered.device)
    flags = [torch.empty_like(flag) for _ in range(dist.get_world_size(group))]
    dist.all_gather(flags, flag, group=group)
    return rows_of_samples(gathered, torch.cat(flags).bool().tolist())


def rows_of_samples(gathered: Tensor, are_fillers: Sequence[bool]) -> Tensor:
    """Returns the rows of `gathered` [ranks, ...] whose ranks have samples; all of them on a rank with a filler.

    So the code of a rank with a filler finds its own row, as does that of the others.

    Raises:
        ValueError: a rank before others has no sample, so that the others' rows would get other indices.
    """
    num_real = are_fillers.count(False)
    if any(are_fillers[:num_real]):
        raise ValueError(
            f"`all_gather` in a batch that rank(s) {[rank for rank, fills in enumerate(are_fillers) if fills]} have no"
            " sample of: without their rows, those of later ranks would get other indices. Give each rank as many"
            " batches; in training, uneven='drop' ends the epoch before such a batch."
        )
    return gathered if is_here() else gathered[:num_real]
