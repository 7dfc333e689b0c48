"""The position of a run in its training data: a checkpoint's state of each loader, and how another run continues."""

import dataclasses
from typing import Any

import torch
from torch.utils.data import DataLoader, SequentialSampler

from .drawing import state_of
from .even_batches import is_custom
from .global_order import GlobalBatches, GlobalOrder
from .watched import Watched

__all__ = ["EpochPosition", "controlling_sampler", "order_of", "tell_batch_sampler"]


_KNOWN = {"before": {"global": None, "sampler": None}, "sampler": None, "whole": False, "num_passes": 0}
"""The state of an order that is equal in each run, and was not recorded."""


def order_of(loader: DataLoader) -> GlobalOrder | None:
    """Returns the `GlobalOrder` of `loader`; None if it has none."""
    batches: Any = loader.batch_sampler
    for candidate in (batches, getattr(batches, "sampler", None), loader.sampler):
        if isinstance(candidate, GlobalOrder):
            return candidate
    return None


def controlling_sampler(loader: DataLoader) -> Any:
    """Returns the sampler that decides the order of samples, or a batch sampler of the user's own."""
    batches: Any = loader.batch_sampler
    is_users = is_custom(batches) and not isinstance(batches, GlobalBatches)
    return batches if is_users else getattr(batches, "sampler", loader.sampler)


def tell_batch_sampler(loader: Any, epoch: int) -> None:
    """Sets the epoch of a user's batch sampler that has `set_epoch`.

    Lightning sets it on a loader's sampler, and on the sampler within a batch sampler, but not on the batch sampler.
    With several ranks, a `GlobalOrder` sets it.
    """
    if not isinstance(loader, DataLoader) or order_of(loader) is not None or _unit(loader) != "batches":
        return
    if callable(set_epoch := getattr(loader.batch_sampler, "set_epoch", None)):
        set_epoch(epoch)


def _unit(loader: DataLoader) -> str:
    """Returns the items of a loader's order: ``"samples"`` or ``"batches"``."""
    return "batches" if controlling_sampler(loader) is loader.batch_sampler else "samples"


def _per_rank(loader: DataLoader) -> int:
    """Returns the number of items of its order that a rank takes for one batch."""
    return 1 if _unit(loader) == "batches" else getattr(loader.batch_sampler, "batch_size", 1)


def _is_same(order: GlobalOrder, state: dict[str, Any]) -> bool:
    """Whether `order` begins with the items that the saved run has trained on."""
    drawing, position = order.passes.latest, state["position"]
    if drawing is None:
        return not position
    drawing.up_to(position)
    if state["digest"] is not None:
        return state["digest"] == drawing.digest(position)
    # The saved run did not read the sampler: it trained in the order of the data set, or in an unknown one.
    return not state["in_order"] or list(drawing.order[:position]) == list(range(position))


@dataclasses.dataclass
class EpochPosition:
    """The position of a run in an epoch of one loader, a part of which another run may have done."""

    loader: DataLoader
    world_size: int
    """Number of ranks that share the loader's order; 1 if each rank has its own sampler."""
    position: int = 0
    """The position in the epoch's order at which this run began."""
    batches: int = 0
    """The number of this rank's batches that count as done before this run."""
    ledger: list[dict[str, int]] = dataclasses.field(default_factory=list)
    """The ranges of the order that earlier runs have trained on, each with its number of ranks."""
    cycles: bool = True
    """Whether the loader restarts within the epoch if it is shorter than another one."""
    began_again: bool = False
    """Whether the loader had restarted in an earlier run."""
    watched: Watched | None = None
    """The wrapper that records the order, if the loader is the user's own."""

    @classmethod
    def resumed(cls, loader: DataLoader, world_size: int, state: dict[str, Any]) -> "EpochPosition":
        """Resumes at the position in `state`, of any rank: the loader's first iterator yields the rest of the epoch.

        Raises:
            ValueError: the loader has another order than that of the saved run.
        """
        order, position = order_of(loader), state["position"]
        assert order is not None
        resumed_position = cls(loader, world_size, position, ledger=state["ledger"], began_again=state["began_again"])
        order.resume(state["epoch"], position, 0, state["order"])
        resumed_position.count(resumed_position._batches_before(position))
        unit, length = _unit(loader), len(order.sampler)  # type: ignore[arg-type]
        if position and ((unit, length) != (state["unit"], state["length"]) or not _is_same(order, state)):
            raise ValueError(
                f"The checkpoint was saved after {position} of {state['length']} {state['unit']} of the epoch, which"
                f" this run's DataLoader, of {length} {unit}, does not yield in the same order: use the same data, the"
                " same seed (seed_everything) and the same sampler; your own sampler, if it draws from a generator,"
                " needs `state_dict` and `load_state_dict`. To begin an epoch instead, load only the weights."
            )
        return resumed_position

    @property
    def _dealt(self) -> GlobalBatches | None:
        batches = self.loader.batch_sampler
        return batches if isinstance(batches, GlobalBatches) else None

    @property
    def per_step(self) -> tuple[int, int]:
        """The items of the order that a step takes on all ranks together, and the number of batches on each rank."""
        if self._dealt is not None:
            return self._dealt.size, self._dealt.per_step
        return self.world_size * _per_rank(self.loader), 1

    def count(self, batches: int) -> None:
        """Sets the number of this rank's batches that count as done: all loaders advance equally."""
        self.batches = batches
        order = order_of(self.loader)
        if order is not None and not self.began_again:
            order.count_done(batches if self._dealt is not None else batches * _per_rank(self.loader))

    def state_dict(self, epoch: int, batches: int, *, begins: bool = False) -> dict[str, Any]:
        """Returns the position after `batches` batches of the epoch on this rank, including those of earlier runs.

        Args:
            epoch: the current epoch, or the next one.
            batches: batches of this rank.
            begins: whether nothing of the epoch was trained on yet.
        """
        source: Any = order_of(self.loader) or self.watched
        decided = source.sampler if source is not None else controlling_sampler(self.loader)
        length, start, began_again, number = len(decided), self.position, self.began_again, 0
        done, first = batches - self.batches, self._batches_from(start, length)
        if self.cycles and done > first:
            began_again, start, per_pass = True, 0, max(1, self._batches_from(0, length))
            # At the end of a pass, the next pass has not begun.
            again, done = divmod(done - first - 1, per_pass)
            number, done = again + 1, done + 1
        record = None if source is None else source.passes.of(epoch, number)
        position = self._position(start, done, length, record)
        order = _KNOWN if source is None else source.state(epoch, number)
        if begins and source is not None and source.passes.of(epoch, number) is not None:
            # The iterator exists already: it may have drawn the workers' seed, and the order.
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
            return min(length, ends[done - 1])  # exact, even if the user's batches differ in size
        num_items, num_batches = self.per_step
        steps, more = divmod(done, num_batches)
        # Only the last step of an epoch has fewer batches.
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
