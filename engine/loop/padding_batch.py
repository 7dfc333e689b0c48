"""Padding batches: batches that a rank runs for their collectives only.

If a rank has no samples left while other ranks have some, it repeats one of its batches, because all ranks must take
part in collectives: a forward gathers parameters under fsdp, and sends buffers under ddp, and the module may have
collectives of its own. All changes that a padding batch makes are undone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer import call
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ..data import UnevenEvalLoader, even_batches_of
from .step_snapshot import StepSnapshot
from .transfer import Transfer

__all__ = ["EvalPadding", "run_padding_batch"]


class EvalPadding:
    """The padding batches of an evaluation on this rank.

    Args:
        loaders: loaders of a `CombinedLoader`.
        is_sequential: whether they are read one after the other; otherwise a batch has a part of each loader, and is
            padding if all of its parts are.
    """

    def __init__(self, loaders: list[Any], is_sequential: bool) -> None:
        self._loaders = [
            loader if isinstance(loader, UnevenEvalLoader) else even_batches_of(loader) for loader in loaders
        ]
        self._is_sequential = is_sequential

    @property
    def may_occur(self) -> bool:
        """Whether there are loaders that may have padding."""
        return any(loader is not None for loader in self._loaders)

    @property
    def are_even(self) -> bool:
        """Whether all ranks have equally many batches of each loader."""
        return None not in self._loaders

    @property
    def have_padding(self) -> bool:
        """Whether some rank has a padding batch, or may have one."""
        return any(getattr(loader, "has_padding", True) for loader in self._loaders if loader is not None)

    def _num_real(self, loader: Any) -> float:
        return float("inf") if loader is None else loader.num_real

    def is_padding(self, batch_idx: int, dataloader_idx: int) -> bool:
        """Whether a batch of this rank is padding."""
        if self._is_sequential:
            return batch_idx >= self._num_real(self._loaders[dataloader_idx])
        return batch_idx >= max(map(self._num_real, self._loaders))

    def leave_some_idle(self, dataloader_idx: int | None) -> bool:
        """Whether some rank has only padding: from the loader of this index, or for None from all loaders."""
        loaders = self._loaders if dataloader_idx is None else [self._loaders[dataloader_idx]]
        return bool(loaders) and all(getattr(loader, "leaves_some_idle", False) for loader in loaders)

    def is_idle(self, dataloader_idx: int | None) -> bool:
        """Whether this rank has only padding: from the loader of this index, or for None from all loaders."""
        loaders = self._loaders if dataloader_idx is None else [self._loaders[dataloader_idx]]
        return self.leave_some_idle(dataloader_idx) and all(self._num_real(loader) == 0 for loader in loaders)


def run_padding_batch(
    loop: Any, step: str, batch: Any, batch_idx: int, dataloader_idx: int, loader: int | None, *others: Any
) -> None:
    """Runs a step of the module, and restores what it has changed.

    Args:
        loop: Lightning's loop for evaluation or prediction.
        step: name of the step.
        batch: the batch as it was fetched.
        batch_idx: index of the batch in its loader.
        dataloader_idx: index of the loader.
        loader: the same index, as an argument of the step; None if there is only one loader.
        others: other objects that the step may change.
    """
    trainer = loop.trainer
    with _restoring(trainer.lightning_module, *others):
        batch = Transfer(trainer)(batch, dataloader_idx)
        if loop._results is not None:  # a prediction logs nothing
            trainer._logger_connector.on_batch_start(batch, loader)
        # Lightning: _EvaluationLoop and _PredictionLoop have both methods.
        arguments = loop._build_kwargs(batch, batch_idx, loader)
        call._call_strategy_hook(trainer, step, *loop._build_step_args_from_hook_kwargs(arguments, step))


@contextmanager
def _restoring(module: nn.Module, *others: Any) -> Iterator[None]:
    snapshot = StepSnapshot(module, *others)
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    first_updated = [metric for metric in metrics if not metric.update_called]
    yield
    first_updated = [metric for metric in first_updated if metric.update_called]
    empty_states = [
        (metric, name, _empty_rows(getattr(metric, name))) for metric in first_updated for name in _list_states(metric)
    ]
    snapshot.undo()
    # torchmetrics gathers these states as tensors: a tensor without rows has their shape and dtype.
    for metric, name, nothing in empty_states:
        getattr(metric, name).extend(nothing)
    for metric in first_updated:
        metric._update_count = 1  # otherwise torchmetrics warns of `compute` before `update`


def _list_states(metric: Metric) -> list[str]:
    """Returns the names of the states that are gathered by concatenation."""
    return [n for n, fx in metric._reductions.items() if fx == dim_zero_cat and isinstance(getattr(metric, n), list)]


def _empty_rows(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.reshape(tensor.shape or 1)[:0] for tensor in tensors[:1]]
