"""`none`: uncompressed averages, the baseline for the other methods."""

from .base import CommHook
from .bucket import Bucket
from .counting_group import CountingGroup

__all__ = ["AllReduceHook"]


class AllReduceHook(CommHook):
    """Averages gradients with an all-reduce in their own dtype."""

    name = "none"
    description = "gradients as they are"

    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        """Divides first, as DDP does without a hook."""
        wire.all_reduce(bucket.gradients.div_(wire.size))
