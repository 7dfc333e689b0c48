"""Several ranks over a CombinedLoader: its batches are those of one process with a batch of all ranks together."""

from collections import Counter
from typing import Any

LOADERS = ("a", "b")
_Seen = list[Any]
"""Epoch, index and `[ids of a, ids of b]` of each batch of each rank."""


def wrong_steps(seen: _Seen, expected: list[list[list[Any]]]) -> str | None:
    """Compares each step of all ranks together with a batch of one process.

    Args:
        seen: by all ranks.
        expected: by epoch, the batches of one process that are as large as those of all ranks together.
    """
    steps = {(epoch, index) for epoch, index, _ in seen}
    if steps != (wanted := {(epoch, index) for epoch, batches in enumerate(expected) for index in range(len(batches))}):
        return f"steps {sorted(steps ^ wanted)} are in one of the two only"
    for epoch, index in sorted(steps):
        found = _by_loader([item for item in seen if tuple(item[:2]) == (epoch, index)])
        for name, ids in zip(LOADERS, expected[epoch][index], strict=True):
            if said := _difference(found[name], Counter(ids)):
                return f"epoch {epoch}, batch {index}, loader {name} {said}"
    return None


def wrong_epochs(what: Any, done: _Seen, rest: _Seen, num_epochs: int) -> str | None:
    """Looks at a run that goes on with another number of ranks, epoch by epoch.

    Args:
        what: the draw.
        done: by all ranks, what a run that goes on does not do again.
        rest: by all ranks, what is trained on then.
        num_epochs: of both together.
    """
    then, now = (what.batch_size * ranks for ranks in (what.num_ranks, what.later_num_ranks))
    for epoch in range(num_epochs):
        found = _by_loader([item for item in done + rest if item[0] == epoch])
        num_done = len({index for number, index, _ in done if number == epoch})
        size_of_a, counts = _expected(what, num_done, then, now)
        if again := found["a"] - Counter(range(what.num_samples)):
            return f"epoch {epoch}, loader a has {dict(again)} too often"
        if len(found["a"]) < size_of_a:
            return f"epoch {epoch}, loader a has {len(found['a'])} samples, not {size_of_a}"
        if said := _difference(found["b"], counts):
            return f"epoch {epoch}, loader b {said}"
    return None


def _expected(what: Any, num_done: int, then: int, now: int) -> tuple[int, Counter[int]]:
    """The number of samples of the first loader, and how often the second has each.

    Args:
        what: the draw.
        num_done: steps of the first run.
        then: samples of all ranks' batch in the first run.
        now: the same in the second run.
    """
    mode = what.kind.partition(", ")[2]
    sizes = what.num_samples, max(1, what.num_samples // 2)
    left = [max(0, size - num_done * then) for size in sizes]
    steps = (min if mode == "min_size" else max)(-(-size // now) for size in left)
    size_of_a = min(sizes[0], num_done * then + steps * now)
    if mode != "max_size_cycle":
        return size_of_a, Counter(range(sizes[1]))
    counts: Counter[int] = Counter()
    at = sizes[1]
    for number in range(num_done + steps):
        if at >= sizes[1]:
            at = 0
        size = then if number < num_done else now
        counts.update(range(at, min(at + size, sizes[1])))
        at += size
    return size_of_a, counts


def _by_loader(seen: _Seen) -> dict[str, Counter[int]]:
    found: dict[str, Counter[int]] = {name: Counter() for name in LOADERS}
    for _, _, batch in seen:
        for name, ids in zip(LOADERS, batch, strict=True):
            found[name].update(ids)
    return found


def _difference(found: Counter[int], expected: Counter[int]) -> str | None:
    if lacking := expected - found:
        return f"lacks {dict(lacking)}"
    if again := found - expected:
        return f"has {dict(again)} too often"
    return None
