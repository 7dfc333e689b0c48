"""Checks that the ranks of `ddp` step with equal gradients: each rank has all weights, and steps by itself.

`DistributedDataParallel` averages gradients only in a backward that it was prepared for. Gradients of `loss.backward()`
by hand, those that code assigns to `p.grad`, and those of an optimizer that steps while backward still runs are of one
rank alone: the replicas would diverge. So what an optimizer is about to use is compared, however it came about:

1. Before each step, each rank looks whether the gradients are the tensors of an earlier step. The wrapper keeps its
   averages in the same tensors, its buckets. Nothing is sent.
2. If some are other tensors, one all-gather of two numbers for each gradient, its norm and its sum, for which the ranks
   wait. That is so in the first step, in the second one, before which torch rebuilds the buckets, and after a change of
   the trained parameters. Gradients that are new tensors in each step (``p.grad = p.grad * mask``, or without buckets)
   are compared in three steps.
3. Before and after each of the first two steps, the same for the weights: code may change them without an optimizer of
   torch, and under `zero1` a step gives all ranks the weights of one.
"""

import functools
import weakref
from collections import Counter
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..distributed.digests import digests, unequal_replicas
from ..distributed.object_group import WORLD
from ..strategies.parameter_hooks import call_before_use

__all__ = ["AveragedGradients"]

_PARAMETERS, _GRADIENT, _REFERRED = itemgetter("params"), attrgetter("grad"), weakref.ref.__call__
"""Each step looks at each gradient: without a call of Python's for any of them."""

_NUM_COMPARISONS = 3
"""The comparisons of a parameter whose gradient is a new tensor in each step: a collective in each step would be slow,
and the code that makes the gradient is the same in each step."""
_NUM_STEPS = 2
"""The steps after which weights are compared: the second one has the state that the first one has left."""
_TOLERANCE = 1e-6
"""Relative to the norm. Averages are equal bit by bit; what code computes from them may differ by rounding between
machines of two kinds. Gradients of other samples differ by far more."""


class AveragedGradients:
    """Refuses optimizer steps that would use gradients of this rank alone, until it is closed.

    Args:
        trainer: the trainer of a run whose ranks step with averages of whole gradients.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._strategy = trainer.engine_strategy
        self._of_last_step: dict[Optimizer, list[weakref.ref[Tensor]]] = {}
        """The gradients in the last step of each of the trainer's optimizers."""
        self._compared: dict[Tensor, weakref.ref[Tensor]] = {}
        """The gradient of a parameter that was last found equal on all ranks: a weak reference, since it is large."""
        self._num_comparisons: Counter[Tensor] = Counter()
        self._num_steps = 0
        self.compares_weights = True
        """Whether `end_step` has something to do."""
        # A hook on all optimizers: the user's code may step one that the trainer does not know. Hooks on all of them
        # run before an optimizer's own, by which `zero1` hides gradients.
        self._handle = register_optimizer_step_pre_hook(functools.partial(call_before_use, self.check))

    def close(self) -> None:
        """Removes its hook."""
        self._handle.remove()

    def check(self, optimizer: Optimizer) -> None:
        """Checks the gradients that an optimizer is about to use; phase 1.

        Raises:
            RuntimeError: they differ between ranks.
        """
        if not self._strategy.averages_gradients:  # each rank trains alone, as in `local_sgd` after its warm-up
            return
        gradients = list(map(_GRADIENT, chain.from_iterable(map(_PARAMETERS, optimizer.param_groups))))
        references = self._of_last_step.get(optimizer, ())
        if len(references) == len(gradients) and all(map(is_, gradients, map(_REFERRED, references))):
            return
        is_trainers = any(optimizer is own for own in self._trainer.optimizers)
        self._check_new(optimizer, is_trainers)
        if is_trainers:  # others may live for a step only
            self._of_last_step[optimizer] = [_reference(gradient) for gradient in gradients]

    def _check_new(self, optimizer: Optimizer, is_trainers: bool) -> None:
        """Phase 2, if an optimizer has gradients that were not compared yet."""
        names = {parameter: name for name, parameter in self._trainer.lightning_module.named_parameters()}
        gradients: dict[str, Tensor] = {}
        new: list[Tensor] = []
        for index, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is None or not (is_trainers or p in names):
                continue
            gradients[names.get(p, f"parameter {index} of {type(optimizer).__name__}")] = p.grad
            if p not in self._compared or self._compared[p]() is not p.grad:
                new.append(p)
        if any(self._num_comparisons[p] < _NUM_COMPARISONS for p in new):
            if torch._C._current_graph_task_id() != -1:  # torch: -1 outside of a backward
                raise RuntimeError(self._too_early(optimizer, list(gradients)))
            different = _different(gradients)
            if different:
                self._strategy.check_reduction()
                raise RuntimeError(self._not_averaged(different))
            if self.compares_weights:
                self._check_weights("before")
            self._num_comparisons.update(new)
        self._compared.update((p, _reference(p.grad)) for p in new)

    def end_step(self) -> None:
        """Compares the weights after each of the first steps.

        Raises:
            RuntimeError: they differ between ranks.
        """
        if not self._strategy.averages_gradients:
            return
        self._check_weights("after")
        self._num_steps += 1
        self.compares_weights = self._num_steps < _NUM_STEPS

    def _check_weights(self, when: str) -> None:
        """Phase 3."""
        weights = dict(self._trainer.lightning_module.named_parameters())
        different = _different({n: p for n, p in weights.items() if p.is_floating_point() and p.itemsize > 1})
        if different:
            raise RuntimeError(
                f"under {self._strategy!r} the ranks have different weights of {_listed(different)} {when} step"
                f" {self._num_steps + 1}, and would train apart: code has changed them on each rank by itself. An"
                " update by hand must use averages: gradients after `self.manual_backward(loss)`, or"
                " `self.trainer.strategy.reduce(value)` of what each rank has computed from its own samples."
            )

    def _not_averaged(self, names: list[str]) -> str:
        return (
            f"under {self._strategy!r} the gradients of {_listed(names)} were not averaged over the ranks, which"
            " would train apart: call `self.manual_backward(loss)` in place of `loss.backward()`, and assign to"
            " `p.grad` what is the same on all ranks, such as `self.trainer.strategy.reduce(gradient)`, their mean."
        )

    def _too_early(self, optimizer: Optimizer, names: list[str]) -> str:
        return (
            f"under {self._strategy!r} the gradients of {_listed(names)} were not averaged over the ranks yet when"
            f" {type(optimizer).__name__} used them: it steps while backward runs, in a hook of a parameter, and"
            " gradients are averaged after such hooks. Step after the backward, or choose strategy 'fsdp', which"
            " averages before them."
        )


_NOTHING: Any = weakref.ref(set())
"""Refers to an object that no longer exists: it returns None."""


def _reference(gradient: Tensor | None) -> "weakref.ref[Tensor]":
    return _NOTHING if gradient is None else weakref.ref(gradient)


def _listed(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _different(tensors: dict[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that are not equal on all ranks, or not there on all; all ranks call it."""
    by_rank = WORLD.all_gather_object(digests(tensors.items()).on_host())
    present = [dict.fromkeys(name for name, _ in of_rank.pieces) for of_rank in by_rank]
    unequal = dict(unequal_replicas(by_rank, _TOLERANCE, by_size=False))
    names = dict.fromkeys(name for of_rank in present for name in of_rank)
    return [name for name in names if name in unequal or not all(name in of_rank for of_rank in present)]
