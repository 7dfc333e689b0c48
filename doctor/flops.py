"""Counts the floating-point operations of one training step, and gives the peak rate of the device."""

import contextlib
import dataclasses
import sys
import time
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.module_tracker import ModuleTracker

from polyphase.engine._compat.torch import tree_leaves
from polyphase.engine.devices import module_of

__all__ = [
    "PEAKS",
    "StepFlops",
    "device_name",
    "dtype_of",
    "matmul_rate",
    "operator_s",
    "peak_flops_per_s",
    "peak_of",
]

_ATEN = torch.ops.aten
# A product of this size takes some milliseconds of one core, so that the fastest of several fits into the time below.
_SIZE = 512
_MEASURING_S = 0.03
_NUM_OPERATORS, _REPEATS = 64, 5
"""Number of forward operators in the measurement of a minimal operator, and of its repetitions."""


def _attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any
) -> int:
    return sdpa_backward_flop_count(gradient, query, key, value)


_CPU_ATTENTION = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: _attention,
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
"""Formulas for the CPU's attention kernels; torch has those of other devices only."""


class StepFlops(FlopCounterMode):
    """Counts the operations of this rank under any strategy, by torch's rules (attention counts as not causal).

    Sharded operations count by the rank's shard. Operations that activation checkpointing repeats count separately.

    Attributes:
        model: operations of forward and backward.
        recomputed: operations of forward that were repeated in backward.
        is_known: whether all operations could be counted.
        logits_mb: the largest output of a `log_softmax`, as the loss of a classifier or a language model makes it.
        num_operators: operators of forward and backward; None if code is compiled, which runs other operators.
    """

    def __init__(self) -> None:
        super().__init__(display=False, custom_mapping=_CPU_ATTENTION)
        self.model = self.recomputed = 0
        self.is_known = True
        self.logits_mb = 0.0
        self.num_operators: int | None = 0
        self._tracker = ModuleTracker()  # only for `is_bw`; its hooks on all modules are not needed
        self.mod_tracker: Any = contextlib.nullcontext()
        self._under_way = contextlib.ExitStack()

    def begin(self) -> None:
        """Counts until `close`. Compiled code runs uncompiled until then, as its operations can't be counted."""
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes seconds
            # The dispatch mode alone also disables compilation, but dynamo would then never compile that code.
            self._under_way.enter_context(torch.compiler.set_stance("force_eager"))
            if sys.modules["torch._dynamo"].utils.counters["stats"]["unique_graphs"]:
                self.num_operators = None
        self._under_way.enter_context(self)

    def close(self) -> None:
        """Stops counting."""
        self._under_way.close()

    # torch: the mode calls this after each operator.
    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        if self.num_operators is not None:
            self.num_operators += 1
        if func_packet is _ATEN._log_softmax:
            self.logits_mb = max(self.logits_mb, out.nbytes / _num_shards(out, args) / 1e6)
        count = self.flop_registry.get(func_packet)
        if count is None:
            return out
        try:
            flops = count(*args, **kwargs, out_val=out) // _num_shards(out, args)
        except Exception as error:  # an unsuitable formula must not end a run
            if self.is_known:
                rank_zero_warn(f"Doctor can't count the operations of {func_packet}: {error!r}.")
            self.is_known = False
            return out
        if self._tracker.is_bw and torch.is_grad_enabled():  # recomputation: backward itself runs without gradients
            self.recomputed += flops
        else:
            self.model += flops
        return out


def _num_shards(out: Any, args: Any) -> int:
    """Returns the number of ranks that share an operator."""
    tensors = [leaf for leaf in tree_leaves((out, args)) if isinstance(leaf, DTensor)]
    if not tensors:
        return 1
    mesh, num_shards = tensors[0].device_mesh, 1
    for axis in range(mesh.ndim):
        if any(not tensor.placements[axis].is_replicate() for tensor in tensors if tensor.device_mesh is mesh):
            num_shards *= mesh.size(axis)
    return num_shards


def dtype_of(trainer: Any) -> str | None:
    """Returns the dtype of a trainer's matrix products by its precision: fp32, tf32, bf16 or fp16; None for others."""
    precision = str(trainer.precision)
    if precision.startswith("32"):
        is_tensor_core = (
            trainer.strategy.root_device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
        )
        return "tf32" if is_tensor_core else "fp32"
    # float8's rate is given in parts of bfloat16's, as others give it.
    return {"bf16": "bf16", "floa": "bf16", "16-m": "fp16", "16-t": "fp16"}.get(precision[:4])


def device_name(device: torch.device) -> str | None:
    """Returns the vendor's name of a device; None if torch does not know it."""
    get = getattr(module_of(device), "get_device_name", None)
    return None if get is None else str(get(device))


def peak_flops_per_s(device: torch.device, dtype: str | None) -> float | None:
    """Returns the peak rate of `device` by its data sheet, or as measured on a CPU; None if unknown."""
    if dtype is None:
        return None
    if device.type == "cpu":
        return matmul_rate({"fp16": torch.float16, "bf16": torch.bfloat16}.get(dtype, torch.float32))
    name = device_name(device)
    return None if name is None else peak_of(name, dtype)


def operator_s(device: torch.device) -> float:
    """Measures the host's time for a minimal operator, in forward and backward.

    It is the mean over 64 products of a number and their gradients, the fastest of five runs: a few milliseconds,
    without a wait for the device. A step takes at least this time for each of its operators, however small they are.
    """
    number = torch.ones(1, device=device, requires_grad=True)

    def chain() -> None:
        product = number
        for _ in range(_NUM_OPERATORS):
            product = product * number
        torch.autograd.grad(product, number)

    with torch.enable_grad(), StepFlops() as counted:
        chain()
    best_s = float("inf")
    for _ in range(_REPEATS):
        began = time.perf_counter()
        with torch.enable_grad():
            chain()
        best_s = min(best_s, time.perf_counter() - began)
    return best_s / max(counted.num_operators or 0, 1)


def matmul_rate(dtype: torch.dtype) -> float:
    """Measures the FLOP/s of a square matrix product on this CPU with torch's threads; the fastest within 30 ms."""
    matrix = torch.ones(_SIZE, _SIZE, dtype=dtype)
    ends_at, best_s = time.perf_counter() + _MEASURING_S, float("inf")
    while True:
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        now = time.perf_counter()
        best_s = min(best_s, now - began)
        if now > ends_at:
            return 2 * _SIZE**3 / best_s


# --- peak rates of devices, dense (without structured sparsity), per device, in TFLOP/s; from the vendors' data sheets
# NVIDIA's sheets have rates with sparsity, for tensor cores: half of them is here. AMD's have both. One die of an
# MI250X is a device of its own; its float32 rate is that of matrix products. A part of a device (MIG) has none there.


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Peak:
    """A row of the table; None: the device does not support the number format."""

    name: str
    """A part of torch's name for the device, such as ``"H100 PCIe"``."""
    fp32: float
    fp16: float
    bf16: float | None
    tf32: float | None = None
    """float32 matrix products on tensor cores, if `torch.set_float32_matmul_precision` allows it."""
    source: str


_H100 = "NVIDIA H100 Tensor Core GPU data sheet"
_H200 = "NVIDIA H200 Tensor Core GPU data sheet"
_BLACKWELL = "NVIDIA Blackwell data sheet"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet"
_V100 = "NVIDIA V100 Tensor Core GPU data sheet"

# The first row whose name is part of the device's name is used, so specific names come first.
PEAKS = (
    _Peak(name="H100 PCIe", fp32=51.0, tf32=378.0, fp16=756.0, bf16=756.0, source=_H100),
    _Peak(name="H100 NVL", fp32=60.0, tf32=417.5, fp16=835.5, bf16=835.5, source=_H100),
    _Peak(name="H100", fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5, source=f"{_H100} (SXM)"),
    _Peak(name="H200 NVL", fp32=60.0, tf32=417.5, fp16=835.5, bf16=835.5, source=_H200),
    _Peak(name="H200", fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5, source=f"{_H200} (SXM)"),
    _Peak(name="GH200", fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5, source="NVIDIA GH200 Superchip data sheet"),
    _Peak(name="GB200", fp32=80.0, tf32=1250.0, fp16=2500.0, bf16=2500.0, source=f"{_BLACKWELL} (GB200 NVL72)"),
    _Peak(name="B200", fp32=75.0, tf32=1100.0, fp16=2250.0, bf16=2250.0, source=f"{_BLACKWELL} (HGX B200)"),
    _Peak(name="A100", fp32=19.5, tf32=156.0, fp16=312.0, bf16=312.0, source=_A100),
    _Peak(name="A30", fp32=10.3, tf32=82.0, fp16=165.0, bf16=165.0, source="NVIDIA A30 data sheet"),
    _Peak(name="A10", fp32=31.2, tf32=62.5, fp16=125.0, bf16=125.0, source="NVIDIA A10 data sheet"),
    _Peak(name="L40S", fp32=91.6, tf32=183.0, fp16=362.0, bf16=362.0, source="NVIDIA L40S data sheet"),
    _Peak(name="L40", fp32=90.5, tf32=90.5, fp16=181.0, bf16=181.0, source="NVIDIA L40 data sheet"),
    _Peak(name="L4", fp32=30.3, tf32=60.0, fp16=121.0, bf16=121.0, source="NVIDIA L4 data sheet"),
    _Peak(name="T4", fp32=8.1, fp16=65.0, bf16=None, source="NVIDIA T4 data sheet"),
    _Peak(name="V100-PCIE", fp32=14.0, fp16=112.0, bf16=None, source=f"{_V100} (PCIe)"),
    _Peak(name="V100", fp32=15.7, fp16=125.0, bf16=None, source=f"{_V100} (SXM2)"),
    _Peak(name="MI300X", fp32=163.4, fp16=1307.4, bf16=1307.4, source="AMD Instinct MI300X data sheet"),
    _Peak(name="MI325X", fp32=163.4, fp16=1307.4, bf16=1307.4, source="AMD Instinct MI325X data sheet"),
    _Peak(name="MI250X", fp32=47.9, fp16=191.5, bf16=191.5, source="AMD Instinct MI250X data sheet, one of two dies"),
)  # fmt: skip


def peak_of(device_name: str, dtype: str) -> float | None:
    """Returns the FLOP/s of a device in ``"fp32"``, ``"tf32"``, ``"fp16"`` or ``"bf16"``; None if unknown.

    ``"NVIDIA H100 80GB HBM3"``, ``"bf16"`` -> 989.5e12
    """
    words = device_name.replace("-", " ").split()
    if "MIG" in words:  # "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
        return None
    for peak in PEAKS:
        name = peak.name.replace("-", " ").split()
        if any(words[start : start + len(name)] == name for start in range(len(words))):
            rate = getattr(peak, dtype)
            return None if rate is None else 1e12 * rate
    return None
