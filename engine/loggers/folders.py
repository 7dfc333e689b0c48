"""The folders that a run writes to. Each run has its own log folder, even if several runs begin at the same time."""

import os
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

__all__ = ["claim_log_folders", "folders_written_to"]


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
