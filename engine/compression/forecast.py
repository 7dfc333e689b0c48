"""Forecasts a step's time with another compression from measured links, measured computation, and message sizes.

Each collective is timed with a small and a large message, which gives latency and bandwidth (Hockney 1994). Each method
is run on buckets like the real ones with a simulated group, which gives its computation and its messages. The rest of a
step, and the time at which each bucket is ready, are taken from real steps.
"""

import dataclasses
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from .base import CommHook
from .counting_group import Bucket, CountingGroup, Message, SimulatedGroup, clock_s

__all__ = ["NUM_STEPS", "Forecast", "Link", "ReportWriter", "Step", "WireReport", "advice", "forecast", "measure_links"]

# A small message takes the latency alone; at the largest, doubling ends even where no transfer takes long enough.
_SMALL_BYTES, _LARGEST_BYTES = 2**10, 2**26
_LONG_ENOUGH_S = 0.2
"""Transfers of this length are limited by the bandwidth, even if traffic shaping lets short bursts pass."""

_NUM_TOGETHER = 4
"""Number of concurrent messages in a measurement of the bandwidth."""
_NUM_RUNS = 4
"""Number of runs of each method; the fastest run counts."""


class Link(NamedTuple):
    """Latency and bandwidth of one collective over these ranks."""

    latency_s: float
    bytes_per_s: float
    """Counts the bytes that each rank passes to the collective."""

    def time_s(self, num_bytes: float) -> float:
        """Returns the duration of the collective in seconds if each rank passes `num_bytes`."""
        return self.latency_s + num_bytes / self.bytes_per_s


class Step(NamedTuple):
    """Measured times of real steps, in seconds since the end of the previous step."""

    ready_s: list[float]
    """Times at which the gradients of each bucket were ready."""
    averaged_s: list[float]
    """Times at which each bucket was averaged."""
    length_s: float
    overlaps: bool
    """Whether backward continues while buckets are averaged."""


class Forecast(NamedTuple):
    """The forecast of a step with one compression."""

    compression: str
    step_s: float
    sent_bytes: int
    """Number of bytes that each rank sends in each step."""
    pays_below: float = 0.0
    """Bytes that a rank sends each second: on a faster link the method computes for longer than it saves in sending."""


def advice(forecasts: Sequence[Forecast], links: Mapping[str, Link], size: int) -> str:
    """Says on which links each method can save time, and whether it can on these, between `size` ranks."""
    rate = links["all_reduce"].bytes_per_s * 2 * (size - 1) / size
    methods = [forecast for forecast in forecasts if forecast.compression != "none"]
    paying = [method.compression for method in methods if method.pays_below > rate]
    limits = ", ".join(f"{method.compression} {method.pays_below / 1e9:.3g} GB/s" for method in methods)
    return (
        f"Here a rank sends {rate / 1e9:.3g} GB/s in an all-reduce, and "
        + (f"only {', '.join(paying)} can save time." if paying else "no compression can save time.")
        + f" A method saves time on links below its rate ({limits}), if backward does not hide the all-reduce."
    )


def measure_links(wire: CountingGroup, device: torch.device) -> dict[str, Link]:
    """Times each collective; all ranks call it together."""

    def send(start: Callable[[Tensor], Callable[[], Tensor]], num_rows: int, num_bytes: int) -> None:
        # Large payloads go in several messages, as in the methods: gloo sends one message in one direction at a time.
        num_messages = 1 if num_bytes == _SMALL_BYTES else _NUM_TOGETHER
        n = max(1, num_bytes // (num_messages * num_rows))
        parts = [torch.zeros(num_rows, n, dtype=torch.uint8, device=device) for _ in range(num_messages)]
        for receive in [start(payload) for payload in parts]:
            receive()

    collectives: dict[str, Callable[[int], Tensor | None]] = {
        "all_reduce": lambda n: wire.all_reduce(torch.zeros(n // 4, device=device)),
        "all_gather": lambda n: send(lambda payload: wire.start_all_gather(payload.view(-1)), 1, n),
        "all_to_all": lambda n: send(wire.start_all_to_all, wire.size, n),
    }
    links = {}
    for name, collective in collectives.items():
        collective(_SMALL_BYTES)  # opens connections
        latency_s = statistics.median(_time_s(collective, _SMALL_BYTES, wire, device) for _ in range(5))
        num_bytes, time_s = 2**16, 0.0
        while True:
            time_s = _time_s(collective, num_bytes, wire, device)
            if time_s > _LONG_ENOUGH_S or num_bytes >= _LARGEST_BYTES:
                break
            num_bytes *= 2
        links[name] = Link(latency_s, (num_bytes - _SMALL_BYTES) / max(time_s - latency_s, 1e-9))
    return links


def _time_s(
    collective: Callable[[int], Tensor | None], num_bytes: int, wire: CountingGroup, device: torch.device
) -> float:
    """Returns the longest time over all ranks, so that all ranks make the same decision."""
    wire.all_reduce(torch.zeros(1, device=device))  # makes all ranks begin together
    started_s = clock_s(device)
    collective(num_bytes)
    return _longest([clock_s(device) - started_s], wire, device)[0]


def _longest(times_s: Sequence[float], wire: CountingGroup, device: torch.device) -> list[float]:
    packed = torch.tensor(times_s, device=device)
    dist.all_reduce(packed, op=dist.ReduceOp.MAX, group=wire.group)
    return packed.tolist()


def forecast(
    hooks: Mapping[str, CommHook],
    buckets: Sequence[Bucket],
    step: Step,
    links: Mapping[str, Link],
    wire: CountingGroup,
    plain: CommHook,
) -> list[Forecast]:
    """Forecasts a step for each of `hooks`; the results are the same on all ranks, which call this together.

    Args:
        hooks: new hooks by flag.
        buckets: buckets in the order of a step; only size and dtype of their gradients matter.
        step: times measured with `none`.
        links: measured links.
        wire: the group of all ranks.
        plain: a hook that works like the one in the measured steps.
    """
    device = buckets[0].gradients.device
    all_costs = [_costs(hook, buckets, links, wire.size) for hook in (plain, *hooks.values())]
    steps_s = _longest(
        [
            step.length_s if type(hook) is type(plain) else _step_s(step, costs.buckets_s, all_costs[0].buckets_s)
            for hook, costs in zip(hooks.values(), all_costs[1:], strict=True)
        ],
        wire,
        device,
    )
    computing_s = _longest([costs.computing_s for costs in all_costs], wire, device)
    most_s = [max(own_s - computing_s[0], 1e-9) for own_s in computing_s[1:]]
    return [
        Forecast(flag, step_s, costs.sent_bytes, max(all_costs[0].sent_bytes - costs.sent_bytes, 0) / own_s)
        for flag, step_s, own_s, costs in zip(hooks, steps_s, most_s, all_costs[1:], strict=True)
    ]


class _Costs(NamedTuple):
    buckets_s: list[float]
    """The time of each bucket on the links."""
    computing_s: float
    """The time of all buckets if messages took none."""
    sent_bytes: int


def _costs(hook: CommHook, buckets: Sequence[Bucket], links: Mapping[str, Link], size: int) -> _Costs:
    hook.step = 10**9  # past any warm-up
    hook.prepare(buckets[0].gradients, size)
    costs_s, num_bytes, computing_s = [], 0, 0.0
    # The state of each bucket is freed at once: it may be as large as the gradients.
    for bucket in buckets:
        flat = torch.empty_like(bucket.gradients, memory_format=torch.contiguous_format)
        dry, runs_s = SimulatedGroup(size), []
        for _ in range(_NUM_RUNS):
            began_s, ended_s = _run(hook, Bucket(bucket.index, flat, bucket.members), dry)
            runs_s.append((_cost_s(began_s, ended_s, dry.messages, links), ended_s - began_s))
            hook.on_step_end()
        cost_s, own_s = min(runs_s)
        costs_s.append(cost_s)
        computing_s += own_s
        num_bytes += sum(dry.sent.values())
        for memory in hook.memories().values():
            memory.load_state_dict({})
    return _Costs(costs_s, computing_s, num_bytes)


def _run(hook: CommHook, bucket: Bucket, dry: SimulatedGroup) -> tuple[float, float]:
    """Averages one bucket with a simulated group; returns the times of its begin and end."""
    device = bucket.gradients.device
    dry.messages.clear()
    dry.sent.clear()
    # Not the default generator: orders of samples and dropout draw from that one.
    generator = torch.Generator(bucket.gradients.device).manual_seed(0)
    bucket.gradients.normal_(generator=generator)
    began_s = clock_s(device)
    hook.average(bucket, dry)
    return began_s, clock_s(device)


def _cost_s(began_s: float, ended_s: float, messages: Sequence[Message], links: Mapping[str, Link]) -> float:
    """Returns the seconds of one bucket: the method's computation, which was measured, and its waits for messages.

    A message takes its time on the links from the moment when it is started.
    """
    begun = [(message.begun_s, 0, number) for number, message in enumerate(messages)]
    needed = [(message.needed_s, 1, number) for number, message in enumerate(messages)]
    now = links_free = 0.0
    arrived: list[float] = []
    seen_s = began_s
    for moment_s, is_needed, number in sorted([*begun, *needed]):
        now, seen_s = now + moment_s - seen_s, moment_s
        if is_needed:
            now = max(now, arrived[number])
        else:
            message = messages[number]
            link = links.get(message.collective, links["all_gather"])  # the others, of a user's hook, are not measured
            links_free = max(links_free, now) + link.time_s(message.num_bytes)
            arrived.append(links_free)
    return now + ended_s - seen_s


def _step_s(step: Step, costs: Sequence[float], plain_costs: Sequence[float]) -> float:
    """Returns the length of a step if its buckets take `costs` seconds, instead of `plain_costs`."""
    if not step.overlaps:
        # For short steps, the forecast of the plain hook may exceed the whole measured step.
        return max(step.length_s - sum(plain_costs), 0.0) + sum(costs)
    done = 0.0
    for ready, cost in zip(step.ready_s, costs, strict=True):
        done = max(done, ready) + cost
    rest = step.length_s - step.averaged_s[-1]
    return done + rest


NUM_STEPS = 6
"""Steps until `compression="auto"` has chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireReport:
    """The result of `Engine.bench_comm`."""

    num_ranks: int
    links: dict[str, Link]
    """Latency and bandwidth between the ranks, by collective."""
    forecasts: list[Forecast]
    """Forecasts of a step, one for each compression."""
    recommended: str
    """The compression to set; may be ``"none"``."""

    def __str__(self) -> str:
        lines = [f"between {self.num_ranks} ranks     latency    bandwidth"]
        lines += [
            f"  {name:20} {1e3 * link.latency_s:7.2f} ms {link.bytes_per_s / 1e6:7.1f} MB/s"
            for name, link in self.links.items()
        ]
        lines.append("compression             step (forecast)   times none   sent by a rank")
        plain_s = next((forecast.step_s for forecast in self.forecasts if forecast.compression == "none"), None)
        lines += [
            f"  {forecast.compression:20} {1e3 * forecast.step_s:12.1f} ms"
            + (f" {forecast.step_s / plain_s:12.3f}" if plain_s else " " * 13)
            + f" {forecast.sent_bytes / 1e6:13.3f} MB"
            for forecast in self.forecasts
        ]
        why = "compression saves no time here" if self.recommended == "none" else "the fastest, or nearly"
        lines.append(f"recommended: compression={self.recommended!r} ({why})")
        return "\n".join([*lines, advice(self.forecasts, self.links, self.num_ranks)])

    @classmethod
    def read(cls, path: Path) -> "WireReport":
        """Reads the report that `ReportWriter` wrote."""
        content = json.loads(path.read_text())
        return cls(
            num_ranks=content["num_ranks"],
            links={name: Link(*link) for name, link in content["links"].items()},
            forecasts=[Forecast(*values) for values in content["forecasts"]],
            recommended=content["recommended"],
        )


class ReportWriter(Callback):
    """Writes the result of `compression="auto"` to `path` on rank 0, since another process may read it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """To be called on all ranks."""
        hook = trainer.strategy.comm_hook  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            report = WireReport(
                num_ranks=trainer.world_size, links=hook.links, forecasts=hook.forecasts, recommended=hook.chosen
            )
            self.path.write_text(json.dumps(dataclasses.asdict(report)))
