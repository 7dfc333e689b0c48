"""Prediction: each sample once over all ranks; the predictions are returned on all ranks, in order."""

import itertools
from typing import Any

from .._compat.lightning import _PredictionLoop
from ..data import ends_with_data
from ..strategies import adapt
from .evaluation import tell_limit
from .noise import hide_tree_warnings
from .padding_batch import EvalPadding, beside_fillers, run_padding_batch

__all__ = ["PredictionLoop"]


class PredictionLoop(_PredictionLoop):  # Lightning: Trainer.predict_loop
    """Lightning's prediction loop, but each rank returns the predictions of all ranks, also from worker processes."""

    _padding: EvalPadding | None = None

    @property
    def return_predictions(self) -> bool:
        """Whether the predictions of all ranks are gathered and returned."""
        return self._return_predictions

    @return_predictions.setter
    def return_predictions(self, return_predictions: bool | None = None) -> None:
        if getattr(self.trainer.strategy.launcher, "returns_predictions", False):
            self._return_predictions = return_predictions is not False
        else:
            # Lightning: _PredictionLoop.return_predictions, which checks for its own launchers.
            _PredictionLoop.return_predictions.fset(self, return_predictions)  # type: ignore[attr-defined]

    def setup_data(self) -> None:
        """Creates the loaders."""
        with hide_tree_warnings():
            super().setup_data()
        if self._combined_loader is not None:
            tell_limit(self.trainer, "predict", self.max_batches)

    def reset(self) -> None:
        """Finds out which batches are padding; called before the first batch."""
        super().reset()
        padding = EvalPadding(self._combined_loader.flattened, is_sequential=True)  # type: ignore[union-attr]
        self._padding = padding if padding.may_occur else None

    @ends_with_data
    def _predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        # Lightning: _PredictionLoop._predict_step
        padding = self._padding if dataloader_iter is None else None
        if padding is None or not padding.is_about(batch_idx, dataloader_idx):
            super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        is_padding = padding.is_padding(batch_idx, dataloader_idx)
        with beside_fillers(self.trainer, is_filler=is_padding):
            if is_padding:
                self._run_padding_batch(batch, batch_idx, dataloader_idx)
            else:
                super()._predict_step(batch, batch_idx, dataloader_idx, dataloader_iter)

    def _run_padding_batch(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.batch_progress.increment_ready()
        self.batch_progress.increment_started()
        loader = dataloader_idx if self.num_dataloaders > 1 else None
        run_padding_batch(self, "predict_step", batch, batch_idx, dataloader_idx, loader)
        self.batch_progress.increment_processed()
        self.batch_progress.increment_completed()

    def _on_predict_epoch_end(self) -> Any:
        # Lightning: _PredictionLoop._on_predict_epoch_end, whose hooks write this rank's predictions.
        adapt(self.trainer.strategy).end_evaluation()
        results = super()._on_predict_epoch_end()
        ranks = self.trainer.data_ranks  # type: ignore[attr-defined]
        if not self.return_predictions or ranks.size == 1:
            return results
        predictions = ranks.all_gather_object(self._predictions)
        self._predictions = [_interleaved(outputs_by_rank) for outputs_by_rank in zip(*predictions, strict=True)]
        return self.predictions


def _interleaved(outputs_by_rank: tuple[list[Any], ...]) -> list[Any]:
    """Returns the outputs of one loader's batches in order: the first batch of each rank, then the second, ..."""
    rounds = itertools.zip_longest(*([(output,) for output in outputs] for outputs in outputs_by_rank), fillvalue=())
    return [output for outputs_of_round in rounds for outputs in outputs_of_round for output in outputs]


PredictionLoop.__name__ = _PredictionLoop.__name__  # the name of its entries in a profile
