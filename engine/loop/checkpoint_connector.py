"""Every way in which Lightning saves or loads goes through `engine.checkpoint`, under every strategy.

The dict that Lightning gathers, hooks included, stays what it is, and what Lightning leaves out is added under the key
``polyphase``: the random state and the place in the data of every rank. Where rank 0 has all of it, the strategy writes
one file, as it does under Lightning; where the state is sharded, and for snapshots, a directory is written, in which
parameters and optimizer state are as each rank holds them. Files of Lightning's own still load.
"""

import os
import time
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

# Lightning: how the hooks of a module are called.
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import (
    NAMES,
    CheckpointError,
    Saver,
    by_name,
    draw_alone,
    get_random_state,
    is_checkpoint,
    is_directory,
    load_checkpoint,
    numbered,
    read_manifest,
    set_random_state,
)
from ..checkpoint.manifest import Kind, Manifest, manifest_bytes
from ..checkpoint.ownership import is_torch_file, standing_at
from ..checkpoint.run_record import RunRecord
from ..checkpoint.single_file import MANIFEST_KEY, OURS
from ..checkpoint.store import check_may_replace, point
from ..checkpoint.tree import mapped, merged
from ..checkpoint.whole import names_in, part_of, read_file, refusal_of, write_file
from ..choices import CheckpointFormat
from ..compression import deal_residuals
from ..environment import restart_count
from ..host_group import num_ranks
from ..strategies import LayoutStrategy
from ..version import __version__
from .nonfinite import NonFiniteError
from .restoring import Templates, in_order_of, matching_accumulation, to_last_step, with_samples
from .run_history import AUTO, FRESH, RunHistory, Seen, check_may_start_afresh

__all__ = ["CheckpointConnector", "EngineIO"]

STRATEGY = "strategy"
"""Key under `OURS`, and in what each rank says, of what the strategy alone goes on with."""


class EngineIO(TorchCheckpointIO):
    """Lightning's files, written so that they are whole or not there, and our directories where there are some."""

    def __init__(self, saver: Saver) -> None:
        super().__init__()
        self._saver = saver
        self._has_checked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes one file.

        Raises:
            TypeError: for `storage_options`, as of Lightning's.
        """
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # says what it is for
            return
        write_file(checkpoint, str(path))
        if not self._has_checked:
            self._has_checked = True
            if (refusal := refusal_of(str(path))) is not None:
                rank_zero_warn(refusal)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens either kind, whole, on the CPU."""
        self._saver.finish()
        if is_directory(path):
            return load_checkpoint(path, weights_only=weights_only)
        if is_checkpoint(path):
            return read_file(path, weights_only, lazily=num_ranks() > 1)  # of which each takes a part
        return super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes either kind; a checkpoint not before its successor is there."""
        # Lightning: its launchers leave the weights for the first process in a file that is no whole checkpoint.
        if is_torch_file(path) and standing_at(path).kind != "ours":
            super().remove_checkpoint(path)
        else:
            self._saver.remove(str(path))


class CheckpointConnector(_CheckpointConnector):  # Lightning: Trainer._checkpoint_connector
    """Lightning's, with directories in place of files where the state is sharded.

    Args:
        trainer: whose state is saved.
        form: ``"file"``, ``"directory"``, or ``"auto"``: a directory where the state is sharded.
        in_background: save snapshots while training goes on.
        keeps_global_batch: where another number of processes resumes, change the accumulation to match.
    """

    trainer: Any

    def __init__(
        self, trainer: Trainer, *, in_background: bool, keeps_global_batch: bool, form: CheckpointFormat = "auto"
    ) -> None:
        super().__init__(trainer)
        self.saver = Saver()
        self.history = RunHistory(trainer, self.saver)
        """Which run this is."""
        self._in_background = in_background
        self._form = form
        self._keeps_global_batch = keeps_global_batch
        # Others, the resumption among them, may change it while training.
        self._accumulation_asked: int = trainer.accumulate_grad_batches
        self._random_state: dict[str, Any] | None = None
        self._draws_alone = False
        self.knows_place = False
        """Whether the checkpoint that was opened says where in the data it was."""
        strategy: Any = trainer.strategy
        # A user's own CheckpointIO writes what it always does, and so do Lightning's strategies with formats of theirs.
        self.is_portable = (
            trainer._accelerator_connector.checkpoint_io is None  # Lightning: the plugin that the user gave
            # Lightning: one that a registered strategy was given, and XLA's strategies, which refuse any but their own.
            and type(strategy._checkpoint_io) in (type(None), TorchCheckpointIO)
            and type(strategy).checkpoint_io is Strategy.checkpoint_io
            and (
                isinstance(strategy, LayoutStrategy)
                or (
                    isinstance(strategy, (SingleDeviceStrategy, DDPStrategy))
                    and type(strategy).save_checkpoint is Strategy.save_checkpoint
                )
            )
        )
        if form == "directory" and not self.is_portable:
            raise ValueError(
                "checkpoint_format='directory' is for checkpoints that the engine writes itself: leave it out with a"
                " CheckpointIO of your own, or a strategy that has a format of its own."
            )
        if form == "file" and self._is_sharded and not getattr(strategy, "gathers_state", True):
            raise ValueError(
                f"checkpoint_format='file' is not for strategy {strategy!r}, whose optimizer state no process gathers:"
                " leave it out, and turn a directory into a file with `polyphase ckpt export`."
            )
        if self.is_portable:
            strategy.checkpoint_io = EngineIO(self.saver)
            self.saver.ranks = getattr(strategy, "saving_ranks", None)

    # --- saving

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

        Raises:
            TypeError: `storage_options`, which only a `CheckpointIO` of the user's knows what to do with.
            CheckpointError: something that is no checkpoint of ours stands at `path`.
            NonFiniteError: the state is not to be saved.
        """
        path, as_directory = str(filepath), self._is_directory(kind)
        if as_directory and storage_options is not None:
            raise TypeError(
                "`save_checkpoint(storage_options=...)` is for a `CheckpointIO` of your own, given as a plugin; without"
                " one, name the storage by an fsspec URL as the path."
            )
        if not self._may_save(path):
            return
        strategy = self.trainer.strategy
        strategy.hands_out_shards = self._hands_out_shards = as_directory
        try:
            checkpoint = self.dump_checkpoint(bool(weights_only))
        finally:
            self._hands_out_shards = False
        about = self._about("weights" if weights_only else kind, checkpoint)
        if as_directory:
            self._save_directory(checkpoint, path, about, link=link, in_background=kind == "snapshot")
        else:
            self._save_file(checkpoint, filepath, about, storage_options)
            if link is not None and self.trainer.is_global_zero and (note := point(path, link)):
                rank_zero_warn(note)

    def _is_directory(self, kind: Kind) -> bool:
        return kind == "snapshot" or self._form == "directory" or (self._form == "auto" and self._is_sharded)

    @property
    def _is_sharded(self) -> bool:
        return getattr(self.trainer.strategy, "state_is_sharded", False)

    def _about(self, kind: Kind, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """What the manifest says."""
        return {
            "step": checkpoint["global_step"],
            "epoch": checkpoint["epoch"],
            "layout": self._layout,
            "world_size": self.trainer.world_size,
            "versions": {"polyphase": __version__, "lightning": lightning_version, "torch": str(torch.__version__)},
            "kind": kind,
            **self.history.about(),
        }

    def _save_file(
        self, checkpoint: dict[str, Any], filepath: Any, about: dict[str, Any], storage_options: Any
    ) -> None:
        """As Lightning does, by the strategy; all ranks learn whether it has worked."""
        path = str(filepath)
        name = path.rstrip("/").rsplit("/", 1)[-1]
        text = manifest_bytes(Manifest(name=name, time=time.time(), files={}, **about)).decode()
        ours = checkpoint.pop(OURS, {})  # to be the last: see `manifest_text`
        states = checkpoint.get("optimizer_states", [])
        if len(states) == len(self.trainer.optimizers) and all(map(_goes_by_number, states)):
            ours[NAMES] = [self._names(optimizer) for optimizer in self.trainer.optimizers] if states else []
        checkpoint[OURS] = {**ours, MANIFEST_KEY: text}
        error: Exception | None = None
        try:
            self.trainer.strategy.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
        except Exception as raised:
            error = raised
        failures = self.saver.gather(None if error is None else repr(error))
        if error is not None:
            raise error
        failed = [f"rank {rank} could not write: {said}" for rank, said in enumerate(failures) if said is not None]
        if failed:
            raise CheckpointError(f"The checkpoint {path} could not be saved: {'; '.join(failed)}.")
        self.saver.note_file(path, text)

    def _save_directory(
        self, checkpoint: dict[str, Any], path: str, about: dict[str, Any], *, link: str | None, in_background: bool
    ) -> None:
        trainer = self.trainer
        if trainer.data_rank:  # BatchNorm's statistics are each rank's own: those of the first count, as in evaluation
            for name in checkpoint["state_dict"].keys() & dict(trainer.lightning_module.named_buffers()).keys():
                checkpoint["state_dict"][name] = checkpoint["state_dict"][name].to("meta")
        if "optimizer_states" in checkpoint:
            names = [self._names(optimizer) for optimizer in trainer.optimizers]
            states = zip(checkpoint["optimizer_states"], names, strict=True)
            checkpoint["optimizer_states"] = [by_name(state, of_state) for state, of_state in states]
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
        """Whether the state is fit to be saved, and there is room for it at `path`; the ranks agree, by one exchange.

        False where the run has failed already: what it has failed of is not to be hidden.
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
        said = self.saver.gather(("" if poison is None else str(poison), taken))
        poisons = [each for each, _ in said if each]
        taken = next((text for _, text in said if text), "")
        if not poisons and not taken:
            return True
        if self.is_ending or (poisons and poison is None):  # another rank is about to raise it
            rank_zero_warn(f"{path} is not saved: {poisons[0] if poisons else taken}")
            return False
        if poison is not None:
            raise NonFiniteError(f"{path} is not saved: {poison}", poison.rank)
        raise CheckpointError(taken)

    _hands_out_shards = False
    """Whether a directory is being saved, to which each rank gives what it has."""

    @property
    def _state_is_spread(self) -> bool:
        return getattr(self.trainer.strategy, "state_is_spread", False)

    def _keeps_state_of(self, parameter: Tensor) -> bool:
        return not self._state_is_spread or self.trainer.strategy.keeps_state_of(parameter)

    @property
    def _is_training(self) -> bool:
        """Whether training will go on after this: then a snapshot need not be waited for."""
        trainer = self.trainer
        fits = trainer.state.fn == TrainerFn.FITTING and (trainer.training or trainer.validating)
        return fits and not self.is_ending

    is_ending = False
    """The run has ended or failed: what is saved now is waited for."""

    @property
    def _stopped_in_validation(self) -> bool:
        return self.is_ending and self.trainer.validating

    @property
    def _layout(self) -> dict[str, int]:
        """Sizes of the axes that are not 1."""
        return {axis: size for axis, size in self.trainer.layout.axes.items() if size > 1}

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        """Lightning's dict, with the progress as of the last whole step, and what it leaves out."""
        checkpoint = super().dump_checkpoint(weights_only)
        trainer = self.trainer
        if self._state_is_spread and not self._hands_out_shards and "optimizer_states" in checkpoint:
            # Lightning: Strategy.optimizer_state, one at a time, gives what this rank has.
            checkpoint["optimizer_states"] = self._collected(checkpoint["optimizer_states"])
        if weights_only or trainer.state.fn != TrainerFn.FITTING:
            return checkpoint
        checkpoint[OURS] = {
            "between_epochs": self._between_epochs,
            "between_steps": trainer.fit_loop.epoch_loop.is_between_steps,
            "in_validation": self._stopped_in_validation,
            "batches": trainer.fit_loop.epoch_loop.batches_done(),
            "world_size": trainer.world_size,
            "layout": self._layout,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "accumulation_asked": self._accumulation_asked,
            "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers],
            "run": self.history.run.as_dict(),
        }
        if isinstance(trainer.strategy, LayoutStrategy):
            checkpoint[OURS][STRATEGY] = trainer.strategy.shared_state()
        if not self._hands_out_shards:
            checkpoint[OURS]["ranks"] = self.saver.collect(self._of_rank())
        return checkpoint

    def _collected(self, states: list[Any]) -> list[Any]:
        """On rank 0, optimizers' states with what all ranks have of them."""
        everyones = self.saver.collect(states)
        return merged(everyones) if self.trainer.is_global_zero else states

    def _of_rank(self) -> dict[str, Any]:
        trainer = self.trainer
        loop = trainer.fit_loop.epoch_loop
        batches = 0 if self._between_epochs else loop.batches_done()
        hook = getattr(trainer.strategy, "comm_hook", None)
        random_state = loop.random_before_validation if self._stopped_in_validation else None
        if random_state is None and not self._between_epochs:
            random_state = loop.random_of_window
        strategy = trainer.strategy
        return {
            STRATEGY: strategy.state_of_rank() if isinstance(strategy, LayoutStrategy) else {},
            "random": random_state or get_random_state(),
            "data": trainer._data_connector.places.state_dict(batches),
            "compression": hook.state_dict() if hook is not None else {},
        }

    @property
    def _between_epochs(self) -> bool:
        """Whether the last epoch is over, or nothing of the next one is done yet."""
        epochs = self.trainer.fit_loop.epoch_progress.current
        return epochs.processed == epochs.ready or epochs.started < epochs.ready

    def _get_lightning_module_state_dict(self) -> dict[str, Tensor]:
        # Lightning: _CheckpointConnector._get_lightning_module_state_dict, by which a strategy gathers shards.
        if self._hands_out_shards:
            state = self.trainer.lightning_module.state_dict()
            return self.trainer.strategy.saved_state(state) if self._state_is_spread else state
        return super()._get_lightning_module_state_dict()

    def _names(self, optimizer: Optimizer) -> list[str]:
        """Names of the parameters of an optimizer, in the order of its groups."""
        names = {parameter: name for name, parameter in self.trainer.lightning_module.named_parameters()}
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [names.get(parameter, f"<parameter {i}>") for i, parameter in enumerate(parameters)]

    # --- loading

    def begin(self) -> None:
        """Called when the trainer begins to run."""
        self.is_ending = self._draws_alone = False

    def resume_start(self, checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
        """Opens a checkpoint, whose files are all checked before anything is changed."""
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
                read_manifest(checkpoint_path)  # says what is missing
            self._open_file(checkpoint_path, weights_only)
        if is_fit:
            self._begin_run(is_same)

    def _begin_run(self, is_same: bool) -> None:
        trainer = self.trainer
        trainer.fit_loop.epoch_loop.automatic_optimization.watch.begin_run()
        ours = (self._loaded_checkpoint or {}).get(OURS)
        # Of format 1, and of Lightning's own files, the run is not known; they are continued all the same.
        continues = (ours or {}).get("run") or ({} if self._loaded_checkpoint else None)
        self.history.begin(continues, is_same=is_same)
        self.history.record(
            {
                "accumulate_grad_batches": trainer.accumulate_grad_batches,
                "accumulation_asked": self._accumulation_asked,
                "world_size": trainer.world_size,
                "layout": self._layout,
            }
        )

    def _open_file(self, path: Any, weights_only: bool | None) -> None:
        """By the strategy, as Lightning does; of ours, each rank takes its part."""
        if path and self.is_portable:
            self.saver.check_file(str(path))
        if path and self.is_portable and self._is_sharded and is_checkpoint(path):
            # Lightning: ModelParallelStrategy.load_checkpoint would gather and deal what each takes here by itself.
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
                Templates(self.trainer.lightning_module, self._keeps_state_of),
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
                f"{type(trainer.strategy).__name__} has checkpoints of its own kind: turn {path} into a file of"
                " Lightning's first, with `polyphase ckpt export`."
            )
        needless = () if trainer.state.fn == TrainerFn.FITTING else ("optimizer_states",)
        template = Templates(trainer.lightning_module, self._keeps_state_of)
        self._loaded_checkpoint = numbered(
            self.saver.load(
                path, template, leave_out=needless, weights_only=weights_only, layout=self._layout, own=(STRATEGY,)
            )
        )
        self._ckpt_path = path

    def _resume_newest(self, seen: Seen, how: str, weights_only: bool | None) -> bool:
        """Opens the newest checkpoint that is not damaged, of the newest run; whether there is one.

        Raises:
            CheckpointError: there is none, but there are some that can't be read, or there were some.
        """
        folder = self.trainer.snapshots_path
        self._ckpt_path = None
        if how == FRESH and not restart_count():
            return False
        if seen.newer is None:
            for problem in seen.problems if seen.candidates else []:
                rank_zero_warn(f"{problem} It is passed over.")
            failures: list[str] = []
            for path in seen.candidates:
                try:
                    self._open(path, weights_only)
                except CheckpointError as damage:
                    failures.append(str(damage))
                    rank_zero_warn(f"{damage} An older one is taken, if there is one.")
                    continue
                rank_zero_info(f"resume='auto': goes on from {path}")
                return True
        else:
            failures = []
        if how == AUTO:
            check_may_start_afresh(folder, seen, failures)
            self._keep_global_batch(seen.record)
        return False

    def _keep_global_batch(self, record: RunRecord | None) -> None:
        """That of the same run, which was stopped before it could save anything."""
        if record is not None and self._keeps_global_batch:
            trainer = self.trainer
            asked = self._accumulation_asked
            trainer.accumulate_grad_batches = matching_accumulation(asked, trainer.data_size, record.batches)

    # Lightning: _CheckpointConnector._parse_ckpt_path, before there are any processes to agree with.
    def _parse_ckpt_path(self, state_fn: TrainerFn, ckpt_path: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            ckpt_path if ckpt_path in (AUTO, FRESH) else super()._parse_ckpt_path(state_fn, ckpt_path, *args, **kwargs)
        )

    def restore_model(self) -> None:
        """Loads the weights, after the module's hook has seen the checkpoint.

        Raises:
            RuntimeError: the module's parameters are others; lists those missing, unexpected and of another shape.
        """
        trainer = self.trainer
        if isinstance(trainer.precision_plugin, DoublePrecision):
            # Lightning converts after this: what is loaded into single precision would lose half of its digits.
            trainer.precision_plugin.convert_module(trainer.lightning_module)
        if not self._is_ours:
            super().restore_model()
            return
        call._call_lightning_module_hook(trainer, "on_load_checkpoint", self._loaded_checkpoint)
        module = trainer.lightning_module
        try:
            if self._is_sharded:  # Lightning: strategies with shards of their own take whole tensors there
                module.load_state_dict(self._loaded_checkpoint["state_dict"], strict=module.strict_loading)
            else:
                trainer.strategy.load_model_state_dict(self._loaded_checkpoint, strict=module.strict_loading)
        except RuntimeError as mismatch:
            raise RuntimeError(f"The checkpoint {self._ckpt_path} does not fit the module. {mismatch}") from None

    def restore_loops(self) -> None:
        """Restores the progress, and remembers what is to be restored when the data is there."""
        ours = self._loaded_checkpoint.get(OURS)
        if not ours or "batches" not in ours or self.trainer.state.fn != TrainerFn.FITTING:
            super().restore_loops()
            return
        left = to_last_step(self._loaded_checkpoint["loops"]["fit_loop"], ours)
        super().restore_loops()
        ranks, trainer = ours["ranks"], self.trainer
        if self._keeps_global_batch:
            trainer.accumulate_grad_batches = matching_accumulation(self._accumulation_asked, trainer.data_size, ours)
        trainer.fit_loop.epoch_loop.left_of_batch = left
        places = trainer._data_connector.places
        self.knows_place = places.load_state_dict([ranks[rank]["data"] for rank in with_samples(ours)])
        # Lightning: Trainer.estimated_stepping_batches, asked for in `configure_optimizers`, has prepared the loaders
        # already, at the start of their order.
        trainer.fit_loop._combined_loader = None
        self._restore_compression([rank["compression"] for rank in ranks], ours.get("layout", {}))
        drawing, here = with_samples(ours), trainer.data_rank
        if ours.get("layout", {}) == self._layout:
            self._random_state = ranks[trainer.global_rank]["random"]
        else:  # those that share samples draw the same
            self._random_state = ranks[drawing[here]]["random"] if here < len(drawing) else None
        if len(ranks) != trainer.world_size:
            rank_zero_info(
                f"The checkpoint has the random state of {len(ranks)} rank(s), this run has {trainer.world_size}:"
                " dropout and the like will draw other numbers than an uninterrupted run's."
            )

    def _restore_compression(self, states: list[dict[str, Any]], saved_layout: dict[str, int]) -> None:
        """Hands each rank's hook what it had not sent yet; that of another layout's ranks, the mean over them."""
        trainer = self.trainer
        hook = getattr(trainer.strategy, "comm_hook", None)
        unsent = any(state.get("residuals") for state in states)
        if hook is None or not states[0]:
            if unsent:
                rank_zero_warn(
                    "The checkpoint was saved under another `compression`: what the hook had not sent yet is lost."
                )
            return
        if (of := states[0].get("of", hook.of)) != hook.of:
            if unsent:
                rank_zero_warn(
                    f"The checkpoint was saved under a strategy that averages {of}s, this one averages {hook.of}s, of"
                    " another size: what the hook had not sent yet is lost."
                )
            return
        layout = trainer.layout
        own = states[min(trainer.global_rank, len(states) - 1)]
        if len(states) != trainer.world_size or saved_layout.get("shard", 1) != layout.shard:
            rank_zero_info(
                f"What the compression of {len(states)} rank(s) had not sent yet is dealt to {trainer.world_size}: each"
                " gets the mean, so what is owed to the weights stays the same."
            )
            shares = deal_residuals(
                [state.get("residuals", {}) for state in states],
                {name: parameter.shape for name, parameter in trainer.lightning_module.named_parameters()},
                saved_shards=saved_layout.get("shard", 1),
                shards=layout.shard,
                rank=trainer.global_rank,
            )
            own = {**states[0], "residuals": shares}
        hook.load_state_dict(own)

    def restore_optimizers_and_schedulers(self) -> None:
        """Restores both; of sharded optimizers too, which Lightning leaves to its strategy."""
        super().restore_optimizers_and_schedulers()
        if self._is_ours and not self.trainer.strategy.lightning_restore_optimizer:
            self.restore_optimizers()
        self._restore_strategy()

    def _restore_strategy(self) -> None:
        ours, trainer = self._loaded_checkpoint.get(OURS, {}), self.trainer
        if not isinstance(trainer.strategy, LayoutStrategy) or STRATEGY not in ours:
            return
        is_same = (ours["world_size"], ours["layout"]) == (trainer.world_size, self._layout)
        of_rank = ours["ranks"][trainer.global_rank][STRATEGY] if is_same else {}
        trainer.strategy.load_state(ours[STRATEGY], of_rank)

    def restore_optimizers(self) -> None:
        """Restores the optimizers' state by the names of their parameters.

        Raises:
            CheckpointError: other optimizers, or other parameters in their groups.
        """
        if not self._is_ours:
            super().restore_optimizers()
            return
        saved, ours = self._loaded_checkpoint["optimizer_states"], self._loaded_checkpoint.get(OURS, {})
        optimizers = self.trainer.optimizers
        then, now = ours.get("optimizers"), [type(optimizer).__name__ for optimizer in optimizers]
        if then is not None and then != now:
            raise CheckpointError(
                f"The checkpoint {self._ckpt_path} has the state of {', '.join(then) or 'no optimizer'}, but"
                f" configure_optimizers gives {', '.join(now) or 'none'}: use the same, or load the weights alone with"
                " load_from_checkpoint."
            )
        for optimizer, state, names in zip(optimizers, saved, self._loaded_checkpoint[NAMES], strict=True):
            named = by_name(state, names)
            named["state"] = {name: each for name, each in named["state"].items() if not _is_elsewhere(each)}
            optimizer.load_state_dict(in_order_of(named, optimizer, self._names(optimizer)))

    def resume_end(self) -> None:
        """Called by Lightning when all is restored."""
        super().resume_end()
        if self._between_epochs:
            self.restore_random_state()  # the next epoch's loader draws from it

    def restore_random_state(self) -> None:
        """Sets the random state of the checkpoint, once; called before the first batch."""
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None

    def draw_alone(self) -> None:
        """Has this rank draw random numbers of its own; called before the iterator of its data seeds its workers."""
        if not self._draws_alone:
            self._draws_alone = True
            draw_alone(self.trainer.data_rank)  # those that share samples draw the same

    @property
    def _is_ours(self) -> bool:
        return self.is_portable and NAMES in self._loaded_checkpoint


def _is_elsewhere(state: dict[str, Any]) -> bool:
    """Whether a parameter's state was not read, since only other ranks need it."""
    return any(isinstance(value, Tensor) and value.is_meta for value in state.values())


def _goes_by_number(state: Any) -> bool:
    """Whether an optimizer's state is as torch's optimizers have it."""
    return type(state) is dict and type(state.get("state")) is dict and "param_groups" in state


def _is_foreign(path: Any) -> bool:
    """Whether `path` is a folder that neither we nor Lightning wrote."""
    return os.path.isdir(path) and not os.path.exists(os.path.join(path, "meta.pt"))  # Lightning: its sharded ones
