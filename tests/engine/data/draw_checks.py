"""Compares the runs of a draw with a plain loop's list of samples."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from . import combined_draws
from .draw_runs import SEED
from .draw_spec import Draw
from .kinds import BATCHED, COMBINED, OWN_RANKS, STREAMS, ids_of, load


def plain(what: Draw, num_epochs: int, num_ranks: int = 1) -> list[list[list[Any]]]:
    """What a plain loop trains on: by epoch, its batches of sample numbers; of all ranks where they have their own."""
    found: list[list[list[Any]]] = [[] for _ in range(num_epochs)]
    for rank in range(num_ranks):
        seed_everything(SEED, verbose=False)
        loader = load(what, rank, num_ranks)
        for epoch in range(num_epochs):
            if what.reload and epoch and epoch % what.reload == 0:
                loader = load(what, rank, num_ranks)
                # Lightning makes two iterators in such an epoch. Persistent workers would go on behind the batches that
                # they have read for the first one, and so lose these.
                iter(load(what, rank, num_ranks) if what.kind in STREAMS else loader)
            for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(epoch)
            limits = [size for size in (what.limit, _num_batches(what, loader)) if size is not None]
            most = min(limits, default=None)
            batches = itertools.islice(_first_of(loader), most)
            found[epoch] += [ids_of(batch) for batch in batches]
    return found


def _num_batches(what: Draw, loader: Any) -> int | None:
    """How many batches Lightning asks a loader for; None if it asks until there are no more.

    To ask for the end may draw random numbers: torch's RandomSampler does with a generator of the user's, and
    CombinedLoader's mode max_size_cycle begins the first loader anew while it does not know that the second has ended.
    """
    if isinstance(loader, CombinedLoader):
        sizes = [len(each) for each in loader.flattened]
        return {"min_size": min, "sequential": sum}.get(what.kind.partition(", ")[2], max)(sizes)  # type: ignore[operator]
    return len(loader) if isinstance(loader, DataLoader) and what.kind not in STREAMS else None


def _first_of(loader: Any) -> Iterator[Any]:
    for item in loader:
        yield item[0] if isinstance(loader, CombinedLoader) else item


def wrong(what: Draw, begun: list[dict[str, Any]], gone_on: list[dict[str, Any]]) -> str | None:
    """What is wrong of the runs, given what each rank of them said; None if nothing is."""
    refused = ["refused" in found for found in begun]
    if any(refused):
        return None if all(refused) else "some ranks were refused and others not"
    first, num_epochs = begun[0], begun[0]["max_epochs"]
    expected = plain(what, num_epochs, what.num_ranks if what.kind in OWN_RANKS else 1)
    if what.num_ranks == 1:
        flat = [[epoch, i, batch] for epoch, batches in enumerate(expected) for i, batch in enumerate(batches)]
        if (found := _as_lists(first["whole"])) != flat:
            return f"the whole run: {_difference(found, flat)}"
    elif said := _wrong_as_a_whole(what, begun, expected):
        return f"the whole run: {said}"
    for rank, found in enumerate(begun):
        stopped = _as_lists(found["stopped"])
        if stopped != _as_lists(found["whole"])[: len(stopped)]:
            return f"rank {rank}, the run that is stopped: {_difference(stopped, _as_lists(found['whole']))}"
    refused = ["refused" in found for found in gone_on]
    if any(refused):
        return None if all(refused) else "going on, some ranks were refused and others not"
    if what.keeps_batches:
        for rank, (before, after) in enumerate(zip(begun, gone_on, strict=True)):
            rest = _as_lists(before["whole"])[before["done"] :]
            if (found_rest := _as_lists(after["rest"])) != rest:
                return f"rank {rank} goes on with {_difference(found_rest, rest)}"
        return None
    if what.kind == "weighted" and (what.persistent or what.reads_ahead_otherwise):
        # torch draws a seed for the new workers: later orders are others, with replacement of other samples.
        return None
    done = [item for found in begun for item in found["whole"][: found["done"]]]
    if what.kind in COMBINED:
        return combined_draws.wrong_epochs(what, done, _together(gone_on, "rest"), num_epochs)
    return _wrong_epochs(
        what,
        done + _together(gone_on, "rest"),
        expected,
        range(num_epochs),
        max(what.batch_size, what.later_batch_size),
        most_ranks=max(what.num_ranks, what.later_num_ranks),
    )


def _wrong_as_a_whole(what: Draw, begun: list[dict[str, Any]], expected: list[list[list[Any]]]) -> str | None:
    """What is wrong of the run of several ranks that is not stopped."""
    seen, num_epochs = _together(begun, "whole"), len(expected)
    if what.kind not in COMBINED:
        return _wrong_epochs(what, seen, expected, range(num_epochs), what.batch_size)
    batch_size = what.batch_size * what.num_ranks
    return combined_draws.wrong_steps(seen, plain(replace(what, batch_size=batch_size), num_epochs))


def _together(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [item for of_rank in found for item in of_rank[name]]


def _wrong_epochs(
    what: Draw,
    seen: list[Any],
    expected: list[list[list[Any]]],
    epochs: range,
    batch_size: int,
    most_ranks: int | None = None,
) -> str | None:
    """Compares epochs as multisets: what fills the last round of batches may be there twice, and `drop_last` may leave
    out what fills none."""
    num_ranks = most_ranks or what.num_ranks
    # Without `drop_last` and `limit`: the plain loop of one process leaves out other samples than several.
    complete = plain(replace(what, drop_last=False, limit=None), len(expected), _own(what))
    for epoch in epochs:
        batches = complete[epoch]
        order = Counter(str(i) for batch in batches for i in batch)
        if what.kind in OWN_RANKS:
            order = Counter(set(order))  # on several ranks the sampler has some twice, to fill up the last round
        found = Counter(str(i) for number, _, ids in seen if number == epoch for i in ids)
        longest = max(map(len, batches), default=1) if what.kind in BATCHED else 1
        room = max(batch_size, longest) * num_ranks
        if what.kind in STREAMS:
            room *= max(1, what.num_workers, what.later_num_workers)  # each worker has a last batch
        # Each of two runs may fill up the last round of its part; streams do it with whole batches.
        most_again = room if what.kind in STREAMS | BATCHED else num_ranks - 1
        if not what.drop_last and what.limit is None and order - found:
            return f"epoch {epoch} lacks {dict(order - found)}"
        if what.drop_last and what.limit is None and (order - found).total() >= room:
            return f"epoch {epoch} lacks {dict(order - found)}, more than drop_last leaves out"
        if (found - order).total() > most_again:
            return f"epoch {epoch} has {dict(found - order)} too often"
    return None


def _own(what: Draw) -> int:
    return what.num_ranks if what.kind in OWN_RANKS else 1


def _as_lists(items: Any) -> Any:
    return json.loads(json.dumps(items))


def _difference(found: list[Any], expected: list[Any]) -> str:
    at = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    at = min(len(found), len(expected)) if at is None else at
    return f"{found[at : at + 3]} at batch {at} of {len(found)}, not {expected[at : at + 3]} of {len(expected)}"
