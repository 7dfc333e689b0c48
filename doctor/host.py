"""`polyphase doctor host`: checks whether this host is suitable for training, or all hosts of a job.

Each check has a status (ok, warn or fail), a value and a remedy.

Measurement and judgement are separate: the `judge_*` functions are pure.
"""

import datetime
import json
import math
import os
import platform
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
from rich.console import Console
from rich.text import Text

from polyphase.engine.distributed.environment import launched_as, listen_towards, master_port, num_launched
from polyphase.engine.flags import choose

from .rules import RULES
from .rules.network import culprits, slow_links

__all__ = ["CHECKS", "Check", "check_cluster", "check_host", "main"]

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


# --- all hosts of a job (under torchrun), and the network between them
# 1. The ranks connect over gloo, within a minute.
# 2. The first rank of each host checks the host, and the results are gathered.
# 3. Clocks: after a barrier each rank reads its clock, five times; the smallest difference counts.
# 4. Links: each pair of at most 16 ranks sends 2 MB three times; an all-reduce of 8 MB.


_PATIENCE_S = 60.0
_MAX_SKEW_S = 1.0
"""Difference of two clocks, in seconds, above which times of files, logs and certificates are misleading."""
_SLOW_MB_PER_S = 200.0
"""Rate between hosts below which sending a model's gradients takes longer than computing them."""
_NUM_ROUNDS = 5


def judge_meeting(num_ranks: int, num_hosts: int, took_s: float | None, error: str | None = None) -> Check:
    """Judges whether all ranks have connected."""
    if error is None:
        return Check("meeting", "ok", f"{num_ranks} ranks on {num_hosts} hosts, after {took_s:.2g} s")
    remedy = "MASTER_ADDR must be an address of rank 0's host that all others reach, and no firewall between them may"
    remedy += " close its ports; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface to use"
    return Check("meeting", "fail", f"{num_ranks} ranks did not meet: {error}", remedy)


def judge_clocks(offsets_s: Mapping[str, float]) -> Check:
    """Judges the clocks of hosts by their differences from rank 0's."""
    host = max(offsets_s, key=lambda name: abs(offsets_s[name]))
    result = f"differ by at most {abs(offsets_s[host]):.2g} s"
    if abs(offsets_s[host]) < _MAX_SKEW_S:
        return Check("clocks", "ok", result)
    return Check("clocks", "warn", f"{result}: that of {host}", f"let chrony or ntpd set the clock of {host}")


def judge_versions_alike(by_host: Mapping[str, str]) -> Check:
    """Judges whether all hosts have the same versions: texts of `judge_versions`."""
    hosts: dict[str, list[str]] = {}
    for host, versions in by_host.items():
        hosts.setdefault(versions, []).append(host)
    if len(hosts) == 1:
        return Check("same versions", "ok", "on all hosts")
    result = "; ".join(f"{', '.join(names)}: {versions}" for versions, names in hosts.items())
    return Check("same versions", "fail", result, "install the same versions on all hosts, or one image")


def judge_links(rates: Mapping[tuple[int, int], float], hosts: Mapping[int, str], all_reduce_mb_per_s: float) -> Check:
    """Judges the rates between ranks.

    Args:
        rates: in MB/s, by source and target; with several hosts, only rates between hosts count.
        hosts: host of each rank.
        all_reduce_mb_per_s: the rate at which each rank sends in a large all-reduce.
    """
    between = {pair: rate for pair, rate in rates.items() if hosts[pair[0]] != hosts[pair[1]]}
    judged = between or rates
    result = f"{all_reduce_mb_per_s:,.0f} MB/s in an all-reduce"
    if not judged:
        return Check("links", "ok", result)
    worst = min(judged, key=lambda pair: judged[pair])
    names = " to ".join(f"rank {rank} ({hosts[rank]})" for rank in worst)
    result += f"; {statistics.median(judged.values()):,.0f} MB/s between ranks, at least {judged[worst]:,.0f} ({names})"
    threshold = next(rule.threshold for rule in RULES if rule.cause == "slow_link")
    _, slow = slow_links(between, threshold)
    if slow:
        at = " and ".join(f"rank {rank} ({hosts[rank]})" for rank in culprits(slow))
        return Check("links", "warn", result, f"look at the network interface and cable of {at}")
    if between and statistics.median(between.values()) < _SLOW_MB_PER_S:
        remedy = "a compression, or local_sgd, send less over such a network; NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        return Check("links", "warn", result, f"{remedy} choose another interface where there is a quicker one")
    return Check("links", "ok", result)


def check_cluster(folder: str) -> list[Check]:
    """Checks all hosts of the job; to be called by all its processes.

    Args:
        folder: folder of logs and checkpoints; a rank of each host writes 64 MB there, and removes them.

    Returns:
        On rank 0 all checks; names of checks of a single host begin with the host. Empty on other ranks.
    """
    import torch.distributed as dist

    from polyphase.engine.distributed.link_rates import MOST_RANKS, all_reduce_rate, receive_rates

    (rank, local_rank, address), num_ranks, host = launched_as(), num_launched(), socket.gethostname()
    listen_towards(address)
    began = time.perf_counter()
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_PATIENCE_S))
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        return [judge_meeting(num_ranks, 0, None, str(error).partition("\n")[0])]
    took_s = time.perf_counter() - began
    try:
        own = check_host(folder) if local_rank == 0 else []
        gathered: list[tuple[str, list[Check]]] = [("", [])] * num_ranks
        dist.all_gather_object(gathered, (host, own))
        offset_s = _offset_s()
        rates = receive_rates() if 1 < num_ranks <= MOST_RANKS else []
        rate = all_reduce_rate() if num_ranks > 1 else math.inf
        measured: list[tuple[float, list[float]]] = [(0.0, [])] * num_ranks
        dist.all_gather_object(measured, (offset_s, rates))
    finally:
        dist.destroy_process_group()
    if rank != 0:
        return []
    hosts = {index: name for index, (name, _) in enumerate(gathered)}
    links = {
        (source, target): rate
        for target, (_, rates) in enumerate(measured)
        for source, rate in enumerate(rates)
        if rate
    }
    return [
        *(check._replace(name=f"{name}: {check.name}") for name, checks in gathered for check in checks),
        judge_meeting(num_ranks, len(set(hosts.values())), took_s),
        judge_versions_alike(_versions_by_host(gathered)),
        judge_clocks({hosts[index]: offset for index, (offset, _) in enumerate(measured)}),
        judge_links(links, hosts, rate),
    ]


def _versions_by_host(gathered: Sequence[tuple[str, list[Check]]]) -> dict[str, str]:
    return {host: check.found for host, checks in gathered for check in checks if check.name == "versions"}


def _offset_s() -> float:
    """Returns the seconds by which this rank's clock is ahead of rank 0's; the time of a barrier is the error."""
    import torch.distributed as dist

    offsets = []
    for _ in range(_NUM_ROUNDS):
        dist.barrier()
        times: list[float] = [0.0] * dist.get_world_size()
        dist.all_gather_object(times, time.time())
        offsets.append(times[dist.get_rank()] - times[0])
    return min(offsets, key=abs)


# --- the command


def main(words: Sequence[str]) -> int:
    """Runs ``polyphase doctor host`` with its arguments; returns 1 if a check fails."""
    folders = [word for word in words if not word.startswith("-")]
    try:
        for word in words:
            if word.startswith("-"):
                choose("flag of doctor host", word, ("--json",))
        if len(folders) > 1:
            raise ValueError(f"doctor host takes one folder, but got {' '.join(folders)}.")
    except ValueError as error:
        print(f"polyphase: error: {error}", file=sys.stderr)
        return 2
    checks = check_host(*folders or ".") if num_launched() == 1 else check_cluster(*folders or ".")
    if not checks:
        return 0  # rank 0 says it
    if "--json" in words:
        print(json.dumps([check._asdict() for check in checks], indent=2))
    else:
        _show(checks, Console())
    return int(any(check.status == "fail" for check in checks))


def _show(checks: Sequence[Check], console: Console) -> None:
    """Prints a line and a remedy for each check."""
    width = max(len(check.name) for check in checks)
    colors = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    for check in checks:
        line = Text.assemble((f"{check.status:5}", colors[check.status]), f"{check.name:{width}} ", check.found)
        console.print(line, soft_wrap=True)
        if check.remedy:
            console.print(
                Text(f"{'':{width + 6}}{check.remedy}", style="dim" if check.status == "ok" else "bold"), soft_wrap=True
            )
