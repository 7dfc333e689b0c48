"""Which sample goes where: the user's order, dealt to the ranks, and where in it a run is."""

from .global_order import GlobalOrder
from .place import Pass, order_of
from .stateful import as_stateful, is_stateful

__all__ = ["GlobalOrder", "Pass", "as_stateful", "is_stateful", "order_of"]
