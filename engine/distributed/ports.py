"""A port at which the ranks of one machine meet, that no other program is given in the meantime."""

import socket
import sys
from typing import Any

__all__ = ["reserve_port"]


def reserve_port(environment: Any) -> socket.socket:
    """Chooses a free port for the ranks to meet at; the socket that is returned keeps it until it is closed.

    A port that is only looked up may be another's by the time that rank 0 listens on it. Linux lets rank 0 listen on
    one that a socket is bound to, as long as that one does not listen.

    Args:
        environment: a `LightningEnvironment`, which names the port from now on.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("", 0))
    environment._main_port = reservation.getsockname()[1]  # Lightning: LightningEnvironment's port
    if sys.platform != "linux":  # elsewhere it would keep rank 0 from the port as well
        reservation.close()
    return reservation
