"""`none`: the average as it is. What the others are measured against."""

from .base import CommHook
from .bucket import Bucket
from .wire import Wire

__all__ = ["Plain"]


class Plain(CommHook):
    """All-reduce in the dtype of the gradients."""

    name = "none"
    description = "gradients as they are"

    def average(self, bucket: Bucket, wire: Wire) -> None:
        """Divides first, as DDP does without a hook."""
        wire.all_reduce(bucket.gradients.div_(wire.size))
