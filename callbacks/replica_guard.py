"""`ReplicaGuard`: stops a run whose ranks no longer have the same weights where they must.

Phases of a check, which the callback makes after the first two optimizer steps and then at each logging interval:
1. each rank computes the norm and the sum of each of its parameters, in float64, without a copy of them;
2. one all-gather of 16 bytes per parameter and rank, for which the ranks wait;
3. each rank compares itself with the ranks that must have the same tensor.
Nothing is written, and no random number is drawn: weights are bit for bit those of a run without it.
"""

import logging
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from polyphase.engine.data import Together
from polyphase.engine.strategies import LayoutStrategy
from polyphase.engine.verify import is_to_equal

__all__ = ["ReplicaError", "ReplicaGuard"]

_FIRST_STEPS = 2
_INTERVAL_STEPS = 50
"""Optimizer steps between two checks where `log_every_n_steps=0` says that nothing is logged."""

log = logging.getLogger("polyphase.callbacks")


class ReplicaError(RuntimeError):
    """A parameter that must be the same on several ranks differs between them."""


class ReplicaGuard(Callback):
    """Compares what ranks must have in common: all parameters under `ddp`, those that are not split under `tp`.

    It sees weights that drift apart, and says nothing of an error that all ranks make alike: `polyphase verify` does.

    Raises:
        ReplicaError: after an optimizer step, with the parameter that differs most. Ranks that have drifted apart don't
            come together again, so that each further step would be wasted.
    """

    def __init__(self) -> None:
        self.num_checks = 0
        self._reason: str | None = None
        self._step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds out whether there is something to compare; says so if not."""
        self._first = self._step = trainer.global_step
        self._reason = _why_not(trainer)
        if self._reason and trainer.is_global_zero:
            log.info("ReplicaGuard compares nothing: %s.", self._reason)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Checks where it is due."""
        step = trainer.global_step
        if self._reason or step == self._step:
            return
        self._step = step
        interval = trainer.log_every_n_steps or _INTERVAL_STEPS  # type: ignore[attr-defined]
        if step - self._first <= _FIRST_STEPS or step % interval == 0:
            self.num_checks += 1
            _check(pl_module)


def _why_not(trainer: Trainer) -> str | None:
    strategy = trainer.strategy
    if trainer.world_size == 1:
        return "there is one rank"
    if not isinstance(strategy, LayoutStrategy) or not is_to_equal(strategy):
        return "this strategy does not keep ranks equal after each step"
    loses_ranks = any(strategy.can_lose(rank) for rank in range(trainer.world_size))
    if strategy.layout.pp > 1 or strategy.layout.shard > 1 or strategy.state_is_spread or loses_ranks:
        return "it knows only `ddp` and `tp`"
    loader = trainer.train_dataloader
    if not isinstance(loader, DataLoader) or isinstance(loader, Together):
        return "ranks may have different numbers of batches, so that one could wait for the others in vain"
    if not dist.is_initialized() or dist.get_world_size() != strategy.layout.world_size:
        return "the ranks have no process group in common"
    return None


@torch.no_grad()
def _check(module: LightningModule) -> None:
    parameters = dict(module.named_parameters())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in parameters.values()]
    if not local:
        return
    norms = [torch.linalg.vector_norm(p, dtype=torch.float64) for p in local]
    own = torch.stack([torch.stack(norms), torch.stack([p.sum(dtype=torch.float64) for p in local])])
    by_rank = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(by_rank, own)
    found = torch.stack(by_rank).cpu()  # (ranks, norm and sum, parameters)
    worst: tuple[float, str] = (0.0, "")
    for index, (name, parameter) in enumerate(parameters.items()):
        ranks = _replicas(parameter)
        values = found[ranks, :, index]
        if not ((values == values[0]) | (values.isnan() & values[0].isnan())).all():
            spread = float((values.amax(0) - values.amin(0)).nan_to_num(torch.inf).max())
            norms_by_rank = ", ".join(f"{float(v[0]):.9g} on rank {r}" for r, v in zip(ranks, values, strict=True))
            worst = max(
                worst, (spread, f"{name!r}: its norm is {norms_by_rank} (norms or sums differ by {spread:.2e})")
            )
    if worst[1]:
        raise ReplicaError(
            f"ranks no longer have the same weights of {type(module).__name__}. Most different is {worst[1]}. A"
            " gradient that was not reduced, or code that changes weights on one rank. `polyphase verify`, with the"
            " same model, data and strategy, says at which step and in which tensor the run first differs from one"
            " process."
        )


def _replicas(parameter: Tensor) -> list[int]:
    """The ranks that must have the same local tensor of a parameter."""
    if not isinstance(parameter, DTensor):
        return list(range(dist.get_world_size()))
    is_whole = all(placement.is_replicate() for placement in parameter.placements)
    return list(range(dist.get_world_size())) if is_whole else [dist.get_rank()]
