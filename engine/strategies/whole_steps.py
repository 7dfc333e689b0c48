"""Makes an optimizer's step on split parameters and plain tensors give the result of a step on whole tensors.

Most out-of-place operations work with DTensor, which takes plain tensors for replicas. Three cases don't:
- torch refuses an in-place operation of a plain tensor with a DTensor (LAMB divides all gradients by their norm);
- torch refuses an in-place change of a norm that is not reduced over the ranks yet (Adafactor's roots of row norms);
- values that are rounded to 16 bits and then multiplied (Muon) depend on the split: they are gathered first.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, optim
from torch.distributed.tensor import DTensor, Partial, Replicate

from .._compat.torch import TorchDispatchMode, tree_map_only

__all__ = ["as_whole", "plain_as_replicas", "whole_results"]

_ELEMENTWISE = frozenset(
    (
        *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam),
        *(optim.Adagrad, optim.Adadelta, optim.Adamax, optim.ASGD, optim.RMSprop),
    )
)
"""Optimizers that compute each element only from its own gradient and state, in the precision of the parameters."""
_CAST = torch.ops.aten._to_copy.default


def as_whole(
    optimizer: optim.Optimizer, closure: Callable[..., Any]
) -> tuple[contextlib.AbstractContextManager[Any], Callable[..., Any]]:
    """Returns the context for an optimizer's step, and the closure to pass to it."""
    if type(optimizer) in _ELEMENTWISE:
        return contextlib.nullcontext(), closure
    mode = _AsWhole()
    return mode, mode.pausing(closure)


_depth = [0]
"""The number of `plain_as_replicas` contexts that are entered: torch's own context can't be nested."""


@contextlib.contextmanager
def plain_as_replicas() -> Iterator[None]:
    """Context in which plain tensors in an operation with a DTensor count as replicas."""
    # Imported here, since it takes long.
    from torch.distributed.tensor.experimental import implicit_replication

    with contextlib.nullcontext() if _depth[0] else implicit_replication():
        _depth[0] += 1
        try:
            yield
        finally:
            _depth[0] -= 1


@contextlib.contextmanager
def whole_results() -> Iterator[None]:
    """Context in which operations on split parameters and plain tensors have the results of whole tensors."""
    with plain_as_replicas(), _AsWhole():
        yield


class _AsWhole(TorchDispatchMode):
    """A mode in which operations have the results of whole tensors; `pausing` suspends it for the closure."""

    def __init__(self) -> None:
        super().__init__()
        self._is_paused = False

    def pausing(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Returns `closure` (forward and backward), during which the mode is suspended."""

        def paused(*args: Any, **kwargs: Any) -> Any:
            before, self._is_paused = self._is_paused, True
            try:
                return closure(*args, **kwargs)
            finally:
                self._is_paused = before

        return paused

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        kwargs = kwargs or {}
        if self._is_paused or not args:
            return operator(*args, **kwargs)
        if operator is _CAST and isinstance(args[0], DTensor) and _rounds(args[0], kwargs.get("dtype")):
            args = (_gathered(args[0]), *args[1:])
        elif operator._schema.name.endswith("_"):
            if isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
                args, kwargs = tree_map_only(DTensor, lambda tensor: tensor.full_tensor(), (args, kwargs))
            else:  # an operation on lists of tensors: torch counts plain ones as replicas
                tree_map_only(DTensor, _sum_over_ranks, args[0])
        return operator(*args, **kwargs)


def _rounds(tensor: Tensor, dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize < tensor.dtype.itemsize


def _gathered(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def _sum_over_ranks(tensor: DTensor) -> None:
    if any(isinstance(placement, Partial) for placement in tensor.placements):
        whole: Any = _gathered(tensor)
        # torch: the parts of a DTensor; the same values, reduced.
        tensor._local_tensor, tensor._spec = whole.to_local(), whole._spec
