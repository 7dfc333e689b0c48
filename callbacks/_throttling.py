"""Asks NVML whether a device is throttled, and why; only if `pynvml` (nvidia-ml-py) is installed."""

from typing import Any

import torch

__all__ = ["ThrottleWatch", "throttle_watch"]

# NVML: bits of nvmlDeviceGetCurrentClocksThrottleReasons, in nvml.h.
_REASONS = {0x20: "heat", 0x40: "heat", 0x80: "power brake", 0x04: "power limit"}
_SM, _GPU_SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU


class ThrottleWatch:
    """Reads the state of a device at the end of each interval; a read takes some 10 us, and waits for nothing.

    Args:
        nvml: the module `pynvml`, initialized.
        handle: NVML's handle of the device.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def take(self) -> dict[str, Any]:
        """Returns the numbers by the field names of an `Interval`; empty if the driver does not report them."""
        nvml, handle = self._nvml, self._handle
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            clock, most = nvml.nvmlDeviceGetClockInfo(handle, _SM), nvml.nvmlDeviceGetMaxClockInfo(handle, _SM)
            return {
                "throttled": dict.fromkeys((reason for bit, reason in _REASONS.items() if bits & bit), 1),
                "num_looks": 1,
                "utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                "clock_share": clock / max(most, 1),
                "temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, _GPU_SENSOR)),
                "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            }
        except nvml.NVMLError:
            return {}


def throttle_watch(device: torch.device) -> ThrottleWatch | None:
    """Returns a watch for a CUDA device; None for others, and without NVML."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return ThrottleWatch(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except (pynvml.NVMLError, AttributeError):  # no driver, a part of a device (MIG), or ROCm
        return None
