"""The JSON report of a failed run: which rank failed, the position of each rank, and collectives that differ."""

import json
import os
import platform
import re
import socket
import time
from typing import Any

import lightning
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ..distributed.job_store import ProcessState, StoreLostError, place_of
from ..foreign import for_terminal, open_new
from ..version import __version__
from .flight_recorder import describe_differences, mismatches
from .rendezvous import RankRegistry

__all__ = [
    "DIED",
    "HOST_LOST",
    "Report",
    "because",
    "blame",
    "connection_lost",
    "lost_ranks",
    "store_lost",
    "what_to_do",
]


# --- diagnoses a lost connection to another machine
# A rank can't know whether the other host has lost its power or the network between them drops packets. So the message
# about a lost connection names the host at its other end, but no culprit. If that host's kernel can be reached
# (`host_liveness`), it shows which processes have ended.


DIED = "its process has ended without an error message"

HOST_LOST = "lost host"
"""The kind of a failure whose culprit is unknown."""

_PEER = re.compile(r"\[([0-9A-Fa-f:.]+)\]:\d+")
"""The address of the other end of a connection, in gloo's errors."""
_SILENCE_S = 3.0
"""The time without a heartbeat after which a rank's process is probed: each rank sends one a second."""
_MAX_SILENT_HOSTS = 3
"""The number of hosts without an answer after which no other one is probed: each probe takes seconds."""
_ENDING_S = 0.5
"""The time that the processes of a host may take to end together."""
_UNKNOWN = "the culprit is unknown: that host, or the network between"


def because(failure: dict[str, Any], rank: int) -> str:
    """Describes a recorded failure as the reason why `rank` stops."""
    message = for_terminal(failure["message"], has_lines=True)  # of the store, to which others can write
    if failure["kind"] == HOST_LOST:
        return message
    if failure["rank"] != rank:
        return f"rank {failure['rank']} failed first: {message}"
    return message if failure["by"] == rank else f"rank {failure['by']} reports its failure: {message}"


def blame(failure: dict[str, Any]) -> str:
    """Describes a recorded failure as the reason why the run ends, for the exception of a rank that has not failed."""
    message = for_terminal(failure["message"], has_lines=True)
    return f"because {message}" if failure["kind"] == HOST_LOST else f"because of rank {failure['rank']}: {message}"


def lost_ranks(peers: RankRegistry, silent: dict[int, float], longest_s: float) -> tuple[str, str, list[int]] | None:
    """Finds ranks of other machines that have ended, hang, or can't be reached.

    Args:
        peers: all ranks.
        silent: the seconds since the last heartbeat of each rank in question.
        longest_s: the longest time without a heartbeat for a rank whose process runs.

    Returns:
        The kind of the failure, its message and the ranks; None if there are none.
    """
    by_state = _by_state(peers, list(silent))
    if ended := by_state[ProcessState.ENDED]:
        ending = _ended(peers, ended)
        return ending["kind"], ending["message"], ended
    if lost := by_state[ProcessState.UNKNOWN]:
        silent_s = max(silent[rank] for rank in lost)
        hosts = peers.hosts(lost)
        message = f"the connection to {hosts} is lost: nothing has been heard of it for {silent_s:.0f} s; {_UNKNOWN}"
        return HOST_LOST, message, lost
    # A rank that has connected in an earlier run may still be on its way into this one.
    if stuck := [rank for rank in silent if silent[rank] > longest_s and rank in peers.last]:
        return "hang", f"nothing has been heard of it for {silent[stuck[0]]:.0f} s, though its process lives", stuck
    return None


def store_lost(peers: RankRegistry | None, error: RuntimeError) -> str | None:
    """Returns a message about a store that can't be reached any more; None if it was on this machine."""
    if peers is None or not (elsewhere := peers.on_other_hosts()):
        return None
    store = peers.job.store
    address = place_of(store).rpartition(" at ")[2].rpartition(":")[0]
    ranks = peers.on_other_hosts(address) or ([0] if 0 in elsewhere else [])
    if not ranks:
        return None
    reason = str(error).rstrip(".") if isinstance(error, StoreLostError) else f"{place_of(store)} is gone"
    return f"the connection to {peers.hosts(ranks)} is lost: {reason}; {_UNKNOWN}"


def connection_lost(peers: RankRegistry, error: BaseException, reporter: int) -> dict[str, Any] | None:
    """Returns the failure behind the error of a connection; None if the ranks of other machines still run.

    Waits some seconds for heartbeats of the ranks at the other end.
    """
    match = _PEER.search(str(error))
    address = match[1].removeprefix("::ffff:") if match else None
    ranks = peers.on_other_hosts(address)
    if not ranks:
        peers.look_for_all()
        ranks = peers.on_other_hosts(address)
    if not ranks:
        return None
    failure = {"rank": ranks[0], "kind": HOST_LOST, "by": reporter}
    without_store = None
    try:
        ranks = peers.without_heartbeat(ranks, _SILENCE_S)
    except RuntimeError as error_of_store:  # no heartbeat can be read any more
        time.sleep(_ENDING_S)
        without_store = store_lost(peers, error_of_store)
        without_store = without_store or f"the connection to {peers.hosts(ranks)} is lost; {_UNKNOWN}"
    by_state = _by_state(peers, ranks)
    if ended := by_state[ProcessState.ENDED]:
        return {**failure, **_ended(peers, ended)}
    if without_store is not None:
        return {**failure, "message": without_store}
    if lost := by_state[ProcessState.UNKNOWN]:
        return {**failure, "rank": lost[0], "message": f"the connection to {peers.hosts(lost)} is lost; {_UNKNOWN}"}
    return None  # these ranks still run, and report their own failures


def _by_state(peers: RankRegistry, ranks: list[int]) -> dict[ProcessState, list[int]]:
    """Probes the processes of `ranks`; a host that does not answer is probed once."""
    by_state: dict[ProcessState, list[int]] = {state: [] for state in ProcessState}
    silent_hosts: set[str] = set()
    for rank in ranks:
        host = peers.processes[rank]["host"]
        skips = host in silent_hosts or len(silent_hosts) >= _MAX_SILENT_HOSTS
        state = ProcessState.UNKNOWN if skips else peers.probe(rank)
        by_state[state].append(rank)
        if state == ProcessState.UNKNOWN:
            silent_hosts.add(host)
    return by_state


def _ended(peers: RankRegistry, ranks: list[int]) -> dict[str, Any]:
    if len(ranks) == 1:
        return {"rank": ranks[0], "kind": "death", "message": f"{DIED}, on {peers.hosts(ranks)}"}
    ended = f"the processes of {peers.hosts(ranks)} have ended without an error message"
    return {"rank": ranks[0], "kind": HOST_LOST, "message": f"{ended}; which was the first is unknown"}


class Report:
    """The JSON report of a failed run; it is created and written without a collective.

    Args:
        folder: local path or fsspec URL, created if need be.
        failure: the record of the first failure: rank, kind, message and by whom.
        ranks: the known facts about each rank.
        resume_from: path of the newest checkpoint; None if there is none.
        details: type, message and traceback of the exception.
        run_id: the one in the manifests of the run's checkpoints.
    """

    def __init__(
        self,
        folder: str,
        failure: dict[str, Any],
        ranks: dict[int, dict[str, Any]],
        resume_from: str | None,
        details: dict[str, Any] | None = None,
        run_id: str | None = None,
    ) -> None:
        now = time.time()
        self._content: dict[str, Any] = {
            "first_failing_rank": None if failure["kind"] == HOST_LOST else failure["rank"],
            "kind": failure["kind"],
            "message": failure["message"],
            "what_to_do": what_to_do(failure),
            "exception": details or None,
            "resume_from": resume_from,
            "run": run_id,
            "collectives": describe_differences(_collectives(ranks)),
            "ranks": {str(rank): ranks[rank] for rank in sorted(ranks)},
            "written_by": {"rank": failure["by"], "host": socket.gethostname(), "pid": os.getpid()},
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now)),
            "versions": {
                "polyphase": __version__,
                "torch": torch.__version__,
                "lightning": lightning.__version__,
                "python": platform.python_version(),
            },
        }
        name = f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-rank{failure['by']}-{os.getpid()}.json"
        self._folder, self._name = folder, name
        self.where = f"{folder}/{name}"
        """The path of the report; or the reason why it could not be written."""
        self.mismatches = mismatches(_collectives(ranks))
        """The sentences of `collectives` about different operations, sizes or types."""

    def add(self, failures: dict[int, dict[str, Any]]) -> None:
        """Writes the report again, with the messages and tracebacks of other ranks that failed as well."""
        ranks: dict[str, Any] = self._content["ranks"]
        for rank, failure in failures.items():
            ranks[str(rank)] = {**ranks.get(str(rank), {}), **failure}
        records = _collectives({int(rank): failure for rank, failure in ranks.items()})
        self._content["collectives"] = describe_differences(records)
        self.mismatches = mismatches(records)
        self.write()

    @property
    def what_to_do(self) -> str | None:
        """The remedy for the failure; None if it is not a common one."""
        return self._content["what_to_do"]

    @property
    def collectives(self) -> list[str]:
        """Sentences about the collectives in which the ranks differ."""
        return list(self._content["collectives"])

    def write(self) -> str:
        """Writes the report; returns `where`."""
        try:
            files, path = url_to_fs(self._folder)
            files.makedirs(path, exist_ok=True)
            fresh = f"{path}/{self._name}.part"
            is_local = isinstance(files, LocalFileSystem)
            with open_new(fresh) if is_local else files.open(fresh, "w") as stream:
                json.dump(self._content, stream, indent=2, default=str)
            move = os.replace if is_local else files.mv  # atomically, since this process may be killed meanwhile
            move(fresh, f"{path}/{self._name}")
        except Exception as error:  # a problem with the report must not hide the failure
            self.where = f"not written: {type(error).__name__}: {error}"
        return self.where


def _collectives(ranks: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any] | None]:
    return {rank: record.get("collectives") for rank, record in ranks.items()}


# --- advice
# Remedies for common errors: a table by their messages, for failure reports and the terminal.


_SHM = (
    "more shared memory: `docker run --shm-size=8g`, in Kubernetes an emptyDir of medium Memory at /dev/shm; or fewer"
    " loader workers"
)
_MEMORY = (
    "a smaller micro-batch, or micro_batch_size='auto', which finds one; precision='bf16-mixed';"
    " activation_checkpointing; or fsdp"
)
_KILLED = "look for the kernel's out-of-memory killer (`dmesg -T | grep -i oom`)"
_NETWORK = (
    "`polyphase doctor host` on each host checks its name and address; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names"
    " the interface to use"
)
_LATE = (
    "one rank is late or has ended: in the report `ranks` has where each of them is, and `collectives` what some have"
    " called and others have not"
)
_NOT_HTTP = "^(?!.*http).*"
"""Excludes messages about HTTP: a logger's request to another address is no connection between ranks."""

# The first match counts: messages about shared memory contain words of those about disks and workers.
_TABLE = (
    (r"bus error|/dev/shm|unable to (mmap|\w+ shared memory)|torch_\d+_\d+.*no space left", _SHM),
    (
        r"too many open files|received \d+ items of ancdata|errno 24\b",
        "`ulimit -n 65536` in the shell that starts the run;"
        " or torch.multiprocessing.set_sharing_strategy('file_system')",
    ),
    (
        r"no space left on device|disk quota exceeded|errno (28|122)\b",
        "make room, or choose another default_root_dir; keep fewer checkpoints (Snapshot(keep_last=...),"
        " ModelCheckpoint(save_top_k=...))",
    ),
    (
        r"worker .* killed by signal: killed|worker .* exited unexpectedly",
        f"{_KILLED}; fewer loader workers, or workers that need less memory",
    ),
    (r"out of memory|can't allocate memory|cannot allocate memory|bad_alloc|alloc_failed", _MEMORY),
    (r"(cublas|cudnn)_status_not_initialized", f"usually because memory ran out: {_MEMORY}"),
    (
        r"address already in use|eaddrinuse|errno:? 98\b",
        "another run has that port: leave MASTER_PORT unset, or choose a free one; under torchrun"
        " --rdzv-endpoint=localhost:0",
    ),
    (
        r"duplicate gpu detected|invalid device ordinal",
        "more ranks on a host than devices: devices= must not exceed what CUDA_VISIBLE_DEVICES leaves visible there",
    ),
    (
        r"re-initialize cuda in forked|autograd's threading in combination with fork",
        "a fork can't train once its parent has used a GPU, or run a backward where there is one: in a notebook restart"
        " the kernel and call fit first; in a script leave out _fork",
    ),
    (
        r"no kernel image is available|driver version is insufficient|found no nvidia driver",
        "the torch that is built for this device and driver: `nvidia-smi` has the driver's CUDA version,"
        " torch.version.cuda has torch's",
    ),
    (
        r"device-side assert|illegal memory access",
        "usually a class or an index is out of range: one run with CUDA_LAUNCH_BLOCKING=1, or on the CPU,"
        " names the line",
    ),
    (
        r"expected all tensors to be on the same device",
        "tensors that the module makes belong on `self.device`, or into `self.register_buffer(...)`",
    ),
    (
        r"expected to have finished reduction in the prior iteration",
        "a step has left out parameters: strategy='ddp:find_unused_parameters=true', or use all of them in the loss",
    ),
    (
        r"can't (get|pickle) local|cannot pickle|can't pickle|picklingerror",
        "define the class or function at the top of its module; or pickle nothing: strategy='ddp' or 'ddp_fork' in"
        " place of 'ddp_spawn', and workers of a DataLoader that are forked",
    ),
    (
        _NOT_HTTP + r"(name or service not known|temporary failure in name resolution|getaddrinfo)",
        f"the host's name is not known there: an address as MASTER_ADDR, or a line in /etc/hosts; {_NETWORK}",
    ),
    (
        _NOT_HTTP + r"(connection refused|no route to host|network is unreachable|econnrefused)",
        f"check MASTER_ADDR and MASTER_PORT, and a firewall between the hosts; {_NETWORK}",
    ),
    (r"timed out waiting \d|wait timeout after|socket timeout|operation timeout", _LATE),
    (r"\bnccl", f"one run with NCCL_DEBUG=WARN names the cause; {_NETWORK}"),
)
_ADVICE = tuple((re.compile(pattern, re.IGNORECASE | re.DOTALL), advice) for pattern, advice in _TABLE)
_BY_KIND = {
    "death": "look at the rank's standard error: `terminate called`, or a line of C++ such as gloo's `EnforceNotMet`,"
    " means that a library has aborted it, for example because the ranks called different collectives; without such"
    f" a line, {_KILLED}, and for the limits of the cluster or the container",
    "hang": _LATE,
    HOST_LOST: f"is that host still there? {_NETWORK}",
}
"""Remedies by the kind of a failure without a message."""


def what_to_do(failure: dict[str, Any]) -> str | None:
    """Returns the remedy for a failure, if it is a common one.

    Args:
        failure: the record of the first failure: ``kind`` and ``message``.
    """
    kind, message = failure["kind"], str(failure["message"])
    return _BY_KIND.get(kind) or next((advice for pattern, advice in _ADVICE if pattern.search(message)), None)
