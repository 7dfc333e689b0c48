"""The trainer's connector that saves checkpoints, in place of Lightning's, under every strategy.

Lightning's dict is kept, with everything that hooks add. The key ``polyphase`` has what Lightning does not save, such
as each rank's random state and position in the data. If rank 0 has the whole state, the strategy writes one file, as
under Lightning. If the state is sharded, and for snapshots, the ranks write a directory, each its own shards.
"""

import time
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._compat.lightning import _CheckpointConnector
from .._compat.torch import _BatchNorm
from ..checkpoint import (
    NAMES,
    AsyncCheckpointer,
    CheckpointError,
    get_random_state,
    is_checkpoint,
    is_directory,
    load_checkpoint,
    read_manifest,
)
from ..checkpoint.checked_io import resolve
from ..checkpoint.content import VERSION
from ..checkpoint.manifest import Kind, Manifest, check_may_replace, is_torch_file, manifest_bytes, path_status
from ..checkpoint.publish import update_link
from ..checkpoint.single_file import MANIFEST_KEY, MOST_TEXT_BYTES, OURS
from ..checkpoint.state_tree import all_by_name, mapped, merged
from ..checkpoint.whole import check_file_state, read_file, refusal_of, structures_in, write_file
from ..distributed.object_group import num_ranks
from ..flags import CheckpointFormat
from ..loggers.continuation import LogContinuation
from ..reliability.nonfinite import NonFiniteError
from ..strategies import adapt, capabilities_of
from ..strategies.averages import follow_until_first_update, module_states
from ..version import __version__
from .run_history import RunHistory

__all__ = ["STRATEGY", "EngineIO", "SavingConnector"]

STRATEGY = "strategy"
"""Key of the strategy's own state, under `OURS` and in the state of each rank."""


class SavingConnector(_CheckpointConnector):
    """Lightning's connector, which saves a directory in place of a file if the state is sharded.

    Args:
        trainer: the trainer with the state.
        form: ``"file"``, ``"directory"``, or ``"auto"``: a directory if the state is sharded.
        in_background: save snapshots while training continues.
        keeps_global_batch: change the accumulation to keep the global batch, if a different number of ranks resumes.
    """

    trainer: Any

    def __init__(
        self, trainer: Trainer, *, in_background: bool, keeps_global_batch: bool, form: CheckpointFormat = "auto"
    ) -> None:
        super().__init__(trainer)
        self.saver = AsyncCheckpointer()
        self.trained_parameters = _TrainedParameters()
        """Knows which parameters are trained, and in which groups."""
        self.history = RunHistory(trainer, self.saver)
        """The identity of this run."""
        self.logs = LogContinuation(trainer)
        """Continues the logs of the run."""
        self._in_background = in_background
        self._form = form
        self._keeps_global_batch = keeps_global_batch
        # The trainer's own value may change during training, for example when a run is resumed.
        self._accumulation_asked: int = trainer.accumulate_grad_batches
        self._random_state: dict[str, Any] | None = None
        self._draws_alone = False
        self.knows_data_position = False
        """Whether the checkpoint that was opened has the position in the data."""
        strategy: Any = trainer.strategy
        self._strategy = adapt(strategy)
        self._capabilities = capabilities_of(strategy)
        # A user's CheckpointIO, and Lightning's strategies with another format, keep their formats.
        self.is_portable = (
            trainer._accelerator_connector.checkpoint_io is None  # Lightning: the user's plugin
            # Lightning: the plugin of a registered strategy; XLA's strategies refuse other plugins.
            and type(strategy._checkpoint_io) in (type(None), TorchCheckpointIO)
            and type(strategy).checkpoint_io is Strategy.checkpoint_io
            and self._capabilities.engine_checkpoints
        )
        if form == "directory" and not self.is_portable:
            raise ValueError(
                "checkpoint_format='directory' is for checkpoints that the engine writes itself: leave it out with a"
                " CheckpointIO of your own, or a strategy that has a format of its own."
            )
        if form == "file" and self._is_sharded and not self._capabilities.gathers_state:
            raise ValueError(
                f"checkpoint_format='file' is not for strategy {strategy!r}, whose optimizer state no process gathers:"
                " leave it out, and convert a directory to a file with `polyphase ckpt export`."
            )
        if self.is_portable:
            strategy.checkpoint_io = EngineIO(self.saver)
            self.saver.ranks = self._strategy.saving_ranks

    def save(
        self,
        filepath: Any,
        weights_only: bool | None = None,
        storage_options: Any = None,
        *,
        link: str | None = None,
        kind: Kind = "checkpoint",
    ) -> None:
        """Saves the state of the run; all ranks call it at the same time.

        If the run has failed already, a save that fails is a warning: the first error is what counts.

        Raises:
            TypeError: `storage_options` were passed, which only a user's `CheckpointIO` can use.
            CheckpointError: `filepath` exists, and is not a checkpoint of the engine's.
            NonFiniteError: the run has had a loss or gradient that is not finite.
        """
        path, as_directory = str(filepath), self._is_directory(kind)
        if as_directory and storage_options is not None:
            raise TypeError(
                "`save_checkpoint(storage_options=...)` is for a `CheckpointIO` of your own, given as a plugin; without"
                " one, name the storage by an fsspec URL as the path."
            )
        try:
            is_saved = self._may_save(path)
            if is_saved:
                self._write(filepath, weights_only, storage_options, link, kind)
        except Exception as error:
            if not self.is_ending:
                raise
            is_saved = False
            rank_zero_warn(f"{path} is not saved: {type(error).__name__}: {error}")
        if not is_saved:
            self.saver.has_failed = True  # nothing is removed in its favour

    def _write(
        self, filepath: Any, weights_only: bool | None, storage_options: Any, link: str | None, kind: Kind
    ) -> None:
        path, as_directory = str(filepath), self._is_directory(kind)
        self._strategy.hands_out_shards = self._hands_out_shards = as_directory
        try:
            checkpoint = self.dump_checkpoint(bool(weights_only))
        finally:
            self._hands_out_shards = False
        about = self._about("weights" if weights_only else kind, checkpoint)
        if as_directory:
            self._save_directory(checkpoint, path, about, link=link, in_background=kind == "snapshot")
        else:
            self._save_file(checkpoint, filepath, about, storage_options)
            if link is not None and self.trainer.is_global_zero and (note := update_link(path, link)):
                rank_zero_warn(note)

    def _is_directory(self, kind: Kind) -> bool:
        # Workers have returned whole weights to the process that has started them.
        is_sharded = self._is_sharded and (not self._has_workers or self.state_of_workers is None)
        return kind == "snapshot" or self._form == "directory" or (self._form == "auto" and is_sharded)

    @property
    def _is_sharded(self) -> bool:
        return self._capabilities.state_is_sharded

    def _about(self, kind: Kind, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of the manifest."""
        return {
            "step": checkpoint["global_step"],
            "epoch": checkpoint["epoch"],
            "layout": self._layout,
            "world_size": self.trainer.world_size,
            "versions": {"polyphase": __version__, "lightning": lightning_version, "torch": str(torch.__version__)},
            "kind": kind,
            "loggers": self.logs.positions() if OURS in checkpoint else [],
            **self.history.about(),
        }

    def _save_file(
        self, checkpoint: dict[str, Any], filepath: Any, about: dict[str, Any], storage_options: Any
    ) -> None:
        """Saves by the strategy, as Lightning does; if it fails on one rank, all ranks raise."""
        path = str(filepath)
        name = path.rstrip("/").rsplit("/", 1)[-1]
        engine_state = checkpoint.pop(OURS, {})  # moved to the end: see `manifest_text`
        states = checkpoint.get("optimizer_states", [])
        if len(states) == len(self.trainer.optimizers) and all(map(_goes_by_number, states)):
            engine_state[NAMES] = [self._names(optimizer) for optimizer in self.trainer.optimizers] if states else []
        checkpoint[OURS] = engine_state
        manifest = Manifest(name=name, time=time.time(), files={}, structures=structures_in(checkpoint), **about)
        text = self.saver.agree(lambda: manifest_bytes(manifest, MOST_TEXT_BYTES).decode())
        checkpoint[OURS] = {**engine_state, MANIFEST_KEY: text}
        error: Exception | None = None
        try:
            self.trainer.strategy.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        except Exception as raised:
            error = raised
        failures = self.saver.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failed = [f"rank {rank} could not write: {text}" for rank, text in enumerate(failures) if text is not None]
        if failed:
            raise CheckpointError(f"The checkpoint {path} could not be saved: {'; '.join(failed)}.")
        self.saver.note_file(path, text)

    def _save_directory(
        self, checkpoint: dict[str, Any], path: str, about: dict[str, Any], *, link: str | None, in_background: bool
    ) -> None:
        trainer = self.trainer
        if trainer.data_rank:  # ranks have different BatchNorm statistics; the first rank's are saved and evaluated
            _leave_out(checkpoint, dict(trainer.lightning_module.named_buffers()))
        if "optimizer_states" in checkpoint:
            names = [self._names(optimizer) for optimizer in trainer.optimizers]
            checkpoint["optimizer_states"] = all_by_name(checkpoint["optimizer_states"], names)
        fitting = OURS in checkpoint
        self.saver.save(
            checkpoint,
            path,
            about=about,
            of_rank=self._of_rank() if fitting else {},
            link=link,
            in_background=in_background and self._in_background and self._is_training,
            spread=frozenset({"optimizer_states"} if self._state_is_spread else ()),
        )

    def _may_save(self, path: str) -> bool:
        """Whether all values are finite and `path` may be written; one all-gather, so that all ranks agree.

        If the run has failed already, it warns and returns False instead of raising: the first error is what counts.
        """
        trainer = self.trainer
        watch = trainer.fit_loop.epoch_loop.automatic_optimization.watch
        poison = watch.read_before_save(trainer) if trainer.state.fn == TrainerFn.FITTING else None
        taken = ""
        if trainer.is_global_zero:
            try:
                check_may_replace(path)
            except CheckpointError as error:
                taken = str(error)
        of_ranks = self.saver.gather(("" if poison is None else str(poison), taken))
        poisons = [text for text, _ in of_ranks if text]
        taken = next((text for _, text in of_ranks if text), "")
        if not poisons and not taken:
            return True
        if self.is_ending or (poisons and poison is None):  # another rank is about to raise it
            rank_zero_warn(f"{path} is not saved: {poisons[0] if poisons else taken}")
            return False
        if poison is not None:
            raise NonFiniteError(f"{path} is not saved: {poison}", poison.rank)
        raise CheckpointError(taken)

    _hands_out_shards = False
    """Whether a directory is being saved: then state dicts have each rank's own shards."""

    @property
    def _state_is_spread(self) -> bool:
        return self._capabilities.optimizer_state_partitioned

    def _keeps_state_of(self, parameter: Tensor) -> bool:
        return self._strategy.keeps_state_of(parameter)

    @property
    def _is_training(self) -> bool:
        """Whether training continues after this save, so that a snapshot may be written in the background."""
        trainer = self.trainer
        fits = trainer.state.fn == TrainerFn.FITTING and (trainer.training or trainer.validating)
        return fits and not self.is_ending

    is_ending = False
    """Whether the run has failed: then all saves are in the foreground."""

    @property
    def _stopped_in_validation(self) -> bool:
        return self.is_ending and self.trainer.validating

    @property
    def _layout(self) -> dict[str, int]:
        """Sizes of the mesh's axes, without those of size 1."""
        return {axis: size for axis, size in self.trainer.layout.axes.items() if size > 1}

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Returns Lightning's dict, with the engine's own state under `OURS`; called by all ranks."""
        follow_until_first_update(self.trainer)
        checkpoint = dict(super().dump_checkpoint(weights_only))  # a copy, since hooks may have kept that dict
        trainer = self.trainer
        if self._state_is_spread and not self._hands_out_shards and "optimizer_states" in checkpoint:
            # Lightning: Strategy.optimizer_state has returned only this rank's part.
            checkpoint["optimizer_states"] = self._collected(checkpoint["optimizer_states"])
        if self._hands_out_shards:
            current: dict[str, Any] = checkpoint.get("current_model_state") or checkpoint["state_dict"]
            _leave_out(checkpoint, [name for name, value in current.items() if getattr(value, "is_meta", False)])
        elif self._is_sharded:  # what callbacks save of parameters
            checkpoint = mapped(self._gathered, checkpoint, DTensor)
        if weights_only or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        if not self._has_workers:
            checkpoint[OURS] = self._engine_state_to_save()
        elif self.state_of_workers is not None and not self._hands_out_shards:
            checkpoint[OURS] = dict(self.state_of_workers)
        return checkpoint

    def _gathered(self, shards: DTensor) -> Tensor:
        """Returns the whole tensor on rank 0, in host memory, and no values on the others."""
        on_device: Any = shards.to(self.trainer.strategy.root_device)
        whole = on_device.full_tensor()
        return whole.cpu() if self.trainer.is_global_zero else whole.new_empty(0)

    state_of_workers: dict[str, Any] | None = None
    """The entry `OURS` of the workers that this process has started, as they ended; None if they did not train."""

    @property
    def _has_workers(self) -> bool:
        """Whether this process has started worker processes: it has not trained itself, and has the weights only."""
        return num_ranks() == 1 < self.trainer.world_size

    def state_for_parent(self) -> dict[str, Any] | None:
        """Returns the engine's own state for the process that has started the workers, which all call it at the end."""
        if self.trainer.state.fn != TrainerFn.FITTING or not self.is_portable:
            return None
        state = self._engine_state_to_save()
        del state["optimizers"]  # the parent has not their state
        return state

    def _engine_state_to_save(self) -> dict[str, Any]:
        """Returns the engine's own state; called by all ranks."""
        trainer = self.trainer
        state = {
            "version": VERSION,
            "between_epochs": self._between_epochs,
            "between_steps": trainer.fit_loop.epoch_loop.is_between_steps or self._is_cut_short,
            "cut_short": self._is_cut_short,
            "in_validation": self._stopped_in_validation,
            "batches": trainer.fit_loop.epoch_loop.batches_done(),
            "loaders_of_epoch": max(0, trainer.fit_loop._last_train_dl_reload_epoch),
            "validation_loaders_of_epoch": self._validation_loaders_of_epoch,
            "world_size": trainer.world_size,
            "layout": self._layout,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "accumulation_asked": self._accumulation_asked,
            "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
            "trained": self.trained_parameters.changes(trainer.lightning_module, trainer.optimizers),
            "run": self.history.run.as_dict(),
        }
        state[STRATEGY] = self._strategy.shared_state()
        if not self._hands_out_shards:
            state["ranks"] = self.saver.collect(self._of_rank())
        return state

    def _collected(self, states: list[Any]) -> list[Any]:
        """Returns, on rank 0, the optimizers' states merged over all ranks."""
        all_states = self.saver.collect(states)
        return merged(all_states) if self.trainer.is_global_zero else states

    def _of_rank(self) -> dict[str, Any]:
        """Returns the state that only this rank has."""
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop
        begins = self._between_epochs
        batches = 0 if begins else loop.batches_done()
        hook = self._strategy.comm_hook
        random_state = loop.rng_state_before_validation if self._stopped_in_validation else None
        if random_state is None and not self._between_epochs:
            random_state = loop.rng_state_of_window
        return {
            STRATEGY: self._strategy.state_of_rank(),
            "random": random_state or get_random_state(),
            "data": trainer._data_connector.data_position.state_dict(
                batches, begins=begins, is_cut_short=self._is_cut_short
            ),
            "compression": hook.state_dict() if hook is not None else {},
        }

    @property
    def _between_epochs(self) -> bool:
        """Whether the last epoch is over, or the next one has trained on no batch yet."""
        epochs = self.trainer.fit_loop.epoch_progress.current
        return (epochs.processed == epochs.ready and not self._is_cut_short) or epochs.started < epochs.ready

    @property
    def _validation_loaders_of_epoch(self) -> int | None:
        """The epoch in which the validation loaders were made; None before the first."""
        loop = self.trainer.fit_loop.epoch_loop.val_loop
        # Lightning: minus infinity before the first loaders.
        return None if loop._last_val_dl_reload_epoch < 0 else int(loop._last_val_dl_reload_epoch)

    @property
    def _is_cut_short(self) -> bool:
        """Whether `max_steps` has ended the last epoch before its last batch: a longer run continues in it."""
        fit_loop = self.trainer.fit_loop
        epochs = fit_loop.epoch_progress.current
        return fit_loop.is_cut_short and epochs.processed == epochs.ready

    def _get_lightning_module_state_dict(self) -> dict[str, Tensor]:
        # Lightning: _CheckpointConnector._get_lightning_module_state_dict, where a strategy gathers shards.
        if self._hands_out_shards:
            return self._strategy.saved_state(self.trainer.lightning_module)
        return super()._get_lightning_module_state_dict()

    def _names(self, optimizer: Optimizer) -> list[str]:
        """Returns the names of an optimizer's parameters, in the order of its groups."""
        names = {parameter: name for name, parameter in self.trainer.lightning_module.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [names.get(parameter, f"<parameter {i}>") for i, parameter in enumerate(parameters)]


def _leave_out(checkpoint: dict[str, Any], names: Iterable[str]) -> None:
    """Leaves tensors of the module, and of its averages, to the rank that saves them."""
    for state in module_states(checkpoint):
        for name in state.keys() & set(names):
            state[name] = state[name].to("meta")


def _goes_by_number(state: Any) -> bool:
    """Whether an optimizer's state has torch's format, in which parameters have numbers."""
    return type(state) is dict and type(state.get("state")) is dict and "param_groups" in state


# --- the engine's CheckpointIO
# Writes, opens and removes checkpoints that are files, by the interface that Lightning's strategies call.


class EngineIO(TorchCheckpointIO):
    """Writes Lightning's files atomically; opens and removes these and the engine's directories."""

    def __init__(self, saver: AsyncCheckpointer) -> None:
        super().__init__()
        self._saver = saver
        self._has_checked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes one file.

        Raises:
            TypeError: `storage_options` were given, as for Lightning's `TorchCheckpointIO`.
            CheckpointError: the file can't be opened again.
        """
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # raises Lightning's own error
            return
        is_empty = write_file(checkpoint, str(path)) == 0  # tests replace `torch.save` to count its calls
        if MANIFEST_KEY in checkpoint.get(OURS, ()) and not is_empty:
            read_manifest(path)  # before an older one is removed
        if not self._has_checked:
            self._has_checked = True
            if (refusal := refusal_of(checkpoint)) is not None:
                rank_zero_warn(refusal)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a file or a directory, whole, on the CPU."""
        self._saver.finish()
        if is_directory(path):
            return load_checkpoint(path, weights_only=weights_only)
        fs, fs_path = resolve(path)
        if not fs.exists(fs_path):
            raise FileNotFoundError(f"Checkpoint file not found: {path}")  # as in Lightning's `TorchCheckpointIO`
        is_lazy = num_ranks() > 1 and is_checkpoint(path)  # each rank reads only its part
        checkpoint = read_file(path, weights_only, lazily=is_lazy, map_location=map_location or "cpu")
        check_file_state(checkpoint, path, takes_edits=True)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file or a directory; the engine's own checkpoints only when the save in flight has succeeded."""
        # Lightning: its launchers hand the weights to the first process in a file that is not a whole checkpoint.
        if is_torch_file(path) and path_status(path).kind != "ours":
            super().remove_checkpoint(path)
        else:
            self._saver.remove(str(path))


# --- saves and restores which parameters a run trains, and in which groups: callbacks change both in mid-training
# A fine-tuning callback (`BackboneFinetuning`, say) freezes a part of the module before training, unfreezes it later,
# and gives it to the optimizer as a group of its own. A resumed run begins with the part frozen again, and the callback
# has nothing more to do. So what has changed since training began is saved with the run, and changed again on resume.
# What has not changed is left as the resumed run's own module and `configure_optimizers` have it.


class _TrainedParameters:
    """The changes since training began, by names."""

    def __init__(self) -> None:
        self._is_trained: dict[str, bool] = {}
        self._tracks: dict[str, bool] = {}
        self._of_optimizers: list[set[str]] = []
        self._saved: dict[str, Any] = {}

    def begin(self, module: LightningModule, optimizers: list[Optimizer], saved: dict[str, Any]) -> None:
        """Called before a run begins to train, when it has its optimizers.

        Args:
            module: the module.
            optimizers: its optimizers.
            saved: the changes of the run that is resumed; empty if there is none.
        """
        self._saved = saved
        self._is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        self._tracks = dict(_tracking(module))
        names = _names(module)
        # A callback may have added the groups of the resumed run already.
        before = [set(added) for added in saved.get("added", [])]
        before += [set[str]()] * (len(optimizers) - len(before))
        self._of_optimizers = [
            {names[p] for p in _parameters(optimizer) if p in names} - added
            for optimizer, added in zip(optimizers, before, strict=False)
        ]

    def changes(self, module: LightningModule, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Returns the changes, as plain values."""
        names = _names(module)
        is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        return {
            "is_trained": _changed(is_trained, self._is_trained, self._saved.get("is_trained", {})),
            "tracks": _changed(dict(_tracking(module)), self._tracks, self._saved.get("tracks", {})),
            "added": [
                sorted({names[p] for p in _parameters(optimizer) if p in names} - first)
                for optimizer, first in zip(optimizers, self._of_optimizers, strict=False)
            ],
        }

    def restore_flags(self, module: LightningModule) -> None:
        """Freezes, and unfreezes, what the resumed run had."""
        is_trained, tracks = self._saved.get("is_trained", {}), self._saved.get("tracks", {})
        for name, parameter in module.named_parameters():
            if name in is_trained:
                parameter.requires_grad_(is_trained[name])
        parts: dict[str, Any] = dict(module.named_modules())
        for name in tracks.keys() & parts.keys():
            parts[name].track_running_stats = tracks[name]

    def restore_groups(self, module: LightningModule, number: int, optimizer: Optimizer, groups: Any) -> None:
        """Gives an optimizer the parameters that were added to it in the resumed run.

        Args:
            module: the module.
            number: the number of the optimizer.
            optimizer: the optimizer.
            groups: the saved groups, with names as parameters.
        """
        added = set(self._saved["added"][number]) if number < len(self._saved.get("added", [])) else set()
        parameters, present = dict(module.named_parameters()), set(_parameters(optimizer))
        for index, group in enumerate(groups):
            missing = [n for n in group["params"] if n in added and n in parameters and parameters[n] not in present]
            tensors = [parameters[name] for name in missing]
            if index < len(optimizer.param_groups):
                optimizer.param_groups[index]["params"].extend(tensors)
            elif tensors:
                optimizer.add_param_group({**group, "params": tensors})


def _names(module: LightningModule) -> dict[Tensor, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tracking(module: LightningModule) -> list[tuple[str, bool]]:
    """Whether each batch normalisation tracks statistics: Lightning's callback stops that where it freezes one."""
    return [(n, part.track_running_stats) for n, part in module.named_modules() if isinstance(part, _BatchNorm)]


def _changed(now: dict[str, bool], first: dict[str, bool], before: dict[str, bool]) -> dict[str, bool]:
    return {name: value for name, value in now.items() if value != first.get(name, value) or name in before}
