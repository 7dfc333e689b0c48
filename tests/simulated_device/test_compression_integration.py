"""Comm hooks work on a stream of their own there, beside backward: no race, no wait, and the numbers of the CPU."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from polyphase.engine import Engine
from polyphase.engine.compression import AllReduceHook, Auto, Bucket, CountingGroup, ParamSlice, forecast
from polyphase.engine.compression.base import _CommWorker
from polyphase.engine.compression.int8 import Int8, _Noise, passes_of
from polyphase.engine.compression.powersgd import _orthonormal
from tests.engine.parity import FEW_STEPS, QUIET, TOLERANCE, build, largest_difference, loader, sgd
from tests.pairs import nightly

from . import in_a_child, install

pytestmark = pytest.mark.timeout(180, func_only=True)  # to compile the device takes a minute


class Operators(TorchDispatchMode):
    """Notes what is called on the device and launches something."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.promote_types.default:
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _difference(
    flag: str, devices: int, compression: str, accumulate: int, subject: str = "mlp", num_steps: int = FEW_STEPS
) -> float:
    """Of the weights of runs on the device and on the CPU."""
    weights = []
    for accelerator in ("cpu", "sim"):
        module = build(subject, sgd)
        engine = Engine(
            strategy=flag, accelerator=accelerator, devices=devices, compression=compression, max_epochs=1,
            accumulate_grad_batches=accumulate, gradient_clip_val=0.05, **QUIET,
        )  # fmt: skip
        engine.fit(module, loader(subject, accumulate, engine.data_size, num_steps))
        assert engine.global_step == num_steps
        weights.append(module.state_dict())
    return largest_difference(*weights)


SMALL_BUCKETS = ("ddp_fork:bucket_cap_mb=0.004", 2, 1)  # several, of which DDP makes others after its first step
DDP, FSDP, HSDP = ("ddp_fork", 2, 3), ("fsdp_fork", 2, 1), ("hsdp_fork:replicate=2,shard=2", 4, 3)


@pytest.mark.parametrize(
    ("flag", "devices", "accumulate", "compression"),
    # Each hook, and each way in which gradients come to one.
    [(*DDP, flag) for flag in ("bf16", "powersgd:2,start=2", "sign")]
    + [(*SMALL_BUCKETS, flag) for flag in ("int8:feedback=true", "topk:0.1")]
    + [(*FSDP, "int8")]
    + nightly(
        *((*DDP, flag) for flag in ("int8", "int8:feedback=true", "topk:0.1+bf16")),
        *((*SMALL_BUCKETS, flag) for flag in ("bf16", "powersgd:2,start=2", "sign")),
        (*FSDP, "bf16"),
        (*HSDP, "bf16"),  # a test below has it with a communication in each micro-batch
        (*HSDP, "powersgd:2,start=2"),
    ),
)
def test_a_comm_hook_computes_what_it_does_on_the_cpu(flag, devices, accumulate, compression):
    assert in_a_child(_difference, flag, devices, compression, accumulate) <= TOLERANCE


def _works_on_two_buckets() -> None:
    install()
    first, second = torch.ones(4, device="sim"), torch.ones(4, device="sim")
    background = _CommWorker(torch.device("sim", 0))
    background.submit(lambda: first.mul_(2), 0)
    # What it does may overlap with the first: to work on the same is a race.
    with pytest.raises(RuntimeError, match=r"race: aten::mul .*may still be writing"):
        background.submit(lambda: first.mul_(2), 1)
    background.submit(lambda: second.mul_(3), 1)
    background.submit(lambda: first.mul_(2), 2)
    background.wait()
    assert (first + second).tolist() == [7] * 4


def test_a_bucket_is_compressed_while_the_one_before_is_sent():
    in_a_child(_works_on_two_buckets)


def test_a_unit_does_not_write_over_what_replicas_still_average():
    # Gradients that are there already are added to, and what was averaged is let go of at once.
    flag, subject = "hsdp_fork:replicate=2,shard=2,no_sync=false", "gpt of four blocks, tied"
    assert in_a_child(_difference, flag, 4, "bf16", 3, subject, num_steps=2) <= TOLERANCE


def test_a_collective_without_memory_for_it_is_not_counted():
    in_a_child(_runs_out)


def _runs_out() -> None:
    # A rank that repeats its step skips as many collectives as were counted: one that never began is none of them.
    device = install()
    dist.init_process_group("simccl", rank=0, world_size=1, store=dist.HashStore())
    wire, payload = CountingGroup(), torch.zeros(1, 1000, device="sim")
    device.set_limit(torch.sim.memory_allocated() + 500)
    for collective in (wire.all_gather, wire.all_to_all):
        with pytest.raises(torch.OutOfMemoryError):
            collective(payload)
    assert (wire.num_calls, sum(wire.sent.values())) == (0, 0)


def test_int8_of_a_large_parameter_needs_memory_for_a_part_of_it_only():
    in_a_child(_quantizes)


def _quantizes() -> None:
    numel, block = 2**24, 256
    values = torch.randn(2, numel // 2, device="sim", generator=torch.Generator("sim").manual_seed(0))
    parts = values[:, : numel // 4].contiguous(), values[:, numel // 4 :].contiguous()
    indices, passes = torch.arange(numel // 2 // block, dtype=torch.int32, device="sim"), passes_of(block)
    packed = torch.empty(2, numel // 2 // block * (block + 4), dtype=torch.uint8, device="sim")
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    passes.quantize(values, _Noise(indices, 1), packed, keeps_rest=True)
    assert torch.sim.max_memory_allocated() - before < values.nbytes
    # And the numbers are those of its parts.
    for number, part in enumerate(parts):
        some = torch.empty(2, packed.size(1) // 2, dtype=torch.uint8, device="sim")
        place = slice(number * numel // 4, (number + 1) * numel // 4)
        passes.quantize(part, _Noise(indices.chunk(2)[number], 1), some, keeps_rest=True)
        assert torch.equal(part, values[:, place])
        assert torch.equal(some[:, : numel // 4], packed[:, place])


def test_int8_needs_less_than_two_buckets_of_memory():
    in_a_child(_averages_in_place)


def _averages_in_place() -> None:
    dist.init_process_group("simccl", rank=0, world_size=1, store=dist.HashStore())
    hook, gradients = Int8(), torch.randn(2**24, device="sim")
    wire, bucket = CountingGroup(), Bucket(0, gradients, (ParamSlice("a", (2**12, 2**12)),))
    hook.average(bucket, wire)
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    hook.average(bucket, wire)
    assert torch.sim.max_memory_allocated() - before < 2 * gradients.nbytes


@pytest.mark.parametrize(
    ("flag", "compression", "size_mb"),
    [("ddp", "int8", 200), ("ddp:bucket_cap_mb=3", "int8", 3), ("ddp", "auto", 25), ("ddp", "none", 25)],
)
def test_buckets_of_a_device_are_larger_with_a_compression(flag, compression, size_mb):
    assert in_a_child(_bucket_mb, flag, compression) == size_mb


def _bucket_mb(flag: str, compression: str) -> float:
    seen = []

    class Sees(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            seen.append(trainer.strategy.model.bucket_bytes_cap / 2**20)

    engine = Engine(
        strategy=flag, accelerator="sim", devices=1, compression=compression, max_steps=1, callbacks=[Sees()], **QUIET
    )
    engine.fit(build("mlp", sgd), loader("mlp", 1, 1, 1))
    return seen[0]


def test_powersgd_computes_with_all_matrices_of_a_shape_at_once():
    assert in_a_child(_orthonormalise) == []


def _orthonormalise() -> list[str]:
    install()
    with Operators() as operators:
        _orthonormal(torch.randn(32, 4, 1024, device="sim"))
    # CUDA's QR takes one matrix after the other.
    return [name for name in operators.names if "linalg_" in name and "norm" not in name]


def test_whether_numbers_are_finite_takes_eight_kernels_a_bucket():
    local = ["_foreach_norm.Scalar", "stack", "lt.Scalar", "masked_fill_.Scalar", "maximum.out"]
    averaged = ["sum", "abs_", "maximum.out"]
    assert in_a_child(_checks_numbers) == Counter(f"aten::{name}" for name in local + averaged)


def _checks_numbers() -> Counter[str]:
    install()
    dist.init_process_group("simccl", rank=0, world_size=1, store=dist.HashStore())
    module = nn.Linear(64, 64, device="sim")
    bucket = Bucket(0, torch.ones(65 * 64, device="sim"), (ParamSlice("weight", (64, 64)), ParamSlice("bias", (64,))))
    names = []
    for scaler in (None, torch.amp.GradScaler("sim")):  # with a loss scale, infinities are in order
        hook = AllReduceHook()
        hook.begin(module, CountingGroup(), scaler)
        hook.run(bucket)
        with Operators() as operators:
            hook.run(bucket)
        names.append(Counter(name for name in operators.names if name.startswith("aten::")))
    checked, unchecked = names
    return checked - unchecked


def test_auto_chooses_in_the_memory_of_a_few_buckets():
    in_a_child(_chooses)


def _chooses() -> None:
    install()
    dist.init_process_group("simccl", rank=0, world_size=1, store=dist.HashStore())
    forecast._LARGEST_BYTES = 2**16
    module, side = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(8)).to("sim"), 512 * 512
    buckets = [
        Bucket(index, torch.zeros(side, device="sim"), (ParamSlice(name, (512, 512)),))
        for index, (name, _) in enumerate(module.named_parameters())
    ]
    hook = Auto(steps=1)
    hook.begin(module, CountingGroup())
    torch.sim.reset_peak_memory_stats()
    before = torch.sim.memory_allocated()
    while hook.chosen is None:
        for bucket in buckets:
            hook.run(bucket)
        hook.on_step_end()
    assert len(hook.forecasts) == len(hook.candidates)
    # Residuals, drafts and copies of one bucket at a time: of all of them it would be three times the gradients.
    assert torch.sim.max_memory_allocated() - before < 8 * 4 * side
