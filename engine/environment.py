"""What the environment says about the processes; the only module that reads environment variables.

torchrun and SLURM start the processes themselves and say how many. Lightning wants the same numbers once more as
`devices` and `num_nodes`; here they are taken from the launcher where the user left them out, and compared where not.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from .flags import check_count

__all__ = [
    "ALL_FRAMES",
    "child_environment",
    "given_seed",
    "global_seed",
    "is_started_again",
    "job_secret",
    "keep_job_secret",
    "keeping_interface",
    "knows_where_nodes_meet",
    "launched_sizes",
    "listen_on_loopback",
    "listening_on",
    "make_room_for_nodes",
    "parent_pid",
    "place_on_one_machine",
    "port_is_ours",
    "resolve_sizes",
    "restart_count",
    "share_job_secret",
    "share_threads",
    "shows_all_frames",
    "started_by",
]


ALL_FRAMES = "POLYPHASE_TRACEBACK"
"""The variable that is ``full`` where the terminal shall get each traceback whole."""

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_SECRET = "POLYPHASE_JOB_SECRET"
_PARENT = "POLYPHASE_PARENT_PID"
_kept_secrets: list[str] = []
"""At most one: that of the job whose other ranks this process has started."""


def started_by() -> str | None:
    """``"torchrun"`` or ``"SLURM"`` where one of them started this process, else None."""
    if TorchElasticEnvironment.detect():
        return "torchrun"
    # SLURM_NTASKS_PER_NODE and friends also exist in an interactive allocation, which starts one process only.
    return "SLURM" if SLURMEnvironment.detect() and int(os.environ.get("SLURM_NTASKS", "1")) > 1 else None


def launched_sizes() -> tuple[int, int] | None:
    """(processes per node, number of nodes) as the launcher has them; None where nobody launched us."""
    launcher = started_by()
    if launcher == "torchrun":
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        return per_node, _whole_share(int(os.environ["WORLD_SIZE"]), per_node)
    if launcher == "SLURM":
        num_nodes = int(os.environ.get("SLURM_NNODES", os.environ.get("SLURM_JOB_NUM_NODES", "1")))
        return _whole_share(int(os.environ["SLURM_NTASKS"]), num_nodes), num_nodes
    return None


def is_started_again() -> bool:
    """Whether torchrun may start the processes again and again, over one key-value store that it keeps."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> int:
    """How often the launcher has started this job again."""
    return max(int(os.environ.get(f"{name}_RESTART_COUNT", "0")) for name in ("TORCHELASTIC", "SLURM"))


def knows_where_nodes_meet(cluster_environment: Any) -> bool:
    """Whether a launcher, or the user, has named the address at which the processes of several nodes meet."""
    # Lightning's own environment is the one for processes that nobody has started: it takes this machine's address.
    return "MASTER_ADDR" in os.environ or type(cluster_environment) is not LightningEnvironment


def share_threads(num_processes: int) -> None:
    """Gives each of the processes of this machine its share of the cores, unless the user has said how many."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))


def make_room_for_nodes() -> None:
    """Lets torchrun's agents take in a node that comes later, unless the user has said how they shall meet.

    Otherwise it would wait in vain: it looks for the address of the store that the agents share among the keys of the
    new round, where nobody has put it.
    """
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def resolve_sizes(devices: Any, num_nodes: int) -> tuple[Any, int]:
    """`devices` and `num_nodes` to hand to Lightning, completed from the launcher.

    Raises:
        ValueError: the flags contradict the launcher; the message has the flags that fit it.
    """
    check_count("num_nodes", num_nodes)
    launched = launched_sizes()
    if launched is None:
        return devices, num_nodes
    per_node, nodes = launched
    if num_nodes > 1 and not _says_num_nodes():
        per_node, nodes = _whole_share(per_node * nodes, num_nodes), num_nodes
    given = _count(devices)
    if given not in (None, per_node) or num_nodes not in (1, nodes):
        raise ValueError(
            f"{started_by()} started {nodes} node(s) x {per_node} process(es), but the flags say num_nodes={num_nodes}"
            f" and devices={devices!r}: leave both out, or give num_nodes={nodes}, devices={per_node}."
        )
    return (per_node if given is None else devices), nodes


def _says_num_nodes() -> bool:
    """Whether the launcher says over how many nodes its processes are spread; SLURM's variables may lack it."""
    return started_by() != "SLURM" or any(name in os.environ for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"))


@contextmanager
def port_is_ours(environment: Any) -> Iterator[bool]:
    """Whether nobody has named the port at which processes meet; one that is named in here then holds in here only.

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
def listening_on(interface: str | None) -> Iterator[None]:
    """Has gloo and TensorPipe listen on a network interface in here; None: what the user has set, or loopback."""
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
    """Has the interface on which gloo listens be afterwards what it was before."""
    with _restored("GLOO_SOCKET_IFNAME"):
        yield


def listen_on_loopback() -> None:
    """Has gloo listen on the loopback interface from now on, unless the user has named another.

    Otherwise it takes the one that has the address of the machine's name.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)


def place_on_one_machine(environment: Any) -> str | None:
    """The address at which ranks that are all on this machine meet; None where that is another's to say."""
    if type(environment) is LightningEnvironment:
        return environment.main_address
    # Lightning: SLURM's own is the machine's name, which other machines can reach, too.
    return "127.0.0.1" if isinstance(environment, SLURMEnvironment) else None


def job_secret() -> bytes | None:
    """The secret that the processes of this job have in common; None if nobody has given them one."""
    return (os.environ.get(_SECRET) or "".join(_kept_secrets)).encode() or None


def share_job_secret() -> None:
    """Gives the processes that this one starts a secret, unless the user has."""
    if not os.environ.get(_SECRET):
        os.environ[_SECRET] = "".join(_kept_secrets) or secrets.token_hex(32)


def keep_job_secret() -> None:
    """Has this process know the secret of those that it starts in `child_environment`: it is a rank of the same job."""
    if not os.environ.get(_SECRET) and not _kept_secrets:
        _kept_secrets.append(secrets.token_hex(32))


@contextmanager
def child_environment() -> Iterator[None]:
    """Processes that are started in here have the job's secret, and know which process has started them."""
    with _restored(_SECRET, _PARENT):
        share_job_secret()
        os.environ[_PARENT] = str(os.getpid())
        yield


def parent_pid() -> int | None:
    """The process that has started this one as a rank of its job, without which it is not to go on; None if none has.

    SLURM ends its processes itself.
    """
    if started_by() == "torchrun":
        return os.getppid()
    pid = os.environ.get(_PARENT, "")
    return int(pid) if pid.isdecimal() and int(pid) != os.getpid() else None


def global_seed() -> int:
    """The seed of `seed_everything` where it was called, else of `torch.manual_seed`, else this process's own."""
    return int(os.environ.get("PL_GLOBAL_SEED", torch.initial_seed()))


def given_seed() -> int | None:
    """The seed that `seed_everything` was called with, by the command or by the user; None without one."""
    seed = os.environ.get("PL_GLOBAL_SEED", "")
    return int(seed) if seed.isdecimal() else None


@contextmanager
def _restored(*names: str) -> Iterator[None]:
    """Has these variables be afterwards what they were before."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _whole_share(num_processes: int, parts: int) -> int:
    if num_processes % parts:
        raise ValueError(
            f"{started_by()} started {num_processes} processes, which is no multiple of {parts}: start the same number"
            " on every node."
        )
    return num_processes // parts


def _count(devices: Any) -> int | None:
    """Number of devices asked for; None for "auto" and for -1 (all)."""
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if isinstance(devices, (list, tuple)):
        return len(devices)
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return None
    if text.isdecimal() and not isinstance(devices, bool):
        return int(text)
    raise ValueError(f"devices must be a whole number of at least 1, -1 (all), a list or 'auto': got {devices!r}.")
