"""Refuses collectives of the user's step and of its backward, other than `self.all_gather`.

The stages of a pipeline come to such a call at different times, or not at all, so the job would wait for the rest of
its `timeout_s`. Ranks that run the same stage with other samples come to it together, but run the step different
numbers of times: in trial runs, and with batches of other sizes. `self.all_gather` takes care of both.

Functions of `torch.distributed` call one function each before they begin, which is replaced while a step runs. So a
call is seen in every batch, however the user has imported it, and other operations of the step cost nothing. Backward
may run in threads of torch's autograd, which begin with the user's function or hook.
"""

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..._compat.torch import _functional_collectives
from .remote_values import CutError, is_of_dtensor, is_of_fsdp, is_of_program, users_line

__all__ = ["NoCollectives"]


_MODES = ("__torch_function__", "__torch_dispatch__")
"""Methods of a user's mode of torch, around `fit` for example: a call of the engine's passes through them, too."""


class NoCollectives:
    """A context of a batch that raises an error where the user's code begins a collective of several ranks.

    Args:
        is_running: whether the stages run. After them, hooks of parameters may compute with split gradients, which the
            ranks with the other parts do, too.
    """

    def __init__(self, is_running: Callable[[], bool]) -> None:
        self._is_running = is_running
        self._originals: tuple[Callable[..., Any], Callable[..., Any]]
        self._begin: Any = None
        """The frame that has entered the context: the user's code is called by what this calls."""
        self._is_paused = False
        """Whether the engine communicates in the step."""

    def __enter__(self) -> None:
        self._begin = sys._getframe(1)
        # torch: what its functions call with the group of ranks.
        self._originals = distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group
        distributed_c10d._rank_not_in_group = self._checking(self._originals[0])
        _functional_collectives._resolve_group = self._checking(self._originals[1])

    def __exit__(self, *error: object) -> None:
        distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group = self._originals
        self._begin = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context around a collective of the engine."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def _checking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check(group: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            is_question = caller.f_code.co_name.startswith("get_")  # such as dist.get_rank()
            if not (is_question or self._is_paused or _is_alone(group)) and self._is_of_user(caller):
                raise CutError(
                    f"{users_line()} communicates with other ranks ({caller.f_code.co_name}), which in a pipeline come"
                    " to this place of the step at another time or not at all. Communicate in a hook, such as"
                    " on_train_batch_end, which all ranks call once a batch; log values with"
                    " `self.log(..., sync_dist=True)`; gather values of the ranks with other samples by"
                    " `self.all_gather`; or choose another strategy, such as 'fsdp'."
                )
            return original(group, *args)

        return check

    def _is_of_user(self, frame: types.FrameType | None) -> bool:
        """Whether the user's step, or its backward, makes a call; not FSDP2, nor a thread of the user's own."""
        is_user = False
        caller = frame
        while frame is not None and frame is not self._begin:
            if frame.f_code.co_filename == threading.__file__:
                return False
            is_user |= is_of_program(frame) and frame.f_code.co_name not in _MODES
            frame = frame.f_back
        return is_user and not is_of_fsdp(caller) and (self._is_running() or not is_of_dtensor(caller))


def _is_alone(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup) and group.size() == 1
