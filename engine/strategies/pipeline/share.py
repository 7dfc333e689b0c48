"""Broadcasts what the last stage has found to all stages: loss, logged values, outputs.

Phases of `Sharing.of`, each a broadcast from the last stage:
1. host to host, 8 bytes: which form the nested value has, by the number under which all ranks know it;
2. host to host, and only for a form that is new: the form itself;
3. the tensors, those of one dtype as one.
"""

import pickle
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

__all__ = ["Place", "Sharing", "put_together", "take_apart"]

_MOST_FORMS = 64


class Place(NamedTuple):
    """The place of a tensor in a nested value."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """A nested value with places for its tensors, and the tensors."""
    tensors: list[Tensor] = []

    def place(tensor: Tensor) -> Place:
        tensors.append(tensor)
        return Place(len(tensors) - 1, tuple(tensor.shape), tensor.dtype)

    return apply_to_collection(value, Tensor, place), tensors


def put_together(form: Any, tensors: list[Tensor]) -> Any:
    """The opposite of `take_apart`."""
    return apply_to_collection(form, Place, lambda place: tensors[place.number])


class Sharing:
    """Brings nested values from one rank of a group to the others.

    Args:
        group: whose ranks all call it together.
        hosts: a gloo group of the same ranks.
        source: the rank within the group that has the values.
        device: of the tensors.
    """

    def __init__(self, group: Any, hosts: Any, source: int, device: torch.device) -> None:
        self._group, self._hosts, self._device = group, hosts, device
        self._source = dist.get_global_rank(group, source)
        self._is_source = dist.get_rank() == self._source
        self._numbers: dict[bytes, int] = {}
        self._forms: list[bytes] = []

    def of(self, value: Any = None) -> Any:
        """Returns the source's value on all ranks."""
        form, tensors = take_apart(value)
        content = self._known(pickle.dumps(form) if self._is_source else b"")
        if not self._is_source:
            form = pickle.loads(content)  # noqa: S301  # what a rank of this job has just pickled
            tensors = []
        places: dict[torch.dtype, list[Place]] = defaultdict(list)
        apply_to_collection(form, Place, lambda place: places[place.dtype].append(place))
        found: dict[int, Tensor] = {}
        for dtype, of_dtype in places.items():
            numels = [torch.Size(place.shape).numel() for place in of_dtype]
            if self._is_source:
                flat = torch.cat([tensors[place.number].detach().reshape(-1).to(self._device) for place in of_dtype])
            else:
                flat = torch.empty(sum(numels), dtype=dtype, device=self._device)
            dist.broadcast(flat, self._source, group=self._group)
            for place, part in zip(of_dtype, flat.split(numels), strict=True):
                found[place.number] = part.view(place.shape)
        return put_together(form, [found[index] for index in range(len(found))])

    def _known(self, content: bytes) -> bytes:
        """The form that the source has, on all ranks."""
        number = self._numbers.get(content, -1) if self._is_source else 0
        header = torch.tensor([number, len(content)])
        dist.broadcast(header, self._source, group=self._hosts)
        number, size = header.tolist()
        if number >= 0:
            return self._forms[number]
        raw = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self._is_source else None
        if raw is None:
            raw = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(raw, self._source, group=self._hosts)
        content = raw.numpy().tobytes()
        if len(self._forms) == _MOST_FORMS:  # they seem never to repeat
            self._forms.clear()
            self._numbers.clear()
        self._numbers[content] = len(self._forms)
        self._forms.append(content)
        return content
