"""The strategies: one file or folder each, and the code that they share. Uses private names of Lightning 2.6.

Their table, `registry`, needs no torch; everything else is imported when it is first used.
"""

from typing import TYPE_CHECKING

from ..registration import import_on_access
from .registry import STRATEGIES, register_strategy

if TYPE_CHECKING:
    from ..contract import Capabilities, EngineStrategy, adapt, lists_devices, without_sync
    from .compressing import prepare_to_repeat
    from .fsdp.unit_plan import describe_units
    from .layout import own_buffers, updated_buffers
    from .tensor import make_plan

__all__ = [
    "STRATEGIES",
    "Capabilities",
    "EngineStrategy",
    "adapt",
    "describe_units",
    "lists_devices",
    "make_plan",
    "own_buffers",
    "prepare_to_repeat",
    "register_strategy",
    "updated_buffers",
    "without_sync",
]

__getattr__ = import_on_access(
    __name__,
    {
        "Capabilities": ".contract",
        "EngineStrategy": ".contract",
        "adapt": ".contract",
        "describe_units": "fsdp.unit_plan",
        "own_buffers": "layout",
        "lists_devices": ".contract",
        "make_plan": "tensor",
        "prepare_to_repeat": "compressing",
        "updated_buffers": "layout",
        "without_sync": ".contract",
    },
)
