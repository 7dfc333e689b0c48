"""The only place in the tests that starts processes: each has a deadline and takes its whole tree along."""

import faulthandler
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.multiprocessing as mp

from tests import warm

ROOT = Path(__file__).parents[1]

_COMMANDS = str(Path(sys.executable).parent)

_LAST_WORDS_S = 2.0
"""How long before its deadline a rank prints where it is."""


class Finished(NamedTuple):
    """A command that ended, or was ended at its deadline (`returncode` is then -9)."""

    returncode: int
    output: str
    """Standard output and error, as they came."""


def run_command(
    arguments: Sequence[str | Path], *, timeout_s: float = 120, cwd: Path | None = None, cold: bool = False
) -> Finished:
    """Runs a command in a process group of its own; at the deadline the whole group is killed.

    Interpreters in it, this one's, are forks of one that has imported torch and the engine (`tests.warm`), unless they
    are to be `cold`.
    """
    words = [str(argument) for argument in arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        words if cold else warmed(words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        warm.kill_rest(process.pid)
        output, _ = process.communicate()
        output += f"\n[ended after {timeout_s} s]"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # children that outlived it
        warm.kill_rest(process.pid)
    return Finished(process.returncode, output)


def warmed(words: Sequence[str]) -> list[str]:
    """A command line whose interpreters and Python commands are warm, by their paths or by their folder in PATH."""
    return [
        word.replace(_COMMANDS, warm.commands(), 1) if word.startswith((_COMMANDS, f"PATH={_COMMANDS}")) else word
        for word in words
    ]


def torchrun(
    script: Path, *arguments: str, nproc: int = 2, timeout_s: float = 120, cwd: Path | None = None, cold: bool = False
) -> Finished:
    """Runs a script under real torchrun, on loopback; `cold` as for `run_command`."""
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={nproc}",
        f"--master-port={free_port()}",
    ]
    return run_command([*launcher, script, *arguments], timeout_s=timeout_s, cwd=cwd, cold=cold)


def in_a_fork(function: Callable[..., Any], *arguments: Any, timeout_s: float) -> Any:
    """What `function` returns in a fork of this process, which then ends with all that it has started.

    Raises:
        TimeoutError: it takes longer.
        EOFError: it has ended without a word; the message has its exit code.
    """
    context = mp.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        if not here.poll(timeout_s):
            raise TimeoutError(f"no end after {timeout_s:.0f} s")
        return here.recv()
    except EOFError:
        process.join()
        raise EOFError(f"the process ended with exit code {process.exitcode}") from None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def _send(to: Any, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.setsid()
    gc.freeze()  # collected here, dropped groups and stores would join threads that only the parent has
    to.send(function(*arguments))
    to.close()


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *arguments: Any,
    timeout_s: float = 60,
    start_method: str = "spawn",
    connects: bool = True,
) -> None:
    """Runs ``function(rank, *arguments)`` in `num_ranks` processes that form a gloo group; any rank's error is raised.

    Unless `connects`, they form none: that is left to `function`.

    With "fork" each of them is spared the seconds that the imports take, and a warning is an error in it, too.

    Raises:
        TimeoutError: they did not end in time; each prints its stack, and all of them are killed.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        # The server's thread looks up the name of whoever connects. A process that is forked meanwhile has the lock of
        # the C library's resolver, and nobody who lets it go: nobody connects until all have been forked.
        all_started = mp.get_context(start_method).Event()
        port = server.port if connects else None
        workers = (all_started, timeout_s, function, num_ranks, port, arguments)
        with warm.spawning() if start_method == "spawn" else nullcontext():
            context = mp.start_processes(_rank, args=workers, nprocs=num_ranks, join=False, start_method=start_method)
        all_started.set()
        deadline = time.monotonic() + timeout_s
        # As often as a rank ends.
        while not context.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=2):
            if time.monotonic() >= deadline:
                for process in context.processes:
                    process.kill()
                raise TimeoutError(f"{function.__name__} was still running after {timeout_s} s")
    finally:
        # The traceback of a failure would keep it; a later fork that frees it aborts, as it doesn't have its thread.
        del server


def _rank(
    rank: int,
    all_started: Any,
    timeout_s: float,
    function: Callable[..., Any],
    num_ranks: int,
    port: int | None,
    arguments: tuple[Any, ...],
) -> None:
    faulthandler.dump_traceback_later(max(1.0, timeout_s - _LAST_WORDS_S), file=2)
    gc.freeze()  # in a fork, dropped groups and stores would join threads that only the parent has
    torch.set_num_threads(1)
    all_started.wait()
    if port is not None:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        function(rank, *arguments)
    finally:
        if dist.is_initialized():  # a run that has failed ends it
            dist.destroy_process_group()
        gc.collect()  # FSDP leaves cycles that hold finished collectives; freed at exit, they may end it in SIGABRT
