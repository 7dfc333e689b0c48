"""Records that a rank notes: one of itself, and one of each interval of optimizer steps, which can be merged."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyphase.engine.phases import PHASES

__all__ = ["SCHEMA", "Interval", "RankInfo", "slowest_hooks"]

SCHEMA = 1
_EXACT = ("grad_norm", "loss_scale", "checksum", "lr", "flops", "recomputed_flops")
"""Numbers that are not seconds and are not rounded."""
_NUM_HOOKS = 8
"""Largest number of hooks named in a line, slowest first; the rest is summed as "others"."""


@dataclasses.dataclass(kw_only=True)
class RankInfo:
    """The first line of a rank's file: where and how it runs."""

    schema: int = SCHEMA
    rank: int
    world_size: int
    host: str
    device: str = "cpu"
    """Type of the device: ``"cpu"``, ``"cuda"``, ..."""
    strategy: str = "single"
    layout: dict[str, int] = dataclasses.field(default_factory=dict)
    """Sizes of the mesh by axis: pp, replicate, shard, tp."""
    local_ranks: int = 1
    """Number of ranks on this host."""
    num_threads: int = 1
    """Number of torch's threads for one operator."""
    num_cpus: float = 1.0
    """Number of CPUs that this process may use, limited by its affinity and its container's quota."""
    cpus: list[int] | None = None
    """The CPUs that this process may use; None if that is all of the host's, or unknown."""
    num_workers: int | None = None
    """Number of worker processes of the training loader; None if it is not a DataLoader."""
    pins_memory: bool | None = None
    accumulate_grad_batches: int = 1
    compression: str = "none"
    loggers: list[str] = dataclasses.field(default_factory=list)
    device_name: str | None = None
    """The vendor's name of the device."""
    dtype: str | None = None
    """Number format of matrix products: fp32, tf32, fp16 or bf16."""
    device_capacity_mb: float | None = None
    """Memory of the device; None if unknown."""
    peak_flops_per_s: float | None = None
    """Peak rate of the device in that format, by its data sheet; measured on a CPU."""
    operator_s: float | None = None
    """Seconds that the host takes for an operator with next to nothing to compute; None if not measured."""
    lr_interval_steps: int | None = None
    """Interval of the learning-rate schedulers in optimizer steps; None without one, or for epochs."""
    unfused_optimizer: str | None = None
    """An optimizer that could step in one kernel and does not, such as ``"AdamW by foreach"``; None without one."""
    shm_capacity_mb: float | None = None
    """Size of the host's `/dev/shm`; None without one."""
    started_at: float = 0.0
    """Start of the run, in seconds since 1970."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The engine's arguments that differ from their defaults; for objects the class name."""


@dataclasses.dataclass(kw_only=True)
class Interval:
    """A later line of a rank's file: the sums over some successive optimizer steps."""

    step: int
    """The optimizer step at the end of the interval."""
    num_steps: int
    wall_s: float
    seconds: dict[str, float]
    """Seconds of each phase; they add up to `wall_s`."""
    is_warmup: bool = False
    """Whether it has the first steps, in which kernels are chosen and code is compiled; rules ignore it."""
    slowest_step_s: float = 0.0
    steps: list[dict[str, float]] = dataclasses.field(default_factory=list)
    """A median step and the slowest one, the same ones on all ranks: of each its number as ``"step"``, its mean over
    the ranks as ``"wall_s"``, and this rank's seconds by phase."""
    by_hook: dict[str, float] = dataclasses.field(default_factory=dict)
    num_saves: int = 0
    num_batches: int = 0
    num_fillers: int = 0
    """Number of padding batches, which only keep this rank in step with the others."""
    num_syncs: int | None = None
    """Number of backwards in which DistributedDataParallel averaged gradients; None without it, or if not counted."""
    num_samples: int | None = None
    """Number of samples; None if a batch does not show how many it has."""
    num_tokens: int | None = None
    """Number of tokens including padding; None if batches have no tokens."""
    flops: float | None = None
    """Floating-point operations of this rank in forward and backward, from the second batch; None if unknown."""
    recomputed_flops: float | None = None
    """Additional operations that activation checkpointing repeats."""
    num_operators: int | None = None
    """Number of torch's operators in forward and backward, from the second batch; None if unknown, or compiled."""
    grad_norm: float | None = None
    """Norm of this rank's gradients (or of its shards) at one step of the interval."""
    loss_scale: float | None = None
    """Loss scale at the end of the interval; None without one."""
    without_gradient: list[str] | None = None
    """Parameters whose gradient is missing or zero at that step; None if this was not checked."""
    checksum: float | None = None
    """A checksum of all parameters, if ranks must have equal parameters."""
    checksum_step: int = 0
    """The optimizer step after which the checksum was computed."""
    lr: float | None = None
    """Learning rate of the first group at the end of the interval."""
    lr_steps: int | None = None
    """Steps of the learning-rate schedulers so far, the smallest number; None without a scheduler."""
    cpu_s: float | None = None
    """CPU time of the training thread in forward and backward, extrapolated from a sample."""
    runqueue_s: float | None = None
    """Time in which that thread was ready to run but had no CPU; None if the system does not report it."""
    padding: float | None = None
    """Share of the tokens that are padding, by an ``attention_mask``, in the measured batches."""
    num_padding_looks: int | None = None
    """Number of these batches; None for none."""
    reads: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of device reads in one sampled `training_step`, by ``"item() at file.py:12 in training_step"``."""
    rss_mb: float | None = None
    device_mb: float | None = None
    """Peak of torch's memory on the device."""
    reserved_mb: float | None = None
    """Peak of the memory that torch has reserved on the device; None if unknown."""
    model_mb: dict[str, float] = dataclasses.field(default_factory=dict)
    """Memory of this rank's parameters, gradients, optimizer state and buffers as training ended; what the most that
    was allocated on the device has beyond that is ``activations``. Empty if not known."""
    num_alloc_retries: int | None = None
    """How often torch had to free what it kept in reserve, to allocate; None if unknown."""
    process_cpu_s: float | None = None
    """CPU time of all threads of the rank's process."""
    received_mb: float | None = None
    """Received by the interfaces of the host, without its loopback; of all processes."""
    sent_mb: float | None = None
    """Sent by them."""
    workers_mb: float | None = None
    """Resident memory of the processes that the rank has started: workers of its loaders; None without any."""
    num_files: int | None = None
    """Number of the process's open files."""
    shm_mb: float | None = None
    """Used of the host's `/dev/shm`, by all processes."""
    swap_read_mb: float | None = None
    """Memory that the host read back from swap, in MB; None for nothing, or if unknown."""
    swapped_mb: float | None = None
    """Memory of this process in swap; None for nothing, or if unknown."""
    num_looks: int | None = None
    """Number of looks at the device through NVML; None without it."""
    throttled: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of looks at which the device held its clock down, by reason: heat, power brake, power limit."""
    utilization: float | None = None
    """Share of the time in which a kernel ran on the device, by NVML, mean over the looks."""
    clock_share: float | None = None
    """Clock of the device as a share of its highest one, mean over the looks."""
    temperature_c: float | None = None
    power_w: float | None = None
    compression: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of compressing (``compress_s``) and of collectives (``wire_s``) in a step; ``sent_mb`` of a step, and
    ``plain_mb``, which it would have sent without compression; ``num_looks``, the number of steps that were timed."""
    collectives: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    """``calls`` and ``sent_mb`` of a step by operation, in the last steps of training; empty if not known."""
    all_reduce_mb_per_s: float | None = None
    """Rate at which this rank sent in an all-reduce of 8 MB as training ended; None if not measured."""
    links: list[float] = dataclasses.field(default_factory=list)
    """Rate in MB/s at which this rank received from each other rank as training ended; empty if not measured."""

    def joined(self, later: "Interval") -> "Interval":
        """Merges this interval with the next one."""
        steps = (self.num_steps, later.num_steps)
        return Interval(
            step=later.step,
            num_steps=sum(steps),
            wall_s=self.wall_s + later.wall_s,
            seconds={phase: self.seconds.get(phase, 0.0) + later.seconds.get(phase, 0.0) for phase in PHASES},
            is_warmup=self.is_warmup and later.is_warmup,
            slowest_step_s=max(self.slowest_step_s, later.slowest_step_s),
            steps=_slowest(self.steps, later.steps),
            by_hook=slowest_hooks(self.by_hook, later.by_hook),
            num_saves=self.num_saves + later.num_saves,
            num_batches=self.num_batches + later.num_batches,
            num_fillers=self.num_fillers + later.num_fillers,
            num_syncs=self._sum_with(later, "num_syncs"),
            num_samples=self._sum_with(later, "num_samples"),
            num_tokens=self._sum_with(later, "num_tokens"),
            flops=self._sum_with(later, "flops"),
            recomputed_flops=self._sum_with(later, "recomputed_flops"),
            num_operators=self._sum_with(later, "num_operators"),
            grad_norm=_largest(self.grad_norm, later.grad_norm),
            loss_scale=_latest(self.loss_scale, later.loss_scale),
            without_gradient=_common(self.without_gradient, later.without_gradient),
            checksum=later.checksum,
            checksum_step=later.checksum_step,
            lr=_latest(self.lr, later.lr),
            lr_steps=_latest(self.lr_steps, later.lr_steps),
            cpu_s=_sum(self.cpu_s, later.cpu_s),
            runqueue_s=_sum(self.runqueue_s, later.runqueue_s),
            padding=self._mean_with(later, "padding", "num_padding_looks"),
            num_padding_looks=_sum_of_present(self.num_padding_looks, later.num_padding_looks),
            reads={**self.reads, **later.reads},
            rss_mb=_largest(self.rss_mb, later.rss_mb),
            device_mb=_largest(self.device_mb, later.device_mb),
            reserved_mb=_largest(self.reserved_mb, later.reserved_mb),
            num_alloc_retries=_sum_of_present(self.num_alloc_retries, later.num_alloc_retries),
            process_cpu_s=_sum_of_present(self.process_cpu_s, later.process_cpu_s),
            received_mb=_sum_of_present(self.received_mb, later.received_mb),
            sent_mb=_sum_of_present(self.sent_mb, later.sent_mb),
            workers_mb=_largest(self.workers_mb, later.workers_mb),
            num_files=_largest(self.num_files, later.num_files),
            shm_mb=_largest(self.shm_mb, later.shm_mb),
            utilization=self._mean_with(later, "utilization", "num_looks"),
            swap_read_mb=_sum_of_present(self.swap_read_mb, later.swap_read_mb),
            swapped_mb=_largest(self.swapped_mb, later.swapped_mb),
            num_looks=_sum_of_present(self.num_looks, later.num_looks),
            throttled=_by_name(self.throttled, later.throttled, _sum_of_present),
            clock_share=self._mean_with(later, "clock_share", "num_looks"),
            temperature_c=_largest(self.temperature_c, later.temperature_c),
            power_w=self._mean_with(later, "power_w", "num_looks"),
            compression=_mean_of_steps(self.compression, later.compression),
            collectives=later.collectives or self.collectives,
            model_mb=later.model_mb or self.model_mb,
            all_reduce_mb_per_s=_latest(self.all_reduce_mb_per_s, later.all_reduce_mb_per_s),
            links=later.links or self.links,
        )

    def _sum_with(self, later: "Interval", count: str) -> Any:
        """Sums a count of both intervals; an interval without batches, such as the last of a run, has no count."""
        parts = [(part.num_batches, getattr(part, count)) for part in (self, later)]
        values = [value for num_batches, value in parts if num_batches or value is not None]
        return None if None in values or not values else sum(values)

    def _mean_with(self, later: "Interval", name: str, num_looks: str) -> float | None:
        """Returns the mean over the looks of both intervals; an interval without a number of looks counts as one."""
        parts = [(getattr(part, name), getattr(part, num_looks) or 1) for part in (self, later)]
        measured = [(value, looks) for value, looks in parts if value is not None]
        return (
            sum(value * looks for value, looks in measured) / sum(looks for _, looks in measured) if measured else None
        )

    def line(self) -> str:
        """Returns the interval as JSON without empty fields; seconds have microsecond precision."""
        values = {k: v for k, v in vars(self).items() if v is not None and v != {} and v is not False}
        values = {k: v for k, v in values.items() if v != [] or k not in ("steps", "links")}
        exact = {k: values[k] for k in _EXACT if k in values}
        return json.dumps({"kind": "interval", **_rounded(values), **exact}, separators=(",", ":"))


def slowest_hooks(*by_hook: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of the `_NUM_HOOKS` slowest hooks, and the sum of all others."""
    names = dict.fromkeys(name for part in by_hook for name in part if name != "others")
    sums = {name: sum(part.get(name, 0.0) for part in by_hook) for name in names}
    kept = sorted(sums, key=lambda name: -sums[name])[:_NUM_HOOKS]
    others = sum(part.get("others", 0.0) for part in by_hook) + sum(sums[name] for name in sums if name not in kept)
    return {name: sums[name] for name in kept if sums[name] > 0.0} | ({"others": others} if others > 0.0 else {})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value


def _sum(first: Any, second: Any) -> Any:
    return None if first is None or second is None else first + second


def _sum_of_present(*values: Any) -> Any:
    present = _present(*values)
    return sum(present) if present else None


def _by_name(first: dict[str, Any], second: dict[str, Any], joins: Callable[..., Any]) -> dict[str, Any]:
    if not first or not second:
        return first or second
    return {name: joins(first.get(name), second.get(name)) for name in first | second}


def _slowest(first: list[dict[str, float]], second: list[dict[str, float]]) -> list[dict[str, float]]:
    if not first or not second:
        return first or second
    return max(first, second, key=lambda steps: steps[-1]["wall_s"])


def _latest(earlier: Any, later: Any) -> Any:
    return earlier if later is None else later


def _common(first: list[str] | None, second: list[str] | None) -> list[str] | None:
    if first is None or second is None:
        return first if second is None else second
    return [name for name in first if name in second]


def _present(*values: float | None) -> Sequence[float]:
    return [value for value in values if value is not None]


def _mean_of_steps(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """Returns the means over the timed steps; ``num_looks`` is their number."""
    if not first or not second:
        return first or second
    looks = [times.get("num_looks", 1.0) for times in (first, second)]
    means = {name: (first[name] * looks[0] + second[name] * looks[1]) / sum(looks) for name in first if name in second}
    return means | {"num_looks": sum(looks)}


def _largest(*values: Any) -> Any:
    return max(_present(*values), default=None)
