"""The device that is checked: any accelerator torch knows, or the simulated one of the tests (`sim`)."""

import contextlib
import gc
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from polyphase.engine.devices import module_of, peak_bytes, reset_peak, wait_for

__all__ = [
    "NotRunError", "about", "choose", "count", "empty", "kind", "limited", "needs_cuda", "peak_of", "root", "simulated",
    "sleep", "smoke", "time_once", "time_s", "total_gb",
]  # fmt: skip


class NotRunError(Exception):
    """The check has no meaning on this device; the text says why."""


_chosen: dict[str, Any] = {"kind": "cuda", "smoke": False, "sim": None}


def choose(accelerator: str, *, smoke: bool) -> None:
    """Called once per process; doesn't use the device, so that the process can be forked."""
    _chosen.update(kind=accelerator, smoke=smoke)
    if accelerator == "sim":
        from tests.simulated_device import install

        _chosen["sim"] = install()
        _chosen["sim"].set_num_devices(8)


def kind() -> str:
    """``"cuda"``, ``"sim"``, ..."""
    return _chosen["kind"]


def smoke() -> bool:
    """Whether sizes are tiny, and times of no meaning."""
    return _chosen["smoke"]


def root() -> torch.device:
    """The first device."""
    return torch.device(kind(), 0)


def count() -> int:
    """How many devices figures are measured on; of simulated ones, whose figures mean nothing, one."""
    return 1 if simulated() is not None else torch.accelerator.device_count()


def total_gb() -> float:
    """Memory of the first device."""
    return torch.cuda.get_device_properties(0).total_memory / 1e9 if kind() == "cuda" else 0.0


def simulated() -> Any:
    """The simulated device's own counters and limits; None on a real one."""
    return _chosen["sim"]


def needs_cuda(what: str) -> None:
    """Raises NotRunError on any other device."""
    if kind() != "cuda":
        raise NotRunError(f"needs CUDA: {what}")


def sleep(seconds: float) -> None:
    """Has the device's current stream do nothing for a while; the simulated one, which never runs behind, the host."""
    if kind() == "cuda":
        torch.cuda._sleep(int(seconds * 1.5e9))  # torch: a kernel that counts the clock's cycles, some 1.5 GHz
    else:
        time.sleep(seconds)


def empty() -> int:
    """Gives back what is cached; the bytes that are still allocated."""
    gc.collect()
    wait_for(root())
    if kind() == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # torch: some MB that count as allocated and stay
    module_of(root()).empty_cache()
    return int(module_of(root()).memory_allocated())


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """Has the device no more than `num_bytes` for this process."""
    if simulated() is None:
        total = torch.cuda.get_device_properties(root()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), root())
    else:
        simulated().set_limit(num_bytes)
    try:
        yield
    finally:
        if simulated() is None:
            torch.cuda.set_per_process_memory_fraction(1.0, root())
        else:
            simulated().set_limit(0)


def time_s(function: Callable[[], Any], repeats: int = 5) -> float:
    """The least of some times; the first one warms up."""
    return min([time_once(function) for _ in range(repeats + 1)][1:])


def time_once(function: Callable[[], Any]) -> float:
    """From an idle device to an idle device."""
    wait_for(root())
    began = time.perf_counter()
    function()
    wait_for(root())
    return time.perf_counter() - began


def peak_of(function: Callable[[], Any]) -> int:
    """Bytes that `function` has allocated at most, beyond those that were there."""
    wait_for(root())
    reset_peak(root())
    before = module_of(root()).memory_allocated()
    function()
    wait_for(root())
    return (peak_bytes(root()) or before) - before


def about() -> dict[str, Any]:
    """What the report says of the device.

    Raises:
        RuntimeError: there is none.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != kind():
        raise RuntimeError(f"expected the accelerator {kind()!r}, but torch {torch.__version__} sees {found}")
    torch.zeros(1, device=root()).item()
    if simulated() is not None:
        return {"name": "simulated", "devices": 8, "memory_gb": 0.0, "driver": "none"}
    of_device = torch.cuda.get_device_properties(0) if kind() == "cuda" else None
    return {
        "name": getattr(of_device, "name", kind()),
        "devices": torch.accelerator.device_count(),
        "memory_gb": round(getattr(of_device, "total_memory", 0) / 1e9, 1),
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        found = []
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if kind() == "cuda" else "none"
    return f"driver {found[0] if found else 'unknown'}, CUDA {torch.version.cuda}, NCCL {nccl}"
