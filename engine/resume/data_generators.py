"""States of the random generators that training data sets have as attributes, if their loaders have no workers.

The generators of workers, and of streams that are fetched ahead, are saved with the states of the loaders.
"""

from typing import Any

from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from ..data import OwnGenerators, set_own_states

__all__ = ["DataDraws"]


class DataDraws:
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

    def states(self) -> list[dict[str, Any]]:
        """Returns, for each loader, the states of the generators of its data set, by name."""
        loop = self.trainer.fit_loop.epoch_loop
        between_epochs = self.trainer._checkpoint_connector._between_epochs
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
