"""`dp`: one process that splits every batch over its GPUs, for scripts that can't start processes.

`torch.nn.DataParallel` (https://docs.pytorch.org/docs/stable/generated/torch.nn.DataParallel.html) around the module's
`training_step`. Phases of a micro-batch: 1. its parts go to the devices, and all parameters with them; 2. a thread per
device runs `training_step` on a copy of the module; 3. the first device receives the losses and averages them, weighted
by samples; backward sends the gradients there, too. Bytes: n parameters to each other device and n gradients
back, per micro-batch and not per step. Evaluation, prediction and the optimizer use the first device alone.

On one device it is `single`. Values that a step logs on its copy are logged once, reduced over the copies. All other
changes to a copy of the module are lost, except buffers of the first device.
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torchmetrics import Metric

from ..checkpoint.rng import include_devices
from ..contract import Capabilities, EngineStrategy

__all__ = [
    "DP",
    "make_dp",
]

_LOG = inspect.signature(LightningModule.log)


def make_dp(device_type: str, num_devices: int, num_nodes: int, sync_batchnorm: bool) -> "DP":
    """Returns the strategy for several devices.

    Raises:
        ValueError: the devices are not several GPUs of one machine, or a flag needs a process for each.
    """
    instead = "choose strategy 'ddp', which starts a process for each device"
    if num_nodes > 1 or device_type != "cuda":
        raise ValueError(
            f"strategy 'dp' is one process with several GPUs of one machine, but the flags ask for {num_nodes} node(s)"
            f" x {num_devices} device(s) of type {device_type!r}: set devices=1, or {instead}."
        )
    if sync_batchnorm:
        raise ValueError(f"strategy 'dp' can't do sync_batchnorm=True: leave it out, or {instead}.")
    return DP()


class DP(EngineStrategy, SingleDeviceStrategy):
    """`single` on the first device, whose training steps are divided among all devices."""

    capabilities = Capabilities(engine_checkpoints=True, unsupported_repeat="DP")
    parallel_devices: tuple[torch.device, ...] = ()
    """Set by Lightning."""
    _parallel: nn.Module | None = None

    @property
    def root_device(self) -> torch.device:
        """The device that holds parameters and optimizer state."""
        return self.parallel_devices[0] if self.parallel_devices else super().root_device

    def setup(self, trainer: Trainer) -> None:
        """Wraps the module.

        Raises:
            ValueError: the module runs backward itself, or has `training_step` as an attribute, which copies share.
        """
        super().setup(trainer)
        include_devices(self.parallel_devices)
        module = self.lightning_module
        assert module is not None
        if trainer.state.fn == TrainerFn.FITTING and not module.automatic_optimization:
            raise ValueError(
                "strategy 'dp' can't run a module with automatic_optimization=False, whose `training_step` would run"
                " backward on a copy of it: choose strategy 'ddp'."
            )
        if "training_step" in vars(module):
            raise ValueError(
                "strategy 'dp' can't run a `training_step` that is an attribute of the module, as compile=True makes"
                " it: copies of the module would all call that of the first. Leave it out, or choose strategy 'ddp'."
            )
        self._parallel = _Parallel(
            _Step(module, self.precision_plugin.train_step_context), device_ids=list(self.parallel_devices)
        )

    def training_step(self, *arguments: Any, **named: Any) -> Any:
        """Phases 1 to 3."""
        assert self._parallel is not None
        assert self.lightning_module is not None
        metrics = [submodule for submodule in self.lightning_module.modules() if isinstance(submodule, Metric)]
        updates = [metric._update_count for metric in metrics]
        # Also entered here: `64-true` sets torch's default dtype, which all threads share. Then each thread finds it
        # set, and leaves it set.
        with self.precision_plugin.train_step_context():
            parts = self._parallel(*arguments, **named)
        if updates != [metric._update_count for metric in metrics]:
            raise ValueError(
                "under strategy 'dp', `training_step` updates a metric in several threads at once: update it in"
                " `on_train_batch_end`, or choose strategy 'ddp'."
            )
        outputs, logs, counts = (list(column) for column in zip(*parts, strict=True))
        for call in _merged_logs(logs, counts, self.root_device):
            self.lightning_module.log(**call)
        return _merged_outputs(outputs, counts, self.root_device)

    def teardown(self) -> None:
        """Releases the wrapped module."""
        self._parallel = None
        super().teardown()


class _Parallel(nn.DataParallel):
    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Joins the lists of the copies without a change of their values."""
        return [output for parts in outputs for output in parts]


class _Step(nn.Module):
    """Runs `training_step` as its `forward`; it is copied together with its module.

    Args:
        module: the module whose `training_step` is run.
        context: entered in the step's thread, since torch passes on whether autocast is enabled, but not its dtype.
    """

    def __init__(self, module: LightningModule, context: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.module = module
        self.context = context

    def forward(self, *arguments: Any, **named: Any) -> list[tuple[Any, list[dict[str, Any]], int]]:
        """Returns what the step returned, its calls of `log`, and its number of samples."""
        calls: list[dict[str, Any]] = []

        def log(*args: Any, **kwargs: Any) -> None:
            call = dict(_LOG.bind(self.module, *args, **kwargs).arguments)
            del call["self"]
            calls.append(call)

        samples = _first_tensor((arguments, named))
        if samples is not None:
            for submodule in self.module.modules():
                if (
                    "_device" in submodule.__dict__
                ):  # Lightning: LightningModule.device; metrics of torchmetrics have the same attribute
                    submodule.__dict__["_device"] = samples.device
        # A copy of the module has a `__dict__` of its own.
        before = {name: value for name, value in self.module.__dict__.items() if name == "log"}
        self.module.__dict__["log"] = log
        with self.context():
            output = self.module.training_step(*arguments, **named)
        del self.module.__dict__["log"]
        self.module.__dict__.update(before)
        return [(output, calls, 1 if samples is None else len(samples))]


def _first_tensor(batch: Any) -> Tensor | None:
    """Returns the first tensor in a nested value that has a dimension."""
    if isinstance(batch, Tensor):
        return batch if batch.dim() else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
    return next((tensor for tensor in map(_first_tensor, parts) if tensor is not None), None)


def _merged_logs(logs: list[list[dict[str, Any]]], counts: list[int], device: torch.device) -> list[dict[str, Any]]:
    """Merges the calls of `log` of several copies into one list.

    Args:
        logs: for each copy, the arguments of each call by name.
        counts: the number of samples of each copy.
        device: device of the merged values.

    Raises:
        ValueError: the copies logged different names, or values that can't be reduced.
    """
    names = [[call["name"] for call in calls] for calls in logs]
    if any(copy_names != names[0] for copy_names in names):
        raise ValueError(f"under strategy 'dp', copies of the module logged different names: {names}.")
    return [_merged_call(list(calls), counts, device) for calls in zip(*logs, strict=True)]


def _merged_call(calls: list[dict[str, Any]], counts: list[int], device: torch.device) -> dict[str, Any]:
    first, values = calls[0], [call["value"] for call in calls]
    reduce_fx = first.get("reduce_fx", "mean")
    if any(isinstance(value, Metric) for value in values) or reduce_fx not in _REDUCTIONS:
        raise ValueError(
            f"under strategy 'dp', `training_step` logs {first['name']!r} on copies of the module: it must be a number"
            f" with reduce_fx one of {', '.join(_REDUCTIONS)}. Log it in `on_train_batch_end`, or choose 'ddp'."
        )
    on_device = torch.stack([_scalar(value, device, torch.float32) for value in values])
    if isinstance(first.get("batch_size"), int):
        first = {**first, "batch_size": sum(call["batch_size"] for call in calls)}
    shares = torch.stack([_scalar(count / sum(counts), device) for count in counts])
    return {**first, "value": _REDUCTIONS[reduce_fx](on_device, shares)}


_REDUCTIONS = {
    "mean": lambda values, shares: (values * shares).sum(),
    "sum": lambda values, shares: values.sum(),
    "min": lambda values, shares: values.min(),
    "max": lambda values, shares: values.max(),
}


def _merged_outputs(outputs: list[Any], counts: list[int], device: torch.device) -> Any:
    """Merges the outputs of `training_step` of several copies into one, on `device`.

    Losses are averaged by `counts`, the numbers of samples, or by the weights that the copies return. Other tensors are
    joined along the first dim; all other values are put into lists.

    Raises:
        ValueError: some copies returned a loss and some did not.
    """
    if all(output is None for output in outputs):
        return None
    if any(output is None for output in outputs):
        raise ValueError("under strategy 'dp', `training_step` returned a loss on some copies of the module only.")
    if isinstance(outputs[0], Tensor):
        return _mean(outputs, counts, device)
    merged = {key: _joined([output[key] for output in outputs], device) for key in outputs[0]}
    weights = [output["weight"] for output in outputs] if "weight" in merged else counts
    merged["loss"] = _mean([output["loss"] for output in outputs], weights, device)
    if "weight" in merged:
        merged["weight"] = torch.stack([_scalar(weight, device) for weight in weights]).sum()
    return merged


def _mean(losses: list[Tensor], weights: list[Any], device: torch.device) -> Tensor:
    shares = torch.stack([_scalar(weight, device, torch.float32) for weight in weights])
    total = shares.sum()
    shares = shares / torch.where(total > 0, total, 1.0)
    return torch.stack([loss.to(device).reshape(()) for loss in losses]).mul(shares.to(losses[0].dtype)).sum()


def _scalar(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a number on a device. It is filled on the device, since a copy from the host would wait for it."""
    return value.to(device, dtype) if isinstance(value, Tensor) else torch.full((), value, dtype=dtype, device=device)


def _joined(values: list[Any], device: torch.device) -> Any:
    if not all(isinstance(value, Tensor) for value in values):
        return values
    moved = [value.to(device) for value in values]
    return torch.cat(moved) if moved[0].dim() else torch.stack(moved)
