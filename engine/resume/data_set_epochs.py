"""Epochs that a hook sets on a data set, by `set_epoch` or its attribute `epoch`; a resumed run sets them again.

Workers have copies of a data set. If they have started before a hook sets the epoch, their copies have a different
epoch, which is an error. A stream that does not depend on earlier epochs is restarted instead.
"""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import has_iterable_dataset
from torch.utils.data import DataLoader

from ..data import StateTrackingLoader, digest_of_generators, epoch_of, epoch_setter, set_epoch

__all__ = ["DataSetEpochs", "state_of_data"]


def state_of_data(loader: Any, *, begins: bool) -> dict[str, Any]:
    """Returns the epoch that was set on a loader's data set, and a checksum of its generators, for a checkpoint."""
    if not isinstance(loader, DataLoader):
        return {}
    # A stream that counts epochs itself counts the current one again when it is resumed.
    saved_epoch = (
        loader.data_epoch if isinstance(loader, StateTrackingLoader) and not begins else epoch_of(loader.dataset)
    )
    return {"data_epoch": saved_epoch, "generators": digest_of_generators(loader.dataset)}


class DataSetEpochs:
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
