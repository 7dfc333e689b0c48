"""Builds device.cpp and registers it: with torch as the device `sim`, with Lightning as the accelerator `sim`."""

import multiprocessing
import os
import shutil
import sys
import types
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from torch._C._distributed_c10d import Backend as _Backend
from torch.utils.cpp_extension import load

__all__ = ["SimulatedAccelerator", "in_a_child", "install"]

SOURCE = Path(__file__).with_name("device.cpp")
BUILD = Path(__file__).parents[2] / "build" / f"simulated_device-{torch.__version__}"


class SimulatedAccelerator(Accelerator):
    """The devices ``sim:0``, ``sim:1``, ... of a process."""

    def setup_device(self, device: torch.device) -> None:
        torch.sim.set_device(device)  # type: ignore[attr-defined]  # registered by `install`

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return {"allocated_bytes": torch.sim.memory_allocated()}  # type: ignore[attr-defined]

    def teardown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices))) if isinstance(devices, int | str) else list(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("sim", index) for index in SimulatedAccelerator.parse_devices(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return int(torch.sim.device_count())  # type: ignore[attr-defined]

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


@cache
def install() -> Any:
    """Makes the device known to this process, once.

    Returns:
        The compiled module: `counts()`, `set_limit(bytes)`, and so on.
    """
    compiled = _compiled()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module(compiled))  # torch: how a backend names its module
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

    def backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        # Keys of its own: the group may have gloo for tensors of the CPU as well.
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("simccl", store), rank, size, timeout)
        # torch: what it asks of NCCL's, to split groups, and copies; the base class does not have it in Python.
        _Backend.options = property(lambda _: gloo.options)
        _Backend.perform_nocolor_split = lambda *_: None
        type(gloo.options).__deepcopy__ = lambda options, _: options
        return compiled.over_gloo(gloo)

    dist.Backend.register_backend("simccl", backend, devices=["sim"])
    # As "cuda" is: a group over gloo made beside one that is bound to a device has a backend for that device.
    dist.Backend.backend_capability[dist.Backend.GLOO].append("sim")
    AcceleratorRegistry.register("sim", SimulatedAccelerator, description="a simulated device", override=True)
    return compiled


def _compiled() -> Any:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        raise RuntimeError("the simulated device is compiled, but there is no c++ here: install g++, or set CXX.")
    BUILD.mkdir(parents=True, exist_ok=True)
    path = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), path))  # torch looks for ninja there
    try:
        # Unoptimised: what computes is torch's, and compiling takes longer than all that the tests do with it.
        return load("simulated_device", [str(SOURCE)], extra_cflags=["-O0"], build_directory=str(BUILD))
    finally:
        os.environ["PATH"] = path


def in_a_child(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What `function` returns in a fork of this process.

    As with CUDA, a process that has run a backward on the device can't be forked any more.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *arguments, **options).result()


def _device_module(compiled: Any) -> types.ModuleType:
    """`torch.sim`, with what `torch.cuda` has and is asked for of a device."""
    module: Any = types.ModuleType("torch.sim")

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return int(compiled.current_device()) if index is None else index

    def generator(device: Any = None) -> torch.Generator:
        return compiled.default_generator(index_of(device))

    class device:  # noqa: N801  # as torch.cuda.device
        def __init__(self, device: Any) -> None:
            self.index, self.former = index_of(device), -1

        def __enter__(self) -> None:
            self.former = compiled.current_device()
            compiled.set_device(self.index)

        def __exit__(self, *_: object) -> None:
            compiled.set_device(self.former)

    module.device = device
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = compiled.device_count
    module.current_device = compiled.current_device
    module.set_device = lambda device: compiled.set_device(index_of(device))
    module.synchronize = lambda device=None: compiled.synchronize()
    module.manual_seed = lambda seed: generator().manual_seed(seed)
    module.manual_seed_all = lambda seed: [generator(i).manual_seed(seed) for i in range(compiled.device_count())]
    module.get_rng_state = lambda device="sim": generator(device).get_state()
    module.set_rng_state = lambda state, device="sim": generator(device).set_state(state)
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.memory_allocated = lambda device=None: compiled.memory()[0]
    module.max_memory_allocated = lambda device=None: compiled.memory()[1]
    module.memory_reserved = module.memory_allocated
    module.max_memory_reserved = module.max_memory_allocated
    module.mem_get_info = lambda device=None: _free_and_total(compiled)
    module.reset_peak_memory_stats = lambda device=None: compiled.reset_peak()
    module.empty_cache = lambda: None
    module.Stream, module.Event = torch.Stream, torch.Event
    module.current_stream = lambda device=None: torch.accelerator.current_stream(index_of(device))
    kind = torch.device("sim").type  # by its number a stream is found again; another call would make a new one
    module.default_stream = lambda device=None: torch.Stream(
        stream_id=0, device_index=index_of(device), device_type=torch.Stream(device=kind).device_type
    )
    module.stream = lambda stream: stream
    return module


def _free_and_total(compiled: Any) -> tuple[int, int]:
    """Bytes; without a limit those of a large device."""
    total = int(compiled.limit()) or 2**36
    return total - compiled.memory()[0], total
