"""Lightning's fit loop, which takes a run that trains nothing for a success; here it is an error that says so."""

from typing import Any

from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.exceptions import MisconfigurationException

# Lightning: what stands for an optimizer where the module has none.
# Lightning: Trainer.fit_loop.
from .._compat.lightning import _FitLoop, _MockOptimizer
from ..data import starts_iterator
from .noise import making_loaders
from .requests import why_empty

__all__ = ["FitLoop", "NothingTrainedError"]


class NothingTrainedError(ValueError, MisconfigurationException):
    """There was no batch, or no loss; both ours and Lightning's kind of error."""


class FitLoop(_FitLoop):
    """Lightning's, without silent ends.

    Empty data are an error when they are first read. `training_step` may return None, which skips a batch; where it has
    returned nothing else through an epoch, that is a warning, and an error when the run or the next epoch ends, too.
    """

    begins_elsewhere = False
    """Whether a checkpoint was opened, in whose place the next data are to begin."""
    loaders_of_epoch: int | None = None
    """The epoch in which the run that is resumed made its loaders; None if it is not known, or no longer needed."""
    resumes_between_epochs = False
    """Whether the run that is resumed had done nothing of the epoch that this one begins with."""
    begins_with_new_loaders = False
    """Whether the run that is resumed made, or would have made, loaders in the epoch that this one begins with."""
    is_cut_short = False
    """Whether the latest epoch ended, by `max_steps` or `should_stop`, before its data did."""
    _num_lossless_epochs = 0

    def on_run_start(self) -> None:
        """Called before the first epoch."""
        optimization: Any = self.epoch_loop.automatic_optimization
        self._num_lossless_epochs, optimization.has_loss, optimization.num_skipped = 0, False, 0
        self.trainer.add_run_summary()  # type: ignore[attr-defined]
        super().on_run_start()

    def setup_data(self) -> None:
        """Makes the training loader and its iterator."""
        if self.begins_elsewhere:
            # Lightning: Trainer.estimated_stepping_batches, asked for in `configure_optimizers`, has prepared the
            # loaders already, at the start of their order.
            self._combined_loader, self.begins_elsewhere = None, False
        is_first = self._combined_loader is None
        self.trainer._data_connector.begin_training_loaders()  # type: ignore[attr-defined]
        with making_loaders():
            super().setup_data()
        trainer: Any = self.trainer
        if is_first:
            self._count_from_loaders_of_resumed()
        if not is_first or self.max_batches != 0 or trainer.limit_train_batches == 0 or self._may_be_empty():
            return
        if trainer.state.status != TrainerStatus.RUNNING:  # called by hand; Lightning has warned
            return
        loaders = self._combined_loader.flattened if self._combined_loader is not None else []
        reasons = [reason for loader in loaders if (reason := why_empty(loader, trainer.world_size))]
        raise NothingTrainedError(f"fit has nothing to train on: {reasons[0] if reasons else _no_batches(loaders)}.")

    @property
    def needs_new_loaders(self) -> bool:
        """Whether the run that is resumed would have made loaders in the present epoch, by its flag for that."""
        trainer: Any = self.trainer
        every = trainer.reload_dataloaders_every_n_epochs
        return self.loaders_of_epoch is not None and 0 < every <= trainer.current_epoch - self.loaders_of_epoch

    def _count_from_loaders_of_resumed(self) -> None:
        """Has loaders made anew in the epochs in which the run that is resumed would have made them."""
        epoch = self.loaders_of_epoch
        # Within an epoch both iterators were made before what is resumed.
        is_new = self.needs_new_loaders or epoch == self.trainer.current_epoch
        self.begins_with_new_loaders = self.resumes_between_epochs and is_new
        if epoch is not None and not self.needs_new_loaders:
            self._last_train_dl_reload_epoch = epoch
        self.loaders_of_epoch = None

    def _load_combined_loader_states(self) -> None:
        # Lightning: _FitLoop._load_combined_loader_states, called right before the first iterator is made.
        super()._load_combined_loader_states()
        self.trainer._data_connector.places.watch(self._combined_loader)  # type: ignore[attr-defined]

    def on_save_checkpoint(self) -> dict[str, Any]:
        """Returns Lightning's state of the loop; a loader that has not begun, or is through, is not begun for it."""
        loaders = self._combined_loader
        if loaders is not None and any(map(starts_iterator, loaders.flattened)):
            self._combined_loader = None
        try:
            return super().on_save_checkpoint()
        finally:
            self._combined_loader = loaders

    def _may_be_empty(self) -> bool:
        owners = (self.trainer.lightning_module, self.trainer.datamodule)  # type: ignore[attr-defined]
        return any(getattr(owner, "allow_zero_length_dataloader_with_multiple_devices", False) for owner in owners)

    def advance(self) -> None:
        """One epoch."""
        super().advance()
        progress: Any = self.epoch_loop.batch_progress
        trainer: Any = self.trainer
        has_more = progress.current.ready < self.max_batches and not progress.is_last_batch
        self.is_cut_short = has_more and self._data_fetcher is not None and not self._data_fetcher.done
        if progress.total.ready == 0 and self._data_fetcher is not None and self._data_fetcher.done:
            if not self._may_be_empty() and not trainer.should_stop:
                raise NothingTrainedError(
                    f"fit has nothing to train on: {_no_batches(self._combined_loader.flattened)}."  # type: ignore[union-attr]
                )
        elif not trainer.lightning_module.automatic_optimization:
            return
        elif not all(isinstance(optimizer, _MockOptimizer) for optimizer in trainer.optimizers):
            self._look_for_losses()

    def on_advance_end(self) -> None:
        """The end of an epoch."""
        if self.is_cut_short:  # a longer run goes on in it, and calls these hooks once more
            self.trainer._checkpoint_connector.logs.hold()  # type: ignore[attr-defined]
        super().on_advance_end()

    def _look_for_losses(self) -> None:
        optimization: Any = self.epoch_loop.automatic_optimization
        trainer: Any = self.trainer
        # One that is resumed may have had its losses before; one or two batches are a try.
        if optimization.has_loss or optimization.num_skipped <= 2 or trainer.ckpt_path is not None:
            return
        self._num_lossless_epochs += 1
        message = f"`training_step` of {type(trainer.lightning_module).__name__} returned None for each of the"
        message += f" {optimization.num_skipped} batches so far: nothing was trained. Return the loss"
        if self._num_lossless_epochs > 1 or self._is_last_epoch():
            raise NothingTrainedError(f"{message}; or optimize by hand (automatic_optimization = False).")
        rank_zero_warn(f"{message}; if the next epoch has no loss either, the run ends with an error.")

    def _is_last_epoch(self) -> bool:
        trainer: Any = self.trainer
        is_last = self.max_epochs not in (None, -1) and self.epoch_progress.current.ready >= self.max_epochs
        has_stepped_enough = self.max_steps != -1 and self.epoch_loop.global_step >= self.max_steps
        return is_last or has_stepped_enough or trainer.should_stop


FitLoop.__name__ = _FitLoop.__name__  # by which a profile names its entries


def _no_batches(loaders: Any) -> str:
    names = ", ".join(type(getattr(loader, "dataset", loader)).__name__ for loader in loaders)
    return f"the training data ({names or 'no loader'}) yielded no batch"
