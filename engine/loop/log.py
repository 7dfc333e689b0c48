"""A fast `LightningModule.log` for all calls of a call site after its first one.

The first call of a call site, and all calls in the first batch of an epoch, go through Lightning's own `log`, which
validates the arguments and creates the `_ResultMetric` that accumulates the values. Further calls with the same
arguments skip the validation, and only update that object, with the same arithmetic.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

# Lightning: where logged values are accumulated, and the dtype they have at least.
from .._compat.lightning import _get_default_dtype, _ResultCollection, _ResultMetric
from .compile import LOG_BREAK_REASON
from .hooks import bound, is_lightnings
from .metrics import LoggerConnector

__all__ = ["Log", "attach_log", "detach_log"]

_STEP_SYNC_WARNING = (
    "self.log(%r, ..., sync_dist=True) with on_step=True adds a collective to every step, for which all ranks wait. Log"
    " it with on_step=False, on_epoch=True to have it reduced once an epoch."
)

# `torch.full` takes no larger whole number.
_MAX_INT = 2**63 - 1

log = logging.getLogger("polyphase.engine")


def attach_log(module: LightningModule, connector: LoggerConnector) -> None:
    """Replaces the module's `log` by a `Log`, unless its class or the module itself overrides it."""
    if is_lightnings(type(module).log) and "log" not in module.__dict__:
        replacement = Log(module, connector)
        # Disabled for the compiler, it breaks the graph of a step at the user's line, not in this file.
        is_compiled = bool(connector.trainer.config.compile)  # type: ignore[attr-defined]
        module.__dict__["log"] = replacement.outside_of_graph if is_compiled else replacement


def detach_log(module: LightningModule) -> None:
    """Restores the module's own `log`."""
    replacement = module.__dict__.get("log")
    if isinstance(getattr(getattr(replacement, "__wrapped__", None), "__self__", replacement), Log):
        del module.__dict__["log"]


class Log:
    """The replacement of `LightningModule.log` while a loop runs; if the class gets another `log`, it calls that."""

    def __init__(self, module: LightningModule, connector: LoggerConnector) -> None:
        self._module = module
        self._replaced = type(module).log
        self._connector = connector
        self._sites: dict[Any, tuple[_ResultCollection, str, _ResultMetric]] = {}
        self.outside_of_graph = torch.compiler.disable(self.__call__, reason=LOG_BREAK_REASON)

    def __call__(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[Any], Any] = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """See `LightningModule.log`."""
        if torch.compiler.is_compiling():  # in a part of the step that the user compiles
            self.outside_of_graph(
                name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist,
                sync_dist_group, add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
            )  # fmt: skip
            return
        if (of_class := type(self._module).log) is not self._replaced:  # patched in mid-epoch
            of_class(
                self._module, name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist,
                sync_dist_group, add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
            )  # fmt: skip
            return
        if isinstance(value, DTensor):  # for example a loss under tensor parallelism
            value = value.full_tensor()
        connector, results = self._connector, self._connector.results
        hook = self._module.__dict__["_current_fx_name"]
        site: Any = None
        if results is not None and connector._first_loop_iter is False:
            # Lightning requires a size of the batch, any, in a step with a `dataloader_iter`.
            site = (
                hook, name, results.dataloader_idx, type(value), prog_bar, logger, on_step, on_epoch, reduce_fx,
                enable_graph, sync_dist, sync_dist_group, add_dataloader_idx, batch_size is None, metric_attribute,
                rank_zero_only,
            )  # fmt: skip
            try:
                validated = self._sites.get(site)
            except TypeError:  # an argument that can't be hashed: Lightning raises its own error for it
                validated = site = None
            if (
                validated is not None
                and validated[0] is results
                and results.get(validated[1]) is validated[2]  # not of a batch that was undone, and is made again
                and self._update(results, validated[2], value, batch_size)
            ):
                connector._current_fx = hook
                return
        key = _key(results, hook, name, add_dataloader_idx)
        before = _value_before(results, key)
        LightningModule.log(
            self._module, name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, enable_graph, sync_dist,
            sync_dist_group, add_dataloader_idx, batch_size, metric_attribute, rank_zero_only,
        )  # fmt: skip
        if results is not None and key in results:  # `barebones` logs nothing
            self._remember(results, key, before, name, None if enable_graph else site)

    def _remember(self, results: _ResultCollection, key: str, before: Any, name: str, site: Any) -> None:
        """Records a call that Lightning has validated, so that later calls of the site need no validation."""
        item = results[key]
        self._connector.overwritten.append((item, before))
        if item.meta.sync.should and item.meta.on_step:
            self._warn_of_step_sync(
                name
            )  # Lightning handles all calls of this site, since it reduces the value in each
        elif site is not None:
            self._sites[site] = results, key, item

    def _warn_of_step_sync(self, name: str) -> None:
        if name not in self._connector.issued_warnings and self._connector.trainer.is_global_zero:
            self._connector.issued_warnings.add(name)
            log.warning(_STEP_SYNC_WARNING, name)

    def _update(self, results: _ResultCollection, item: _ResultMetric, value: Any, batch_size: int | None) -> bool:
        """Updates a logged value as Lightning does; returns False if Lightning must handle this value itself."""
        # Lightning: LightningModule.log, _ResultCollection.log and _ResultMetric.update. `_ResultMetric.__setattr__`
        # does no more than to write here, in Python.
        state = item.__dict__
        before = state["_forward_cache"]
        if not item.is_tensor:
            if item.value is not value or not isinstance(value, Metric):
                return False
            state["_forward_cache"] = value._forward_cache
        else:
            tensor = self._as_tensor(value)
            if tensor is None or tensor.device != state["value"].device:
                return False
            meta = item.meta
            if meta.on_step:
                state["_forward_cache"] = value.detach().clone() if tensor is value else tensor
                if not meta.on_epoch:
                    state["value"] = state["_forward_cache"]
            if meta.on_epoch:
                tensor = tensor.detach()
                if meta.is_mean_reduction:
                    size = results._extract_batch_size(item, batch_size, meta)
                    state["value"] = state["value"] + tensor * size
                    state["cumulated_batch_size"] = state["cumulated_batch_size"] + size
                elif meta.is_sum_reduction:
                    state["value"] = state["value"] + tensor
                else:
                    extreme = meta.reduce_fx(state["value"], tensor)
                    # Python's `max` and `min` return one of the two objects.
                    state["value"] = tensor.clone() if extreme is tensor else extreme
        self._connector.overwritten.append((item, before))
        state["_computed"] = None
        state["_update_count"] += 1
        state["has_reset"] = False
        return True

    def _as_tensor(self, value: Any) -> Tensor | None:
        """Returns a 0-d tensor of float32 or float64, `value` itself if it is one; None if Lightning must handle it."""
        kind = type(value)
        if kind is Tensor:
            if value.dim() != 0 or not value.is_floating_point():
                return None
            dtype = value.dtype
            return (
                value if dtype is torch.float32 or dtype is torch.float64 else value.detach().to(_get_default_dtype())
            )
        if kind is float or kind is int or kind is bool:
            # Filled on the device, since a copy from the host would wait for the device.
            fits = kind is not int or -_MAX_INT <= value <= _MAX_INT
            return torch.full((), value, dtype=_get_default_dtype(), device=self._module.device) if fits else None
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled module gets its own `log`, without a reference to this trainer.
        return bound, (LightningModule.log, self._module)


def _key(results: _ResultCollection | None, hook: str, name: str, add_dataloader_idx: bool) -> str:
    # Lightning: _ResultCollection.log builds its keys so.
    if results is not None and add_dataloader_idx and results.dataloader_idx is not None:
        return f"{hook}.{name}.{results.dataloader_idx}"
    return f"{hook}.{name}"


def _value_before(results: _ResultCollection | None, key: str) -> Any:
    """Returns the last value of a key, which the call replaces; None if there is none in this epoch."""
    item = None if results is None else results.get(key)
    return None if item is None or item.has_reset else item._forward_cache


Log.__call__.__qualname__ = LightningModule.log.__qualname__  # the name in Python's error messages
