"""The sizes of batches: how global batches are cut, and how many samples each micro-batch has."""

import math
from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import BatchSampler, DataLoader

from ..flags import check_count
from .global_order import GlobalBatches, GlobalOrder, Samples
from .uneven import UnevenTrainLoader

__all__ = ["BatchSizes", "check_batch_sizes", "check_loader"]


class BatchSizes:
    """Sizes of global batches and micro-batches in the training data of a run.

    Args:
        trainer: the trainer with the data.
        global_batch_size: samples of an optimizer step, on all ranks; None: the DataLoader and the accumulation
            determine it.
        micro: the most samples of a rank's micro-batch; None: the DataLoader's ``batch_size``; ``"auto"``: the rank's
            whole share, or less if it does not fit in memory.
    """

    def __init__(self, trainer: Trainer, global_batch_size: int | None, micro: int | Literal["auto"] | None) -> None:
        self._trainer: Any = trainer
        self.global_batch_size = global_batch_size
        self.micro = micro
        self.fitted: int | None = None
        """The largest micro-batch that fits in memory, found by this run or the resumed one; None: unknown."""
        self.begin_epoch()
        self._in_steps: dict[str, int] | None = None

    def begin_epoch(self) -> None:
        """Forgets the counts of the last batch and step: the loader may be another one now."""
        self._of_batch: tuple[int, Samples] = -1, Samples(0, 0)
        self._of_step: tuple[int, Samples] = -1, Samples(0, 0)
        self._counted: Any = self
        """The loaders whose batches `_counts` counts; this object before the first count of an epoch."""

    def cut(self, dataloader: DataLoader, order: GlobalOrder) -> GlobalBatches:
        """Returns the global batches of `dataloader`, with its samples in this order."""
        loader_size = getattr(dataloader.batch_sampler, "batch_size", None)
        if self.micro == "auto":
            micro = self.fitted or self.global_batch_size
        else:
            micro = self.micro or loader_size or self.global_batch_size
        assert micro is not None  # check_loader
        size = self.global_batch_size or micro * order.num_replicas
        batches = GlobalBatches(order, size=size, micro_batch_size=micro, drop_last=order.drop_last)
        if self.global_batch_size is not None:
            self._count_in_steps(batches.per_step)
        return batches

    def resplit(self, micro: int) -> None:
        """Cuts the rest of the epoch into micro-batches of another size."""
        batches = self._batches
        assert batches is not None
        batches.cut_into(micro)
        self.fitted = micro
        self.begin_epoch()
        self._count_in_steps(batches.per_step)

    def _count_in_steps(self, per_step: int) -> None:
        """Makes the flags that count batches count global batches, of `per_step` micro-batches each."""
        trainer = self._trainer
        trainer.accumulate_grad_batches = per_step
        if self._in_steps is None:
            limits = {name: getattr(trainer, name) for name in ("limit_train_batches", "val_check_interval")}
            self._in_steps = {name: value for name, value in limits.items() if type(value) is int}
        for name, num_steps in self._in_steps.items():
            setattr(trainer, name, num_steps * per_step)
        if "val_check_interval" in self._in_steps:
            trainer.val_check_batch = trainer.val_check_interval

    def samples(self, batch_idx: int) -> Samples:
        """Returns the number of samples of a training batch, on this rank and on all ranks; 1 for each if unknown."""
        if self._of_batch[0] != batch_idx:  # a step asks several times
            self._of_batch = batch_idx, self._count(batch_idx)
        return self._of_batch[1]

    def _count(self, batch_idx: int) -> Samples:
        if self._trainer.fit_loop._combined_loader is not self._counted:  # Lightning: see `loader`
            self._look_up()
        return self._counts(batch_idx)

    def _look_up(self) -> None:
        """Looks up how the batches of the training loader are counted, which stays the same for an epoch."""
        loader = self.loader
        self._counted, self._counts = self._trainer.fit_loop._combined_loader, self._way_to_count(loader)
        self._num_ranks = self._trainer.data_size
        self._uneven = loader if isinstance(loader, UnevenTrainLoader) else None

    def _way_to_count(self, loader: DataLoader | None) -> Callable[[int], Samples]:
        """Returns a function that counts the samples of a batch."""
        if isinstance(loader, UnevenTrainLoader):
            return loader.samples
        batches: Any = getattr(loader, "batch_sampler", None)
        num_ranks = self._trainer.data_size
        if not isinstance(batches, (GlobalBatches, GlobalOrder)):
            return self._count_of_users(loader, batches, num_ranks)
        order = batches.sampler if isinstance(batches, GlobalBatches) else batches
        if order.num_replicas == num_ranks:
            return batches.counter() if isinstance(batches, GlobalBatches) else batches.samples
        # Each rank continues in its own order, and does not know those of others; all have equally many batches.
        local_of = (lambda index: batches.samples(index).local) if isinstance(batches, GlobalBatches) else lambda _: 1
        return lambda batch_idx: Samples(local := local_of(batch_idx), local * num_ranks)

    def _count_of_users(self, loader: DataLoader | None, batches: Any, num_ranks: int) -> Callable[[int], Samples]:
        """Returns a function that counts the samples of a batch of a loader with the user's own sampler."""
        size = sized_len(batches.sampler) if type(batches) is BatchSampler else None
        if size is not None and not has_iterable_dataset(loader):

            def count(batch_idx: int) -> Samples:
                local = min(batches.batch_size, size - batch_idx * batches.batch_size)
                return Samples(local, local * num_ranks)

            return count
        unknown = Samples(1, num_ranks)
        if loader is None or num_ranks > 1:
            return lambda _: unknown

        def count_read(batch_idx: int) -> Samples:
            size = self._trainer._data_connector.data_position.size_of_batch(loader, batch_idx)
            return unknown if size is None else Samples(size, size)

        return count_read

    def samples_of_step(self, first: int, num_batches: int) -> Samples | None:
        """Counts the samples of `num_batches` batches from `first` on; None if the end of the data is not known."""
        if self._trainer.num_training_batches == float("inf") or isinstance(self.loader, UnevenTrainLoader):
            return None
        if self._of_step[0] != first:
            # The number of samples of a batch that was not read yet may change.
            batches = [self.samples(first), *(self._count(first + i) for i in range(1, num_batches))]
            self._of_step = first, Samples(sum(b.local for b in batches), sum(b.total for b in batches))
        return self._of_step[1]

    def is_filler(self, batch_idx: int) -> bool:
        """Whether a training batch is padding on this rank: it runs for its collectives only."""
        if self._trainer.fit_loop._combined_loader is not self._counted:
            self._look_up()
        if self._uneven is not None:
            return self._uneven.is_through(batch_idx)
        return self.samples(batch_idx).local == 0 and self._num_ranks > 1

    def some_are_fillers(self, batch_idx: int) -> bool:
        """Whether some rank has no sample of a training batch; all ranks have the same answer."""
        if self._trainer.fit_loop._combined_loader is not self._counted:
            self._look_up()
        if self._uneven is not None:
            return self._uneven.leaves_out_ranks(batch_idx)
        return self.samples(batch_idx).total < self._num_ranks

    @property
    def current(self) -> int | None:
        """The largest micro-batch that global batches are cut into now, in samples; None without global batches."""
        batches = self._batches
        if self.global_batch_size is None or batches is None:
            return None
        return min(batches.batch_size, self.share)

    @property
    def share(self) -> int:
        """The samples of a full global batch that a rank has, at most."""
        batches = self._batches
        assert batches is not None
        return math.ceil(batches.size / batches.sampler.num_replicas)

    @property
    def largest(self) -> int:
        """The samples of the largest micro-batch of a full global batch, on one rank."""
        batches = self._batches
        assert batches is not None
        return math.ceil(self.share / batches.per_step)

    @property
    def of_full_step(self) -> tuple[int, int, int] | None:
        """Samples of a full optimizer step on all ranks, samples of a micro-batch at most, and micro-batches of a rank.

        None where they are not known, or change from epoch to epoch.
        """
        batches, loader = self._batches, self.loader
        if self.global_batch_size is not None and batches is not None:
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
        """Makes a batch of one sample in this process."""
        loader, batches = self.loader, self._batches
        assert loader is not None
        assert batches is not None
        assert loader.collate_fn is not None
        return loader.collate_fn([loader.dataset[batches.sampler.first()]])

    @property
    def loader(self) -> DataLoader | None:
        """The training DataLoader; None if there are several, or other iterables."""
        combined = self._trainer.fit_loop._combined_loader  # Lightning: the loaders as _prepare_dataloader left them
        loaders = [] if combined is None else combined.flattened
        return loaders[0] if len(loaders) == 1 and isinstance(loaders[0], DataLoader) else None

    @property
    def _batches(self) -> GlobalBatches | None:
        batches = getattr(self.loader, "batch_sampler", None)
        return batches if isinstance(batches, GlobalBatches) else None


def check_batch_sizes(
    global_batch_size: int | None,
    micro_batch_size: int | Literal["auto"] | None,
    *,
    num_ranks: int,
    accumulate_grad_batches: int,
) -> None:
    """Checks the flags against each other, before any process starts.

    Raises:
        ValueError: they can't be honoured together.
    """
    if global_batch_size is None:
        if micro_batch_size is not None:
            raise ValueError(
                f"micro_batch_size={micro_batch_size!r} says how a global batch is cut: give global_batch_size as well,"
                " or set the DataLoader's batch_size."
            )
        return
    check_count("global_batch_size", global_batch_size)
    if isinstance(micro_batch_size, str) and micro_batch_size != "auto":
        raise ValueError(f"micro_batch_size must be a whole number, 'auto' or None, but got {micro_batch_size!r}.")
    if micro_batch_size not in (None, "auto"):
        check_count("micro_batch_size", micro_batch_size, most=global_batch_size)
    if accumulate_grad_batches != 1:
        raise ValueError(
            f"global_batch_size={global_batch_size} and accumulate_grad_batches={accumulate_grad_batches} both say how"
            " many micro-batches a step has: leave the latter out. To cut a rank's share smaller, give"
            " micro_batch_size."
        )
    if global_batch_size < num_ranks:
        raise ValueError(
            f"global_batch_size={global_batch_size} is smaller than the number of ranks, {num_ranks}: some would have"
            f" nothing to do. Give at least {num_ranks}, or fewer devices."
        )


def check_loader(loader: Any, global_batch_size: int, micro_batch_size: int | str | None) -> None:
    """Checks that global batches can be made of the batches of `loader`.

    Raises:
        ValueError: they can't; the message says what to change.
    """
    flag = f"global_batch_size={global_batch_size}"
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"{flag} needs a DataLoader to take the samples from, but training data is a {type(loader).__name__}: give"
            " a DataLoader, or set the batch size yourself and leave the flag out."
        )
    if has_iterable_dataset(loader) or sized_len(loader.dataset) is None:
        raise ValueError(
            f"{flag} needs a data set whose samples can be chosen by index, but {type(loader.dataset).__name__} is a"
            " stream: leave the flag out, and set batch_size and accumulate_grad_batches for the number of ranks; a"
            " `training_step` that returns a weight beside its loss makes all samples count equally."
        )
    if loader.batch_sampler is None:
        raise ValueError(
            f"{flag} can't be made of a DataLoader with batch_size=None, whose samples may be batches already: give it"
            " a batch_size, or leave the flag out and return a weight from `training_step`."
        )
    order = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if any(hasattr(sampler, "num_replicas") for sampler in (order, loader.batch_sampler)):
        raise ValueError(
            f"{flag} and the DataLoader's own {type(order).__name__} would both split the samples over the ranks:"
            " leave the sampler out (use shuffle=True), or the flag."
        )
    size = getattr(loader.batch_sampler, "batch_size", None)
    if micro_batch_size is None and isinstance(size, int) and size > global_batch_size:
        raise ValueError(
            f"the DataLoader's batch_size={size} is larger than {flag}: one rank alone would have more samples than"
            " all of them together. Make it smaller; it is the largest micro-batch."
        )
