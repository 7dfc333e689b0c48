"""Writes a file that repeats a step that was not finite: with `nonfinite="error"` and a callback that saves snapshots.

Phases: 1. each step keeps its batches, and the states of the random generators before them; the ones of the step before
stay, too, since an accelerator's flag is read a step later. 2. When the flag says so, the forwards of that step are run
again, with a hook on each module: the first one whose output is not finite is the culprit. All ranks do so, as their
collectives need it. 3. Each rank writes a file beside the snapshots. The weights have not changed since.
"""

import os
from collections import deque
from typing import Any, NamedTuple

import torch
from fsspec.core import url_to_fs
from lightning.pytorch import Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ..checkpoint import get_random_state, set_random_state

__all__ = ["Evidence"]


class _Step(NamedTuple):
    """A step, with the arguments of `training_step` and the random state of each of its micro-batches."""

    number: int
    epoch: int
    micro_batches: list[tuple[tuple[Any, ...], dict[str, Any]]]


class Evidence:
    """Keeps what repeats the last two steps of one rank.

    Args:
        trainer: the trainer of the run.
        runs_again: whether the forwards of a step may be run again.
    """

    def __init__(self, trainer: Trainer, *, runs_again: bool) -> None:
        self._trainer: Any = trainer
        self._runs_again = runs_again
        self._steps: deque[_Step] = deque(maxlen=2)

    def keep(self, arguments: tuple[Any, ...], *, begins_step: bool) -> None:
        """Keeps a micro-batch; called before its forward."""
        trainer = self._trainer
        if begins_step or not self._steps:
            self._steps.append(_Step(trainer.global_step, trainer.current_epoch, []))
        self._steps[-1].micro_batches.append((arguments, get_random_state()))

    def write(self, number: int) -> str:
        """Writes the file for a step; returns a sentence with its path, or an empty text if the step is not known."""
        trainer = self._trainer
        step = next((kept for kept in reversed(self._steps) if kept.number <= number), None)
        folder = trainer.snapshots_path
        if step is None or folder is None:
            return ""
        module = self._first_module(step) if self._runs_again else None
        is_whole = trainer.world_size == 1 or trainer.engine_strategy.capabilities.averages_whole_gradients
        content = {
            "step": step.number,
            "epoch": step.epoch,
            "rank": trainer.global_rank,
            "micro_batches": [
                {"arguments": apply_to_collection(arguments, Tensor, _on_host), "random": random}
                for arguments, random in step.micro_batches
            ],
            "module": module,
            "weights": apply_to_collection(trainer.lightning_module.state_dict(), Tensor, _on_host) if is_whole else {},
        }
        files, root = url_to_fs(os.path.join(os.path.dirname(folder.rstrip("/")), "nonfinite"))
        path = os.path.join(root, f"step={step.number}-rank={trainer.global_rank}.pt")
        files.makedirs(root, exist_ok=True)
        with files.open(path, "wb") as file:
            torch.save(content, file)
        culprit = "" if module is None else f" The first output that is not finite is that of {module}."
        return f"{culprit} {path} has the batch, the random states and the weights that repeat it."

    def _first_module(self, step: _Step) -> str | None:
        """The first module, in the order of the calls, that returns a value that is not finite; None without one."""
        trainer, culprits = self._trainer, list[str]()
        module = trainer.lightning_module

        def note(name: str) -> Any:
            def look(owner: Any, inputs: Any, output: Any) -> None:
                if not culprits and not _is_finite(output):
                    culprits.append(f"{name} ({type(owner).__name__})")

            return look

        hooks = [one.register_forward_hook(note(name)) for name, one in module.named_modules() if name]
        own = {name: vars(module).pop(name) for name in ("log", "log_dict") if name in vars(module)}
        vars(module).update(log=_ignore, log_dict=_ignore)
        try:
            with torch.no_grad():
                for arguments, random in step.micro_batches:
                    set_random_state(random)
                    trainer.strategy.training_step(*arguments)  # of all, for which other ranks may wait
        finally:
            for hook in hooks:
                hook.remove()
            for name in ("log", "log_dict"):
                del vars(module)[name]
            vars(module).update(own)
        return culprits[0] if culprits else None


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()


def _is_finite(output: Any) -> bool:
    values: list[bool] = []
    apply_to_collection(output, Tensor, lambda tensor: values.append(bool(tensor.isfinite().all())))
    return all(values)


def _ignore(*_: Any, **__: Any) -> None:
    """Logs nothing: the step has been logged."""
