"""Checks that all ranks gather and reduce the units of `fsdp` in one order, before a collective mixes their shards.

Collectives are matched only by their order. If one rank skips a block (LayerDrop), its next all-gather would meet that
of another block: shards of equal size are mixed silently, others hang or abort. So each rank compares its next call
with what all ranks did at this place before, without communication. Only if it differs, or is unknown as in the first
step, the rank asks the others through the job's key-value store:

1. The first rank writes its collective (one exchange). A rank with another collective raises an error.
2. Each rank increments a counter, and waits until all have (the collective itself would wait for them as well).
3. A rank whose call is as expected does not ask. Its watchdog's heartbeat says, within a second, that it is already
   further: then the waiting rank raises an error.

From then on, the agreed call is the expected one at this place. So a change that all ranks make in the same step
(layers that are unfrozen, a step that calls the module twice) costs one such exchange.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# The type that `FSDPModule.set_custom_all_gather` takes; torch does not export it.
from ..._compat.torch import AllGather
from ...distributed.job_store import Fields
from ...reliability.same_call import SameCall
from .shard_checks import check_own_parameters

__all__ = ["READ", "WRITE", "UnitOrder", "watch_units"]

_FIELDS: Fields = {"kind": str, "unit": int, "trained": int}
_MOST_CALLS = 100_000
"""The largest number of different calls that are remembered; beyond it, all are forgotten."""
_NUM_CHECKS = 8
"""The gathers of a unit before which its parameters are checked, those of two to four steps: a step replaces parameters
each time, or never."""


class Call(NamedTuple):
    """A call of one rank, which all ranks must make in the same order: a collective, or the end of a step."""

    kind: str
    """``"gather"``, ``"reduce"``, ``"read"``, ``"write"`` or ``"end"``."""
    unit: int = -1
    """The number of the unit; -1 if the call is not about a unit."""
    trained: int = 0
    """The parameters of the unit that have a gradient, a bit for each."""


READ = Call("read")
WRITE = Call("write")
"""A number is read from a sharded tensor."""
_END = Call("end")


@dataclass(slots=True)
class _Place:
    """A place in a step, known by the calls that lead to it."""

    expected: Call | None = None
    """The call that all ranks made from this place in the latest step that came here."""
    after: dict[Call, "_Place"] = field(default_factory=dict)


class UnitOrder:
    """Follows the calls of this rank through a run.

    Args:
        flag: the strategy's, for messages.
        units: the name of each unit, and the names of its parameters.
        reports: returns the known reports of all ranks' heartbeats, by rank.
        timeout_s: how long to wait for the others.
        check: raises an error if one of them has ended; called while this rank waits for them.
    """

    def __init__(
        self,
        flag: str,
        units: list[tuple[str, Callable[[], list[str]]]],
        reports: Callable[[], dict[int, dict[str, Any]]],
        timeout_s: float,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._flag, self._units, self._reports = flag, units, reports
        self._same = SameCall("units", _FIELDS, "the agreement on the next unit", timeout_s, check)
        self._forget()
        self._number = self._num_agreed = 0
        self._begun: tuple[_Place, int] = (self._place, 0)
        self._repeats = False
        self._last: tuple[int, Call] = (0, _END)

    def _forget(self) -> None:
        self._begins: dict[Hashable, _Place] = {}
        self._place = self._begins.setdefault(None, _Place())
        self._num_places = 0

    def add(self, name: str) -> int:
        """Adds a unit of a single parameter whose gradient is averaged, and returns its number."""
        self._units.append((name, lambda: [name]))
        return len(self._units) - 1

    @property
    def place(self) -> dict[str, Any]:
        """The last call, for this rank's report: its `number` in the run, and what was `done`."""
        number, call = self._last
        return {"number": number, "done": self._said(call)}

    def begin(self, kind: Hashable) -> None:
        """Begins the calls of a step, or, with None, the calls between two steps.

        Args:
            kind: steps of one kind are expected to make the same calls; None between steps.
        """
        if self._repeats:
            self._repeats = False
            return
        self.check(_END)
        if self._num_places > _MOST_CALLS:  # the same on all ranks
            self._forget()
        self._place = self._begins.setdefault(kind, _Place())
        self._begun = self._place, self._number

    def repeat(self) -> None:
        """Goes back to the start of this step, which is run again. All ranks have agreed on its calls before."""
        self._place, self._number = self._begun
        self._repeats = True

    def check(self, call: Call) -> None:
        """Called before each collective.

        Raises:
            RuntimeError: another rank makes another call, or makes none in time.
        """
        if torch.compiler.is_compiling():  # traced, not made: by one rank, while the others wait for its graph
            return
        if call != self._place.expected and self._number >= self._num_agreed:
            self._ask(call)
            self._place.expected = call
        following = self._place.after.get(call)
        if following is None:
            following = self._place.after[call] = _Place()
            self._num_places += 1
        self._place = following
        self._number += 1
        self._num_agreed = max(self._number, self._num_agreed)
        self._last = self._number, call

    def _ask(self, call: Call) -> None:
        """Waits until all ranks are about to make this call."""
        expected = self._place.expected

        def differs(rank: int, other: dict[str, Any] | None, other_rank: int | None) -> str:
            return self._differs(call, rank, expected if other is None else Call(**other), other_rank)

        self._same.ask(call._asdict(), differs, lambda: [] if expected is None else self._ahead())

    def _ahead(self) -> list[int]:
        """Returns the ranks that have made more calls, as far as is known."""
        return [rank for rank, number in self._numbers().items() if number > self._number]

    def _numbers(self) -> dict[int, int]:
        """Returns the number of calls that each rank has made, as far as is known."""
        places = {rank: report.get("units") for rank, report in self._reports().items()}
        return {
            rank: unit_position["number"]
            for rank, unit_position in places.items()
            if isinstance(unit_position, dict) and isinstance(unit_position.get("number"), int)
        }

    def _differs(self, call: Call, rank: int, other: Call | None, other_rank: int | None) -> str:
        others = "the other ranks do" if other_rank is None else f"rank {other_rank} does"
        calls = f"rank {rank} {self._said(call, other)}"
        if other is not None:
            calls += f", where {others} something else: it {self._said(other, call)}"
        return (
            f"under {self._flag} all ranks must run the same blocks in the same order, since each block is gathered"
            f" from all ranks: {calls}. This step has changed no weights. Blocks that are skipped at random (LayerDrop,"
            " stochastic depth) or chosen by the data (experts) differ between ranks: run them always (set that"
            " probability to 0), or choose strategy='ddp:find_unused_parameters=true'. See \"What is sharded\" in"
            " docs/sharding.md."
        )

    def _said(self, call: Call, other: Call | None = None) -> str:
        """Describes a call; for a reduction, also the parameters that have a gradient in `other` only."""
        if call.kind == READ.kind:
            return "reads a number of a sharded tensor (`item`, `float`)"
        if call.kind == WRITE.kind:
            return "writes into parameters of a block that runs, or into a part of a sharded tensor"
        if call.kind == "end" or not 0 <= call.unit < len(self._units):
            return "is at the end of the step"
        name, parameters = self._units[call.unit]
        if call.kind == "gather":
            return f"gathers {name}"
        lacking = 0 if other is None or other.unit != call.unit else other.trained & ~call.trained
        names = [parameter for bit, parameter in enumerate(parameters()) if lacking >> bit & 1]
        without = f", without those of {', '.join(names)}" if names else ""
        return f"averages the gradients of {name}{without}"


class _Checked(AllGather):
    """An all-gather that is checked before it runs; in the first steps, its unit's parameters are checked, too."""

    def __init__(self, inner: AllGather, order: UnitOrder, unit: int, group: Any, flag: str) -> None:
        self.inner = inner
        self._order, self._call = order, Call("gather", unit)
        self._group, self._flag = group, flag
        self._num_checks = 0

    def allocate(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.inner.allocate(*args, **kwargs)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if self._num_checks < _NUM_CHECKS:
            self._num_checks += 1
            check_own_parameters(self._group, self._flag)
        self._order.check(self._call)
        return self.inner(output_tensor, input_tensor, group, async_op)


def watch_units(model: nn.Module, flag: str, trainer: Any, timeout_s: float) -> UnitOrder:
    """Makes all units of `model` check their collectives.

    Args:
        model: sharded by `fully_shard`.
        flag: the strategy's, for messages.
        trainer: its watchdog knows the positions of the other ranks.
        timeout_s: how long to wait for them.
    """
    units: list[tuple[str, Callable[[], list[str]]]] = []
    rank_loss = trainer.fit_loop.epoch_loop.rank_loss
    check = None if rank_loss is None else rank_loss.check
    order = UnitOrder(flag, units, lambda: trainer.heartbeat.positions_of_all(), timeout_s, check)
    for name, submodule in model.named_modules():
        if not isinstance(submodule, FSDPModule):
            continue
        # torch: FSDPState._fsdp_param_groups, FSDPParamGroup._all_gather_comm, post_backward and fsdp_params. An
        # earlier run may have replaced them.
        for group in submodule._get_fsdp_state()._fsdp_param_groups:
            inner: Any = group._all_gather_comm
            number = len(units)
            group._all_gather_comm = _Checked(getattr(inner, "inner", inner), order, number, group, flag)
            group.post_backward = _checked_reduction(group, order, number)  # type: ignore[method-assign]
            units.append((name or f"what {type(model).__name__} has outside of its blocks", _names(group)))
    return order


def _names(group: Any) -> Callable[[], list[str]]:
    return lambda: [parameter._param_fqn or "?" for parameter in group.fsdp_params]  # torch: FSDPParam._param_fqn


def _checked_reduction(group: Any, order: UnitOrder, unit: int) -> Callable[..., None]:
    def post_backward(*unused: Any) -> None:
        if group.reduce_grads:
            trained = sum(1 << bit for bit, parameter in enumerate(group.fsdp_params) if _has_gradient(parameter))
            if trained:
                order.check(Call("reduce", unit, trained))
        type(group).post_backward(group, *unused)

    return post_backward


def _has_gradient(parameter: Any) -> bool:
    # torch: FSDPParam._unsharded_param, which exists from the first all-gather on.
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and (parameter.unsharded_accumulated_grad is not None or whole.grad is not None)
