"""Refuses collectives of the user's step, other than `self.all_gather`.

The stages of a pipeline come to such a call at different times, or not at all, so the job would wait for the rest of
its `timeout_s`. Ranks that run the same stage with other samples come to it together, but run the step different
numbers of times: in trial runs, and with batches of other sizes. `self.all_gather` takes care of both.

Functions of `torch.distributed` call one function each before they begin, which is replaced while a step runs. So a
call is seen in every batch, however the user has imported it, and other operations of the step cost nothing.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..._compat.torch import _functional_collectives
from .remote_values import CutError, is_of_fsdp, users_line

__all__ = ["NoCollectives"]


class NoCollectives:
    """A context that raises an error where a step begins a collective of several ranks."""

    def __init__(self) -> None:
        self._originals: tuple[Callable[..., Any], Callable[..., Any]]
        self._thread: int | None = None
        """The thread that runs the step; None while the engine communicates in it."""

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        # torch: what its functions call with the group of ranks.
        self._originals = distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group
        distributed_c10d._rank_not_in_group = self._checking(self._originals[0])
        _functional_collectives._resolve_group = self._checking(self._originals[1])

    def __exit__(self, *error: object) -> None:
        distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group = self._originals

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context around a collective of the engine."""
        thread, self._thread = self._thread, None
        try:
            yield
        finally:
            self._thread = thread

    def _checking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check(group: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            is_question = caller.f_code.co_name.startswith("get_")  # such as dist.get_rank()
            is_here = threading.get_ident() == self._thread
            if is_here and not is_question and not _is_alone(group) and not is_of_fsdp(caller):
                raise CutError(
                    f"{users_line()} communicates with other ranks ({caller.f_code.co_name}), which in a pipeline come"
                    " to this place of the step at another time or not at all. Communicate in a hook, such as"
                    " on_train_batch_end, which all ranks call once a batch; log values with"
                    " `self.log(..., sync_dist=True)`; gather values of the ranks with other samples by"
                    " `self.all_gather`; or choose another strategy, such as 'fsdp'."
                )
            return original(group, *args)

        return check


def _is_alone(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and group.size() == 1
