"""Checks of the state of callbacks, schedulers and optimizers in a checkpoint, by the run's own objects.

The engine's own checkpoints have a record of what was saved in them. A file of Lightning's has none, and the objects
that take its values notice a wrong one when they first compute with it, or never.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable
from numbers import Number
from typing import Annotated, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import Required, TypedDict

from ..foreign import Count, Range, problem

__all__ = ["wrong_in_callbacks", "wrong_in_optimizer", "wrong_in_scheduler"]


def _is_reason(value: int) -> str | None:
    return None if value in {reason.value for reason in EarlyStoppingReason} else f"is {value}"


class _EarlyStopping(TypedDict, total=False):
    wait_count: Required[Count]
    stopped_epoch: Required[Count]
    best_score: Required[Tensor]
    patience: Required[Count]
    stopping_reason: Annotated[int, _is_reason]
    stopping_reason_message: str | None


class _ModelCheckpoint(TypedDict, total=False):
    best_model_score: Required[Tensor | None]
    best_model_path: Required[str]
    dirpath: str | None
    best_k_models: dict[str, Tensor]
    kth_best_model_path: str
    kth_value: Tensor | None
    last_model_path: str


_MOST_S = 1e10
"""Centuries, which a `timedelta` can still have."""


class _Timer(TypedDict, total=False):
    time_elapsed: dict[str, Annotated[int | float, Range(0, _MOST_S)]]


_STATES: dict[type[Callback], Any] = {EarlyStopping: _EarlyStopping, ModelCheckpoint: _ModelCheckpoint, Timer: _Timer}
"""The states of Lightning's callbacks, and of classes that inherit how these are restored."""


def wrong_in_callbacks(callbacks: Iterable[Callback], states: dict[Any, Any]) -> str | None:
    """Returns the first part of the states of Lightning's callbacks that is wrong, or None."""
    for callback in callbacks:
        loads = getattr(type(callback), "load_state_dict", None)
        kind = next((kind for kind in _STATES if loads is kind.load_state_dict), None)
        state = states.get(callback.state_key)
        if kind and state and (wrong := problem(state, _STATES[kind], f"callbacks.{callback.state_key}")):
            return wrong
    return None


def wrong_in_scheduler(scheduler: Any, state: Any, where: str) -> str | None:
    """Returns the first part of a state that is of another kind than in a scheduler of torch's, or None.

    Torch sets attributes from the state, so that it could also take the place of a method.
    """
    if not isinstance(scheduler, LRScheduler):
        return None
    own = scheduler.state_dict() if type(scheduler).__module__ == LRScheduler.__module__ else {}
    parts = [(scheduler, state, where)]
    for inner, values, place in parts:
        taken = [key for key in values if key == "optimizer" or callable(getattr(type(inner), str(key), None))]
        if type(inner).load_state_dict.__module__ == LRScheduler.__module__ and taken:
            return f"{place} has {taken[0]!r}, which is no state of {type(inner).__name__}"
        listed = zip(getattr(inner, "_schedulers", ()), values.get("_schedulers", ()), strict=False)
        parts += [(one, of_it, f"{place}._schedulers") for one, of_it in listed if isinstance(of_it, dict)]
    return _other_kind(state, own, where)


def _other_kind(saved: Any, present: Any, where: str) -> str | None:
    if present is None:
        return None
    if _kind(saved) is not _kind(present):
        return f"{where} is of type {type(saved).__name__} in place of {type(present).__name__}"
    if isinstance(present, dict):
        pairs = [(saved[key], value, f"{where}.{key}") for key, value in present.items() if key in saved]
    elif isinstance(present, (list, tuple)):
        pairs = [(value, present[0], f"{where}[{i}]") for i, value in enumerate(saved) if present]
    else:
        return None
    return next((wrong for pair in pairs if (wrong := _other_kind(*pair))), None)


def _kind(value: Any) -> type:
    if isinstance(value, (Number, Tensor)):
        return float
    return next((kind for kind in (dict, list, tuple) if isinstance(value, kind)), type(value))


def wrong_in_optimizer(optimizer: Optimizer) -> str | None:
    """Tries a step with the state that one of torch's optimizers was given; returns why it fails, or None.

    Copies of the smallest parameters are stepped, one for each form that the states of parameters have. A step by NaN
    fails in no line: every optimizer's groups are looked through for it.
    """
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params" and _has_nan(value):
                return f"{name} of its group {number} is {value}"
    if not type(optimizer).__module__.startswith("torch.optim.") or isinstance(optimizer, (LBFGS, SparseAdam)):
        return None
    for number, group in enumerate(optimizer.param_groups):
        smallest: dict[Any, Tensor] = {}
        for parameter in group["params"]:
            if parameter.is_meta or type(parameter.data) is not Tensor:
                return None
            state = optimizer.state.get(parameter, {})
            if not isinstance(state, dict):
                return f"the state of a parameter of group {number} is of type {type(state).__name__} in place of dict"
            form = frozenset((name, type(value)) for name, value in state.items())
            smallest[form] = min(parameter, smallest.get(form, parameter), key=Tensor.numel)
        for parameter in smallest.values():
            try:
                _step(optimizer, group, parameter)
            except Exception as error:
                return f"its group {number} can't be stepped ({type(error).__name__}: {error})"
    return None


def _has_nan(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_nan, value))
    return isinstance(value, (float, Tensor)) and bool(torch.as_tensor(value).isnan().any())


def _step(optimizer: Optimizer, group: dict[str, Any], parameter: Tensor) -> None:
    trial, stepped = object.__new__(type(optimizer)), parameter.detach().clone().requires_grad_()
    stepped.grad = torch.zeros_like(stepped)
    state = defaultdict(dict, {stepped: copy.deepcopy(optimizer.state.get(parameter, {}))})
    groups = [{**group, "params": [stepped]}]
    trial.__setstate__({"defaults": optimizer.defaults, "state": state, "param_groups": groups})
    trial.step()
