"""Keeps the user's order of samples under every strategy, and the place in it over the end of a run.

Lightning shuffles in all distributed training, and a run that is resumed begins its epoch again.
"""

import copy
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.data_connector import _DataConnector, _parse_num_batches
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader

# Lightning: rebuilds a DataLoader with another sampler and everything else of the user's.
from lightning.pytorch.utilities.data import _update_dataloader, has_iterable_dataset, sized_len
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from ..data import GlobalOrder, Pass, as_stateful, is_stateful, order_of
from ..environment import global_seed

__all__ = ["DataConnector"]


class DataConnector(_DataConnector):  # Lightning: Trainer._data_connector
    """Lightning's, with `GlobalOrder` in place of its `DistributedSampler`, and a state."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._resumed: dict[int, Pass] = {}
        self._to_resume: list[list[dict[str, Any]]] = []
        self._counted = 0
        self.states_before_fetch: list[Any] | None = None
        """What stateful loaders said before the batch that was fetched ahead; None if none is."""

    # --- which loader is used

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        # Lightning: _DataConnector._prepare_dataloader. Prediction keeps Lightning's, which records the indices.
        trains = mode == RunningStage.TRAINING
        if trains and isinstance(dataloader, DataLoader) and has_iterable_dataset(dataloader):
            dataloader = as_stateful(dataloader)
        if (
            not isinstance(dataloader, DataLoader)
            or mode == RunningStage.PREDICTING
            or not self._dealt(dataloader, mode)
        ):
            prepared = super()._prepare_dataloader(dataloader, shuffle, mode)
        else:
            prepared = self._dealing(dataloader, mode)
        if trains and self._to_resume:
            self._resume(prepared)
        return prepared

    def _dealing(self, dataloader: DataLoader, mode: RunningStage) -> DataLoader:
        """A copy of `dataloader` whose order is dealt to the ranks."""
        ranks: Any = self.trainer.distributed_sampler_kwargs or {}
        batches: Any = dataloader.batch_sampler
        trains = mode == RunningStage.TRAINING
        # A batch sampler of the user's own decides what is in a batch: its batches are dealt, not its samples.
        deals_batches = (
            trains and batches is not None and type(batches) is not BatchSampler and hasattr(batches, "__len__")
        )
        sampler = GlobalOrder(
            batches if deals_batches else _order_of(dataloader),
            seed=self.trainer.strategy.broadcast(global_seed()),
            drop_last=trains and getattr(batches, "drop_last", False),
            **ranks,
        )
        if self.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING) and sampler.num_repeated:
            rank_zero_warn(
                f"Using `DistributedSampler` with the dataloaders: {sampler.num_repeated} sample(s) are evaluated"
                f" twice, so that all {sampler.num_replicas} ranks have as many. Evaluate on one device for exact"
                " figures."
            )
        if trains:
            # Workers ask for the first indices before Lightning says which epoch it is.
            sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        if deals_batches:
            # As `sampler` too, which is not used beside a batch sampler: there Lightning sets the epoch.
            return _changed(dataloader, batch_sampler=sampler, sampler=sampler)
        if batches is None or hasattr(batches, "sampler"):
            return _with_sampler(dataloader, sampler)
        return _update_dataloader(dataloader, sampler, mode=mode)  # says what it needs of such a batch sampler

    def _dealt(self, dataloader: DataLoader, mode: RunningStage) -> bool:
        """Whether the order of `dataloader` is ours to deal.

        Several ranks need it, `shuffle=True` needs a seed, and a run that is resumed needs its place.
        """
        connector = self.trainer._accelerator_connector  # Lightning: holds the use_distributed_sampler flag
        if not connector.use_distributed_sampler or has_iterable_dataset(dataloader) or is_stateful(dataloader):
            return False
        if isinstance(_order_of(dataloader), DistributedSampler):
            return False
        resumes = mode == RunningStage.TRAINING and bool(self._to_resume)
        return connector.is_distributed or isinstance(_order_of(dataloader), RandomSampler) or resumes

    # --- where it is

    def state_dict(self, batches: int) -> dict[str, Any]:
        """Where this rank's training data is after `batches` batches of the epoch, plain values all."""
        fit_loop, world_size = self.trainer.fit_loop, self.trainer.world_size
        epoch = fit_loop.epoch_progress.current.processed
        loaders = [] if fit_loop._combined_loader is None else fit_loop._combined_loader.flattened
        before = iter(self.states_before_fetch or [])
        states: list[dict[str, Any]] = []
        for loader in loaders:
            if is_stateful(loader):
                states.append({"unit": "stateful", "state": next(before, None) or loader.state_dict()})
            elif isinstance(loader, DataLoader) and not has_iterable_dataset(loader) and sized_len(loader) is not None:
                place = self._resumed.get(id(loader)) or Pass(loader, world_size)
                states.append(place.state_dict(epoch, batches))
            else:
                states.append({"unit": None})
        return {"world_size": world_size, "batches": batches, "loaders": states}

    def load_state_dict(self, states: list[dict[str, Any]]) -> bool:
        """Has the loaders that are prepared next go on where those of another run were.

        Args:
            states: `state_dict` of each rank of that run, in their order.

        Returns:
            Whether all of them can.

        Raises:
            ValueError: data without an order, on another number of ranks.
        """
        self._counted = states[0]["batches"]
        kinds = [loader["unit"] for loader in states[0]["loaders"]]
        if "stateful" in kinds:
            if len(states) != self.trainer.world_size:
                raise ValueError(
                    f"The checkpoint has the place in an IterableDataset (or StatefulDataLoader) of {len(states)}"
                    f" rank(s), which {self.trainer.world_size} can't share: resume with {len(states)}, or use a data"
                    " set with a length, or load the weights alone."
                )
            mine = states[self.trainer.global_rank]["loaders"]
            # Lightning: would give every rank what rank 0's loaders said.
            self.trainer.fit_loop._combined_loader_states_to_load = [
                loader["state"] for loader in mine if loader["unit"] == "stateful"
            ]
        self._to_resume = [state["loaders"] for state in states] if kinds else []
        return bool(kinds) and None not in kinds

    def _resume(self, loader: Any) -> None:
        """Takes the next of the states that wait, for a loader that was just prepared."""
        state = self._to_resume[0].pop(0)
        if not self._to_resume[0]:
            self._to_resume = []
        if state["unit"] not in ("samples", "batches"):
            return
        if not isinstance(loader, DataLoader) or order_of(loader) is None:
            raise ValueError(
                "The checkpoint says where in the data the run was, but this run's DataLoader has no order that could"
                " be gone on with: use the one of that run, or load the weights alone."
            )
        place = Pass.resumed(loader, self.trainer.world_size, state)
        self._resumed[id(loader)] = place
        self._count(place.batches)

    def _count(self, batches: int) -> None:
        """Says in the loops' progress how many batches are done, in batches of this run's size."""
        progress = self.trainer.fit_loop.epoch_loop.batch_progress
        shift = batches - self._counted
        for tracker in (progress.current, progress.total):
            for field, value in vars(tracker).items():
                setattr(tracker, field, value + shift)
        self._counted = batches

    def forget_place(self) -> None:
        """Called when an epoch begins that is no longer the resumed one: it has its own number of batches."""
        if not self._resumed:
            return
        self._resumed = {}
        fit_loop = self.trainer.fit_loop
        combined = fit_loop._combined_loader
        assert isinstance(combined, CombinedLoader)
        lengths = [sized_len(loader) for loader in combined.flattened]
        combined.limits = [
            _parse_num_batches(
                RunningStage.TRAINING, float("inf") if n is None else n, self.trainer.limit_train_batches
            )
            for n in lengths
        ]
        whole = sized_len(combined)
        fit_loop.max_batches = float("inf") if whole is None else whole


def _order_of(dataloader: DataLoader) -> Any:
    """The sampler that decides: that of the batch sampler, where there is one of the user's or the loader's own."""
    return getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)


def _with_sampler(dataloader: DataLoader, sampler: GlobalOrder) -> DataLoader:
    """A copy of `dataloader` with another sampler; a subclass keeps whatever its constructor did."""
    if dataloader.batch_sampler is None:
        return _changed(dataloader, sampler=sampler)
    batches: Any = copy.copy(dataloader.batch_sampler)
    batches.sampler = sampler
    return _changed(dataloader, sampler=sampler, batch_sampler=batches)


def _changed(dataloader: DataLoader, **attributes: Any) -> DataLoader:
    changed = copy.copy(dataloader)
    # Not by attribute: DataLoader forbids that once its workers may have been started, which these have not.
    changed.__dict__.update(attributes, _iterator=None)
    return changed
