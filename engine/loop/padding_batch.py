"""Padding batches: batches that a rank runs for their collectives only.

If a rank has no samples left while other ranks have some, it repeats one of its batches, because all ranks must take
part in collectives: a forward gathers parameters under fsdp, and sends buffers under ddp, and the module may have
collectives of its own. All changes that a padding batch makes are undone.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from lightning.pytorch.trainer import call
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from .._compat.lightning import _ResultCollection, _ResultMetric
from ..data.even_batches import even_batches_of
from ..data.streams import UnevenEvalLoader
from ..distributed.fillers import among_fillers
from ..strategies import updated_buffers
from ..strategies.step_guard import StepSnapshot
from .hooks import Transfer

__all__ = ["EvalPadding", "beside_fillers", "run_padding_batch"]


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

    def is_about(self, batch_idx: int, dataloader_idx: int) -> bool:
        """Whether some rank may have padding for a batch; all ranks have the same answer."""
        loaders = [self._loaders[dataloader_idx]] if self._is_sequential else self._loaders
        return batch_idx >= max(float("inf") if loader is None else loader.num_real_of_all for loader in loaders)

    def is_idle(self, dataloader_idx: int | None) -> bool:
        """Whether this rank has only padding: from the loader of this index, or for None from all loaders."""
        loaders = self._loaders if dataloader_idx is None else [self._loaders[dataloader_idx]]
        return bool(loaders) and all(
            getattr(loader, "leaves_some_idle", False) and self._num_real(loader) == 0 for loader in loaders
        )


@contextmanager
def beside_fillers(trainer: Any, *, is_filler: bool) -> Iterator[None]:
    """Context of a batch that some rank has no sample of.

    Args:
        trainer: trainer of the batch.
        is_filler: this rank has none: at the end, all that the batch has changed is as before.
    """
    with among_fillers(is_filler=is_filler), _restoring(trainer) if is_filler else nullcontext():
        yield
    for metric in _metrics(trainer.lightning_module.modules()):
        for name in _list_states(metric):
            # torchmetrics concatenates such states, but gathers a single one as it is: its dims would differ from those
            # of a rank with several or without any.
            tensors = getattr(metric, name)
            tensors[:] = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in tensors]


def run_padding_batch(
    loop: Any, step: str, batch: Any, batch_idx: int, dataloader_idx: int, loader: int | None
) -> None:
    """Runs a step of the module; called within `beside_fillers`.

    Args:
        loop: Lightning's loop for evaluation or prediction.
        step: name of the step.
        batch: the batch as it was fetched.
        batch_idx: index of the batch in its loader.
        dataloader_idx: index of the loader.
        loader: the same index, as an argument of the step; None if there is only one loader.
    """
    trainer = loop.trainer
    batch = Transfer(trainer)(batch, dataloader_idx)
    if loop._results is not None:  # a prediction logs nothing
        trainer._logger_connector.on_batch_start(batch, loader)
    # Lightning: _EvaluationLoop and _PredictionLoop have both methods.
    arguments = loop._build_kwargs(batch, batch_idx, loader)
    call._call_strategy_hook(trainer, step, *loop._build_step_args_from_hook_kwargs(arguments, step))


@contextmanager
def _restoring(trainer: Any) -> Iterator[None]:
    """Context of a filler: at its end, all that it has changed is as before.

    Its metrics are then such as if it had added no sample to them, so that the ranks gather and compute the same ones.
    """
    connector, results = trainer._logger_connector, trainer._results
    owners = [trainer.lightning_module, *([results, connector] if results is not None else [])]
    snapshot = StepSnapshot(*owners, leaves_out=_stays(trainer))
    logged_before = _names(results)
    metrics = _metrics(snapshot.owners)
    empty_before = [(metric, name) for metric in metrics for name in _list_states(metric) if not getattr(metric, name)]
    counts_before = [metric.update_count for metric in metrics]
    yield
    updated = [
        metric for metric, count in zip(metrics, counts_before, strict=True) if metric.update_count not in (0, count)
    ]
    empty_states = [(metric, name, _empty_rows(getattr(metric, name))) for metric, name in empty_before]
    logged = _names(results) - logged_before
    # A step of training is taken on all ranks: what a module counts its steps by must not differ between them.
    snapshot.undo(keeps_counts=trainer.training)
    # torchmetrics gathers these states as tensors: a tensor without rows has their shape and dtype.
    for metric, name, nothing in empty_states:
        getattr(metric, name).extend(nothing)
    for metric in updated:
        metric._computed = None  # the result of an earlier `compute`, which the other ranks have dropped
        metric._update_count = max(metric._update_count, 1)  # otherwise torchmetrics warns of `compute` before `update`
    connector.names_of_fillers |= logged


def _stays(trainer: Any) -> Callable[[Any], bool]:
    """Returns the function that says whether a filler need not restore an object, since all ranks give it its state."""
    averaged: set[int] = set()
    # Under manual optimization a step of an optimizer, after which they are averaged, is a part of the filler.
    if (
        trainer.training
        and not trainer.lightning_module.automatic_optimization
        and trainer.engine_strategy.averages_buffers
    ):
        averaged = set(map(id, updated_buffers(trainer.lightning_module).values()))
    return lambda owner: id(owner) in averaged or getattr(owner, "is_computed_together", False)


def _names(results: _ResultCollection | None) -> set[str]:
    return {key for key, _ in results.valid_items()} if results is not None else set()


def _metrics(owners: Iterable[Any]) -> list[Metric]:
    """Returns the torchmetrics objects of the user among some objects."""
    return [owner for owner in owners if isinstance(owner, Metric) and not isinstance(owner, _ResultMetric)]


def _list_states(metric: Metric) -> list[str]:
    """Returns the names of the states that are gathered by concatenation."""
    return [n for n, fx in metric._reductions.items() if fx == dim_zero_cat and isinstance(getattr(metric, n), list)]


def _empty_rows(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.reshape(tensor.shape or 1)[:0] for tensor in tensors[:1]]
