"""Runs a module: one engine, every strategy by flag.

Each name is imported when it is first asked for: torch and Lightning come with `Engine`, and the command often needs
neither.
"""

from typing import TYPE_CHECKING

from .distributed.variables import check_imported_numbers
from .registration import import_on_access
from .version import __version__

if TYPE_CHECKING:
    from .compression import register_comm_hook
    from .engine import Engine, fit
    from .initialization import read_weights
    from .strategies import register_strategy

__all__ = ["Engine", "__version__", "fit", "read_weights", "register_comm_hook", "register_strategy"]

check_imported_numbers()

__getattr__ = import_on_access(
    __name__,
    {
        "Engine": "engine",
        "fit": "engine",
        "read_weights": "initialization",
        "register_comm_hook": "compression",
        "register_strategy": "strategies",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
