"""The position of a run in its training data, from which a resumed run continues; Lightning would restart the epoch.

The position of a loader is a position in its order of samples (`EpochPosition`), or the loader's own state. A loader
without either restarts the epoch.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader, SequentialSampler

# Lightning: the number of batches of a loader under `limit_train_batches`.
from .._compat.lightning import _parse_num_batches
from ..data.batch_sizes import BatchSizes
from ..data.drawing import restore_sampler
from ..data.epoch_position import EpochPosition, Watched, WatchedLoaders, controlling_sampler, order_of
from ..data.own_generators import set_own_states
from ..data.shards import ShardedLoader, why_not_shardable
from ..data.stateful import (
    KeptStates,
    StateTrackingLoader,
    form_in_words,
    form_of,
    is_litdata_loader,
    is_stateful,
    tracks_own_position,
)
from ..data.uneven import UnevenTrainLoader, check_trained_side_by_side
from ..data.workers import WithWorkers, Workers
from .data_sets import DataSetStates

__all__ = ["DataPosition"]


class DataPosition:
    """The positions of one rank's training loaders, in their order.

    Args:
        trainer: the trainer with the data.
        sizes: sizes of the global batches.
        brings_own_sampler: function that returns whether, in a given loader, each rank has its own sampler.
        seeds_samples: the random draws of each sample are seeded by its index.
    """

    sample_seed: int | None = None
    """Seed of the samples' draws, kept in a resumed run; None until it is known."""

    def __init__(
        self,
        trainer: Trainer,
        sizes: BatchSizes,
        brings_own_sampler: Callable[[DataLoader], bool],
        *,
        seeds_samples: bool = False,
    ) -> None:
        self.trainer: Any = trainer
        self.sizes = sizes
        self._brings_own_sampler = brings_own_sampler
        self._seeds_samples = seeds_samples
        self._resumed_positions: dict[DataLoader, EpochPosition] = {}
        self._watched: dict[int, Watched | KeptStates] = {}
        """Readers of the loaders that stay the user's own, by the `id` of the loader, which may be unhashable."""
        self._epoch_starts: list[tuple[DataLoader, dict[str, Any]]] = []
        self._to_resume: list[dict[str, Any]] = []
        self._is_resuming = self._is_in_mid_epoch = False
        self._saved_batches = self._counted_batches = 0
        self._lengths: list[int | None] = []
        """The loaders' lengths in the current epoch."""
        self.data_sets = DataSetStates(trainer)

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self.trainer.fit_loop.epoch_progress.current.processed

    def begin_run(self) -> None:
        """Resets all state when a run begins: a tuner may have ended the last run before it has used its states."""
        self._is_resuming, self._to_resume, self.sample_seed = False, [], None
        self.data_sets.begin_run()
        # The passes over a sampler are counted over all runs, since it may count them itself; states are of one run.
        self._watched = {key: watched for key, watched in self._watched.items() if isinstance(watched, Watched)}
        self._epoch_starts.clear()

    def begin(self) -> None:
        """Ends the resumption if this is a later epoch; called before a training loader is prepared."""
        # Lightning: `_combined_loader` exists once all loaders of an epoch are prepared: this is a later epoch.
        self._is_resuming = self._is_resuming and self.trainer.fit_loop._combined_loader is None

    def num_kept(self) -> int:
        """Returns the number of states that are kept, one per batch.

        These are the states of a window, the state before it, and the state of a batch that is fetched ahead.
        """
        return int(self.trainer.accumulate_grad_batches) + 2

    def new_workers(self) -> Workers:
        """Returns the record of the random states of one loader's workers, for checkpoints."""
        return Workers(lambda: self.epoch, self.num_kept)

    @property
    def in_mid_epoch(self) -> bool:
        """Whether the next loader continues in the middle of its order."""
        if not self._is_resuming or not self._to_resume:
            return False
        state = self._to_resume[0]
        return bool(state.get("position") or (state.get("order") or {}).get("before"))

    @property
    def may_read_shards(self) -> bool:
        """Whether the next loader, if its data set is a stream with shards, may read it shard by shard.

        It may not if the run that saved the checkpoint did not: its data set was not known then to keep their order.
        """
        resumes = self._is_resuming and self._is_in_mid_epoch and bool(self._to_resume)
        return not resumes or self._to_resume[0]["unit"] != "stateful" or "shards" in self._to_resume[0]

    def watch(self, combined: CombinedLoader) -> None:
        """Tracks the loaders that stay the user's own objects; called before their first iterators are made."""
        self._lengths = _lengths_of(combined)
        check_trained_side_by_side(combined, self.trainer.data_size)
        if type(combined) not in (CombinedLoader, WatchedLoaders):
            return
        self.data_sets.watch()
        loaders = combined.flattened
        self._watched = {id(loader): self._watched_of(loader) for loader in loaders if _is_users(loader)}
        combined_watched: Any = combined
        combined_watched.__class__ = WatchedLoaders
        combined_watched.watched = [self._watched.get(id(loader), loader) for loader in loaders]

    def _watched_of(self, loader: Any) -> Any:
        """Returns what reads a loader that stays the user's own: a `Watched`, or `KeptStates`."""
        if (watched := self._watched.get(id(loader))) is not None:
            return watched
        if isinstance(loader, DataLoader):
            return Watched(loader, controlling_sampler(loader), lambda: self.epoch, self.num_kept)
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        return KeptStates(loader, lambda: self.epoch, lambda: progress.current.ready, self.num_kept)

    def size_of_batch(self, loader: Any, index: int) -> int | None:
        """Returns the number of samples of a batch of a watched loader; None if it is unknown."""
        watched = self._watched.get(id(loader))
        return watched.size_of_batch(index) if isinstance(watched, Watched) else None

    def restore_states(self) -> None:
        """Restores the samplers' states; called when the first iterators of a resumed epoch exist."""
        for loader, start in self._epoch_starts:
            restore_sampler(
                controlling_sampler(loader) if (order := order_of(loader)) is None else order.sampler,
                0,
                start["sampler"],
            )
            torch.set_rng_state(start["begun"])
        self._epoch_starts.clear()
        self.data_sets.settle()
        for loader in self._resumed_positions:
            if (order := order_of(loader)) is not None:
                order.settle()

    def state_dict(self, batches: int, *, begins: bool = False, is_cut_short: bool = False) -> dict[str, Any]:
        """Returns this rank's position in the training data after `batches` batches of the epoch, in plain values.

        Args:
            batches: number of batches of the current epoch that are done.
            begins: the epoch has trained on no batch yet.
            is_cut_short: `batches` counts batches of the last epoch. This epoch counts as over, but a longer run
                continues in it.
        """
        epoch = self.epoch - is_cut_short
        # Lightning: the loaders as _prepare_dataloader left them.
        combined = self.trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        places = [self._state_of(loader, epoch, batches, begins) for loader in loaders]
        data_sets = self.data_sets.states(begins=begins)
        return {
            "world_size": self.trainer.data_size,
            "batches": batches,
            "loaders": [{**place, **data_set} for place, data_set in zip(places, data_sets, strict=True)],
            "micro_batch_size": self.sizes.fitted,
            "sample_seed": self.sample_seed,
        }

    def _state_of(self, loader: Any, epoch: int, batches: int, begins: bool) -> dict[str, Any]:
        watched: Any = self._watched.get(id(loader))
        stateful = loader if watched is None else watched
        if isinstance(stateful, (StateTrackingLoader, KeptStates)):
            return {"unit": "stateful", **form_of(loader), **stateful.place_after(epoch, batches)}
        if tracks_own_position(loader):
            return {"unit": "stateful", **form_of(loader), "state": loader.state_dict()}
        if (position := self._position_of(loader)) is None:
            return {"unit": None}
        # Lightning: CombinedLoader's mode.
        mode = self.trainer.fit_loop._combined_loader._mode
        position.cycles = mode == "max_size_cycle" and not isinstance(loader, UnevenTrainLoader)
        state = position.state_dict(epoch, batches, begins=begins)
        workers = loader.workers if isinstance(loader, WithWorkers) else getattr(position.watched, "workers", None)
        of_workers = None if workers is None else workers.state_after(epoch, batches - position.batches)
        return {**state, "workers": of_workers}

    def _position_of(self, loader: Any) -> EpochPosition | None:
        """Returns the position in the order of a loader; None if it has none that is known."""
        if not isinstance(loader, DataLoader) or has_iterable_dataset(loader) or sized_len(loader) is None:
            return None
        if (position := self._resumed_positions.get(loader)) is not None:
            return position
        watched: Any = self._watched.get(id(loader))
        is_users = order_of(loader) is None
        if is_users and watched is None and not _is_known(controlling_sampler(loader)):
            return None
        sharing = 1 if is_users and self._brings_own_sampler(loader) else self.trainer.data_size
        return EpochPosition(loader, sharing, watched=watched)

    def indices_of(self, first: int, num_batches: int, rank: int | None = None) -> list[Any] | None:
        """Returns the samples of batches of this epoch, as the sampler has named them; None where that is not known.

        Args:
            first: the first batch, with which a step begins.
            num_batches: number of batches, to the end of that step.
            rank: index of the rank whose samples they are; None: those of all ranks together.
        """
        loader = self.sizes.loader
        if loader is None or isinstance(loader, UnevenTrainLoader):
            return None
        position = self._position_of(loader)
        return None if position is None else position.indices(self.epoch, first, num_batches, rank)

    def load_state_dict(self, states: list[dict[str, Any]], *, are_new: bool = False) -> bool:
        """Sets the positions at which the loaders that are prepared next begin.

        Args:
            states: the `state_dict` of each rank of the saved run with different samples, in rank order.
            are_new: the saved run would have made new loaders here, which begin at their first sample.

        Returns:
            Whether there are loaders, and all of them have a position.
        """
        self._saved_batches = self._counted_batches = states[0]["batches"]
        seed = states[0]["sample_seed"]
        if self._seeds_samples:
            self.sample_seed = seed
        elif seed is not None:
            rank_zero_warn(
                "The checkpoint is of a run with seed_samples=True. This run does not have it, so its augmentation will"
                " differ: set seed_samples=True to continue with the same augmentation."
            )
        progress = self.trainer.fit_loop.epoch_loop.batch_progress  # Lightning: from the checkpoint
        self._is_in_mid_epoch = self._saved_batches > 0 and not progress.is_last_batch
        self.sizes.fitted = states[0]["micro_batch_size"]
        own_state = states[self.trainer.data_rank if len(states) == self.trainer.data_size else 0]
        self._to_resume = [{**loader, "saved_by": len(states)} for loader in own_state["loaders"]]
        for number, loader in enumerate(self._to_resume):
            loader["of_ranks"] = [state["loaders"][number] for state in states] if loader["unit"] == "stateful" else []
            loader["is_alone"] = len(self._to_resume) == 1
        # Lightning: would load the state of rank 0's loaders on every rank, including batches that were fetched ahead.
        self.trainer.fit_loop._combined_loader_states_to_load = []
        kinds = [loader["unit"] for loader in self._to_resume]
        self._is_resuming = bool(kinds) and not are_new
        return bool(kinds) and None not in kinds

    def resume(self, loader: Any) -> None:
        """Applies the next saved state, if one is left, to a loader that was just prepared."""
        if not self._is_resuming:
            return
        if not self._to_resume:
            raise ValueError(
                "The checkpoint has the positions of fewer training loaders than this run has: use the loaders of that"
                " run, or load only the weights to begin an epoch."
            )
        state, in_mid_epoch = self._to_resume.pop(0), self._is_in_mid_epoch
        if in_mid_epoch and state["unit"] is None:
            over = f" over a {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else ""
            raise ValueError(
                f"The checkpoint was saved after {self._saved_batches} batches of the epoch, where this run's"
                f" {type(loader).__name__}{over} can't continue: neither it nor its order says where it was. Give its"
                " sampler a `__len__`, or the data `state_dict` and `load_state_dict`; save at the end of an epoch; or"
                " load only the weights to begin an epoch."
            )
        self.data_sets.resume(loader, state, in_mid_epoch=in_mid_epoch)
        drawn = state.get("order") or {}
        if "begun" in drawn and (state["saved_by"] == self.trainer.data_size or self.trainer.data_rank == 0):
            self._epoch_starts.append((loader, drawn))  # the seed of its workers was drawn before
        if not isinstance(loader, DataLoader):
            kept = self._watched[id(loader)] = self._watched_of(loader)
            if in_mid_epoch:
                kept.resume(state.get("pass_start"), is_over=False)
            else:  # it begins an epoch, like a new loader
                kept.resume(None, is_over=self._saved_batches > 0)
                set_own_states(loader, state.get("generators_now", {}))
                state = {**state, "state": None}
        if state["unit"] == "stateful":
            self._set_progress(_resume_stream(loader, state, self.trainer, self.epoch, self._saved_batches))
        elif state["unit"] is not None and isinstance(loader, DataLoader) and (order := order_of(loader)) is not None:
            self._resume_order(loader, order.num_replicas, state)
        elif state.get("position"):
            raise ValueError(
                f"The checkpoint was saved after {state['position']} of {state['length']} {state['unit']} of the epoch,"
                f" but this run's {type(loader).__name__} has no order of samples that could be continued: use the"
                " DataLoader of that run, or load only the weights to begin an epoch."
            )
        elif drawn and isinstance(loader, DataLoader):
            self._begin_users_order(loader, state)

    def _begin_users_order(self, loader: DataLoader, state: dict[str, Any]) -> None:
        """Begins the epoch that the saved run began, in the order of the user's own sampler."""
        sampler, order = controlling_sampler(loader), state["order"]
        restore_sampler(sampler, order["num_passes"], order["sampler"])
        watched = self._watched[id(loader)] = self._watched_of(loader)
        watched.passes.resume(order["num_passes"])
        if watched.workers is not None and self._is_dealt_alike(state, EpochPosition(loader, state["num_sharing"])):
            watched.workers.resume(loader, state.get("workers"))
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(state["epoch"])  # Lightning's own call comes after workers have got their first indices

    def _resume_order(self, loader: DataLoader, sharing: int, state: dict[str, Any]) -> None:
        _check_sharing(state, sharing, self.trainer.data_size)
        position = EpochPosition.resumed(loader, sharing, state)
        if state["per_step"] == list(position.per_step):
            position.batches = self._saved_batches
        elif state["position"] and isinstance(loader, UnevenTrainLoader):
            raise ValueError(
                "The checkpoint was saved in mid-epoch, with another batch size than this run's: ranks with their own"
                " samplers, of different lengths, can't continue there. Resume with the same batch size, or load only"
                " the weights to begin an epoch."
            )
        self._resumed_positions[loader] = position
        if isinstance(loader, WithWorkers) and self._is_dealt_alike(state, position):
            loader.workers.resume(loader, state.get("workers"))
        # All loaders advance equally, even one that has restarted or is exhausted.
        batches = max(position.batches for position in self._resumed_positions.values())
        for position in self._resumed_positions.values():
            position.count(batches)
        self._set_progress(batches)

    def _is_dealt_alike(self, state: dict[str, Any], position: EpochPosition) -> bool:
        """Whether each worker gets the samples that the worker with the same number had in the saved run."""
        return state["saved_by"] == self.trainer.data_size and state["per_step"] == list(position.per_step)

    def _set_progress(self, batches: int | None) -> None:
        """Corrects the loops' progress to `batches` of this run's size; None leaves it as it is."""
        batches = self._counted_batches if batches is None else batches
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        shift = batches - self._counted_batches
        for tracker in (progress.current, progress.total):
            for field, value in vars(tracker).items():
                setattr(tracker, field, value + shift)
        self._counted_batches = batches

    def resplit(self, done: int, micro_batch_size: int) -> int:
        """Splits the rest of the epoch into micro-batches of another size, between two optimizer steps.

        Args:
            done: number of micro-batches of the epoch that are done.
            micro_batch_size: number of samples in a rank's micro-batch, at most.

        Returns:
            The number of micro-batches of the new size that hold as many samples as `done` of the former one.
        """
        trainer, loader = self.trainer, self.sizes.loader
        assert loader is not None
        batches: Any = loader.batch_sampler
        position = self._resumed_positions.get(loader) or EpochPosition(loader, self.trainer.data_size)
        steps, since = done // batches.per_step, position.batches // batches.per_step
        self.sizes.resplit(micro_batch_size)
        done, position.batches = steps * batches.per_step, since * batches.per_step
        batches.sampler.seek(position.position + (steps - since) * batches.size, done)
        if isinstance(loader, WithWorkers):
            loader.workers.recount(done - position.batches)
        fetcher = trainer.fit_loop._data_fetcher
        _set_limits(trainer)
        # A new iterator draws a seed from the generator of the loader, which may be that of its order.
        generator = loader.generator
        numbers = None if generator is None else generator.get_state()
        iter(fetcher)  # makes the iterator use the new limits
        if generator is not None:
            generator.set_state(numbers)
        _set_lengths(trainer)
        # Lightning: _TrainingEpochLoop.on_run_start
        fetcher.fetched += done
        fetcher._start_profiler = trainer.fit_loop.epoch_loop._on_before_fetch
        fetcher._stop_profiler = trainer.fit_loop.epoch_loop._on_after_fetch
        return done

    def deal_again(self, done: int) -> int:
        """Deals the rest of the epoch to the ranks that are left, between two optimizer steps.

        Args:
            done: number of micro-batches of the epoch that are done.

        Returns:
            The number of micro-batches that hold as many samples, as they are cut for the ranks that are left.
        """
        batches, loader = self._take_ranks(), self.sizes.loader
        assert loader is not None
        if (position := self._resumed_positions.get(loader)) is not None:
            position.world_size = batches.sampler.num_replicas
        return self.resplit(done, batches.batch_size)

    def deal_epoch(self) -> None:
        """Deals the whole next epoch to the ranks that are left; called before `begin_next_epoch`."""
        self.sizes.resplit(self._take_ranks().batch_size)

    def _take_ranks(self) -> Any:
        loader = self.sizes.loader
        assert loader is not None
        batches: Any = loader.batch_sampler
        ranks = self.trainer.distributed_sampler_kwargs
        batches.sampler.num_replicas, batches.sampler.rank = ranks["num_replicas"], ranks["rank"]
        return batches

    def restart_loaders(self) -> None:
        """Resets the loaders before an epoch's second iterator is made: workers may have read ahead for the first."""
        combined = self.trainer.fit_loop._combined_loader
        for loader in (loader for loader in combined.flattened if isinstance(loader, DataLoader)):
            if isinstance(loader, StateTrackingLoader):
                loader.begin_again(self.epoch)
            elif (order := order_of(loader)) is not None:
                order.passes.begin_again(self.epoch)
            elif isinstance(watched := self._watched.get(id(loader)), Watched):
                watched.begin_again()

    def begin_next_epoch(self) -> None:
        """Drops the resumed positions; called when an epoch begins, which has its own number of batches."""
        trainer, combined = self.trainer, self.trainer.fit_loop._combined_loader
        assert isinstance(combined, CombinedLoader)
        if trainer.current_epoch > 0:  # Lightning: _TrainingEpochLoop.on_run_start makes a new iterator then
            self.restart_loaders()
        # Lightning asks for the lengths once; a batch sampler with `set_epoch` may have another length in each epoch.
        # If no length has changed, the number that a callback has set stays, as for stochastic weight averaging.
        lengths = _lengths_of(combined)
        are_others = bool(self._resumed_positions) or lengths != self._lengths
        self._resumed_positions.clear()
        self._lengths = lengths
        if are_others:
            _set_limits(trainer)
            _set_lengths(trainer)
            check_trained_side_by_side(combined, trainer.data_size)


def _is_users(loader: Any) -> bool:
    """Whether a loader that stays the user's own has a position: in the order of its sampler, or in its states."""
    if not isinstance(loader, DataLoader):
        return is_stateful(loader)
    if order_of(loader) is not None or tracks_own_position(loader) or has_iterable_dataset(loader):
        return False
    return sized_len(controlling_sampler(loader)) is not None


def _is_known(sampler: Any) -> bool:
    """Whether a sampler that the engine does not control gives the same order when an epoch is repeated."""
    return type(sampler) is SequentialSampler or hasattr(sampler, "set_epoch")


# --- lengths of epochs
# Updates the number of batches of an epoch in Lightning's loops, after a resumed epoch or another batch size.


def _lengths_of(combined: CombinedLoader) -> list[int | None]:
    """Returns the number of batches of each loader; None for a loader without a length."""
    return [sized_len(loader) for loader in combined.flattened]


# Lightning: FitLoop.setup_data, when it asks for the lengths.
def _set_limits(trainer: Any) -> None:
    """Sets the number of batches to read of each training loader."""
    combined = trainer.fit_loop._combined_loader
    combined.limits = [
        _parse_num_batches(RunningStage.TRAINING, float("inf") if n is None else n, trainer.limit_train_batches)
        for n in _lengths_of(combined)
    ]
    if combined._iterator is not None:  # Lightning: the iterator, not the loader, limits the epoch
        combined._iterator.limits = combined.limits


def _set_lengths(trainer: Any) -> None:
    """Sets the number of batches of the epoch, and the number after which a validation is due."""
    fit_loop = trainer.fit_loop
    whole = sized_len(fit_loop._combined_loader)
    fit_loop.max_batches = float("inf") if whole is None else whole
    if isinstance(trainer.val_check_batch, int) and isinstance(trainer.val_check_interval, float):
        trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))


def _check_sharing(state: dict[str, Any], num_sharing: int, num_ranks: int) -> None:
    """Checks that this number of ranks can continue the saved order, or the separate orders of the saved run's ranks.

    Args:
        state: state of the loader, in mid-epoch or not.
        num_sharing: number of ranks that share the loader's order in this run.
        num_ranks: number of this run's ranks with different samples.

    Raises:
        ValueError: the number of ranks with separate orders has changed.
    """
    num_saved = state["saved_by"]
    is_whole = state["num_sharing"] == num_saved and num_sharing == num_ranks
    if state["position"] and not is_whole and (num_saved, state["num_sharing"]) != (num_ranks, num_sharing):
        raise ValueError(
            f"The checkpoint has the positions of {num_saved} rank(s), each in its own order (from a distributed"
            f" sampler or `use_distributed_sampler=False`), and this run, of {num_ranks}, can't continue there:"
            f" resume with {num_saved} and the same flag, let the engine split the samples from the start, or load"
            " only the weights to begin an epoch."
        )


# --- resumes a loader that has its own state: at the saved position, or with the unfinished shards redistributed


def _resume_stream(loader: Any, state: dict[str, Any], trainer: Any, epoch: int, saved: int) -> int | None:
    """Resumes `loader` at the position of the saved run, on all ranks, or raises on all ranks.

    Args:
        loader: loader of this run.
        state: state of the saved run's loader, on this rank; its entry ``of_ranks`` has those of all ranks.
        trainer: trainer of this run.
        epoch: the current epoch.
        saved: number of batches of the epoch that each rank of the saved run had done.

    Returns:
        The number of batches of this run that count as done; None if it equals `saved`.

    Raises:
        ValueError: the loader can't continue there.
    """
    world_size, then = trainer.data_size, state["saved_by"]
    is_alike = form_of(loader).items() <= state.items()
    is_same = then == world_size and is_alike
    if saved and isinstance(loader, ShardedLoader):
        window = trainer.accumulate_grad_batches
        return loader.resume_rest(state, is_same=is_same, epoch=epoch, saved=saved, num_ranks=world_size, window=window)
    is_new = isinstance(loader, StateTrackingLoader) and not (
        loader.has_cross_epoch_state or (loader.continues_across_epochs and is_same)
    )
    if (saved == 0 and is_new) or all(rank["state"] is None for rank in state["of_ranks"]):
        return None
    _check_position(loader, state, saved, world_size, is_alike)
    if state["state"] is not None and isinstance(loader, StateTrackingLoader):
        loader.resume(epoch, saved, state["state"])
    # Lightning: it loads a state in mid-epoch only.
    elif state["state"] is not None and is_stateful(loader) and trainer.fit_loop.restarting:
        loader.load_state_dict(state["state"])
    return None


def _check_position(loader: Any, state: dict[str, Any], saved: int, world_size: int, is_alike: bool) -> None:
    """Checks that a loader without shards can continue at the position of another run.

    Args:
        loader: loader of this run.
        state: state of the saved run's loader.
        saved: number of batches of the epoch that each rank of the saved run had done.
        world_size: number of this run's ranks with different samples.
        is_alike: whether batch size and number of workers are those of the saved run.

    Raises:
        ValueError: the loader can't continue there.
    """
    if saved and is_litdata_loader(loader) and type(loader.dataset).__name__ != "StreamingDataset":
        raise ValueError(
            f"litdata's {type(loader).__name__} over a {type(loader.dataset).__name__} can't continue where it was:"
            " only one over a StreamingDataset is known to. Resume from a checkpoint that was saved between two epochs,"
            " or load only the weights to begin one."
        )
    then = state["saved_by"]
    if then != world_size:
        raise ValueError(
            f"The checkpoint has the positions of {then} rank(s) in an IterableDataset or a loader with a state of"
            f" its own, which {world_size} can't share: {_why_not_dealt(loader, state)}. Resume with {then}, or at"
            " the end of an epoch, or load only the weights. For the next run:"
            " docs/howto/streams-with-shards.md, or a data set with a length."
        )
    # Each rank checks the states of all ranks: if only the rank at its end raised, the others would wait for it.
    states = [other["state"] or {} for other in state["of_ranks"]] if isinstance(loader, StateTrackingLoader) else []
    through = [rank for rank, other in enumerate(states) if other.get("ended")]
    if saved and through:
        raise ValueError(
            f"The checkpoint was saved when rank(s) {through} had finished their data, and others had not:"
            " training can't resume there. Resume at the end of an epoch, or load only the weights."
        )
    if saved and not is_alike:
        raise ValueError(
            f"The checkpoint has the position in a loader with {form_in_words(state)}, which one with"
            f" {form_in_words(form_of(loader))} can't continue from: {_why_not_dealt(loader, state)}. Resume with the"
            " same, or at the end of an epoch, or load only the weights. For the next run:"
            " docs/howto/streams-with-shards.md."
        )


def _why_not_dealt(loader: Any, state: dict[str, Any]) -> str:
    """Returns the reason why saved positions can't be split over other ranks, or into other batches."""
    if "shards" in state:
        return "it was read shard by shard, and this run's loader is not"
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} has no shards that the engine could deal"
    # A data set that is read again up to its position is wrapped around the user's.
    reason = why_not_shardable(getattr(loader.dataset, "dataset", loader.dataset))
    return reason or "in the run that saved the checkpoint it was not read shard by shard"
