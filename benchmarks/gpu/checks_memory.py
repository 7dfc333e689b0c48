"""Checks of what a step holds: of one rank of several, in a fake process group, and where memory is short."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import parallelize_module

# torch: its only process group whose collectives do nothing.
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyphase.engine.devices import peak_bytes, reset_peak, wait_for
from polyphase.engine.strategies.fsdp.rounded_gather import gather_rounded
from polyphase.engine.strategies.tensor.plan import make_plan
from polyphase.engine.strategies.units import shard_units
from polyphase.models import ByteGPT

from . import device
from .child import elsewhere
from .subjects import MLP, close, rows, trained


def _mesh(size: int, axis: str) -> Any:
    """Makes the mesh of rank 0 of a job that has no other ranks: times and memory are right, numbers are not."""
    if device.kind() not in dist.Backend.backend_capability["fake"]:
        dist.Backend.backend_capability["fake"].append(device.kind())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return init_device_mesh(device.kind(), (size,), mesh_dim_names=(axis,))


def _gpt() -> tuple[ByteGPT, torch.Tensor]:
    shape = {"num_layers": 24, "num_heads": 16, "dim": 2048, "context_length": 1024}
    if device.smoke():
        shape = {"num_layers": 4, "num_heads": 4, "dim": 64, "context_length": 32}
    with device.root():
        return ByteGPT(**shape), torch.randint(256, (2, shape["context_length"] + 1))


def _step(module: ByteGPT, batch: torch.Tensor, lower: bool) -> None:
    with torch.autocast(device.kind(), torch.bfloat16, enabled=lower):
        loss = module._loss(batch)
    loss.backward()
    module.zero_grad()


def mixed_gathers() -> str:
    mesh, seen, peaks = _mesh(8, "shard"), [], []
    for dtype in (None, torch.bfloat16):
        module, batch = _gpt()
        for part in (*shard_units(module), module):
            fully_shard(part, mesh=mesh, reshard_after_forward=part is not module)
        gather_rounded(module, dtype)
        step_s = device.time_s(lambda module=module, batch=batch: _step(module, batch, True), 2)
        peaks.append(device.peak_of(lambda module=module, batch=batch: _step(module, batch, True)))
        seen.append(f"{'bf16' if dtype else 'fp32'} gathers {peaks[-1] / 1e6:.1f} MB, {1e3 * step_s:.1f} ms")
        del module
        device.empty()
    dist.destroy_process_group()
    assert peaks[1] < peaks[0], f"no less memory: {seen}"
    return "; ".join(seen)


def tensor_parallel() -> str:
    mesh = _mesh(4, "tp")
    module, batch = _gpt()
    whole = sum(p.numel() for p in module.net.blocks.parameters())
    for name, style in reversed(make_plan(module, 4).styles.items()):
        parallelize_module(module.get_submodule(name), mesh, style, src_data_rank=None)
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in module.net.blocks.parameters())
    assert held / whole < 0.27, f"a rank of four has {held / whole:.0%} of the blocks"
    with implicit_replication():
        eager = _host_s(module, batch)
        seen = f"{held / whole:.1%} of the blocks; host {1e3 * eager:.1f} ms a step"
        if device.kind() == "cuda":
            module.compile()
            seen += f", compiled {1e3 * _host_s(module, batch):.1f} ms"
    dist.destroy_process_group()
    return seen


def _host_s(module: ByteGPT, batch: torch.Tensor) -> float:
    """Seconds until the host has launched a step."""
    for _ in range(3):
        _step(module, batch, False)
    wait_for(device.root())
    began = time.perf_counter()
    _step(module, batch, False)
    return time.perf_counter() - began


# --- short of memory


def halved() -> str:
    seen = []
    for name, variables in (("plain", {}), ("expandable", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})):
        found = elsewhere("benchmarks.gpu.checks_memory:halve_once", limit_s=28, environment=variables)
        assert found.status == "ok", f"{name} segments: {found.reason}\n{found.output}"
        seen.append(f"{name} segments: {found.value}")
    return "; ".join(seen)


def halve_once() -> str:
    size = 512 if device.smoke() else 2**16
    batches = rows(4, size)
    flags = {"max_steps": 4, "global_batch_size": size}
    before = device.empty()
    reset_peak(device.root())
    expected = trained(MLP, batches=batches, **flags)
    peak = peak_bytes(device.root()) or 0
    baseline = device.empty()
    reset_peak(device.root())
    with device.limited(int(0.8 * peak)):
        found = trained(MLP, batches=batches, micro_batch_size="auto", **flags)
    short = peak_bytes(device.root()) or 0
    after = device.empty()
    assert short < peak, f"{short} bytes, without a limit {peak}: nothing was short"
    assert after <= baseline + 2**20, f"{after - baseline} bytes are left behind, beside {baseline - before} before"
    return f"{peak / 1e6:.1f} MB, halved {short / 1e6:.1f} MB, " + close("weights", found, expected, 1e-4)
