"""The logger connector, which computes logged metrics when they are read, not at every step.

Lightning rebuilds the dicts behind `callback_metrics`, `logged_metrics` and `progress_bar_metrics` after every batch,
and then reads each progress-bar value from the device. The properties rebuild the dicts anyway whenever they are read.
So it is enough to rebuild them on a read, and before the values of a batch or an epoch are dropped.
"""

import dataclasses
import inspect
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.apply_func import convert_tensors_to_scalars
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

# Lightning: where logged values are accumulated.
from .._compat.lightning import _METRICS, _LoggerConnector, _Metadata, _ResultCollection, _ResultMetric, _Sync
from ..checkpoint.checked_io import naming
from ..distributed.object_group import ObjectGroup
from .padding_batch import EvalPadding

__all__ = [
    "LoggerConnector",
    "agreed_value",
    "caller_of_kind",
]

_MIN_READS = 3
"""Number of successive steps that read the progress bar's metrics, after which a warning is logged."""
_READ_WARNING = (
    "%s reads `progress_bar_metrics` at every step, and the host waits for the device each time. Read them at logging"
    " intervals, as polyphase.callbacks.ProgressBar does."
)

log = logging.getLogger("polyphase.engine")


def _is_asynchronous(value: Any) -> bool:
    """Whether reading `value` waits for a device that computes asynchronously."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


class LoggerConnector(_LoggerConnector):  # Lightning: Trainer._logger_connector
    """Lightning's connector, with metrics collected on demand."""

    results: _ResultCollection | None = None
    """The results that the current batch logs to; None between batches, and where Lightning's loops run them."""
    padding: EvalPadding | None = None
    """Knows which ranks have batches to evaluate, if the engine splits them; otherwise None."""
    all_ranks_reach_end = True
    """Whether all ranks evaluate each loader to its end, so that they can communicate there."""
    names_of_fillers: set[str]
    """The names of the values that only fillers of this rank have logged, in this epoch or evaluation."""
    _read_step = -1
    _num_reads = 0

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.names_of_fillers = set()
        self.issued_warnings: set[str] = set()
        """The warnings that were issued already, by the name of a logged value or the message."""
        self.overwritten: list[tuple[_ResultMetric, Any]] = []
        """The logged values that the current batch has changed, each with its value before."""
        self._read_dicts: set[str] = set()  # which of the three dicts the current batch has read
        self._is_outdated = False  # whether a batch ended since the dicts were brought up to date

    def begin_batch(self, results: _ResultCollection, batch: Any, dataloader_idx: int | None = None) -> None:
        """Begins a batch as Lightning's `on_batch_start` does, for a loop that knows its results."""
        self._first_loop_iter = self._first_loop_iter is None
        results.batch = batch
        results.batch_size = None
        results.dataloader_idx = dataloader_idx
        self.results = results

    def end_batch(self) -> None:
        """Ends a batch."""
        results, self.results = self.results, None
        assert results is not None
        results.batch = results.batch_size = None
        self.overwritten.clear()
        self._read_dicts.clear()
        self._is_outdated = True

    def collect(self) -> None:
        """Updates the three dicts of metrics with the last batch that has ended."""
        if self._is_outdated and self.trainer._results:
            # The values of a current batch, which was cancelled or has raised, are left out, but kept: under the stock
            # trainer, too, they can be read in the next `fit` before its first validation batch.
            latest = [(item, item._forward_cache) for item, _ in self.overwritten]
            for item, value in reversed(self.overwritten):
                item._forward_cache = value
            metrics = self.metrics
            for item, value in latest:
                item._forward_cache = value
            if "pbar" not in self._read_dicts:
                self._progress_bar_metrics.update(metrics["pbar"])
            if "callback" not in self._read_dicts:
                self._callback_metrics.update(metrics["callback"])
            if "log" not in self._read_dicts:
                self._logged_metrics.update(metrics["log"])
        if self.results is not None:
            self.end_batch()
        self._is_outdated = False

    def epoch_end_reached(self) -> None:
        """Called by Lightning when the values of the last step are no longer current."""
        self.collect()
        super().epoch_end_reached()
        if self.trainer.training:  # an evaluation reduces after each of its loaders
            self.synchronise()

    def on_epoch_end(self) -> None:
        """Called by Lightning after the hooks of that name, which may have logged values, too."""
        self.synchronise()
        super().on_epoch_end()

    def synchronise(self) -> None:
        """Reduces values logged with `sync_dist` over the ranks; a rank that has logged nothing takes part, too."""
        if self.trainer.training or self.all_ranks_reach_end:
            self._reduce()

    @property
    def _is_single_rank(self) -> bool:
        return self.trainer.data_ranks.size == 1  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        trainer: Any = self.trainer
        results, padding = trainer._results, None if trainer.training else self.padding
        if results is None or self._is_single_rank or trainer.barebones:
            return
        _reduce_results(
            results,
            trainer.lightning_module,
            trainer.data_ranks,
            is_idle=padding is not None and padding.is_idle(results.dataloader_idx),
            names_of_fillers=self.names_of_fillers,
        )

    def reset_results(self) -> None:
        """Called by Lightning at the start and the end of an epoch or evaluation."""
        super().reset_results()
        # Lightning: the names begin with that of the hook; a validation begins and ends within an epoch of training.
        in_training = self.trainer.training
        self.names_of_fillers = {n for n in self.names_of_fillers if n.startswith("training_step.") != in_training}

    def teardown(self) -> None:
        """Called by Lightning at the end of a run, also of an interrupted one."""
        self.collect()
        super().teardown()

    @property
    def metrics(self) -> _METRICS:
        """The metrics of the batch or of the epoch; the progress bar's are still tensors."""
        # Lightning: _ResultCollection.metrics, which reads the progress bar's from the device at once.
        on_step = self._first_loop_iter is not None
        results = self.trainer._results
        assert results is not None
        if not on_step and not self._is_single_rank and any(map(_is_synced, _unreduced(results).values())):
            self._reduce()  # read in the hook that logged it
        metrics = _METRICS(callback={}, log={}, pbar={})
        for _, item in results.valid_items():
            meta = item.meta
            if on_step and not meta.on_step:
                continue
            value = results._get_cache(item, on_step)
            if not isinstance(value, Tensor):
                continue
            name, forked_name = results._forked_name(item, on_step)
            if meta.logger:
                metrics["log"][forked_name] = value
            if results.training or (meta.on_epoch and not on_step):
                metrics["callback"][name] = value
                metrics["callback"][forked_name] = value
            if meta.prog_bar:
                metrics["pbar"][forked_name] = value  # type: ignore[assignment]
        return metrics

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The current values of the metrics for callbacks."""
        self._note_read("callback")
        return super().callback_metrics

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The current values of the metrics for loggers."""
        self._note_read("log")
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The progress bar's metrics as numbers, read from the device together."""
        self._note_read("pbar")
        metrics = super().progress_bar_metrics
        if self.results is not None and any(_is_asynchronous(value) for value in metrics.values()):
            self._count_read()
        return _as_numbers(metrics)

    def _note_read(self, metrics: str) -> None:
        if self.results is not None:
            self._read_dicts.add(metrics)

    def _count_read(self) -> None:
        """Warns once if the host waits for the device between two logging intervals, step after step."""
        step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
        if step == self._read_step or self.should_update_logs:
            return
        self._num_reads = self._num_reads + 1 if step == self._read_step + 1 else 1
        self._read_step = step
        if self._num_reads == _MIN_READS and _READ_WARNING not in self.issued_warnings:
            self.issued_warnings.add(_READ_WARNING)
            caller = caller_of_kind(Callback)
            log.warning(_READ_WARNING, "A callback" if caller is None else type(caller).__name__)

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Sends `metrics` to the loggers; tensors of a device are read together."""
        # Lightning: _LoggerConnector.log_metrics, which reads one after the other.
        if not self.trainer.loggers or not metrics:
            return
        self._logged_metrics.update(metrics)
        numbers = convert_tensors_to_scalars(_as_numbers(metrics))  # which raises Lightning's error about other tensors
        if step is None:
            step = numbers.pop("step", None)
            if step is None:
                numbers.setdefault("epoch", self.trainer.current_epoch)
                step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            step = int(step)
        for logger in self.trainer.loggers:
            with naming(str(logger.log_dir)):  # a full disk's error has no path
                logger.log_metrics(metrics=numbers, step=step)
                logger.save()
            self.trainer._checkpoint_connector.logs.note(logger, numbers, step)  # type: ignore[attr-defined]


def caller_of_kind(kinds: type | tuple[type, ...]) -> Any:
    """Returns the innermost object of these classes whose method is being called; None if there is none."""
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), kinds):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def agreed_value(trainer: Any, name: str, value: Any) -> Any:
    """Returns the value of a metric by which a scheduler sets learning rates, the same on all ranks.

    Without `sync_dist=True` a value is that of a rank's own samples, by which each rank would train with another rate.
    Blocks until all ranks have sent theirs: 16 bytes, once for each step of such a scheduler.

    Args:
        trainer: its ranks call this together.
        name: the name under which the value was logged.
        value: this rank's; None if it has logged none.
    """
    if trainer.world_size == 1 or not trainer.engine_strategy.capabilities.keeps_step:
        return value
    item = _logged_item(trainer, name)
    # The number of samples that the rank has logged a mean of; 0 if it is not known.
    own = None if value is None else (float(value), float(getattr(item, "cumulated_batch_size", 0.0)))
    pairs = [pair for pair in trainer.all_ranks.all_gather_object(own) if pair is not None]
    is_equal = len({repr(number) for number, _ in pairs}) == 1  # as text, by which NaN equals NaN
    if not pairs or (own is not None and is_equal):
        return value
    numbers, weights = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    reduce = None if item is None else _REDUCTIONS.get(item.meta.reduce_fx.__name__)
    if reduce is not None:
        agreed = reduce(numbers)
    else:
        weights = weights if weights.all() else torch.ones_like(weights)
        agreed = (numbers * weights).sum() / weights.sum()
    return agreed.float() if value is None else agreed.to(value)


def _logged_item(trainer: Any, name: str) -> _ResultMetric | None:
    loop = trainer.fit_loop.epoch_loop
    items = [item for results in (loop._results, loop.val_loop._results) for item in results.values()]
    return next((item for item in items if item.meta.name == name and item.meta.on_epoch), None)


# The reduction of values logged with `sync_dist=True`, over the ranks at the end of an epoch, in one collective.
#
# Lightning reduces one value at a time, and averages sums and weights separately; ranks that log different names wait
# for each other, or mix up their values. Here:
#
# 1. Each rank packs the sums, weights and extremes of all unreduced values, by name, into one message of about 50
#    bytes a value.
# 2. One all-gather sends the messages to all ranks; it blocks until all ranks take part. Where a rank has logged a
#    value for no sample (it had only fillers, or fewer batches), a second one sends all values, and how they were
#    logged.
# 3. Each rank compares the names, and computes the same results in float64, in the order of the ranks.


@dataclasses.dataclass(frozen=True)
class _Message:
    """The value that one rank has logged under one name."""

    op: str
    value: float | None
    """The sum or extreme; None for a torchmetrics object, which reduces itself."""
    weight: float | None
    """The sum of the batch sizes, if a mean is computed."""
    is_synced: bool
    meta: dict[str, Any] | None = None
    """The metadata of the logged value, for ranks that have logged nothing."""


_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"sum": Tensor.sum, "max": Tensor.amax, "min": Tensor.amin}
"""All that `self.log` knows beside the mean, which needs weights."""


def _is_synced(item: _ResultMetric) -> bool:
    """Whether a value is reduced here; Lightning reduces values with a user's group, or logged on rank 0 only."""
    sync = item.meta.sync
    return bool(item.is_tensor and sync.should and not sync.rank_zero_only and sync.group is None)


def _unreduced(results: _ResultCollection) -> dict[str, _ResultMetric]:
    return {key: item for key, item in results.valid_items() if item.meta.on_epoch and item._computed is None}


def _reduce_results(
    results: _ResultCollection,
    module: LightningModule,
    ranks: ObjectGroup,
    *,
    is_idle: bool = False,
    names_of_fillers: Collection[str] = (),
) -> None:
    """Reduces all unreduced values of an epoch; all ranks call it together, also those without values.

    A rank gets from the others the values that it has logged for no sample, so that all ranks have the same ones: where
    torchmetrics objects are among them, all ranks compute them together.

    Args:
        results: changed in place: reduced values count as computed.
        module: the module whose torchmetrics objects are logged.
        ranks: the ranks with different samples.
        is_idle: this rank has run no batch.
        names_of_fillers: the names that only fillers of this rank have logged.

    Raises:
        ValueError: a name was logged on some ranks only, or with different arguments.
    """
    local_items = {key: item for key, item in _unreduced(results).items() if _is_synced(item)}
    missing = _Missing(is_idle, frozenset(names_of_fillers).difference(_unreduced(results)))
    by_rank = ranks.all_gather_object((missing, _messages_of(local_items, with_meta=False)))
    some_miss_values = any(of_rank.is_idle or of_rank.names for of_rank, _ in by_rank)
    if some_miss_values:  # which may be values that are each rank's own, or torchmetrics objects
        local_items = _unreduced(results)
        by_rank = ranks.all_gather_object((missing, _messages_of(local_items, with_meta=True)))
    _compare(by_rank)
    for key, message in _first_of_each(by_rank).items():
        item = local_items.get(key)
        logged = [messages[key] for _, messages in by_rank if key in messages] if message.is_synced else []
        if item is None and missing.has(key):
            item = results[key] = _item_of(message, results.get(key), module)
            logged = logged or [message]
        if item is None or message.value is None or not logged:
            continue  # logged by other ranks only, or reduced by torchmetrics, or a rank's own
        item._computed = _reduced(message.op, logged).to(item.value)  # type: ignore[assignment]


class _Missing(NamedTuple):
    """The values that a rank has not logged for any sample, and does not have to."""

    is_idle: bool
    """All that are not there."""
    names: frozenset[str]
    """Those of these names."""

    def has(self, name: str) -> bool:
        return self.is_idle or name in self.names


def _first_of_each(by_rank: list[tuple[_Missing, dict[str, _Message]]]) -> dict[str, _Message]:
    """Returns the message of the first rank that has logged a name, for each name, in the order of the logs."""
    first: dict[str, _Message] = {}
    for _, messages in by_rank:
        for key, message in messages.items():
            first.setdefault(key, message)
    return first


def _messages_of(items: dict[str, _ResultMetric], *, with_meta: bool) -> dict[str, _Message]:
    tensors = {
        (key, name): getattr(item, name) for key, item in items.items() if item.is_tensor for name in _states(item)
    }
    numbers = _as_numbers(tensors)
    return {
        key: _Message(
            op=item.meta.sync.op,  # type: ignore[arg-type]
            value=numbers.get((key, "value")),
            weight=numbers.get((key, "cumulated_batch_size")),
            is_synced=_is_synced(item),
            meta=_fields_of(item.meta) if with_meta else None,
        )
        for key, item in items.items()
    }


def _states(item: _ResultMetric) -> tuple[str, ...]:
    return ("value", "cumulated_batch_size") if item.meta.is_mean_reduction else ("value",)


def _fields_of(meta: _Metadata) -> dict[str, Any]:
    fields = {field.name: getattr(meta, field.name) for field in dataclasses.fields(meta)}
    del fields["_sync"], fields["reduce_fx"]
    return fields


def _item_of(message: _Message, earlier: _ResultMetric | None, module: LightningModule) -> _ResultMetric:
    """Returns the logged value that an idle rank would have if it had logged like the others."""
    if earlier is not None:  # of an earlier epoch
        item = earlier
        item._computed = None  # Lightning keeps the earlier value of a torchmetrics object until its next update
    else:
        assert message.meta is not None
        meta = _Metadata(**message.meta, reduce_fx=getattr(torch, message.op))
        meta.sync = _Sync(fn=module.trainer.strategy.reduce, _should=message.is_synced)
        item = _ResultMetric(meta, is_tensor=message.value is not None).to(module.device)
    if not item.is_tensor:
        assert item.meta.metric_attribute is not None
        item.value = module.get_submodule(item.meta.metric_attribute)
    item.has_reset, item._update_count = False, 1  # otherwise torchmetrics warns of `compute` before `update`
    return item


def _compare(by_rank: list[tuple[_Missing, dict[str, _Message]]]) -> None:
    names = {key: message.op for _, messages in by_rank for key, message in messages.items() if message.is_synced}
    for key, op in names.items():
        ranks_with = [rank for rank, (_, messages) in enumerate(by_rank) if key in messages]
        ranks_without = [
            rank for rank, (missing, messages) in enumerate(by_rank) if key not in messages and not missing.has(key)
        ]
        hook, _, name = key.partition(".")
        if ranks_without:
            raise ValueError(
                f"self.log({name!r}, ..., sync_dist=True) was called in `{hook}` on rank(s) {ranks_with}, but not on"
                f" rank(s) {ranks_without}: log the same names on all ranks, or leave out sync_dist."
            )
        ops = {rank: by_rank[rank][1][key].op for rank in ranks_with}
        if set(ops.values()) != {op} or not all(by_rank[rank][1][key].is_synced for rank in ranks_with):
            raise ValueError(
                f"self.log({name!r}, ..., sync_dist=True) was called in `{hook}` with other arguments on some ranks:"
                f" reduce_fx is {ops} by rank. Log it in the same way on all of them."
            )


def _reduced(op: str, messages: list[_Message]) -> Tensor:
    values = torch.tensor([message.value for message in messages], dtype=torch.float64)
    if op == "mean":
        return values.sum() / torch.tensor([message.weight for message in messages], dtype=torch.float64).sum()
    return _REDUCTIONS[op](values)


def _as_numbers(tensors: dict[Any, Any]) -> dict[Any, Any]:
    """Returns `tensors` with numbers in place of scalars; all scalars of a device and dtype are read together."""
    numbers = dict(tensors)
    kinds: dict[Any, list[Any]] = defaultdict(list)
    for name, value in tensors.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            kinds[value.device, value.dtype].append(name)
    for names in kinds.values():
        values = [tensors[name].detach().reshape(()) for name in names]
        numbers.update(zip(names, torch.stack(values).tolist() if len(values) > 1 else [values[0].item()], strict=True))
    return numbers
