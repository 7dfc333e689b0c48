"""`auto`: measures a few steps, the wire and some methods, and goes on with the one that a step is shortest under.

Only with methods under which training goes nearly as without: `topk` and `sign` lag behind for long, and more so under
Adam (docs/compression.md), so that they are for those who ask for them by name.
"""

import statistics
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from ..flags import check_count
from .base import CommHook
from .bucket import Bucket
from .forecast import Forecast, Link, Step, forecast, measure_links
from .memory import Memory
from .plain import Plain
from .wire import Wire, mark, seconds_between

__all__ = ["Auto"]

_SETTLING_STEPS = 2
"""DDP rebuilds its buckets after the first step, and the second one is the first to use them."""
_TOLERANCE = 0.05
"""The share of a step's time that a method further down the list must gain on those above it."""


class Auto(CommHook):
    """Averages as it is for a few steps, then by the fastest method, or goes on as before.

    Args:
        steps: number of steps to measure.

    Attributes:
        candidates: flags of the methods, those that change less of the gradients first.
        links: latency and bandwidth of each collective, once measured.
        forecasts: of each candidate, once measured.
        chosen: its flag, once there is one.
    """

    name = "auto"
    description = (
        "measures the first steps and takes the fastest of none, bf16, int8 and powersgd: auto[:steps]; steps 3"
    )

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = check_count("auto:steps", steps)
        self.candidates: list[str] = ["none", "bf16", "int8", "powersgd"]
        self.links: dict[str, Link] = {}
        self.forecasts: list[Forecast] = []
        self.chosen: str | None = None
        self._method: CommHook = Plain()
        self._loaded: dict[str, Any] = {}
        self._module: nn.Module | None = None
        self._seen: list[tuple[Any, list[tuple[int, Any, Any]], Any]] = []
        self._step_began: Any = None
        self._like: dict[int, Bucket] = {}

    def begin(self, module: nn.Module, wire: Wire, scaler: torch.amp.GradScaler | None = None) -> None:
        """See `CommHook`; a choice that was made before, or loaded, stays."""
        super().begin(module, wire, scaler)
        self._module = module
        self._begin_method()
        if self.chosen is None:
            self.moments = []

    def average(self, bucket: Bucket, wire: Wire) -> None:
        """Averages as it is until the method is chosen."""
        if self.chosen is None:
            flat = bucket.gradients
            shape_alone = flat.new_empty(1).expand(flat.numel())  # which keeps no gradients in memory
            self._like[bucket.index] = Bucket(bucket.index, shape_alone, bucket.members)
        self._method.average(bucket, wire)

    def settle(self, *, skipped: bool = False) -> None:
        """Notes the step, if it is one to be measured, and chooses after the last one.

        Between two steps, where no activations are in memory. Steps that are skipped, or done in place of one, are not
        measured: a rank may hear of one skip more often than the others do, and all have to choose after the same step.
        """
        super().settle(skipped=skipped)
        self._method.settle(skipped=skipped)
        if self.chosen is not None or not self._like:
            return
        now = mark(next(iter(self._like.values())).gradients.device)
        assert self.moments is not None
        is_settled = self.step > _SETTLING_STEPS and not skipped
        if is_settled and self._step_began is not None and len(self._seen) < self.steps:
            self._seen.append((self._step_began, list(self.moments), now))
        self._step_began = None if skipped else now
        self.moments.clear()
        if len(self._seen) == self.steps:
            self._choose()

    def memories(self) -> dict[str, Memory]:
        """Those of the method that was chosen."""
        return self._method.memories()

    def state_dict(self) -> dict[str, Any]:
        """The chosen method's, and which it is; until then, also what was loaded for it."""
        waiting = {} if self.chosen else {"residuals": self._loaded.get("residuals", {})}
        return {**super().state_dict(), **waiting, "chosen": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the method that was chosen, without measuring again."""
        self.step, self._loaded = state["step"], state
        flag = state.get("chosen")
        if flag is not None:
            self._take(flag)

    def _choose(self) -> None:
        wire, step, buckets = self.wire, self._measured_step(), list(self._like.values())
        assert wire is not None
        rank_zero_info("compression='auto': measures the wire and the methods, which takes a few seconds.")
        self.links = measure_links(wire, buckets[0].gradients.device)
        hooks = {flag: _make(flag) for flag in self.candidates}
        self.forecasts = forecast(hooks, buckets, step, self.links, wire, Plain())
        self._like.clear()
        self._seen.clear()
        least = min(each.step_s for each in self.forecasts)
        best = next(each for each in self.forecasts if each.step_s <= least * (1 + _TOLERANCE))
        self._take(best.compression)
        link = self.links["all_reduce"]
        rank_zero_info(
            f"compression='auto' goes on with {best.compression!r}, the first of these methods under which a step is at"
            f" most {_TOLERANCE:.0%} longer than under the fastest: "
            + ", ".join(f"{each.compression} {1e3 * each.step_s:.1f} ms" for each in self.forecasts)
            + f". An all-reduce moves {link.bytes_per_s / 1e6:.3g} MB/s here, after {1e3 * link.latency_s:.2g} ms."
        )

    def _take(self, flag: str) -> None:
        self.chosen, self._method, self.moments = flag, _make(flag), None
        if self._module is not None:
            self._begin_method()
        if self._loaded:
            self._method.load_state_dict(self._loaded)
        self._method.step = self.step  # which may be later than what was loaded

    def _begin_method(self) -> None:
        assert self._module is not None
        assert self.wire is not None
        self._method.may_repeat, self._method.finds_unused = self.may_repeat, self.finds_unused
        self._method.begin(self._module, self.wire, self._scaler)

    def _measured_step(self) -> Step:
        """The medians of what was seen."""

        def median(rows: list[list[float]]) -> list[float]:
            return [statistics.median(column) for column in zip(*rows, strict=True)]

        began = [(start, moments) for start, moments, _ in self._seen]
        return Step(
            ready_s=median([[seconds_between(start, ready) for _, ready, _ in moments] for start, moments in began]),
            averaged_s=median([[seconds_between(start, done) for _, _, done in moments] for start, moments in began]),
            length_s=statistics.median(seconds_between(start, end) for start, _, end in self._seen),
            overlaps=self.overlaps,
        )


def _make(flag: str) -> CommHook:
    from . import make_comm_hook  # which knows this file

    return make_comm_hook(flag) or Plain()
