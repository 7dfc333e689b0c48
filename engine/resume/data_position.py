"""The position of a run in its training data, from which a resumed run continues; Lightning would restart the epoch.

The position of a loader is a position in its order of samples (`EpochPosition`), or the loader's own state. A loader
without either restarts the epoch.
"""

from collections.abc import Callable
from typing import Any, NoReturn

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
from ..data.own_generators import OwnGenerators, set_own_states
from ..data.shards import ShardedLoader, digest_of_generators, loses_its_buffer, remaining_shards, why_not_shardable
from ..data.stateful import (
    KeptStates,
    StateTrackingLoader,
    epoch_of,
    epoch_setter,
    is_litdata_loader,
    is_stateful,
    set_epoch,
    tracks_own_position,
)
from ..data.uneven import UnevenTrainLoader, check_trained_side_by_side
from ..data.workers import WithWorkers, Workers

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
        self._watched: dict[DataLoader, Watched] = {}
        self._kept_states: dict[int, KeptStates] = {}
        self._pass_starts: dict[int, dict[str, Any] | None] = {}
        """Like `_kept_states`, by the `id` of the loader: loaders of other classes may be unhashable."""
        self._num_passes: dict[DataLoader, int] = {}
        self._worker_states: dict[DataLoader, Any] = {}
        self._epoch_starts: list[tuple[DataLoader, dict[str, Any]]] = []
        self._to_resume: list[dict[str, Any]] = []
        self._is_resuming = self._is_in_mid_epoch = False
        self._saved_batches = self._counted_batches = 0
        self._lengths: list[int | None] = []
        """The loaders' lengths in the current epoch."""
        self.draws, self.data_epochs = _DataDraws(trainer), _DataSetEpochs(trainer)

    @property
    def epoch(self) -> int:
        """The number of the current epoch, from 0."""
        return self.trainer.fit_loop.epoch_progress.current.processed

    def begin_run(self) -> None:
        """Resets all state when a run begins: a tuner may have ended the last run before it has used its states."""
        self._is_resuming, self._to_resume, self.sample_seed = False, [], None
        self.draws.begin_run()
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
        self.data_epochs.watch(combined)
        watched = {}
        for loader in combined.flattened:
            if not isinstance(loader, DataLoader) or order_of(loader) is not None or tracks_own_position(loader):
                continue
            if has_iterable_dataset(loader) or sized_len(controlling_sampler(loader)) is None:
                continue
            watched[loader] = self._watched.get(loader) or Watched(
                loader, controlling_sampler(loader), lambda: self.epoch, self.num_kept
            )
            if loader in self._num_passes:
                watched[loader].passes.resume(self._num_passes.pop(loader))
            if (workers := watched[loader].workers) is not None:
                workers.resume(loader, self._worker_states.pop(loader, None))
        self._watched = watched
        combined_watched: Any = combined
        combined_watched.__class__ = WatchedLoaders
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        self._kept_states = {
            id(loader): KeptStates(
                loader,
                lambda: self.epoch,
                lambda: progress.current.ready,
                self.num_kept,
                self._pass_starts.pop(id(loader), None),
                is_over=self._is_resuming and self._saved_batches > 0 and not self._is_in_mid_epoch,
            )
            for loader in combined.flattened
            if not isinstance(loader, DataLoader) and is_stateful(loader)
        }
        combined_watched.watched = [
            watched.get(loader, loader) if isinstance(loader, DataLoader) else self._kept_states.get(id(loader), loader)
            for loader in combined.flattened
        ]

    def size_of_batch(self, loader: Any, index: int) -> int | None:
        """Returns the number of samples of a batch of a watched loader; None if it is unknown."""
        watched = self._watched.get(loader) if isinstance(loader, DataLoader) else None
        return None if watched is None else watched.size_of_batch(index)

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
        self.draws.settle()
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
        states = [
            {**self._state_of(loader, epoch, batches, begins), **_state_of_data(loader, begins=begins)}
            for loader in loaders
        ]
        for state, draws in zip(states, self.draws.states(), strict=True):
            state["own"] = draws
        return {
            "world_size": self.trainer.data_size,
            "batches": batches,
            "loaders": states,
            "micro_batch_size": self.sizes.fitted,
            "sample_seed": self.sample_seed,
        }

    def _state_of(self, loader: Any, epoch: int, batches: int, begins: bool) -> dict[str, Any]:
        if isinstance(loader, StateTrackingLoader):
            shards = {"shards": loader.shards_state()} if isinstance(loader, ShardedLoader) else {}
            return {**_stateful(loader), "state": loader.state_after(epoch, batches), **shards}
        if id(loader) in self._kept_states:
            return {**_stateful(loader), **self._kept_states[id(loader)].state_after(epoch, batches)}
        if tracks_own_position(loader):
            return {**_stateful(loader), "state": loader.state_dict()}
        if not isinstance(loader, DataLoader) or has_iterable_dataset(loader) or sized_len(loader) is None:
            return {"unit": None}
        position = self._resumed_positions.get(loader)
        if position is None:
            brings_own_sampler = order_of(loader) is None and self._brings_own_sampler(loader)
            watched = self._watched.get(loader)
            if order_of(loader) is None and watched is None and not _is_known(controlling_sampler(loader)):
                return {"unit": None}
            position = EpochPosition(loader, 1 if brings_own_sampler else self.trainer.data_size, watched=watched)
        # Lightning: CombinedLoader's mode.
        mode = self.trainer.fit_loop._combined_loader._mode
        position.cycles = mode == "max_size_cycle" and not isinstance(loader, UnevenTrainLoader)
        state = position.state_dict(epoch, batches, begins=begins)
        workers = loader.workers if isinstance(loader, WithWorkers) else getattr(position.watched, "workers", None)
        of_workers = None if workers is None else workers.state_after(epoch, batches - position.batches)
        return {**state, "workers": of_workers}

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
        state = self._to_resume.pop(0)
        self.draws.resume(loader, state.get("own"), is_in_mid_epoch=self._is_in_mid_epoch)
        if self._is_in_mid_epoch:
            _check_has_position(loader, state, self._saved_batches)
        if isinstance(loader, DataLoader):
            _check_data_set(loader, state, in_mid_epoch=self._is_in_mid_epoch)
            self.data_epochs.resume(loader, state.get("data_epoch"))
        order = state.get("order") or {}
        if "begun" in order and (state["saved_by"] == self.trainer.data_size or self.trainer.data_rank == 0):
            self._epoch_starts.append((loader, order))  # the seed of its workers was drawn before
        if state["unit"] == "stateful":
            if not isinstance(loader, DataLoader) and self._is_in_mid_epoch:
                self._pass_starts[id(loader)] = state.get("pass_start")
            elif not isinstance(loader, DataLoader):
                # The loader begins an epoch, like a new loader.
                set_own_states(loader, state.get("generators_now", {}))
                state = {**state, "state": None}
            self._set_progress(_resume_stream(loader, state, self.trainer, self.epoch, self._saved_batches))
        elif state["unit"] is not None and isinstance(loader, DataLoader) and (order := order_of(loader)) is not None:
            self._resume_order(loader, order.num_replicas, state)
        elif not state.get("position") and state.get("order") and isinstance(loader, DataLoader):
            sampler, num_passes = controlling_sampler(loader), state["order"]["num_passes"]
            restore_sampler(sampler, num_passes, state["order"]["sampler"])
            if self._is_dealt_alike(state, EpochPosition(loader, state["num_sharing"])):
                self._worker_states[loader] = state.get("workers")
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(state["epoch"])  # Lightning's own call comes after workers have got their first indices
            self._num_passes[loader] = num_passes
        elif state.get("position"):
            _refuse_without_order(loader, state)

    def _resume_order(self, loader: DataLoader, sharing: int, state: dict[str, Any]) -> None:
        _check_sharing(state, sharing, self.trainer.data_size)
        position = EpochPosition.resumed(loader, sharing, state)
        if state["per_step"] == list(position.per_step):
            position.count(self._saved_batches)
        elif state["position"]:
            _check_same_batch_size(loader)
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
        loader = self.sizes.loader
        assert loader is not None
        batches: Any = loader.batch_sampler
        ranks = self.trainer.distributed_sampler_kwargs
        order, position = batches.sampler, self._resumed_positions.get(loader)
        order.num_replicas, order.rank = ranks["num_replicas"], ranks["rank"]
        if position is not None:
            position.world_size = order.num_replicas
        return self.resplit(done, batches.batch_size)

    def restart_loaders(self) -> None:
        """Resets the loaders before an epoch's second iterator is made: workers may have read ahead for the first."""
        combined = self.trainer.fit_loop._combined_loader
        for loader in (loader for loader in combined.flattened if isinstance(loader, DataLoader)):
            if isinstance(loader, StateTrackingLoader):
                loader.begin_again(self.epoch)
            elif (order := order_of(loader)) is not None:
                order.passes.begin_again(self.epoch)
            elif loader in self._watched:
                self._watched[loader].begin_again()

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


# --- checks of a saved position
# Refuses training loaders that can't continue where a checkpoint was saved; each error names the remedy.


def _check_has_position(loader: Any, state: dict[str, Any], num_batches: int) -> None:
    """Checks that a state saved in mid-epoch, after `num_batches` batches, has a position.

    Raises:
        ValueError: the state has no position.
    """
    if state["unit"] is None:
        over = f" over a {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else ""
        raise ValueError(
            f"The checkpoint was saved after {num_batches} batches of the epoch, where this run's"
            f" {type(loader).__name__}{over} can't continue: neither it nor its order says where it was. Give its"
            " sampler a `__len__`, or the data `state_dict` and `load_state_dict`; save at the end of an epoch; or load"
            " only the weights to begin an epoch."
        )


def _check_data_set(loader: DataLoader, state: dict[str, Any], *, in_mid_epoch: bool) -> None:
    """Checks that a data set yields the samples that it yielded in the saved run.

    Raises:
        ValueError: its state lacks a shuffle buffer, or it is shuffled with other random numbers.
    """
    dataset: Any = loader.dataset
    if in_mid_epoch and not isinstance(loader, ShardedLoader) and loses_its_buffer(dataset):
        raise ValueError(
            f"{type(dataset).__name__} has a `state_dict` that leaves out what is in the shuffle buffer of a"
            " Hugging Face data set within: it can't continue in mid-epoch. Give the DataLoader that data"
            " set itself, shuffle without a buffer, save at the end of an epoch, or load only the weights."
        )
    if state.get("generators") not in (None, digest_of_generators(dataset)):
        raise ValueError(
            "The Hugging Face data set is shuffled with other random numbers than in the run that saved the"
            " checkpoint, and would yield another order: give its `shuffle` the same `seed`, which must not be"
            " None, or load only the weights."
        )


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


def _check_same_batch_size(loader: DataLoader) -> None:
    """Checks that a loader can continue in mid-epoch with another batch size than in the saved run.

    Raises:
        ValueError: the ranks have their own samplers, of different lengths.
    """
    if isinstance(loader, UnevenTrainLoader):
        raise ValueError(
            "The checkpoint was saved in mid-epoch, with another batch size than this run's: ranks with their own"
            " samplers, of different lengths, can't continue there. Resume with the same batch size, or load only the"
            " weights to begin an epoch."
        )


def _refuse_without_order(loader: Any, state: dict[str, Any]) -> NoReturn:
    """Refuses a loader without an order, if the saved run was in the middle of one.

    Raises:
        ValueError: always.
    """
    raise ValueError(
        f"The checkpoint was saved after {state['position']} of {state['length']} {state['unit']} of the epoch,"
        f" but this run's {type(loader).__name__} has no order of samples that could be continued: use the"
        " DataLoader of that run, or load only the weights to begin an epoch."
    )


# --- generators of data sets
# States of the random generators that training data sets have as attributes, if their loaders have no workers.
#
# The generators of workers, and of streams that are fetched ahead, are saved with the states of the loaders.


class _DataDraws:
    """The states of the generators that one rank's training data sets keep, by loader.

    Args:
        trainer: the trainer with the data.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self._at_step: list[dict[str, Any]] | None = None
        self._own: dict[int, OwnGenerators] = {}
        """Generators by the identity of the data set, which they keep alive."""
        self._resumed: list[tuple[Any, dict[str, Any]]] = []

    def begin_run(self) -> None:
        """Forgets the states of the last run; called when a run begins."""
        self._at_step, self._resumed = None, []
        self._own.clear()

    def mark_step(self) -> None:
        """Notes the present states; called before the first batch of a window, which a resumed run repeats."""
        self._at_step = self._present()

    def return_to_step(self) -> None:
        """Sets the states that `mark_step` has noted again: the step is made again."""
        combined = self.trainer.fit_loop._combined_loader  # Lightning: see `_present`
        for loader, states in zip(combined.flattened, self._at_step or (), strict=True):
            if states:
                set_own_states(loader.dataset, states)

    def states(self) -> list[dict[str, Any]]:
        """Returns, for each loader, the states of the generators of its data set, by name."""
        loop = self.trainer.fit_loop.epoch_loop
        between_epochs = self.trainer._checkpoint_connector.run_state.place.is_between_epochs
        if self._at_step is not None and not between_epochs and loop.is_in_window:
            return self._at_step
        self._own.clear()  # a save searches the data sets for generators again
        return self._present()

    def _present(self) -> list[dict[str, Any]]:
        combined = self.trainer.fit_loop._combined_loader  # Lightning: the loaders as _prepare_dataloader left them
        loaders = [] if combined is None else combined.flattened
        return [self._states_of(loader) for loader in loaders]

    def _states_of(self, loader: Any) -> dict[str, Any]:
        if not _reads_here(loader):
            return {}
        dataset = loader.dataset
        if (generators := self._own.get(id(dataset))) is None:
            generators = self._own[id(dataset)] = OwnGenerators(dataset)
        return generators.states()

    def resume(self, loader: Any, states: dict[str, Any] | None, *, is_in_mid_epoch: bool) -> None:
        """Sets the generators of a loader that was just prepared to the saved `states`."""
        if states and _reads_here(loader):
            set_own_states(loader.dataset, states)
            self._resumed += [(loader, states)] if is_in_mid_epoch else []

    def settle(self) -> None:
        """Sets the resumed states again; called when the iterators of an epoch exist, which may have read samples."""
        for loader, states in self._resumed:
            set_own_states(loader.dataset, states)
        self._resumed.clear()
        self._own.clear()


def _reads_here(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers == 0


# --- epochs that a hook sets on a data set, by `set_epoch` or its attribute `epoch`; a resumed run sets them again
# Workers have copies of a data set. If they have started before a hook sets the epoch, their copies have a different
# epoch, which is an error. A stream that does not depend on earlier epochs is restarted instead.


def _state_of_data(loader: Any, *, begins: bool) -> dict[str, Any]:
    """Returns the epoch that was set on a loader's data set, and a checksum of its generators, for a checkpoint."""
    if not isinstance(loader, DataLoader):
        return {}
    # A stream that counts epochs itself counts the current one again when it is resumed.
    saved_epoch = (
        loader.data_epoch if isinstance(loader, StateTrackingLoader) and not begins else epoch_of(loader.dataset)
    )
    return {"data_epoch": saved_epoch, "generators": digest_of_generators(loader.dataset)}


class _DataSetEpochs:
    """The epochs that were set on the data sets of one rank's training loaders.

    Args:
        trainer: the trainer with the data.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer: Any = trainer
        self._by_loader: dict[DataLoader, int | None] = {}

    def watch(self, combined: CombinedLoader) -> None:
        """Notes the data sets' epochs; called before the loaders' first iterator starts their workers."""
        self._by_loader = {loader: epoch_of(loader.dataset) for loader in combined.flattened if _has_copies(loader)}

    def resume(self, loader: DataLoader, saved_epoch: int | None) -> None:
        """Sets the epoch of the saved run on a data set.

        Raises:
            ValueError: the workers of that run may have had another epoch.
        """
        dataset: Any = loader.dataset
        if (
            saved_epoch is not None
            and saved_epoch != epoch_of(dataset)
            and _has_copies(loader)
            and loader.persistent_workers
        ):
            raise ValueError(
                f"{type(dataset).__name__} was set to epoch {saved_epoch} by {epoch_setter(dataset)}, but workers that"
                " stay (persistent_workers=True) do not get it, and their epoch is unknown. Resume with"
                " persistent_workers=False, or num_workers=0."
            )
        set_epoch(dataset, saved_epoch)

    def restart_changed_streams(self, fetcher: Any, epoch: int) -> None:
        """Restarts streams if a hook has set another epoch since `watch`; called before the first batch of an epoch.

        Args:
            fetcher: Lightning's data fetcher of the epoch.
            epoch: the current epoch.

        Raises:
            ValueError: workers were started before the hook was called.
        """
        loaders = self.trainer.fit_loop._combined_loader.flattened  # Lightning: as _prepare_dataloader left them
        for loader, earlier in self._by_loader.items():
            now = epoch_of(loader.dataset)
            if now != earlier and not loader.persistent_workers:
                raise ValueError(
                    f"{type(loader.dataset).__name__} was set to epoch {now} by {epoch_setter(loader.dataset)} in the"
                    " first hook of the resumed epoch, when the DataLoader's workers had been started with epoch"
                    f" {earlier}, and would yield that epoch's samples. Resume with num_workers=0, or from a checkpoint"
                    " that was saved in mid-epoch."
                )
        if not all(isinstance(loader, StateTrackingLoader) and not loader.has_cross_epoch_state for loader in loaders):
            return
        if any(loader.seen_epoch != epoch_of(loader.dataset) for loader in loaders):
            for loader in loaders:
                loader.begin(epoch)
            iter(fetcher)


def _has_copies(loader: Any) -> bool:
    """Whether workers have copies of a map-style data set, which do not get an epoch that is set later."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and not has_iterable_dataset(loader)


# --- resumes a loader that has its own state: at the saved position, or with the unfinished shards redistributed


def _stateful(loader: Any) -> dict[str, Any]:
    """Returns the kind of a loader's state, with the batch size and number of workers for which it is valid."""
    return {"unit": "stateful"} | {name: getattr(loader, name, None) for name in ("batch_size", "num_workers")}


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
    is_alike = {**state, **_stateful(loader)} == state
    is_same = then == world_size and is_alike
    if saved and isinstance(loader, ShardedLoader):
        return _resume_shards(loader, state, is_same, epoch, saved, world_size, trainer.accumulate_grad_batches)
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
            f"The checkpoint has the position in a loader with {_described(state)}, which one with"
            f" {_described(_stateful(loader))} can't continue from: {_why_not_dealt(loader, state)}. Resume with the"
            " same, or at the end of an epoch, or load only the weights. For the next run:"
            " docs/howto/streams-with-shards.md."
        )


def _resume_shards(
    loader: ShardedLoader, state: dict[str, Any], is_same: bool, epoch: int, saved: int, num_ranks: int, window: int
) -> int:
    """Resumes `loader` with the rest of an epoch.

    Args:
        loader: loader of this run.
        state: state of the saved run's loader, on this rank; its entry ``of_ranks`` has those of all ranks.
        is_same: the numbers of ranks and workers and the batch size are those of the saved run.
        epoch: the current epoch.
        saved: number of batches of the epoch that each rank of the saved run had done.
        num_ranks: number of this run's ranks.
        window: number of batches of an optimizer step.

    Returns:
        The number of batches of this run that count as done: those that hold as many samples as the saved run's.

    Raises:
        ValueError: the data has another number of shards, or there are other training loaders beside this one.
    """
    states = state["of_ranks"]
    then, now = state["shards"]["num_shards"], loader.dataset.count
    if then != now:
        raise ValueError(
            f"The checkpoint has positions in {then} shards, but this run's {type(loader.dataset.dataset).__name__} has"
            f" {now}: use the same data, or load only the weights to begin an epoch."
        )
    # If a rank had read all of its shards, the remaining shards of the others are distributed over all ranks.
    has_ended = any(stream["state"] is not None and stream["state"]["ended"] for stream in states)
    if is_same and not has_ended:
        loader.dataset.deal_next(state["shards"]["dealt"])
        loader.resume(epoch, saved, state["state"])
        return saved
    if not state["is_alone"]:
        raise ValueError(
            "The checkpoint has the position in a stream with shards beside other training loaders, whose shards can't"
            f" be distributed again: resume with {len(states)} rank(s), {_described(state)}, from a checkpoint in which"
            " no loader has ended; or at the end of an epoch; or load only the weights."
        )
    samples = saved * len(states) * (state["batch_size"] or 1)
    batches = samples // (num_ranks * (loader.batch_size or 1))
    batches = max(window, batches // window * window)  # an optimizer step begins with the next one
    loader.go_on_with(epoch, batches, remaining_shards(states, now))
    return batches


def _why_not_dealt(loader: Any, state: dict[str, Any]) -> str:
    """Returns the reason why saved positions can't be split over other ranks, or into other batches."""
    if "shards" in state:
        return "it was read shard by shard, and this run's loader is not"
    if not isinstance(loader, DataLoader):
        return f"{type(loader).__name__} has no shards that the engine could deal"
    # A data set that is read again up to its position is wrapped around the user's.
    reason = why_not_shardable(getattr(loader.dataset, "dataset", loader.dataset))
    return reason or "in the run that saved the checkpoint it was not read shard by shard"


def _described(state: dict[str, Any]) -> str:
    """Returns the batch size and the number of workers of a loader, for a message."""
    return f"batch_size={state['batch_size']} and num_workers={state['num_workers']}"
