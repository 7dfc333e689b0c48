"""What the simulated device refuses and counts: what CUDA refuses, and what costs time there."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from . import in_a_child

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - number for name, number in before.items() if after[name] != number}


def test_it_computes_what_the_cpu_does():
    in_a_child(_trains_alike)


def _trains_alike() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU()), torch.randn(3, 4)
    expected = layer(x).square().mean()
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    layer.to("sim")
    found = layer(x.to("sim")).square().mean()
    found.backward()
    assert found.device == torch.device("sim", 0)
    torch.testing.assert_close(
        found.cpu(), expected
    )  # of a linear layer the CPU has a faster way, which rounds otherwise
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), gradient)


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_tensors_of_two_devices_do_not_mix(other):
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="sim") + torch.ones(2, device=other)


def test_numbers_of_the_cpu_do():
    assert (torch.ones(2, device="sim") * torch.tensor(2.0)).tolist() == [2, 2]


def test_copies_and_reads_are_counted(device):
    source = torch.ones(3)
    before = device.counts()
    moved = source.to("sim")
    assert difference(before, device.counts()) == {"to_device": 1, "to_device_pageable": 1, "to_device_in_line": 1}
    pinned, before = source.pin_memory(), device.counts()
    with torch.Stream("sim"):
        pinned.to("sim", non_blocking=True)
    assert difference(before, device.counts()) == {"to_device": 1}
    before = device.counts()
    moved.sum().item()
    moved.cpu()
    found = difference(before, device.counts())
    assert (found["reads"], found["to_host"]) == (1, 1)


def test_memory_has_a_limit(device):
    before = torch.sim.memory_allocated()
    kept = torch.empty(1000, dtype=torch.uint8, device="sim")
    assert torch.sim.memory_allocated() == before + 1000
    device.set_limit(before + 1500)
    try:
        with pytest.raises(torch.OutOfMemoryError, match="sim out of memory"):
            torch.empty(1000, dtype=torch.uint8, device="sim")
    finally:
        device.set_limit(0)
    del kept
    assert torch.sim.memory_allocated() == before


# --- streams


@pytest.fixture(autouse=True)
def ordered():
    """What a test has left under way is waited for."""
    yield
    torch.sim.synchronize()


def test_work_that_may_overlap_is_an_error():
    x = torch.ones(4, device="sim")
    with (
        torch.Stream("sim"),
        pytest.raises(RuntimeError, match=r"race: aten::mul .*aten::fill_ .*may still be writing"),
    ):
        x.mul_(2)


def test_work_that_writes_what_is_still_read_is_an_error():
    x, side = torch.ones(4, device="sim"), torch.Stream("sim")
    side.wait_stream(torch.sim.current_stream())
    with side:
        x.sum()
    with pytest.raises(RuntimeError, match=r"race: aten::add .*aten::sum .*may still be reading"):
        x.add_(1)


@pytest.mark.parametrize("wait", ["stream", "event", "host", "read"])
def test_work_that_is_waited_for_is_none(wait):
    x, side, main = torch.ones(4, device="sim"), torch.Stream("sim"), torch.sim.current_stream()
    if wait == "stream":
        side.wait_stream(main)
    elif wait == "event":
        side.wait_event(main.record_event())
    elif wait == "host":
        main.synchronize()
    else:
        x.sum().item()
    with side:
        x.mul_(2)
    main.wait_stream(side)
    assert x.sum().item() == 8


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_another_stream_still_uses_is_handed_out_again(is_recorded):
    """Unless it is told so, by record_stream."""
    x, side = torch.ones(5000, device="sim"), torch.Stream("sim")
    side.wait_stream(torch.sim.current_stream())
    with side:
        x.sum()
    if is_recorded:
        x.record_stream(side)
    del x
    reused = torch.empty(5000, device="sim")
    if is_recorded:
        reused.fill_(0)
    else:
        with pytest.raises(RuntimeError, match=r"race: aten::fill_ .*aten::sum .*may still be reading"):
            reused.fill_(0)


def test_a_collective_that_is_not_waited_for_is_a_race():
    in_a_child(_reduces)


def _reduces() -> None:
    dist.init_process_group("simccl", rank=0, world_size=1, store=dist.HashStore())
    x = torch.ones(4, device="sim")
    work = dist.all_reduce(x, async_op=True)
    with pytest.raises(RuntimeError, match=r"race: aten::mul .*allreduce .*may still be writing"):
        x.mul_(2)
    work.wait()
    x.mul_(2)
    assert dist.all_reduce(x, async_op=True).get_future().wait()[0].tolist() == [2, 2, 2, 2]
    x.mul_(2)  # to wait for its future is enough
