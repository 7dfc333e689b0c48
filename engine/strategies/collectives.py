"""Refuses collectives where their result would not be that of one process, or no other rank would take part.

Functions of `torch.distributed` call one function each before they begin, which is replaced while a step runs. So a
call is seen in every batch, however the user has imported it, and other operations of the step cost nothing. Backward
may run in threads of torch's autograd, which begin with the user's function or hook.
"""

import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from .._compat.torch import _functional_collectives
from .callers import CutError, is_between, is_of_dtensor, is_of_fsdp, is_of_program, users_line

__all__ = ["NoCollectives", "NoSharedSamples", "NoSumsOfGradients", "NoneAtAll"]

_MODES = ("__torch_function__", "__torch_dispatch__")
"""Methods of a user's mode of torch, around `fit` for example: a call of the engine's passes through them, too."""


class _WatchedCollectives:
    """A context in which a collective that is refused raises an error; it may be entered within itself."""

    def __init__(self) -> None:
        self._originals: list[tuple[Callable[..., Any], Callable[..., Any]]] = []

    def __enter__(self) -> None:
        # torch: what its functions call with the group of ranks.
        originals = distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group
        self._originals.append(originals)
        distributed_c10d._rank_not_in_group = self._checking(originals[0])
        _functional_collectives._resolve_group = self._checking(originals[1])

    def __exit__(self, *error: object) -> None:
        distributed_c10d._rank_not_in_group, _functional_collectives._resolve_group = self._originals.pop()

    def _checking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def check(group: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            is_question = caller.f_code.co_name.startswith("get_")  # such as dist.get_rank()
            if not is_question:
                self.check(caller, group)
            return original(group, *args)

        return check

    def check(self, caller: types.FrameType, group: Any) -> None:
        """Called with what `refusal` gets.

        Raises:
            CutError: the collective is refused.
        """
        if reason := self.refusal(caller, group):
            raise CutError(f"{users_line()} communicates with other ranks ({caller.f_code.co_name}), {reason}")

    def refusal(self, caller: types.FrameType, group: Any) -> str:
        """Returns why a collective is refused, for the end of a message; "": it is not.

        Args:
            caller: the frame of torch's function.
            group: its group of ranks.
        """
        raise NotImplementedError


# --- in code that is tried out on this rank alone, all


class NoneAtAll(_WatchedCollectives):
    """A context in which all collectives of this thread, and of its backward, raise an error.

    Args:
        error: its class.
    """

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error, self._thread = error, threading.get_ident()

    def check(self, caller: types.FrameType, group: Any) -> None:
        """See `_WatchedCollectives`; other threads, such as one that saves, communicate meanwhile."""
        if threading.get_ident() == self._thread or _is_called_by_program(caller):
            raise self._error


# --- in the step of a pipeline, and in its backward, any but `self.all_gather`
# The stages of a pipeline come to such a call at different times, or not at all, so the job would wait for the rest of
# its `timeout_s`. Ranks that run the same stage with other samples come to it together, but run the step different
# numbers of times: in trial runs, and with batches of other sizes. `self.all_gather` takes care of both.


class NoCollectives(_WatchedCollectives):
    """A context of a batch that raises an error where the user's code begins a collective of several ranks.

    Args:
        is_running: whether the stages run. After them, hooks of parameters may compute with split gradients, which the
            ranks with the other parts do, too.
    """

    def __init__(self, is_running: Callable[[], bool]) -> None:
        super().__init__()
        self._is_running = is_running
        self._begin: Any = None
        """The frame that has entered the context: the user's code is called by what this calls."""
        self._is_paused = False
        """Whether the engine communicates in the step."""

    def __enter__(self) -> None:
        self._begin = sys._getframe(1)
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._begin = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context around a collective of the engine."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def refusal(self, caller: types.FrameType, group: Any) -> str:
        """See `_WatchedCollectives`."""
        if self._is_paused or _is_alone(group) or not self._is_of_user(caller):
            return ""
        return (
            "which in a pipeline come to this place of the step at another time or not at all. Communicate in a hook,"
            " such as on_train_batch_end, which all ranks call once a batch; log values with `self.log(...,"
            " sync_dist=True)`; gather values of the ranks with other samples by `self.all_gather`; or choose another"
            " strategy, such as 'fsdp'."
        )

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


# --- in hooks in which a pipeline's ranks have gradients of different parameters

_HOOKS_OF_GRADIENTS = (
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "configure_gradient_clipping",
    "optimizer_step",
)


class NoSumsOfGradients(_WatchedCollectives):
    """A context of training in which hooks of gradients may not combine what the stages of a pipeline have.

    Args:
        ranks_of_stage: the ranks that have the same stages as this one.
    """

    def __init__(self, ranks_of_stage: Collection[int]) -> None:
        super().__init__()
        self._ranks_of_stage = set(ranks_of_stage)

    def refusal(self, caller: types.FrameType, group: Any) -> str:
        """See `_WatchedCollectives`."""
        if not _is_called_by_program(caller):
            return ""
        ranks = dist.get_process_group_ranks(group) if group is None or isinstance(group, dist.ProcessGroup) else None
        if ranks is not None and self._ranks_of_stage.issuperset(ranks):
            return ""
        frame: types.FrameType | None = caller
        while frame is not None and not (is_of_program(frame) and frame.f_code.co_name in _HOOKS_OF_GRADIENTS):
            frame = frame.f_back
        if frame is None:
            return ""
        return (
            f"in {frame.f_code.co_name}, where the stages of a pipeline have gradients of different parameters. Leave"
            " it out: gradients are averaged, and gradient_clip_val knows all of them; pass"
            " `group=self.trainer.strategy.data_group` (the ranks with the same stage); or choose another strategy,"
            " such as 'fsdp'."
        )


# --- in a step of ranks that have the same samples, those that would count samples several times
# The user's code sees as many ranks as there are processes, and of the same samples several times the same values.
# `self.all_gather`, `self.log` and torchmetrics count each sample once.

_KEEPS_COPIES = ("barrier", "monitored_barrier", "broadcast", "broadcast_object_list")
"""Functions whose result is the same with copies of values."""
_OF_COPIES = ("avg", "max", "min")
"""Reductions, likewise."""


class NoSharedSamples(_WatchedCollectives):
    """A context of a step that raises an error where the user's code combines the values of ranks with equal samples.

    Args:
        num_sharing: the number of neighbouring ranks that have the same samples.
        axis: the axis of the mesh on which they are.
    """

    def __init__(self, num_sharing: int, axis: str) -> None:
        super().__init__()
        self._num_sharing, self._axis = num_sharing, axis

    def refusal(self, caller: types.FrameType, group: Any) -> str:
        """See `_WatchedCollectives`."""
        if not _is_called_by_program(caller) or not self._has_copies(group) or _keeps_copies(caller):
            return ""
        return (
            f"of which {self._num_sharing} on the axis {self._axis!r} have the same samples: these would count"
            f" {self._num_sharing} times. Gather with `self.all_gather`, log values with `self.log(...,"
            " sync_dist=True)`, pass `group=self.trainer.strategy.data_group` (the ranks with other samples), or choose"
            " another strategy, such as 'fsdp'."
        )

    def _has_copies(self, group: Any) -> bool:
        """Whether two ranks of a group have the same samples, as far as the kind of group says so."""
        if self._num_sharing == 1:
            return False
        mesh, axis = group if isinstance(group, tuple) else (group, 0)
        if isinstance(mesh, DeviceMesh):
            group = mesh.get_group(axis)
        elif group is None:
            group = dist.group.WORLD
        if isinstance(group, dist.ProcessGroup):
            group = dist.get_process_group_ranks(group)
        if not isinstance(group, list):  # the name of a group
            return True
        return len({rank // self._num_sharing for rank in group}) < len(group)


def _is_called_by_program(frame: types.FrameType | None) -> bool:
    """Whether the user's code calls a function of torch, itself or through functions of torch alone."""
    if is_of_dtensor(frame) or is_of_fsdp(frame):
        return False
    while frame is not None and (is_between(frame) or frame.f_code.co_name in _MODES):
        frame = frame.f_back
    return frame is not None and is_of_program(frame)


def _keeps_copies(caller: types.FrameType) -> bool:
    operation = caller.f_locals.get("op", caller.f_locals.get("reduceOp"))
    name = str(operation).lower().removeprefix("redoptype.").removeprefix("reduceop.")
    return caller.f_code.co_name in _KEEPS_COPIES or name in _OF_COPIES
