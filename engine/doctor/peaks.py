"""Peak rates of devices, dense (without structured sparsity), per device, in TFLOP/s; from the vendors' data sheets.

NVIDIA's sheets have rates with sparsity, for tensor cores: half of them is here. AMD's have both. One die of an MI250X
is a device of its own; its float32 rate is that of matrix products. A part of a device (MIG) has none there.
"""

import dataclasses

__all__ = ["PEAKS", "Peak", "peak_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
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
    Peak(name="H100 PCIe", fp32=51.0, tf32=378.0, fp16=756.0, bf16=756.0, source=_H100),
    Peak(name="H100 NVL", fp32=60.0, tf32=417.5, fp16=835.5, bf16=835.5, source=_H100),
    Peak(name="H100", fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5, source=f"{_H100} (SXM)"),
    Peak(name="H200 NVL", fp32=60.0, tf32=417.5, fp16=835.5, bf16=835.5, source=_H200),
    Peak(name="H200", fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5, source=f"{_H200} (SXM)"),
    Peak(name="GH200", fp32=67.0, tf32=494.5, fp16=989.5, bf16=989.5, source="NVIDIA GH200 Superchip data sheet"),
    Peak(name="GB200", fp32=80.0, tf32=1250.0, fp16=2500.0, bf16=2500.0, source=f"{_BLACKWELL} (GB200 NVL72)"),
    Peak(name="B200", fp32=75.0, tf32=1100.0, fp16=2250.0, bf16=2250.0, source=f"{_BLACKWELL} (HGX B200)"),
    Peak(name="A100", fp32=19.5, tf32=156.0, fp16=312.0, bf16=312.0, source=_A100),
    Peak(name="A30", fp32=10.3, tf32=82.0, fp16=165.0, bf16=165.0, source="NVIDIA A30 data sheet"),
    Peak(name="A10", fp32=31.2, tf32=62.5, fp16=125.0, bf16=125.0, source="NVIDIA A10 data sheet"),
    Peak(name="L40S", fp32=91.6, tf32=183.0, fp16=362.0, bf16=362.0, source="NVIDIA L40S data sheet"),
    Peak(name="L40", fp32=90.5, tf32=90.5, fp16=181.0, bf16=181.0, source="NVIDIA L40 data sheet"),
    Peak(name="L4", fp32=30.3, tf32=60.0, fp16=121.0, bf16=121.0, source="NVIDIA L4 data sheet"),
    Peak(name="T4", fp32=8.1, fp16=65.0, bf16=None, source="NVIDIA T4 data sheet"),
    Peak(name="V100-PCIE", fp32=14.0, fp16=112.0, bf16=None, source=f"{_V100} (PCIe)"),
    Peak(name="V100", fp32=15.7, fp16=125.0, bf16=None, source=f"{_V100} (SXM2)"),
    Peak(name="MI300X", fp32=163.4, fp16=1307.4, bf16=1307.4, source="AMD Instinct MI300X data sheet"),
    Peak(name="MI325X", fp32=163.4, fp16=1307.4, bf16=1307.4, source="AMD Instinct MI325X data sheet"),
    Peak(name="MI250X", fp32=47.9, fp16=191.5, bf16=191.5, source="AMD Instinct MI250X data sheet, one of two dies"),
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
