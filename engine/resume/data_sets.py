"""The state of training data sets: of the random generators that they have, and the epoch that was set on them.

The generators are those that a data set has as attributes, if its loader has no workers. The generators of workers, and
of streams that are fetched ahead, are saved with the states of the loaders.

A hook may set an epoch, by `set_epoch` or the attribute `epoch`; a resumed run sets it again. Workers have copies of a
data set: if they have started before the hook is called, their copies have a different epoch, which is an error. A
stream that does not depend on earlier epochs is restarted instead.
"""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.data import has_iterable_dataset
from torch.utils.data import DataLoader

from ..data.own_generators import OwnGenerators, set_own_states
from ..data.shards import ShardedLoader, digest_of_generators, loses_its_buffer
from ..data.stateful import StateTrackingLoader, epoch_of, epoch_setter, set_epoch

__all__ = ["DataSetStates"]


class DataSetStates:
    """The states of the data sets of one rank's training loaders.

    Args:
        trainer: the trainer with the data.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self._at_step: list[dict[str, Any]] | None = None
        self._own: dict[int, OwnGenerators] = {}
        """Generators by the identity of the data set, which they keep alive."""
        self._resumed: list[tuple[Any, dict[str, Any]]] = []
        self._watched_epochs: dict[DataLoader, int | None] = {}

    @property
    def _loaders(self) -> list[Any]:
        combined = self._trainer.fit_loop._combined_loader  # Lightning: the loaders as _prepare_dataloader left them
        return [] if combined is None else combined.flattened

    def begin_run(self) -> None:
        """Forgets the states of the last run; called when a run begins."""
        self._at_step, self._resumed = None, []
        self._own.clear()

    def watch(self) -> None:
        """Notes the epochs; called before the loaders' first iterator starts their workers."""
        self._watched_epochs = {loader: epoch_of(loader.dataset) for loader in self._loaders if _has_copies(loader)}

    def mark_step(self) -> None:
        """Notes the generators' states; called before the first batch of a window, which a resumed run repeats."""
        self._at_step = self._draws()

    def return_to_step(self) -> None:
        """Sets the states that `mark_step` has noted again: the step is made again."""
        for loader, states in zip(self._loaders, self._at_step or (), strict=True):
            if states:
                set_own_states(loader.dataset, states)

    def states(self, *, begins: bool) -> list[dict[str, Any]]:
        """Returns the state of each loader's data set, as plain values; `begins`: the epoch was not trained on yet."""
        loop = self._trainer.fit_loop.epoch_loop
        between_epochs = self._trainer._checkpoint_connector.run_state.place.is_between_epochs
        draws = self._at_step if loop.is_in_window and not between_epochs else None
        if draws is None:
            self._own.clear()  # a save searches the data sets for generators again
            draws = self._draws()
        return [
            {"own": own, **_rest_of_state(loader, begins)} for loader, own in zip(self._loaders, draws, strict=True)
        ]

    def _draws(self) -> list[dict[str, Any]]:
        draws: list[dict[str, Any]] = []
        for loader in self._loaders:
            if not _reads_here(loader):
                draws.append({})
                continue
            dataset = loader.dataset
            if (generators := self._own.get(id(dataset))) is None:
                generators = self._own[id(dataset)] = OwnGenerators(dataset)
            draws.append(generators.states())
        return draws

    def resume(self, loader: Any, state: dict[str, Any], *, in_mid_epoch: bool) -> None:
        """Sets the saved state of the data set of a loader that was just prepared.

        Raises:
            ValueError: the data set would not yield the samples that it yielded in the saved run.
        """
        if not isinstance(loader, DataLoader):
            return
        dataset: Any = loader.dataset
        if state.get("own") and _reads_here(loader):
            set_own_states(dataset, state["own"])
            self._resumed += [(dataset, state["own"])] if in_mid_epoch else []
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
        epoch = state.get("data_epoch")
        if epoch not in (None, epoch_of(dataset)) and _has_copies(loader) and loader.persistent_workers:
            raise ValueError(
                f"{type(dataset).__name__} was set to epoch {epoch} by {epoch_setter(dataset)}, but workers that"
                " stay (persistent_workers=True) do not get it, and their epoch is unknown. Resume with"
                " persistent_workers=False, or num_workers=0."
            )
        set_epoch(dataset, epoch)

    def settle(self) -> None:
        """Sets the resumed generators again; called when an epoch's iterators exist, which may have read samples."""
        for dataset, states in self._resumed:
            set_own_states(dataset, states)
        self._resumed.clear()
        self._own.clear()

    def restart_changed_streams(self, fetcher: Any, epoch: int) -> None:
        """Restarts streams if a hook has set another epoch since `watch`; called before the first batch of an epoch.

        Args:
            fetcher: Lightning's data fetcher of the epoch.
            epoch: the current epoch.

        Raises:
            ValueError: workers were started before the hook was called.
        """
        for loader, earlier in self._watched_epochs.items():
            now = epoch_of(loader.dataset)
            if now != earlier and not loader.persistent_workers:
                raise ValueError(
                    f"{type(loader.dataset).__name__} was set to epoch {now} by {epoch_setter(loader.dataset)} in the"
                    " first hook of the resumed epoch, when the DataLoader's workers had been started with epoch"
                    f" {earlier}, and would yield that epoch's samples. Resume with num_workers=0, or from a checkpoint"
                    " that was saved in mid-epoch."
                )
        loaders = self._loaders
        if not all(isinstance(loader, StateTrackingLoader) and not loader.has_cross_epoch_state for loader in loaders):
            return
        if any(loader.seen_epoch != epoch_of(loader.dataset) for loader in loaders):
            for loader in loaders:
                loader.begin(epoch)
            iter(fetcher)


def _rest_of_state(loader: Any, begins: bool) -> dict[str, Any]:
    """Returns the epoch that was set on a loader's data set, and a checksum of what draws the order of a stream."""
    if not isinstance(loader, DataLoader):
        return {}
    # A stream that counts epochs itself counts the current one again when it is resumed.
    counts_itself = isinstance(loader, StateTrackingLoader) and not begins
    epoch = loader.data_epoch if counts_itself else epoch_of(loader.dataset)  # type: ignore[attr-defined]
    return {"data_epoch": epoch, "generators": digest_of_generators(loader.dataset)}


def _reads_here(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.num_workers == 0


def _has_copies(loader: Any) -> bool:
    """Whether workers have copies of a map-style data set, which do not get an epoch that is set later."""
    return isinstance(loader, DataLoader) and loader.num_workers > 0 and not has_iterable_dataset(loader)
