"""Sums over ranks beside the device's computing: what waits for what."""

import pytest
import torch
import torch.distributed as dist

from polyphase.engine.strategies.layout import _SideSum

from . import in_a_child, install

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute


def _sums() -> None:
    install()
    dist.init_process_group("simccl", rank=0, world_size=1, store=dist.HashStore())
    sums = _SideSum(None, torch.device("sim", 0), None)
    computed = torch.ones(4, device="sim")
    # What depends on nothing that the device still computes waits for none of it, so to use that is a race.
    with pytest.raises(RuntimeError, match=r"race: .*aten::fill_ .*may still be writing"):
        sums.begin(computed.sum, needs_device=False)
    end = sums.begin(lambda: torch.full((), 3.0, device="sim"), needs_device=False)
    assert end().item() == 3
    end = sums.begin(computed.sum, needs_device=True)
    computed.mul_(2)  # beside it
    assert end().item() == 4


def test_a_sum_waits_for_what_it_needs():
    in_a_child(_sums)


def _is_used_too_early() -> None:
    install()
    dist.init_process_group("simccl", rank=0, world_size=1, store=dist.HashStore())
    total = torch.ones((), device="sim")
    end = _SideSum(None, torch.device("sim", 0), None).begin(lambda: total, needs_device=True)
    with pytest.raises(RuntimeError, match=r"race: aten::mul .*may still be writing"):
        total.mul_(2)
    end().mul_(2)


def test_what_uses_a_sum_waits_for_it():
    in_a_child(_is_used_too_early)
