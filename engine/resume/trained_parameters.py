"""Saves and restores which parameters a run trains, and in which groups: callbacks change both in mid-training.

A fine-tuning callback (`BackboneFinetuning`, say) freezes a part of the module before training, unfreezes it later, and
gives it to the optimizer as a group of its own. A resumed run begins with the part frozen again, and the callback has
nothing more to do. So what has changed since training began is saved with the run, and changed again on resume. What
has not changed is left as the resumed run's own module and `configure_optimizers` have it.
"""

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from .._compat.torch import _BatchNorm

__all__ = ["TrainedParameters"]


class TrainedParameters:
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
