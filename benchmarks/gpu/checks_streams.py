"""Checks that work on streams of its own is ordered: where memory is used again, and where replicas average."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from polyphase.engine.compression import Bucket, CommHook, CountingGroup, ParamSlice
from polyphase.engine.devices import module_of
from polyphase.engine.strategies.fsdp.comm import ReplicaAverage

from . import device
from .child import elsewhere
from .subjects import MLP, STEPS, by_hand, largest_difference, seeded, trained

HOOKS = ("none", "bf16", "int8", "powersgd:4,start=0", "topk:0.1,start=0", "sign:start=0", "auto")


def allocator() -> str:
    """A caching allocator hands memory out again while another stream may still use it; without one it can't."""
    names = {"with": {}, "without": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}}
    with tempfile.TemporaryDirectory() as folder:
        for name, variables in names.items():
            found = elsewhere(
                "benchmarks.gpu.checks_streams:train_each", str(Path(folder) / name), limit_s=55,
                environment=variables,
            )  # fmt: skip
            assert found.status == "ok", f"{name} caching: {found.reason}\n{found.output}"
        cached, uncached = (torch.load(Path(folder) / name) for name in names)
    seen, hand = [], by_hand(MLP)
    assert largest_difference(cached["none"], hand) <= 1e-5, "ddp without a hook differs from the loop by hand"
    for hook in HOOKS:
        difference = largest_difference(cached[hook], uncached[hook])
        # What `auto` chooses goes by times; a weight moves by about 1e-3 in each step.
        limit = 2e-3 * STEPS if hook == "auto" else 0
        assert difference <= limit, f"{hook}: weights differ by {difference:.2e} without a caching allocator"
        moved = largest_difference(cached[hook], {name: t.cpu() for name, t in seeded(MLP).state_dict().items()})
        assert 1e-3 < moved < 4e-3 * STEPS, f"{hook}: a weight has moved by {moved:.2e} in {STEPS} steps"
        seen.append(f"{hook} {difference:.1e}")
    return ", ".join(seen)


def train_each(path: str) -> None:
    torch.save({hook: trained(MLP, "ddp", compression=hook) for hook in HOOKS}, path)


class _Slow(CommHook):
    """An average over one replica, after a while."""

    name, description = "slow", "for a check"

    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        device.sleep(0.2)
        bucket.gradients.mul_(2)
        self.kept = bucket.gradients.clone()


def replicas() -> str:
    """FSDP2's order of events: shards made on one stream, averaged on another, let go of, and their memory reused."""
    module = module_of(device.root())
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, device_id=device.root())
    hook = _Slow()
    hook.begin(seeded(MLP), CountingGroup())
    n = 2**12 if device.smoke() else 2**24
    average = ReplicaAverage(hook, 0, (ParamSlice("weight", (n,)),))
    reducing, averaging = (module.Stream(device=device.root()) for _ in range(2))
    reducing.wait_stream(module.current_stream(device.root()))
    with module.stream(reducing):
        shards = torch.ones(n, device=device.root())
    averaging.wait_stream(reducing)
    with module.stream(averaging):
        average(shards)
    address = shards.data_ptr()
    del shards
    with module.stream(reducing):
        others = [torch.full((n,), 7.0, device=device.root()) for _ in range(4)]
    module.current_stream(device.root()).wait_stream(averaging)
    module.current_stream(device.root()).wait_stream(reducing)
    assert bool((hook.kept == 2).all()), "the next unit has written over shards that replicas were still averaging"
    assert all(bool((other == 7).all()) for other in others), "the average was written over the next unit"
    dist.destroy_process_group()
    reused = sum(other.data_ptr() == address for other in others)
    return f"{n} values; memory reused {reused} times while they were averaged"
