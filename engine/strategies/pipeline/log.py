"""Makes all stages log the values that a step logs on the last stage.

While the micro-batches run, `self.log` records its arguments on the last stage, and does nothing on the others. Then
the values of all micro-batches are reduced to one by `reduce_fx` (a mean by default) and sent to the other stages, and
every rank calls the real `log`.

A torchmetrics object is updated on the last stage only. Its `compute` on the other stages returns what the last stage
has computed, over the ranks with different samples.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from ..callers import CutError, users_line
from .shapes import TreeBroadcast

__all__ = ["StepLog", "idle_text", "share_metrics", "unshare_metrics"]

_SMALL_SHARE = 0.1
"""The idle share of the time for which `idle_text` recommends a number of micro-batches."""
_SIGNATURE = inspect.signature(LightningModule.log)
_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


class _LoggedMetric(NamedTuple):
    """Stands for a torchmetrics object that was logged."""

    attribute: str
    forward_cache: Tensor | None


class StepLog:
    """Replaces `log` of a module while micro-batches run.

    Args:
        module: the module whose `log` is replaced.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._calls: dict[tuple[str, int], list[tuple[Any, dict[str, Any]]]] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._attributes: dict[int, str] = {}
        """The names of the torchmetrics objects of the module, by their `id`; empty until one is logged."""
        self.is_last_stage = False

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Context in which it replaces the module's `log`."""
        attributes = self._module.__dict__
        before = attributes.get("log")
        attributes["log"] = self._note
        try:
            yield
        finally:
            if before is None:
                del attributes["log"]
            else:
                attributes["log"] = before

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Context in which nothing is recorded."""
        calls, self._calls = self._calls, {}
        try:
            yield
        finally:
            self._calls = calls

    def begin_micro_batch(self, is_last_stage: bool) -> None:
        """Called before each micro-batch, on each stage."""
        self._counts.clear()
        self.is_last_stage = is_last_stage

    def _note(self, *args: Any, **kwargs: Any) -> None:
        arguments = _SIGNATURE.bind(self._module, *args, **kwargs).arguments
        arguments.pop("self")
        if not self.is_last_stage:
            return
        name, value = arguments.pop("name"), arguments.pop("value")
        key = name, self._counts[name]
        self._counts[name] += 1
        if isinstance(value, Metric):
            value = _LoggedMetric(self._name_of(value, name), value._forward_cache)
        elif isinstance(value, dict):  # Lightning checks what is in it
            value = {key_in_value: _as_tensor(number, name) for key_in_value, number in value.items()}
        else:
            value = _as_tensor(value, name)
        self._calls.setdefault(key, []).append((value, arguments))

    def _name_of(self, metric: Metric, name: str) -> str:
        if not self._attributes:  # one walk for all micro-batches
            metrics = [(name, part) for name, part in self._module.named_modules() if isinstance(part, Metric)]
            self._attributes = {id(part): name for name, part in metrics}
        if id(metric) in self._attributes:
            return self._attributes[id(metric)]
        raise ValueError(
            f"self.log({name!r}, ...) was given a {type(metric).__name__} that is no attribute of the module: assign it"
            " to one in the constructor, so that all stages of the pipeline know it."
        )

    def take(self) -> list[tuple[str, Any, dict[str, Any]]]:
        """Returns name, value over all micro-batches and other arguments of each call, and clears the record."""
        calls = [
            (name, _combined([value for value, _ in noted], noted[0][1].get("reduce_fx", "mean")), _arguments(noted))
            for (name, _), noted in self._calls.items()
        ]
        self._calls.clear()
        return calls

    def replay(self, calls: list[tuple[str, Any, dict[str, Any]]]) -> None:
        """Calls the module's real `log` with what `take` has returned on the last stage."""
        for name, value, arguments in calls:
            if isinstance(value, _LoggedMetric):
                metric: Any = self._module.get_submodule(value.attribute)
                metric._forward_cache = value.forward_cache
                value = metric
            self._module.log(name, value, **arguments)


def _as_tensor(value: Any, name: str) -> Any:
    if isinstance(value, Tensor):
        if value.is_meta:
            raise CutError(
                f"{users_line()} logs {name!r}, which depends on parameters of another pipeline stage: log what the"
                " last stage has."
            )
        return value.detach()
    return torch.tensor(float(value), dtype=torch.float64) if isinstance(value, (bool, int, float)) else value


def _combined(values: list[Any], reduce_fx: Any) -> Any:
    first = values[0]
    if isinstance(first, _LoggedMetric):  # the mean of the micro-batches, since the value of the batch is not known
        caches = [value.forward_cache for value in values if isinstance(value.forward_cache, Tensor)]
        return _LoggedMetric(first.attribute, torch.stack(caches).mean(0) if caches else None)
    if isinstance(first, dict):
        return {name: _combined([value[name] for value in values], reduce_fx) for name in first}
    if len(values) == 1 or not all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return first  # Lightning raises an error for other values
    stacked = torch.stack([value.reshape(()) for value in values])
    stacked = stacked if stacked.is_floating_point() else stacked.double()
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    return _REDUCTIONS.get(name.lower(), torch.mean)(stacked)


def _arguments(noted: list[tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the arguments of the first call, with the number of samples of all calls."""
    arguments = dict(noted[0][1])
    if arguments.get("batch_size") is not None:
        arguments["batch_size"] = sum(int(call_arguments["batch_size"]) for _, call_arguments in noted)
    return arguments


def share_metrics(module: LightningModule, sharing: TreeBroadcast, is_last: bool, runs: Callable[[], bool]) -> None:
    """Makes `compute` of the module's torchmetrics objects return the last stage's result on all stages.

    Args:
        module: changed in place.
        sharing: broadcasts from the last stage.
        is_last: whether this rank has the last stage.
        runs: whether micro-batches are running: then `compute` is not shared.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and not isinstance(metric.compute, _SharedCompute):
            metric.compute = _SharedCompute(metric.compute, sharing, is_last, runs)  # type: ignore[method-assign]


def unshare_metrics(module: LightningModule) -> None:
    """Restores `compute` of the module's torchmetrics objects."""
    for metric in module.modules():
        if isinstance(metric, Metric) and isinstance(metric.compute, _SharedCompute):
            metric.compute = metric.compute.alone  # type: ignore[method-assign]


class _SharedCompute:
    """A metric's `compute` that broadcasts the last stage's result."""

    def __init__(
        self, compute: Callable[[], Any], sharing: TreeBroadcast, is_last: bool, runs: Callable[[], bool]
    ) -> None:
        self.alone, self._sharing, self._is_last, self._runs = compute, sharing, is_last, runs

    def __call__(self) -> Any:
        if self._runs():
            return self.alone()
        return self._sharing.broadcast(self.alone() if self._is_last else None)


def idle_text(
    schedule: str, num_ranks: int, num_micro_batches: int, batch_size: int, per_rank: int, idle: float
) -> str:
    """Describes how long the ranks of a pipeline were idle, and the number of micro-batches that would reduce it.

    With p ranks, c stages on each and m micro-batches the schedule alone leaves a rank idle for (p - 1) / (c m + p - 1)
    of the time; `zero-bubble` fills most of that.

    Args:
        schedule: name of the flag.
        num_ranks: number of ranks of one pipeline.
        num_micro_batches: number of micro-batches of a full batch.
        batch_size: samples of a rank's full batch.
        per_rank: stages on each rank.
        idle: the measured idle share of a full batch's time, 0 to 1.
    """
    waits = num_ranks - 1
    share = waits / (per_rank * num_micro_batches + waits)
    ranks = "the one rank was" if num_ranks == 1 else f"the {num_ranks} ranks were"
    parts = f"{num_micro_batches} micro-batch{'' if num_micro_batches == 1 else 'es'}"
    text = f"pipeline ({schedule}): {ranks} idle for {idle:.0%} of the time of a full batch of {parts}"
    if schedule == "zero-bubble" or num_ranks == 1:
        return f"{text}."
    text += f"; {share:.0%} is what that number of them costs."
    # The number of micro-batches for `_SMALL_SHARE`; in whole numbers, so that rounding does not add one.
    enough = -(-waits * round(1 / _SMALL_SHARE - 1) // per_rank)
    if num_micro_batches >= enough:
        return f"{text} The rest comes from stages that are not equally expensive, and from sending."
    # torch's schedules of several stages per rank run them in rounds of as many micro-batches as there are ranks.
    unit = 1 if per_rank == 1 else num_ranks
    divisors = (n for n in range(enough, batch_size + 1) if batch_size % n == 0 and n % unit == 0)
    number = next(divisors, None)
    if number is None:
        return (
            f"{text} To make it {_SMALL_SHARE:.0%}, give a rank batches that divide by microbatches={enough} or more."
        )
    return f"{text} microbatches={number} would make it {waits / (per_rank * number + waits):.0%}."
