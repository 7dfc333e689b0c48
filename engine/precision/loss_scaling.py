"""The loss scale of `16-mixed`: of float16's gradients, which would be rounded to zero without it.

With manual optimization, gradients are unscaled at the end of each `manual_backward`, not in `optimizer.step()`:
whatever the step does with them by hand (clipping, a norm, noise) has the same result in each precision. The scale is
updated once for each `training_step`, after the last of its optimizers.

A loss of W ranks whose gradients are averaged is scaled by 1/W of the scale, and the mean unscaled by as much. So the
gradients in float16 are those of one process, which has the mean over all samples, and the same steps overflow.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..devices import multiply
from ..distributed.buckets import local_part
from .clipping import local_values

__all__ = ["LossScaler", "Parameters", "ScaledPrecision", "one_update"]


class Parameters(NamedTuple):
    """Parameters in the form in which torch's scaler, and Lightning's clipping, take those of an optimizer."""

    param_groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizers: Iterable[Optimizer]) -> "Parameters":
        """Returns those of several optimizers."""
        return cls([group for optimizer in optimizers for group in optimizer.param_groups])


class LossScaler(torch.amp.GradScaler):
    """torch's scaler, which also takes whole gradients beside sharded ones, over one mesh or several.

    With manual optimization it unscales after each backward: see `unscale_gradients`.
    """

    agree: Callable[[Tensor], Tensor] | None = None
    """Returns the maximum over ranks of a 0-d tensor; None if an overflow reaches the gradients of all ranks anyway."""
    num_averaged: Callable[[], int] | None = None
    """Returns the number of ranks whose gradients are averaged; None: 1."""
    guard: Callable[[Optimizer, Tensor], Tensor] | None = None
    """Given an optimizer, and 1 if its gradients overflowed, returns 1 if its step is left out; None: the same."""
    _is_manual = _is_in_step = _is_due = False
    _overflows: Mapping[int, Mapping[torch.device, Tensor]] = {}
    """Maps the id of an optimizer, and a device, to 1 if gradients overflowed there in the last backward, else 0."""

    def scale(self, outputs: Any) -> Any:
        """Scales losses."""
        scaled, num_ranks = super().scale(outputs), self._num_ranks
        return scaled if num_ranks == 1 else apply_to_collection(scaled, Tensor, lambda loss: loss / num_ranks)

    @property
    def _num_ranks(self) -> int:
        return 1 if self.num_averaged is None else self.num_averaged()

    def scale_gradients(self, module: LightningModule) -> None:
        """Scales the gradients that are there before a backward adds to them; for 2^n ranks an exact product."""
        self._is_manual = True
        gradients = [local_values(p.grad) for p in _parameters(module) if p.grad is not None]
        if gradients:
            multiply(gradients, self.scale(torch.ones((), device=gradients[0].device)))

    def unscale_gradients(self, module: LightningModule) -> None:
        """Unscales all gradients after a backward, and keeps for each optimizer whether its own overflowed."""
        optimizers = module.trainer.strategy.optimizers
        # A parameter may be one of several optimizers; it is unscaled once.
        by_owners: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        owners: dict[Tensor, tuple[int, ...]] = dict.fromkeys(_parameters(module), ())
        for optimizer in optimizers:
            for parameter in dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]):
                owners[parameter] += (id(optimizer),)
        for parameter, ids in owners.items():
            by_owners[ids].append(parameter)
        one = torch.ones((), device=module.trainer.strategy.root_device)
        inv_scale = self.scale(one).double().reciprocal().float()  # torch: GradScaler.unscale_
        none = torch.zeros_like(inv_scale)  # an optimizer without gradients has not overflowed
        overflows = {id(optimizer): {none.device: none} for optimizer in optimizers}
        for ids, parameters in by_owners.items():
            found_inf = torch.zeros((), device=inv_scale.device)
            by_device = self._unscale(Parameters([{"params": parameters}]), inv_scale, found_inf)
            for key in ids:
                for device, value in by_device.items():
                    overflows[key][device] = overflows[key].get(device, 0) + value
        self._overflows = overflows

    @contextmanager
    def one_update(self) -> Iterator[None]:
        """Context of several optimizers' steps: the scale is updated once, at its end, if an optimizer has stepped."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False
        if self._is_due:
            self.update()

    def update(self, new_scale: Any = None) -> None:
        """Updates the scale; within a step of several optimizers, only at its end."""
        self._is_due = self._is_in_step and new_scale is None
        if not self._is_due:
            super().update(new_scale)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Checks the gradients of an optimizer, once; with automatic optimization, it unscales them."""
        stage = self._per_optimizer_states[id(optimizer)]["stage"]
        if stage is OptState.UNSCALED:
            return
        if self._is_manual and stage is OptState.STEPPED:  # the optimizer steps again within one `training_step`
            super().update()
        super().unscale_(optimizer)

    def has_overflowed(self, optimizer: Optimizer) -> bool:
        """Unscales, in place of `step` where another object steps; returns whether the step is to be left out."""
        self.unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        state["stage"] = OptState.STEPPED
        return any(bool(found_inf) for found_inf in state["found_inf_per_device"].values())

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        # torch: GradScaler._unscale_grads_
        if self._is_manual:
            own = self._overflows.get(id(optimizer)) or self._unscale(optimizer, torch.ones_like(inv_scale), found_inf)
        else:
            own = self._unscale(optimizer, inv_scale * self._num_ranks, found_inf)
        if self.agree is None and self.guard is None:
            return dict(own)
        for value in own.values():
            found_inf = torch.maximum(found_inf, value.to(found_inf.device))
        if self.agree is not None:
            found_inf = self.agree(found_inf)
        return {found_inf.device: found_inf if self.guard is None else self.guard(optimizer, found_inf)}

    def _unscale(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor) -> dict[torch.device, Tensor]:
        # torch's hands all gradients to one operation.
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        # In the order of the parameters, which is the same on all ranks. The order of a set differs between ranks, so
        # that they would wait for each other in different collectives.
        kinds = list(dict.fromkeys(g.device_mesh if isinstance(g, DTensor) else None for g in gradients))
        if len(kinds) <= 1 or any(g.dtype == torch.float16 for g in gradients):  # torch raises its own error
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, False)
        by_dtype = defaultdict(list)
        for gradient in gradients:
            by_dtype[gradient.dtype].append(local_part(gradient))
        with torch.no_grad():
            for local in by_dtype.values():
                torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, inv_scale)
            for group in dict.fromkeys(group for mesh in kinds if mesh is not None for group in mesh.get_all_groups()):
                dist.all_reduce(found_inf, dist.ReduceOp.MAX, group)
        return {found_inf.device: found_inf}


def _parameters(module: LightningModule) -> dict[Tensor, None]:
    """Returns the parameters of a module and its optimizers, each once."""
    groups = [group for optimizer in module.trainer.strategy.optimizers for group in optimizer.param_groups]
    return dict.fromkeys((*module.parameters(), *(p for group in groups for p in group["params"])))


class ScaledPrecision(MixedPrecision):
    """Lightning's plugin; its scaler unscales after backward for fused optimizers, too, so that they can be clipped.

    With manual optimization it unscales after each backward.
    """

    together: list[Optimizer] | None = None

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Scales the loss."""
        if (scaler := self._manual_scaler(module)) is not None:
            scaler.scale_gradients(module)
        return super().pre_backward(tensor, module)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        """Calls the hooks; with manual optimization, gradients are unscaled before."""
        if (scaler := self._manual_scaler(module)) is not None:
            scaler.unscale_gradients(module)
        return super().post_backward(tensor, module)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Steps, unless the gradients overflowed."""
        if not isinstance(scaler := self.scaler, LossScaler):
            return super().optimizer_step(optimizer, model, closure, **kwargs)

        def closure_and_check() -> Any:
            result = closure()
            if result is not None or not model.automatic_optimization:  # else the step is skipped
                for member in self.together or [optimizer]:
                    scaler.unscale_(member)  # Lightning leaves this to the step of fused optimizers
            return result

        return super().optimizer_step(optimizer, model, closure_and_check, **kwargs)

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Clips; Lightning's refuses to for fused optimizers, whose gradients it has not unscaled."""
        super(MixedPrecision, self).clip_gradients(*args, **kwargs)

    def _manual_scaler(self, module: LightningModule) -> LossScaler | None:
        return self.scaler if isinstance(self.scaler, LossScaler) and not module.automatic_optimization else None


def one_update(trainer: Trainer) -> AbstractContextManager[None]:
    """Context of the steps of several optimizers: a loss scaler updates its scale once, after the last one."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler.one_update() if isinstance(scaler, LossScaler) else nullcontext()
