"""Checks the arguments of `fit`, `validate`, `test` and `predict` before any process starts.

The messages begin like Lightning's, and end with the remedy.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

# Lightning: its launcher that runs the script in each other rank; the base of the engine's.
from .._compat.lightning import _SubprocessScriptLauncher
from .._compat.torch import OptimizedModule
from ..data import check_made_for, check_script_makes_none
from ..errors import NoModuleError, RefusedError
from ..strategies import adapt
from .noise import hide_tree_warnings

__all__ = ["check_request", "why_empty"]

_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}
_LIMITS = {"fit": "limit_train_batches", "validate": "limit_val_batches", "test": "limit_test_batches"}
_RETURNS = {
    "fit": "the loss",
    "validate": "nothing, and logs by `self.log`",
    "test": "nothing, and logs by `self.log`",
}


def check_request(trainer: Trainer, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the arguments of one of Trainer's four methods.

    Raises:
        NoModuleError: the model is no `LightningModule`.
        RefusedError: the model lacks the step, or the data is missing, is empty, or was made for other ranks.
    """
    arguments = inspect.signature(method).bind(trainer, *args, **kwargs).arguments
    command = method.__name__
    model, datamodule = arguments.get("model"), arguments.get("datamodule")
    loaders = arguments.get("train_dataloaders" if command == "fit" else "dataloaders")
    if isinstance(loaders, LightningDataModule):
        loaders, datamodule = None, loaders
    if command != "fit" and model is None:
        model = trainer.lightning_module
    _check_model(command, model)
    _check_streams(trainer, loaders, datamodule)
    if command not in _STEPS or not isinstance(model, LightningModule):
        return
    if not is_overridden(_STEPS[command], model):
        run = "" if command == "fit" else f" to run `Trainer.{command}`"
        raise RefusedError(
            f"No `{_STEPS[command]}()` method defined{run} in {type(model).__name__}: add one that takes a batch and"
            f" its index, and returns {_RETURNS[command]}."
        )
    if getattr(trainer, _LIMITS[command]) != 0:
        _check_data(command, model, loaders, datamodule)


def _check_model(command: str, model: Any) -> None:
    if isinstance(model, (LightningModule, OptimizedModule)) or (model is None and command != "fit"):
        return  # Lightning raises its error that no earlier run had a model
    others = [cls for cls in type(model).__mro__ if cls.__name__ == "LightningModule"]
    hint = f"; {command} needs one"
    if others:
        hint = f" of another package, {others[0].__module__}: import it from lightning.pytorch"
    name = "None" if model is None else type(model).__name__
    raise NoModuleError(f"`model` must be a `LightningModule`, got `{name}`{hint}.")


def _check_streams(trainer: Any, loaders: Any, datamodule: LightningDataModule | None) -> None:
    environment = adapt(trainer.strategy).cluster_environment
    if environment is None or environment.creates_processes_externally:
        return  # each rank checks its loaders itself
    with hide_tree_warnings():
        combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    attributes = vars(datamodule).values() if isinstance(datamodule, LightningDataModule) else ()
    if isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        check_script_makes_none(trainer.num_nodes * trainer.num_devices)
    check_made_for([*combined.flattened, *attributes], trainer.data_size)


def _check_data(command: str, model: LightningModule, loaders: Any, datamodule: LightningDataModule | None) -> None:
    hook, name = _LOADERS[command], type(model).__name__
    if loaders is None:
        source: Any = model if datamodule is None else datamodule
        is_known = isinstance(source, (LightningModule, LightningDataModule)) and callable(getattr(source, hook))
        if is_known and not is_overridden(hook, source):  # otherwise Lightning raises an error about it
            raise RefusedError(
                f"{command} has no data: `{hook}` must be implemented in {type(source).__name__}, or pass a DataLoader:"
                f" engine.{command}({name[:1].lower() + name[1:]}, loader)."
            )
    elif command == "fit" and isinstance(loaders, DataLoader) and (reason := why_empty(loaders)):
        raise RefusedError(f"fit has nothing to train on: {reason}.")


def why_empty(loader: Any, num_ranks: int = 1) -> str | None:
    """Returns why a DataLoader has no batch, with its sizes; None if it has batches, or that is unknown."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        num_batches, num_samples = len(loader), len(loader.dataset)  # type: ignore[arg-type]
    except Exception:  # the user's `__len__` may be missing, or may need a process group
        return None
    if num_batches > 0:
        return None
    kind = type(loader.dataset).__name__
    if num_samples == 0:
        return f"the data set, {kind}, has 0 samples"
    batch_size = getattr(loader.batch_sampler, "batch_size", None) or loader.batch_size
    if getattr(loader.batch_sampler, "drop_last", False):
        ranks = f" over {num_ranks} ranks" if num_ranks > 1 else ""
        return (
            f"the {num_samples} samples of {kind}{ranks} fill no batch of {batch_size}, and drop_last=True leaves out"
            " incomplete batches"
        )
    return f"the sampler of the DataLoader gives none of the {num_samples} samples of {kind}"
