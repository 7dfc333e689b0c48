"""A batch that is run for its collectives only.

A rank that has no sample left while others have runs one of theirs once more: forward passes under fsdp gather
parameters, those under ddp send buffers, and what the module itself does between the ranks needs all of them. What it
leaves behind is put back.
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
    """Which batches of an evaluation are padding on this rank.

    Args:
        loaders: those of a `CombinedLoader`.
        is_sequential: whether one is read after the other; else a batch has a part of each, and is padding if
            all of its parts are.
    """

    def __init__(self, loaders: list[Any], is_sequential: bool) -> None:
        self._loaders = [
            loader if isinstance(loader, UnevenEvalLoader) else even_batches_of(loader) for loader in loaders
        ]
        self._is_sequential = is_sequential

    @property
    def any(self) -> bool:
        """Whether there are loaders with padding to look for."""
        return any(loader is not None for loader in self._loaders)

    @property
    def are_even(self) -> bool:
        """Whether all ranks have as many batches of each loader."""
        return None not in self._loaders

    @property
    def have_padding(self) -> bool:
        """Whether a rank has a padding batch, or may have one."""
        return any(getattr(loader, "has_padding", True) for loader in self._loaders if loader is not None)

    def _num_real(self, loader: Any) -> float:
        return float("inf") if loader is None else loader.num_real

    def is_padding(self, batch_idx: int, dataloader_idx: int) -> bool:
        """Whether a batch, of this rank, is one."""
        if self._is_sequential:
            return batch_idx >= self._num_real(self._loaders[dataloader_idx])
        return batch_idx >= max(map(self._num_real, self._loaders))

    def leave_some_idle(self, dataloader_idx: int | None) -> bool:
        """Whether some rank has no batch but padding, of one loader or of all."""
        loaders = self._loaders if dataloader_idx is None else [self._loaders[dataloader_idx]]
        return bool(loaders) and all(getattr(loader, "leaves_some_idle", False) for loader in loaders)

    def is_idle(self, dataloader_idx: int | None) -> bool:
        """Whether this rank is such a one."""
        loaders = self._loaders if dataloader_idx is None else [self._loaders[dataloader_idx]]
        return self.leave_some_idle(dataloader_idx) and all(self._num_real(loader) == 0 for loader in loaders)


def run_padding_batch(
    loop: Any, step: str, batch: Any, batch_idx: int, dataloader_idx: int, loader: int | None, *others: Any
) -> None:
    """Runs a step of the module, and puts back what it changed.

    Args:
        loop: of Lightning's, for evaluation or prediction.
        step: name of the step.
        batch: as it was fetched.
        batch_idx: its number.
        dataloader_idx: its loader's number.
        loader: the same, where the step is told; None where there is one loader only.
        others: what else the step may change: objects of the loop's.
    """
    trainer = loop.trainer
    with _undone(trainer.lightning_module, *others):
        batch = Transfer(trainer)(batch, dataloader_idx)
        if loop._results is not None:  # a prediction logs nothing
            trainer._logger_connector.on_batch_start(batch, loader)
        # Lightning: _EvaluationLoop and _PredictionLoop have both methods.
        arguments = loop._build_kwargs(batch, batch_idx, loader)
        call._call_strategy_hook(trainer, step, *loop._build_step_args_from_hook_kwargs(arguments, step))


@contextmanager
def _undone(module: nn.Module, *others: Any) -> Iterator[None]:
    undo = StepSnapshot(module, *others)
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    new = [metric for metric in metrics if not metric.update_called]
    yield
    new = [metric for metric in new if metric.update_called]
    kinds = [(metric, name, _nothing_of(getattr(metric, name))) for metric in new for name in _lists(metric)]
    undo.undo()
    # torchmetrics gathers these states as tensors, and can't guess their kind where there are none: no rows say it.
    for metric, name, nothing in kinds:
        getattr(metric, name).extend(nothing)
    for metric in new:
        metric._update_count = 1  # else it warns that it is asked too early


def _lists(metric: Metric) -> list[str]:
    """Names of states that are gathered by concatenation."""
    return [n for n, fx in metric._reductions.items() if fx == dim_zero_cat and isinstance(getattr(metric, n), list)]


def _nothing_of(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.reshape(tensor.shape or 1)[:0] for tensor in tensors[:1]]
