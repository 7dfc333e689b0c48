"""Environment variables about processes and their connections; `launchers.py` reads what launchers set."""

import os
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment

from .launchers import LaunchedEnvironment, launcher_name, number_in

__all__ = [
    "ALL_FRAMES",
    "allow_late_nodes",
    "bind_interface",
    "child_environment",
    "compute_with_one_thread",
    "environment_with",
    "given_seed",
    "global_seed",
    "has_rendezvous",
    "is_elastic",
    "job_marks",
    "job_secret",
    "keep_job_secret",
    "keeping_interface",
    "listen_on_loopback",
    "listen_towards",
    "num_launched",
    "own_address",
    "owns_master_port",
    "parent_pid",
    "place_on_one_machine",
    "reserve_port",
    "restart_count",
    "share_job_secret",
    "share_threads",
    "shows_all_frames",
]


ALL_FRAMES = "POLYPHASE_TRACEBACK"
"""Name of the variable; its value ``full`` makes the terminal show all frames of each traceback."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""
_SECRET = "POLYPHASE_JOB_SECRET"
_PARENT = "POLYPHASE_PARENT_PID"
_STACKS = "PYTHONFAULTHANDLER"
_kept_secrets: list[str] = []
"""The secret of the job whose other ranks this process has started; at most one."""


def is_elastic() -> bool:
    """Whether torchrun may restart the processes, while it keeps one key-value store for all attempts."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> int:
    """The number of times that the launcher has restarted this job."""
    return max(number_in(f"{name}_RESTART_COUNT", 0) for name in ("TORCHELASTIC", "SLURM"))


def has_rendezvous(cluster_environment: Any) -> bool:
    """Whether a launcher, or the user, has set the address of the rendezvous of several nodes."""
    # Lightning's own environment is for processes without a launcher: it uses this machine's address.
    return "MASTER_ADDR" in os.environ or type(cluster_environment) is not LightningEnvironment


def share_threads(num_processes: int) -> None:
    """Gives each process of this machine its share of the cores, unless the user has set the number of threads."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))


def compute_with_one_thread() -> None:
    """Has this process compute with one thread, whatever Lightning would choose."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def allow_late_nodes() -> None:
    """Lets torchrun's agents admit a node that starts later, unless the user has configured the rendezvous.

    Otherwise that node would wait for ever: it looks for the address of the agents' shared store under the keys of the
    new round, where no agent has written it.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


@contextmanager
def owns_master_port(environment: Any) -> Iterator[bool]:
    """Context manager that yields whether this process chooses the port of the rendezvous; if so, unsets it at the end.

    The process chooses it if neither a launcher nor the user has set a port.

    Args:
        environment: the strategy's cluster environment.
    """
    # Lightning: LightningEnvironment takes both variables; others have ports of their own.
    is_named = "MASTER_PORT" in os.environ or "STANDALONE_PORT" in os.environ
    is_ours = isinstance(environment, LightningEnvironment) and not is_named
    try:
        yield is_ours
    finally:
        if is_ours:
            os.environ.pop("MASTER_PORT", None)


@contextmanager
def bind_interface(interface: str | None) -> Iterator[None]:
    """In this context, gloo and TensorPipe listen on `interface`; None: on the configured interface, or loopback."""
    names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    with _restored(*names):
        for name in names:
            os.environ[name] = interface or os.environ.get(name) or _LOOPBACK
        yield


def shows_all_frames() -> bool:
    """Whether tracebacks are printed with the frames of libraries."""
    return os.environ.get(ALL_FRAMES, "").strip().lower() == "full"


@contextmanager
def keeping_interface() -> Iterator[None]:
    """Restores the interface on which gloo listens, at the end."""
    with _restored("GLOO_SOCKET_IFNAME"):
        yield


def listen_on_loopback() -> None:
    """Makes gloo listen on the loopback interface from now on, unless the user has set another.

    Otherwise it takes the interface with the address of the machine's name.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)


def listen_towards(address: str) -> None:
    """Makes gloo listen on the interface from which `address` is reached, from now on, unless the user has set one.

    Otherwise it takes the address of the machine's own name, which is 127.0.1.1 on Debian: the other machines would
    connect to themselves.
    """
    if (name := _interface_towards(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def own_address() -> str:
    """The address at which gloo listens, by which other machines reach this one; empty if it is unknown."""
    addresses = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), [])
    return next((entry.address for entry in addresses if entry.family == socket.AF_INET), "")


def _interface_towards(address: str) -> str | None:
    interfaces = psutil.net_if_addrs()
    # On rank 0's own machine, its name may resolve to a loopback address: then use the interface of outgoing traffic.
    for target in (address, _ELSEWHERE):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            source = probe.getsockname()[0]
            if not source.startswith("127."):
                return next((name for name in interfaces if source in {e.address for e in interfaces[name]}), None)
    leading_out = [name for name, state in psutil.net_if_stats().items() if state.isup and name != _LOOPBACK]
    return leading_out[0] if len(leading_out) == 1 else None


def place_on_one_machine(environment: Any) -> str | None:
    """The address of the rendezvous if all ranks are on this machine; None if a launcher decides it."""
    if type(environment) is LightningEnvironment:
        return environment.main_address
    # Lightning: SLURM's environment uses the machine's name, which other machines can reach, too.
    return "127.0.0.1" if isinstance(environment, (SLURMEnvironment, LaunchedEnvironment)) else None


def job_secret() -> bytes | None:
    """The secret that the processes of this job share; None if they have none."""
    return (os.environ.get(_SECRET) or "".join(_kept_secrets)).encode() or None


def job_marks() -> list[str]:
    """Values by which launchers distinguish jobs; they are equal in all processes of one job."""
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
    return [os.environ.get(name, "") for name in names]


def num_launched() -> int:
    """The number of processes that a launcher such as torchrun has started; 1 without a launcher."""
    return number_in("WORLD_SIZE", 1)


def master_port() -> int | None:
    """The port of the rendezvous, if the user or a launcher has set one."""
    return number_in("MASTER_PORT", 0) or None


def launched_as() -> tuple[int, int, str]:
    """This process's rank in the job, its rank on the host, and the address of rank 0, as torchrun sets them."""
    return number_in("RANK", 0), number_in("LOCAL_RANK", 0), os.environ.get("MASTER_ADDR") or "127.0.0.1"


def environment_with(more: Mapping[str, str]) -> dict[str, str]:
    """A copy of this process's environment with `more` variables set, for another process."""
    return {**os.environ, **more}


def share_job_secret() -> None:
    """Gives the processes that this one starts a secret, unless the user has set one."""
    if not os.environ.get(_SECRET):
        os.environ[_SECRET] = "".join(_kept_secrets) or secrets.token_hex(32)


def keep_job_secret() -> None:
    """Keeps the secret of the processes started in `child_environment`: this process is a rank of their job."""
    if not os.environ.get(_SECRET) and not _kept_secrets:
        _kept_secrets.append(secrets.token_hex(32))


@contextmanager
def child_environment(*, num_nodes: int) -> Iterator[None]:
    """Processes that are started in this context have the id of the process that started them, and the job's secret.

    If a signal like SIGSEGV ends one, it prints its stack.

    Args:
        num_nodes: with several of them only the user can give all the same secret.
    """
    with _restored(_SECRET, _PARENT, _STACKS):
        if num_nodes == 1:
            share_job_secret()
        os.environ[_PARENT] = str(os.getpid())
        os.environ.setdefault(_STACKS, "1")
        yield


def parent_pid() -> int | None:
    """Id of the process that has started this one as a rank; when it ends, this one ends. None if there is none.

    Processes of SLURM have none: SLURM ends them itself.
    """
    if launcher_name() == "torchrun":
        return os.getppid()
    pid = os.environ.get(_PARENT, "")
    return int(pid) if pid.isdecimal() and int(pid) != os.getpid() else None


def global_seed() -> int:
    """The seed of `seed_everything` where it was called, else of `torch.manual_seed`, else this process's own."""
    return number_in("PL_GLOBAL_SEED", torch.initial_seed())


def given_seed() -> int | None:
    """The seed that `seed_everything` was called with, by the command or by the user; None without one."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return int(seed) if seed.isdecimal() else None


@contextmanager
def _restored(*names: str) -> Iterator[None]:
    """Context manager that restores these variables at its end."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def reserve_port(environment: Any) -> socket.socket:
    """Chooses a free port for the rendezvous; the returned socket reserves it until it is closed.

    Without a reservation, another program could take the port before rank 0 listens on it. On Linux, rank 0 can listen
    on a port that another socket is bound to, as long as that socket does not listen.

    Args:
        environment: a `LightningEnvironment`, which gets the port.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    environment._main_port = reservation.getsockname()[1]  # Lightning: LightningEnvironment's port
    if sys.platform != "linux":  # on other systems rank 0 could not listen on a reserved port
        reservation.close()
    return reservation
