"""Which sample goes where: the user's order, dealt to the ranks, and where in it a run is."""

from .batch_size import check_batch_sizes, check_loader
from .global_batches import GlobalBatches, InOneRow
from .global_order import GlobalOrder, Samples
from .place import Pass, decides, order_of
from .stateful import Remembering, as_stateful, is_stateful, keeps_place, remembering

__all__ = [
    "GlobalBatches",
    "GlobalOrder",
    "InOneRow",
    "Pass",
    "Remembering",
    "Samples",
    "as_stateful",
    "check_batch_sizes",
    "check_loader",
    "decides",
    "is_stateful",
    "keeps_place",
    "order_of",
    "remembering",
]
