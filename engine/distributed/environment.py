"""Environment variables about processes and their connections, those that launchers set among them."""

import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import psutil
import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)

from ..flags import check_count

__all__ = [
    "ALL_FRAMES",
    "LaunchedEnvironment",
    "allow_late_nodes",
    "bind_interface",
    "child_environment",
    "compute_with_one_thread",
    "environment_of_launcher",
    "environment_with",
    "given_seed",
    "global_seed",
    "has_rendezvous",
    "is_elastic",
    "job_marks",
    "job_secret",
    "keep_job_secret",
    "keeping_interface",
    "launched_sizes",
    "launcher_name",
    "listen_on_loopback",
    "listen_towards",
    "num_launched",
    "own_address",
    "owns_master_port",
    "parent_pid",
    "place_on_one_machine",
    "rank_variables",
    "reserve_port",
    "resolve_sizes",
    "restart_count",
    "share_job_secret",
    "share_threads",
    "shows_all_frames",
    "started_by_hand",
]

# Detects the launcher of a run's processes, and the rank of this one.
#
# Variables that announce several processes either define one run, or are refused with their names: N independent runs
# that write into one folder would all end with exit code 0. Lightning supports torchrun, SLURM and LSF; the others are
# here.


class _Names(NamedTuple):
    """The names of the variables in which a launcher stores the ranks of a process."""

    size: str
    rank: str
    local_rank: str
    """The variable of the rank among the processes of this machine."""
    local_size: str


_PLAIN = "RANK and WORLD_SIZE"
_MPI = {
    "Open MPI": _Names(*(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    "MVAPICH": _Names(*(f"MV2_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    "mpiexec": _Names("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Launchers with precedence over SLURM: within an allocation, SLURM's numbers are not those of their processes."""
_OTHERS = {
    "LSF": _Names(*(f"JSM_NAMESPACE_{name}" for name in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE"))),
    # submitit itself starts processes on one machine only; on several machines SLURM starts them.
    "submitit": _Names(*(f"SUBMITIT_LOCAL_{name}" for name in ("NTASKS", "GLOBALID", "LOCALID", "NTASKS"))),
    _PLAIN: _Names("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}
_COMPLETED = "POLYPHASE_RANK_VARIABLES"
"""The variable with RANK and WORLD_SIZE, separated by a slash, if this run has set RANK, not a launcher."""
_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "HYDRA_JOBID", "SUBMITIT_LOCAL_JOB_ID", "PBS_JOBID")
"""Variables with one value in all processes of a job, and other values in other jobs."""
_ADDRESS = re.compile(r"[^\s/:]+|\[?[0-9a-fA-F:]*:[0-9a-fA-F:.]*(%\w+)?\]?")
"""Matches the name of a machine, or an address of IPv4 or IPv6, without a port."""
_PORTS = range(20_000, 30_000)
"""Ports below those that systems assign automatically."""
_OWN_HOST = ("localhost", "127.0.0.1", "::1")
_SLURM = _Names("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
_MOST_PROCESSES = 10_000_000
"""More than any cluster has: a greater number is a mistake, and each process makes lists of all of them."""
_COUNTS, _RANKS = range(1, _MOST_PROCESSES + 1), range(_MOST_PROCESSES)
_LAUNCHERS = (*_MPI.values(), *_OTHERS.values(), _SLURM)
_RANGES = {
    **{name: _COUNTS for names in _LAUNCHERS for name in (names.size, names.local_size)},
    **{name: _RANKS for names in _LAUNCHERS for name in (names.rank, names.local_rank)},
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), _COUNTS),
    **dict.fromkeys(("NODE_RANK", "GROUP_RANK", "SLURM_NODEID"), _RANKS),
    **dict.fromkeys(("MASTER_PORT", "STANDALONE_PORT"), range(1, 65_536)),
    **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"), range(2**31)),
    "PL_GLOBAL_SEED": range(2**32),
}
"""The whole numbers that a variable may have, by its name."""


def _number_in(name: str, default: int) -> int:
    """Returns the whole number in an environment variable; `default` if it is unset or empty.

    Raises:
        ValueError: it has something else, or a number out of its range.
    """
    text, allowed = os.environ.get(name, "").strip(), _RANGES[name]
    if not text:
        return default
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
    if number not in allowed:
        raise ValueError(
            f"the environment variable {name}={os.environ[name]!r} must be a whole number from {allowed[0]} to"
            f" {allowed[-1]}: correct it, or unset it where no launcher has set it."
        )
    return number


def _check_variables() -> None:
    """Checks the variables of all launchers, before anything reads them.

    Raises:
        ValueError: one is no number of its kind, or contradicts another one; the message has their names and values.
    """
    for name in _RANGES:
        _number_in(name, 0)
    launcher = launcher_name()
    names = _SLURM if launcher == "SLURM" else _names(str(launcher))
    pairs = [(names.rank, names.size), (names.local_rank, names.local_size)]
    for rank, size in pairs[: 1 if launcher == "SLURM" else 2]:  # SLURM's last one is that of the job, not of the step
        num_ranks = _number_in(size, _MOST_PROCESSES)
        if _number_in(rank, 0) >= num_ranks:
            raise ValueError(
                f"the environment variables {rank}={os.environ[rank]} and {size}={os.environ[size]} contradict each"
                f" other: with {num_ranks} process(es) {rank} is from 0 to {num_ranks - 1}."
            )
    address = os.environ.get("MASTER_ADDR")
    if address is not None and (not address.strip() or not _ADDRESS.fullmatch(address)):
        raise ValueError(
            f"the environment variable MASTER_ADDR={address!r} must be the name or the address of rank 0's machine"
            " alone; its port belongs into MASTER_PORT."
        )


def launcher_name() -> str | None:
    """``"torchrun"``, ``"SLURM"``, ``"Open MPI"``, ...; None if no launcher has started several processes."""
    if TorchElasticEnvironment.detect():
        return "torchrun"
    if (name := _found(_MPI)) is not None:
        return name
    # SLURM_NTASKS_PER_NODE and friends also exist in an interactive allocation, which starts one process only.
    if SLURMEnvironment.detect() and _number_in("SLURM_NTASKS", 1) > 1:
        return "SLURM"
    return _found(_OTHERS)


def started_by_hand() -> bool:
    """Whether ranks were started one by one with torchrun's variables: no launcher looks at their exit codes."""
    return launcher_name() == _PLAIN


def launched_sizes() -> tuple[int, int] | None:
    """(all processes, processes per node) from the launcher; 0 for an unknown number; None without a launcher."""
    launcher = launcher_name()
    if launcher is None:
        return None
    if launcher == "SLURM":
        total = _number_in("SLURM_NTASKS", 1)
        num_nodes = _number_in("SLURM_NNODES", _number_in("SLURM_JOB_NUM_NODES", 0))
        return total, _whole_share(total, num_nodes) if num_nodes else 0
    names = _names(launcher)
    is_one_per_node = launcher == _PLAIN and names.local_rank not in os.environ
    return _number_in(names.size, 1), _number_in(names.local_size, int(is_one_per_node))


@contextmanager
def rank_variables(rank: int, num_ranks: int, num_local_ranks: int) -> Iterator[None]:
    """Adds RANK and LOCAL_WORLD_SIZE to the environment of a rank that Lightning's script launcher has started.

    That launcher sets only WORLD_SIZE and LOCAL_RANK, in rank 0 as well; libraries that read torchrun's four variables
    would treat every rank as rank 0. Both are removed when the run ends, as Lightning removes WORLD_SIZE: the script
    may continue in one process. Other processes keep their environment.

    Args:
        rank: rank of this process.
        num_ranks: number of ranks of the run.
        num_local_ranks: ranks on this machine.
    """
    local_rank = str(rank % num_local_ranks)
    is_lightnings = (os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_RANK")) == (str(num_ranks), local_rank)
    added = {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_local_ranks), _COMPLETED: f"{rank}/{num_ranks}"}
    if num_ranks == 1 or not is_lightnings or ("RANK" in os.environ and not _is_completed()):
        added = {}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def resolve_sizes(devices: Any, num_nodes: int, plugins: Sequence[Any] = ()) -> tuple[Any, int]:
    """`devices` and `num_nodes` for Lightning, completed from the launcher.

    A `ClusterEnvironment` among the plugins (such as `KubeflowEnvironment`) knows its processes itself, if Lightning
    does not support the launcher.

    Raises:
        ValueError: the flags contradict the launcher; the message has the right flags. Or there are several processes,
            but no variables that connect them. Or a variable has a value that it can't have.
    """
    check_count("num_nodes", num_nodes)
    _check_variables()
    launched = launched_sizes()
    if launched is None:
        _check_alone()
        return devices, num_nodes
    if LaunchedEnvironment.detect() and any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return devices, num_nodes
    total, per_node = launched
    num_devices = _count(devices)
    address = os.environ.get("MASTER_ADDR", "localhost")
    says_nothing = not per_node and num_nodes == 1 and num_devices is None
    if says_nothing and launcher_name() != "SLURM" and address not in _OWN_HOST:
        raise ValueError(
            f"{launcher_name()} started {total} processes, but nothing says how many of them are on this machine: set"
            f" {_names(str(launcher_name())).local_size}, or give devices and num_nodes."
        )
    per_node = per_node or _whole_share(total, num_nodes)
    nodes = _whole_share(total, per_node)
    if num_devices not in (None, per_node) or num_nodes not in (1, nodes):
        raise ValueError(
            f"{launcher_name()} started {nodes} node(s) x {per_node} process(es), but the flags say"
            f" num_nodes={num_nodes} and devices={devices!r}: leave both out, or give num_nodes={nodes},"
            f" devices={per_node}."
        )
    return (per_node if num_devices is None else devices), nodes


class LaunchedEnvironment(ClusterEnvironment):
    """The environment of a launcher that Lightning does not support.

    Args:
        launcher: its name.
        num_nodes: from `resolve_sizes`.

    Raises:
        ValueError: its variables contradict each other, or have no address of the rendezvous.
    """

    def __init__(self, launcher: str, num_nodes: int) -> None:
        super().__init__()
        names = _names(launcher)
        self._size, self._rank = _number_in(names.size, 1), _number_in(names.rank, 0)
        per_node = self._size // num_nodes
        self._node_rank, local_rank = divmod(self._rank, per_node)
        self._local_rank = _number_in(names.local_rank, local_rank)
        if not (0 <= self._rank < self._size and self._local_rank == local_rank):
            raise ValueError(
                f"{names.rank}={self._rank} and {names.local_rank}={self._local_rank} don't fit {self._size} processes"
                f" ({names.size}) on {num_nodes} node(s) of {per_node} each, numbered node by node: set"
                f" {names.local_size}, or give num_nodes and devices."
            )
        address, port = os.environ.get("MASTER_ADDR"), _number_in("MASTER_PORT", 0)
        job = next((os.environ[name] for name in _JOB_IDS if os.environ.get(name)), None)
        if (address is None and num_nodes > 1) or (not port and job is None):
            raise ValueError(
                f"{launcher} started {self._size} processes, but nothing says where they meet: set MASTER_ADDR to the"
                " machine of rank 0 and MASTER_PORT to a free port there, the same for all of them"
                + (" (mpirun -x MASTER_ADDR=... -x MASTER_PORT=29500)." if launcher == "Open MPI" else ".")
            )
        self.main_address = address or "127.0.0.1"
        self.main_port = port or _port_of(job or "")

    main_address: str = ""  # Lightning: ClusterEnvironment.main_address
    main_port: int = 0  # Lightning: ClusterEnvironment.main_port
    creates_processes_externally: bool = True  # Lightning: ClusterEnvironment.creates_processes_externally

    @staticmethod
    def detect() -> bool:
        """Whether this process was started by such a launcher."""
        return launcher_name() in {*_MPI, *_OTHERS} and not LSFEnvironment.detect()

    def world_size(self) -> int:
        """The number of processes."""
        return self._size

    def global_rank(self) -> int:
        """The rank of this process."""
        return self._rank

    def local_rank(self) -> int:
        """The rank of this process within its node."""
        return self._local_rank

    def node_rank(self) -> int:
        """The rank of its node."""
        return self._node_rank

    def set_world_size(self, size: int) -> None:
        """Does nothing: Lightning sets what is known from the launcher."""

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: Lightning sets what is known from the launcher."""


def environment_of_launcher(plugins: list[Any], num_nodes: int) -> list[Any]:
    """Returns a cluster environment for the plugins, if a launcher unknown to Lightning has started this process."""
    if not LaunchedEnvironment.detect() or any(isinstance(plugin, ClusterEnvironment) for plugin in plugins):
        return []
    return [LaunchedEnvironment(str(launcher_name()), num_nodes)]


def _found(launchers: dict[str, _Names]) -> str | None:
    # The ranks that Lightning starts have WORLD_SIZE, too, but no RANK, or the one that this package has added.
    is_named = {
        name: names.rank in os.environ and not (name == _PLAIN and _is_completed()) for name, names in launchers.items()
    }
    sizes = {name: _number_in(launchers[name].size, 1) for name in launchers if is_named[name]}
    return next((name for name, size in sizes.items() if size > 1), None)


def _is_completed() -> bool:
    """Whether `rank_variables` has set RANK, in this process or in the one that has started it."""
    return os.environ.get(_COMPLETED) == f"{os.environ.get('RANK')}/{os.environ.get('WORLD_SIZE')}"


def _names(launcher: str) -> _Names:
    return (_MPI | _OTHERS).get(launcher) or _OTHERS[_PLAIN]  # torchrun's are the plain ones


def _check_alone() -> None:
    """Raises an error if this process would be one of several independent runs."""
    nodes = os.environ.get("PET_NNODES", "1").rpartition(":")[2]
    if nodes.isdecimal() and int(nodes) > 1:
        raise ValueError(
            f"this is one of {nodes} nodes (PET_NNODES), whose processes torchrun starts: run torchrun, or `polyphase"
            " launch --`, in front of the script; both take their options from these variables."
        )
    rank = os.environ.get("RANK", "0")
    if rank.isdecimal() and int(rank) > 0 and "WORLD_SIZE" not in os.environ:
        raise ValueError(f"this is process {rank} of several (RANK), but WORLD_SIZE does not say of how many: set it.")


def _port_of(job: str) -> int:
    return _PORTS[int.from_bytes(hashlib.sha256(job.encode()).digest()[:4]) % len(_PORTS)]


def _whole_share(num_processes: int, parts: int) -> int:
    if num_processes % parts:
        raise ValueError(
            f"{launcher_name()} started {num_processes} processes, which is no multiple of {parts}: start the same"
            " number on every node."
        )
    return num_processes // parts


def _count(devices: Any) -> int | None:
    """Number of requested devices; None for "auto" and for -1 (all)."""
    if isinstance(devices, str) and "," in devices:
        return len([device for device in devices.split(",") if device.strip()])
    if isinstance(devices, (list, tuple)):
        return len(devices)
    text = str(devices).strip()
    if text in ("auto", "-1"):
        return None
    if text.isdecimal() and not isinstance(devices, bool):
        return int(text)
    raise ValueError(f"devices must be a whole number of at least 1, -1 (all), a list or 'auto': got {devices!r}.")


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
    return max(_number_in(f"{name}_RESTART_COUNT", 0) for name in ("TORCHELASTIC", "SLURM"))


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
    return _number_in("WORLD_SIZE", 1)


def master_port() -> int | None:
    """The port of the rendezvous, if the user or a launcher has set one."""
    return _number_in("MASTER_PORT", 0) or None


def launched_as() -> tuple[int, int, str]:
    """This process's rank in the job, its rank on the host, and the address of rank 0, as torchrun sets them."""
    return _number_in("RANK", 0), _number_in("LOCAL_RANK", 0), os.environ.get("MASTER_ADDR") or "127.0.0.1"


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
    return _number_in("PL_GLOBAL_SEED", torch.initial_seed())


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
