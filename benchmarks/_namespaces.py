"""Two machines and the wire between them, on one: network namespaces, a veth pair, and a limit on what each end sends.

Processes in different namespaces reach each other by the wire only, so that nothing they send can take a way around it.
The limit is `tc`'s token bucket, on both ends, and so in both directions at once. It has no delay of its own (`netem`
would, and many kernels lack it): a round trip takes tens of microseconds, as in one rack, not over a continent.

TCP is Reno in both. Under BBR, which some machines have by default, transfers in both directions at once, as in a ring,
left up to half of such a wire unused in a trial, while Reno filled it; and Cubic can't be chosen in every namespace.

A bucket that was idle lets a burst through at once. It is four milliseconds' worth: with much less, a timer that comes
late loses tokens for good, and 1 Gbit/s becomes half of it; with much more, small messages would pay nothing.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO

__all__ = ["Namespaces", "bits_per_second"]

BURST_S, LEAST_BURST_BYTES = 4e-3, 16 * 1024
LATENCY = "400ms"
"""The longest queue: beyond it packets are dropped, which TCP makes way for."""
END_S = 5.0
"""How long processes may take to end by themselves."""


class Namespaces:
    """Makes both namespaces and the wire; removes them, and ends what runs there, however the `with` block ends.

    Args:
        rate: what each end may send, as `tc` writes it: ``"100mbit"``; None for no limit.
    """

    def __init__(self, rate: str | None = None) -> None:
        self.rate = rate
        key = secrets.token_hex(4)  # an interface's name has at most 15 characters
        self.names = [f"polyphase-{key}-{rank}" for rank in range(2)]
        self.interfaces = [f"pp{key}v{rank}" for rank in range(2)]
        net = f"10.{secrets.randbelow(256)}.{secrets.randbelow(256)}"
        self.addresses = [f"{net}.{rank + 1}" for rank in range(2)]
        self._children: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Namespaces":
        _check()
        try:
            self._build()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(
        self, rank: int, argv: Sequence[str], env: Mapping[str, str], output: IO[bytes] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts `argv` in one namespace, as the leader of a process group; what it prints goes to `output`."""
        words = ["ip", "netns", "exec", self.names[rank], *argv]
        end = subprocess.STDOUT if output else None
        child = subprocess.Popen(words, env=dict(env), stdout=output, stderr=end, start_new_session=True)
        self._children.append(child)
        return child

    def cut(self) -> None:
        """From now on nothing that one end sends arrives at the other, and neither is told: no reset, no lost link."""
        # A neighbour whose hardware address nobody has: what is sent to it is dropped, in every kernel.
        self._reach("02:00:00:00:00:01")

    def mend(self) -> None:
        """Undoes `cut`."""
        self._reach(None)

    def _reach(self, hardware_address: str | None) -> None:
        for name, end, other in zip(self.names, self.interfaces, reversed(self.addresses), strict=True):
            words = ["ip", "-n", name, "neigh"]
            if hardware_address is None:
                _call(*words, "flush", "dev", end, "nud", "permanent")
            else:
                _call(*words, "replace", other, "lladdr", hardware_address, "nud", "permanent", "dev", end)

    def torchrun(self, words: Sequence[str], timeout_s: float = 3600.0) -> None:
        """Runs a script under two torchruns, a process in each namespace that knows its interface, until both are done.

        Raises:
            RuntimeError: one failed, or they were not done in time; with the ends of what they printed.
        """
        launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        launch += [f"--master-addr={self.addresses[0]}", "--master-port=29500"]
        with contextlib.ExitStack() as stack:
            logs, children = [stack.enter_context(tempfile.TemporaryFile()) for _ in self.names], []
            for rank, end in enumerate(self.interfaces):
                env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": end, "TP_SOCKET_IFNAME": end}
                there = [f"--node-rank={rank}", f"--local-addr={self.addresses[rank]}"]
                children.append(self.run(rank, [*launch, *there, *words], env, logs[rank]))
            until = time.monotonic() + timeout_s
            while (codes := [child.poll() for child in children]) != [0, 0]:
                if any(codes) or time.monotonic() > until:
                    ends = "\n".join(f"--- rank {rank}: {_end_of(log)}" for rank, log in enumerate(logs))
                    raise RuntimeError(f"exit codes {codes} (None: still running) within {timeout_s:.0f} s.\n{ends}")
                time.sleep(0.2)

    def sent_bytes(self, rank: int) -> int:
        """All that this end has sent, with headers: those of a large packet that is cut up later are counted once."""
        return self._statistic(rank, "tx_bytes")

    def received_bytes(self, rank: int) -> int:
        return self._statistic(rank, "rx_bytes")

    def _statistic(self, rank: int, name: str) -> int:
        path = f"/sys/class/net/{self.interfaces[rank]}/statistics/{name}"
        return int(_call("ip", "netns", "exec", self.names[rank], "cat", path))

    def _build(self) -> None:
        for name in self.names:
            _call("ip", "netns", "add", name)
        (name, other), (end, far_end) = self.names, self.interfaces
        _call("ip", "link", "add", end, "netns", name, "type", "veth", "peer", "name", far_end, "netns", other)
        for name, end, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            if self.rate is not None:
                burst = max(LEAST_BURST_BYTES, round(bits_per_second(self.rate) / 8 * BURST_S))
                limit = ["rate", self.rate, "burst", f"{burst}b", "latency", LATENCY]
                _call("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *limit)
            _call("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            for link in ("lo", end):
                _call("ip", "-n", name, "link", "set", link, "up")

    def _end(self) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        until = time.monotonic() + END_S
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, until - time.monotonic()))
        for name in self.names:
            # Those whom a child has put in sessions of their own, as torchrun does.
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in map(int, pids.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for child in self._children:
            child.wait()
        for name in self.names:  # an interface goes with its namespace
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def bits_per_second(rate: str) -> float:
    """Of a rate as `tc` writes it.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(k|m|g)bit", rate)
    if found is None:
        raise ValueError(f"expected a rate such as 25mbit, 100mbit or 1gbit, but got {rate!r}.")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]]


def _end_of(log: IO[bytes]) -> str:
    log.seek(0)
    return log.read()[-4000:].decode(errors="replace")


def _check() -> None:
    for program in ("ip", "tc", "sysctl"):
        if shutil.which(program) is None:
            raise OSError(f"network namespaces need the program {program!r}: apt install iproute2 procps.")
    if os.geteuid() != 0:
        raise PermissionError("only root can make network namespaces: run this as root, with sudo -E for instance.")


def _call(*words: str) -> str:
    finished = subprocess.run(words, capture_output=True, text=True)
    if finished.returncode:
        raise OSError(f"`{' '.join(words)}` failed with {finished.returncode}: {finished.stderr.strip()}")
    return finished.stdout
