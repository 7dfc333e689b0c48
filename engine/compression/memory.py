"""Values that a method keeps for each parameter from step to step, such as what it has not sent yet.

DDP rebuilds its buckets after the first step of each run, and a checkpoint knows parameters by their names: memory is
kept bucket by bucket, one flat tensor each, and is moved by name where a bucket has other members than before.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .bucket import Bucket, Member

__all__ = ["Memory"]


class Memory:
    """One flat tensor for each bucket, made of a part for each of its members.

    A method reads `of(bucket)` and writes to `draft(bucket)`. In two phases, the draft is a second tensor, which takes
    the place of the first one once the step is known to count; otherwise they are the same.

    Args:
        sizes: number of values for each member of a bucket, in the order in which they are kept.
        initial: first values of a part, flat; None for zeros.
    """

    def __init__(
        self,
        sizes: Callable[[Bucket], dict[Member, int]],
        initial: Callable[[Member, int], Tensor] | None = None,
    ) -> None:
        self.in_two_phases = False
        self._sizes = sizes
        self._initial = initial
        self._tensors: dict[int, Tensor] = {}
        self._drafts: dict[int, Tensor] = {}
        self._written: set[int] = set()
        self._parts: dict[int, dict[Member, int]] = {}
        self._members: dict[int, tuple[Member, ...]] = {}
        self._waiting: dict[str, Tensor] = {}  # of parameters whose bucket has not come yet

    def of(self, bucket: Bucket) -> Tensor:
        """Returns the kept values of the members of `bucket`, as one flat tensor."""
        index = bucket.index
        if index in self._written:
            self._keep(index)  # two backwards before one step: the first one's gradients count
        if self._members.get(index) != bucket.members:
            self._fill(bucket)
        return self._tensors[index]

    def draft(self, bucket: Bucket) -> Tensor:
        """Returns the tensor to which to write the next values of `bucket`; call `of` first."""
        index = bucket.index
        if not self.in_two_phases:
            return self._tensors[index]
        if index not in self._drafts:
            self._drafts[index] = torch.empty_like(self._tensors[index])
        self._written.add(index)
        return self._drafts[index]

    def settle(self, *, keep: bool) -> None:
        """Ends a step: takes over what was written to the drafts if `keep`, else discards it."""
        for index in list(self._written):
            if keep:
                self._keep(index)
        self._written.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Each member's part, by name: views."""
        state = dict(self._waiting)
        for index, tensor in self._tensors.items():
            parts = self._parts[index]
            values = tensor.split(list(parts.values()))
            state |= {member.name: value for member, value in zip(parts, values, strict=True)}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on with these parts, however the buckets are."""
        self._waiting = dict(state)
        for kept in (self._tensors, self._drafts, self._parts, self._members):
            kept.clear()
        self._written.clear()

    def _keep(self, index: int) -> None:
        self._tensors[index], self._drafts[index] = self._drafts[index], self._tensors[index]
        self._written.discard(index)

    def _fill(self, bucket: Bucket) -> None:
        if bucket.index in self._members:  # rebuilt: whatever was in any bucket may be in any other now
            self.load_state_dict(self.state_dict())
        flat = bucket.gradients
        parts = self._sizes(bucket)
        tensors = [self._part(member, size, flat) for member, size in parts.items()]
        self._tensors[bucket.index] = torch.cat([flat.new_empty(0), *tensors])
        self._parts[bucket.index], self._members[bucket.index] = parts, bucket.members

    def _part(self, member: Member, size: int, like: Tensor) -> Tensor:
        saved = self._waiting.pop(member.name, None)
        if saved is not None and saved.numel() == size:
            if saved.device.type != "cpu":
                # Of another bucket until now, which may have a stream of its own, to which the memory would go back.
                saved.record_stream(torch.accelerator.current_stream(saved.device))
            return saved.flatten().to(like)
        return like.new_zeros(size) if self._initial is None else self._initial(member, size).to(like)
