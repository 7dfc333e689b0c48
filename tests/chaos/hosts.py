"""Two hosts on this machine, and the cable between them: for what happens to a job when a host or the network fails.

A host is a network namespace (`Namespaces`) with a name and process numbers of its own. Its disk is that of this
machine, as if shared. Needs root.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from ..distributed import ROOT
from .storm import JOB

sys.path.append(str(ROOT / "benchmarks"))
from _namespaces import Namespaces

__all__ = ["Hosts", "Namespaces", "enter"]

_NAMES = 0x04000000
"""CLONE_NEWUTS."""
_OWN = ("unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c")


def enter(namespace: str, name: str | None = None) -> None:
    """Moves this process, which has one thread, into a network namespace; it has a host's name of its own there."""
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns is Python 3.12's
    with Path("/run/netns", namespace).open() as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"no way into the network namespace {namespace}")
    if name is not None:
        if libc.unshare(_NAMES):
            raise OSError(ctypes.get_errno(), "no namespace for a name")
        socket.sethostname(name)


class Hosts(Namespaces):
    """Two hosts, "node0" and "node1"; what runs there ends with the `with` block."""

    def start(
        self, host: int, words: list[str], log: Path, env: dict[str, str] | None = None, *, nameless: bool = False
    ) -> psutil.Process:
        """Runs a command on one of the hosts; what it prints is added to `log`.

        Args:
            host: its number.
            words: the command.
            log: appended to.
            env: more variables.
            nameless: nothing says which address the host's own name has.
        """
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            **(env or {}),
        }
        variables.pop("GLOO_SOCKET_IFNAME", None)
        hosts = "mount --bind /dev/null /etc/hosts && " if nameless else ""
        script = f'{hosts}hostname node{host} && exec "$@"'
        with log.open("ab") as output:
            child = self.run(host, [*_OWN, script, "sh", *words], variables, output)
        return psutil.Process(child.pid)

    def processes(self, host: int) -> list[psutil.Process]:
        """All that runs on a host, and has not ended."""
        pids = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True).stdout
        found = []
        for pid in map(int, pids.split()):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self, host: int) -> list[psutil.Process]:
        """The ranks of the job that run on a host."""
        found = []
        for process in self.processes(host):
            with suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if str(JOB) in words and "-m" not in words and words[0] == sys.executable:  # no launcher
                    found.append(process)
        return found

    def kill(self, host: int) -> None:
        """Ends all processes of a host at once; its kernel goes on, and so tells the others."""
        for process in self.processes(host):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def suspend(self, host: int) -> None:
        """Stops all processes of a host, until `resume`; its kernel goes on."""
        for process in self.processes(host):
            process.suspend()

    def resume(self, host: int) -> None:
        """Undoes `suspend`."""
        for process in self.processes(host):
            process.resume()

    def power_off(self, host: int) -> None:
        """Ends all processes of a host at once, and nobody is told."""
        self.cut()
        self.kill(host)
