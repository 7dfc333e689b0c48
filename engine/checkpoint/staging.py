"""Copies what is saved to host memory, while the device computes the next steps.

Phases:
1. on the trainer's thread: an accelerator copies its tensors within its own memory, in the order of its other work.
   Whatever is written after that, by whom and however (`.data` has no version), is not in the copies. The trainer waits
   for nothing. What the device has no room for, and what lies in host memory, is copied to the host at once.
2. on the thread that writes, and on a stream of its own: the copies go to pinned host memory, which is kept for the
   next time; the device gets their memory back.

Room is what no step has needed so far, less a tenth of the device's memory: the copies take nothing of what the next
step needs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ..devices import module_of

__all__ = ["Staging"]

Tensors = dict[str, Tensor]


class Staging:
    """The memory for copies of one process; one save at a time."""

    def __init__(self) -> None:
        self._waited, self._beside = _HostMemory(is_waited=True), _HostMemory(is_waited=False)
        self._on_device: dict[torch.device, _DeviceCopies] = {}

    def begin(self, tensors: Tensors) -> Callable[[], Tensors]:
        """Takes the values that tensors have now.

        Returns:
            To be called once, on any thread: returns the copies in host memory. They are good until the next `begin`.
        """
        copies: list[tuple[_DeviceCopies, Tensors]] = []
        with torch.inference_mode(False), torch.no_grad():  # copies made in an evaluation are used in training, too
            for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
                on_device = self._on_device.setdefault(device, _DeviceCopies(device))
                copies.append((on_device, on_device.take({k: t for k, t in tensors.items() if t.device == device})))
        taken = {key for _, taken in copies for key in taken}
        staged = self._waited.stage({key: tensor for key, tensor in tensors.items() if key not in taken})

        def complete() -> Tensors:
            for on_device, taken in copies:
                staged.update(on_device.fetch(taken, self._beside))
            return {key: staged[key] for key in tensors}

        return complete


class _HostMemory:
    """Memory of the host that torch's stager pins, and uses again for the same storages.

    Args:
        is_waited: the copies are waited for all together; else each by itself, on the current stream alone.
    """

    def __init__(self, *, is_waited: bool) -> None:
        self._is_waited = is_waited
        self._stager: DefaultStager | None = None

    def stage(self, tensors: Tensors) -> Tensors:
        """Returns copies of tensors, once they are there."""
        if self._stager is not None:
            try:
                return self._stager.stage(tensors)  # type: ignore[return-value]
            except AssertionError:  # torch's: a tensor's memory was resized in place since the last time
                pass
        pins = any(tensor.is_cuda for tensor in tensors.values())
        options = StagingOptions(pins, False, use_async_staging=False, use_non_blocking_copy=pins and self._is_waited)
        self._stager = DefaultStager(options)
        return self._stager.stage(tensors)  # type: ignore[return-value]


class _DeviceCopies:
    """Copies within the memory of one accelerator.

    They stay the same tensors from save to save, by which the stager finds their host memory again; between two saves
    their storages are empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = module_of(device)
        self._stream: Any = self._module.Stream(device=device) if hasattr(self._module, "Stream") else None
        self._device = device
        self._copies: Tensors = {}
        self._held_bytes = self._peak_bytes = 0

    def take(self, tensors: Tensors) -> Tensors:
        """Copies as many of the tensors as there is room for."""
        room, chosen, held = self._room_bytes(), {}, 0
        for key, tensor in tensors.items():
            if type(tensor) in (Tensor, nn.Parameter, DTensor) and held + _local(tensor).nbytes <= room:
                chosen[key], held = tensor, held + _local(tensor).nbytes
        former, self._copies = self._copies, {}
        if not chosen:
            return {}
        self._held_bytes = held
        try:
            for key, tensor in chosen.items():
                self._copies[key] = _copy_like(tensor, former.get(key))
            torch._foreach_copy_(_locals(self._copies), _locals(chosen))
        except torch.OutOfMemoryError:  # in pieces too small for it
            self._copies = {}
            return {}
        self._stream.wait_stream(self._module.current_stream(self._device))
        return dict(self._copies)

    def fetch(self, copies: Tensors, host: _HostMemory) -> Tensors:
        """Copies them to the host, and gives their memory back to the device."""
        if not copies:
            return {}
        try:
            with self._module.stream(self._stream):
                staged = host.stage(copies)
                # Only done now: its memory goes to the stream that computes, which is not told of this one.
                self._stream.synchronize()
        finally:
            for copy in _locals(copies):
                copy.untyped_storage().resize_(0)
        return staged

    def _room_bytes(self) -> int:
        """Bytes that no step has needed so far, less a tenth of all."""
        if self._stream is None or not hasattr(self._module, "mem_get_info"):
            return 0
        free, total = self._module.mem_get_info(self._device)
        # The copies of the last save were there beside the step that followed, and are gone.
        peak = self._module.max_memory_allocated(self._device) - self._held_bytes
        self._peak_bytes = max(peak, self._peak_bytes)
        return free + self._module.memory_reserved(self._device) - self._peak_bytes - total // 10


def _copy_like(tensor: Tensor, former: Tensor | None) -> Tensor:
    """Room for a copy: in the `former` one if it is of the same form."""
    if former is None or _form(former) != _form(tensor):
        return torch.empty_like(tensor, requires_grad=False)
    local = _local(former)
    local.untyped_storage().resize_(local.nbytes)
    return former


def _form(tensor: Tensor) -> tuple[Any, ...]:
    local = _local(tensor)
    mesh = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return tensor.shape, tensor.dtype, local.shape, local.stride(), mesh


def _locals(tensors: Tensors) -> list[Tensor]:
    return list(map(_local, tensors.values()))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
