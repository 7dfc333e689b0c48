"""The reduction of values logged with `sync_dist=True`, over the ranks at the end of an epoch, in one collective.

Lightning reduces one value at a time, and averages sums and weights separately; ranks that log different names wait for
each other, or mix up their values. Here:

1. Each rank packs the sums, weights and extremes of all unreduced values, by name, into one message of about 50 bytes a
   value.
2. One all-gather sends the messages to all ranks; it blocks until all ranks take part. Where a rank has logged a value
   for no sample (it had only fillers, or fewer batches), a second one sends all values, and how they were logged.
3. Each rank compares the names, and computes the same results in float64, in the order of the ranks.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

# Lightning: where logged values are accumulated.
from .._compat.lightning import _Metadata, _ResultCollection, _ResultMetric, _Sync
from ..distributed.object_group import ObjectGroup

__all__ = ["as_numbers", "has_unreduced", "reduce_results"]


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


def _is_synced(item: _ResultMetric) -> bool:
    """Whether a value is reduced here; Lightning reduces values with a user's group, or logged on rank 0 only."""
    sync = item.meta.sync
    return bool(item.is_tensor and sync.should and not sync.rank_zero_only and sync.group is None)


def _unreduced(results: _ResultCollection) -> dict[str, _ResultMetric]:
    return {key: item for key, item in results.valid_items() if item.meta.on_epoch and item._computed is None}


def has_unreduced(results: _ResultCollection) -> bool:
    """Whether there are values that are not reduced yet."""
    return any(map(_is_synced, _unreduced(results).values()))


def reduce_results(
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
        item, fills = local_items.get(key), False
        if item is None and (is_idle or key in missing.names):
            item, fills = _item_of(message, results.get(key), module), True
            results[key] = item
        if item is None or message.value is None:
            continue  # logged by other ranks only, or reduced by torchmetrics
        if message.is_synced or fills:
            logged = [messages[key] for _, messages in by_rank if key in messages] if message.is_synced else [message]
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
    numbers = as_numbers(tensors)
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
    return values.sum() if op == "sum" else values.amax() if op == "max" else values.amin()


def as_numbers(tensors: dict[Any, Any]) -> dict[Any, Any]:
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
