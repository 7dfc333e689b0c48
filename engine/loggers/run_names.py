"""Distinguishes runs in tools that compare them, by the name of the log's folder and the hyperparameters in it.

The settings of the run (`run_parameters`) are logged beside the values that the module and the data module have saved:
always by the default logger, and by the user's loggers if Lightning logs such values. ``hparams.yaml`` (the only file
of a `CSVLogger` for them) and checkpoints, from which modules are rebuilt, have only the module's values.
"""

import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

# Lightning: Trainer._run calls the global `_log_hyperparams` of this module.
from lightning.pytorch.trainer import trainer as trainer_module
from lightning.pytorch.utilities import rank_zero_only

# Lightning: how its own loggers bring hyperparameters of any kind into flat dicts.
from .._compat.lightning import _convert_params, _flatten_dict
from ..run_info import run_parameters

__all__ = ["claim_log_folders", "folders_written_to", "logging_run_parameters", "use_run_logger"]


class _RunLogger(TensorBoardLogger):
    """The default logger: Lightning's, with hyperparameters but without the placeholder metric ``hp_metric`` of -1."""

    def __init__(self, save_dir: Any, version: int | str | None = None) -> None:
        super().__init__(save_dir, version=version, default_hp_metric=False)
        self.chosen_version = version
        """The version that Lightning has chosen and a resumed run may change; None: the next free number."""

    @rank_zero_only
    def log_hyperparams(
        self, params: dict[str, Any] | Namespace, metrics: dict[str, Any] | None = None, step: int | None = None
    ) -> None:
        """Writes hyperparameters for TensorBoard. Without `metrics`, it uses all scalars of the run as metrics."""
        super().log_hyperparams(params, metrics, step)
        if metrics:
            return
        from torch.utils.tensorboard.summary import hparams

        # Lightning: it writes no hyperparameters without a metric. The first of these three summaries applies to all
        # runs in a folder, and would hide the metrics of the others; the third says that the run has ended without an
        # error.
        flat = self._sanitize_params(_flatten_dict(_convert_params(params)))
        _, start, _ = hparams(flat, {})
        self.experiment._get_file_writer().add_summary(start, step)  # torch: SummaryWriter.add_hparams calls it


def use_run_logger(trainer: Any) -> None:
    """Replaces Lightning's default logger by a `_RunLogger`, if `trainer`, which has not run yet, has it."""
    (default,) = trainer.loggers if len(trainer.loggers) == 1 else [None]
    if type(default) is not TensorBoardLogger:  # fast_dev_run: none that writes
        return
    # Lightning: TensorBoardLogger._version is the number of a SLURM job, or None for the next free number.
    trainer.loggers = [_RunLogger(default.save_dir, default._version)]


@contextmanager
def logging_run_parameters() -> Iterator[None]:
    """In this context, engines log their settings together with the hyperparameters that Lightning logs."""
    # Lightning: lightning.pytorch.trainer.trainer._log_hyperparams
    lightnings = trainer_module._log_hyperparams

    def log_hyperparams(trainer: Any) -> None:
        if hasattr(trainer, "heartbeat"):
            trainer._checkpoint_connector.logs.take_back_unless_over()
        if not trainer.loggers or not hasattr(trainer, "heartbeat") or not trainer.is_global_zero:
            lightnings(trainer)
            return
        parameters = run_parameters(trainer)
        sources = [trainer.lightning_module, trainer.datamodule]
        # Lightning: LightningModule._log_hyperparams is whether there are some to log.
        has_some = any(source is not None and source._log_hyperparams for source in sources)
        with ExitStack() as stack:
            stack.enter_context(trainer._checkpoint_connector.logs.logging_parameters())
            for logger in trainer.loggers:
                if isinstance(logger, TensorBoardLogger) and (has_some or isinstance(logger, _RunLogger)):
                    stack.enter_context(_adding(logger, parameters))
                    if not has_some:
                        logger.log_hyperparams({})
                elif has_some and not isinstance(logger, (CSVLogger, TensorBoardLogger)):
                    logger.log_hyperparams(parameters)
            lightnings(trainer)

    trainer_module._log_hyperparams = log_hyperparams
    try:
        yield
    finally:
        trainer_module._log_hyperparams = lightnings


@contextmanager
def _adding(logger: TensorBoardLogger, parameters: dict[str, Any]) -> Iterator[None]:
    """Adds `parameters` to those that `logger` logs: TensorBoard shows only hyperparameters that are written together.

    The user's value has precedence.
    """
    log: Any = logger.log_hyperparams

    def log_both(params: Any, *args: Any, **kwargs: Any) -> None:
        log({**parameters, **params}, *args, **kwargs)
        for name in parameters.keys() - params.keys():
            logger.hparams.pop(name, None)  # Lightning: the values that it writes into hparams.yaml

    logger.log_hyperparams = log_both  # type: ignore[method-assign]
    try:
        yield
    finally:
        del logger.log_hyperparams


# --- the folders that a run writes to. Each run has its own log folder, even if several runs begin at the same time


def folders_written_to(trainer: Trainer) -> dict[str, str]:
    """The folders of the logs and checkpoints of `trainer`, each with the argument that sets it."""
    root, folders = f"default_root_dir={trainer.default_root_dir!r}", {}
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return {}
    for logger in trainer.loggers:
        if logger.save_dir is not None:
            name = type(logger).__name__
            is_default = str(logger.save_dir) == trainer.default_root_dir
            folders[str(logger.save_dir)] = root if is_default else f"{name}(save_dir={str(logger.save_dir)!r})"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        name = type(callback).__name__
        if hasattr(callback, "notes_folder") and not trainer.loggers:
            folders.setdefault(str(trainer.default_root_dir), root)
        if not isinstance(callback, ModelCheckpoint) and not hasattr(callback, "snapshot_folder"):
            continue
        dirpath = getattr(callback, "dirpath", None)
        folder = str(dirpath or trainer.default_root_dir)
        # Without a path, checkpoints are saved with the first logger's files.
        if dirpath is not None or not trainer.loggers or not isinstance(callback, ModelCheckpoint):
            folders.setdefault(folder, f"{name}(dirpath={str(dirpath)!r})" if dirpath is not None else root)
    return folders


def claim_log_folders(loggers: Iterable[Any]) -> None:
    """Creates the next free folder ``version_N`` for each logger that would choose its version itself, and sets it.

    Lightning looks for the first number without a folder, and creates the folder when something is logged: two runs
    that begin at the same time take the same number. Worker processes get the number from the process that starts
    them, so all have one `log_dir`.
    """
    for logger in loggers:
        # Lightning: _version is None until the number is first read.
        if not isinstance(logger, (CSVLogger, TensorBoardLogger)) or logger._version is not None:
            continue
        while True:
            folder = str(logger.log_dir)
            if "://" in folder:
                break
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            try:
                os.mkdir(folder)
                break
            except FileExistsError:  # another run was faster
                logger._version = None
