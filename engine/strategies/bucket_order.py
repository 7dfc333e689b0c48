"""Keeps the order in which `DistributedDataParallel` puts gradients into its buckets, also in a resumed run.

torch uses one bucket in the first step. From the second step on, it uses buckets in the order in which the first
backward computed the gradients. The last digit of a sum over more than two ranks depends on the position in a bucket.
So a resumed run starts with the buckets of the saved run. The checkpoint has the order of the gradients, and a backward
of zeros in this order creates the buckets. This costs one all-reduce of all gradients.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

__all__ = ["BucketOrder"]


class BucketOrder:
    """The order in which the first synchronised backward computes the gradients.

    Args:
        model: the wrapper, before its first backward.
        parameters: the parameters whose gradients it averages, by name.
    """

    def __init__(self, model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
        self._model, self._parameters = model, parameters
        self._seen: dict[str, None] = {}
        self._hooks: list[RemovableHandle] = []
        self._is_fixed = _never_rebuilds(model)
        if not self._is_fixed:
            self._hooks = [p.register_post_accumulate_grad_hook(self._noting(name)) for name, p in parameters.items()]

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if self._model.require_backward_grad_sync:
                self._seen.setdefault(name)

        return note

    def end_backward(self) -> None:
        """Called after each backward."""
        if self._hooks and self._seen:
            self.close()

    def close(self) -> None:
        """Removes the hooks of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def names(self) -> list[str] | None:
        """The names of the parameters in the order of their gradients; None until it is known."""
        return list(self._seen) if len(self._seen) == len(self._parameters) and not self._hooks else None

    def begin_with(self, names: Sequence[str]) -> None:
        """Creates the buckets in the order `names` of an earlier run; all ranks call it before a comm hook is set."""
        if self._is_fixed or {*names} != self._parameters.keys():
            return
        reducer = self._model.reducer
        reducer.prepare_for_backward([])
        # Autograd's backward visits the most recent operation first.
        total = torch.zeros((), device=next(iter(self._parameters.values())).device)
        for name in reversed(names):
            total = total + _of_zero(self._parameters[name])
        total.backward()
        # torch: a forward begins with this call.
        reducer._rebuild_buckets()
        self._model._has_rebuilt_buckets = True
        for parameter in self._parameters.values():
            parameter.grad = None
        self._seen = dict.fromkeys(names)
        self.close()


def _of_zero(parameter: Tensor) -> Tensor:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum().float() * 0


def _never_rebuilds(model: DistributedDataParallel) -> bool:
    """Whether torch never rebuilds the buckets, or a backward of zeros can't make torch rebuild them."""
    has_sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return model.find_unused_parameters or model.static_graph or has_sparse
