"""`polyphase doctor host`: checks whether this host is suitable for training.

Each check has a status (ok, warn or fail), a value and a remedy.

Measurement and judgement are separate: the `judge_*` functions are pure.
"""

import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import psutil

from polyphase.engine.environment import master_port, num_launched

__all__ = ["CHECKS", "Check", "check_host"]

Status = Literal["ok", "warn", "fail"]

_RATE_MB = 64
_GB = 1e9


class Check(NamedTuple):
    """The result of one check."""

    name: str
    status: Status
    found: str
    remedy: str = ""
    """Empty if nothing needs to be done."""


def judge_shm(total_bytes: int | None, free_bytes: int) -> Check:
    """Judges shared memory, in which workers of loaders pass batches."""
    if total_bytes is None:
        return Check("/dev/shm", "ok", "not there, and not needed on this system")
    value = f"{free_bytes / _GB:.2f} of {total_bytes / _GB:.2f} GB free"
    remedy = "docker run --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    if free_bytes < 64e6:
        return Check("/dev/shm", "fail", value, f"{remedy}; loaders with workers end in a bus error")
    return Check("/dev/shm", "warn", value, remedy) if free_bytes < 1e9 else Check("/dev/shm", "ok", value)


def judge_files(soft: int, hard: int) -> Check:
    """Judges the limit of open files, which ranks, workers and shared tensors use."""
    value = f"{soft} of at most {hard}" if hard != resource.RLIM_INFINITY else f"{soft}"
    if soft >= 4096:
        return Check("open files", "ok", value)
    status: Status = "fail" if soft < 256 else "warn"
    return Check("open files", status, value, "ulimit -n 65536 (or nofile in /etc/security/limits.conf)")


def judge_cpus(cores: int, usable: int, quota: float | None) -> Check:
    """Judges the CPUs: of the machine, by this process's affinity, and by its container's quota."""
    value = f"{usable} of {cores} usable" + ("" if quota is None else f", quota {quota:g}")
    if quota is not None and quota < usable - 0.5:
        fitting = max(1, int(quota))
        return Check("CPUs", "warn", value, f"OMP_NUM_THREADS={fitting}: torch starts {usable} threads, which wait")
    return Check("CPUs", "ok", value)


def judge_name(host: str, addresses: list[str], error: str | None) -> Check:
    """Judges the host's own name, which other hosts resolve to connect to it."""
    if error is not None:
        remedy = f"add '<its address> {host}' to /etc/hosts, on each host"
        return Check("own name", "warn", f"{host} can't be resolved ({error})", remedy)
    value = f"{host} is {', '.join(addresses)}"
    if all(address.startswith("127.") or address == "::1" for address in addresses):
        remedy = "fine on one host; for several, /etc/hosts should have its address in the network"
        return Check("own name", "ok", value, remedy)
    return Check("own name", "ok", value)


def judge_disk(folder: str, free_bytes: int, rate_mb_per_s: float | None, error: str | None) -> Check:
    """Judges the disk of the folder of logs and checkpoints."""
    if error is not None or rate_mb_per_s is None:
        return Check("disk", "fail", f"{folder}: {error}", "--default_root_dir, or a folder that you may write to")
    value = f"{folder}: {rate_mb_per_s:.0f} MB/s written and synced, {free_bytes / _GB:.1f} GB free"
    if free_bytes < 1e9:
        return Check("disk", "fail", value, "make room: a run whose disk is full saves nothing more")
    if rate_mb_per_s < 50:
        return Check(
            "disk", "warn", value, "a faster disk for checkpoints, or Snapshot(), which writes in the background"
        )
    return Check("disk", "ok", value)


def judge_memory(available_bytes: int, total_bytes: int, swapped_bytes: int) -> Check:
    """Judges the memory of the host."""
    value = f"{available_bytes / _GB:.1f} of {total_bytes / _GB:.1f} GB available, {swapped_bytes / _GB:.1f} GB swapped"
    if available_bytes < 0.1 * total_bytes:
        return Check(
            "memory", "warn", value, "end what else runs here; a host that swaps trains at the speed of its disk"
        )
    return Check("memory", "ok", value)


def judge_load(per_cpu: float) -> Check:
    """Judges the load of other processes on the host."""
    value = f"{per_cpu:.2f} runnable threads per CPU in the last minute"
    if per_cpu > 0.5:
        return Check("other load", "warn", value, "end what else computes here, or keep to CPUs of its own (taskset)")
    return Check("other load", "ok", value)


def judge_versions(versions: dict[str, str | None]) -> Check:
    """Judges the installed versions."""
    missing = [name for name, installed in versions.items() if installed is None]
    text = ", ".join(f"{name} {installed}" for name, installed in versions.items() if installed is not None)
    text += f", Python {platform.python_version()}"
    if missing:
        return Check("versions", "fail", text, f"pip install {' '.join(missing)}")
    return Check("versions", "ok", text)


def judge_devices(kind: str | None, names: list[str], driver: str | None = None) -> Check:
    """Judges the accelerators that torch sees, and NVIDIA's driver, of which torch may know nothing."""
    drivers = "" if driver is None else f", driver {driver}"
    if kind is None and driver is not None:
        remedy = (
            "the torch that is built for CUDA (`python -c 'import torch; print(torch.version.cuda)'`), for a CUDA that"
        )
        remedy += " `nvidia-smi` names or an older one; and CUDA_VISIBLE_DEVICES that is not empty"
        return Check("devices", "warn", f"torch sees no accelerator{drivers}", remedy)
    if kind is None:
        remedy = "fine for the CPU; else install the driver, and the torch that is built for it"
        return Check("devices", "ok", "torch sees no accelerator", remedy)
    return Check("devices", "ok", f"{len(names)} x {kind}: {', '.join(dict.fromkeys(names))}{drivers}")


def judge_port(port: int | None, error: str | None, *, is_in_job: bool = False) -> Check:
    """Judges the port at which ranks are to meet; in a job rank 0 has it."""
    if port is None:
        return Check("port", "ok", "MASTER_PORT is not set: a free one is chosen")
    whose = "this job's" if is_in_job else "free"
    if error is None:
        return Check("port", "ok", f"{port} (MASTER_PORT) is {whose}")
    remedy = "leave MASTER_PORT unset, or choose a free one; `ss -ltnp` names the process that has it"
    return Check("port", "fail", f"{port} (MASTER_PORT): {error}", remedy)


def _shm() -> Check:
    if not os.path.isdir("/dev/shm"):
        return judge_shm(None, 0)
    usage = shutil.disk_usage("/dev/shm")
    return judge_shm(usage.total, usage.free)


def _cpus() -> Check:
    quota = None
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            limit, period = file.read().split()
        quota = None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass  # no container with a quota
    cores = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return judge_cpus(cores, usable, quota)


def _name() -> Check:
    host = socket.gethostname()
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)})
    except OSError as error:
        return judge_name(host, [], str(error))
    return judge_name(host, addresses, None)


def _disk(folder: str) -> Check:
    chunk = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(_RATE_MB):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            rate = _RATE_MB * len(chunk) / 1e6 / (time.perf_counter() - began)
    except OSError as error:
        return judge_disk(folder, 0, None, str(error))
    return judge_disk(folder, shutil.disk_usage(folder).free, rate, None)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    return judge_memory(memory.available, memory.total, psutil.swap_memory().used)


def _versions() -> Check:
    versions: dict[str, str | None] = {}
    for name in ("polyphase", "torch", "lightning"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return judge_versions(versions)


def _devices() -> Check:
    import torch  # the other checks do not need it

    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return judge_devices(None, [], _driver())
    module = torch.get_device_module(kind)
    count = torch.accelerator.device_count()
    named = getattr(module, "get_device_name", None)
    return judge_devices(kind.type, [str(named(index)) if named else kind.type for index in range(count)], _driver())


def _driver() -> str | None:
    """Returns the version of NVIDIA's driver; None if the kernel has none."""
    try:
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return next((word for word in line.split() if word[0].isdigit()), line)


def _port() -> Check:
    port, is_in_job = master_port(), num_launched() > 1
    error = None
    if port is not None and not is_in_job:
        try:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("", port))
        except (OSError, OverflowError) as found:
            error = str(found)
    return judge_port(port, error, is_in_job=is_in_job)


CHECKS: tuple[Callable[[str], Check], ...] = (
    lambda _: _versions(),
    lambda _: _devices(),
    lambda _: _cpus(),
    lambda _: judge_load(os.getloadavg()[0] / (os.cpu_count() or 1)),
    lambda _: _memory(),
    lambda _: _shm(),
    lambda _: judge_files(*resource.getrlimit(resource.RLIMIT_NOFILE)),
    lambda _: _name(),
    lambda _: _port(),
    _disk,
)
"""The checks; each is called with the folder of checkpoints."""


def check_host(folder: str) -> list[Check]:
    """Checks this host.

    Args:
        folder: folder of logs and checkpoints; 64 MB are written there and removed.
    """
    return [check(folder) for check in CHECKS]
