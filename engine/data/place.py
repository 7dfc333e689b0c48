"""The position of a run in its training data: a checkpoint's state of each loader, and how another run continues."""

import dataclasses
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from .drawing import state_of
from .even_batches import is_own
from .global_batches import GlobalBatches
from .global_order import GlobalOrder
from .watched import Watched

__all__ = ["Pass", "decides", "order_of"]


_KNOWN = {"before": {"global": None, "sampler": None}, "sampler": None, "whole": False, "num_passes": 0}
"""The state of an order that was not observed, but is the same whenever the epoch is done again."""


def order_of(loader: DataLoader) -> GlobalOrder | None:
    """The global order that `loader` follows, if it is one of ours."""
    batches: Any = loader.batch_sampler
    for candidate in (batches, getattr(batches, "sampler", None), loader.sampler):
        if isinstance(candidate, GlobalOrder):
            return candidate
    return None


def decides(loader: DataLoader) -> Any:
    """Returns the sampler that says which samples are trained on together, or the user's own batch sampler."""
    batches: Any = loader.batch_sampler
    decides_itself = is_own(batches) and not isinstance(batches, GlobalBatches)
    return batches if decides_itself else getattr(batches, "sampler", loader.sampler)


def _unit(loader: DataLoader) -> str:
    """Whether a loader's order is one of ``"samples"`` or of ``"batches"``."""
    return "batches" if decides(loader) is loader.batch_sampler else "samples"


def _per_rank(loader: DataLoader) -> int:
    """Items of its order that a rank takes for one batch."""
    return 1 if _unit(loader) == "batches" else getattr(loader.batch_sampler, "batch_size", 1)


def _is_same(order: GlobalOrder, state: dict[str, Any]) -> bool:
    """Whether what was trained on is what `order` begins with."""
    drawing, position = order.passes.latest, state["position"]
    if drawing is None:
        return not position
    drawing.up_to(position)
    if state["digest"] is not None:
        return state["digest"] == drawing.digest(position)
    # That run left the loader as it was, and its sampler unread.
    return not state["in_order"] or list(drawing.order[:position]) == list(range(position))


@dataclasses.dataclass
class Pass:
    """An epoch of one loader, of which some may have been done by another run."""

    loader: DataLoader
    world_size: int
    """Number of ranks that share the loader's order; 1 where each rank has a sampler of its own."""
    position: int = 0
    """The position in the epoch's order at which this run began."""
    batches: int = 0
    """Number of this rank's batches that count as done before that."""
    ledger: list[dict[str, int]] = dataclasses.field(default_factory=list)
    """The ranges of the order that were trained on before that, and by how many ranks."""
    cycles: bool = True
    """Whether the loader, if it is shorter than another, begins again within the epoch."""
    began_again: bool = False
    """Whether it had already begun again, before that."""
    watched: Watched | None = None
    """The wrapper that has noted the order, where the loader is the user's own."""

    @classmethod
    def resumed(cls, loader: DataLoader, world_size: int, state: dict[str, Any]) -> "Pass":
        """Goes on where `state`, of any rank, says; the loader's first iterator yields the rest of the epoch only.

        Raises:
            ValueError: the loader has another order than the one in which that run was.
        """
        order, position = order_of(loader), state["position"]
        assert order is not None
        place = cls(loader, world_size, position, ledger=state["ledger"], began_again=state["began_again"])
        order.resume(state["epoch"], position, 0, state["order"])
        place.count(place._batches_before(position))
        found = _unit(loader), len(order.sampler)  # type: ignore[arg-type]
        if position and (found != (state["unit"], state["length"]) or not _is_same(order, state)):
            raise ValueError(
                f"The checkpoint was saved after {position} of {state['length']} {state['unit']} of the epoch, which"
                f" this run's DataLoader, of {found[1]} {found[0]}, does not yield in the same order: use the same"
                " data, the same seed (seed_everything) and the same sampler; a sampler of your own that draws from a"
                " generator needs `state_dict` and `load_state_dict`. To begin an epoch instead, load the weights"
                " alone."
            )
        return place

    @property
    def _dealt(self) -> GlobalBatches | None:
        batches = self.loader.batch_sampler
        return batches if isinstance(batches, GlobalBatches) else None

    @property
    def per_step(self) -> tuple[int, int]:
        """Items of the order that all ranks together take, and in how many batches of each."""
        if self._dealt is not None:
            return self._dealt.size, self._dealt.per_step
        return self.world_size * _per_rank(self.loader), 1

    def count(self, batches: int) -> None:
        """Says that `batches` of this rank's batches count as done: as many as of the loaders beside this one."""
        self.batches = batches
        order = order_of(self.loader)
        if order is not None and not self.began_again:
            order.count_done(batches if self._dealt is not None else batches * _per_rank(self.loader))

    def state_dict(self, epoch: int, batches: int, *, begins: bool = False) -> dict[str, Any]:
        """Returns the position after `batches` batches of the epoch on this rank, those before the resumption included.

        Args:
            epoch: the present one, or the one after it.
            batches: of this rank.
            begins: nothing of the epoch was trained on yet.
        """
        source: Any = order_of(self.loader) or self.watched
        decided = source.sampler if source is not None else decides(self.loader)
        length, start, began_again, number = len(decided), self.position, self.began_again, 0
        done, first = batches - self.batches, self._batches_from(start, length)
        if self.cycles and done > first:
            began_again, start, per_pass = True, 0, max(1, self._batches_from(0, length))
            # At the end of a pass it is not the next one that has begun.
            again, done = divmod(done - first - 1, per_pass)
            number, done = again + 1, done + 1
        record = None if source is None else source.passes.of(epoch, number)
        position = self._position(start, done, length, record)
        order = _KNOWN if source is None else source.state(epoch, number)
        if begins and source is not None and source.passes.of(epoch, number) is not None:
            # The iterator is there already: what seeds workers, and the order, may have been drawn.
            order = {**order, "begun": torch.get_rng_state()}
        if position == length and order["before"] is not None:
            order = {**order, "after": state_of(decided)}
        return {
            "epoch": epoch,
            "unit": _unit(self.loader),
            "position": position,
            "length": length,
            "per_step": list(self.per_step),
            "num_sharing": self.world_size,
            "began_again": began_again,
            "digest": None if record is None else record.digest(position),
            "in_order": type(decided) is SequentialSampler,
            "order": order,
            "ledger": [*self.ledger, {"from": start, "to": position, "world_size": self.world_size}],
        }

    def _position(self, start: int, done: int, length: int, record: Any) -> int:
        ends = getattr(record, "ends", ())
        if 0 < done <= len(ends):
            return min(length, ends[done - 1])  # exact, also where the user's batches change their size
        num_items, num_batches = self.per_step
        steps, more = divmod(done, num_batches)
        # Of a step only the last one of an epoch has fewer batches.
        steps += bool(more) and done >= self._batches_from(start, length)
        return min(length, start + steps * num_items)

    def _batches_before(self, position: int) -> int:
        num_items, num_batches = self.per_step
        return position // num_items * num_batches

    def _batches_from(self, start: int, length: int) -> int:
        if self._dealt is not None:
            return self._dealt.num_batches(length - start)
        drops = getattr(order_of(self.loader) or self.loader.batch_sampler, "drop_last", False)
        (num_items, _), left = self.per_step, length - start
        return left // num_items if drops else -(-left // num_items)
