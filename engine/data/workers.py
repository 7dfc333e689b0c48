"""The random states of a loader's workers, for augmentation and the like: a run that is resumed goes on with them.

torch seeds each worker of a loader when it starts; after that its generators are where the main process does not see
them. Here a batch brings along the state that its worker was left in, if anything was drawn for it. The workers of a
resumed run begin in these states, and the one whose turn it was is the first to get a batch.

So it is with torch's, numpy's and Python's global generators, and with those that the data set keeps.
"""

import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import DataLoader, get_worker_info

# torch: how it seeds numpy in a worker.
from torch.utils.data._utils.worker import _generate_state

# torch: what DataLoader._get_iterator makes where there are workers.
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ..checkpoint.rng import get_random_state, set_random_state
from .copied import copied
from .drawing import is_same_state
from .own_generators import OwnGenerators, set_own_states

__all__ = ["WithWorkers", "Workers", "has_workers"]

_ENDED_EARLY = """\
The checkpoint is saved after the run, whose persistent workers have ended with batches that nobody has read: what they
drew for them is not known, so that a run that goes on may augment its samples otherwise. Save in a hook, or by a
callback such as Snapshot."""


def has_workers(loader: Any) -> bool:
    """Whether `loader` has workers of torch's kind: those of torchdata's loaders are its own."""
    # torch: DataLoader._get_iterator
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and type(loader)._get_iterator in _PLAIN


class Workers:
    """The random states of a training loader's workers, after each of the last batches.

    Args:
        epoch: number of the present epoch.
        num_kept: after how many batches their states are asked for, at most.
    """

    def __init__(self, epoch: Callable[[], int], num_kept: Callable[[], int]) -> None:
        self._epoch, self._num_kept = epoch, num_kept
        self._of_epoch, self._num_batches, self._next = -1, 0, 0
        self._layout: dict[str, Any] = {}
        self._states: dict[int, _State] = {}
        self._after: dict[int, tuple[int, dict[int, _State]]] = {}
        self._given: dict[str, Any] | None = None
        self._iterator: _Iterator | None = None
        """The iterator whose workers stay after an epoch (`persistent_workers`)."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_epoch": None, "_num_kept": None, "_iterator": None}

    def resume(self, loader: DataLoader, state: dict[str, Any] | None) -> None:
        """Lets the next iterator of `loader` go on where `state_after` said; not if it has other workers."""
        if state is not None and {name: state[name] for name in _layout_of(loader)} == _layout_of(loader):
            self._given = state

    def iterator(self, loader: DataLoader) -> "_Iterator":
        """Returns the iterator over `loader` that stands in for torch's own."""
        loader.check_worker_number_rationality()  # torch: as DataLoader._get_iterator does
        given, self._given = self._given, None
        iterator = _Iterator(loader, self, given)
        self._iterator = iterator if loader.persistent_workers else None
        return iterator

    def take_over(self, loader: DataLoader) -> None:
        """Called before `loader` is iterated: workers may have stayed from an earlier run."""
        left = loader._iterator  # torch: of persistent workers
        if self._given is not None:
            loader.__dict__["_iterator"] = None
        elif isinstance(left, _Iterator) and left.kept is not self:
            self._states, self._iterator, left.kept = left.kept._states, left, self

    def recount(self, batches: int) -> None:
        """Says anew how many batches of the epoch this run has read."""
        self._num_batches = batches
        self._after.clear()

    def begin(self, layout: dict[str, Any], first: int, states: "dict[int, _State] | None") -> None:
        """A pass begins.

        Args:
            layout: of the workers, and what they were seeded with.
            first: worker of the first batch.
            states: that the workers start in; None if they have been there before.
        """
        if self._of_epoch != self._epoch():
            self._of_epoch, self._num_batches = self._epoch(), 0
            self._after.clear()
        self._layout, self._next = layout, first
        self._states = self._states if states is None else states
        self._keep()

    def note(self, worker: int, state: "_State | None") -> None:
        """A batch was read; `state` is that of its worker, None if it is as before."""
        if state is not None:
            self.learn(worker, state)
        self._num_batches += 1
        self._next = (self._next + 1) % self._layout["num_workers"]
        self._keep()

    def learn(self, worker: int, state: "_State") -> None:
        """Says in which state a worker is now."""
        self._states = {**self._states, worker: state}

    def _keep(self) -> None:
        self._after[self._num_batches] = self._next, self._states
        for oldest in list(self._after)[: -self._num_kept()]:
            del self._after[oldest]

    def state_after(self, epoch: int, batches: int) -> dict[str, Any] | None:
        """Returns the states of all workers, as plain values; None where they begin anew, or it is not known.

        Args:
            epoch: the present one, or the one after it.
            batches: that this run has read in the epoch; one of the last.
        """
        if epoch == self._of_epoch and batches in self._after:
            following, states = self._after[batches]
        elif epoch > self._of_epoch >= 0 and self._iterator is not None:
            if self._iterator.has_ended_early:
                rank_zero_warn(_ENDED_EARLY)
            else:
                self._iterator.finish()
            following, states = 0, self._states
        else:
            return None
        return {**self._layout, "next": following, "states": {worker: states[worker].plain() for worker in states}}


class WithWorkers(DataLoader):
    """A loader of ours whose iterators bring the states of their workers along."""

    workers: Workers

    def _get_iterator(self) -> Any:
        return self.workers.iterator(self)  # torch: DataLoader._get_iterator


_PLAIN = (DataLoader._get_iterator, WithWorkers._get_iterator)


def _layout_of(loader: DataLoader) -> dict[str, Any]:
    return {"num_workers": loader.num_workers, "persistent_workers": loader.persistent_workers}


class _Iterator(_MultiProcessingDataLoaderIter):
    """Torch's iterator, which here takes the states off the batches.

    Args:
        loader: that is iterated.
        kept: where the states go.
        given: what the workers begin with; None for torch's own seeds.
    """

    def __init__(self, loader: DataLoader, kept: Workers, given: dict[str, Any] | None) -> None:
        self.kept, self._given = kept, given
        self._first = 0 if given is None else given["next"]
        inside = _InWorker(loader, given)
        replaced: dict[str, Any] = {"collate_fn": inside.collate, "worker_init_fn": inside.begin}
        if given is not None:
            replaced["generator"] = torch.Generator()  # torch draws a seed: from one that nobody else draws from
        super().__init__(copied(loader, **replaced))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        given, states = self._given or {}, None
        if first_iter:
            states = {worker: _State.of(state) for worker, state in given.get("states", {}).items()}
        else:
            self.finish()
        layout = {**_layout_of(loader), "base_seed": given.get("base_seed", self._base_seed)}
        self.kept.begin(layout, self._first, states)
        super()._reset(loader, first_iter)

    # torch: whose turn it is; each pass begins anew with the first worker.
    @property
    def _worker_queue_idx_cycle(self) -> Any:
        return self._turns

    @_worker_queue_idx_cycle.setter
    def _worker_queue_idx_cycle(self, turns: Any) -> None:
        self._turns, self._first = islice(turns, self._first, None), 0

    @property
    def has_ended_early(self) -> bool:
        """Whether the workers have ended, with the run, before all that they were asked for was read."""
        return self._shutdown and self._tasks_outstanding > 0  # torch: set by _shutdown_workers

    def finish(self) -> None:
        """Waits for what the workers were asked for, and nobody will read: they have drawn for it."""
        # torch: its tasks, with what has come before its turn, and how many have not come.
        ahead = {number: rest[0] for number, (_, *rest) in self._task_info.items() if rest}
        ahead.update(self._get_data() for _ in range(self._tasks_outstanding))
        self._task_info, self._tasks_outstanding = {}, 0
        for _, data in sorted(ahead.items(), key=lambda item: item[0]):
            if isinstance(data, tuple) and data[2] is not None:  # else it is an exception
                self.kept.learn(data[1], data[2])

    def _next_data(self) -> Any:
        batch, worker, state = super()._next_data()
        self.kept.note(worker, state)
        return batch


class _State:
    """The states of a process's generators. No tuple, into which pinning would look, and quick to compare and send."""

    def __init__(self, torchs: bytes, numpys: tuple[Any, ...], pythons: tuple[Any, ...], own: dict[str, Any]) -> None:
        self.content = torchs, numpys, pythons
        self.own = own

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _State) and self.content == other.content and is_same_state(self.own, other.own)

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def here(cls, own: OwnGenerators) -> "_State":
        """The states of this process's global generators, and of those that the data set keeps."""
        name, keys, *rest = np.random.get_state(legacy=True)
        torchs, numpys = torch.get_rng_state().numpy().tobytes(), (name, keys.tobytes(), *rest)  # type: ignore[union-attr]
        return cls(torchs, numpys, random.getstate(), own.states())

    @classmethod
    def of(cls, state: dict[str, Any]) -> "_State":
        """Rebuilds a state from what `plain` gave."""
        version, keys, gauss = state["python"]
        name, numpys, *rest = state["numpy"]
        numpys = np.array(numpys, dtype=np.uint32).tobytes()
        own = state.get("own", {})
        return cls(state["torch"].numpy().tobytes(), (name, numpys, *rest), (version, tuple(keys), gauss), own)

    def plain(self) -> dict[str, Any]:
        """Returns the state in the form of `get_random_state`."""
        torchs, (name, keys, *rest), pythons = self.content
        return {
            "python": pythons,
            "numpy": [name, np.frombuffer(keys, dtype=np.uint32).tolist(), *rest],
            "torch": torch.frombuffer(bytearray(torchs), dtype=torch.uint8),
            "own": self.own,
        }


class _InWorker:
    """Runs in the workers, around the user's collate_fn and worker_init_fn, in their place."""

    def __init__(self, loader: DataLoader, given: dict[str, Any] | None) -> None:
        self._collate, self._init = loader.collate_fn, loader.worker_init_fn
        self._base_seed = None if given is None else given["base_seed"]
        self._states = {} if given is None else given["states"]
        self._worker = -1
        self._own = OwnGenerators(None)
        self._latest: _State | None = None

    def begin(self, worker: int) -> None:
        """The `worker_init_fn`."""
        if self._base_seed is not None:
            # torch: _worker_loop, right before it calls this.
            seed = self._base_seed + worker
            random.seed(seed)
            torch.manual_seed(seed)
            np.random.seed(_generate_state(self._base_seed, worker))
            object.__setattr__(get_worker_info(), "seed", seed)  # which is frozen
        if self._init is not None:
            self._init(worker)
        if worker in self._states:
            set_random_state({**get_random_state(), **self._states[worker]})
            set_own_states(_dataset(), self._states[worker].get("own", {}))
        self._own = OwnGenerators(_dataset())
        self._worker, self._latest = worker, _State.here(self._own)

    def collate(self, samples: Any) -> tuple[Any, int, _State | None]:
        """The `collate_fn`: the batch, whose it is, and the state after it if that has changed."""
        batch, state = self._collate(samples), _State.here(self._own)
        if state == self._latest:
            return batch, self._worker, None
        self._latest = state
        return batch, self._worker, state


def _dataset() -> Any:
    """The data set that the present worker reads."""
    info = get_worker_info()
    return None if info is None else info.dataset
