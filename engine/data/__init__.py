"""Which sample goes where: the user's order, dealt to the ranks, and where in it a run is."""

from .global_order import GlobalOrder
from .place import Pass, decides, order_of
from .stateful import Remembering, as_stateful, is_stateful, keeps_place, remembering

__all__ = [
    "GlobalOrder",
    "Pass",
    "Remembering",
    "as_stateful",
    "decides",
    "is_stateful",
    "keeps_place",
    "order_of",
    "remembering",
]
