"""Keeps the user's order of samples under every strategy, and the place in it over the end of a run.

Lightning shuffles in all distributed training, and a run that is resumed begins its epoch again.
"""

import copy
from typing import Any

from lightning.pytorch import Trainer

# Lightning: notes the indices of each batch, for prediction writers.
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector, _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

# Lightning: rebuilds a DataLoader with another sampler and everything else of the user's.
from lightning.pytorch.utilities.data import _update_dataloader, has_iterable_dataset, sized_len
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from torchdata.stateful_dataloader import sampler as torchdatas

from ..data import (
    EvenBatches,
    GlobalOrder,
    InOneRow,
    Pass,
    Remembering,
    agreeing,
    as_stateful,
    check_loader,
    copied,
    decides,
    evaluated_order,
    is_own,
    is_stateful,
    keeps_place,
    order_of,
    remembering,
    shard_of,
    together,
)
from ..environment import global_seed
from ..strategies import flags, gathered, num_ranks, numbers
from .batch_sizes import BatchSizes

__all__ = ["DataConnector"]


class DataConnector(_DataConnector):  # Lightning: Trainer._data_connector
    """Lightning's, with `GlobalOrder` in place of its `DistributedSampler`, and a state.

    Args:
        trainer: whose data it is.
        sizes: of the global batches that training data is cut into.
        uneven: what happens where ranks have different numbers of training batches; one of `UNEVEN`.
    """

    trainer: Any

    def __init__(self, trainer: Trainer, sizes: BatchSizes, uneven: str = "pad") -> None:
        super().__init__(trainer)
        self.sizes = sizes
        self._uneven = uneven
        self._resumed: dict[DataLoader, Pass] = {}
        self._to_resume: list[dict[str, Any]] = []
        self._is_resuming = False
        self._has_warned_of_streams = False
        self._saved = self._counted = 0

    # --- which loader is used

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        # Lightning: _DataConnector._prepare_dataloader. One process's prediction keeps Lightning's, which records the
        # indices.
        if mode == RunningStage.TRAINING:
            # Lightning: there as soon as all loaders of the epoch have been prepared; this one is of a later epoch.
            self._is_resuming = self._is_resuming and self.trainer.fit_loop._combined_loader is None
            prepared = self._prepare_training(dataloader)
            self.trainer._checkpoint_connector.draw_alone()
            if self._is_resuming:
                self._resume(prepared)
            return prepared
        if isinstance(dataloader, DataLoader) and self._is_shared(dataloader):
            return self._evaluated(dataloader, mode)
        if isinstance(dataloader, DataLoader) and mode != RunningStage.PREDICTING and self._dealt(dataloader, mode):
            return self._dealing(dataloader, mode)
        return super()._prepare_dataloader(dataloader, shuffle, mode)

    def _prepare_training(self, dataloader: object) -> object:
        if self.sizes.wanted is not None:
            check_loader(dataloader, self.sizes.wanted, self.sizes.micro)
        if not isinstance(dataloader, DataLoader):
            return dataloader
        if has_iterable_dataset(dataloader):
            if self.trainer.world_size > 1:
                dataloader = self._part(dataloader, **self.trainer.distributed_sampler_kwargs)
            dataloader = as_stateful(dataloader)
        elif self._dealt(dataloader, RunningStage.TRAINING):
            dataloader = self._dealing(dataloader, RunningStage.TRAINING)
        if keeps_place(dataloader):
            # As many as an optimizer step has batches, those before and after it, and the one fetched ahead.
            dataloader = remembering(dataloader, self._epoch, lambda: self.trainer.accumulate_grad_batches + 2)
        return self._in_step(dataloader) if order_of(dataloader) is None else dataloader

    def _in_step(self, dataloader: DataLoader) -> DataLoader:
        """`dataloader` itself if all ranks' are equally long; else one that ends an epoch when theirs do."""
        if num_ranks() == 1 or self.trainer.world_size == 1:
            return dataloader
        lengths = gathered(sized_len(dataloader))
        if None not in lengths and len(set(lengths)) == 1 and not has_iterable_dataset(dataloader):
            return dataloader
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        rank = self.trainer.global_rank
        return together(dataloader, self._uneven, lengths, rank, numbers, lambda: progress.current.ready)

    @property
    def _epoch(self) -> int:
        return self.trainer.fit_loop.epoch_progress.current.processed

    def _dealing(self, dataloader: DataLoader, mode: RunningStage) -> DataLoader:
        """A copy of `dataloader` whose order is dealt to the ranks."""
        ranks: Any = {} if self._deals_itself(dataloader) else self.trainer.distributed_sampler_kwargs or {}
        batches: Any = dataloader.batch_sampler
        trains = mode == RunningStage.TRAINING
        decided = decides(dataloader) if trains else _order_of(dataloader)
        size = self.sizes.wanted if trains else None
        inner = _seedable(decided, dataloader) if size is None or decided is not batches else InOneRow(batches, size)
        sampler = GlobalOrder(
            inner,
            seed=self.trainer.strategy.broadcast(global_seed()),
            drop_last=trains and getattr(batches, "drop_last", False),
            **ranks,
        )
        if trains:
            # Workers ask for the first indices before Lightning says which epoch it is.
            sampler.set_epoch(self._epoch)
        if size is not None or (trains and batches is not None and decided is not batches):
            return copied(dataloader, sampler=sampler, batch_sampler=self.sizes.cut(dataloader, sampler))
        if decided is batches:
            # As `sampler` too, which is not used beside a batch sampler: there Lightning sets the epoch.
            return copied(dataloader, batch_sampler=sampler, sampler=sampler)
        if batches is None or hasattr(batches, "sampler"):
            return _with_sampler(dataloader, sampler)
        return _update_dataloader(dataloader, sampler, mode=mode)  # says what it needs of such a batch sampler

    def _dealt(self, dataloader: DataLoader, mode: RunningStage) -> bool:
        """Whether the order of `dataloader` is ours to deal.

        Several ranks need it; an order that may be random needs a seed; a run that is resumed needs its place.
        """
        connector = self.trainer._accelerator_connector  # Lightning: holds the use_distributed_sampler flag
        trains = mode == RunningStage.TRAINING
        decided = decides(dataloader) if trains else _order_of(dataloader)
        if has_iterable_dataset(dataloader) or (is_stateful(dataloader) and not trains):
            return False
        if trains and self._is_resuming and self._to_resume and self._to_resume[0].get("position"):
            return True
        if trains and self.sizes.wanted is not None:
            return True
        if self._deals_itself(dataloader):
            return False
        if connector.is_distributed or isinstance(decided, RandomSampler):
            return True
        return trains and type(decided) is not SequentialSampler and sized_len(decided) is not None

    def _deals_itself(self, dataloader: DataLoader) -> bool:
        """Whether each rank has a sampler of its own."""
        connector = self.trainer._accelerator_connector
        samplers = _order_of(dataloader), dataloader.batch_sampler
        return not connector.use_distributed_sampler or any(hasattr(sampler, "num_replicas") for sampler in samplers)

    # --- which loader is evaluated

    def _is_shared(self, dataloader: DataLoader) -> bool:
        """Whether several ranks evaluate `dataloader` together."""
        ranks: Any = self.trainer.distributed_sampler_kwargs or {}
        return ranks.get("num_replicas", 1) > 1 and not self._deals_itself(dataloader)

    def _evaluated(self, dataloader: DataLoader, mode: RunningStage) -> DataLoader:
        """A copy of `dataloader` that yields this rank's part of what one process evaluates."""
        ranks: Any = self.trainer.distributed_sampler_kwargs
        if has_iterable_dataset(dataloader):
            return self._stream(dataloader, **ranks)
        predicts = mode == RunningStage.PREDICTING
        batches: Any = dataloader.batch_sampler
        if predicts and is_own(batches):
            # Lightning: has a batch sampler leave out nothing in a prediction, if it can, and wraps it.
            lightnings: Any = _update_dataloader(dataloader, _order_of(dataloader), mode=mode)
            batches = lightnings.batch_sampler._batch_sampler
        order, batch_size = evaluated_order(dataloader, batches)
        even = EvenBatches(
            GlobalOrder(_seedable(order, dataloader), seed=self.trainer.strategy.broadcast(global_seed())),
            batch_size,
            drop_last=batch_size is not None and batches.drop_last and not predicts,
            **ranks,
        )
        if batches is None:
            return copied(dataloader, sampler=even)
        sampler = _IndexBatchSamplerWrapper(even) if predicts else even
        return copied(dataloader, batch_sampler=sampler, sampler=even.sampler)

    def _stream(self, dataloader: DataLoader, num_replicas: int, rank: int) -> DataLoader:
        """A copy of a loader of an `IterableDataset` that reads this rank's part of it, if there is a way to."""
        part = self._part(dataloader, num_replicas, rank)
        lengths = gathered(sized_len(part))
        return agreeing(part, flags, None if None in lengths else max(lengths))

    def _part(self, dataloader: DataLoader, num_replicas: int, rank: int) -> DataLoader:
        part = shard_of(dataloader, num_replicas, rank)
        if part is None and not self._has_warned_of_streams:
            self._has_warned_of_streams = True
            rank_zero_warn(
                f"Each of the {num_replicas} ranks reads all of {type(dataloader.dataset).__name__}, an"
                " IterableDataset: give it a method `shard(num_shards, index)` that returns a data set of one part, or"
                " an attribute `shards_itself = True` if it already reads its own part."
            )
        return dataloader if part is None else part

    # --- where it is

    def state_dict(self, batches: int) -> dict[str, Any]:
        """Where this rank's training data is after `batches` batches of the epoch, plain values all."""
        # Lightning: the loaders as _prepare_dataloader left them.
        combined = self.trainer.fit_loop._combined_loader
        states = [] if combined is None else [self._state_of(loader, batches) for loader in combined.flattened]
        return {
            "world_size": self.trainer.world_size,
            "batches": batches,
            "loaders": states,
            "micro_batch_size": self.sizes.found,
        }

    def _state_of(self, loader: Any, batches: int) -> dict[str, Any]:
        if isinstance(loader, Remembering):
            return {**_stateful(loader), "state": loader.state_after(self._epoch, batches)}
        if keeps_place(loader):
            return {**_stateful(loader), "state": loader.state_dict()}
        if not isinstance(loader, DataLoader) or has_iterable_dataset(loader) or sized_len(loader) is None:
            return {"unit": None}
        place = self._resumed.get(loader)
        if place is None:
            deals_itself = order_of(loader) is None and self._deals_itself(loader)
            if deals_itself and not _is_known(decides(loader)):
                return {"unit": None}
            place = Pass(loader, 1 if deals_itself else self.trainer.world_size)
        # Lightning: CombinedLoader's mode.
        place.cycles = self.trainer.fit_loop._combined_loader._mode == "max_size_cycle"
        return place.state_dict(self._epoch, batches)

    def load_state_dict(self, states: list[dict[str, Any]]) -> bool:
        """Has the loaders that are prepared next go on where those of another run were.

        Args:
            states: `state_dict` of each rank of that run, in their order.

        Returns:
            Whether all of them can.
        """
        self._saved = self._counted = states[0]["batches"]
        self.sizes.found = states[0]["micro_batch_size"]
        mine = states[self.trainer.global_rank if len(states) == self.trainer.world_size else 0]
        self._to_resume = [{**loader, "saved_by": len(states)} for loader in mine["loaders"]]
        # Lightning: would give every rank what rank 0's loaders said, after the batches that were fetched ahead too.
        self.trainer.fit_loop._combined_loader_states_to_load = []
        kinds = [loader["unit"] for loader in self._to_resume]
        self._is_resuming = bool(kinds)
        return bool(kinds) and None not in kinds

    def _resume(self, loader: Any) -> None:
        """Takes the next of the states that wait, for a loader that was just prepared."""
        if not self._to_resume:
            raise ValueError(
                "The checkpoint has the places of fewer training loaders than this run has: use those of that run, or"
                " load the weights alone to begin an epoch."
            )
        state = self._to_resume.pop(0)
        if state["unit"] == "stateful":
            self._resume_stateful(loader, state)
        elif state["unit"] is not None and isinstance(loader, DataLoader) and (order := order_of(loader)) is not None:
            self._resume_order(loader, order.num_replicas, state)
        elif state.get("position"):
            raise ValueError(
                f"The checkpoint was saved after {state['position']} of {state['length']} {state['unit']} of the epoch,"
                f" but this run's {type(loader).__name__} has no order of samples that could be gone on with: use the"
                " DataLoader of that run, or load the weights alone to begin an epoch."
            )

    def _resume_order(self, loader: DataLoader, sharing: int, state: dict[str, Any]) -> None:
        world_size, then = self.trainer.world_size, state["saved_by"]
        is_whole = state["num_sharing"] == then and sharing == world_size
        if state["position"] and not is_whole and (then, state["num_sharing"]) != (world_size, sharing):
            raise ValueError(
                f"The checkpoint has the place of {then} rank(s), each in the order of its own that a distributed"
                f" sampler or `use_distributed_sampler=False` gave it, where this run, of {world_size}, can't go on:"
                f" resume with {then} and the same flag, let the engine deal the samples from the start, or load the"
                " weights alone to begin an epoch."
            )
        place = Pass.resumed(loader, sharing, state)
        if state["per_step"] == list(place.per_step):
            place.count(self._saved)
        self._resumed[loader] = place
        # All loaders are as many batches on, also where one of them has begun again or was over.
        batches = max(place.batches for place in self._resumed.values())
        for place in self._resumed.values():
            place.count(batches)
        self._count(batches)

    def _resume_stateful(self, loader: Any, state: dict[str, Any]) -> None:
        world_size, then = self.trainer.world_size, state["saved_by"]
        if state["state"] is None or (self._saved == 0 and isinstance(loader, Remembering) and not loader.evolves):
            return
        if then != world_size:
            raise ValueError(
                f"The checkpoint has the places of {then} rank(s) in an IterableDataset or a loader with a state of"
                f" its own, which {world_size} can't share: resume with {then}, or at the end of an epoch, or use a"
                " data set with a length, or load the weights alone."
            )
        if self._saved and state["state"].get("ended"):
            raise ValueError(
                f"The checkpoint was saved when rank {self.trainer.global_rank} was through with its data, and others"
                " were not: it can't be gone on with there. Resume at the end of an epoch, or load the weights alone."
            )
        if self._saved and {**state, **_stateful(loader)} != state:
            raise ValueError(
                f"The checkpoint has the place in a loader with {_described(state)}, which one with"
                f" {_described(_stateful(loader))} can't go on from: resume with the same, or at the end of an epoch,"
                " or load the weights alone."
            )
        if isinstance(loader, Remembering):
            loader.resume(self._epoch, self._saved, state["state"])
        # Lightning: it loads a state in mid-epoch only.
        elif is_stateful(loader) and self.trainer.fit_loop.restarting:
            loader.load_state_dict(state["state"])

    def _count(self, batches: int) -> None:
        """Says in the loops' progress how many batches are done, in batches of this run's size."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        shift = batches - self._counted
        for tracker in (progress.current, progress.total):
            for field, value in vars(tracker).items():
                setattr(tracker, field, value + shift)
        self._counted = batches

    def cut_again(self, done: int, micro_batch_size: int) -> int:
        """Cuts the rest of the epoch into micro-batches of another size, between two steps.

        Args:
            done: micro-batches of the epoch that are done.
            micro_batch_size: samples of each rank's, at most.

        Returns:
            How many of the new size that would have been.
        """
        fit_loop, loader = self.trainer.fit_loop, self.sizes.loader
        assert loader is not None
        batches: Any = loader.batch_sampler
        place = self._resumed.get(loader) or Pass(loader, self.trainer.world_size)
        steps, since = done // batches.per_step, place.batches // batches.per_step
        self.sizes.cut_again(micro_batch_size)
        done, place.batches = steps * batches.per_step, since * batches.per_step
        batches.sampler.go_on_at(place.position + (steps - since) * batches.size, done)
        fetcher = fit_loop._data_fetcher
        self._set_limits()
        iter(fetcher)  # takes them on
        self._set_lengths()
        # Lightning: _TrainingEpochLoop.on_run_start
        fetcher.fetched += done
        fetcher._start_profiler = fit_loop.epoch_loop._on_before_fetch
        fetcher._stop_profiler = fit_loop.epoch_loop._on_after_fetch
        return done

    def forget_place(self) -> None:
        """Called when an epoch begins that is no longer the resumed one: it has its own number of batches."""
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        combined = fit_loop._combined_loader
        assert isinstance(combined, CombinedLoader)
        if trainer.current_epoch > 0:  # Lightning: _TrainingEpochLoop.on_run_start makes a new iterator then
            for loader in combined.flattened:
                if isinstance(loader, Remembering):
                    loader.begin(self._epoch)
        if not self._resumed:
            return
        self._resumed.clear()
        self._set_limits()
        self._set_lengths()

    # Lightning: FitLoop.setup_data, where it asks for the lengths.
    def _set_limits(self) -> None:
        trainer, combined = self.trainer, self.trainer.fit_loop._combined_loader
        lengths = [sized_len(loader) for loader in combined.flattened]
        combined.limits = [
            _parse_num_batches(RunningStage.TRAINING, float("inf") if n is None else n, trainer.limit_train_batches)
            for n in lengths
        ]

    def _set_lengths(self) -> None:
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        whole = sized_len(fit_loop._combined_loader)
        fit_loop.max_batches = float("inf") if whole is None else whole
        if isinstance(trainer.val_check_batch, int) and isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))


def _is_known(sampler: Any) -> bool:
    """Whether an order that is not ours is the same when the epoch is done again."""
    return type(sampler) is SequentialSampler or hasattr(sampler, "set_epoch")


def _seedable(sampler: Any, dataloader: DataLoader) -> Any:
    """torch's random sampler in place of torchdata's, which has a generator where the user gave none."""
    if isinstance(sampler, torchdatas.RandomSampler) and dataloader.generator is None:
        return RandomSampler(sampler.data_source, sampler.replacement, sampler.num_samples)
    return sampler


def _stateful(loader: Any) -> dict[str, Any]:
    """What a loader's state says, and what it is good for."""
    return {"unit": "stateful"} | {name: getattr(loader, name, None) for name in ("batch_size", "num_workers")}


def _described(state: dict[str, Any]) -> str:
    return f"batch_size={state['batch_size']} and num_workers={state['num_workers']}"


def _order_of(dataloader: DataLoader) -> Any:
    """The sampler that decides: that of the batch sampler, where there is one of the user's or the loader's own."""
    return getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)


def _with_sampler(dataloader: DataLoader, sampler: GlobalOrder) -> DataLoader:
    """A copy of `dataloader` with another sampler."""
    if dataloader.batch_sampler is None:
        return copied(dataloader, sampler=sampler)
    batches: Any = copy.copy(dataloader.batch_sampler)
    batches.sampler = sampler
    return copied(dataloader, sampler=sampler, batch_sampler=batches)
