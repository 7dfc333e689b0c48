"""`auto`: trains a few steps with each of some methods, then goes on with the one whose steps were shortest.

It considers only methods that barely change training. `topk` and `sign` converge more slowly for a long time, more so
with Adam (docs/compression.md), so they must be chosen by name.
"""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from ..flags import check_count
from .base import CommHook, ParameterState
from .cast import AllReduceHook
from .counting_group import Bucket, CountingGroup, seconds_between, timestamp

__all__ = ["Auto", "CommReport", "Measured", "ReportWriter"]

_SETTLING_STEPS = 2
"""Steps before the measurement: DDP rebuilds its buckets after the first step, and uses them from the second on."""
_TOLERANCE = 0.05
"""The share of a step's time that a later method of the list must save to be preferred over an earlier one."""
_PAST_WARM_UP = 10**9
"""The step that a method is told while it is measured: `powersgd` sends all values in its first steps."""


class Measured(NamedTuple):
    """The measured steps of one compression."""

    compression: str
    step_s: float
    """The median of the steps; of the ranks' medians the longest."""
    sent_bytes: int
    """Number of bytes that each rank sends in each step."""


class Auto(CommHook):
    """Trains a few steps with each method, and then with the fastest.

    Args:
        steps: number of steps of each method that are measured.

    Attributes:
        candidates: flags of the methods; methods that change gradients less come first.
        measured: the steps of each candidate, once all were measured.
        chosen: flag of the chosen method, once there is one.
    """

    name = "auto"
    description = "trains some steps with each of none, bf16, int8 and powersgd, then with the fastest: auto[:steps]"

    bucket_mb = 25.0
    """As without compression, which it may choose."""

    def __init__(self, steps: int = 3) -> None:
        super().__init__()
        self.steps = check_count("auto:steps", steps)
        self.candidates: list[str] = ["none", "bf16", "int8", "powersgd"]
        self.measured: list[Measured] = []
        self.chosen: str | None = None
        self._method: CommHook = AllReduceHook()
        self._loaded: dict[str, Any] = {}
        self._module: nn.Module | None = None
        self._device: torch.device | None = None
        self._seen: list[list[tuple[Any, Any]]] = []
        """Begin and end of the steps of each candidate so far. In the first one a method may compile what it needs."""
        self._sent_bytes: list[int] = []
        self._step_began: Any = None

    def num_steps(self) -> int:
        """Returns the number of steps until it has chosen."""
        return _SETTLING_STEPS + 1 + len(self.candidates) * (self.steps + 1)

    def begin(self, module: nn.Module, wire: CountingGroup, scaler: torch.amp.GradScaler | None = None) -> None:
        """See `CommHook`; keeps a method that was chosen before, or loaded."""
        super().begin(module, wire, scaler)
        self._module = module
        if self.chosen is None:
            self._method, self._step_began = AllReduceHook(), None
            self._seen.clear()
            self._sent_bytes.clear()
        self._begin_method()

    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        """Averages by the chosen method, or by the one that is measured."""
        self._device = bucket.gradients.device
        self._method.average(bucket, wire)

    def on_step_end(self, *, skipped: bool | Tensor = False) -> None:
        """Records the time of a step, and takes the next method, or the fastest after the last one.

        It does so between two steps, when no activations are in memory. Skipped and repeated steps are not measured: a
        rank may see more skips than others do, and all ranks must choose after the same step.
        """
        super().on_step_end(skipped=skipped)
        self._method.on_step_end(skipped=skipped)
        if self.chosen is not None or self._device is None:
            return
        now, began = timestamp(self._device), self._step_began
        self._step_began = None if skipped is True else now
        if began is None or skipped is not False or self.step <= _SETTLING_STEPS:
            return
        if self._seen:
            self._seen[-1].append((began, now))
        if not self._seen or len(self._seen[-1]) > self.steps:
            self._take_next()

    def _take_next(self) -> None:
        """Takes the next candidate, or chooses after the last one."""
        assert self.wire is not None
        self._sent_bytes.append(self.wire.sent.total())
        if len(self._seen) == len(self.candidates):
            self._choose()
            return
        self._take(self.candidates[len(self._seen)])
        self._method.step = _PAST_WARM_UP
        self._seen.append([])

    def _choose(self) -> None:
        wire = self.wire
        assert wire is not None
        own_s = [statistics.median(seconds_between(*span) for span in spans[1:]) for spans in self._seen]
        longest_s = torch.tensor(own_s, device=self._device)
        dist.all_reduce(longest_s, op=dist.ReduceOp.MAX, group=wire.group)
        sent = [after - before for before, after in zip(self._sent_bytes, self._sent_bytes[1:], strict=False)]
        self.measured = [
            Measured(flag, step_s, sent_bytes // (self.steps + 1))
            for flag, step_s, sent_bytes in zip(self.candidates, longest_s.tolist(), sent, strict=True)
        ]
        least_s = min(measured.step_s for measured in self.measured)
        best = next(measured for measured in self.measured if measured.step_s <= least_s * (1 + _TOLERANCE))
        self._take(best.compression)
        self.chosen = best.compression
        rank_zero_info(
            f"compression='auto' uses {best.compression!r}, the first of these methods whose step is at most"
            f" {_TOLERANCE:.0%} longer than that of the fastest: "
            + ", ".join(f"{measured.compression} {1e3 * measured.step_s:.1f} ms" for measured in self.measured)
        )

    def memories(self) -> dict[str, ParameterState]:
        """Returns the memories of the present method."""
        return self._method.memories()

    def state_dict(self) -> dict[str, Any]:
        """Returns the chosen method and its state; before the choice, also a state that was loaded."""
        waiting = {} if self.chosen else {"residuals": self._loaded.get("residuals", {})}
        return {**super().state_dict(), **waiting, "chosen": self.chosen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the chosen method, without measuring again."""
        self.step, self._loaded = state["step"], state
        self.chosen = state.get("chosen")
        if self.chosen is not None:
            self._take(self.chosen)

    def _take(self, flag: str) -> None:
        from . import make_comm_hook  # imports this module

        self._method = make_comm_hook(flag) or AllReduceHook()
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommReport:
    """The result of `Engine.bench_comm`."""

    num_ranks: int
    measured: list[Measured]
    """The steps of each compression."""
    recommended: str
    """The compression to set; may be ``"none"``."""

    def __str__(self) -> str:
        plain_s = next((each.step_s for each in self.measured if each.compression == "none"), None)
        lines = [f"between {self.num_ranks} ranks               step   times none   sent by a rank"]
        lines += [
            f"  {each.compression:20} {1e3 * each.step_s:8.1f} ms"
            + (f" {each.step_s / plain_s:12.3f}" if plain_s else " " * 13)
            + f" {each.sent_bytes / 1e6:13.3f} MB"
            for each in self.measured
        ]
        why = "compression saves no time here" if self.recommended == "none" else "the fastest, or nearly"
        return "\n".join([*lines, f"recommended: compression={self.recommended!r} ({why})"])

    @classmethod
    def read(cls, path: Path) -> "CommReport":
        """Reads the report that `ReportWriter` wrote."""
        content = json.loads(path.read_text())
        return cls(**{**content, "measured": [Measured(*values) for values in content["measured"]]})


class ReportWriter(Callback):
    """Writes the result of `compression="auto"` to `path` on rank 0, since another process may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """To be called on all ranks."""
        hook = trainer.strategy.comm_hook  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            report = CommReport(num_ranks=trainer.world_size, measured=hook.measured, recommended=hook.chosen)
            self.path.write_text(json.dumps(dataclasses.asdict(report)))
