"""`OptimizerMonitor`: logs the learning rates, and the norm of all gradients of the model, over all shards."""

from collections import Counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from torch import Tensor

from polyphase.engine.precision.clipping import norm_of
from polyphase.engine.strategies import adapt

from ._interval import IntervalCallback

__all__ = ["OptimizerMonitor"]


class OptimizerMonitor(IntervalCallback):
    """Logs the learning rates and `grad_norm`, the norm of all gradients before clipping, at the logged steps.

    The engine adds one to its default logger (`logger=True`), unless there is one. The names of rates are those of
    Lightning's `LearningRateMonitor` (``lr-AdamW``, ``lr-AdamW/pg1``); if the trainer has that callback, it logs them.
    If gradients are clipped by norm, the strategy has computed it; otherwise it is computed for the logged steps only:
    phase 1: each rank computes the norm of its gradients, before the optimizer's step; if they are sharded, an
    all-reduce of a number for each axis of the mesh; phase 2: the host reads it after the step. Strategies whose
    optimizer steps in another process (`ps`), and Lightning's own, have no such norm.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._norms: list[Tensor] = []
        self._rates: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks for what the norm can be computed with."""
        super().on_train_start(trainer, pl_module)
        self._norms = []
        plugin: Any = trainer.precision_plugin
        self._computes_norm = (
            hasattr(plugin, "norm_of") and plugin.clipper is None and adapt(trainer.strategy).capabilities.keeps_step
        )

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Reads the rates of a step that is logged, and computes the norm if clipping will not."""
        if not self.is_due(trainer, trainer.global_step + 1):
            return
        self._rates = _rates(trainer)  # before the schedulers' step
        if not self._computes_norm:
            return
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        plugin: Any = trainer.precision_plugin
        self._norms.append((plugin.norm_of or norm_of)([p for p in parameters if not p.grad.is_sparse]))

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Reads the norm if the interval ends here."""
        self.log_if_due(trainer)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Returns the rates, and the norm, which is the same on all ranks."""
        norms, self._norms = self._norms, []
        rates, self._rates = self._rates or _rates(trainer), {}
        clipped: Tensor | None = getattr(trainer, "grad_norm", None)
        figures = {} if any(isinstance(c, LearningRateMonitor) for c in trainer.callbacks) else rates  # type: ignore[attr-defined]
        if norms:
            figures["grad_norm"] = sum(float(norm) ** 2 for norm in norms) ** 0.5
        elif clipped is not None:
            figures["grad_norm"] = float(clipped)
        return figures


def _rates(trainer: Trainer) -> dict[str, float]:
    """Returns the learning rate of each group of parameters, by Lightning's names."""
    rates: dict[str, float] = {}
    seen: Counter[str] = Counter()
    for optimizer in trainer.optimizers:
        kind = type(optimizer).__name__
        name = f"lr-{kind}-{seen[kind]}" if seen[kind] else f"lr-{kind}"
        seen[kind] += 1
        groups = [group for group in getattr(optimizer, "param_groups", ()) if "lr" in group]
        for number, group in enumerate(groups, start=1):
            rates[f"{name}/pg{number}" if len(groups) > 1 else name] = float(group["lr"])
    return rates
