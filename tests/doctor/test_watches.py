"""The watches of `Doctor` on swap and on the device's clock, by what the system tells them."""

import multiprocessing
import os
import resource
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch

from polyphase.doctor.host_use import HostFigures, shm_capacity_mb
from polyphase.doctor.watches import SwapWatch, ThrottleWatch, throttle_watch


def test_swap_is_that_of_the_host_since_the_last_look_and_of_this_process(tmp_path):
    (tmp_path / "self").mkdir()

    def says(pages, kilobytes):
        (tmp_path / "vmstat").write_text(f"pgpgin 17\npswpin {pages}\npswpout 9\n")
        (tmp_path / "self" / "status").write_text(f"VmRSS:\t 10 kB\nVmSwap:\t  {kilobytes} kB\n")

    says(100, 0)
    watch = SwapWatch(tmp_path)
    assert watch.take() == {}
    says(350, 2000)
    read_mb = 250 * resource.getpagesize() / 1e6
    assert watch.take() == {"swap_read_mb": pytest.approx(read_mb), "swapped_mb": pytest.approx(2.048)}
    assert watch.take() == {"swapped_mb": pytest.approx(2.048)}


def test_what_a_rank_takes_of_its_host():
    figures = HostFigures()
    ended = time.process_time() + 0.05
    while time.process_time() < ended:
        pass
    first = figures.take()
    assert first["process_cpu_s"] >= 0.05
    assert min(first["received_mb"], first["sent_mb"]) >= 0.0
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    worker.start()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared, open(os.devnull):
        shared.write(bytes(8_000_000))
        shared.flush()
        second = figures.take()
    worker.kill()
    worker.join()
    assert second["workers_mb"] >= (first["workers_mb"] or 0.0) + 5
    assert second["num_files"] >= first["num_files"] + 2
    assert second["shm_mb"] - first["shm_mb"] > 6
    assert second["shm_mb"] < shm_capacity_mb()


def test_where_the_system_tells_nothing_of_swap_nothing_is_known(tmp_path):
    assert SwapWatch(tmp_path).take() == {}


def test_this_system_tells_numbers():
    assert all(mb > 0.0 for mb in SwapWatch().take().values())


class Nvml:
    """What a driver says, by the names of `pynvml`."""

    class NVMLError(Exception):
        pass

    def __init__(self, bits):
        self.bits = bits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):  # noqa: N802
        if self.bits is None:
            raise self.NVMLError("not supported")
        return self.bits

    def nvmlDeviceGetClockInfo(self, handle, kind):  # noqa: N802
        return {1: 1188}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):  # noqa: N802
        return {1: 1980}[kind]

    def nvmlDeviceGetTemperature(self, handle, sensor):  # noqa: N802
        return {0: 88}[sensor]

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        return SimpleNamespace(gpu=75, memory=30)

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        return 512_000


@pytest.mark.parametrize(
    ("bits", "reasons"),
    [
        (0x00, []),
        (0x01, []),  # idle
        (0x04, ["power limit"]),
        (0x60, ["heat"]),
        (0x84, ["power brake", "power limit"]),
    ],
)
def test_reasons_of_a_device(bits, reasons):
    assert ThrottleWatch(Nvml(bits), 0).take() == {
        "throttled": dict.fromkeys(reasons, 1),
        "num_looks": 1,
        "utilization": 0.75,
        "clock_share": 0.6,
        "temperature_c": 88.0,
        "power_w": 512.0,
    }


def test_a_driver_that_tells_nothing():
    assert ThrottleWatch(Nvml(None), 0).take() == {}


def test_a_cpu_has_no_watch():
    assert throttle_watch(torch.device("cpu")) is None
