"""The suite's table, in the order of its runs: each check and figure with its part, its time limit and its place."""

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["ITEMS", "PARTS", "Item"]

PARTS = (1, 2, 3, 4)
"""Each takes `runner.PART_S` at most, in any order; a later one adds to the report."""


@dataclass(frozen=True)
class Item:
    """One function that is run in a process of its own."""

    name: str
    proves: str
    place: str
    """``"module:function"`` under `benchmarks.gpu`."""
    part: int
    """Which of `PARTS` runs it."""
    limit_s: float
    arguments: tuple[str, ...] = ()
    is_figure: bool = False
    """Whether it returns the rows of a table; a check returns what it has seen, as text."""


def _check(part: int, limit_s: float, place: str, proves: str) -> Item:
    return Item(place.partition(":")[2], proves, f"benchmarks.gpu.{place}", part, limit_s)


_CHECKS = (
    _check(1, 90, "checks_steps:strategies", "fsdp, tp, pp on one rank: weights of a loop by hand"),
    _check(1, 90, "checks_steps:overhead", "small steps: own time of Engine against Trainer's"),
    _check(1, 120, "checks_streams:allocator", "comm hooks: the same weights with and without a caching allocator"),
    _check(1, 90, "checks_memory:mixed_gathers", "fsdp of 8 ranks: the engine's bf16 gathers hold less than fp32 ones"),
    _check(1, 60, "checks_ranks:joined", "ddp x 2: a rank without samples takes part; weights of the CPU"),
    _check(1, 60, "checks_steps:offload", "fsdp, offload=parameters, clipping, weights, 16-mixed: weights of single"),
    _check(1, 45, "checks_saves:snapshot_devices", "snapshots under topk open on the CPU and leave no memory behind"),
    _check(1, 90, "checks_steps:cuda_graphs", "reduce-overhead with accumulation: weights of eager steps"),
    _check(1, 120, "checks_steps:compiled", "compile=True, selective and bf16-mixed, too: weights of eager steps"),
    _check(1, 90, "checks_steps:float8", "float8: products close to bfloat16's; compiled steps are eager ones"),
    _check(1, 60, "checks_memory:halved", "a batch that does not fit is halved: weights of one that does"),
    _check(1, 60, "checks_ranks:lost_collective", "out of memory in int8's all-to-all: no rank is a call ahead"),
    _check(1, 90, "checks_waits:waits", "between loggings a step waits for nothing"),
    _check(1, 45, "checks_kernels:largest_values", "topk finds the largest values; time against 16 rows"),
    _check(1, 45, "checks_kernels:orthonormal", "powersgd's factors are orthonormal, of any rank; time against QR"),
    _check(1, 60, "checks_kernels:packed", "packed sequences by boundaries: loss and gradients of a mask; tokens/s"),
    _check(1, 60, "checks_kernels:averages", "each method's average is its gradient; GB/s and peak memory"),
    _check(1, 45, "checks_streams:replicas", "hsdp with a hook: shards are not written over while replicas read"),
    _check(1, 45, "checks_saves:each_step", "each snapshot in the background has the weights of its step"),
    _check(1, 60, "checks_saves:staging", "staging copies what it is given, whatever is written later; three saves"),
    _check(1, 60, "checks_saves:resumed", "10 steps and 10 resumed ones have the weights of 20, with dropout"),
    _check(1, 60, "checks_steps:overflow", "16-mixed: a step with an infinity changes no weight"),
    _check(1, 60, "checks_waits:images", "pinned images are copied without a wait"),
    _check(1, 60, "checks_ranks:stuck", "a host blocked by the device is named with its line"),
    _check(4, 150, "checks_ranks:two_on_one", "ddp x 2 on one device: weights of the CPU; failures end and are named"),
    _check(1, 45, "checks_steps:no_warnings", "ddp under -W error"),
    _check(4, 90, "checks_memory:tensor_parallel", "tp of 4 ranks: each has its quarter; host time of a step"),
    # Only a GPU tells whether the host is ahead of it there, and a broadcast between hosts so costs nothing.
    _check(4, 60, "checks_ranks:pipeline", "pp of two devices: time of a step that hosts' broadcasts take"),
    _check(4, 90, "checks_ranks:server_and_verify", "ps trains; verify of a convolutional net finds it equal"),
)  # fmt: skip

_SIZES = ("124M", "350M", "1.3B")


_ALL, _BY_HAND = ("Engine", "by hand", "Trainer"), ("Engine", "by hand")


def _figures(part: int, size: str, strategy: str, *settings: str, of: tuple[str, ...] = ("Engine",)) -> Iterator[Item]:
    for contestant in of:
        arguments = (contestant, size, strategy, *settings)
        name = " ".join((size, strategy, *settings, contestant))
        yield Item(name, "", "benchmarks.gpu.figures:training", part, 90, arguments, is_figure=True)


def _all_figures() -> Iterator[Item]:
    """The most informative first: a part may be over before its last."""
    for part, strategy in ((2, "single"), (3, "fsdp")):
        yield from _figures(part, "1.3B", strategy, "compile", of=_BY_HAND)
        yield from _figures(part, "1.3B", strategy, "compile", "float8")
        for size in ("350M", "124M"):
            yield from _figures(part, size, strategy, "compile", of=_BY_HAND)
        for settings in (("compile", "bf16-blocks"), (), ("bf16-blocks",)):
            for size in reversed(_SIZES):
                yield from _figures(part, size, strategy, *settings, of=("Engine",) if settings else _ALL)
        for size in reversed(_SIZES):
            yield from _figures(part, size, strategy, "compile", of=("Trainer",))
    for size in _SIZES:
        yield from _figures(3, size, "fsdp", "compile", "selective", of=_BY_HAND)
    yield from _figures(2, "124M", "single", "compile", "65k", of=_BY_HAND)
    yield from _figures(2, "124M", "single", "65k", of=_ALL)
    for size in _SIZES:
        yield from _figures(4, size, "tp")
        yield from _figures(4, size, "tp", "compile")
        yield from _figures(4, size, "ddp", of=_ALL)
        yield from _figures(4, size, "pp")


ITEMS: tuple[Item, ...] = (*_CHECKS, *_all_figures())
