"""What compression is worth on a slow wire: times of a step under DDP's hooks, torch's and ours.

    python benchmarks/wire.py                                        all rates: as root, on an idle machine
    python benchmarks/wire.py --rates 100mbit --only int8 --output out     one part of it, for work on that

For each rate, two network namespaces (`_namespaces.py`) with a process of one thread in each. The contestants take
turns in one process group, in a new order every round, each with a fresh model of the same weights: ByteGPT with 5M
parameters, on 32 bytes, so that the wire is the subject. Figures are medians over rounds, of medians over steps.
"none" is DDP without a hook; "plain" sends the same through ours.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import torch
import torch.distributed as dist
from _contestants import settle
from _namespaces import Namespaces
from overhead import spread, uncommitted
from report import Table, about, write_report
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from polyphase.engine.compression import AllReduceHook, Auto, CommHook, make_comm_hook
from polyphase.models import ByteGPT

ROUNDS = {"25mbit": 1}
"""Where fewer than three are enough: a step takes seconds, so that little else disturbs it."""
RATES = ("25mbit", "100mbit", "1gbit", "unlimited")
ALONE, FORECAST = "compute alone", "polyphase bench-comm"
_POWERSGD = ("powersgd:2,start=0", "powersgd:4,start=0", "powersgd:4,start=0+fp16")
OURS = ("plain", "bf16", "fp16", "int8", *_POWERSGD, "topk:0.01", "sign")
CONTESTANTS = (ALONE, "none", "torch fp16", "torch powersgd:2", "torch powersgd:4", *OURS)
FASTER, SLOWEST = {"powersgd:2,start=0": 8.0, "topk:0.01": 8.0, "int8": 3.0, "sign": 15.0}, 1.5
"""Goals at 100mbit, in times faster than none; and without a limit, times as slow."""
WARM_UP, LEAST_STEPS, MOST_STEPS, LEAST_S = 3, 5, 30, 2.0

Record = dict[str, Any]
"""What one contestant did in one round: contestant, times_s of its steps, sent_bytes and counted_bytes per step."""


class Loss(nn.Module):
    """DDP calls `forward`, so the loss is there."""

    def __init__(self) -> None:
        super().__init__()
        self.model = ByteGPT(num_layers=6, dim=256, num_heads=4, context_length=64)

    def forward(self, batch: Tensor) -> Tensor:
        return self.model._loss(batch)


def attach(name: str, model: DistributedDataParallel) -> CommHook | None:
    """Makes `model` send its gradients as the contestant does; returns its hook if that is one of ours."""
    if name in OURS:
        hook = AllReduceHook() if name == "plain" else make_comm_hook(name)
        assert hook is not None
        hook.attach(model)
        return hook
    if name == "torch fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name != "none":
        # Error feedback and factors that start from the last ones are its defaults; 2 is the earliest start it takes.
        rank = int(name.partition(":")[2])
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return None


def measure(name: str) -> Record:
    """Trains for some steps, as many on both ranks, and times those after the warm-up."""
    torch.manual_seed(0)
    module = Loss()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    model: nn.Module = module
    hook = None
    if name != ALONE:  # the weights are the same from the start, so there is nothing to synchronise
        model = DistributedDataParallel(module, bucket_cap_mb=25, gradient_as_bucket_view=True, init_sync=False)
        hook = attach(name, model)
    batch = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(dist.get_rank()))

    def step() -> float:
        began = time.perf_counter()
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if hook is not None:
            hook.on_step_end()
        return time.perf_counter() - began

    last_s = torch.tensor([step() for _ in range(WARM_UP)][-1])
    dist.all_reduce(last_s, dist.ReduceOp.MAX)  # both ranks count alike
    num_steps = min(MOST_STEPS, max(LEAST_STEPS, math.ceil(LEAST_S / last_s.item())))
    dist.barrier()
    sent, counted = sent_bytes(), hook.num_bytes if hook else 0
    times = [step() for _ in range(num_steps)]
    dist.barrier()  # all that was sent has arrived
    record: Record = {"contestant": name, "times_s": times, "sent_bytes": (sent_bytes() - sent) / num_steps}
    if hook is not None and hook.wire is not None:
        record["counted_bytes"] = (hook.num_bytes - counted) / num_steps
        dist.destroy_process_group(hook.wire.group)
    return record


def forecast(names: list[str]) -> Record:
    """What `polyphase bench-comm` says of our methods here, by way of `compression="auto"`, before any is measured."""
    hook = Auto()
    hook.candidates = ["none" if name == "plain" else name for name in names]
    torch.manual_seed(0)
    module = Loss()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
    model = DistributedDataParallel(module, bucket_cap_mb=25, gradient_as_bucket_view=True, init_sync=False)
    hook.attach(model)
    batch = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(dist.get_rank()))
    while hook.chosen is None:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        hook.on_step_end()
    step_s = {each.compression.replace("none", "plain"): each.step_s for each in hook.forecasts}
    assert hook.wire is not None
    dist.destroy_process_group(hook.wire.group)
    return {"contestant": FORECAST, "step_s": step_s, "recommended": hook.chosen.replace("none", "plain")}


def sent_bytes() -> int:
    """By this process and its torchrun, with headers."""
    return int(Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics/tx_bytes").read_text())


def work(rounds: int, only: list[str], output: Path) -> None:
    """Rank 0 writes the records of all rounds."""
    settle()
    dist.init_process_group("gloo")
    records = [forecast([name for name in only if name in OURS])]
    order = random.Random(0)  # the same on both ranks
    for _ in range(rounds):
        for name in order.sample(only, len(only)):
            gc.collect()
            dist.barrier()
            records.append(measure(name))
    if dist.get_rank() == 0:
        output.write_text(json.dumps(records))
    dist.destroy_process_group()


def run(rate: str, rounds: int, only: list[str]) -> dict[str, "Result"]:
    """Both processes between two namespaces, and the results of rank 0 by contestant."""
    print(f"  {rate}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder, Namespaces(None if rate == "unlimited" else rate) as net:
        output = Path(folder) / "records.json"
        net.torchrun([__file__, "--rounds", str(rounds), "--only", *only, "--to", str(output)])
        records: list[Record] = json.loads(output.read_text())
    forecasts, records = records[0], records[1:]
    return {name: Result(rate, name, records, forecasts) for name in only}


class Result:
    """All rounds of a contestant at one rate."""

    def __init__(self, rate: str, contestant: str, records: list[Record], forecasts: Record) -> None:
        self.rate, self.contestant = rate, contestant
        self.forecast_s: float | None = forecasts["step_s"].get(contestant)
        self.is_recommended = contestant == forecasts["recommended"]
        records = [record for record in records if record["contestant"] == contestant]
        self.rounds_s = [statistics.median(record["times_s"]) for record in records]
        self.step_s = statistics.median(self.rounds_s)
        self.sent_bytes = statistics.median(record["sent_bytes"] for record in records)
        counted = [record["counted_bytes"] for record in records if "counted_bytes" in record]
        self.counted_bytes = statistics.median(counted) if counted else None

    def times_faster(self, than: "Result") -> list[float]:
        """Round by round."""
        return [theirs / own for theirs, own in zip(than.rounds_s, self.rounds_s, strict=True)]


Results = dict[str, dict[str, Result]]  # by rate and contestant
COLUMNS: dict[str, Callable[[Result, dict[str, Result]], str]] = {
    "step, ms": lambda own, _: spread([1e3 * seconds for seconds in own.rounds_s], 1),
    "forecast, ms": lambda own, _: f"{1e3 * own.forecast_s:.1f}" if own.forecast_s else "",
    "times faster than none": lambda own, found: spread(own.times_faster(found["none"]), 2),
    "sent, MB a step": lambda own, _: f"{own.sent_bytes / 1e6:.3f}",
    "counted, MB a step": lambda own, _: f"{own.counted_bytes / 1e6:.3f}" if own.counted_bytes else "",
    "sent over counted": lambda own, _: f"{own.sent_bytes / own.counted_bytes - 1:+.1%}" if own.counted_bytes else "",
    "of none's bytes": lambda own, found: f"{own.sent_bytes / found['none'].sent_bytes:.2%}",
}
"""What a table says of a contestant, given its result and those of all at the same rate."""


def table(rate: str, found: dict[str, Result]) -> Table:
    rows = [{"contestant": name} | {c: say(own, found) for c, say in COLUMNS.items()} for name, own in found.items()]
    return Table(title=f"{rate}: a step, and what one rank sends (medians; least to greatest of the rounds)", rows=rows)


def summary(results: Results) -> Table:
    """Of all rates, with the goals beside the figures."""
    rows = [
        {"contestant": name} | {rate: judged(rate, name, found) for rate, found in results.items()}
        for name in next(iter(results.values()))
        if name != ALONE
    ]
    return Table(title="Times faster than none, by rate, and the goals", rows=rows)


def recommendations(results: Results) -> Table:
    """What `polyphase bench-comm` recommends, and how far that is from the fastest of ours."""
    rows = []
    for rate, found in results.items():
        ours = [own for own in found.values() if own.contestant in OURS]
        best = min(ours, key=lambda own: own.step_s)
        taken = next(own for own in ours if own.is_recommended)
        ratio = taken.step_s / best.step_s
        rows.append(
            {
                "rate": rate,
                "recommended": f"{taken.contestant}, {1e3 * taken.step_s:.1f} ms",
                "the fastest": f"{best.contestant}, {1e3 * best.step_s:.1f} ms",
                "ratio": f"{ratio:.2f}; at most 1.1: {'met' if ratio <= 1.1 else 'missed'}",
            }
        )
    return Table(title="What `polyphase bench-comm` recommends before any is measured", rows=rows)


def judged(rate: str, name: str, found: dict[str, Result]) -> str:
    """Times faster than none, and what was to be reached: the medians count."""
    ratios = found[name].times_faster(found["none"])
    goals = []
    if rate == "100mbit" and name in FASTER:
        goals.append((f"at least {FASTER[name]:g}", statistics.median(ratios) >= FASTER[name]))
    if rate == "unlimited" and name in OURS:
        goals.append((f"at least 1/{SLOWEST:g}", statistics.median(ratios) >= 1 / SLOWEST))
    if name.startswith("powersgd") and (theirs := found.get(f"torch {name.partition(',')[0]}")):
        ratio = statistics.median(found[name].times_faster(theirs))
        goals.append((f"{ratio:.2f} times as fast as torch's", ratio >= 1))
    return "; ".join([spread(ratios, 2), *(f"{goal}: {'met' if met else 'missed'}" for goal, met in goals)])


def plot(path: Path, results: Results) -> None:
    """Draws the figure, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        print("(no plot: matplotlib is not installed)")
        return
    times = {rate: {name: 1e3 * one.step_s for name, one in found.items()} for rate, found in results.items()}
    figures.wire(path, times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", choices=RATES, default=RATES, help="bits per second (default: all)")
    parser.add_argument("--rounds", type=int, help="alternating rounds (default: 3; 1 at 25mbit)")
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, metavar="NAME", help=f"of: {', '.join(CONTESTANTS)}")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of the report")
    parser.add_argument("--to", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    only = [name for name in CONTESTANTS if not options.only or name in options.only or name in ("none", "plain")]
    if options.to is not None:
        work(options.rounds, only, options.to)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by which the namespaces are removed
    results = {rate: run(rate, options.rounds or ROUNDS.get(rate, 3), only) for rate in options.rates}
    where = about(shlex.join(["python", "benchmarks/wire.py", *sys.argv[1:]])) + uncommitted()
    tables = [summary(results), recommendations(results), *(table(rate, found) for rate, found in results.items())]
    write_report(options.output / "wire-cpu.md", "Compression on a wire", where, tables, plot=False)
    plot(options.output / "wire-cpu.svg", results)


if __name__ == "__main__":
    main()
