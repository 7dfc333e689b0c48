"""Leaves out the steps of optimizers whose loss or gradients are not finite: `nonfinite="skip"` and `"error"`.

Phases of a step, after its last backward: 1. the largest absolute value of each gradient, before clipping (local);
2. one all-reduce of 4 bytes, so that all ranks have the same flag (`EngineStrategy.agree`); 3. where the flag is set,
the optimizer is not called, and the module's buffers are again what they were before the step.

On the CPU the host reads the flag. On an accelerator torch's fused optimizers read it themselves, as `found_inf`, by
which torch's loss scaler leaves out steps; the steps of others are taken back there (`selected_step.py`). The host does
not wait, unless an optimizer's state is of an unknown kind, there is a loss scaler, or it needs to know at once.

With a limit for spikes, phase 1 also computes the norm of the gradients, and the flag is set if it is larger than that
many times the mean of the norms of earlier steps, those that were left out aside.
"""

import collections
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from ..checkpoint import get_random_state, set_random_state
from ..precision.clipping import local_values, norm_of
from ..reliability.nonfinite import SPIKE
from .selected_step import LateFlag, StepBefore, may_select

__all__ = ["StepGuard", "StepSnapshot", "flag_of_rank", "needs_closure"]

_BAD_GRADIENT = 0.5
"""The flag of a step if no rank had a loss that is not finite; those of such ranks are whole numbers."""
_MEMORY = 0.99
"""How much of the mean of norms stays in a step: it is that of about the last hundred."""
_FIRST_NORMS = 20
"""The norms that the mean has before a step is judged by it: those of the first steps fall quickly."""


class StepGuard:
    """Decides for each step of a trainer's optimizers whether it is left out, on all ranks alike.

    A flag is 0 for a step that is taken, 0.25 if its gradients are a spike, 0.5 if only gradients were not finite, and
    `world_size` - r if r is the first rank with a loss that is not finite.

    Args:
        trainer: the trainer.
        judged: called with each flag: a number where the host has read it, otherwise a 0-d tensor.
        stays: whether each step after the first one with a bad loss or gradient is left out, too.
        reads: whether the host reads each flag at once.
        largest_norm: the norm of a spike, as a multiple of the mean; None: none is one.
    """

    def __init__(
        self,
        trainer: Any,
        judged: Callable[[float | Tensor], None],
        *,
        stays: bool,
        reads: bool,
        largest_norm: float | None = None,
    ) -> None:
        self._trainer, self._judged, self._reads = trainer, judged, reads
        self._largest_norm = largest_norm
        self.norms: dict[int, Tensor] = {}
        """The decaying sum of the norms, that of their weights, and their number, by the number of the optimizer."""
        self._late: dict[Optimizer, LateFlag] = {}
        """The flags that the host does not know yet, of the last step of each optimizer."""
        self._strategy = trainer.engine_strategy
        self._losses: list[Tensor] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._flags: dict[Optimizer, float | Tensor] = {}
        """The flags of steps that were judged and not begun."""
        self._first: Tensor | None = None
        self._stays = stays
        self._together: list[Optimizer] = []
        """The optimizers of which all steps, or none, are left out; empty if each has its own flag."""
        self._steps: dict[Optimizer, Any] = {}
        """The `step` that each optimizer had as an attribute; None: it had the method of its class."""
        self._scaler: Any = getattr(trainer.precision_plugin, "scaler", None)
        self._latest: Any = None
        """The optimizer, or the first of all, that was judged last."""
        self._is_open = False
        self.verdict: bool | Tensor = False
        """Whether the last step was left out: a 0-d tensor if the host does not know."""

    # --- a run

    def attach(self) -> None:
        """Takes the place of the `step` of each optimizer that has it not; called when there are optimizers.

        Raises:
            ValueError: an optimizer must compute the gradients itself, or the norm of all is not known.
        """
        for optimizer in self._trainer.strategy.optimizers:
            if optimizer in self._steps:
                continue
            if needs_closure(optimizer):
                if self._stays:
                    continue  # what it has done is read with the losses
                raise ValueError(
                    f"{type(optimizer).__name__} calls the closure itself, with other weights each time, so no step of"
                    " it can be left out: choose another optimizer, or nonfinite='warn'."
                )
            self._steps[optimizer] = vars(optimizer).get("step")
            vars(optimizer)["step"] = self._guarded(optimizer)
        several = len(self._trainer.strategy.optimizers) > 1 and self._trainer.lightning_module.automatic_optimization
        self._together = list(self._trainer.strategy.optimizers) if several else []
        if several and self._scaler is not None and self._largest_norm is not None:
            raise ValueError(
                "skip_spikes needs the gradients of all optimizers at once, and precision='16-mixed' unscales those of"
                " one after the other: choose 'bf16-mixed', or leave skip_spikes out."
            )
        self._trainer.precision_plugin.before_clipping = self.judge
        if self._scaler is not None:
            self._scaler.guard = self.judge
        self._strategy.step_guard = self

    def close(self) -> None:
        """Gives the optimizers their own `step` back."""
        for optimizer, step in self._steps.items():
            vars(optimizer).pop("step", None)
            if step is not None:
                vars(optimizer)["step"] = step
        self._steps.clear()
        self._trainer.precision_plugin.before_clipping = self._strategy.step_guard = None
        if self._scaler is not None:
            self._scaler.guard = None

    def begin_micro_batch(self) -> None:
        """Called before each forward; before the first one of a step, keeps a copy of the module's buffers."""
        if self._is_open:
            return
        self._is_open, self.verdict = True, False
        self._losses.clear()
        self._flags.clear()
        module: nn.Module = self._trainer.lightning_module
        self._buffers = [
            (owner, name, buffer.detach().clone())
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if not buffer.is_meta
        ]

    def note_loss(self, loss: Tensor) -> None:
        """Keeps the loss of a micro-batch of the present step."""
        self._losses.append(loss.detach())

    def settle(self) -> None:
        """Waits until the host knows of the last steps whether they were left out, and undoes what it has done."""
        while self._late:
            self._late.popitem()[1].settle()

    def when_left_out(self, action: Callable[[], None]) -> None:
        """Has a function called if the last step turns out to be left out, before the next one; see `verdict`."""
        self._at_flag(self._latest, self.verdict).actions.append(action)

    def _at_flag(self, first: Optimizer, flag: Any) -> LateFlag:
        if first not in self._late:
            self._late[first] = LateFlag(flag.float())
        return self._late[first]

    # --- a step

    def judge(self, optimizer: Optimizer | LightningOptimizer, found_inf: Tensor | None = None) -> Tensor:
        """Decides whether the next step of an optimizer, or of all that step together, is left out; all ranks call it.

        Args:
            optimizer: its gradients, and those of the others, are complete, and not clipped yet.
            found_inf: 1 if they are not finite, as a loss scaler knows; None: they are looked at.

        Returns:
            Likewise 1 if the step is left out, else 0.
        """
        if isinstance(optimizer, LightningOptimizer):  # as steps by hand have it when they clip
            optimizer = optimizer.optimizer
        first, *others = self._together or [optimizer]
        if first not in self._flags or (found_inf is not None and not others):
            self._latest = first
            self._flags[first] = self._new_flag(optimizer, found_inf, self._flags.get(first))
        flag = self._flags[first]
        value = flag if isinstance(flag, Tensor) else torch.tensor(flag)
        device = self._trainer.strategy.root_device if found_inf is None else found_inf.device
        return (value > 0).to(device, torch.float32)

    def leaves_out(self, optimizer: Optimizer) -> bool:
        """Whether to leave out the next step of an optimizer whose `step` is not called; the host waits for it."""
        self.judge(optimizer)
        return float(self._begun(optimizer)) > 0

    def _begun(self, optimizer: Optimizer) -> float | Tensor:
        """Returns the flag of the step that an optimizer begins; each later one of it alone is judged again."""
        return self._flags[self._together[0]] if self._together else self._flags.pop(optimizer)

    @torch.no_grad()
    def _new_flag(
        self, optimizer: Optimizer, found_inf: Tensor | None, former: float | Tensor | None
    ) -> float | Tensor:
        """Judges a step; `former` is what was said of it before its gradients were clipped, None if nothing was."""
        self._is_open = False
        device = self._trainer.strategy.root_device
        optimizers = self._together or [optimizer]
        looked_at = optimizers if found_inf is None else [other for other in optimizers if other is not optimizer]
        is_fine = _are_finite(looked_at, device)
        if found_inf is not None:
            is_fine = is_fine & (found_inf.to(device) == 0)
        flag = (~is_fine).float() * _BAD_GRADIENT
        norm = self._norm(optimizers, device) if former is None else None
        if former is not None:
            flag = torch.maximum(flag, torch.as_tensor(former).to(flag))
        if norm is not None:
            flag = torch.where(is_fine & self._is_spike(norm), SPIKE, flag)
        if self._losses:
            losses_are_fine = torch.stack([loss.to(device, torch.float32) for loss in self._losses]).isfinite().all()
            flag = torch.where(losses_are_fine, flag, float(self._trainer.world_size - self._trainer.global_rank))
            self._losses.clear()
        flag = self._strategy.agree(flag)
        if self._stays:
            since = flag if self._scaler is None else flag.floor()  # a scale that is too large is no fault
            self._first = since if self._first is None else torch.maximum(self._first, since)
            flag = torch.maximum(self._first, flag)
        if norm is not None:
            self._note_norm(norm, flag > 0)
        if (late := self._late.pop(self._latest, None)) is not None:  # the device has the gradients' work to do
            late.settle()
        is_read = self._reads or not all(self._needs_no_host(member, flag) for member in optimizers)
        judged: float | Tensor = flag.item() if is_read else flag
        self.verdict = judged > 0
        self._restore_buffers()
        self._judged(judged)
        return judged

    def _norm(self, optimizers: list[Optimizer], device: torch.device) -> Tensor | None:
        """The norm of the gradients of optimizers that step together, if one may be a spike."""
        if self._largest_norm is None:
            return None
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        of_parameters = getattr(self._trainer.precision_plugin, "norm_of", None) or norm_of
        return of_parameters([p for group in groups for p in group["params"]]).to(device, torch.float32)

    @property
    def _of_latest(self) -> int:
        return self._trainer.strategy.optimizers.index(self._latest)

    def _is_spike(self, norm: Tensor) -> Tensor:
        sum_, weights, num = self.norms.setdefault(self._of_latest, norm.new_zeros(3))
        # Where the mean is zero so far, as under frozen layers, nothing can be said.
        return (num >= _FIRST_NORMS) & (sum_ > 0) & (norm * weights > self._largest_norm * sum_)

    def _note_norm(self, norm: Tensor, is_left_out: Tensor) -> None:
        before, one = self.norms[self._of_latest], torch.ones_like(norm)
        sum_, weights, num = before
        now = [_MEMORY * sum_ + (1 - _MEMORY) * norm, _MEMORY * weights + (1 - _MEMORY), num + one]
        self.norms[self._of_latest] = torch.where(is_left_out, before, torch.stack(now))

    def _needs_no_host(self, optimizer: Optimizer, flag: Tensor) -> bool:
        """Whether the device alone can leave out the step of an optimizer."""
        if flag.is_cpu:
            return False
        # A loss scaler reads `found_inf` itself, before it calls an optimizer that does not.
        return self._is_masked(optimizer, flag) or (self._scaler is None and may_select(optimizer, flag.device))

    def _is_masked(self, optimizer: Optimizer, flag: Tensor) -> bool:
        """Whether an optimizer's own kernels read the flag."""
        if flag.is_cpu or not getattr(optimizer, "_step_supports_amp_scaling", False):
            return False
        # torch: SGD leaves a momentum that is new as it was allocated, if `found_inf` is set.
        return all(
            not group.get("momentum") or all(p.grad is None or optimizer.state.get(p) for p in group["params"])
            for group in optimizer.param_groups
        )

    def _guarded(self, optimizer: Optimizer) -> Any:
        take = optimizer.step

        @wraps(take)  # a scheduler finds its own mark on it
        def step(_: Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.judge(optimizer)
            self._take(optimizer, partial(take, **kwargs), self._begun(optimizer))
            return loss

        return MethodType(step, optimizer)

    def _take(self, optimizer: Any, take: Callable[[], Any], flag: float | Tensor) -> None:
        optimizer._opt_called = True  # torch: schedulers check it for a step
        if not isinstance(flag, Tensor):
            if flag == 0:
                take()
            return
        if hasattr(optimizer, "found_inf"):  # the loss scaler's, which has it from `judge`
            take()
        elif not self._is_masked(optimizer, flag):
            self._select(optimizer, take, flag)
        else:
            optimizer.found_inf, optimizer.grad_scale = (flag > 0).float(), None
            try:
                take()
            finally:
                del optimizer.found_inf, optimizer.grad_scale

    def _select(self, optimizer: Optimizer, take: Callable[[], Any], flag: Tensor) -> None:
        try:
            before = StepBefore(optimizer, flag.device)
        except torch.OutOfMemoryError:
            if flag.item() == 0:
                take()
            return
        take()
        if (undo := before.select(flag > 0)) is not None:
            self._at_flag(self._together[0] if self._together else optimizer, flag).actions.append(undo)

    def _restore_buffers(self) -> None:
        if self.verdict is False:
            return
        for owner, name, saved in self._buffers:
            now = getattr(owner, name, None)
            if isinstance(now, Tensor) and now.shape == saved.shape:
                with torch.no_grad():
                    now.copy_(saved if self.verdict is True else torch.where(self.verdict.to(now.device), saved, now))


def flag_of_rank(flag: Tensor, strategy: Any) -> Tensor:
    """Returns the flag of a step that a rank takes by itself, so that this rank is the one with a bad loss."""
    own = float(strategy.world_size - strategy.global_rank)
    return torch.where(flag > 0, torch.where(flag == SPIKE, own + SPIKE, own), flag)


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer can't step without a closure, which it calls for several losses of one step."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _are_finite(optimizers: list[Optimizer], device: torch.device) -> Tensor:
    """Whether this rank's parts of optimizers' gradients are finite: a 0-d tensor."""
    by_kind: dict[Any, list[Tensor]] = defaultdict(list)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for gradient in (p.grad for group in groups for p in group["params"] if p.grad is not None):
        part = local_values(gradient)
        part = torch.view_as_real(part) if part.is_complex() else part  # whose largest value has a kernel
        if part.numel() > 0:
            by_kind[part.device, part.dtype].append(part)
    # The largest value is finite if all are, whatever their number; a sum of squares may not be.
    of_kinds = [torch.stack(torch._foreach_norm(parts, torch.inf)).isfinite().all() for parts in by_kind.values()]
    return (
        torch.stack([is_fine.to(device) for is_fine in of_kinds]).all()
        if of_kinds
        else torch.ones((), device=device) > 0
    )


_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict)
# Attributes of every module. A step does not change parameters, and FSDP swaps them in and out of its modules.
_OF_MODULES = frozenset(nn.Module().__dict__) - {"_buffers", "training"}


class StepSnapshot:
    """The current attributes of some objects, and the random state.

    It has the buffers and plain attributes of modules and their sub-modules, and the attributes of other objects.
    Tensor attributes are recorded by value, so that changes in place are undone, as in states of torchmetrics. Lists,
    dicts and sets are recorded with their items, to any depth. Tensors in containers, and all other objects, are
    recorded by identity only. Parameters, gradients and optimizers are not recorded.

    Args:
        owners: modules, a `_ResultCollection`, or other objects with attributes.
        random: record the state of the random generators, too.
        leaves_out: whether an owner and what it has, or the values of a tensor, are not recorded.
    """

    def __init__(
        self, *owners: Any, random: bool = True, leaves_out: Callable[[Any], bool] = lambda owner: False
    ) -> None:
        self._leaves_out = leaves_out
        self._random = get_random_state() if random else None
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        self._owners: dict[int, Any] = {}
        for owner in owners:
            self._remember_owner(owner)

    def _remember_owner(self, owner: Any) -> None:
        if id(owner) in self._owners or self._leaves_out(owner):
            return
        self._owners[id(owner)] = owner
        skipped = _OF_MODULES if isinstance(owner, nn.Module) else frozenset()
        attributes = {name: value for name, value in owner.__dict__.items() if name not in skipped}
        self._attributes.append((owner, attributes))
        for value in (*attributes.values(), *owner.__dict__.get("_buffers", {}).values()):
            if isinstance(value, Tensor) and not self._leaves_out(value):
                self._values[id(value)] = value, value.detach().clone()
            else:
                self._remember(value)
        if isinstance(owner, _CONTAINERS):  # for example a `_ResultCollection`, a dict of metrics
            self._remember_contents(owner)
        if isinstance(owner, nn.Module):
            for child in owner.children():
                self._remember_owner(child)

    def _remember(self, value: Any) -> None:
        if isinstance(value, Metric):  # a metric that is not a sub-module
            self._remember_owner(value)
        elif type(value) in _CONTAINERS and id(value) not in self._contents:
            self._remember_contents(value)

    def _remember_contents(self, container: Any) -> None:
        items = dict(container) if isinstance(container, dict) else list(container)
        self._contents[id(container)] = container, items
        for item in items.values() if isinstance(items, dict) else items:
            self._remember(item)

    @property
    def owners(self) -> Collection[Any]:
        """The objects whose attributes are recorded: those that were passed, their sub-modules, and metrics."""
        return self._owners.values()

    def undo(self, *, keeps_counts: bool = False) -> None:
        """Restores everything: the same objects, with their content.

        Args:
            keeps_counts: plain integers and booleans of modules stay as they are.
        """
        for owner, before in self._attributes:
            present = owner.__dict__
            if keeps_counts and isinstance(owner, nn.Module) and not isinstance(owner, Metric):
                before = {**before, **{name: value for name, value in present.items() if type(value) in (int, bool)}}
            skipped = _OF_MODULES if "_modules" in present else frozenset()
            for name in [name for name in present if name not in before and name not in skipped]:
                del present[name]
            present.update(before)
        for container, items in self._contents.values():
            container.clear()
            (container.extend if isinstance(container, (list, collections.deque)) else container.update)(items)
        with torch.no_grad():
            for tensor, value in self._values.values():
                tensor.copy_(value)
        if self._random is not None:
            set_random_state(self._random)
