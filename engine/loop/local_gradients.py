"""Detects gradients that a manual step has not averaged over the ranks: those of `loss.backward()` under `ddp`.

`DistributedDataParallel` averages only in a backward that it was prepared for. `manual_backward` prepares it, a
tensor's own `backward` does not: each rank would step with its own gradients, and the replicas would diverge.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LocalGradients"]


class LocalGradients:
    """Refuses optimizer steps that would use gradients of this rank alone, until it is closed.

    Args:
        parameters: the parameters with their names.
        optimizers: the optimizers of these parameters.
        strategy: name of the strategy, for the message.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], optimizers: Iterable[Optimizer], strategy: str
    ) -> None:
        self._names = {parameter: name for name, parameter in parameters}
        self._strategy = strategy
        self._averages = False
        self._local: set[Tensor] = set()
        self._handles: list[Any] = [p.register_post_accumulate_grad_hook(self._note) for p in self._names if p.is_leaf]
        self._handles += [optimizer.register_step_pre_hook(self._check) for optimizer in optimizers]

    def close(self) -> None:
        """Removes its hooks."""
        for handle in self._handles:
            handle.remove()
        self._local.clear()

    @contextmanager
    def averaged(self) -> Generator[None, None, None]:
        """Context manager around a backward by the strategy, which averages all accumulated gradients."""
        self._averages = True
        try:
            yield
        finally:
            self._averages = False

    def _note(self, parameter: Tensor) -> None:
        if self._averages:
            self._local.discard(parameter)
        else:
            self._local.add(parameter)

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        """Called before each step.

        Raises:
            RuntimeError: the step would use a gradient that is not averaged.
        """
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        names = [self._names[p] for p in parameters if p in self._local and p.grad is not None]
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise RuntimeError(
                f"under {self._strategy} the gradients of {names[0]}{others} were not averaged over the ranks, which"
                " would train apart: call `self.manual_backward(loss)` in place of `loss.backward()`."
            )
