"""Around `fit`, `validate`, `test`, `predict`: arguments are checked, errors printed once, noise is left out."""

import functools
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any, TypeVar, cast

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, WeightAveraging

# Lightning: Trainer._run makes these checks only after it has created the run's folders.
from lightning.pytorch.trainer import configuration_validator
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

# Lightning: its launcher that runs the script in each other rank; the base of the engine's.
# Lightning: the launchers of worker processes; the parent's objects do not change.
from .._compat.lightning import _MultiProcessingLauncher, _SubprocessScriptLauncher
from .._compat.torch import OptimizedModule
from ..data.streams import check_made_for, check_script_makes_none
from ..errors import NoModuleError, RefusedError, refusing
from ..reliability.signals import INTERRUPTED
from ..reliability.tracebacks import Failure, failure_of, forget_failures, on_uncaught

__all__ = [
    "allow_nonempty_folder",
    "allows_empty_data",
    "check_callbacks",
    "check_manual_optimization",
    "checked",
    "hide_tree_warnings",
    "log_later_error",
    "quiet",
    "reports_uncaught",
    "why_empty",
]

log = logging.getLogger("polyphase.engine")

_MethodT = TypeVar("_MethodT", bound=Callable[..., Any])


def checked(method: _MethodT) -> _MethodT:
    """Decorates one of Trainer's four methods: checks its arguments before any process starts."""

    @functools.wraps(method)
    def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        with refusing():
            _check_request(self, method, args, kwargs)
        # Looked up at each call: tools such as mlflow.pytorch.autolog() replace the method.
        return getattr(Trainer, method.__name__)(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def log_later_error(error: Exception) -> None:
    """Logs an error that was raised while a run ended after another one. A warning may be an error itself."""
    log.warning("While the run ended after an error, another one was raised: %r", error)


def _first_error_counts(trainer: Trainer, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except BaseException as exception:
        # Their `on_exception` is not called if that of another callback has raised an error.
        for unlock in [getattr(callback, "unlock", None) for callback in getattr(trainer, "callbacks", ())]:
            if unlock is not None:
                unlock()
        first = getattr(trainer, "_ended_by", None)
        if not isinstance(first, Exception) or not isinstance(exception, Exception) or not _follows(exception, first):
            raise
        log_later_error(exception)
        raise first from first.__cause__


def _follows(exception: BaseException, first: BaseException) -> bool:
    """Whether `exception` was raised while `first` was handled, but not because of it."""
    seen = exception
    while seen.__context__ is not None and seen.__cause__ is None:
        seen = seen.__context__
        if seen is first:
            return True
    return False


def reports_uncaught(method: _MethodT) -> _MethodT:
    """Decorates a function that runs an engine: an uncaught exception is printed short, and Ctrl-C exits with 130.

    An error while the run ends, such as a logger's on a full disk, does not replace the one that has ended the run.
    """

    @functools.wraps(method)
    def run(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        forget_failures()
        try:
            return _first_error_counts(self, lambda: method(self, *args, **kwargs))
        except SystemExit as ended:
            # Lightning: _call_and_handle_interrupt exits with 1 after Ctrl-C.
            if isinstance(ended.__context__, KeyboardInterrupt):
                ended.code = INTERRUPTED
            raise
        except SIGTERMException:
            raise
        except BaseException as exception:
            failure = failure_of(exception)
            if failure is not None and failure.is_interrupt:  # of another rank: Ctrl-C reaches all ranks
                raise SystemExit(INTERRUPTED) from exception
            on_uncaught(exception, Failure())
            raise

    return run  # type: ignore[return-value]


# Checks the arguments of `fit`, `validate`, `test` and `predict` before any process starts.
#
# The messages begin like Lightning's, and end with the remedy.

_STEPS = {"fit": "training_step", "validate": "validation_step", "test": "test_step"}
_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}
_LIMITS = {"fit": "limit_train_batches", "validate": "limit_val_batches", "test": "limit_test_batches"}
_RETURNS = {
    "fit": "the loss",
    "validate": "nothing, and logs by `self.log`",
    "test": "nothing, and logs by `self.log`",
}


def _check_request(
    trainer: Trainer, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
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
    environment = trainer.engine_strategy.cluster_environment
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


def allows_empty_data(trainer: Any) -> bool:
    """Whether the module or the data module says that a loader may be empty, on some ranks or on all."""
    owners = (trainer.lightning_module, trainer.datamodule)
    return any(getattr(owner, "allow_zero_length_dataloader_with_multiple_devices", False) for owner in owners)


# Lightning: lightning.pytorch.trainer.configuration_validator.__verify_manual_optimization_support
_verify_manual_optimization = getattr(configuration_validator, "__verify_manual_optimization_support")


def check_manual_optimization(trainer: Trainer, module: LightningModule) -> None:
    """Checks, before the run creates any folder, that no flag conflicts with manual optimization.

    Raises:
        MisconfigurationException: Lightning's error about gradient clipping or accumulation.
    """
    _verify_manual_optimization(trainer, module)


def check_callbacks(callbacks: Iterable[Callback], *, launcher: Any, global_batch_size: int | None) -> None:
    """Checks that each of `callbacks` can have an effect.

    Args:
        callbacks: callbacks of a run.
        launcher: launcher of the strategy.
        global_batch_size: the flag; None if it is not set.

    Raises:
        ValueError: one of them has no effect, or spoils another's; the message has the remedy.
    """
    callbacks = list(callbacks)
    swapping = [type(callback).__name__ for callback in callbacks if isinstance(callback, WeightAveraging)]
    if len(swapping) > 1:
        raise ValueError(
            f"{' and '.join(swapping)} would each swap the module's weights for their own average in a validation, and"
            " swap each other's back: leave one of them."
        )
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler) and global_batch_size is not None:
            raise ValueError(
                f"GradientAccumulationScheduler changes how many micro-batches a step has, which"
                f" global_batch_size={global_batch_size} decides: leave one of them out."
            )
        # Lightning: Tuner makes LearningRateFinder and BatchSizeFinder end the run, and reads their results.
        if getattr(callback, "_early_exit", False) and isinstance(launcher, _MultiProcessingLauncher):
            raise ValueError(
                "Tuner can't read what worker processes have found: choose a strategy without the suffix _spawn, _fork"
                f" or _notebook, or give the callback {type(callback).__name__} to the run that trains."
            )


# Filters of messages and warnings that Lightning prints at each start; the run's header has the facts in one line.
#
# Only messages with these texts, below the level of a warning, are hidden. If the level of the loggers
# ``lightning.pytorch`` or ``lightning.fabric`` is DEBUG, nothing is hidden.

# Lightning: the loggers that its messages at the start of a run come from.
_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.pytorch.accelerators.cuda",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
)
_NOISE = re.compile(
    r"GPU available: |TPU available: |LOCAL_RANK: \d+ - CUDA_VISIBLE_DEVICES|Using \w+ Automatic Mixed Precision"
    r"|💡 Tip: |Initializing distributed: GLOBAL_RANK|-{100}\ndistributed_backend=|(\[rank: \d+\] )?Seed set to \d+$"
    r"|Loading `train_dataloader` to estimate number of stepping batches"
)

_NOISE_OF_TRIALS = re.compile(r"`Trainer\.fit` stopped: |`Trainer` already configured with model summary callbacks")

_lock = Lock()
_num_quiet = 0


@contextmanager
def quiet(*, is_trial: bool = False) -> Iterator[None]:
    """Context manager that hides Lightning's messages at the start of a run; it may be nested.

    Args:
        is_trial: the run is a part of a check, whose own result is all that is printed: its end is hidden, too.
    """
    global _num_quiet
    if is_trial:
        own = functools.partial(_is_not_of_trial)  # an object for each context, which removes its own only
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(own)
        try:
            with quiet():
                yield
        finally:
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(own)
        return
    with _lock:
        _num_quiet += 1
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_is_shown)  # a filter is added once only
    try:
        yield
    finally:
        with _lock:
            _num_quiet -= 1
            if not _num_quiet:
                for name in _LOGGERS:
                    logging.getLogger(name).removeFilter(_is_shown)


@contextmanager
def allow_nonempty_folder() -> Iterator[None]:
    """Context manager around a run that continues in its folder: hides Lightning's warning that it is not empty."""
    # Not by `catch_warnings`, which would undo the user's own filters that are set meanwhile.
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    added: Any = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):  # the user's code has reset the filters
            cast(list[Any], warnings.filters).remove(added)


@contextmanager
def hide_tree_warnings() -> Iterator[None]:
    """Context manager around the creation of a `CombinedLoader`, without a warning that Lightning causes itself."""
    with warnings.catch_warnings():
        # Lightning 2.6 calls `LeafSpec()`, which torch 2.13 deprecates; users can't change that.
        warnings.filterwarnings("ignore", r".*isinstance\(treespec, LeafSpec\)")
        yield


def _is_not_of_trial(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or not _NOISE_OF_TRIALS.match(record.getMessage())


def _is_shown(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING or not _NOISE.match(record.getMessage()):
        return True
    return any(
        logging.getLogger(name).isEnabledFor(logging.DEBUG) for name in ("lightning.pytorch", "lightning.fabric")
    )
