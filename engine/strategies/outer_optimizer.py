"""The anchor, and the outer step that updates it: the mathematics of `local_sgd.py`."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD

from ..compression import Bucket, CommHook, ParamSlice
from ..distributed.buckets import copy, flatten, in_buckets, unflatten

__all__ = ["OuterOptimizer"]


class OuterOptimizer:
    """The anchor (the weights that all ranks had after the last exchange), and the outer SGD that updates it.

    Args:
        parameters: the trained parameters, by name.
        hook: comm hook that averages over the ranks; it has begun.
        largest_mb: size of a bucket, in MiB.
        outer: arguments of `torch.optim.SGD`.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], hook: CommHook, *, largest_mb: float, outer: dict[str, Any]
    ) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._hook = hook
        self._buckets = list(in_buckets(parameters.values(), largest_mb))
        self._flats = [flatten(bucket) for bucket in self._buckets]
        self._outer = SGD(self._flats, **outer)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that the anchor has a copy of."""
        return list(self._names)

    @property
    def held_bytes(self) -> int:
        """The bytes of the anchor itself, and of its momentum."""
        momenta = [value for state in self._outer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self._flats, *momenta) if isinstance(tensor, Tensor))

    def exchange(self) -> None:
        """Phases 1 to 3."""
        for index, (parameters, anchor) in enumerate(zip(self._buckets, self._flats, strict=True)):
            change = anchor - flatten(parameters)
            members = tuple(ParamSlice(self._names[p], tuple(p.shape)) for p in parameters)
            anchor.grad = self._hook.run(Bucket(index, change, members))
            self._outer.step()
            anchor.grad = None
            copy(unflatten(anchor, parameters), parameters)
        self._hook.on_step_end()

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The anchor and the momentum of each parameter, by name: views."""
        momenta = [self._outer.state[flat].get("momentum_buffer") for flat in self._flats]
        return {"anchor": self._by_name(self._flats), "momentum": self._by_name(momenta)}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restores a `state_dict`, which may have had other buckets; values that it lacks are not changed."""
        momenta = [torch.zeros_like(flat) for flat in self._flats] if state["momentum"] else [None] * len(self._flats)
        for flats, saved in ((self._flats, state["anchor"]), (momenta, state["momentum"])):
            for name, view in self._by_name(flats).items():
                view.copy_(saved.get(name, view))
        for flat, momentum in zip(self._flats, momenta, strict=True):
            if momentum is not None:
                self._outer.state[flat]["momentum_buffer"] = momentum

    def _by_name(self, flats: Iterable[Tensor | None]) -> dict[str, Tensor]:
        return {
            self._names[p]: view
            for flat, bucket in zip(flats, self._buckets, strict=True)
            if flat is not None
            for p, view in zip(bucket, unflatten(flat, bucket), strict=True)
        }
