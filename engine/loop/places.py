"""Where the training data is, and how a run that is resumed goes on there; Lightning begins the epoch again.

A loader says so by its order of samples (`Pass`), or by a state of its own; one that can say neither begins again.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer

# Lightning: how many batches `limit_train_batches` leaves of a loader.
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import has_iterable_dataset, sized_len
from torch.utils.data import DataLoader, SequentialSampler

from ..data import (
    Pass,
    Remembering,
    Together,
    Watched,
    WatchedLoaders,
    WithWorkers,
    Workers,
    bring_to,
    decides,
    digest_of_generators,
    epoch_of,
    is_stateful,
    keeps_place,
    loses_its_buffer,
    order_of,
    set_epoch,
    state_of_seed,
)
from ..environment import global_seed
from .batch_sizes import BatchSizes

__all__ = ["Places"]


class Places:
    """Of the training loaders of one rank, in their order.

    Args:
        trainer: whose data it is.
        sizes: of the batches.
        deals_itself: says whether each rank has a sampler of its own in a loader.
    """

    def __init__(self, trainer: Trainer, sizes: BatchSizes, deals_itself: Callable[[DataLoader], bool]) -> None:
        self.trainer: Any = trainer
        self.sizes = sizes
        self._deals_itself = deals_itself
        self._resumed: dict[DataLoader, Pass] = {}
        self._watched: dict[DataLoader, Watched] = {}
        self._num_passes: dict[DataLoader, int] = {}
        self._of_workers: dict[DataLoader, Any] = {}
        self._begun: list[tuple[DataLoader, dict[str, Any]]] = []
        self._to_resume: list[dict[str, Any]] = []
        self._is_resuming = self._is_in_mid_epoch = False
        self._saved = self._counted = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch that is trained on."""
        return self.trainer.fit_loop.epoch_progress.current.processed

    def begin_run(self) -> None:
        """Called when a run begins: one that a tuner has ended before its first batch may have left states waiting."""
        self._is_resuming, self._to_resume = False, []
        self._begun.clear()

    def begin(self) -> None:
        """Called before a training loader is prepared."""
        # Lightning: there as soon as all loaders of the epoch have been prepared; this one is of a later epoch.
        self._is_resuming = self._is_resuming and self.trainer.fit_loop._combined_loader is None

    def num_kept(self) -> int:
        """After how many batches a loader is asked for its state: those of an optimizer step, and two around them.

        One is the step before, and one is fetched ahead.
        """
        return int(self.trainer.accumulate_grad_batches) + 2

    def new_workers(self) -> Workers:
        """For a loader whose workers' random states are to be in checkpoints."""
        return Workers(lambda: self.epoch, self.num_kept)

    @property
    def is_amid(self) -> bool:
        """Whether the next loader is to go on in the midst of its order."""
        if not self._is_resuming or not self._to_resume:
            return False
        state = self._to_resume[0]
        return bool(state.get("position") or (state.get("order") or {}).get("before"))

    def watch(self, combined: CombinedLoader) -> None:
        """Watches the loaders that stay the user's own; called before the first iterator of them is made."""
        if type(combined) not in (CombinedLoader, WatchedLoaders):
            return
        watched = {}
        for loader in combined.flattened:
            if not isinstance(loader, DataLoader) or order_of(loader) is not None or keeps_place(loader):
                continue
            if has_iterable_dataset(loader) or sized_len(decides(loader)) is None:
                continue
            watched[loader] = self._watched.get(loader) or Watched(
                loader, decides(loader), lambda: self.epoch, self.num_kept
            )
            if loader in self._num_passes:
                watched[loader].passes.resume(self._num_passes.pop(loader))
            if (workers := watched[loader].workers) is not None:
                workers.resume(loader, self._of_workers.pop(loader, None))
        self._watched = watched
        ours: Any = combined
        ours.__class__ = WatchedLoaders
        # What is no DataLoader need not be hashable.
        ours.watched = [
            watched.get(loader, loader) if isinstance(loader, DataLoader) else loader for loader in combined.flattened
        ]

    def size_of_batch(self, loader: Any, index: int) -> int | None:
        """Samples of a batch of a loader that is watched; None if that is not known."""
        watched = self._watched.get(loader) if isinstance(loader, DataLoader) else None
        return None if watched is None else watched.size_of_batch(index)

    def settle(self) -> None:
        """Called when the first iterators of a resumed epoch are there."""
        for loader, begun in self._begun:
            bring_to(decides(loader) if (ours := order_of(loader)) is None else ours.sampler, 0, begun["sampler"])
            torch.set_rng_state(begun["begun"])
        self._begun.clear()
        for loader in self._resumed:
            if (order := order_of(loader)) is not None:
                order.settle()

    def state_dict(self, batches: int, *, begins: bool = False, is_cut_short: bool = False) -> dict[str, Any]:
        """Where this rank's training data is after `batches` batches of the epoch, plain values all.

        Args:
            batches: of the present epoch.
            begins: none of them was trained on yet.
            is_cut_short: these are of the epoch before, which counts as over, but is to be gone on with.
        """
        epoch = self.epoch - is_cut_short
        # Lightning: the loaders as _prepare_dataloader left them.
        combined = self.trainer.fit_loop._combined_loader
        loaders = [] if combined is None else combined.flattened
        states = [{**self._state_of(loader, epoch, batches, begins), **_of_data(loader)} for loader in loaders]
        return {
            "world_size": self.trainer.data_size,
            "batches": batches,
            "loaders": states,
            "micro_batch_size": self.sizes.found,
        }

    def _state_of(self, loader: Any, epoch: int, batches: int, begins: bool) -> dict[str, Any]:
        if isinstance(loader, Remembering):
            return {**_stateful(loader), "state": loader.state_after(epoch, batches)}
        if keeps_place(loader):
            return {**_stateful(loader), "state": loader.state_dict()}
        if not isinstance(loader, DataLoader) or has_iterable_dataset(loader) or sized_len(loader) is None:
            return {"unit": None}
        place = self._resumed.get(loader)
        if place is None:
            deals_itself = order_of(loader) is None and self._deals_itself(loader)
            watched = self._watched.get(loader)
            if order_of(loader) is None and watched is None and not _is_known(decides(loader)):
                return {"unit": None}
            place = Pass(loader, 1 if deals_itself else self.trainer.data_size, watched=watched)
        # Lightning: CombinedLoader's mode.
        mode = self.trainer.fit_loop._combined_loader._mode
        place.cycles = mode == "max_size_cycle" and not isinstance(loader, Together)
        found = place.state_dict(epoch, batches, begins=begins)
        workers = loader.workers if isinstance(loader, WithWorkers) else getattr(place.watched, "workers", None)
        return found if workers is None else {**found, "workers": workers.state_after(epoch, batches - place.batches)}

    def load_state_dict(self, states: list[dict[str, Any]]) -> bool:
        """Has the loaders that are prepared next go on where those of another run were.

        Args:
            states: `state_dict` of each rank of that run that had samples of its own, in their order.

        Returns:
            Whether all of them can.
        """
        self._saved = self._counted = states[0]["batches"]
        progress = self.trainer.fit_loop.epoch_loop.batch_progress  # Lightning: as the checkpoint has it
        self._is_in_mid_epoch = self._saved > 0 and not progress.is_last_batch
        self.sizes.found = states[0]["micro_batch_size"]
        mine = states[self.trainer.data_rank if len(states) == self.trainer.data_size else 0]
        self._to_resume = [{**self._with_order(loader), "saved_by": len(states)} for loader in mine["loaders"]]
        # Lightning: would give every rank what rank 0's loaders said, after the batches that were fetched ahead too.
        self.trainer.fit_loop._combined_loader_states_to_load = []
        kinds = [loader["unit"] for loader in self._to_resume]
        self._is_resuming = bool(kinds)
        return bool(kinds) and None not in kinds

    def _with_order(self, state: dict[str, Any]) -> dict[str, Any]:
        if "sampler_state" not in state:
            return state
        seed = self.trainer.strategy.broadcast(global_seed())
        return {**state, "order": state_of_seed(seed, state["epoch"], state["sampler_state"])}

    def resume(self, loader: Any) -> None:
        """Takes the next of the states that wait, if any do, for a loader that was just prepared."""
        if not self._is_resuming:
            return
        if not self._to_resume:
            raise ValueError(
                "The checkpoint has the places of fewer training loaders than this run has: use those of that run, or"
                " load the weights alone to begin an epoch."
            )
        state = self._to_resume.pop(0)
        if state["unit"] is None and self._is_in_mid_epoch:
            raise ValueError(
                f"The checkpoint was saved after {self._saved} batches of the epoch, where this run's"
                f" {_name_of(loader)} can't go on: neither it nor its order says where it was. Give its sampler a"
                " `__len__`, or the data `state_dict` and `load_state_dict`; save at the end of an epoch; or load the"
                " weights alone to begin an epoch."
            )
        if isinstance(loader, DataLoader):
            self._resume_data(loader.dataset, state)
        order = state.get("order") or {}
        if "begun" in order and (state["saved_by"] == self.trainer.data_size or self.trainer.data_rank == 0):
            self._begun.append((loader, order))  # the seed of its workers was drawn before that
        if state["unit"] == "stateful":
            self._resume_stateful(loader, state)
        elif state["unit"] is not None and isinstance(loader, DataLoader) and (order := order_of(loader)) is not None:
            self._resume_order(loader, order.num_replicas, state)
        elif not state.get("position") and state.get("order") and isinstance(loader, DataLoader):
            sampler, num_passes = decides(loader), state["order"]["num_passes"]
            bring_to(sampler, num_passes, state["order"]["sampler"])
            if self._is_dealt_alike(state, Pass(loader, state["num_sharing"])):
                self._of_workers[loader] = state.get("workers")
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(state["epoch"])  # workers ask for the first indices before Lightning says so
            self._num_passes[loader] = num_passes
        elif state.get("position"):
            raise ValueError(
                f"The checkpoint was saved after {state['position']} of {state['length']} {state['unit']} of the epoch,"
                f" but this run's {type(loader).__name__} has no order of samples that could be gone on with: use the"
                " DataLoader of that run, or load the weights alone to begin an epoch."
            )

    def _resume_data(self, dataset: Any, state: dict[str, Any]) -> None:
        if self._is_in_mid_epoch and loses_its_buffer(dataset):
            raise ValueError(
                f"{type(dataset).__name__} has a `state_dict` that leaves out what is in the shuffle buffer of a"
                " Hugging Face data set within: it can't be gone on with in mid-epoch. Give the DataLoader that data"
                " set itself, shuffle without a buffer, save at the end of an epoch, or load the weights alone."
            )
        if state.get("generators") not in (None, digest_of_generators(dataset)):
            raise ValueError(
                "The Hugging Face data set is shuffled with other random numbers than in the run that saved the"
                " checkpoint, and would yield another order: give its `shuffle` the same `seed`, which must not be"
                " None, or load the weights alone."
            )
        set_epoch(dataset, state.get("data_epoch"))

    def begin_again(self, fetcher: Any) -> None:
        """Has streams begin again if a hook has told them their epoch since; called before the first batch of one."""
        loaders = self.trainer.fit_loop._combined_loader.flattened
        if not all(isinstance(loader, Remembering) and not loader.evolves for loader in loaders):
            return
        if any(loader.data_epoch != epoch_of(loader.dataset) for loader in loaders):
            for loader in loaders:
                loader.begin(self.epoch)
            iter(fetcher)

    def _resume_order(self, loader: DataLoader, sharing: int, state: dict[str, Any]) -> None:
        world_size, then = self.trainer.data_size, state["saved_by"]
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
        elif state["position"] and isinstance(loader, Together):
            raise ValueError(
                "The checkpoint was saved in mid-epoch, with another batch size than this run's: ranks with samplers of"
                " their own, of different lengths, can't go on there. Resume with the same batch size, or load the"
                " weights alone to begin an epoch."
            )
        self._resumed[loader] = place
        if isinstance(loader, WithWorkers) and self._is_dealt_alike(state, place):
            loader.workers.resume(loader, state.get("workers"))
        # All loaders are as many batches on, also where one of them has begun again or was over.
        batches = max(place.batches for place in self._resumed.values())
        for place in self._resumed.values():
            place.count(batches)
        self._count(batches)

    def _is_dealt_alike(self, state: dict[str, Any], place: Pass) -> bool:
        """Whether each worker gets the samples that the one of its number got in the run that saved `state`."""
        return state["saved_by"] == self.trainer.data_size and state["per_step"] == list(place.per_step)

    def _resume_stateful(self, loader: Any, state: dict[str, Any]) -> None:
        world_size, then = self.trainer.data_size, state["saved_by"]
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
                f"The checkpoint was saved when rank {self.trainer.data_rank} was through with its data, and others"
                " were not: it can't be gone on with there. Resume at the end of an epoch, or load the weights alone."
            )
        if self._saved and {**state, **_stateful(loader)} != state:
            raise ValueError(
                f"The checkpoint has the place in a loader with {_described(state)}, which one with"
                f" {_described(_stateful(loader))} can't go on from: resume with the same, or at the end of an epoch,"
                " or load the weights alone."
            )
        if isinstance(loader, Remembering):
            loader.resume(self.epoch, self._saved, state["state"])
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
        place = self._resumed.get(loader) or Pass(loader, self.trainer.data_size)
        steps, since = done // batches.per_step, place.batches // batches.per_step
        self.sizes.cut_again(micro_batch_size)
        done, place.batches = steps * batches.per_step, since * batches.per_step
        batches.sampler.go_on_at(place.position + (steps - since) * batches.size, done)
        if isinstance(loader, WithWorkers):
            loader.workers.recount(done - place.batches)
        fetcher = fit_loop._data_fetcher
        self._set_limits()
        iter(fetcher)  # takes them on
        self._set_lengths()
        # Lightning: _TrainingEpochLoop.on_run_start
        fetcher.fetched += done
        fetcher._start_profiler = fit_loop.epoch_loop._on_before_fetch
        fetcher._stop_profiler = fit_loop.epoch_loop._on_after_fetch
        return done

    def forget(self) -> None:
        """Called when an epoch begins that is no longer the resumed one: it has its own number of batches."""
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        combined = fit_loop._combined_loader
        assert isinstance(combined, CombinedLoader)
        if trainer.current_epoch > 0:  # Lightning: _TrainingEpochLoop.on_run_start makes a new iterator then
            for loader in combined.flattened:
                if isinstance(loader, Remembering):
                    loader.begin(self.epoch)
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
        if combined._iterator is not None:  # Lightning: it, and not the loader, says how long the epoch is
            combined._iterator.limits = combined.limits

    def _set_lengths(self) -> None:
        trainer, fit_loop = self.trainer, self.trainer.fit_loop
        whole = sized_len(fit_loop._combined_loader)
        fit_loop.max_batches = float("inf") if whole is None else whole
        if isinstance(trainer.val_check_batch, int) and isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(fit_loop.max_batches * trainer.val_check_interval))


def _is_known(sampler: Any) -> bool:
    """Whether an order that is not ours is the same when the epoch is done again."""
    return type(sampler) is SequentialSampler or hasattr(sampler, "set_epoch")


def _stateful(loader: Any) -> dict[str, Any]:
    """What a loader's state says, and what it is good for."""
    return {"unit": "stateful"} | {name: getattr(loader, name, None) for name in ("batch_size", "num_workers")}


def _of_data(loader: Any) -> dict[str, Any]:
    """What a loader's data set alone knows, and its state does not say."""
    if not isinstance(loader, DataLoader):
        return {}
    return {"data_epoch": epoch_of(loader.dataset), "generators": digest_of_generators(loader.dataset)}


def _name_of(loader: Any) -> str:
    over = f" over a {type(loader.dataset).__name__}" if isinstance(loader, DataLoader) else ""
    return f"{type(loader).__name__}{over}"


def _described(state: dict[str, Any]) -> str:
    return f"batch_size={state['batch_size']} and num_workers={state['num_workers']}"
