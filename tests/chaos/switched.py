"""Several hosts on this machine at one switch: network namespaces, each at an end of a veth pair of its own rate.

What `Hosts` says holds for each of them. The rate is that of both directions of a host's cable. Needs root.
"""

import secrets
from collections.abc import Sequence

from .hosts import Hosts

from _namespaces import LATENCY, LEAST_BURST_BYTES, BURST_S, _call, bits_per_second  # isort: skip  # in its path by now

__all__ = ["Switched"]


class Switched(Hosts):
    """Hosts "node0", "node1", ... ; what runs there ends with the `with` block.

    Args:
        rates: of each host's cable, as `tc` writes it: ``"100mbit"``; None for no limit.
    """

    def __init__(self, rates: Sequence[str | None]) -> None:
        super().__init__()
        key, number = secrets.token_hex(4), len(rates)
        self.rates = rates
        self.interfaces = [f"pp{key}v{host}" for host in range(number)]
        net = self.addresses[0].rpartition(".")[0]
        self.addresses = [f"{net}.{host + 1}" for host in range(number)]
        self.names = [*(f"polyphase-{key}-{host}" for host in range(number)), f"polyphase-{key}-switch"]

    def _build(self) -> None:
        *names, switch = self.names
        for name in self.names:
            _call("ip", "netns", "add", name)
        _call("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _call("ip", "-n", switch, "link", "set", "switch", "up")
        for name, end, address, rate in zip(names, self.interfaces, self.addresses, self.rates, strict=True):
            far_end = f"{end}s"
            _call("ip", "link", "add", end, "netns", name, "type", "veth", "peer", "name", far_end, "netns", switch)
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", end)
            _call("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")
            if rate is not None:
                burst = max(LEAST_BURST_BYTES, round(bits_per_second(rate) / 8 * BURST_S))
                for place, link in ((name, end), (switch, far_end)):
                    limit = ["root", "tbf", "rate", rate, "burst", f"{burst}b", "latency", LATENCY]
                    _call("tc", "-n", place, "qdisc", "add", "dev", link, *limit)
            _call("ip", "-n", switch, "link", "set", far_end, "master", "switch")
            _call("ip", "-n", switch, "link", "set", far_end, "up")
            for link in ("lo", end):
                _call("ip", "-n", name, "link", "set", link, "up")
