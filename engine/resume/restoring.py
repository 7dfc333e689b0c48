"""Adapts the content of a checkpoint to the run that opens it."""

from collections.abc import Callable
from typing import Any, Literal

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import CheckpointError, by_number

__all__ = ["TargetTensors", "end_last_epoch", "in_order_of", "matching_accumulation", "to_last_step", "with_samples"]


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
    if engine_state.get("cut_short"):
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
    progress, epochs = loops["epoch_loop.batch_progress"], loops["epoch_progress"]["current"]
    is_over = epochs["ready"] == epochs["processed"] == epochs["completed"] > 0
    if is_over and progress.get("is_last_batch") and not 0 <= max_epochs <= epochs["processed"]:
        _begin_next(progress)


def _begin_next(progress: dict[str, Any]) -> None:
    progress["current"] = dict.fromkeys(progress["current"], 0)
    progress["is_last_batch"] = False


class TargetTensors:
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


def in_order_of(state: dict[str, Any], optimizer: Optimizer, names: list[str]) -> dict[str, Any]:
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
    layout = engine_state.get("layout", {})
    return range(0, engine_state["world_size"] // layout.get("pp", 1), layout.get("tp", 1))


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
