"""Where a run is in its training data: what a checkpoint says of each loader, and how another run goes on there."""

import dataclasses
from typing import Any

from torch.utils.data import DataLoader

from .global_order import GlobalOrder

__all__ = ["Pass", "order_of", "per_rank", "unit"]


def order_of(loader: DataLoader) -> GlobalOrder | None:
    """The global order that `loader` follows, if it is one of ours."""
    batches: Any = loader.batch_sampler
    for candidate in (batches, getattr(batches, "sampler", None), loader.sampler):
        if isinstance(candidate, GlobalOrder):
            return candidate
    return None


def unit(loader: DataLoader) -> str:
    """Whether a loader's order is one of ``"samples"`` or of ``"batches"``."""
    return "batches" if isinstance(loader.batch_sampler, GlobalOrder) else "samples"


def per_rank(loader: DataLoader) -> int:
    """Items of its order that a rank takes for one batch."""
    return 1 if unit(loader) == "batches" or loader.batch_size is None else loader.batch_size


@dataclasses.dataclass
class Pass:
    """An epoch of one loader, of which some may have been done by another run."""

    loader: DataLoader
    world_size: int
    position: int = 0
    """Where this run began in the epoch's order."""
    batches: int = 0
    """Number of this rank's batches that count as done before that."""
    ledger: list[dict[str, int]] = dataclasses.field(default_factory=list)
    """Who was trained on what before that."""

    @classmethod
    def resumed(cls, loader: DataLoader, world_size: int, state: dict[str, Any]) -> "Pass":
        """Goes on where `state`, of any rank, says; the loader's first iterator yields the rest of the epoch only.

        Raises:
            ValueError: the loader has another order than the one in which that run was.
        """
        order, position = order_of(loader), state["position"]
        assert order is not None
        batches = position // (world_size * per_rank(loader))
        order.resume(state["epoch"], position, batches * per_rank(loader), state["sampler_state"])
        if state["unit"] != unit(loader) or (state["digest"] not in (None, order.digest(position))):
            raise ValueError(
                f"The checkpoint was saved after {position} of {state['length']} {state['unit']} of the epoch, which"
                " this run's DataLoader does not yield in the same order: use the same data, the same seed"
                " (seed_everything) and the same sampler; a sampler of your own that draws from a generator needs"
                " `state_dict` and `load_state_dict`. To begin an epoch instead, load the weights alone."
            )
        return cls(loader, world_size, position, batches, state["ledger"])

    def state_dict(self, epoch: int, batches: int) -> dict[str, Any]:
        """Where the epoch is when this rank has done `batches` batches of it, those before the resumption included."""
        order = order_of(self.loader)
        length = self._length(order)
        done, first = batches - self.batches, self._batches_from(self.position, length)
        if done > first > 0:  # a shorter loader beside a longer one begins again
            done, start = (done - first) % max(1, self._batches_from(0, length)), 0
        else:
            start = self.position
        position = min(length, start + done * self.world_size * per_rank(self.loader))
        return {
            "epoch": epoch,
            "unit": unit(self.loader),
            "position": position,
            "length": length,
            "digest": None if order is None else order.digest(position),
            "sampler_state": None if order is None else order.sampler_state,
            "ledger": [*self.ledger, {"from": start, "to": position, "world_size": self.world_size}],
        }

    def _length(self, order: GlobalOrder | None) -> int:
        return len(self.loader.sampler if order is None else order.sampler)  # type: ignore[arg-type]

    def _batches_from(self, start: int, length: int) -> int:
        per_step = self.world_size * per_rank(self.loader)
        drops = order.drop_last if (order := order_of(self.loader)) else self.loader.drop_last
        return (length - start) // per_step if drops else -(-(length - start) // per_step)
