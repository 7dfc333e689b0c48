"""The table of devices, by the names that torch has for them."""

import pytest

from polyphase.doctor.flops import PEAKS, peak_of


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA B200", "tf32", 1100.0),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA L4", "fp16", 121.0),
        ("NVIDIA L40S", "fp16", 362.0),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("AMD Instinct MI300X", "bf16", 1307.4),
    ],
)
def test_peaks(name, dtype, tflops):
    assert peak_of(name, dtype) == pytest.approx(1e12 * tflops)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Tesla T4", "bf16"),
        ("Tesla V100-SXM2-16GB", "tf32"),
        ("A1000", "fp32"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16"),
    ],
)
def test_what_is_not_known(name, dtype):
    assert peak_of(name, dtype) is None


def test_each_row_has_a_source():
    assert all(peak.source for peak in PEAKS)
    assert len({peak.name for peak in PEAKS}) == len(PEAKS)
