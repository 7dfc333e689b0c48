"""Validation, test and prediction: a loop that calls only what the run uses, and takes each sample once."""

import itertools
from operator import attrgetter
from typing import Any

from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from .._compat.lightning import _DataLoaderIterDataFetcher, _EvaluationLoop, _PredictionLoop
from ..data.exhausted import ends_with_data
from ..data.uneven import check_evaluated_side_by_side
from ..strategies.averages import follow_until_first_update
from .hooks import Hooks, Transfer
from .log import attach_log, detach_log
from .padding_batch import EvalPadding, beside_fillers, run_padding_batch
from .runs import allows_empty_data, hide_tree_warnings

__all__ = ["EvaluationLoop", "PredictionLoop"]


def _tell_limit(trainer: Any, data: str | None, num_batches: list[int | float]) -> None:
    """Says on how many batches a whole number for a limit comes, which Lightning has each rank count for itself.

    Args:
        trainer: the trainer.
        data: "val", "test" or "predict".
        num_batches: of each loader.
    """
    name, num_ranks = f"limit_{data}_batches", trainer.data_size
    limit = getattr(trainer, name)
    if num_ranks > 1 and isinstance(limit, int) and limit > 0 and limit in num_batches and not trainer.fast_dev_run:
        rank_zero_info(
            f"{name}={limit} counts batches of each rank: {limit * num_ranks} in all, since {num_ranks} ranks have"
            " different samples. A fraction is the same samples for any number of ranks."
        )


class EvaluationLoop(_EvaluationLoop):  # Lightning: Trainer.validate_loop, .test_loop and epoch_loop.val_loop
    """Lightning's evaluation loop, whose steps call only what the run uses."""

    _flat: "_Evaluation | None" = None
    _padding: EvalPadding | None = None
    """Knows which batches are padding; None if no loader has any."""
    _can_stop_together = False
    """Whether all ranks can stop after the same batch: during training, if they have the same number of batches."""
    loaders_made_in_epoch: int | None = None
    """The epoch in which the resumed run has made its validation loaders; None if unknown, or no longer needed."""
    _seen_before: dict[int, int] = {}  # noqa: RUF012 - replaced, never changed
    rank_loss: Any = None
    """Repeats a validation within training after the loss of a rank; None: a loss ends the run."""

    def run(self) -> list[Any]:
        """Evaluates all data loaders, once."""
        trainer: Any = self.trainer
        follow_until_first_update(trainer)
        with trainer.heartbeat.within(trainer.state.stage.value):
            outputs = self._run()
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            trainer.steering.compare()
        return outputs

    def _run(self) -> list[Any]:
        trainer: Any = self.trainer
        module = trainer.lightning_module
        attaches_log = "log" not in module.__dict__  # otherwise the training loop has attached it, and detaches it
        if attaches_log:
            attach_log(module, trainer._logger_connector)
        try:
            return super().run()
        finally:
            self._flat = trainer._logger_connector.padding = None
            if attaches_log:
                detach_log(module)

    @ends_with_data
    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        # Lightning: _EvaluationLoop._evaluation_step
        trainer: Any = self.trainer
        if self.rank_loss is not None:
            self.rank_loss.check()
        padding = self._padding if dataloader_iter is None else None
        if padding is not None and padding.is_about(batch_idx, dataloader_idx):
            is_padding = padding.is_padding(batch_idx, dataloader_idx)
            with beside_fillers(trainer, is_filler=is_padding):
                (self._run_padding_batch if is_padding else self._run_batch)(batch, batch_idx, dataloader_idx)
            if is_padding:
                self._end_padding_batch(dataloader_idx)
        else:
            self._run_batch(batch, batch_idx, dataloader_idx, dataloader_iter)
        if dataloader_iter is not None:
            return
        progress = self.batch_progress
        if self._can_stop_together:
            trainer._signal_connector.poll(trainer.fit_loop.epoch_loop.batch_progress.total.ready, progress.total.ready)
        if not progress.is_last_batch and trainer.received_sigterm:
            raise SIGTERMException

    def _run_batch(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any = None) -> None:
        if dataloader_iter is not None:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        if self._flat is None:
            self._flat = _Evaluation(self)
        self._flat.step(batch, batch_idx, dataloader_idx)

    def begin_again(self) -> None:
        """Has the next validation make its loaders anew, for the ranks that are left, and count on."""
        self._combined_loader, self._seen_before = None, dict(self._seen_batches_per_dataloader)

    def setup_data(self) -> None:
        """Creates the loaders."""
        is_first = self._combined_loader is None
        with hide_tree_warnings():
            super().setup_data()
        if is_first and self._combined_loader is not None:
            self._seen_batches_per_dataloader.update(self._seen_before)
            self._seen_before = {}
            _tell_limit(self.trainer, self._stage.dataloader_prefix, self._max_batches)
            self._restore_reload_epoch()

    def _restore_reload_epoch(self) -> None:
        """Makes new loaders in the epochs in which the run would have made them without an interruption."""
        trainer, epoch = self.trainer, self.loaders_made_in_epoch
        self.loaders_made_in_epoch = None
        if epoch is not None and trainer.current_epoch - epoch < trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]
            self._last_val_dl_reload_epoch = epoch

    def reset(self) -> None:
        """Finds out which batches are padding; called before the first batch."""
        super().reset()
        combined: Any = self._combined_loader
        padding = EvalPadding(combined.flattened, self._is_sequential)
        self._padding = padding if padding.may_occur else None
        if padding.may_occur and not self._is_sequential:
            check_evaluated_side_by_side(combined)
        connector: Any = self.trainer._logger_connector
        connector.padding = self._padding
        # A user's loader may be empty on some ranks, where Lightning then skips it.
        some_may_skip = allows_empty_data(self.trainer)
        connector.all_ranks_reach_end = padding.are_even or (self.num_dataloaders == 1 and not some_may_skip)
        in_training = self.trainer.state.fn == TrainerFn.FITTING
        self._can_stop_together = in_training and all(isinstance(n, int) for n in self.trainer.num_val_batches)
        if padding.may_occur and padding.have_padding and isinstance(self._data_fetcher, _DataLoaderIterDataFetcher):
            rank_zero_warn(
                f"A `{self._step_name}` with a `dataloader_iter` argument fetches for itself, so that some samples are"
                " evaluated twice where the ranks can't have as many: take a `batch` instead for exact figures."
            )

    @property
    def _step_name(self) -> str:
        return "test_step" if self.trainer.testing else "validation_step"

    def _loader_argument(self, dataloader_idx: int) -> int | None:
        return dataloader_idx if self._is_sequential and self.num_dataloaders > 1 else None

    def _run_padding_batch(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Runs a padding batch, which changes nothing but the progress."""
        self.batch_progress.increment_ready()
        self.batch_progress.increment_started()
        loader = self._loader_argument(dataloader_idx)
        run_padding_batch(self, self._step_name, batch, batch_idx, dataloader_idx, loader)

    def _end_padding_batch(self, dataloader_idx: int) -> None:
        self._results.dataloader_idx = self._loader_argument(dataloader_idx)  # whose results are read next
        self.batch_progress.increment_processed()
        self.batch_progress.increment_completed()
        if not self.trainer.sanity_checking:
            self._has_run = True

    @ends_with_data
    def _store_dataloader_outputs(self) -> None:
        # Lightning: _EvaluationLoop._store_dataloader_outputs, called after all batches of a loader.
        connector: Any = self.trainer._logger_connector
        connector.epoch_end_reached()
        connector.synchronise()
        self.trainer.engine_strategy.end_evaluation()  # type: ignore[attr-defined]
        super()._store_dataloader_outputs()

    def _on_evaluation_epoch_end(self) -> None:
        super()._on_evaluation_epoch_end()
        if self.rank_loss is not None:
            self.rank_loss.commit()  # before values are logged, and hooks act on them: on the end of a validation


EvaluationLoop.__name__ = _EvaluationLoop.__name__  # the name of its entries in a profile


class _Evaluation:
    """The objects and methods that the batches of one evaluation need, looked up once."""

    def __init__(self, loop: _EvaluationLoop) -> None:
        trainer: Any = loop.trainer
        self._loop = loop
        self._trainer = trainer
        self._connector = trainer._logger_connector
        self._hooks = Hooks(trainer)
        self._heartbeat, self._phase = trainer.heartbeat, trainer.heartbeat.phase
        stage = "test" if trainer.testing else "validation"
        self._step_name = f"{stage}_step"
        self._step_of = attrgetter(self._step_name)
        self._on_start, self._on_end = f"on_{stage}_batch_start", f"on_{stage}_batch_end"
        self._transfer = Transfer(trainer)
        self._step_of_module: Any = None
        self._passes_dataloader_idx = loop._is_sequential and loop.num_dataloaders > 1

    def step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        """Evaluates one batch."""
        trainer, loop, hooks, connector = self._trainer, self._loop, self._hooks, self._connector
        if not self._transfer.is_current():
            self._transfer = Transfer(trainer)
        progress = loop.batch_progress
        self._heartbeat.phase = self._phase
        batch = self._transfer(batch, dataloader_idx)
        loader = (dataloader_idx,) if self._passes_dataloader_idx else ()
        progress.increment_ready()
        connector.begin_batch(loop._results, batch, *loader)
        hooks.call(self._on_start, batch, batch_idx, *loader)
        progress.increment_started()
        if (step := self._step_of(hooks.module)) != self._step_of_module:
            self._step_of_module = step
            self._has_idx = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        arguments = (batch, batch_idx, *loader) if self._has_idx else (batch, *loader)
        output = call._call_strategy_hook(trainer, self._step_name, *arguments)
        progress.increment_processed()
        hooks.call(self._on_end, output, batch, batch_idx, *loader)
        connector.end_batch()
        progress.increment_completed()
        if not trainer.sanity_checking:
            loop._has_run = True
            seen = loop._seen_batches_per_dataloader
            connector.log_metrics(connector.metrics["log"], step=seen[dataloader_idx])
            seen[dataloader_idx] += 1
        if not progress.is_last_batch:
            self._heartbeat.phase = "fetch"


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
            _tell_limit(self.trainer, "predict", self.max_batches)

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
        self.trainer.engine_strategy.end_evaluation()  # type: ignore[attr-defined]
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
