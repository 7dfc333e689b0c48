"""Values that a method keeps for each parameter between steps, such as residuals.

The values are stored as one flat tensor per bucket. Because DDP rebuilds its buckets after the first step of each run,
and checkpoints identify parameters by name, values move by name when the members of a bucket change.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .bucket import Bucket, ParamSlice

__all__ = ["ParameterState"]


class ParameterState:
    """One flat tensor for each bucket, with a part for each member.

    A method reads `values_of(bucket)` and writes to `stage(bucket)`. With `in_two_phases`, `stage` returns a second
    tensor, which replaces the first one when the step is committed; otherwise both are the same tensor.

    Args:
        sizes: returns the number of values for each member of a bucket, in storage order.
        initial: returns the initial values of a part, flat; None for zeros.
    """

    def __init__(
        self,
        sizes: Callable[[Bucket], dict[ParamSlice, int]],
        initial: Callable[[ParamSlice, int], Tensor] | None = None,
    ) -> None:
        self.in_two_phases = False
        self._sizes = sizes
        self._initial = initial
        self._tensors: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor] = {}
        self._written: set[int] = set()
        self._parts: dict[int, dict[ParamSlice, int]] = {}
        self._members: dict[int, tuple[ParamSlice, ...]] = {}
        self._waiting: dict[str, Tensor] = {}  # parts of parameters whose bucket was not seen yet

    def values_of(self, bucket: Bucket) -> Tensor:
        """Returns the kept values of the members of `bucket`, as one flat tensor."""
        index = bucket.index
        if index in self._written:
            self._keep(index)  # a second backward before the step: the first backward's values count
        if self._members.get(index) != bucket.members:
            self._fill(bucket)
        return self._tensors[index]

    def stage(self, bucket: Bucket) -> Tensor:
        """Returns the tensor to which to write the next values of `bucket`; call `values_of` first."""
        index = bucket.index
        if not self.in_two_phases:
            return self._tensors[index]
        if index not in self._staged:
            self._staged[index] = torch.empty_like(self._tensors[index])
        self._written.add(index)
        return self._staged[index]

    def commit(self, *, skipped: bool | Tensor) -> None:
        """Ends a step: keeps the staged values unless it was skipped, as a 0-d tensor or the host says."""
        for index in list(self._written):
            if isinstance(skipped, Tensor):
                staged = self._staged[index]
                torch.where(skipped, self._tensors[index], staged, out=staged)
            if skipped is not True:
                self._keep(index)
        self._written.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns each member's part, by name, as views."""
        state = dict(self._waiting)
        for index, tensor in self._tensors.items():
            parts = self._parts[index]
            values = tensor.split(list(parts.values()))
            state |= {member.name: value for member, value in zip(parts, values, strict=True)}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads parts by parameter name; each moves into its bucket when that bucket is first seen."""
        self._waiting = dict(state)
        for kept in (self._tensors, self._staged, self._parts, self._members):
            kept.clear()
        self._written.clear()

    def _keep(self, index: int) -> None:
        self._tensors[index], self._staged[index] = self._staged[index], self._tensors[index]
        self._written.discard(index)

    def _fill(self, bucket: Bucket) -> None:
        if bucket.index in self._members:  # buckets were rebuilt: any parameter may be in another bucket now
            self.load_state_dict(self.state_dict())
        flat = bucket.gradients
        parts = self._sizes(bucket)
        tensors = [self._part(member, size, flat) for member, size in parts.items()]
        self._tensors[bucket.index] = torch.cat([flat.new_empty(0), *tensors])
        self._parts[bucket.index], self._members[bucket.index] = parts, bucket.members

    def _part(self, member: ParamSlice, size: int, like: Tensor) -> Tensor:
        saved = self._waiting.pop(member.name, None)
        if saved is not None and saved.numel() == size:
            if saved.device.type != "cpu":
                # The part's memory may belong to another bucket's stream, and must not be reused there too early.
                saved.record_stream(torch.accelerator.current_stream(saved.device))
            return saved.flatten().to(like)
        return like.new_zeros(size) if self._initial is None else self._initial(member, size).to(like)
