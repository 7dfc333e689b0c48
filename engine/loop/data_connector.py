"""Keeps the user's order of samples under every strategy, where Lightning shuffles in all distributed training."""

import copy
from typing import Any

from lightning.pytorch.trainer.connectors.data_connector import _DataConnector
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

# Lightning: rebuilds a DataLoader with another sampler and everything else of the user's.
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.data import _update_dataloader, has_iterable_dataset
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from ..data import GlobalOrder
from ..environment import global_seed

__all__ = ["DataConnector"]


class DataConnector(_DataConnector):  # Lightning: Trainer._data_connector
    """Lightning's, with `GlobalOrder` in place of its `DistributedSampler`."""

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        # Lightning: _DataConnector._prepare_dataloader. Prediction keeps Lightning's, which records the indices.
        if not isinstance(dataloader, DataLoader) or mode == RunningStage.PREDICTING or not self._dealt(dataloader):
            return super()._prepare_dataloader(dataloader, shuffle, mode)
        ranks: Any = self.trainer.distributed_sampler_kwargs or {}
        sampler = GlobalOrder(
            _order_of(dataloader),
            seed=self.trainer.strategy.broadcast(global_seed()),
            drop_last=mode == RunningStage.TRAINING and getattr(dataloader.batch_sampler, "drop_last", False),
            **ranks,
        )
        if self.trainer.state.fn in (TrainerFn.VALIDATING, TrainerFn.TESTING) and sampler.num_repeated:
            rank_zero_warn(
                f"Using `DistributedSampler` with the dataloaders: {sampler.num_repeated} sample(s) are evaluated"
                f" twice, so that all {sampler.num_replicas} ranks have as many. Evaluate on one device for exact"
                " figures."
            )
        if dataloader.batch_sampler is None or hasattr(dataloader.batch_sampler, "sampler"):
            return _with_sampler(dataloader, sampler)
        return _update_dataloader(dataloader, sampler, mode=mode)  # says what it needs of such a batch sampler

    def _dealt(self, dataloader: DataLoader) -> bool:
        """Whether the order of `dataloader` is ours to deal: several ranks need it, and `shuffle=True` a seed."""
        connector = self.trainer._accelerator_connector  # Lightning: holds the use_distributed_sampler flag
        if not connector.use_distributed_sampler or has_iterable_dataset(dataloader):
            return False
        if isinstance(_order_of(dataloader), DistributedSampler):
            return False
        return connector.is_distributed or isinstance(_order_of(dataloader), RandomSampler)


def _order_of(dataloader: DataLoader) -> Any:
    """The sampler that decides: that of the batch sampler, where there is one of the user's or the loader's own."""
    return getattr(dataloader.batch_sampler, "sampler", dataloader.sampler)


def _with_sampler(dataloader: DataLoader, sampler: GlobalOrder) -> DataLoader:
    """A copy of `dataloader` with another sampler; a subclass keeps whatever its constructor did."""
    changed = copy.copy(dataloader)
    # Not by attribute: DataLoader forbids that once its workers may have been started, which these have not.
    changed.__dict__.update(sampler=sampler, _iterator=None)
    if dataloader.batch_sampler is not None:
        batches: Any = copy.copy(dataloader.batch_sampler)
        batches.sampler = sampler
        changed.__dict__["batch_sampler"] = batches
    return changed
