"""State that each rank makes of its own samples, such as running means: told by name, where ranks have other values.

Looked at are the module's buffers, and the orders that samplers have drawn, of which each rank reads its part. Of
attributes, globals and callbacks, what ranks train by is found in the first steps: see `split_batch.py`.
"""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from ..data.epoch_position import order_of
from ..distributed.digests import digests, unequal_replicas
from ..strategies import own_buffers

__all__ = ["OwnState"]


class OwnState:
    """Compares such state of the ranks after a run's first step, and after each epoch.

    Costs a gather between hosts, and a read of the device, each time; only the gather for a module without any.

    Args:
        trainer: the trainer of the module.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self.told: set[str] = set()
        """The names that a warning had in this run."""
        self.is_first_step_due = True
        """Whether no step of this run was looked at."""

    def begin_run(self) -> None:
        """Begins a run, whose first step is looked at."""
        self.told, self.is_first_step_due = set(), True

    def after_first_step(self) -> None:
        """Compares the state after a run's first step."""
        self.is_first_step_due = False
        self.compare()

    @property
    def _is_compared(self) -> bool:
        # Ranks that do not keep step are at different steps.
        return self._trainer.data_size > 1 and self._trainer.engine_strategy.capabilities.keeps_step

    def compare(self) -> None:
        """Compares the state; all ranks call it after the same step."""
        if not self._is_compared:
            return
        trainer, module = self._trainer, self._trainer.lightning_module
        strategy = trainer.engine_strategy
        buffers = {} if strategy.averages_buffers else own_buffers(module)
        own = digests(buffers.items()).on_host(), _orders(trainer.fit_loop._combined_loader)
        of_ranks, orders = zip(*trainer.data_ranks.all_gather_object(own), strict=True)
        samplers = {name for name in set().union(*orders) if len({of_rank.get(name) for of_rank in orders}) > 1}
        names = [{name for name, _ in unequal_replicas(of_ranks)}, samplers]
        if trainer.data_size != trainer.world_size:  # pipeline stages have different parts
            of_all = trainer.all_ranks.all_gather_object(names)
            names = [set().union(*of_stages) for of_stages in zip(*of_all, strict=True)]
        of_buffers, of_samplers = (sorted(unequal - self.told) for unequal in names)
        self.told.update(of_buffers, of_samplers)
        if of_buffers:
            option = strategy.option_to_average_buffers
            remedy = f", or set {option}, which averages floating-point buffers after each step" if option else ""
            rank_zero_warn(
                f"Under {strategy!r} the ranks have different values of {', '.join(map(repr, of_buffers))}: the module"
                " updates these buffers by the samples of its own rank, and rank 0's values are evaluated and saved, so"
                " the result is not that of one process."
                f" Reduce what they are made of over the ranks in the module (torch.distributed.all_reduce){remedy}."
            )
        if of_samplers:
            rank_zero_warn(
                f"The ranks have drawn different orders of {' and '.join(of_samplers)}, of which each reads its part:"
                " some samples were trained on by several ranks, and others by none. It decides by something that each"
                " rank has of its own, such as losses, or random numbers of another generator. Make that equal on all"
                " ranks (`self.all_gather`, a seed), or give the sampler a `torch.Generator`."
            )


def _orders(combined: CombinedLoader) -> dict[str, str]:
    """Returns a checksum of what each sampler has drawn of the present pass."""
    orders = [order_of(loader) for loader in combined.flattened if isinstance(loader, DataLoader)]
    drawn = [(number, order, order.passes.latest) for number, order in enumerate(orders) if order is not None]
    return {
        f"sampler {number} ({type(order.sampler).__name__})": str(latest.digest(len(latest.order)))
        for number, order, latest in drawn
        if latest is not None and order.num_replicas > 1  # otherwise the user gives each rank an order of its own
    }
