"""torchrun, with what `polyphase launch` adds to it.

    python -m polyphase.engine.launch.agent [torchrun options] script.py [arguments]

It leaves the other ranks alone when a signal has ended one, if they have said that they go on without it: torchrun ends
all. The job's store is in this process, so it outlives each of them. On several machines it is in that of node 0, so
the run goes on without any other machine. One whose ranks have all ended leaves the job, and starts none again: the
others have gone on without them.

It ends when the host of its rendezvous no longer answers. torchrun keeps a connection to the key-value store at the
rendezvous endpoint. If that host loses its power, or the network drops packets, torchrun waits in a store call until
its kernel gives the connection up: a quarter of an hour or more, long after its ranks have ended. So a thread probes
that host with new connections, and ends torchrun and its ranks if it gets no answer for too long.
"""

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from ..distributed.environment import has_lost_machine, is_outlived, share_survivors_folder
from ..distributed.job_store import ProcessState, probe

__all__ = ["main"]

_LONGEST_S = 60.0
"""The longest time without an answer of the host; by then, ranks have detected it and written their reports."""
_PERIOD_S = 2.0
_END_TIMEOUT_S = 10.0
"""The time between SIGTERM and SIGKILL for the ranks."""


def main(words: list[str]) -> None:
    """Runs torchrun with these arguments."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext
    from torch.distributed.elastic.multiprocessing.errors import record
    from torch.distributed.run import get_rdzv_endpoint, parse_args, run

    options = parse_args(words)
    address = _place(get_rdzv_endpoint(options))
    if address is not None:
        threading.Thread(target=_watch, args=address, name="polyphase-rendezvous", daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        is_one = options.nnodes == "1"
        if is_one or options.rdzv_backend == "static":  # else agents meet anew, with all ranks, when one leaves
            share_survivors_folder(folder)
            _leave_survivors(SubprocessContext, is_one=is_one)
            _wait_for_none_lost(SimpleElasticAgent)
        record(run)(options)


def _leave_survivors(contexts: Any, *, is_one: bool) -> None:
    """Has torchrun count a rank that a signal has ended as done, while others run that go on without it.

    Args:
        contexts: the class of the processes that torchrun has started.
        is_one: whether the job has one machine; on several, this process ends when the last rank of this one has.
    """
    note = contexts._capture_process_failures  # torch: notes the ranks that have ended, once an interval

    def note_others(context: Any, ended: set[int]) -> None:
        note(context, ended)
        others = context._running_local_ranks - ended
        for rank, failure in list(context._failures.items()):
            if others and failure.exitcode < 0 and is_outlived(failure.pid):
                del context._failures[rank]
        if not (others or is_one) and any(is_outlived(failure.pid) for failure in context._failures.values()):
            print(
                "polyphase launch: all ranks of this machine have ended in a run with on_rank_loss='continue', which"
                " goes on without them as long as node 0 is there, or has failed. None is started again here.",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # with node 0, its store ends, and so does the run

    contexts._capture_process_failures = note_others


def _wait_for_none_lost(agents: Any) -> None:
    """Has torchrun, when its ranks are done, wait for other machines only if the run has lost none."""
    wait = agents._exit_barrier  # torch: waits for the agents of all machines, for five minutes

    def wait_for_all(agent: Any) -> None:
        if not has_lost_machine():
            wait(agent)

    agents._exit_barrier = wait_for_all


def _watch(address: str, port: int, longest_s: float = _LONGEST_S) -> None:
    """Ends this process, and all that it has started, when the host at `address` has not answered for `longest_s`.

    A host that has never answered does not count: torchrun has its own time limit for it. A refused connection counts
    as an answer: torchrun notices it, too.
    """
    silent_s = 0.0
    has_answered = False
    before = time.monotonic()
    while silent_s < longest_s:
        time.sleep(_PERIOD_S)
        sign, now = probe(address, port), time.monotonic()
        has_answered |= sign is ProcessState.LIVES
        # Time in which this machine was suspended does not count.
        silent_s = silent_s + min(now - before, 3 * _PERIOD_S) if has_answered and sign is ProcessState.UNKNOWN else 0.0
        before = now
    print(
        f"polyphase launch: the host of the rendezvous, {address}:{port}, has not answered for {silent_s:.0f} s. The"
        " job can't go on without it: this machine's processes end. Start the job again once the host is back.",
        file=sys.stderr,
        flush=True,
    )
    _end_children()
    os._exit(1)  # torchrun itself is in a call of the store that does not return


def _end_children() -> None:
    children = psutil.Process().children(recursive=True)
    _send(children, signal.SIGTERM)
    _send(psutil.wait_procs(children, timeout=_END_TIMEOUT_S)[1], signal.SIGKILL)


def _send(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _place(endpoint: str) -> tuple[str, int] | None:
    """Host and port of a rendezvous endpoint; None if it is on this machine or names no port, as with etcd."""
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal():
        host, port = endpoint, "29400"  # torch: c10d_rendezvous_backend.DEFAULT_PORT
    is_here = host in ("", "localhost", "127.0.0.1", "::1")
    return None if is_here or int(port) == 0 else (host.strip("[]"), int(port))


if __name__ == "__main__":
    main(sys.argv[1:])
