"""Records that a rank notes: one of itself, and one of each interval of optimizer steps, which can be merged."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from operator import add, and_, or_
from typing import Annotated, Any, get_type_hints

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
    hooks: dict[str, str] = dataclasses.field(default_factory=dict)
    """Where the user's own hooks stand: file and line, by ``"Class.hook"``."""


# --- how the values of two successive intervals become one


def _joined(how: Callable[[Any, Any], Any]) -> Callable[["Interval", "Interval", str], Any]:
    """Returns a function that makes one value of a field of two intervals, by `how`."""
    return lambda earlier, later, name: how(getattr(earlier, name), getattr(later, name))


def _sum_of_batches(earlier: "Interval", later: "Interval", name: str) -> Any:
    """Sums a count of batches; an interval without batches, such as the last of a run, has no count."""
    parts = [(part.num_batches, getattr(part, name)) for part in (earlier, later)]
    values = [value for num_batches, value in parts if num_batches or value is not None]
    return None if None in values or not values else sum(values)


def _mean_over(num_looks: str) -> Callable[["Interval", "Interval", str], Any]:
    """Returns a mean over the looks of both intervals; an interval without a number of looks counts as one."""

    def mean(earlier: "Interval", later: "Interval", name: str) -> float | None:
        parts = [(getattr(part, name), getattr(part, num_looks) or 1) for part in (earlier, later)]
        measured = [(value, looks) for value, looks in parts if value is not None]
        if not measured:
            return None
        return sum(value * looks for value, looks in measured) / sum(looks for _, looks in measured)

    return mean


def _later(earlier: Any, later: Any) -> Any:
    return later


def _latest(earlier: Any, later: Any) -> Any:
    return earlier if later is None else later


def _latest_known(earlier: Any, later: Any) -> Any:
    return later or earlier


def _by_phase(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {phase: first.get(phase, 0.0) + second.get(phase, 0.0) for phase in PHASES}


def slowest_hooks(*by_hook: Mapping[str, float]) -> dict[str, float]:
    """Returns the sums of the `_NUM_HOOKS` slowest hooks, and the sum of all others."""
    names = dict.fromkeys(name for part in by_hook for name in part if name != "others")
    sums = {name: sum(part.get(name, 0.0) for part in by_hook) for name in names}
    kept = sorted(sums, key=lambda name: -sums[name])[:_NUM_HOOKS]
    others = sum(part.get("others", 0.0) for part in by_hook) + sum(sums[name] for name in sums if name not in kept)
    return {name: sums[name] for name in kept if sums[name] > 0.0} | ({"others": others} if others > 0.0 else {})


def _sum(first: Any, second: Any) -> Any:
    return None if first is None or second is None else first + second


def _sum_of_present(*values: Any) -> Any:
    present = _present(*values)
    return sum(present) if present else None


def _by_name(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: _sum_of_present(first.get(name), second.get(name)) for name in first | second}


def _slowest(first: list[dict[str, float]], second: list[dict[str, float]]) -> list[dict[str, float]]:
    if not first or not second:
        return first or second
    return max(first, second, key=lambda steps: steps[-1]["wall_s"])


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


@dataclasses.dataclass(kw_only=True)
class Interval:
    """A later line of a rank's file: the sums over some successive optimizer steps.

    Beside the type of each field stands how its values of two successive intervals become one.
    """

    step: Annotated[int, _joined(_later)]
    """The optimizer step at the end of the interval."""
    num_steps: Annotated[int, _joined(add)]
    wall_s: Annotated[float, _joined(add)]
    seconds: Annotated[dict[str, float], _joined(_by_phase)]
    """Seconds of each phase; they add up to `wall_s`."""
    is_warmup: Annotated[bool, _joined(and_)] = False
    """Whether it has the first steps, in which kernels are chosen and code is compiled; rules ignore it."""
    slowest_step_s: Annotated[float, _joined(max)] = 0.0
    steps: Annotated[list[dict[str, float]], _joined(_slowest)] = dataclasses.field(default_factory=list)
    """A median step and the slowest one, the same ones on all ranks: of each its number as ``"step"``, its mean over
    the ranks as ``"wall_s"``, and this rank's seconds by phase."""
    by_hook: Annotated[dict[str, float], _joined(slowest_hooks)] = dataclasses.field(default_factory=dict)
    num_saves: Annotated[int, _joined(add)] = 0
    num_batches: Annotated[int, _joined(add)] = 0
    num_fillers: Annotated[int, _joined(add)] = 0
    """Number of padding batches, which only keep this rank in step with the others."""
    num_syncs: Annotated[int | None, _sum_of_batches] = None
    """Number of backwards in which DistributedDataParallel averaged gradients; None without it, or if not counted."""
    num_samples: Annotated[int | None, _sum_of_batches] = None
    """Number of samples; None if a batch does not show how many it has."""
    num_tokens: Annotated[int | None, _sum_of_batches] = None
    """Number of tokens including padding; None if batches have no tokens."""
    flops: Annotated[float | None, _sum_of_batches] = None
    """Floating-point operations of this rank in forward and backward, from the second batch; None if unknown."""
    recomputed_flops: Annotated[float | None, _sum_of_batches] = None
    """Additional operations that activation checkpointing repeats."""
    num_operators: Annotated[int | None, _sum_of_batches] = None
    """Number of torch's operators in forward and backward, from the second batch; None if unknown, or compiled."""
    grad_norm: Annotated[float | None, _joined(_largest)] = None
    """Norm of this rank's gradients (or of its shards) at one step of the interval."""
    loss_scale: Annotated[float | None, _joined(_latest)] = None
    """Loss scale at the end of the interval; None without one."""
    without_gradient: Annotated[list[str] | None, _joined(_common)] = None
    """Parameters whose gradient is missing or zero at that step; None if this was not checked."""
    checksum: Annotated[float | None, _joined(_later)] = None
    """A checksum of all parameters, if ranks must have equal parameters."""
    checksum_step: Annotated[int, _joined(_later)] = 0
    """The optimizer step after which the checksum was computed."""
    lr: Annotated[float | None, _joined(_latest)] = None
    """Learning rate of the first group at the end of the interval."""
    lr_steps: Annotated[int | None, _joined(_latest)] = None
    """Steps of the learning-rate schedulers so far, the smallest number; None without a scheduler."""
    cpu_s: Annotated[float | None, _joined(_sum)] = None
    """CPU time of the training thread in forward and backward, extrapolated from a sample."""
    runqueue_s: Annotated[float | None, _joined(_sum)] = None
    """Time in which that thread was ready to run but had no CPU; None if the system does not report it."""
    padding: Annotated[float | None, _mean_over("num_padding_looks")] = None
    """Share of the tokens that are padding, by an ``attention_mask``, in the measured batches."""
    num_padding_looks: Annotated[int | None, _joined(_sum_of_present)] = None
    """Number of these batches; None for none."""
    reads: Annotated[dict[str, int], _joined(or_)] = dataclasses.field(default_factory=dict)
    """Number of device reads in one sampled `training_step`, by ``"item() at file.py:12 in training_step"``."""
    rss_mb: Annotated[float | None, _joined(_largest)] = None
    device_mb: Annotated[float | None, _joined(_largest)] = None
    """Peak of torch's memory on the device."""
    reserved_mb: Annotated[float | None, _joined(_largest)] = None
    """Peak of the memory that torch has reserved on the device; None if unknown."""
    logits_mb: Annotated[float | None, _joined(_largest)] = None
    """The largest logits of which a loss is computed, in a measured step; None without any."""
    model_mb: Annotated[dict[str, float], _joined(_latest_known)] = dataclasses.field(default_factory=dict)
    """Memory of this rank's parameters, gradients, optimizer state and buffers as training ended; what the most that
    was allocated on the device has beyond that is ``activations``. Empty if not known."""
    num_alloc_retries: Annotated[int | None, _joined(_sum_of_present)] = None
    """How often torch had to free what it kept in reserve, to allocate; None if unknown."""
    process_cpu_s: Annotated[float | None, _joined(_sum_of_present)] = None
    """CPU time of all threads of the rank's process."""
    received_mb: Annotated[float | None, _joined(_sum_of_present)] = None
    """Received by the interfaces of the host, without its loopback; of all processes."""
    sent_mb: Annotated[float | None, _joined(_sum_of_present)] = None
    """Sent by them."""
    workers_mb: Annotated[float | None, _joined(_largest)] = None
    """Resident memory of the processes that the rank has started: workers of its loaders; None without any."""
    num_files: Annotated[int | None, _joined(_largest)] = None
    """Number of the process's open files."""
    shm_mb: Annotated[float | None, _joined(_largest)] = None
    """Used of the host's `/dev/shm`, by all processes."""
    swap_read_mb: Annotated[float | None, _joined(_sum_of_present)] = None
    """Memory that the host read back from swap, in MB; None for nothing, or if unknown."""
    swapped_mb: Annotated[float | None, _joined(_largest)] = None
    """Memory of this process in swap; None for nothing, or if unknown."""
    num_looks: Annotated[int | None, _joined(_sum_of_present)] = None
    """Number of looks at the device through NVML; None without it."""
    throttled: Annotated[dict[str, int], _joined(_by_name)] = dataclasses.field(default_factory=dict)
    """Number of looks at which the device held its clock down, by reason: heat, power brake, power limit."""
    utilization: Annotated[float | None, _mean_over("num_looks")] = None
    """Share of the time in which a kernel ran on the device, by NVML, mean over the looks."""
    clock_share: Annotated[float | None, _mean_over("num_looks")] = None
    """Clock of the device as a share of its highest one, mean over the looks."""
    temperature_c: Annotated[float | None, _joined(_largest)] = None
    power_w: Annotated[float | None, _mean_over("num_looks")] = None
    compression: Annotated[dict[str, float], _joined(_mean_of_steps)] = dataclasses.field(default_factory=dict)
    """Seconds of compressing (``compress_s``) and of collectives (``wire_s``) in a step; ``sent_mb`` of a step, and
    ``plain_mb``, which it would have sent without compression; ``num_looks``, the number of steps that were timed."""
    collectives: Annotated[dict[str, dict[str, float]], _joined(_latest_known)] = dataclasses.field(
        default_factory=dict
    )
    """``calls`` and ``sent_mb`` of a step by operation, in the last steps of training; empty if not known."""
    all_reduce_mb_per_s: Annotated[float | None, _joined(_latest)] = None
    """Rate at which this rank sent in an all-reduce of 8 MB as training ended; None if not measured."""
    links: Annotated[list[float], _joined(_latest_known)] = dataclasses.field(default_factory=list)
    """Rate in MB/s at which this rank received from each other rank as training ended; empty if not measured."""

    def joined(self, later: "Interval") -> "Interval":
        """Merges this interval with the next one."""
        return Interval(**{name: join(self, later, name) for name, join in _joins().items()})

    def line(self) -> str:
        """Returns the interval as JSON without empty fields; seconds have microsecond precision."""
        values = {k: v for k, v in vars(self).items() if v is not None and v != {} and v is not False}
        values = {k: v for k, v in values.items() if v != [] or k not in ("steps", "links")}
        exact = {k: values[k] for k in _EXACT if k in values}
        return json.dumps({"kind": "interval", **_rounded(values), **exact}, separators=(",", ":"))


@cache
def _joins() -> dict[str, Any]:
    hints = get_type_hints(Interval, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return {key: _rounded(item) for key, item in value.items()} if isinstance(value, dict) else value
