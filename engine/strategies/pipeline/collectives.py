"""Refuses collectives of the user's step in which ranks of several pipeline stages take part.

The stages of a pipeline come to such a call at different times, or not at all, so the job would wait for the rest of
its `timeout_s`. A trial run, and the first micro-batch of the last stage, look at all collectives before they begin.
torch passes them to a `TorchDispatchMode` as operators of the namespaces `c10d` and `_c10d_functional`, whatever the
function that the user has called, and however it was imported.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ..._compat.torch import TorchDispatchMode, _distributed_c10d
from .remote_values import CutError, users_line

__all__ = ["CollectiveError", "NoCollectives"]


class CollectiveError(CutError):
    """The step begins a collective of several stages."""


class NoCollectives(TorchDispatchMode):
    """A mode that raises an error where a collective begins whose group has ranks of other stages.

    Args:
        allowed: the ranks that run the same stage with other samples: they come to a collective together.
    """

    def __init__(self, allowed: frozenset[int]) -> None:
        super().__init__()
        self._allowed = allowed

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: without it torch.compile leaves functions that are first called in the mode uncompiled for good."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace and any(not self._allowed.issuperset(ranks) for ranks in _groups(args)):
            name = func._schema.name.partition("::")[2].strip("_")
            raise CollectiveError(
                f"{users_line()} communicates with ranks of other pipeline stages ({name}), which come to this place"
                " of the step at another time or not at all. Communicate in a hook, such as on_train_batch_end, which"
                " all ranks call once a batch; log values with `self.log(..., sync_dist=True)`; or choose another"
                " strategy, such as 'fsdp'."
            )
        return func(*args, **(kwargs or {}))


def _groups(args: Any) -> Iterator[list[int]]:
    """Yields the ranks of each process group among the arguments of a collective."""
    for argument in args:
        try:
            if isinstance(argument, str):
                yield dist.get_process_group_ranks(_distributed_c10d._resolve_process_group(argument))  # type: ignore[arg-type]
            elif isinstance(argument, torch.ScriptObject):
                yield dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
        except (RuntimeError, TypeError, ValueError):  # it names or holds something else, such as a ReduceOp
            continue
