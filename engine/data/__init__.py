"""Which sample goes where: the user's order, dealt to the ranks, and where in it a run is."""

from .even_batches import EvenBatches, evaluated_order, even_batches_of, is_own
from .global_order import GlobalOrder
from .place import Pass, decides, order_of
from .stateful import Remembering, as_stateful, is_stateful, keeps_place, remembering
from .streams import Agreeing, agreeing, shard_of

__all__ = [
    "Agreeing",
    "EvenBatches",
    "GlobalOrder",
    "Pass",
    "Remembering",
    "agreeing",
    "as_stateful",
    "decides",
    "evaluated_order",
    "even_batches_of",
    "is_own",
    "is_stateful",
    "keeps_place",
    "order_of",
    "remembering",
    "shard_of",
]
