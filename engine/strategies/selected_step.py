"""Takes back an optimizer's step on the device, where a flag there says so: for optimizers that read no `found_inf`.

Phases: 1. copies of the weights and of the state's tensors, as flat buckets; 2. the step; 3. `torch.where` of the two,
bucket by bucket. None of them waits. While they last, the copies take the memory of weights and state once more.

What a step changes in host memory (torch's counts of steps, entries that are new) is taken back before the next step,
when the flag has arrived there. The host waits for it only if it is more than one step ahead of the device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.buckets import flatten, in_buckets, local_part, unflatten

__all__ = ["LateFlag", "StepBefore", "may_select"]

_BUCKET_MB = 64
"""The tensors that are selected at a time, in MiB: two copies of it are there at once, and larger ones save no time."""


def may_select(optimizer: Optimizer, device: torch.device) -> bool:
    """Whether all that a step changes is known: plain tensors on `device`, and numbers in host memory."""
    weights = all(_is_plain(p) and p.device == device for p in _weights(optimizer))
    return weights and all(
        isinstance(entries, dict) and all(_is_known(value, device) for value in entries.values())
        for entries in optimizer.state.values()
    )


def _is_plain(tensor: Tensor) -> bool:
    return type(local_part(tensor)) in (Tensor, nn.Parameter)


def _is_known(value: Any, device: torch.device) -> bool:
    if isinstance(value, Tensor):
        return _is_plain(value) and (value.device == device or (value.is_cpu and value.numel() == 1))
    return value is None or isinstance(value, int | float | str)


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


class StepBefore:
    """Copies of what the next step of an optimizer changes.

    Args:
        optimizer: `may_select` it.
        device: has its weights.

    Raises:
        torch.OutOfMemoryError: there is no memory for the copies.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        entries: list[dict[str, Any]] = list(optimizer.state.values())
        of_state = (value for one in entries for value in one.values() if isinstance(value, Tensor))
        tensors = [*_weights(optimizer), *(value for value in of_state if value.device == device)]
        self._buckets = list(in_buckets((local_part(t).detach() for t in tensors if t.numel() > 0), _BUCKET_MB))
        self._copies = [flatten(bucket) for bucket in self._buckets]
        # Counts are changed in place. A group's values are replaced, or changed by schedulers, later.
        host: list[tuple[Any, dict[Any, Any]]] = [
            (one, {name: value.clone() if _is_count(value) else value for name, value in one.items()})
            for one in entries
        ]
        owners: list[Any] = [optimizer.state, *optimizer.param_groups]
        self._host = [*host, *((one, dict(one)) for one in owners)]

    @torch.no_grad()
    def select(self, is_left_out: Tensor) -> Callable[[], None] | None:
        """Restores the copies where a 0-d tensor is true.

        Returns:
            A function that restores what is in host memory; None if the step has changed nothing there.
        """
        for bucket, saved in zip(self._buckets, self._copies, strict=True):
            now = flatten(bucket)
            torch.where(is_left_out, saved, now, out=now)
            torch._foreach_copy_(bucket, unflatten(now, bucket))
        changed = [
            (one, {name: value for name, value in before.items() if one.get(name) is not value}, one.keys() - before)
            for one, before in self._host
        ]
        changed = [(one, values, new) for one, values, new in changed if values or new]
        if not changed:
            return None

        def undo() -> None:
            for one, values, new in changed:
                one.update(values)
                for name in new:
                    del one[name]

        return undo


def _is_count(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cpu


class LateFlag:
    """A flag on its way from the device, and what the host does if it turns out to be set.

    Args:
        flag: a 0-d tensor on an accelerator.
    """

    def __init__(self, flag: Tensor) -> None:
        self.actions: list[Callable[[], None]] = []
        """The last one is called first: they undo what was done in their order."""
        try:
            self._value = torch.empty((), pin_memory=True)
        except RuntimeError:  # torch can't pin memory for this kind of device: a copy from there waits
            self._value, self._event = flag.cpu(), None
            return
        self._value.copy_(flag, non_blocking=True)
        self._event = torch.Event(flag.device)
        self._event.record()

    def settle(self) -> None:
        """Waits for the flag, and calls the actions if it is set."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        if self._value > 0:
            for action in reversed(self.actions):
                action()
