"""The parts of a run that Lightning does not save: an object for each, with its save and its restore side by side.

| part | all ranks share | each rank has | is restored |
|---|---|---|---|
| `_GlobalBatch` | accumulation, number of ranks, layout | | with the loops |
| `_Place` | the epoch, the batches that steps have used | its place in the data | with the loops |
| `_Residuals` | | what compression has not sent | with the loops |
| `_RandomState` | | random numbers | chosen with the loops, set before the first batch |
| `_Norms` | | the norms of gradients so far | before the first batch |
| `_TrainedParameters` | what callbacks have frozen, unfrozen and added | | with the module, and with the optimizers |
| `_StrategyState` | the strategy's own state | the strategy's own state | after the optimizers |

Lightning's connector calls the methods of `RunState` in the order of the last column, see `checkpoint_connector.py`.
"""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from .._compat.torch import _BatchNorm
from ..checkpoint import get_random_state, seed_rank_stream, set_random_state
from ..checkpoint.content import VERSION
from ..compression import reshard_residuals

__all__ = [
    "STRATEGY",
    "RunState",
    "end_last_epoch",
    "to_last_step",
]

STRATEGY = "strategy"
"""Key of the strategy's own state, among what all ranks share and in what each rank has."""

_Saved = dict[str, Any]
"""The engine's entry of the checkpoint that is opened: what all ranks share, and under ``ranks`` what each rank has."""


class RunState:
    """The parts of a run, in the order in which they are restored.

    Args:
        trainer: the trainer of the run.
        keeps_global_batch: change the accumulation to keep the global batch, if a different number of ranks resumes.
    """

    def __init__(self, trainer: Any, *, keeps_global_batch: bool) -> None:
        self.global_batch = _GlobalBatch(trainer, keeps=keeps_global_batch)
        self.place = _Place(trainer)
        self.residuals = _Residuals(trainer)
        self.random = _RandomState(trainer, self.place)
        self.norms = _Norms(trainer)
        self.trained = _TrainedParameters(trainer)
        self.strategy = _StrategyState(trainer)
        self._trainer = trainer

    def shared(self) -> dict[str, Any]:
        """Returns what all ranks share."""
        return {
            "version": VERSION,
            **self.global_batch.shared(),
            **self.place.shared(),
            "optimizers": [type(optimizer).__name__ for optimizer in self._trainer.optimizers],
            "trained": self.trained.shared(),
            STRATEGY: self.strategy.shared(),
        }

    def of_rank(self) -> dict[str, Any]:
        """Returns what only this rank has."""
        return {
            STRATEGY: self.strategy.of_rank(),
            "random": self.random.of_rank(),
            "data": self.place.of_rank(),
            "compression": self.residuals.of_rank(),
            **self.norms.of_rank(),
        }

    def restore_with_loops(self, saved: _Saved) -> None:
        """Restores what the loops need; called when Lightning's loops are restored, before the data is prepared."""
        self.global_batch.restore(saved)
        self.place.restore(saved)
        self.residuals.restore(saved)
        self.random.restore(saved)
        self.norms.restore(saved)


class _GlobalBatch:
    """The samples of an optimizer step: ranks times accumulation times batch."""

    def __init__(self, trainer: Any, *, keeps: bool) -> None:
        self._trainer, self._keeps = trainer, keeps
        # The trainer's own value may change during training, for example when a run is resumed.
        self._asked: int = trainer.accumulate_grad_batches

    def shared(self) -> dict[str, Any]:
        return {
            "world_size": self._trainer.world_size,
            "layout": self._trainer.layout.split_axes,
            "accumulate_grad_batches": self._trainer.accumulate_grad_batches,
            "accumulation_asked": self._asked,
        }

    def restore(self, saved: _Saved) -> None:
        """Changes the accumulation, if it can keep the global batch of the run that saved `shared`."""
        if self._keeps:
            trainer = self._trainer
            trainer.accumulate_grad_batches = _matching_accumulation(self._asked, trainer.data_size, saved)


class _Place:
    """The place of a run in its epochs, its batches and its data."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.is_known = False
        """Whether the checkpoint that was opened has the position in the data."""

    def shared(self) -> dict[str, Any]:
        fit_loop = self._trainer.fit_loop
        epoch = fit_loop.epoch_loop
        # Lightning: minus infinity before the first loaders of a validation.
        validation_epoch = epoch.val_loop._last_val_dl_reload_epoch
        return {
            "between_epochs": self.is_between_epochs,
            "between_steps": epoch.is_between_steps or self._is_cut_short,
            "cut_short": self._is_cut_short,
            "in_validation": self.stopped_in_validation,
            "batches": epoch.batches_done(),
            "loaders_of_epoch": max(0, fit_loop._last_train_dl_reload_epoch),
            "validation_loaders_of_epoch": None if validation_epoch < 0 else int(validation_epoch),
        }

    def of_rank(self) -> dict[str, Any]:
        begins = self.is_between_epochs
        batches = 0 if begins else self._trainer.fit_loop.epoch_loop.batches_done()
        position = self._trainer._data_connector.data_position
        return position.state_dict(batches, begins=begins, is_cut_short=self._is_cut_short)

    def restore(self, saved: _Saved) -> None:
        """Restores the place in the data; the loops' own progress is restored by Lightning, see `to_last_step`."""
        fit_loop: Any = self._trainer.fit_loop
        fit_loop.loaders_made_in_epoch = saved["loaders_of_epoch"]
        fit_loop.resumes_between_epochs = saved["between_epochs"]
        fit_loop.epoch_loop.val_loop.loaders_made_in_epoch = saved["validation_loaders_of_epoch"]
        # A hook makes new loaders, without the state of the former ones; a loader that was passed to `fit` stays.
        are_new = saved["between_epochs"] and fit_loop.needs_new_loaders and fit_loop._data_source.is_module()
        states = [saved["ranks"][rank]["data"] for rank in _with_samples(saved)]
        self.is_known = self._trainer._data_connector.data_position.load_state_dict(states, are_new=are_new)
        fit_loop.has_restored_position = True

    @property
    def is_between_epochs(self) -> bool:
        """Whether the last epoch is over, or the next one has trained on no batch yet."""
        epochs = self._trainer.fit_loop.epoch_progress.current
        return (epochs.processed == epochs.ready and not self._is_cut_short) or epochs.started < epochs.ready

    @property
    def stopped_in_validation(self) -> bool:
        """Whether the run has failed in a validation."""
        return self._trainer._checkpoint_connector.is_ending and self._trainer.validating

    @property
    def _is_cut_short(self) -> bool:
        """Whether `max_steps` has ended the last epoch before its last batch: a longer run continues in it."""
        fit_loop = self._trainer.fit_loop
        epochs = fit_loop.epoch_progress.current
        return fit_loop.is_cut_short and epochs.processed == epochs.ready


class _Residuals:
    """The parts of gradients that compression has not sent yet."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def of_rank(self) -> dict[str, Any]:
        hook = self._trainer.engine_strategy.comm_hook
        return {} if hook is None else hook.state_dict()

    def restore(self, saved: _Saved) -> None:
        """Restores the residuals of each rank's comm hook; with another layout, each rank gets the mean of all."""
        trainer = self._trainer
        states = [rank["compression"] for rank in saved["ranks"]]
        hook = trainer.engine_strategy.comm_hook
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
        saved_shards, shards = saved["layout"].get("shard", 1), trainer.layout.shard
        hook_state = states[min(trainer.global_rank, len(states) - 1)]
        if len(states) != trainer.world_size or saved_shards != shards:
            rank_zero_info(
                f"The unsent residuals of {len(states)} rank(s) are redistributed to {trainer.world_size}: each gets"
                " the mean, so the pending update of the weights stays the same."
            )
            shares = reshard_residuals(
                [state.get("residuals", {}) for state in states],
                {name: parameter.shape for name, parameter in trainer.lightning_module.named_parameters()},
                saved_shards=saved_shards,
                shards=shards,
                rank=trainer.global_rank,
            )
            hook_state = {**states[0], "residuals": shares}
        hook.load_state_dict(hook_state)


class _Norms:
    """The norms of gradients by which ``skip_spikes`` judges a step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._saved: dict[int, list[float]] = {}
        self._norms: dict[int, Tensor] = {}

    def of_rank(self) -> dict[str, Any]:
        return {"norms": {number: of_one.tolist() for number, of_one in self._norms.items()}} if self._norms else {}

    def restore(self, saved: _Saved) -> None:
        """Chooses those that `set` sets: of another layout, rank 0's."""
        ranks = saved["ranks"]
        rank = self._trainer.global_rank if saved["layout"] == self._trainer.layout.split_axes else 0
        self._saved = ranks[rank].get("norms", {})

    def set(self, norms: dict[int, Tensor]) -> None:
        """Puts those of the checkpoint, once, into `norms`, which a run changes and a checkpoint gets."""
        saved, self._saved, self._norms = self._saved, {}, norms
        device = self._trainer.strategy.root_device
        norms.update({number: torch.tensor(of_one, device=device) for number, of_one in saved.items()})


class _RandomState:
    """The random numbers of each rank: they are set just before the first batch, since set-up draws some."""

    def __init__(self, trainer: Any, place: _Place) -> None:
        self._trainer, self._place = trainer, place
        self._saved: dict[str, Any] | None = None
        self._draws_alone = False

    def of_rank(self) -> dict[str, Any]:
        """Returns the state at the point that is resumed: of a window or a validation that is repeated, its start."""
        epoch = self._trainer.fit_loop.epoch_loop
        state = epoch.rng_state_before_validation if self._place.stopped_in_validation else None
        if state is None and not self._place.is_between_epochs:
            state = epoch.rng_state_of_window
        return state or get_random_state()

    def restore(self, saved: _Saved) -> None:
        """Chooses the state that `set` sets: ranks that share samples have the same."""
        trainer, ranks = self._trainer, saved["ranks"]
        drawing, data_rank = _with_samples(saved), trainer.data_rank
        if saved["layout"] == trainer.layout.split_axes:
            self._saved = ranks[trainer.global_rank]["random"]
        else:
            self._saved = ranks[drawing[data_rank]]["random"] if data_rank < len(drawing) else None
        if len(ranks) != trainer.world_size:
            rank_zero_info(
                f"The checkpoint has the random state of {len(ranks)} rank(s), this run has {trainer.world_size}:"
                " dropout and the like will draw other numbers than an uninterrupted run's."
            )

    def set(self) -> None:
        """Sets the state of the checkpoint, once."""
        if self._saved is not None:
            set_random_state(self._saved)
            self._saved = None

    def begin_run(self) -> None:
        """Begins a run, whose ranks draw the same numbers until `seed_rank_stream`."""
        self._draws_alone = False

    def seed_rank_stream(self) -> None:
        """Gives this rank its own random stream; called before the iterator of its data seeds its workers."""
        if not self._draws_alone:
            self._draws_alone = True
            seed_rank_stream(self._trainer.data_rank)  # ranks that share samples draw the same numbers


class _StrategyState:
    """The strategy's own state."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def shared(self) -> dict[str, Any]:
        return self._trainer.engine_strategy.shared_state()

    def of_rank(self) -> dict[str, Any]:
        return self._trainer.engine_strategy.state_of_rank()

    def restore(self, saved: _Saved) -> None:
        """Restores the state; called when the optimizers have theirs."""
        if STRATEGY not in saved:
            return
        trainer = self._trainer
        is_same = (saved["world_size"], saved["layout"]) == (trainer.world_size, trainer.layout.split_axes)
        of_rank = saved["ranks"][trainer.global_rank][STRATEGY] if is_same else {}
        trainer.engine_strategy.load_state(saved[STRATEGY], of_rank)


class _TrainedParameters:
    """Which parameters a run trains, and in which groups of its optimizers: callbacks change both in mid-training.

    A fine-tuning callback (`BackboneFinetuning`, say) freezes a part of the module before training, unfreezes it later,
    and gives it to the optimizer as a group of its own. A resumed run begins with the part frozen again, and the
    callback has nothing more to do. So what has changed since training began is saved by names, and changed again on
    resume. What has not changed is left as the resumed run's own module and `configure_optimizers` have it.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._is_trained: dict[str, bool] = {}
        self._tracks: dict[str, bool] = {}
        self._of_optimizers: list[set[str]] = []
        self._saved: dict[str, Any] = {}

    def shared(self) -> dict[str, Any]:
        """Returns the changes since training began, as plain values."""
        module: LightningModule = self._trainer.lightning_module
        names = _names(module)
        is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        return {
            "is_trained": _changed(is_trained, self._is_trained, self._saved.get("is_trained", {})),
            "tracks": _changed(dict(_tracking(module)), self._tracks, self._saved.get("tracks", {})),
            "added": [
                sorted({names[p] for p in _parameters(optimizer) if p in names} - first)
                for optimizer, first in zip(self._trainer.optimizers, self._of_optimizers, strict=False)
            ],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Notes what the run begins with, then freezes and unfreezes what the resumed run had.

        Args:
            saved: the changes of the run that is resumed; empty if there is none.
        """
        module: LightningModule = self._trainer.lightning_module
        self._saved = saved
        self._is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        self._tracks = dict(_tracking(module))
        names, optimizers = _names(module), self._trainer.optimizers
        # A callback may have added the groups of the resumed run already.
        before = [set(added) for added in saved.get("added", [])]
        before += [set[str]()] * (len(optimizers) - len(before))
        self._of_optimizers = [
            {names[p] for p in _parameters(optimizer) if p in names} - added
            for optimizer, added in zip(optimizers, before, strict=False)
        ]
        is_trained, tracks = saved.get("is_trained", {}), saved.get("tracks", {})
        for name, parameter in module.named_parameters():
            if name in is_trained:
                parameter.requires_grad_(is_trained[name])
        parts: dict[str, Any] = dict(module.named_modules())
        for name in tracks.keys() & parts.keys():
            parts[name].track_running_stats = tracks[name]

    def restore_groups(self, number: int, optimizer: Optimizer, groups: Any) -> None:
        """Gives an optimizer the parameters that were added to it in the resumed run.

        Args:
            number: the number of the optimizer.
            optimizer: the optimizer.
            groups: the saved groups, with names as parameters.
        """
        added = set(self._saved["added"][number]) if number < len(self._saved.get("added", [])) else set()
        parameters = dict(self._trainer.lightning_module.named_parameters())
        present = set(_parameters(optimizer))
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


def end_last_epoch(loops: dict[str, Any], max_epochs: int) -> None:
    """Has Lightning's fit loop begin an epoch, if the last one is over, in a checkpoint without the engine's state.

    With `max_steps` Lightning would train on the last batch's successor, which the epoch does not have. A run that has
    reached `max_epochs` (-1: no limit) begins none.
    """
    if not {"epoch_loop.batch_progress", "epoch_progress"} <= loops.keys():
        return  # of an older version
    progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    is_over = epochs["ready"] == epochs["processed"] == epochs["completed"] > 0
    if is_over and progress.get("is_last_batch") and not 0 <= max_epochs <= epochs["processed"]:
        _begin_next(progress)


def _begin_next(progress: dict[str, Any]) -> None:
    progress["current"] = dict.fromkeys(progress["current"], 0)
    progress["is_last_batch"] = False


def _with_samples(engine_state: dict[str, Any]) -> range:
    """Returns the ranks of the saved run that had different samples; of ranks with the same samples, the first."""
    layout = engine_state["layout"]
    num_sharing = layout.get("tp", 1) * layout.get("cp", 1)
    return range(0, engine_state["world_size"] // layout.get("pp", 1), num_sharing)


def _matching_accumulation(asked: int, num_ranks: int, engine_state: dict[str, Any]) -> int:
    """Returns the accumulation that gives this run the global batch of the run that saved the checkpoint.

    Args:
        asked: the value of this run's flag. If it differs from the flag of the saved run, it is returned.
        num_ranks: number of ranks with different samples.
        engine_state: the checkpoint's entry ``polyphase``.
    """
    then, per_rank = len(_with_samples(engine_state)), engine_state["accumulate_grad_batches"]
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
