"""`auto`: measures a few steps, the network and some methods, then uses the method with the shortest step.

It considers only methods that barely change training. `topk` and `sign` converge more slowly for a long time, more so
with Adam (docs/compression.md), so they must be chosen by name.
"""

import statistics
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ..flags import check_count
from .base import CommHook, ParameterState
from .cast import AllReduceHook
from .counting_group import Bucket, CountingGroup, seconds_between, timestamp
from .forecast import Forecast, Link, Step, advice, forecast, measure_links

__all__ = ["Auto"]

_SETTLING_STEPS = 2
"""Steps before the measurement: DDP rebuilds its buckets after the first step, and uses them from the second on."""
_TOLERANCE = 0.05
"""The share of a step's time that a later method of the list must save to be preferred over an earlier one."""


class Auto(CommHook):
    """Averages without compression for a few steps, then with the fastest method.

    Args:
        steps: number of steps to measure.

    Attributes:
        candidates: flags of the methods; methods that change gradients less come first.
        links: latency and bandwidth of each collective, once measured.
        forecasts: forecast for each candidate, once measured.
        chosen: flag of the chosen method, once there is one.
    """

    name = "auto"
    description = (
        "measures the first steps and takes the fastest of none, bf16, int8 and powersgd: auto[:steps]; steps 3"
    )

    bucket_mb = 25.0
    """As without compression, which it may choose."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = check_count("auto:steps", steps)
        self.candidates: list[str] = ["none", "bf16", "int8", "powersgd"]
        self.links: dict[str, Link] = {}
        self.forecasts: list[Forecast] = []
        self.chosen: str | None = None
        self._method: CommHook = AllReduceHook()
        self._loaded: dict[str, Any] = {}
        self._module: nn.Module | None = None
        self._seen: list[tuple[Any, list[tuple[int, Any, Any]], Any]] = []
        self._step_began: Any = None
        self._like: dict[int, Bucket] = {}

    def begin(self, module: nn.Module, wire: CountingGroup, scaler: torch.amp.GradScaler | None = None) -> None:
        """See `CommHook`; keeps a method that was chosen before, or loaded."""
        super().begin(module, wire, scaler)
        self._module = module
        self._begin_method()
        if self.chosen is None:
            self.bucket_times = []

    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        """Averages without compression until the method is chosen."""
        if self.chosen is None:
            flat = bucket.gradients
            shape_alone = flat.new_empty(1).expand(flat.numel())  # keeps the shape without the gradients' memory
            self._like[bucket.index] = Bucket(bucket.index, shape_alone, bucket.members)
        self._method.average(bucket, wire)

    def on_step_end(self, *, skipped: bool | Tensor = False) -> None:
        """Records the times of a measured step, and chooses the method after the last one.

        It chooses between two steps, when no activations are in memory. Skipped and repeated steps are not measured: a
        rank may see more skips than others do, and all ranks must choose after the same step.
        """
        super().on_step_end(skipped=skipped)
        self._method.on_step_end(skipped=skipped)
        if self.chosen is not None or not self._like:
            return
        now = timestamp(next(iter(self._like.values())).gradients.device)
        assert self.bucket_times is not None
        is_settled = self.step > _SETTLING_STEPS and skipped is False
        if is_settled and self._step_began is not None and len(self._seen) < self.steps:
            self._seen.append((self._step_began, list(self.bucket_times), now))
        self._step_began = None if skipped is True else now
        self.bucket_times.clear()
        if len(self._seen) == self.steps:
            self._choose()

    def memories(self) -> dict[str, ParameterState]:
        """Returns the memories of the chosen method."""
        return self._method.memories()

    def state_dict(self) -> dict[str, Any]:
        """Returns the chosen method and its state; before the choice, also a state that was loaded."""
        waiting = {} if self.chosen else {"residuals": self._loaded.get("residuals", {})}
        return {**super().state_dict(), **waiting, "chosen": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the chosen method, without measuring again."""
        self.step, self._loaded = state["step"], state
        flag = state.get("chosen")
        if flag is not None:
            self._take(flag)

    def _choose(self) -> None:
        wire, step, buckets = self.wire, self._measured_step(), list(self._like.values())
        assert wire is not None
        rank_zero_info("compression='auto': measures the network and the methods, which takes a few seconds.")
        self.links = measure_links(wire, buckets[0].gradients.device)
        hooks = {flag: _make(flag) for flag in self.candidates}
        self.forecasts = forecast(hooks, buckets, step, self.links, wire, AllReduceHook())
        self._like.clear()
        self._seen.clear()
        least_s = min(forecast.step_s for forecast in self.forecasts)
        best = next(forecast for forecast in self.forecasts if forecast.step_s <= least_s * (1 + _TOLERANCE))
        self._take(best.compression)
        rank_zero_info(
            f"compression='auto' uses {best.compression!r}, the first of these methods whose step is at most"
            f" {_TOLERANCE:.0%} longer than that of the fastest: "
            + ", ".join(f"{forecast.compression} {1e3 * forecast.step_s:.1f} ms" for forecast in self.forecasts)
            + f". {advice(self.forecasts, self.links, wire.size)}"
        )

    def _take(self, flag: str) -> None:
        self.chosen, self._method, self.bucket_times = flag, _make(flag), None
        if self._module is not None:
            self._begin_method()
        if self._loaded:
            self._method.load_state_dict(self._loaded)
        self._method.step = self.step  # may be later than the step that was loaded

    def _begin_method(self) -> None:
        assert self._module is not None
        assert self.wire is not None
        self._method.may_repeat, self._method.finds_unused = self.may_repeat, self.finds_unused
        self._method.may_leave_out = self.may_leave_out
        self._method.begin(self._module, self.wire, self._scaler)

    def _measured_step(self) -> Step:
        """Returns the medians of the measured steps."""

        def median(rows: list[list[float]]) -> list[float]:
            return [statistics.median(column) for column in zip(*rows, strict=True)]

        began = [(start, times) for start, times, _ in self._seen]
        return Step(
            ready_s=median([[seconds_between(start, ready) for _, ready, _ in times] for start, times in began]),
            averaged_s=median([[seconds_between(start, done) for _, _, done in times] for start, times in began]),
            length_s=statistics.median(seconds_between(start, end) for start, _, end in self._seen),
            overlaps=self.overlaps,
        )


def _make(flag: str) -> CommHook:
    from . import make_comm_hook  # imports this module

    return make_comm_hook(flag) or AllReduceHook()
