"""Environment variables about processes and their connections, those that launchers set among them."""

import hashlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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
from .variables import MOST_PROCESSES, MPI, OTHERS, PLAIN, RANGES, SLURM, Names, number_in

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
    "has_lost_machine",
    "has_rendezvous",
    "is_elastic",
    "is_in_survivors_folder",
    "is_outlived",
    "job_marks",
    "job_secret",
    "keep_job_secret",
    "keeping_interface",
    "launcher_name",
    "listen_on_loopback",
    "listen_towards",
    "note_lost_machine",
    "num_launched",
    "own_address",
    "owns_master_port",
    "parent_pid",
    "place_on_one_machine",
    "rank_variables",
    "reserve_port",
    "resolve_sizes",
    "restart_count",
    "set_local_rank",
    "set_outlived",
    "share_job_secret",
    "share_survivors_folder",
    "share_threads",
    "shows_all_frames",
    "started_by_hand",
]

# Detects the launcher of a run's processes, and the rank of this one.
#
# Variables that announce several processes either define one run, or are refused with their names: N independent runs
# that write into one folder would all end with exit code 0. Lightning supports torchrun, SLURM and LSF; the others are
# here.

_COMPLETED = "POLYPHASE_RANK_VARIABLES"
"""The variable with RANK and WORLD_SIZE, separated by a slash, if this run has set RANK, not a launcher."""
_JOB_IDS = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "HYDRA_JOBID", "SUBMITIT_LOCAL_JOB_ID", "PBS_JOBID")
"""Variables with one value in all processes of a job, and other values in other jobs."""
_ADDRESS = re.compile(r"(?=.{1,253}$)\w[\w.-]*|\[?[0-9a-fA-F:]*:[0-9a-fA-F:.]*(%\w+)?\]?", re.ASCII)
"""Matches the name of a machine, or an address of IPv4 or IPv6, without a port."""
_PORTS = range(20_000, 30_000)
"""Ports below those that systems assign automatically."""
_OWN_HOST = ("localhost", "127.0.0.1", "::1")
_RANK_FILE = "LSB_DJOB_RANKFILE"
_NEEDED = {
    "torchrun": ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "SLURM": (SLURM.size, SLURM.rank, SLURM.local_rank, "SLURM_NODEID"),
}
"""The variable by which Lightning detects a launcher, and those without which it then ends in a KeyError."""


def _check_variables() -> None:
    """Checks the variables of all launchers, before anything reads them.

    Raises:
        ValueError: one is no number of its kind, or contradicts another one; the message has their names and values.
    """
    for name in RANGES:
        number_in(name, 0)
    launcher = launcher_name()
    names = SLURM if launcher == "SLURM" else _names(str(launcher))
    pairs = [(names.rank, names.size), (names.local_rank, names.local_size)]
    for rank, size in pairs[: 1 if launcher == "SLURM" else 2]:  # SLURM's last one is that of the job, not of the step
        num_ranks = number_in(size, MOST_PROCESSES)
        if number_in(rank, 0) >= num_ranks:
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


def _check_complete(launcher: str | None) -> None:
    """Checks that the variables which Lightning's own environment of a launcher reads are there.

    Raises:
        ValueError: one is missing, or is a file that is none; the message has its name, and what is there instead.
    """
    mark, *needed = _NEEDED.get(str(launcher), ("",))
    if missing := [name for name in needed if name not in os.environ]:
        raise ValueError(
            f"{mark}={os.environ[mark]} says that {launcher} has started this process, but not as which, without"
            f" {' and '.join(missing)}: start it by {'srun' if launcher == 'SLURM' else launcher}, or unset {mark}"
            " for a run of its own."
        )
    if not LSFEnvironment.detect():
        return
    path, host, hosts = os.environ[_RANK_FILE], socket.gethostname(), list[str]()
    with suppress(OSError, UnicodeDecodeError):
        hosts = Path(path).read_text().split()[1:] if os.path.isfile(path) else []  # the first one only starts the job
    if host not in hosts:
        raise ValueError(
            f"the environment variable {_RANK_FILE}={path!r} must name a file with a host on each line: the one that"
            f" starts the job, then those of the ranks, among them this one ({host})."
        )


def _check_place(launcher: str | None, per_node: int, num_nodes: int) -> None:
    """Checks that this process has one of the places of the run.

    Raises:
        ValueError: its number on its node, or its node's, is too large; the message has its variable.
    """
    node = "NODE_RANK" if "NODE_RANK" in os.environ else "GROUP_RANK"  # as Lightning's own environment has it
    own = {None: ("LOCAL_RANK", node), "torchrun": ("LOCAL_RANK", "GROUP_RANK"), "SLURM": _NEEDED["SLURM"][2:]}
    for name, limit in zip(own.get(launcher, ()), (per_node, num_nodes), strict=False):
        if per_node * num_nodes > 1 and number_in(name, 0) >= limit:
            raise ValueError(
                f"the environment variable {name}={os.environ[name]} doesn't fit {num_nodes} node(s) of {per_node}"
                f" process(es) each: it is from 0 to {limit - 1}."
            )


def launcher_name() -> str | None:
    """``"torchrun"``, ``"SLURM"``, ``"Open MPI"``, ...; None if no launcher has started several processes."""
    if TorchElasticEnvironment.detect():
        return "torchrun"
    if (name := _found(MPI)) is not None:
        return name
    # SLURM_NTASKS_PER_NODE and friends also exist in an interactive allocation, which starts one process only.
    if SLURMEnvironment.detect() and number_in("SLURM_NTASKS", 1) > 1:
        return "SLURM"
    return _found(OTHERS)


def started_by_hand() -> bool:
    """Whether ranks were started one by one with torchrun's variables: no launcher looks at their exit codes."""
    return launcher_name() == PLAIN


def _launched_sizes() -> tuple[int, int] | None:
    """(all processes, processes per node) from the launcher; 0 for an unknown number; None without a launcher."""
    launcher = launcher_name()
    if launcher is None:
        return None
    if launcher == "SLURM":
        total = number_in("SLURM_NTASKS", 1)
        num_nodes = number_in("SLURM_NNODES", number_in("SLURM_JOB_NUM_NODES", 0))
        return total, _whole_share(total, num_nodes) if num_nodes else 0
    names = _names(launcher)
    is_one_per_node = launcher == PLAIN and names.local_rank not in os.environ
    return number_in(names.size, 1), number_in(names.local_size, int(is_one_per_node))


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
    launcher, launched = launcher_name(), _launched_sizes()
    knows_itself = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    if launched is None:
        _check_alone()
        if not knows_itself:
            _check_place(None, int(devices) if str(devices).isdecimal() else 1, num_nodes)
        return devices, num_nodes
    if LaunchedEnvironment.detect() and knows_itself:
        return devices, num_nodes
    if not knows_itself:
        _check_complete(launcher)
    total, per_node = launched
    num_devices = _count(devices)
    address = os.environ.get("MASTER_ADDR", "localhost")
    says_nothing = not per_node and num_nodes == 1 and num_devices is None
    if says_nothing and launcher != "SLURM" and address not in _OWN_HOST:
        raise ValueError(
            f"{launcher} started {total} processes, but nothing says how many of them are on this machine: set"
            f" {_names(str(launcher)).local_size}, or give devices and num_nodes."
        )
    per_node = per_node or _whole_share(total, num_nodes)
    nodes = _whole_share(total, per_node)
    if num_devices not in (None, per_node) or num_nodes not in (1, nodes):
        raise ValueError(
            f"{launcher} started {nodes} node(s) x {per_node} process(es), but the flags say"
            f" num_nodes={num_nodes} and devices={devices!r}: leave both out, or give num_nodes={nodes},"
            f" devices={per_node}."
        )
    if not knows_itself:
        _check_place(launcher, per_node, nodes)
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
        self._size, self._rank = number_in(names.size, 1), number_in(names.rank, 0)
        per_node = self._size // num_nodes
        self._node_rank, local_rank = divmod(self._rank, per_node)
        self._local_rank = number_in(names.local_rank, local_rank)
        if not (0 <= self._rank < self._size and self._local_rank == local_rank):
            raise ValueError(
                f"{names.rank}={self._rank} and {names.local_rank}={self._local_rank} don't fit {self._size} processes"
                f" ({names.size}) on {num_nodes} node(s) of {per_node} each, numbered node by node: set"
                f" {names.local_size}, or give num_nodes and devices."
            )
        address, port = os.environ.get("MASTER_ADDR"), number_in("MASTER_PORT", 0)
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
        return launcher_name() in {*MPI, *OTHERS} and not LSFEnvironment.detect()

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


def _found(launchers: dict[str, Names]) -> str | None:
    # The ranks that Lightning starts have WORLD_SIZE, too, but no RANK, or the one that this package has added.
    is_named = {
        name: names.rank in os.environ and not (name == PLAIN and _is_completed()) for name, names in launchers.items()
    }
    sizes = {name: number_in(launchers[name].size, 1) for name in launchers if is_named[name]}
    return next((name for name, size in sizes.items() if size > 1), None)


def _is_completed() -> bool:
    """Whether `rank_variables` has set RANK, in this process or in the one that has started it."""
    return os.environ.get(_COMPLETED) == f"{os.environ.get('RANK')}/{os.environ.get('WORLD_SIZE')}"


def _names(launcher: str) -> Names:
    return (MPI | OTHERS).get(launcher) or OTHERS[PLAIN]  # torchrun's are the plain ones


def _check_alone() -> None:
    """Raises an error if this process would be one of several independent runs."""
    nodes = os.environ.get("PET_NNODES", "1").rpartition(":")[2]
    if nodes.isdecimal() and int(nodes) > 1:
        raise ValueError(
            f"this is one of {nodes} nodes (PET_NNODES), whose processes torchrun starts: run torchrun, or `polyphase"
            " launch --`, in front of the script; both take their options from these variables."
        )
    for names in {**MPI, **OTHERS}.values():
        rank = number_in(names.rank, 0)
        if rank > 0 and names.size not in os.environ:
            raise ValueError(
                f"this is process {rank} of several ({names.rank}), but {names.size} does not say of how many: set it."
            )
        # Of the ranks that Lightning starts, too, WORLD_SIZE is known alone.
        if names.rank != "RANK" and names.rank not in os.environ and number_in(names.size, 1) > 1:
            raise ValueError(
                f"this is one of {os.environ[names.size]} processes ({names.size}), but {names.rank} does not say"
                " which: set it."
            )


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
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_ELSEWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737)."""
_SECRET = "POLYPHASE_JOB_SECRET"
_PARENT = "POLYPHASE_PARENT_PID"
_STACKS = "PYTHONFAULTHANDLER"
_SURVIVORS = "POLYPHASE_SURVIVORS"
"""The folder in which each rank says that the others go on without it; `polyphase launch` looks there."""
_LOST_MACHINE = "lost machine"
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


def set_local_rank(rank: int, num_ranks: int) -> None:
    """Gives this process, which was started by this package, another rank on its machine, the only one."""
    os.environ["LOCAL_RANK"] = str(rank)
    if is_elastic():
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks))


def share_survivors_folder(folder: str) -> None:
    """Names the folder in which the ranks that this process will start say that the others go on without them."""
    os.environ[_SURVIVORS] = folder


def is_in_survivors_folder() -> bool:
    """Whether the launcher of this process leaves the other ranks alone if a signal ends this one."""
    return is_elastic() and _SURVIVORS in os.environ


def set_outlived(is_outlived: bool) -> None:
    """Tells the launcher whether the other ranks go on if a signal ends this process, if it wants to know."""
    if is_in_survivors_folder():
        path = Path(os.environ[_SURVIVORS], str(os.getpid()))
        path.touch() if is_outlived else path.unlink(missing_ok=True)


def is_outlived(process: int) -> bool:
    """Whether a rank has said that the others go on without it; called by its launcher."""
    return Path(os.environ[_SURVIVORS], str(process)).exists()


def note_lost_machine() -> None:
    """Tells this machine's launcher that the run has gone on without any rank of another machine."""
    Path(os.environ[_SURVIVORS], _LOST_MACHINE).touch()


def has_lost_machine() -> bool:
    """Whether a rank has said that all ranks of another machine are lost; called by its launcher."""
    return Path(os.environ[_SURVIVORS], _LOST_MACHINE).exists()


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
    with _restored(*_INTERFACES):
        for name in _INTERFACES:
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

    Raises:
        ValueError: the user has set one that is not there.
    """
    _check_interfaces()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)


def listen_towards(address: str) -> None:
    """Makes gloo listen on the interface from which `address` is reached, from now on, unless the user has set one.

    Otherwise it takes the address of the machine's own name, which is 127.0.1.1 on Debian: the other machines would
    connect to themselves.

    Raises:
        ValueError: the user has set one that is not there.
    """
    _check_interfaces()
    if (name := _interface_towards(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _check_interfaces() -> None:
    interfaces = psutil.net_if_addrs()
    for name in _INTERFACES:
        if absent := {*filter(None, os.environ.get(name, "").split(","))} - interfaces.keys():
            raise ValueError(
                f"the environment variable {name}={os.environ[name]!r} names {' and '.join(sorted(absent))}, but the"
                f" network interfaces of this machine are {', '.join(interfaces)}."
            )


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
    return os.fsencode(os.environ.get(_SECRET) or "".join(_kept_secrets)) or None


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
