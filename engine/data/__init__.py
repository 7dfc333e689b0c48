"""Which sample goes where: the user's order, dealt to the ranks."""

from .global_order import GlobalOrder

__all__ = ["GlobalOrder"]
