"""The port of the rendezvous of the ranks of one machine, reserved so that no other program gets it."""

import socket
import sys
from typing import Any

__all__ = ["reserve_port"]


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
