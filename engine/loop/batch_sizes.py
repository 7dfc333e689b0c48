"""Who has how many samples at once: what global batches are cut into, and what each micro-batch holds."""

import math
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import BatchSampler, DataLoader

from ..data import GlobalBatches, GlobalOrder, Samples, Together

__all__ = ["BatchSizes"]


class BatchSizes:
    """Sizes of global batches and micro-batches in the training data of a run.

    Args:
        trainer: whose data it is.
        wanted: samples of an optimizer step; None: what the DataLoader and the accumulation make.
        micro: samples of a rank's micro-batch at most; None: the DataLoader's ``batch_size``; ``"auto"``: all of its
            share, and less where memory says so.
    """

    def __init__(self, trainer: Trainer, wanted: int | None, micro: int | Literal["auto"] | None) -> None:
        self._trainer: Any = trainer
        self.wanted = wanted
        self.micro = micro
        self.found: int | None = None
        """The size of micro-batches that was found to fit, here or in the run that is resumed."""
        self._of_step: tuple[int, Samples] = -1, Samples(0, 0)
        self._in_steps: dict[str, int] | None = None

    def cut(self, dataloader: DataLoader, order: GlobalOrder) -> GlobalBatches:
        """The batches of all ranks together that `dataloader`, in that order, makes."""
        given = getattr(dataloader.batch_sampler, "batch_size", None)
        micro = (self.found or self.wanted) if self.micro == "auto" else self.micro or given or self.wanted
        assert micro is not None  # check_loader
        size = self.wanted or micro * order.num_replicas
        batches = GlobalBatches(order, size=size, micro_batch_size=micro, drop_last=order.drop_last)
        if self.wanted is not None:
            self._count_in_steps(batches.per_step)
        return batches

    def cut_again(self, micro: int) -> None:
        """Cuts the rest of the epoch into micro-batches of another size."""
        batches = self._batches
        assert batches is not None
        batches.cut_into(micro)
        self.found = micro
        self._of_step = -1, Samples(0, 0)
        self._count_in_steps(batches.per_step)

    def _count_in_steps(self, per_step: int) -> None:
        """Has flags that count batches count global ones, each of so many micro-batches."""
        trainer = self._trainer
        trainer.accumulate_grad_batches = per_step
        if self._in_steps is None:
            given = {name: getattr(trainer, name) for name in ("limit_train_batches", "val_check_interval")}
            self._in_steps = {name: value for name, value in given.items() if type(value) is int}
        for name, num_steps in self._in_steps.items():
            setattr(trainer, name, num_steps * per_step)
        if "val_check_interval" in self._in_steps:
            trainer.val_check_batch = trainer.val_check_interval

    def samples(self, batch_idx: int) -> Samples:
        """Number of samples in a training batch, on this rank and on all of them; one a rank where it is not known."""
        if isinstance(self.loader, Together):
            return self.loader.samples(batch_idx)
        batches: Any = getattr(self.loader, "batch_sampler", None)
        num_ranks = self._trainer.data_size
        if isinstance(batches, (GlobalBatches, GlobalOrder)):
            order = batches.sampler if isinstance(batches, GlobalBatches) else batches
            if order.num_replicas == num_ranks:
                return batches.samples(batch_idx)
            # Each rank goes on in an order of its own, and knows that of no other; they have as many batches.
            mine = batches.samples(batch_idx).mine if isinstance(batches, GlobalBatches) else 1
            return Samples(mine, mine * num_ranks)
        size = sized_len(batches.sampler) if type(batches) is BatchSampler else None
        if size is not None and not has_iterable_dataset(self.loader):
            mine = min(batches.batch_size, size - batch_idx * batches.batch_size)
            return Samples(mine, mine * num_ranks)
        if self.loader is not None and num_ranks == 1:
            size = self._trainer._data_connector.places.size_of_batch(self.loader, batch_idx)
            if size is not None:
                return Samples(size, size)
        return Samples(1, num_ranks)

    def samples_of_step(self, first: int, num_batches: int) -> Samples | None:
        """The number of samples of `num_batches` batches from `first` on; None if the end of the data is not known."""
        if self._trainer.num_training_batches == float("inf") or isinstance(self.loader, Together):
            return None
        if self._of_step[0] != first:
            batches = [self.samples(first + i) for i in range(num_batches)]
            self._of_step = first, Samples(sum(b.mine for b in batches), sum(b.all for b in batches))
        return self._of_step[1]

    def is_filler(self, batch_idx: int) -> bool:
        """Whether a training batch only keeps this rank in step with the others."""
        if isinstance(self.loader, Together):
            return self.loader.is_through(batch_idx)
        return self._trainer.data_size > 1 and self.samples(batch_idx).mine == 0

    def joins(self, batch_idx: int) -> bool:
        """Whether it does so without running the module."""
        return isinstance(self.loader, Together) and self.loader.policy == "join" and self.is_filler(batch_idx)

    @property
    def present(self) -> int | None:
        """The largest size of micro-batches that are cut from global batches; None where they are not cut from them."""
        batches = self._batches
        if self.wanted is None or batches is None:
            return None
        return min(batches.batch_size, math.ceil(batches.size / batches.sampler.num_replicas))

    @property
    def largest(self) -> int:
        """Samples of a rank in the largest micro-batch of a full global batch."""
        batches = self._batches
        assert batches is not None
        return math.ceil(math.ceil(batches.size / batches.sampler.num_replicas) / batches.per_step)

    @property
    def of_full_step(self) -> tuple[int, int, int] | None:
        """Samples of a full optimizer step on all ranks, samples of a micro-batch at most, and micro-batches of a rank.

        None where they are not known, or change from epoch to epoch.
        """
        batches, loader = self._batches, self.loader
        if self.wanted is not None and batches is not None:
            return batches.size, self.largest, batches.per_step
        trainer = self._trainer
        if loader is None or any(isinstance(c, GradientAccumulationScheduler) for c in trainer.callbacks):
            return None
        micro = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(micro, int):
            return None
        num_micro_batches = trainer.accumulate_grad_batches
        return trainer.data_size * micro * num_micro_batches, micro, num_micro_batches

    def smallest_batch(self) -> Any:
        """A batch of one sample, made in this process."""
        loader, batches = self.loader, self._batches
        assert loader is not None
        assert batches is not None
        assert loader.collate_fn is not None
        return loader.collate_fn([loader.dataset[batches.sampler.first()]])

    @property
    def loader(self) -> DataLoader | None:
        """The one that is trained on; None where there are several, or something else."""
        combined = self._trainer.fit_loop._combined_loader  # Lightning: the loaders as _prepare_dataloader left them
        loaders = [] if combined is None else combined.flattened
        return loaders[0] if len(loaders) == 1 and isinstance(loaders[0], DataLoader) else None

    @property
    def _batches(self) -> GlobalBatches | None:
        batches = getattr(self.loader, "batch_sampler", None)
        return batches if isinstance(batches, GlobalBatches) else None
