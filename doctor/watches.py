"""The measurements of `Doctor` besides its clock: batches, operators, gradients, CPU, memory and links between ranks.

Each of them samples some batches, or measures once at the end of an interval. The rates of an all-reduce and of the
links are measured once, at the end of training, if communication took long.
"""

import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from polyphase.callbacks._counts import num_places
from polyphase.callbacks.communication import CommunicationMonitor
from polyphase.engine.compression import busy_s
from polyphase.engine.data.samples import num_samples
from polyphase.engine.devices import memory_stats, module_of, peak_bytes
from polyphase.engine.distributed.link_rates import MOST_RANKS, all_reduce_rate, receive_rates
from polyphase.engine.loop.out_of_memory import model_state_bytes
from polyphase.engine.reliability.flight_recorder import traffic
from polyphase.engine.strategies import adapt

from .flops import StepFlops
from .health import HealthWatch
from .host_use import HostFigures, HostUse

__all__ = ["SwapWatch", "ThrottleWatch", "Watches", "throttle_watch"]

_LONG_COMMUNICATION = 0.15
"""Mean share of the time in exposed communication above which the network is measured at the end."""
_MIN_HOSTS = 2
"""Number of hosts from which on links between ranks are measured."""
_RECORDED_STEPS = 16
"""Number of last steps whose collectives are counted, if torch still has them."""


class Watches:
    """The watches of one run of `fit`.

    Args:
        trainer: an engine at the start of training.
    """

    def __init__(self, trainer: Any) -> None:
        device = trainer.strategy.root_device
        self._attached = ExitStack()
        self._padding = _PaddingWatch(device)
        self._reads = _ReadWatch(trainer)
        self._health = HealthWatch(trainer)
        self._swap = SwapWatch()
        self._host = HostFigures()
        self._device = device
        self._num_retries = 0
        self._throttling = throttle_watch(device)
        self._compression = _CompressionWatch(trainer)
        self._use = HostUse()
        self._has_ranks = trainer.world_size > 1
        self._has_tokens = True  # until there is a batch without any
        for close in (self._compression.close, self._use.close, self._reads.end):
            self._attached.callback(close)
        self._num_batches = 0
        self._flops: StepFlops | None = None
        self._counted: StepFlops | None = None
        self._samples_counted: int | None = None
        self._communication_shares: list[float] = []
        self._steps_ns: deque[tuple[int, int]] = deque(maxlen=_RECORDED_STEPS)
        self._begin()

    def _begin(self) -> None:
        self._syncs: int | None = None
        self._tokens: int | None = None
        self._step_began_ns = time.time_ns()

    # --- of batches and steps

    def begin_batch(self, *, is_filler: bool, is_settled: bool, ends_interval: bool) -> None:
        """Begins to measure CPU time and reads in some of the batches; counts the operations of the second one.

        Args:
            is_filler: whether the batch only keeps this rank in step with the others.
            is_settled: whether the first steps are over.
            ends_interval: whether an interval ends with the batch's step.
        """
        # In the first batch a pipeline is cut, and lazy parts are created.
        if self._num_batches > 0 and self._counted is None and not is_filler:
            self._flops = self._counted = StepFlops()
            self._attached.callback(self._flops.close)
            self._flops.begin()
        self._use.begin()
        if ends_interval and self._compression.is_on:
            self._compression.begin_step()
        if is_settled and self._reads.may:
            self._reads.begin(self._num_batches)

    def begin_backward(self, model: nn.Module) -> None:
        """Ends the watch of reads, and counts averages of gradients; called before backward, see `has_backward`."""
        self._reads.end()
        if isinstance(model, DistributedDataParallel):
            self._syncs = (self._syncs or 0) + model.require_backward_grad_sync

    @property
    def has_backward(self) -> bool:
        """Whether `begin_backward` has something to do: a watch to end, or averages of gradients to count."""
        return self._reads.may or self._has_ranks

    def end_backward(self) -> None:
        """Called after each backward."""
        self._use.end()

    def end_batch(self, batch: Any, *, is_filler: bool) -> None:
        """Counts a batch, without reading from the device."""
        if self._reads.may:
            self._reads.end()
        flops = self._flops
        if flops is not None:
            self._flops = None
            flops.close()
            self._samples_counted = num_samples(batch)
        self._num_batches += 1
        if batch is not None and not is_filler:
            self._padding.look(batch, self._num_batches)
            if self._has_tokens:
                tokens = num_places(batch)
                self._has_tokens = tokens is not None
                self._tokens = None if tokens is None else (self._tokens or 0) + tokens

    def end_step(self) -> None:
        """Called after each optimizer step."""
        if not self._has_ranks:
            return
        self._compression.end_step()
        now_ns = time.time_ns()
        self._steps_ns.append((self._step_began_ns, now_ns))
        self._step_began_ns = now_ns

    # --- of intervals

    def note_communication(self, share: float) -> None:
        """Adds an interval's share of exposed communication, mean over the ranks; equal on all ranks."""
        self._communication_shares.append(share)

    def take(self, trainer: Any, *, is_warmup: bool, num_batches: int, num_samples: int | None) -> dict[str, Any]:
        """Returns the numbers of the interval that ends, by the field names of an `Interval`.

        Args:
            trainer: the engine.
            is_warmup: whether the interval has the first steps.
            num_batches: number of batches, without those that only keep this rank in step with the others.
            num_samples: number of samples in these batches; None if unknown.
        """
        cpu_s, runqueue_s = self._use.take()
        padding, num_padding_looks = self._padding.take()
        device = {} if self._throttling is None else self._throttling.take()
        health = {} if is_warmup else self._health.look(trainer.lightning_module)
        figures = {
            "num_syncs": self._syncs,
            "num_tokens": self._tokens,
            "cpu_s": cpu_s,
            "runqueue_s": runqueue_s,
            "padding": padding,
            "num_padding_looks": num_padding_looks,
            "reads": self._reads.take(),
            "compression": self._compression.take(),
            **self._operations(num_batches, num_samples),
            **health,
            **self._swap.take(),
            **self._host.take(),
            **self._allocator(),
            **device,
        }
        self._begin()
        return figures

    def _allocator(self) -> dict[str, Any]:
        """Returns the counts of torch's allocator for the device; empty if there are none."""
        stats = memory_stats(self._device)
        if "num_alloc_retries" not in stats:
            return {}
        before, self._num_retries = self._num_retries, stats["num_alloc_retries"]
        retries = self._num_retries - before
        return {"reserved_mb": stats["reserved_bytes.all.peak"] / 1e6, "num_alloc_retries": retries}

    def _operations(self, num_batches: int, num_samples: int | None) -> dict[str, Any]:
        """Returns operations and operators, extrapolated from the counted batch by samples, or by batches."""
        counted = self._counted
        if counted is None or self._flops is not None:
            return {}
        figures: dict[str, Any] = {}
        if counted.num_operators is not None:
            figures["num_operators"] = counted.num_operators * num_batches
        if counted.logits_mb:
            figures["logits_mb"] = counted.logits_mb
        number, per = (num_batches, 1) if self._samples_counted is None else (num_samples, self._samples_counted)
        if counted.is_known and counted.model and number is not None:
            factor = number / max(per, 1)
            figures |= {"flops": counted.model * factor, "recomputed_flops": counted.recomputed * factor}
        return figures

    def take_last(self, trainer: Any) -> dict[str, Any]:
        """Returns the figures that are measured once, at the end of training; to be called on all ranks."""
        figures: dict[str, Any] = {"model_mb": self._model_mb(trainer)}
        if trainer.world_size > 1:
            figures["collectives"] = self._collectives()
        shares = self._communication_shares
        is_gloo = dist.is_initialized() and dist.get_backend() == "gloo" and dist.get_world_size() == trainer.world_size
        if is_gloo and shares and sum(shares) / len(shares) >= _LONG_COMMUNICATION:
            figures["all_reduce_mb_per_s"] = all_reduce_rate()
            if trainer.num_nodes >= _MIN_HOSTS and 2 < trainer.world_size <= MOST_RANKS:
                figures["links"] = receive_rates()
        return figures

    def _model_mb(self, trainer: Any) -> dict[str, float]:
        """Returns the memory by use, without zeros."""
        held = {kind: float(size) for kind, size in model_state_bytes(trainer).items()}
        if (peak := peak_bytes(self._device)) is not None:
            held["activations"] = max(0.0, peak - sum(held.values()))
        return {kind: size / 1e6 for kind, size in held.items() if size}

    def _collectives(self) -> dict[str, dict[str, float]]:
        """Returns calls and MB sent in a step by operation, over the last steps that torch's recorder has complete."""
        num_steps, calls = traffic(list(self._steps_ns))
        return {
            name: {"calls": call.number / num_steps, "sent_mb": call.sent_bytes / num_steps / 1e6}
            for name, call in calls.items()
        }

    def close(self) -> None:
        """Detaches everything."""
        self._attached.close()


# --- padding of batches
# The share of padding in batches by their ``attention_mask``; counted on the device, and read one interval later.


_PADDING_EVERY_BATCHES = 16


class _PaddingWatch:
    """Measures every sixteenth batch.

    Args:
        device: the device of the batches.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: list[Tensor] = []
        self._num_tokens = 0
        self._copied: tuple[Tensor, int, int, Any] | None = None

    def look(self, batch: Any, number: int) -> None:
        """Counts the tokens of the `number`-th batch, if that is one to measure."""
        if number % _PADDING_EVERY_BATCHES == 1 and isinstance(batch, Mapping):
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor):
                self._sums.append((mask != 0).sum())
                self._num_tokens += mask.numel()

    def take(self) -> tuple[float, int] | tuple[None, None]:
        """Returns the share of padding, 0 to 1, and the number of batches that were measured; None if unknown.

        They cover the time since the last call; on accelerators, the interval before it.
        """
        sums, num_tokens, before = self._sums, self._num_tokens, self._copied
        self._sums, self._num_tokens, self._copied = [], 0, None
        module = module_of(self._device)
        if sums and module is not None and hasattr(module, "Event"):
            event = module.Event()
            copy = torch.empty((), dtype=torch.int64, pin_memory=True)
            copy.copy_(torch.stack(sums).sum(), non_blocking=True)
            event.record()
            self._copied = copy, num_tokens, len(sums), event
        elif sums:
            before = torch.stack(sums).sum(), num_tokens, len(sums), None
        if before is None or (before[3] is not None and not before[3].query()):
            return None, None
        return 1.0 - float(before[0]) / before[1], before[2]


# --- reads of the device
# Finds device reads in `training_step`; at each of them the host waits for all work that it has launched.


_READS_EVERY_BATCHES = 2000
_TENSOR = torch.Tensor
_READS = {
    _TENSOR.item: "item()",
    _TENSOR.tolist: "tolist()",
    _TENSOR.cpu: "cpu()",
    _TENSOR.numpy: "numpy()",
    _TENSOR.__bool__: "bool()",
    _TENSOR.__float__: "float()",
    _TENSOR.__int__: "int()",
}
_FOREIGN = ("torch.", "lightning.", "polyphase.", "torchmetrics.", "contextlib", "functools")


class _ReadWatch:
    """Samples single calls of `training_step`; not on a CPU, where a read does not wait, nor in compiled code.

    Args:
        trainer: an engine.

    Attributes:
        may: whether calls are sampled at all: on an accelerator, and without compilation.
    """

    def __init__(self, trainer: Any) -> None:
        self.may = trainer.strategy.root_device.type != "cpu" and not trainer.config.compile
        self._next = 0
        self._mode: _Reads | None = None
        self._counts: dict[str, int] = {}

    def begin(self, number: int) -> None:
        """Starts to watch, if the `number`-th batch is one to sample; until `end`."""
        if self.may and number >= self._next and self._mode is None:
            self._next = number + _READS_EVERY_BATCHES
            self._mode = _Reads()
            self._mode.__enter__()

    def end(self) -> None:
        """Stops watching."""
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._counts, self._mode = dict(self._mode.counts), None

    def take(self) -> dict[str, int]:
        """Returns the number of reads in the step sampled since the last call, by function and line of code."""
        counts, self._counts = self._counts, {}
        return counts


class _Reads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _READS.get(function)
        if name is not None and args and args[0].device.type != "cpu":
            self.counts[f"{name} at {_users_line()}"] += 1
        return function(*args, **(kwargs or {}))


def _users_line() -> str:
    """Returns the innermost line of the user's own code."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not f"{name}.".startswith(_FOREIGN):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "a library"


# --- time of compression
# Times one step of each interval: the time to compress gradients, and the time to send them.


class _CompressionWatch:
    """Makes a strategy's hook record the times of a step; they are read an interval later, so nothing waits for them.

    It is off without a compression, with a `CommunicationMonitor`, and with a method that measures itself.
    """

    def __init__(self, trainer: Any) -> None:
        others = any(isinstance(callback, CommunicationMonitor) for callback in trainer.callbacks)
        is_off = trainer.world_size == 1 or others or trainer.config.compression == "none"
        self._hook: Any = None if is_off else adapt(trainer.strategy).active_hook
        self._wires = [] if self._hook is None else list(adapt(trainer.strategy).wires)
        self._is_timed = False
        self._done: dict[str, Any] | None = None

    @property
    def is_on(self) -> bool:
        """Whether it records times."""
        return self._hook is not None

    def begin_step(self) -> None:
        """Called before each batch of a timed step."""
        if self._is_timed or self._hook.bucket_times is not None:
            return
        self._is_timed = True
        self._hook.bucket_times = []
        for wire in self._wires:
            wire.collective_times = []
        self._before = self._bytes()

    def end_step(self) -> None:
        """Called after that step."""
        if not self._is_timed:
            return
        spans = [span for wire in self._wires for span in wire.collective_times or ()]
        plain, sent = (now - before for now, before in zip(self._bytes(), self._before, strict=True))
        buckets = [(ready, done) for _, ready, done in self._hook.bucket_times or ()]
        self._done = {"buckets": buckets, "spans": spans, "plain": plain, "sent": sent}
        self.close()

    def take(self) -> dict[str, float]:
        """Returns the numbers of the step that was timed before the last call; empty if there is none."""
        done, self._done = self._done, None
        if done is None or not done["buckets"] or not done["sent"]:
            return {}
        wire_s = busy_s(done["spans"])
        return {
            "wire_s": wire_s,
            "compress_s": max(0.0, busy_s(done["buckets"]) - wire_s),
            "sent_mb": done["sent"] / 1e6,
            "plain_mb": done["plain"] / 1e6,
            "num_looks": 1.0,
        }

    def close(self) -> None:
        """Restores the hook and the wires."""
        if self._is_timed:
            self._is_timed = False
            self._hook.bucket_times = None
            for wire in self._wires:
                wire.collective_times = None

    def _bytes(self) -> tuple[int, int]:
        return self._hook.num_plain_bytes, self._hook.num_bytes


# --- swapped memory
# Reads Linux's counts of swapped memory: of the host since the last call, and of this process.


class SwapWatch:
    """Counts the memory that this host reads back from swap; each call reads two files of `/proc`.

    Args:
        proc: the folder of these files; on other systems than Linux it does not exist, and nothing is reported.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._vmstat, self._status = proc / "vmstat", proc / "self" / "status"
        self._num_pages = self._pages_read()

    def take(self) -> dict[str, float]:
        """Returns ``swap_read_mb`` of the host since the last call, and ``swapped_mb`` of this process, if above 0."""
        before, self._num_pages = self._num_pages, self._pages_read()
        read_mb = (self._num_pages - before) * os.sysconf("SC_PAGE_SIZE") / 1e6
        kilobytes = _number(self._status, "VmSwap:")
        amounts = {"swap_read_mb": read_mb, "swapped_mb": kilobytes * 1024 / 1e6}
        return {name: mb for name, mb in amounts.items() if mb > 0.0}

    def _pages_read(self) -> int:
        return _number(self._vmstat, "pswpin")


def _number(path: Path, name: str) -> int:
    """Returns the number in the line of a file that begins with `name`; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)


# --- throttled devices
# Asks NVML whether a device is throttled, and why; only if `pynvml` (nvidia-ml-py) is installed.


# NVML: bits of nvmlDeviceGetCurrentClocksThrottleReasons, in nvml.h.
_REASONS = {0x20: "heat", 0x40: "heat", 0x80: "power brake", 0x04: "power limit"}
_SM, _GPU_SENSOR = 1, 0  # NVML_CLOCK_SM, NVML_TEMPERATURE_GPU


class ThrottleWatch:
    """Reads the state of a device at the end of each interval; a read takes some 10 us, and waits for nothing.

    Args:
        nvml: the module `pynvml`, initialized.
        handle: NVML's handle of the device.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml, self._handle = nvml, handle

    def take(self) -> dict[str, Any]:
        """Returns the numbers by the field names of an `Interval`; empty if the driver does not report them."""
        nvml, handle = self._nvml, self._handle
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            clock, most = nvml.nvmlDeviceGetClockInfo(handle, _SM), nvml.nvmlDeviceGetMaxClockInfo(handle, _SM)
            return {
                "throttled": dict.fromkeys((reason for bit, reason in _REASONS.items() if bits & bit), 1),
                "num_looks": 1,
                "utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                "clock_share": clock / max(most, 1),
                "temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, _GPU_SENSOR)),
                "power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            }
        except nvml.NVMLError:
            return {}


def throttle_watch(device: torch.device) -> ThrottleWatch | None:
    """Returns a watch for a CUDA device; None for others, and without NVML."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(device).uuid
        return ThrottleWatch(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    except (pynvml.NVMLError, AttributeError):  # no driver, a part of a device (MIG), or ROCm
        return None
