"""The trainer's data connector: it keeps the user's order of samples; Lightning's own shuffles if ranks are several.

In one process the loader is the user's own object. With several ranks, the samples are split over them in its order.
"""

import copy
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader, DistributedSampler

# Lightning: seeds workers, after seed_everything(workers=True).
# Lightning: records the indices of each batch, for prediction writers.
# Lightning: makes a batch sampler of the user's class with another sampler.
from .._compat.lightning import (
    _auto_add_worker_init_fn,
    _DataConnector,
    _dataloader_init_kwargs_resolve_sampler,
    _IndexBatchSamplerWrapper,
)
from ..data.batch_sizes import BatchSizes, check_loader
from ..data.clone_loader import clone_loader
from ..data.drawing import draws_at_once
from ..data.epoch_position import controlling_sampler, order_of, tell_batch_sampler
from ..data.even_batches import EvalBatchSampler, check_length, evaluated_order, is_custom
from ..data.global_order import FlattenedBatchSampler, GlobalOrder
from ..data.sample_seeds import check_seedable, seed_samples
from ..data.shards import ShardedLoader, ShardedStream, read_by_shards, reread_if_buffered
from ..data.stateful import StateTrackingLoader, as_stateful, is_stateful, track_states, tracks_own_position
from ..data.streams import UnevenEvalLoader, check_not_read_whole, check_own_part, shard_of
from ..data.uneven import UnevenTrainLoader
from ..data.workers import WithWorkers, has_workers, track_draws
from ..distributed.environment import global_seed
from ..resume.data_position import DataPosition

__all__ = ["DataConnector"]


class DataConnector(_DataConnector):  # Lightning: Trainer._data_connector
    """Lightning's connector, with `GlobalOrder` in place of `DistributedSampler`, and resumable positions.

    Args:
        trainer: the trainer with the data.
        sizes: sizes of the global batches.
        uneven: what to do if ranks have different numbers of training batches; one of `UNEVEN`.
        seeds_samples: the random draws of each sample are seeded by its index.
    """

    trainer: Any

    def __init__(
        self, trainer: Trainer, sizes: BatchSizes, uneven: str = "pad", *, seeds_samples: bool = False
    ) -> None:
        super().__init__(trainer)
        self.sizes = sizes
        self._uneven = uneven
        self.data_position = DataPosition(trainer, sizes, self._brings_own_sampler, seeds_samples=seeds_samples)
        self._seeds_samples = seeds_samples
        self._num_training_loaders = 0

    # --- which loader is used

    def begin_training_loaders(self) -> None:
        """Called before the training loaders of an epoch are prepared, one by one."""
        self._num_training_loaders = 0

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        # Lightning: _DataConnector._prepare_dataloader, after which Lightning seeds workers by the global rank; but
        # ranks that share samples need the same ones.
        prepared = self._prepare(dataloader, mode)
        _auto_add_worker_init_fn(prepared, self.trainer.data_rank)
        return prepared

    def _prepare(self, dataloader: object, mode: RunningStage) -> object:
        if self._seeds_samples:
            check_seedable(dataloader)
        self._check_replicas(dataloader)
        check_own_part(dataloader, self.trainer.data_size, self.trainer.data_rank, self.trainer.world_size)
        if not isinstance(dataloader, DataLoader):
            self._check_not_read_whole(dataloader, "put a DataLoader around it")
        if mode == RunningStage.TRAINING:
            self.data_position.begin()
            prepared = self._prepare_training(dataloader)
            tell_batch_sampler(prepared, self.data_position.epoch)
            self.trainer._checkpoint_connector.run_state.random.seed_rank_stream()
            self.data_position.resume(prepared)
            return prepared
        prepared = self._prepare_evaluation(dataloader, mode)
        # Each evaluation has the same draws, so that two of them differ only by the model.
        return self._seed_samples(prepared, (1,), lambda: 0)

    def _prepare_evaluation(self, dataloader: object, mode: RunningStage) -> object:
        if not isinstance(dataloader, DataLoader):
            return dataloader
        if self._is_shared(dataloader):
            return self._deal_evaluation(dataloader, mode)
        if mode == RunningStage.PREDICTING:
            is_stream = has_iterable_dataset(dataloader) or dataloader.batch_sampler is None
            return dataloader if is_stream else _with_order(dataloader, _order_of(dataloader), mode)
        return self._in_one_order(dataloader, mode) if self._is_dealt(dataloader, mode) else dataloader

    def _prepare_training(self, dataloader: object) -> object:
        if self.sizes.global_batch_size is not None:
            check_loader(dataloader, self.sizes.global_batch_size, self.sizes.micro)
        self.trainer.engine_strategy.check_loader(dataloader)
        if not isinstance(dataloader, DataLoader):
            return dataloader
        if has_iterable_dataset(dataloader):
            ranks = self.trainer.data_size, self.trainer.data_rank
            part = read_by_shards(dataloader, *ranks) if self.data_position.may_read_shards else None
            if part is None:
                part = self._shard(dataloader, *ranks) if self.trainer.data_size > 1 else dataloader
            dataloader = track_draws(reread_if_buffered(as_stateful(part)))
        elif self._is_dealt(dataloader, RunningStage.TRAINING):
            dataloader = self._deal(dataloader)
        key = 0, self._num_training_loaders
        seeded: DataLoader = self._seed_samples(dataloader, key, lambda: self.data_position.epoch)
        self._num_training_loaders += 1
        if tracks_own_position(seeded):
            kind = ShardedLoader if isinstance(seeded.dataset, ShardedStream) else StateTrackingLoader
            seeded = track_states(seeded, self.data_position.epoch, self.data_position.num_kept, kind)
        return self._equalize_lengths(seeded)

    def _seed_samples(self, dataloader: Any, key: tuple[int, ...], epoch: Callable[[], int]) -> Any:
        """Returns a copy of `dataloader` that seeds each sample; `dataloader` itself without `seed_samples`."""
        if not self._seeds_samples:
            return dataloader
        if self.data_position.sample_seed is None:
            seed = global_seed()
            self.data_position.sample_seed = seed if self._broadcast is None else self._broadcast(seed)
        return seed_samples(dataloader, (self.data_position.sample_seed, *key), epoch)

    def _equalize_lengths(self, dataloader: DataLoader) -> DataLoader:
        """Returns a loader whose epochs end together on all ranks; `dataloader` itself if all lengths are equal."""
        ranks, order = self.trainer.data_ranks, order_of(dataloader)
        if ranks.size == 1 or (order is not None and order.num_replicas == ranks.size):
            return dataloader
        lengths = ranks.all_gather_object(sized_len(dataloader))
        if None not in lengths and len(set(lengths)) == 1 and not has_iterable_dataset(dataloader):
            return dataloader
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return clone_loader(
            dataloader,
            UnevenTrainLoader,
            policy=self._uneven,
            rank=ranks.rank,
            all_gather_ints=ranks.all_gather_ints,
            lengths=lengths,
            num_done=lambda: progress.current.ready,
        )

    def _deal(self, dataloader: DataLoader) -> DataLoader:
        """Returns a copy of a training loader whose order is split over the ranks."""
        brings_own_sampler = self._brings_own_sampler(dataloader)
        ranks: Any = {} if brings_own_sampler else self.trainer.distributed_sampler_kwargs or {}
        batches: Any = dataloader.batch_sampler
        controlling = controlling_sampler(dataloader)
        check_length(controlling)
        size = self.sizes.global_batch_size
        sampler = GlobalOrder(
            controlling if size is None or controlling is not batches else FlattenedBatchSampler(batches, size),
            drop_last=getattr(batches, "drop_last", False),
            broadcast=None if brings_own_sampler else self._broadcast,
            at_once=dataloader.num_workers > 0
            and draws_at_once(dataloader.sampler if batches is None else batches, controlling),
            **ranks,
        )
        # Workers get their first indices before Lightning sets the epoch.
        sampler.set_epoch(self.data_position.epoch)
        if has_workers(dataloader):
            dataloader = clone_loader(dataloader, WithWorkers, workers=self.data_position.new_workers())
        if size is not None or (batches is not None and controlling is not batches):
            return clone_loader(dataloader, sampler=sampler, batch_sampler=self.sizes.cut(dataloader, sampler))
        # Beside a batch sampler `sampler` is unused, but Lightning sets the epoch there.
        of_batches: Any = {"batch_sampler": sampler} if controlling is batches else {}
        return clone_loader(dataloader, sampler=sampler, **of_batches)

    def _in_one_order(self, dataloader: DataLoader, mode: RunningStage) -> DataLoader:
        """Returns a copy of a loader that ranks evaluate which share their samples: in the order of rank 0."""
        order, batches = _order_of(dataloader), dataloader.batch_sampler
        check_length(order)
        ranks: Any = self.trainer.distributed_sampler_kwargs or {}
        sampler = GlobalOrder(order, broadcast=self._broadcast, **ranks)
        if batches is None or hasattr(batches, "sampler"):
            return _with_sampler(dataloader, sampler)
        return _with_order(dataloader, sampler, mode)  # or Lightning's error about such a batch sampler

    def _is_dealt(self, dataloader: DataLoader, mode: RunningStage) -> bool:
        """Whether the engine splits the order of `dataloader` over ranks.

        It does with several ranks, with a global batch size, and if a run is resumed in mid-epoch.
        """
        connector = self.trainer._accelerator_connector  # Lightning: holds the use_distributed_sampler flag
        is_training = mode == RunningStage.TRAINING
        if has_iterable_dataset(dataloader) or (is_stateful(dataloader) and not is_training):
            return False
        if is_training and (self.data_position.in_mid_epoch or self.sizes.global_batch_size is not None):
            return True
        return connector.is_distributed and self.trainer.world_size > 1 and not self._brings_own_sampler(dataloader)

    @property
    def _broadcast(self) -> Callable[[Any], Any] | None:
        """Returns a function that returns rank 0's value on all ranks; None in one process."""
        return None if self.trainer.world_size == 1 else lambda value: self.trainer.all_ranks.broadcast_object(value)

    def _brings_own_sampler(self, dataloader: DataLoader) -> bool:
        """Whether each rank has its own sampler."""
        connector = self.trainer._accelerator_connector
        samplers = _order_of(dataloader), dataloader.batch_sampler
        return not connector.use_distributed_sampler or any(hasattr(sampler, "num_replicas") for sampler in samplers)

    def _check_replicas(self, dataloader: object) -> None:
        sampler = _order_of(dataloader) if isinstance(dataloader, DataLoader) else None
        if not isinstance(sampler, DistributedSampler) or sampler.num_replicas == self.trainer.data_size:
            return
        message = (
            f"{type(sampler).__name__} deals to {sampler.num_replicas} rank(s), where samples are shared by"
            f" {self.trainer.data_size}: some are read more than once, or not at all. Make it in"
            " `train_dataloader`, when the ranks are known, or give the DataLoader no such sampler: the engine"
            " deals its order."
        )
        if self.trainer.data_size < self.trainer.world_size:  # ranks that compute together would read different ones
            raise ValueError(message)
        rank_zero_warn(message)

    # --- which loader is evaluated

    def _is_shared(self, dataloader: DataLoader) -> bool:
        """Whether several ranks evaluate `dataloader` together."""
        ranks: Any = self.trainer.distributed_sampler_kwargs or {}
        return ranks.get("num_replicas", 1) > 1 and not self._brings_own_sampler(dataloader)

    def _deal_evaluation(self, dataloader: DataLoader, mode: RunningStage) -> DataLoader:
        """Returns a copy of `dataloader` that yields this rank's part of the evaluated samples."""
        ranks: Any = self.trainer.distributed_sampler_kwargs
        if has_iterable_dataset(dataloader):
            return self._shard_evaluation(dataloader, **ranks)
        predicts = mode == RunningStage.PREDICTING
        batches: Any = dataloader.batch_sampler
        if predicts and is_custom(batches):
            # Lightning: for a prediction, it disables a batch sampler's drop_last if possible, and wraps the sampler.
            batches = _with_order(dataloader, _order_of(dataloader), mode).batch_sampler._batch_sampler
        order, batch_size = evaluated_order(dataloader, batches)
        eval_sampler = EvalBatchSampler(
            GlobalOrder(order, broadcast=self._broadcast),
            batch_size,
            drop_last=batch_size is not None and batches.drop_last and not predicts,
            **ranks,
        )
        if batches is None:
            return clone_loader(dataloader, sampler=eval_sampler)
        batch_sampler = _IndexBatchSamplerWrapper(eval_sampler) if predicts else eval_sampler
        return clone_loader(dataloader, batch_sampler=batch_sampler, sampler=eval_sampler.sampler)

    def _shard_evaluation(self, dataloader: DataLoader, num_replicas: int, rank: int) -> DataLoader:
        """Returns a copy of an evaluation loader of a stream that reads this rank's part, if the stream has parts."""
        part = self._shard(dataloader, num_replicas, rank)
        ranks = self.trainer.data_ranks
        lengths = ranks.all_gather_object(sized_len(part))
        longest = None if None in lengths else max(lengths)
        return clone_loader(part, UnevenEvalLoader, all_gather_bools=ranks.all_gather_bools, length=longest)

    def _shard(self, dataloader: DataLoader, num_replicas: int, rank: int) -> DataLoader:
        part = shard_of(dataloader, num_replicas, rank)
        if part is None:
            remedy = "give it a method `shard(num_shards, index)` that returns a data set of one part"
            self._check_not_read_whole(dataloader.dataset, remedy)
        return dataloader if part is None else part

    def _check_not_read_whole(self, data: object, remedy: str) -> None:
        # Outside of a run, a loader is prepared only for inspection.
        is_read = self.trainer.state.status == TrainerStatus.RUNNING
        # Lightning: holds the use_distributed_sampler flag; without it, no loader is changed.
        if is_read and self.trainer._accelerator_connector.use_distributed_sampler:
            check_not_read_whole(data, self.trainer.data_size, remedy)


def _order_of(dataloader: DataLoader) -> Any:
    """Returns the sampler that determines the order: the batch sampler's, if it has one, otherwise the loader's."""
    return getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)


def _with_order(dataloader: DataLoader, sampler: Any, mode: RunningStage) -> Any:
    """Returns a copy of `dataloader` whose batch sampler was made again; for a prediction it leaves out no sample."""
    made = _dataloader_init_kwargs_resolve_sampler(dataloader, sampler, mode)
    # Lightning calls the loader's constructor again, which fails if the user gave its arguments by position.
    return clone_loader(dataloader, batch_sampler=made["batch_sampler"])


def _with_sampler(dataloader: DataLoader, sampler: GlobalOrder) -> DataLoader:
    """Returns a copy of `dataloader` with another sampler."""
    if dataloader.batch_sampler is None:
        return clone_loader(dataloader, sampler=sampler)
    batches: Any = copy.copy(dataloader.batch_sampler)
    batches.sampler = sampler
    return clone_loader(dataloader, sampler=sampler, batch_sampler=batches)
