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

from ..foreign import open_new
from ..version import __version__
from .flight_recorder import describe_differences, mismatches
from .lost_hosts import HOST_LOST

__all__ = ["Report", "what_to_do"]


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
            files.mv(fresh, f"{path}/{self._name}")  # atomically, since this process may be killed meanwhile
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
        "a launcher that does not pickle: strategy='ddp' or 'ddp_fork'; or define the class or function at the top of"
        " its module",
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
