"""Copies of the tensors of a save in host memory, made while the device computes the next steps.

Phases:
1. On the trainer's thread, an accelerator copies its tensors within its own memory, in the order of its other work.
   The copies keep the values of this moment, even if a tensor is changed later through `.data`, which no version
   counter shows. The trainer does not wait. Tensors for which the device has no room, and tensors in host memory, are
   copied to the host at once.
2. On the thread that writes, on a separate stream, the copies go to pinned host memory, which later saves reuse. Then
   the device's memory is released.

The room on a device is the memory that no step has needed so far, minus a tenth of the device's memory. So the copies
take no memory that the next step needs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ..devices import module_of
from ..distributed.buckets import local_part

__all__ = ["Staging"]

_Tensors = dict[str, Tensor]


class Staging:
    """The memory for the copies of one process, for one save at a time."""

    def __init__(self) -> None:
        self._from_host = _HostCopies()
        self._from_trainer, self._from_device = _HostMemory(waits_once=True), _HostMemory(waits_once=False)
        self._on_device: dict[torch.device, _DeviceCopies] = {}

    def begin(self, tensors: _Tensors) -> Callable[[], _Tensors]:
        """Copies the present values of tensors.

        Returns:
            A function to be called once, on any thread, which returns the copies in host memory. They are valid until
            the next `begin`.
        """
        copies: list[tuple[_DeviceCopies, _Tensors]] = []
        with torch.inference_mode(False), torch.no_grad():  # copies made in an evaluation are used in training, too
            for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
                on_device = self._on_device.setdefault(device, _DeviceCopies(device))
                copies.append((on_device, on_device.copy({k: t for k, t in tensors.items() if t.device == device})))
            staged = self._from_host.copy({k: t for k, t in tensors.items() if t.device.type == "cpu" and _is_usual(t)})
        copied_keys = {*staged, *(key for _, copied in copies for key in copied)}
        if rest := {key: tensor for key, tensor in tensors.items() if key not in copied_keys}:
            staged.update(self._from_trainer.stage(rest))

        def complete() -> _Tensors:
            for on_device, copied in copies:
                staged.update(on_device.fetch(copied, self._from_device))
            return {key: staged[key] for key in tensors}

        return complete


class _HostCopies:
    """Copies of tensors in host memory; later saves reuse them.

    Thousands of small tensors are copied in one call: torch's stager makes some ninety calls of Python for each.
    """

    def __init__(self) -> None:
        self._copies: _Tensors = {}

    def copy(self, tensors: _Tensors) -> _Tensors:
        """Returns copies of the tensors; those with the same memory, such as tied weights, share a copy."""
        former, self._copies = self._copies, {}
        by_place: dict[Any, Tensor] = {}
        taken: set[int] = set()
        for (key, tensor), local in zip(tensors.items(), _locals(tensors), strict=True):
            form = _form(tensor)
            place = local.data_ptr(), form
            copied = by_place.get(place)
            if copied is None:
                copied = former.get(key)
                if copied is None or id(copied) in taken or _form(copied) != form:
                    copied = torch.empty_like(tensor, requires_grad=False)
                by_place[place] = copied
                taken.add(id(copied))
            self._copies[key] = copied
        if tensors:
            torch._foreach_copy_(_locals(self._copies), _locals(tensors))
        return dict(self._copies)


class _HostMemory:
    """Host memory for copies, pinned if tensors are on a CUDA device; later saves reuse it for the same storages.

    Args:
        waits_once: copy all tensors without blocking, and wait for the device once; otherwise each copy blocks, and
            waits for the current stream alone.
    """

    def __init__(self, *, waits_once: bool) -> None:
        self._waits_once = waits_once
        self._stager: DefaultStager | None = None

    def stage(self, tensors: _Tensors) -> _Tensors:
        """Copies tensors, and returns the copies once they are complete."""
        if self._stager is not None:
            try:
                return self._stager.stage(tensors)  # type: ignore[return-value]
            except AssertionError:  # torch's: a tensor's memory was resized in place since the last time
                pass
        pins = any(tensor.is_cuda for tensor in tensors.values())
        options = StagingOptions(pins, False, use_async_staging=False, use_non_blocking_copy=pins and self._waits_once)
        self._stager = DefaultStager(options)
        return self._stager.stage(tensors)  # type: ignore[return-value]


class _DeviceCopies:
    """Copies within the memory of one accelerator.

    Each save uses the same tensor objects, by which the stager finds their host memory. Between two saves their
    storages are empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = module_of(device)
        self._stream: Any = self._module.Stream(device=device) if hasattr(self._module, "Stream") else None
        self._device = device
        self._copies: _Tensors = {}
        self._held_bytes = self._peak_bytes = 0

    def copy(self, tensors: _Tensors) -> _Tensors:
        """Returns copies of as many of the tensors as there is room for."""
        room, chosen, held = self._room_bytes(), {}, 0
        for key, tensor in tensors.items():
            if _is_usual(tensor) and held + local_part(tensor).nbytes <= room:
                chosen[key], held = tensor, held + local_part(tensor).nbytes
        former, self._copies = self._copies, {}
        if not chosen:
            return {}
        self._held_bytes = held
        try:
            for key, tensor in chosen.items():
                self._copies[key] = _copy_like(tensor, former.get(key))
            torch._foreach_copy_(_locals(self._copies), _locals(chosen))
        except torch.OutOfMemoryError:  # the free memory is in pieces that are too small
            self._copies = {}
            return {}
        self._stream.wait_stream(self._module.current_stream(self._device))
        return dict(self._copies)

    def fetch(self, copies: _Tensors, host: _HostMemory) -> _Tensors:
        """Returns the copies in host memory, and releases their memory on the device."""
        if not copies:
            return {}
        try:
            with self._module.stream(self._stream):
                staged = host.stage(copies)
                # The memory goes back to the computing stream, which does not wait for this one: so wait here.
                self._stream.synchronize()
        finally:
            for copy in _locals(copies):
                copy.untyped_storage().resize_(0)
        return staged

    def _room_bytes(self) -> int:
        """Bytes that no step has needed so far, less a tenth of the device's memory."""
        if self._stream is None or not hasattr(self._module, "mem_get_info"):
            return 0
        free, total = self._module.mem_get_info(self._device)
        # The step after the last save ran beside that save's copies, which are released by now.
        peak = self._module.max_memory_allocated(self._device) - self._held_bytes
        self._peak_bytes = max(peak, self._peak_bytes)
        return free + self._module.memory_reserved(self._device) - self._peak_bytes - total // 10


def _copy_like(tensor: Tensor, former: Tensor | None) -> Tensor:
    """Returns an uninitialised tensor like `tensor`: `former`, if its shape, dtype and layout are the same."""
    if former is None or _form(former) != _form(tensor):
        return torch.empty_like(tensor, requires_grad=False)
    local = former.to_local() if isinstance(former, DTensor) else former
    local.untyped_storage().resize_(local.nbytes)
    return former


def _is_usual(tensor: Tensor) -> bool:
    """Whether a copy of the same form holds all of a tensor: a class of somebody else may hold more."""
    return type(tensor) in (Tensor, nn.Parameter, DTensor)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    if not isinstance(tensor, DTensor):
        return tensor.shape, tensor.dtype, tensor.stride()
    local = tensor.to_local()
    return tensor.shape, tensor.dtype, local.shape, local.stride(), tensor.device_mesh, tensor.placements


def _locals(tensors: _Tensors) -> list[Tensor]:
    # Without a call for each: there may be thousands of small ones, and the steps wait.
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors.values()]
