"""The launchers of a strategy's processes: the script for each rank, here, or workers (`worker_launcher.py`)."""

import atexit
import gc
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Lightning: the private launcher that its own DDPStrategy uses.
from .._compat.lightning import _ChildProcessObserver, _SubprocessScriptLauncher
from ..distributed.environment import (
    child_environment,
    keep_job_secret,
    owns_master_port,
    reserve_port,
    started_by_hand,
)
from ..reliability.failure import print_rank, watch_parent
from ..reliability.hard_exit import END_TIMEOUT_S, await_ranks, end_tree, hard_exit, started_ranks
from ..reliability.rendezvous import current_job, in_words, wait_for_ends

__all__ = ["RefusedLaunchError", "ScriptLauncher", "end_group_at_exit"]


def end_group_at_exit() -> None:
    """Makes this process end its process group before it exits.

    Gloo's threads may otherwise outlive the interpreter, and end a successful run by SIGABRT ("terminate called without
    an active exception"). Lightning does so for NCCL only.
    """
    atexit.register(_end_group)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # FSDP leaves reference cycles with finished collectives; freed later, they cause a SIGABRT


# --- the default launcher: rank 0 is the user's process, and runs its own command again for each other rank


_NO_SCRIPT = """\
strategy {strategy!r} runs the script once per device, but there is no script file ({source}): choose the suffix
_fork or _notebook, or put the code into a file."""

_RAY = """\
strategy {strategy!r} runs this process's command once per device, but it is Ray's own command: let Ray start the
workers, with a TorchTrainer(train_loop, scaling_config=ScalingConfig(num_workers={num_processes})) in this trial or
task, or give devices=1. See docs/clusters.md."""
_RAYS_COMMAND = ("ray", "_private", "workers", "default_worker.py")
"""Ray: the end of the path of the script that its workers run."""

_REPORT_S = 8.0
"""The time limit for a rank to find the cause and to write the report, before or after its parent ends."""

_reservations: list[socket.socket] = []
"""Sockets that reserve the port of the rendezvous, for all runs of this process."""


_awaits_others: set[int] = set()
"""Ids of the processes that wait for the other ranks when they exit."""


class RefusedLaunchError(ValueError, MisconfigurationException):
    """The processes can't be started in this way; also a MisconfigurationException, as in Lightning's launchers."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts the ranks as Lightning does; rank 0's process is the last to end.

    The job's store is in that process, and its exit code is the only one that the user's shell sees.
    """

    outlives_ranks = False
    _hang_timeout_s: float | None = None
    """The longest time of a rank at one position, in seconds; None without limit."""
    _has_ended_them = False
    _can_lose: Callable[[int], bool] = staticmethod(lambda rank: False)
    """Whether the run can continue without a rank; the exit codes of such ranks do not count."""

    def __init__(self, strategy: Any, environment: Any, num_processes: int, num_nodes: int) -> None:
        super().__init__(environment, num_processes, num_nodes)
        self._strategy = strategy

    def launch(self, *args: Any, **kwargs: Any) -> Any:
        """Starts the other ranks, unless another launcher has, and calls the function."""
        trainer = kwargs.get("trainer")
        self._hang_timeout_s = getattr(trainer, "hang_timeout_s", None)
        self._can_lose = self._strategy.can_lose
        watch_parent(self._first_rank + self.cluster_environment.local_rank(), _REPORT_S)
        if started_by_hand() and os.getpid() not in _awaits_others:
            _awaits_others.add(os.getpid())
            atexit.register(self._await_others_at_exit, os.getpid())
        return super().launch(*args, **kwargs)

    def kill(self, signum: Any) -> None:
        """Sends all of them a signal; those that are to be killed get the time to end by themselves."""
        if signum == signal.SIGKILL:  # Lightning: after Ctrl-C, which all of them have got or agreed on
            await_ranks(END_TIMEOUT_S)
        self._has_ended_them = True
        super().kill(signum)

    @property
    def _first_rank(self) -> int:
        """The first of the ranks on this machine."""
        return self.cluster_environment.node_rank() * self.num_processes

    # Lightning: _SubprocessScriptLauncher._check_can_spawn_children, called before it starts the script by sys.argv[0].
    def _check_can_spawn_children(self) -> None:
        super()._check_can_spawn_children()
        if self.num_processes > 1 and Path(sys.argv[0]).parts[-4:] == _RAYS_COMMAND:
            raise RefusedLaunchError(_RAY.format(strategy=self._strategy, num_processes=self.num_processes))
        main: Any = sys.modules["__main__"]
        if self.num_processes > 1 and main.__spec__ is None and not os.path.exists(sys.argv[0]):
            source = {"-c": "python -c", "-": "standard input", "": "a prompt"}.get(sys.argv[0], repr(sys.argv[0]))
            raise RefusedLaunchError(_NO_SCRIPT.format(strategy=self._strategy, source=source))

    # Lightning: _SubprocessScriptLauncher._call_children_scripts, called by `launch` on the first rank of a machine.
    def _call_children_scripts(self) -> None:
        if self.num_nodes == 1:
            keep_job_secret()
        with owns_master_port(self.cluster_environment) as is_ours:
            if is_ours:
                _reservations.append(reserve_port(self.cluster_environment))
        with child_environment(num_nodes=self.num_nodes):
            super()._call_children_scripts()
        started_ranks.update(enumerate(self.procs, self._first_rank + 1))
        atexit.register(self._await_ranks_at_exit)

    def _longest_s(self) -> float | None:
        # A rank that hangs ends itself after `hang_timeout_s`, and knows where it hangs, so it gets that time first.
        return None if self._hang_timeout_s is None else self._hang_timeout_s + _REPORT_S

    def _await_others_at_exit(self, process: int) -> None:
        """Ends with code 1 if another rank has failed after `fit`: nobody else looks at all of their codes."""
        job = current_job()
        if os.getpid() != process or job is None or job.num_ranks == 1:
            return
        has_failed = getattr(sys, "last_value", None) is not None
        longest_s = math.inf if (limit_s := self._longest_s()) is None else limit_s
        failed = wait_for_ends(job, has_failed=has_failed, longest_s=longest_s)
        failed = [rank for rank in failed if rank != job.rank and not self._can_lose(rank)]
        if failed:
            print_rank(job.rank, f"ends with exit code 1: {in_words(failed)} failed when the run was over")
            hard_exit()

    def _await_ranks_at_exit(self) -> None:
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):
                thread._child_processes = []  # Lightning: the thread would kill this process, too
        has_failed = getattr(sys, "last_value", None) is not None  # CPython: the exception that ended the program
        longest_s = END_TIMEOUT_S if has_failed or self._has_ended_them else self._longest_s()
        late = await_ranks(longest_s)
        for rank in late:
            end_tree(started_ranks[rank].pid)
            started_ranks[rank].wait()
        codes = {rank: p.returncode for rank, p in started_ranks.items() if rank in late or not self._can_lose(rank)}
        started_ranks.clear()
        if has_failed or self._has_ended_them or not any(codes.values()):
            return
        for rank, code in codes.items():
            if rank in late:
                print_rank(rank, f"still ran {longest_s:g} s after rank 0 had ended, and was ended")
            elif code:
                print_rank(rank, f"has ended with exit code {code}, after rank 0 had ended")
        hard_exit(max(1, *codes.values()))
