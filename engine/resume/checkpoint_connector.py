"""The trainer's connector that loads checkpoints, in place of Lightning's, under every strategy.

It loads the engine's checkpoints and Lightning's own files. `saving` has the part that saves.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy

# Lightning: how the hooks of a module are called.
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import (
    NAMES,
    CheckpointError,
    by_name,
    by_number,
    is_checkpoint,
    is_directory,
    read_manifest,
    seed_rank_stream,
    set_random_state,
    to_lightning,
)
from ..checkpoint.checked_io import resolve
from ..checkpoint.manifest import damage
from ..checkpoint.run_record import RunRecord
from ..checkpoint.single_file import OURS
from ..checkpoint.state_tree import mapped
from ..checkpoint.whole import names_in, part_of
from ..compression import reshard_residuals
from ..distributed.environment import restart_count
from ..distributed.object_group import num_ranks
from ..initialization import check_stored, has_meta_tensors, materialize, read_stored
from ..strategies import adapt, capabilities_of
from ..strategies.averages import begin_averages, has_own_schedule
from .run_history import AUTO, FRESH, Seen, check_may_start_afresh
from .saving import STRATEGY, SavingConnector

__all__ = ["CheckpointConnector", "matching_accumulation", "to_last_step", "with_samples"]


class CheckpointConnector(SavingConnector):  # Lightning: Trainer._checkpoint_connector
    """Loads the checkpoints of a `SavingConnector`, and of Lightning."""

    _engine_state: dict[str, Any]
    """The engine's own entry of the checkpoint that was opened, under the key `OURS`."""
    _saved_names: list[list[str]] | None = None
    """The parameter names of each optimizer in the opened checkpoint; None if it has no names."""

    def begin(self) -> None:
        """Resets the state of the last run; called when the trainer begins to run."""
        self.is_ending = self._draws_alone = self.saver.has_failed = False
        self.state_of_workers = None

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Checks all files of a checkpoint and opens it; does not change the module yet."""
        self.saver.finish()
        is_fit = self.trainer.state.fn == TrainerFn.FITTING
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
        opened = read_manifest(str(self._ckpt_path)) if is_same and trainer.is_global_zero else None
        if opened is None or not 0 <= trainer.max_steps <= opened.step:  # otherwise no step would be logged again
            loggers, step = (None, 0) if opened is None else (opened.loggers, opened.step)
            self.logs.take_back(loggers, step, waits=bool(self._engine_state.get("cut_short")))
        trainer.fit_loop.epoch_loop.automatic_optimization.watch.begin_run()
        trainer.fit_loop.is_cut_short = False
        # Lightning's own files have no run id; they can be continued nevertheless.
        continues = self._engine_state.get("run") or ({} if self._loaded_checkpoint else None)
        self.history.begin(continues, is_same=is_same)
        self.history.record(
            {
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "accumulation_asked": self._accumulation_asked,
                "world_size": trainer.world_size,
                "layout": self._layout,
            },
            self.logs.positions(),
        )
        self.logs.mark(self.history.run.id)

    def restore_callbacks(self) -> None:
        """Restores the callbacks' state, without paths of others' files."""
        super().restore_callbacks()
        if not self._loaded_checkpoint or self.trainer.state.fn != TrainerFn.FITTING:
            return
        lineage = (self._engine_state.get("run") or {}).get("lineage", ())
        for callback in self.trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                _forget_others(callback, self.saver.agree(partial(_others, callback, lineage)))

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
                _TargetTensors(self.trainer.lightning_module, self._keeps_state_of),
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
        template = _TargetTensors(trainer.lightning_module, self._keeps_state_of)
        self._loaded_checkpoint = to_lightning(
            self.saver.load(
                path, template, leave_out=needless, weights_only=weights_only, layout=self._layout, own=(STRATEGY,)
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
        folder = self.trainer.snapshots_path
        self._ckpt_path = None
        if how == FRESH and not restart_count():
            return False
        if seen.newer is None:
            for problem in seen.problems if seen.candidates else []:
                rank_zero_warn(f"{problem} It is skipped.")
            failures: list[str] = []
            damaged: list[str] = []
            for path in seen.candidates:
                try:
                    self._open(path, weights_only)
                    if OURS not in (self._loaded_checkpoint or {}):
                        raise damage(path, "it was changed after it was saved")
                except CheckpointError as error:
                    failures.append(str(error))
                    damaged += [path] if error.is_damage else []
                    rank_zero_warn(f"{error} An older one is used, if there is one.")
                    continue
                self.history.set_aside(damaged)
                rank_zero_info(f"resume='auto': continues from {path}")
                return True
        else:
            failures = []
        if how == AUTO:
            check_may_start_afresh(folder, seen, failures)
            self._keep_global_batch(seen.record)
        return False

    def _keep_global_batch(self, record: RunRecord | None) -> None:
        """Keeps the global batch of the same run, if it was stopped before it saved a checkpoint."""
        if record is not None and self._keeps_global_batch:
            trainer = self.trainer
            asked = self._accumulation_asked
            trainer.accumulate_grad_batches = matching_accumulation(asked, trainer.data_size, record.batches)

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
        if not capabilities_of(trainer.strategy).splits_module and has_meta_tensors(trainer.lightning_module):
            materialize(trainer.lightning_module)
        read_stored(trainer.lightning_module)  # the parameters that no strategy has sharded and read before
        if isinstance(trainer.precision_plugin, DoublePrecision):
            # Lightning converts the module after this, when values loaded into fp32 have lost half of their digits.
            trainer.precision_plugin.convert_module(trainer.lightning_module)
        if not self._is_ours:
            super().restore_model()
            return
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", self._loaded_checkpoint)
        module = trainer.lightning_module
        try:
            if self._is_sharded:  # Lightning: in load_model_state_dict its sharding strategies expect whole tensors
                module.load_state_dict(self._loaded_checkpoint["state_dict"], strict=module.strict_loading)
            else:
                trainer.strategy.load_model_state_dict(self._loaded_checkpoint, strict=module.strict_loading)
        except RuntimeError as mismatch:
            raise RuntimeError(f"The checkpoint {self._ckpt_path} does not fit the module. {mismatch}") from None

    def restore_loops(self) -> None:
        """Restores the loops' progress, and keeps the state that is restored when the training data is prepared."""
        engine_state = self._engine_state
        if "batches" not in engine_state or self.trainer.state.fn != TrainerFn.FITTING:
            if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING:
                _end_last_epoch(self._loaded_checkpoint["loops"]["fit_loop"], self.trainer.fit_loop.max_epochs)
            super().restore_loops()
            return
        pending = to_last_step(self._loaded_checkpoint["loops"]["fit_loop"], engine_state)
        super().restore_loops()
        ranks, trainer = engine_state["ranks"], self.trainer
        if self._keeps_global_batch:
            asked = self._accumulation_asked
            trainer.accumulate_grad_batches = matching_accumulation(asked, trainer.data_size, engine_state)
        trainer.fit_loop.epoch_loop.pending_batch_work = pending
        data_position, fit_loop = trainer._data_connector.data_position, trainer.fit_loop
        fit_loop.loaders_made_in_epoch = engine_state["loaders_of_epoch"]
        fit_loop.resumes_between_epochs = engine_state["between_epochs"]
        fit_loop.epoch_loop.val_loop.loaders_made_in_epoch = engine_state["validation_loaders_of_epoch"]
        # A hook makes new loaders, without the state of the former ones; a loader that was passed to `fit` stays.
        are_new = engine_state["between_epochs"] and fit_loop.needs_new_loaders and fit_loop._data_source.is_module()
        states = [ranks[rank]["data"] for rank in with_samples(engine_state)]
        self.knows_data_position = data_position.load_state_dict(states, are_new=are_new)
        fit_loop.has_restored_position = True
        self._restore_compression([rank["compression"] for rank in ranks], engine_state["layout"])
        drawing, data_rank = with_samples(engine_state), trainer.data_rank
        if engine_state["layout"] == self._layout:
            self._random_state = ranks[trainer.global_rank]["random"]
        else:  # ranks that share samples have the same random state
            self._random_state = ranks[drawing[data_rank]]["random"] if data_rank < len(drawing) else None
        if len(ranks) != trainer.world_size:
            rank_zero_info(
                f"The checkpoint has the random state of {len(ranks)} rank(s), this run has {trainer.world_size}:"
                " dropout and the like will draw other numbers than an uninterrupted run's."
            )

    def _restore_compression(self, states: list[dict[str, Any]], saved_layout: dict[str, int]) -> None:
        """Restores the residuals of each rank's comm hook; with another layout, each rank gets the mean of all."""
        trainer = self.trainer
        hook = adapt(trainer.strategy).comm_hook
        unsent = any(state.get("residuals") for state in states)
        if hook is None or not states[0]:
            if unsent:
                rank_zero_warn("The checkpoint was saved under another `compression`: the unsent residuals are lost.")
            return
        if (quantity := states[0].get("of", hook.quantity)) != hook.quantity:
            if unsent:
                rank_zero_warn(
                    f"The checkpoint was saved under a strategy that averages {quantity}s, this one averages"
                    f" {hook.quantity}s, of another size: the unsent residuals are lost."
                )
            return
        layout = trainer.layout
        hook_state = states[min(trainer.global_rank, len(states) - 1)]
        if len(states) != trainer.world_size or saved_layout.get("shard", 1) != layout.shard:
            rank_zero_info(
                f"The unsent residuals of {len(states)} rank(s) are redistributed to {trainer.world_size}: each gets"
                " the mean, so the pending update of the weights stays the same."
            )
            shares = reshard_residuals(
                [state.get("residuals", {}) for state in states],
                {name: parameter.shape for name, parameter in trainer.lightning_module.named_parameters()},
                saved_shards=saved_layout.get("shard", 1),
                shards=layout.shard,
                rank=trainer.global_rank,
            )
            hook_state = {**states[0], "residuals": shares}
        hook.load_state_dict(hook_state)

    def restore_training_state(self) -> None:
        """Restores what training changes; called when the module and its optimizers are there, also by new runs."""
        trainer, trained = self.trainer, self.trained_parameters
        if trainer.state.fn == TrainerFn.FITTING:
            saved = self._engine_state.get("trained", {}) if self._loaded_checkpoint else {}
            trained.begin(trainer.lightning_module, trainer.optimizers, saved)
            trained.restore_flags(trainer.lightning_module)
            begin_averages(trainer)
        super().restore_training_state()

    def restore_optimizers_and_schedulers(self) -> None:
        """Restores optimizers and schedulers; also sharded optimizers, which Lightning leaves to its strategies."""
        super().restore_optimizers_and_schedulers()
        if self._is_ours and self._is_sharded and not self.trainer.strategy.lightning_restore_optimizer:
            self.restore_optimizers()
        self._restore_strategy()

    def restore_lr_schedulers(self) -> None:
        """Restores schedulers, but for that of `StochasticWeightAveraging`, which takes the place of the module's."""
        if any(has_own_schedule(callback) for callback in self.trainer.callbacks):
            # Lightning: the callback does this in `on_fit_start`, before which it has its state under some strategies.
            self.trainer.lr_scheduler_configs.clear()
        super().restore_lr_schedulers()

    def _restore_strategy(self) -> None:
        engine_state, trainer = self._engine_state, self.trainer
        if STRATEGY not in engine_state:
            return
        is_same = (engine_state["world_size"], engine_state["layout"]) == (trainer.world_size, self._layout)
        of_rank = engine_state["ranks"][trainer.global_rank][STRATEGY] if is_same else {}
        adapt(trainer.strategy).load_state(engine_state[STRATEGY], of_rank)

    def restore_optimizers(self) -> None:
        """Restores the optimizers' state by the names of their parameters.

        Raises:
            CheckpointError: the checkpoint has other optimizers, or their groups have other parameters.
        """
        if not self.is_portable or self._saved_names is None:
            super().restore_optimizers()
            return
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
        module, trained = self.trainer.lightning_module, self.trained_parameters
        for number, (optimizer, state, names) in enumerate(zip(optimizers, saved, self._saved_names, strict=True)):
            named = by_name(state, names)
            trained.restore_groups(module, number, optimizer, named["param_groups"])
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
        if self._between_epochs:
            self.restore_random_state()  # the next epoch's loader draws from it

    def restore_random_state(self) -> None:
        """Sets the random state of the checkpoint, once; called before the first batch."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def seed_rank_stream(self) -> None:
        """Gives this rank its own random stream; called before the iterator of its data seeds its workers."""
        if not self._draws_alone:
            self._draws_alone = True
            seed_rank_stream(self.trainer.data_rank)  # ranks that share samples draw the same numbers

    @property
    def _is_ours(self) -> bool:
        return self.is_portable and self._saved_names is not None


def _others(callback: ModelCheckpoint, lineage: Sequence[str]) -> dict[str, str]:
    """Returns the paths in the restored state that the callback must not remove, each with the reason."""
    paths = {callback.best_model_path, callback.kth_best_model_path, callback.last_model_path, *callback.best_k_models}
    folder = str(callback.dirpath)
    return {path: reason for path in sorted(paths - {""}) if (reason := _not_its_own(path, folder, lineage))}


def _not_its_own(path: str, folder: str, lineage: Sequence[str]) -> str:
    """Returns the reason why a run must not remove the checkpoint `path` from `folder`; "" if it may."""
    fs, fs_path = resolve(path)
    if isinstance(fs, LocalFileSystem):
        if Path(folder).absolute() not in Path(path).absolute().parents:
            return ""  # Lightning: ModelCheckpoint._should_remove_checkpoint; it does not resolve ".." and links
        is_inside = Path(folder).resolve() in Path(fs_path).resolve().parents
    else:
        is_inside = path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")
    if not is_inside:
        return f"is not in its folder {folder}"
    try:
        manifest = read_manifest(path) if is_checkpoint(path) else None
    except CheckpointError:
        return ""
    return "" if manifest is None or manifest.run in lineage else f"was saved by another run ({manifest.run})"


def _forget_others(callback: ModelCheckpoint, others: dict[str, str]) -> None:
    for path, reason in others.items():
        rank_zero_warn(f"The checkpoint names {path} for ModelCheckpoint, but it {reason}: it is never removed.")
        callback.best_k_models.pop(path, None)
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        if getattr(callback, name) in others:
            setattr(callback, name, "")


def _is_elsewhere(state: dict[str, Any]) -> bool:
    """Whether a parameter's optimizer state was not read, as only other ranks need it."""
    return any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _is_foreign(path: Any) -> bool:
    """Whether `path` is a folder that neither the engine nor Lightning has written."""
    return os.path.isdir(path) and not os.path.exists(os.path.join(path, "meta.pt"))  # Lightning: its sharded ones


# --- parts of a saved state
# Adapts the content of a checkpoint to the run that opens it.


def to_last_step(loops: dict[str, Any], engine_state: dict[str, Any]) -> Literal["end", "nothing"] | None:
    """Sets the state of Lightning's fit loop, whichever hook has saved it, to the end of the last optimizer step.

    Args:
        loops: the state, changed in place.
        engine_state: the checkpoint's entry ``polyphase``.

    Returns:
        The work that remains for the batch of that step: ``"end"``, everything that follows a batch, such as
        validation; ``"nothing"``; or None, if Lightning determines it.
    """
    progress = loops["epoch_loop.batch_progress"]
    pending: Literal["end", "nothing"] | None = "nothing" if engine_state["between_steps"] else None
    if engine_state["cut_short"]:
        for epochs in loops["epoch_progress"].values():
            epochs["processed"] = epochs["completed"] = epochs["started"] - 1
    if engine_state["between_epochs"]:
        _begin_next(progress)
        for epochs in loops["epoch_progress"].values():
            epochs["completed"] = epochs["processed"]
    elif {*progress["current"].values()} != {engine_state["batches"]}:
        # Batches that no optimizer step has used are trained on again.
        pending = "end" if progress["current"]["ready"] == engine_state["batches"] else "nothing"
        progress["is_last_batch"] &= pending == "end"
        total = progress["total"]["ready"] - progress["current"]["ready"] + engine_state["batches"]
        progress["current"] = dict.fromkeys(progress["current"], engine_state["batches"])
        progress["total"] = dict.fromkeys(progress["total"], total)
    if engine_state["in_validation"]:
        # An interrupted validation starts again. A batch that failed counts as tried, as Lightning counts it.
        validation = loops["epoch_loop.val_loop.batch_progress"]
        done = validation["current"]["completed"]
        validation["total"] = {field: count - done for field, count in validation["total"].items()}
        _begin_next(validation)
        pending = "end"
    return pending


def _end_last_epoch(loops: dict[str, Any], max_epochs: int) -> None:
    """Has Lightning's fit loop begin an epoch, if the last one is over, in a checkpoint without the engine's state.

    With `max_steps` Lightning would train on the last batch's successor, which the epoch does not have. A run that has
    reached `max_epochs` (-1: no limit) begins none.
    """
    progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    is_over = epochs["ready"] == epochs["processed"] == epochs["completed"] > 0
    if is_over and progress.get("is_last_batch") and not 0 <= max_epochs <= epochs["processed"]:
        _begin_next(progress)


def _begin_next(progress: dict[str, Any]) -> None:
    progress["current"] = dict.fromkeys(progress["current"], 0)
    progress["is_last_batch"] = False


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


def with_samples(engine_state: dict[str, Any]) -> range:
    """Returns the ranks of the saved run that had different samples; of ranks with the same samples, the first."""
    layout = engine_state["layout"]
    num_sharing = layout.get("tp", 1) * layout.get("cp", 1)
    return range(0, engine_state["world_size"] // layout.get("pp", 1), num_sharing)


def matching_accumulation(asked: int, num_ranks: int, engine_state: dict[str, Any]) -> int:
    """Returns the accumulation that gives this run the global batch of the run that saved the checkpoint.

    Args:
        asked: the value of this run's flag. If it differs from the flag of the saved run, it is returned.
        num_ranks: number of ranks with different samples.
        engine_state: the checkpoint's entry ``polyphase``.
    """
    then, per_rank = len(with_samples(engine_state)), engine_state["accumulate_grad_batches"]
    if asked != engine_state["accumulation_asked"]:
        return asked
    matching, rest = divmod(per_rank * then, num_ranks)
    if rest:
        rank_zero_warn(
            f"{num_ranks} rank(s) continue where {then} stopped, and no accumulation gives the same global batch:"
            f" {per_rank * then} micro-batches per step then, {asked * num_ranks} now."
        )
        return asked
    if matching != asked:
        rank_zero_info(
            f"{num_ranks} rank(s) continue where {then} stopped: accumulate_grad_batches={matching} in place of"
            f" {asked} keeps the global batch."
        )
    return matching
