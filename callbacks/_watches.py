"""The measurements of `Doctor` besides its clock: batches, operators, gradients, CPU, memory and links between ranks.

`LightDoctor` has none of them. Each of them samples some batches, or measures once at the end of an interval. The rates
of an all-reduce and of the links are measured once, at the end of training, if communication took long.
"""

import time
from collections import deque
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyphase.engine.devices import memory_stats, peak_bytes
from polyphase.engine.distributed.link_rates import MOST_RANKS, all_reduce_rate, receive_rates
from polyphase.engine.memory import model_state_bytes
from polyphase.engine.reliability.flight_recorder import traffic

from ._compression_cost import CompressionWatch
from ._counts import count_samples, num_places
from ._flops import StepFlops
from ._health import HealthWatch
from ._host_figures import HostFigures
from ._host_use import HostUse
from ._padding import PaddingWatch
from ._reads import ReadWatch
from ._swap import SwapWatch
from ._throttling import throttle_watch

__all__ = ["Watches"]

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
        self._padding = PaddingWatch(device)
        self._reads = ReadWatch(trainer)
        self._health = HealthWatch(trainer)
        self._swap = SwapWatch()
        self._host = HostFigures()
        self._device = device
        self._num_retries = 0
        self._throttling = throttle_watch(device)
        self._compression = CompressionWatch(trainer)
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
            self._samples_counted = _num_samples(batch)
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


def _num_samples(batch: Any) -> int | None:
    try:
        return count_samples(batch)
    except ValueError:  # a batch that does not show its number of samples
        return None
