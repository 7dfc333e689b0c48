"""The fit loop: Lightning's, but a run that trains on nothing is an error; Lightning counts it as a success."""

from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Lightning: the optimizer of a module that has none.
# Lightning: Trainer.fit_loop.
from .._compat.lightning import _FitLoop, _MockOptimizer
from ..data.epoch_position import tell_batch_sampler
from ..data.exhausted import ends_with_data
from ..data.stateful import starts_iterator
from ..data.workers import end_workers
from ..strategies.averages import follow_until_first_update, resume_schedules
from ..strategies.sync_batchnorm import tell_own_statistics
from .runs import allows_empty_data, hide_tree_warnings, why_empty

__all__ = ["FitLoop", "NothingTrainedError"]


class NothingTrainedError(ValueError, MisconfigurationException):
    """The run has had no batch, or no loss; also an error of Lightning's type."""


class FitLoop(_FitLoop):
    """Lightning's fit loop, which raises an error if nothing is trained.

    Empty data is an error when it is first read. `training_step` may return None, which skips a batch. If it has only
    returned None so far, the first epoch ends with a warning, and the second or the last epoch with an error.
    """

    has_restored_position = False
    """Whether a checkpoint was opened; if so, the next loaders begin at its position."""
    loaders_made_in_epoch: int | None = None
    """The epoch in which the resumed run has made its loaders; None if unknown, or no longer needed."""
    resumes_between_epochs = False
    """Whether the resumed run was saved before the first batch of the epoch that this run begins with."""
    begins_with_new_loaders = False
    """Whether the uninterrupted run makes new loaders in the epoch that this run begins with."""
    is_cut_short = False
    """Whether the latest epoch ended, by `max_steps` or `should_stop`, before its data did."""
    _num_lossless_epochs = 0
    _has_warned_of_steps = False

    def run(self) -> None:
        """Runs all epochs."""
        steering: Any = self.trainer.steering  # type: ignore[attr-defined]
        steering.begin_run()
        try:
            super().run()
        finally:
            steering.end_run()
            self.epoch_loop.own_state.close()  # type: ignore[attr-defined]
            self.epoch_loop.garbage.end_run()  # type: ignore[attr-defined]

    def on_run_start(self) -> None:
        """Resets the counts of losses; called before the first epoch."""
        optimization: Any = self.epoch_loop.automatic_optimization
        self._num_lossless_epochs, optimization.has_loss, optimization.num_skipped = 0, False, 0
        self.epoch_loop.own_state.begin_run()  # type: ignore[attr-defined]
        self.trainer.add_run_callbacks()  # type: ignore[attr-defined]
        super().on_run_start()
        tell_own_statistics(self.trainer)
        self.trainer.steering.compare()  # type: ignore[attr-defined]

    def on_run_end(self) -> None:
        """Called after the last epoch: the hooks at the end of training, of which the strategy's may name a cause."""
        self.trainer._signal_connector.end_training()  # type: ignore[attr-defined]
        follow_until_first_update(self.trainer)
        super().on_run_end()
        self.epoch_loop.first_steps.end_run()  # type: ignore[attr-defined]

    def setup_data(self) -> None:
        """Creates the training loaders and their iterator."""
        if self.has_restored_position:
            # Lightning: Trainer.estimated_stepping_batches, if `configure_optimizers` reads it, has already prepared
            # the loaders, at the start of their order.
            self._combined_loader, self.has_restored_position = None, False
        is_first = self._combined_loader is None
        former = [] if self._combined_loader is None else self._combined_loader.flattened
        self.trainer._data_connector.begin_training_loaders()  # type: ignore[attr-defined]
        with hide_tree_warnings():
            super().setup_data()
        trainer: Any = self.trainer
        if is_first:
            self._restore_reload_epoch()
            is_empty = self.max_batches == 0 and trainer.limit_train_batches != 0
            # Outside of a run the user has called it, and Lightning has warned.
            if is_empty and trainer.state.status == TrainerStatus.RUNNING and not allows_empty_data(trainer):
                raise self._nothing_to_train_on()
        elif self._combined_loader is not None:
            end_workers(former, kept=self._combined_loader.flattened)
            for loader in self._combined_loader.flattened:  # Lightning sets the epoch of all other samplers next
                tell_batch_sampler(loader, trainer._data_connector.data_position.epoch)

    def _nothing_to_train_on(self) -> NothingTrainedError:
        loaders = self._combined_loader.flattened if self._combined_loader is not None else []
        names = ", ".join(type(getattr(loader, "dataset", loader)).__name__ for loader in loaders)
        reasons = [reason for loader in loaders if (reason := why_empty(loader, self.trainer.world_size))]
        reason = next(iter(reasons), f"the training data ({names or 'no loader'}) yielded no batch")
        return NothingTrainedError(f"fit has nothing to train on: {reason}.")

    @property
    def needs_new_loaders(self) -> bool:
        """Whether the run, uninterrupted, makes new loaders in this epoch (`reload_dataloaders_every_n_epochs`)."""
        trainer: Any = self.trainer
        interval = trainer.reload_dataloaders_every_n_epochs
        return (
            self.loaders_made_in_epoch is not None
            and 0 < interval <= trainer.current_epoch - self.loaders_made_in_epoch
        )

    def _restore_reload_epoch(self) -> None:
        """Makes new loaders in the epochs in which the run would have made them without an interruption."""
        epoch = self.loaders_made_in_epoch
        # In mid-epoch, the resumed run had made both iterators before it was saved.
        is_new = self.needs_new_loaders or epoch == self.trainer.current_epoch
        self.begins_with_new_loaders = self.resumes_between_epochs and is_new
        if epoch is not None and not self.needs_new_loaders:
            self._last_train_dl_reload_epoch = epoch
        self.loaders_made_in_epoch = None

    def _load_combined_loader_states(self) -> None:
        # Lightning: _FitLoop._load_combined_loader_states, called right before the first iterator is made.
        super()._load_combined_loader_states()
        self.trainer._data_connector.data_position.watch(self._combined_loader)  # type: ignore[attr-defined]

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Returns Lightning's state of the loop, without creating a loader's iterator for it."""
        loaders = self._combined_loader
        if loaders is not None and any(map(starts_iterator, loaders.flattened)):
            self._combined_loader = None
        try:
            return super().on_save_checkpoint()
        finally:
            self._combined_loader = loaders

    def teardown(self) -> None:
        """Ends the loop. If the loaders' iterators could not be created, Lightning's code must not hide that error."""
        fetcher: Any = self._data_fetcher
        if fetcher is not None and fetcher._combined_loader is not None and fetcher._combined_loader._iterator is None:
            self._data_fetcher = None  # Lightning: _DataFetcher.teardown asks for the length, which needs an iterator
        super().teardown()

    @ends_with_data
    def on_advance_start(self) -> None:
        """Begins an epoch."""
        super().on_advance_start()
        if self.restarted_mid_epoch:  # Lightning: calls no `on_train_epoch_start` then
            resume_schedules(self.trainer)
        self.trainer.steering.compare()  # type: ignore[attr-defined]

    @ends_with_data
    def advance(self) -> None:
        """Runs one epoch."""
        super().advance()
        progress: Any = self.epoch_loop.batch_progress
        trainer: Any = self.trainer
        has_more = progress.current.ready < self.max_batches and not progress.is_last_batch
        self.is_cut_short = has_more and self._data_fetcher is not None and not self._data_fetcher.done
        if progress.total.ready == 0 and self._data_fetcher is not None and self._data_fetcher.done:
            if not allows_empty_data(trainer) and not trainer.should_stop:
                raise self._nothing_to_train_on()
        elif not trainer.lightning_module.automatic_optimization:
            self._check_steps()
        elif not all(isinstance(optimizer, _MockOptimizer) for optimizer in trainer.optimizers):
            self._check_losses()

    @ends_with_data
    def on_advance_end(self) -> None:
        """Ends an epoch."""
        if self.is_cut_short:  # a longer run continues in it, and calls the hooks again
            self.trainer._checkpoint_connector.logs.hold()  # type: ignore[attr-defined]
        super().on_advance_end()
        self.trainer.steering.compare()  # type: ignore[attr-defined]

    def _check_losses(self) -> None:
        optimization: Any = self.epoch_loop.automatic_optimization
        trainer: Any = self.trainer
        # A resumed run may have had losses before; one or two batches are too few to judge.
        if optimization.has_loss or optimization.num_skipped <= 2 or trainer.ckpt_path is not None:
            return
        self._num_lossless_epochs += 1
        message = f"`training_step` of {type(trainer.lightning_module).__name__} returned None for each of the"
        message += f" {optimization.num_skipped} batches so far: nothing was trained. Return the loss"
        if self._num_lossless_epochs > 1 or self._is_last_epoch():
            raise NothingTrainedError(f"{message}; or use manual optimization (automatic_optimization = False).")
        rank_zero_warn(f"{message}; if the next epoch has no loss either, the run ends with an error.")

    def _check_steps(self) -> None:
        """Warns once if manual optimization has made no step that counts, as one of an optimizer of the user's own."""
        num_batches, module = self.epoch_loop.batch_progress.total.ready, self.trainer.lightning_module
        if self._has_warned_of_steps or self.epoch_loop.global_step or num_batches <= 2:
            return
        self._has_warned_of_steps = True
        rank_zero_warn(
            f"{type(module).__name__} has made no step of an optimizer in its first {num_batches} batches: global_step"
            " is 0, so that max_steps is never reached and nothing is saved by steps. Return the optimizers from"
            " `configure_optimizers`, and take those that step from `self.optimizers()`."
        )

    def _is_last_epoch(self) -> bool:
        trainer: Any = self.trainer
        is_last = self.max_epochs not in (None, -1) and self.epoch_progress.current.ready >= self.max_epochs
        has_stepped_enough = self.max_steps != -1 and self.epoch_loop.global_step >= self.max_steps
        return is_last or has_stepped_enough or trainer.should_stop


FitLoop.__name__ = _FitLoop.__name__  # the name of its entries in a profile
