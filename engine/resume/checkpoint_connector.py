"""The trainer's connector that saves and loads checkpoints, in place of Lightning's, under every strategy.

Lightning's dict is kept, with everything that hooks add. The key ``polyphase`` has what Lightning does not save, such
as each rank's random state and position in the data: see `run_state.py`. If rank 0 has the whole state, the strategy
writes one file, as under Lightning. If the state is sharded, and for snapshots, the ranks write a directory, each its
own shards. Loaded are the engine's checkpoints and Lightning's own files.

A resumption goes, in this order, through `resume_start`, which checks and opens the checkpoint; `restore_model`;
`restore_callbacks`; `restore_loops`, with the place in the data; `restore_training_state`, with optimizers, schedulers
and the strategy's state; and, before the first batch, `run_state.random`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

# Lightning: how the hooks of a module are called.
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .._compat.lightning import _CheckpointConnector
from ..checkpoint import (
    NAMES,
    AsyncCheckpointer,
    CheckpointError,
    by_name,
    by_number,
    is_checkpoint,
    is_directory,
    read_manifest,
    to_lightning,
)
from ..checkpoint.adapters import STATE_KEY as ADAPTERS
from ..checkpoint.adapters import Adapters
from ..checkpoint.engine_io import EngineIO
from ..checkpoint.errors import damage
from ..checkpoint.manifest import Kind, Manifest, check_may_replace, manifest_bytes
from ..checkpoint.publish import update_link
from ..checkpoint.single_file import MANIFEST_KEY, MOST_TEXT_BYTES, OURS
from ..checkpoint.state_tree import all_by_name, mapped, merged
from ..checkpoint.whole import names_in, part_of, structures_in
from ..contract import EngineStrategy
from ..distributed.environment import restart_count
from ..distributed.object_group import num_ranks
from ..flags import CheckpointFormat
from ..foreign import for_terminal
from ..initialization import check_stored, has_meta_tensors, materialize, read_stored
from ..loggers.continuation import LogContinuation
from ..reliability.nonfinite import NonFiniteError
from ..strategies.averages import (
    begin_averages,
    follow_until_first_update,
    forget_averages,
    has_own_schedule,
    module_states,
)
from ..version import __version__
from .restored_state import wrong_in_callbacks, wrong_in_optimizer, wrong_in_scheduler
from .run_history import AUTO, FRESH, RunHistory, Seen, check_may_start_afresh, forget_others, others_of
from .run_state import (
    STRATEGY,
    RunState,
    end_last_epoch,
    to_last_step,
)

__all__ = ["CheckpointConnector"]


class OnlyWeightsError(CheckpointError, KeyError):
    """A checkpoint has no state of optimizers or schedulers, from which a run would continue; Lightning's KeyError."""

    __str__ = Exception.__str__


class CheckpointConnector(_CheckpointConnector):  # Lightning: Trainer._checkpoint_connector
    """Saves a directory in place of a file if the state is sharded; loads either, and Lightning's files.

    Args:
        trainer: the trainer with the state.
        form: ``"file"``, ``"directory"``, or ``"auto"``: a directory if the state is sharded.
        keeps_global_batch: change the accumulation to keep the global batch, if a different number of ranks resumes.
    """

    trainer: Any
    is_ending = False
    """Whether the run has failed: then all saves are in the foreground."""
    state_of_workers: dict[str, Any] | None = None
    """The entry `OURS` of the workers that this process has started, as they ended; None if they did not train."""
    _hands_out_shards = False
    """Whether a directory is being saved: then state dicts have each rank's own shards."""
    _engine_state: dict[str, Any]
    """The engine's own entry of the checkpoint that was opened, under the key `OURS`."""
    _saved_names: list[list[str]] | None = None
    """The parameter names of each optimizer in the opened checkpoint; None if it has no names."""

    def __init__(self, trainer: Trainer, *, keeps_global_batch: bool, form: CheckpointFormat = "auto") -> None:
        super().__init__(trainer)
        self.saver = AsyncCheckpointer()
        self.run_state = RunState(trainer, keeps_global_batch=keeps_global_batch)
        self.history = RunHistory(trainer, self.saver)
        """The identity of this run."""
        self.logs = LogContinuation(trainer)
        """Continues the logs of the run."""
        self._form = form
        strategy: Any = trainer.strategy
        self._strategy: EngineStrategy = trainer.engine_strategy  # type: ignore[attr-defined]
        self._capabilities = self._strategy.capabilities
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

    # --- saving

    def save(
        self,
        filepath: Any,
        weights_only: bool | None = None,
        storage_options: Any = None,
        link: str | None = None,
        kind: Kind = "checkpoint",
        in_background: bool = False,
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
                self._write(filepath, weights_only, storage_options, link, kind, in_background)
        except Exception as error:
            if not self.is_ending:
                raise
            is_saved = False
            rank_zero_warn(f"{path} is not saved: {type(error).__name__}: {error}")
        if not is_saved:
            self.saver.has_failed = True  # nothing is removed in its favour

    def _write(
        self,
        filepath: Any,
        weights_only: bool | None,
        storage_options: Any,
        link: str | None,
        kind: Kind,
        in_background: bool,
    ) -> None:
        path, as_directory = str(filepath), self._is_directory(kind)
        self._strategy.hands_out_shards = self._hands_out_shards = as_directory
        try:
            checkpoint = self.dump_checkpoint(bool(weights_only))
        finally:
            self._hands_out_shards = False
        about = self._about("weights" if weights_only else kind, checkpoint)
        if as_directory:
            self._save_directory(checkpoint, path, about, link=link, in_background=in_background)
        else:
            self._save_file(checkpoint, filepath, about, storage_options)
            if link is not None and self.trainer.is_global_zero and (note := update_link(path, link)):
                rank_zero_warn(note)

    def _is_directory(self, kind: Kind) -> bool:
        # Workers have returned whole weights to the process that has started them.
        is_sharded = self._is_sharded and (not self._has_workers or self.state_of_workers is None)
        return kind == "snapshot" or self._form == "directory" or (self._form == "auto" and is_sharded)

    def _about(self, kind: Kind, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Returns the content of the manifest."""
        return {
            "step": checkpoint["global_step"],
            "epoch": checkpoint["epoch"],
            "layout": self._strategy.layout.split_axes,
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
        self.saver.note_file(path, manifest)

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
            of_rank=self.run_state.of_rank() if fitting else {},
            link=link,
            in_background=in_background and self._is_training,
            spread=frozenset({"optimizer_states"} if self._state_is_spread else ()),
        )

    def _may_save(self, path: str) -> bool:
        """Whether all values are finite and `path` may be written; one all-gather, so that all ranks agree.

        If the run has failed already, it warns and returns False instead of raising: the first error is what counts.
        """
        trainer = self.trainer
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        watch = optimization.watch
        if optimization.step_guard is not None:
            with suppress(NonFiniteError):  # which `read_before_save` returns
                optimization.step_guard.settle()
        poison = watch.read_before_save(trainer) if trainer.state.fn == TrainerFn.FITTING else None
        taken = ""
        if trainer.is_global_zero:
            try:
                check_may_replace(path)
            except CheckpointError as error:
                taken = str(error)
        of_ranks = self.saver.gather(("" if poison is None else str(poison), taken))
        poisoned, taken = (next(filter(None, texts), "") for texts in zip(*of_ranks, strict=True))
        if not poisoned and not taken:
            return True
        if self.is_ending or (poisoned and poison is None):  # another rank is about to raise it
            rank_zero_warn(f"{path} is not saved: {poisoned or taken}")
            return False
        if poison is not None:
            raise NonFiniteError(f"{path} is not saved: {poison}", poison.rank)
        raise CheckpointError(taken)

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
        if weights_only:  # without states of callbacks, but for the one that says what the weights are
            about = {c.state_key: c.state_dict() for c in trainer.callbacks if c.state_key == ADAPTERS}
            checkpoint.update({"callbacks": about} if about else {})
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

    def state_for_parent(self) -> dict[str, Any] | None:
        """Returns the engine's own state for the process that has started the workers, which all call it at the end."""
        if self.trainer.state.fn != TrainerFn.FITTING or not self.is_portable:
            return None
        state = self._engine_state_to_save()
        del state["optimizers"]  # the parent has not their state
        return state

    def _engine_state_to_save(self) -> dict[str, Any]:
        """Returns the engine's own state; called by all ranks."""
        state = {**self.run_state.shared(), "run": self.history.run.as_dict()}
        if not self._hands_out_shards:
            state["ranks"] = self.saver.collect(self.run_state.of_rank())
        return state

    def _collected(self, states: list[Any]) -> list[Any]:
        """Returns, on rank 0, the optimizers' states merged over all ranks."""
        all_states = self.saver.collect(states)
        return merged(all_states) if self.trainer.is_global_zero else states

    # --- loading

    def begin(self) -> None:
        """Resets the state of the last run; called when the trainer begins to run."""
        self.is_ending = self.saver.has_failed = False
        self.state_of_workers = None
        self.run_state.random.begin_run()

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Checks all files of a checkpoint and opens it; does not change the module yet."""
        self.saver.finish()
        is_fit = self.trainer.state.fn == TrainerFn.FITTING
        if not is_fit:
            forget_averages(self.trainer)
        seen = self.history.look() if is_fit else None
        is_same = False
        if seen is not None and checkpoint_path in (AUTO, FRESH):
            is_same = self._resume_newest(seen, checkpoint_path, weights_only)
        elif checkpoint_path and is_directory(checkpoint_path):
            rank_zero_info(f"Restoring states from the checkpoint path at {checkpoint_path}")
            self._open(str(checkpoint_path), weights_only)
        else:
            if self.is_portable and checkpoint_path and _is_foreign(checkpoint_path):
                read_manifest(checkpoint_path)  # raises an error that names what is missing
            self._open_file(checkpoint_path, weights_only)
        # Hooks of the module and of callbacks see only the entries that Lightning's checkpoints have.
        loaded = self._loaded_checkpoint or {}
        self._engine_state, self._saved_names = loaded.pop(OURS, {}), loaded.pop(NAMES, None)
        if is_fit:
            self._begin_run(is_same)

    def _begin_run(self, is_same: bool) -> None:
        trainer = self.trainer
        opened = self.history.manifest_of(str(self._ckpt_path)) if is_same else None
        if opened is None or not 0 <= trainer.max_steps <= opened.step:  # otherwise no step would be logged again
            loggers, step = (None, 0) if opened is None else (opened.loggers, opened.step)
            self.logs.take_back(loggers, step, waits=bool(self._engine_state.get("cut_short")))
        trainer.fit_loop.epoch_loop.automatic_optimization.watch.begin_run()
        trainer.fit_loop.is_cut_short = False
        # Lightning's own files have no run id; they can be continued nevertheless.
        continues = self._engine_state.get("run") or ({} if self._loaded_checkpoint else None)
        self.history.begin(continues, is_same=is_same)
        self.history.record(self.run_state.global_batch.shared(), self.logs.positions())
        self.logs.mark(self.history.run.id)

    def restore_callbacks(self) -> None:
        """Restores the callbacks' state, without paths of others' files.

        Raises:
            CheckpointError: a callback of Lightning's can't have such a state.
        """
        states = (self._loaded_checkpoint or {}).get("callbacks")
        self._refuse(wrong_in_callbacks(self.trainer.callbacks, states or {}))
        super().restore_callbacks()
        if not self._loaded_checkpoint or self.trainer.state.fn != TrainerFn.FITTING:
            return
        lineage = (self._engine_state.get("run") or {}).get("lineage", ())
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                forget_others(callback, self.saver.agree(partial(others_of, callback, lineage)))

    def _open_file(self, path: Any, weights_only: bool | None) -> None:
        """Opens a single-file checkpoint through the strategy, as Lightning does; each rank keeps only its own part."""
        if path and self.is_portable:
            self.saver.check_file(str(path))
        if path and self.is_portable and self._is_sharded and is_checkpoint(path):
            # Lightning: ModelParallelStrategy.load_checkpoint would read all of it on rank 0 and scatter the shards.
            rank_zero_info(f"Restoring states from the checkpoint path at {path}")
            self._ckpt_path = path
            self._loaded_checkpoint = self.trainer.strategy.checkpoint_io.load_checkpoint(
                path, weights_only=weights_only
            )
        else:
            with self._naming("content") if self.is_portable else nullcontext():
                super().resume_start(path, weights_only)
        if not path or not self.is_portable:
            return
        names = names_in(self._loaded_checkpoint)
        if num_ranks() == 1:
            if names is not None:
                self._loaded_checkpoint[NAMES] = names
        elif names is None:
            self._loaded_checkpoint = mapped(torch.clone, self._loaded_checkpoint)  # it may have been opened lazily
        else:
            self._loaded_checkpoint = part_of(
                self._loaded_checkpoint,
                _TargetTensors(self.trainer.lightning_module, self._strategy.keeps_state_of),
                rank=self.trainer.global_rank,
                needs_optimizers=self.trainer.state.fn == TrainerFn.FITTING,
            )

    def _open(self, path: str, weights_only: bool | None) -> None:
        trainer = self.trainer
        if not is_directory(path):
            self._open_file(path, weights_only)
            return
        if not self.is_portable and type(trainer.strategy).load_checkpoint is not Strategy.load_checkpoint:
            raise CheckpointError(
                f"{type(trainer.strategy).__name__} has its own kind of checkpoints: convert {path} to a file of"
                " Lightning's first, with `polyphase ckpt export`."
            )
        needless = () if trainer.state.fn == TrainerFn.FITTING else ("optimizer_states",)
        template = _TargetTensors(trainer.lightning_module, self._strategy.keeps_state_of)
        self._loaded_checkpoint = to_lightning(
            self.saver.load(
                path,
                template,
                leave_out=needless,
                weights_only=weights_only,
                layout=self._strategy.layout.split_axes,
                own=(STRATEGY,),
            )
        )
        self._ckpt_path = path

    def _resume_newest(self, seen: Seen, how: str, weights_only: bool | None) -> bool:
        """Opens the newest undamaged checkpoint in the folder of snapshots.

        Returns:
            Whether a checkpoint was opened.

        Raises:
            CheckpointError: no checkpoint can be read, although there are some, or the run has saved some before.
        """
        self._ckpt_path = None
        if how == FRESH and not restart_count():
            return False
        failures: list[str] = []
        damaged: list[str] = []
        tried: list[str] = []
        if seen.newer is None and seen.candidates:
            for problem in seen.problems:
                rank_zero_warn(f"{problem} It is skipped.")
        while seen.newer is None and (path := next((p for p in seen.candidates if p not in tried), None)):
            tried.append(path)
            try:
                self._open(path, weights_only)
                if OURS not in (self._loaded_checkpoint or {}):
                    raise damage(path, "it was changed after it was saved")
            except CheckpointError as error:
                failures.append(str(error))
                damaged += [path] if error.is_damage else []
                rank_zero_warn(f"{error} An older one is used, if there is one.")
                if len(tried) == 1:  # of the others, only their index has been read
                    seen = self.history.look(opens_all=True)
            else:
                self.history.set_aside(damaged)
                rank_zero_info(for_terminal(f"resume='auto': continues from {path}"))
                return True
        if how == AUTO:
            check_may_start_afresh(self.trainer.snapshots_path, seen, failures)
            if seen.record is not None:  # the same run was stopped before it saved a checkpoint
                self.run_state.global_batch.restore(seen.record.batches)
        return False

    # Lightning: _CheckpointConnector._parse_ckpt_path, called before the other processes start.
    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            ckpt_path if ckpt_path in (AUTO, FRESH) else super()._parse_ckpt_path(state_fn, ckpt_path, *args, **kwargs)
        )

    def restore_model(self) -> None:
        """Loads the weights, after the module's hook `on_load_checkpoint` was called.

        Raises:
            RuntimeError: the module has other parameters; the message lists those that are missing, unexpected or of
                another shape.
        """
        trainer = self.trainer
        check_stored(trainer.lightning_module)
        if not self._capabilities.splits_module and has_meta_tensors(trainer.lightning_module):
            materialize(trainer.lightning_module)
        read_stored(trainer.lightning_module)  # the parameters that no strategy has sharded and read before
        if isinstance(trainer.precision_plugin, DoublePrecision):
            # Lightning converts the module after this, when values loaded into fp32 have lost half of their digits.
            trainer.precision_plugin.convert_module(trainer.lightning_module)
        if not self._loaded_checkpoint:
            return
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", self._loaded_checkpoint)
        module, is_ours = trainer.lightning_module, self._is_ours
        try:
            with self._naming("state_dict"):
                if is_ours and self._is_sharded:
                    # Lightning: in load_model_state_dict its sharding strategies expect whole tensors
                    module.load_state_dict(self._loaded_checkpoint["state_dict"], strict=module.strict_loading)
                else:
                    trainer.strategy.load_model_state_dict(self._loaded_checkpoint, strict=module.strict_loading)
        except RuntimeError as mismatch:
            if not is_ours:
                raise
            raise RuntimeError(
                f"The checkpoint {self._ckpt_path} does not fit the module. {self._about_adapters()}{mismatch}"
            ) from None

    def _about_adapters(self) -> str:
        """Says what to do where either the checkpoint or the run has adapters of the flag `finetune`."""
        saved = Adapters.of(self._loaded_checkpoint.get("callbacks"))
        has_adapters = any(callback.state_key == ADAPTERS for callback in self.trainer.callbacks)
        if saved is not None and not has_adapters:
            return f"It was written with finetune='lora:rank={saved.rank},alpha={saved.alpha}': give that flag again. "
        if saved is None and has_adapters:
            return "It was written without finetune: leave that flag out, or begin a run with it from these weights. "
        return ""

    def restore_loops(self) -> None:
        """Restores the loops' progress, and keeps the state that is restored when the training data is prepared."""
        saved, fit_loop = self._engine_state, self.trainer.fit_loop
        is_fit = self.trainer.state.fn == TrainerFn.FITTING
        if not is_fit or "batches" not in saved:
            with self._naming("loops"):
                if is_fit and "loops" in (self._loaded_checkpoint or {}):
                    end_last_epoch(self._loaded_checkpoint["loops"]["fit_loop"], fit_loop.max_epochs)
                super().restore_loops()
            return
        pending = to_last_step(self._loaded_checkpoint["loops"]["fit_loop"], saved)
        super().restore_loops()
        fit_loop.epoch_loop.pending_batch_work = pending
        self.run_state.restore_with_loops(saved)

    def restore_training_state(self) -> None:
        """Restores what training changes; called when the module and its optimizers are there, also by new runs."""
        if self.trainer.state.fn == TrainerFn.FITTING:
            self.run_state.trained.restore(self._engine_state.get("trained", {}) if self._loaded_checkpoint else {})
            begin_averages(self.trainer)
        super().restore_training_state()

    def restore_optimizers_and_schedulers(self) -> None:
        """Restores optimizers and schedulers; also sharded optimizers, which Lightning leaves to its strategies."""
        try:
            super().restore_optimizers_and_schedulers()
        except KeyError as missing:  # Lightning: the checkpoint has only the weights
            raise OnlyWeightsError(f"{self._ckpt_path}: {missing.args[0]}") from None
        if self._is_ours and self._is_sharded and not self.trainer.strategy.lightning_restore_optimizer:
            self.restore_optimizers()
        self.run_state.strategy.restore(self._engine_state)

    def restore_lr_schedulers(self) -> None:
        """Restores schedulers, but for that of `StochasticWeightAveraging`, which takes the place of the module's."""
        if any(has_own_schedule(callback) for callback in self.trainer.callbacks):
            # Lightning: the callback does this in `on_fit_start`, before which it has its state under some strategies.
            self.trainer.lr_scheduler_configs.clear()
        states = (self._loaded_checkpoint or {}).get("lr_schedulers", ())
        with self._naming("lr_schedulers", ValueError):
            for number, (config, state) in enumerate(zip(self.trainer.lr_scheduler_configs, states, strict=False)):
                self._refuse(wrong_in_scheduler(config.scheduler, state, f"lr_schedulers[{number}]"))
            super().restore_lr_schedulers()

    def restore_optimizers(self) -> None:
        """Restores the optimizers' state, and tries it.

        Raises:
            CheckpointError: the checkpoint has other optimizers, their groups have other parameters, or a step fails.
        """
        if self.is_portable and self._saved_names is not None:
            self._restore_by_names(self._saved_names)
        else:
            with self._naming("optimizer_states", ValueError):
                super().restore_optimizers()
        for number, optimizer in enumerate(self.trainer.optimizers):
            if wrong := wrong_in_optimizer(optimizer):
                self._refuse(f"of optimizer_states[{number}], {wrong}")

    def _restore_by_names(self, saved_names: list[list[str]]) -> None:
        """Restores the optimizers' state by the names of their parameters, in the order that was saved."""
        saved, optimizers = self._loaded_checkpoint["optimizer_states"], self.trainer.optimizers
        then, now = self._engine_state.get("optimizers"), [type(optimizer).__name__ for optimizer in optimizers]
        if then is not None and then != now:
            raise CheckpointError(
                f"The checkpoint {self._ckpt_path} has the state of {', '.join(then) or 'no optimizer'}, but"
                f" configure_optimizers gives {', '.join(now) or 'none'}: use the same, or load only the weights with"
                " load_from_checkpoint."
            )
        if then is None and not saved and optimizers:
            rank_zero_warn(
                f"The checkpoint {self._ckpt_path} has no state of optimizers: it was saved after its workers had"
                " ended, by the process that had started them. The optimizers begin anew. To keep their state, let a"
                " callback save during training."
            )
            return
        states = []
        for number, (optimizer, state, names) in enumerate(zip(optimizers, saved, saved_names, strict=True)):
            named = by_name(state, names)
            self.run_state.trained.restore_groups(number, optimizer, named["param_groups"])
            named["state"] = {name: values for name, values in named["state"].items() if not _is_elsewhere(values)}
            states.append(_in_order_of(named, optimizer, self._names(optimizer)))
        if self._is_sharded or self._state_is_spread:
            for optimizer, state in zip(optimizers, states, strict=True):
                optimizer.load_state_dict(state)
        else:  # the user's own strategy may override this method
            self.trainer.strategy.load_optimizer_state_dict({**self._loaded_checkpoint, "optimizer_states": states})

    def resume_end(self) -> None:
        """Ends the restoring; called by Lightning."""
        super().resume_end()
        if self.run_state.place.is_between_epochs:
            self.run_state.random.set()  # the next epoch's loader draws from it

    def restore_precision_plugin_state(self) -> None:
        """Restores the state of the precision, such as the loss scale."""
        with self._naming("state of the precision"):
            super().restore_precision_plugin_state()

    @contextmanager
    def _naming(self, entry: str, *more: type[Exception]) -> Iterator[None]:
        """Has an error that the form of an entry causes, of `more` classes too, name the checkpoint and the entry."""
        causes: tuple[type[Exception], ...] = (KeyError, TypeError, AttributeError, IndexError, *more)
        try:
            yield
        except CheckpointError:
            raise
        except causes as error:
            wrong = f"its {entry} does not fit ({type(error).__name__}: {error})"
            raise CheckpointError(f"The checkpoint {self._ckpt_path} can't be continued: {wrong}") from error

    def _refuse(self, wrong: str | None) -> None:
        if wrong:
            raise CheckpointError(f"The checkpoint {self._ckpt_path} can't be continued: {wrong}.")

    # --- what is saved, and how

    @property
    def _is_ours(self) -> bool:
        return self.is_portable and self._saved_names is not None

    @property
    def _is_sharded(self) -> bool:
        return self._capabilities.state_is_sharded

    @property
    def _state_is_spread(self) -> bool:
        return self._capabilities.optimizer_state_partitioned

    @property
    def _is_training(self) -> bool:
        """Whether training continues after this save, so that a directory may be written in the background."""
        trainer = self.trainer
        fits = trainer.state.fn == TrainerFn.FITTING and (trainer.training or trainer.validating)
        return fits and not self.is_ending

    @property
    def _has_workers(self) -> bool:
        """Whether this process has started worker processes: it has not trained itself, and has the weights only."""
        return num_ranks() == 1 < self.trainer.world_size

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


def _is_elsewhere(state: dict[str, Any]) -> bool:
    """Whether a parameter's optimizer state was not read, as only other ranks need it."""
    return any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _is_foreign(path: Any) -> bool:
    """Whether `path` is a folder that neither the engine nor Lightning has written."""
    return os.path.isdir(path) and not os.path.exists(os.path.join(path, "meta.pt"))  # Lightning: its sharded ones


class _TargetTensors:
    """Finds, by the keys of a checkpoint, the tensors of the module into which the saved tensors are loaded.

    Args:
        module: the module with the tensors.
        keeps_state_of: whether this rank's optimizers have the state of a parameter.
    """

    def __init__(self, module: LightningModule, keeps_state_of: Callable[[Tensor], bool]) -> None:
        self._tensors = dict(module.state_dict())
        self._tensors.update(module.named_parameters())
        self._not_kept = {name for name, parameter in module.named_parameters() if not keeps_state_of(parameter)}

    def __call__(self, key: str) -> Tensor | None:
        """Returns the tensor for a key: None if the module has none, one on the meta device if this rank needs none."""
        named = self._find(key)
        if named is None:
            return None
        name, tensor = named
        if key.startswith("optimizer_states.") and name in self._not_kept:
            return tensor.to("meta")
        return tensor

    def _find(self, key: str) -> tuple[str, Tensor] | None:
        # state_dict.<name>; optimizer_states.0.state.<name>.exp_avg; callbacks.EMA.average.module.<name>
        parts = key.split(".")
        for end in (len(parts), len(parts) - 1):
            for start in range(1, end):
                name = ".".join(parts[start:end])
                if name in self._tensors:
                    return name, self._tensors[name]
        return None


def _in_order_of(state: dict[str, Any], optimizer: Optimizer, names: list[str]) -> dict[str, Any]:
    """Converts an optimizer's state by parameter names to one by numbers, in the order of `optimizer`'s groups.

    Raises:
        CheckpointError: the groups have other parameters.
    """
    groups, position = [], 0
    for number, group in enumerate(optimizer.param_groups):
        group_names = names[position : position + len(group["params"])]
        position += len(group_names)
        saved = state["param_groups"][number] if number < len(state["param_groups"]) else {"params": []}
        if len(state["param_groups"]) != len(optimizer.param_groups) or set(saved["params"]) != set(group_names):
            missing, unexpected = (
                sorted(set(group_names) - set(saved["params"])),
                sorted(set(saved["params"]) - set(group_names)),
            )
            raise CheckpointError(
                f"The checkpoint's state of {type(optimizer).__name__} is for other parameters in group {number}:"
                f" missing {missing}, unexpected {unexpected}; {len(state['param_groups'])} group(s) there,"
                f" {len(optimizer.param_groups)} here."
            )
        groups.append({**saved, "params": group_names})
    return by_number({**state, "param_groups": groups}, names)
