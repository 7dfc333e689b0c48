"""Random training data, stops and numbers of ranks; a run of each is compared with a plain loop's list of samples.

``python -m tests.engine.data.draws`` makes 1,000 draws on up to 4 ranks; `test_draws.py` makes a few. To see one again:
``--seed S --draw K``. A draw passes if all its runs were trained on the samples of the plain loop, or were refused by
an error before the first step.
"""

import argparse
import itertools
import json
import os
import random
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, seed_everything
from torch.utils.data import DataLoader

from tests.distributed import run_ranks
from tests.engine.tiny import SavesIn, as_rank, engine

from .kinds import BATCHED, COMBINED, IN_ONE_PROCESS, KINDS, OWN_RANKS, STREAMS, STRUCTURES, ids_of, load
from .runs import Trains

LATER_EPOCHS = 3
"""Epochs after the one that is stopped."""
STOPS = ("max_steps", "should_stop", "exception", "save")
REFUSED = (TypeError, ValueError)
_SEED = 7


@dataclass(frozen=True)
class Draw:
    """One training run, where it stops, and how it goes on."""

    kind: str
    num_samples: int
    batch_size: int
    drop_last: bool
    structure: str
    num_workers: int
    persistent: bool
    accumulate: int
    limit: int | None
    """`limit_train_batches`."""
    stop: str
    stop_after: int
    """Batches of this rank."""
    num_ranks: int
    later_batch_size: int
    later_num_workers: int
    later_num_ranks: int

    @property
    def keeps_batches(self) -> bool:
        """Whether the batches after the stop are to be those of the run that is not stopped."""
        later = self.later_batch_size, self.later_num_ranks
        is_same_crew = self.kind not in STREAMS or self.later_num_workers == self.num_workers
        return later == (self.batch_size, self.num_ranks) and is_same_crew


def draw(seed: int, number: int, most_ranks: int = 1) -> Draw:
    """The draw of that number; independent of the others, and of how many ranks are allowed but for their numbers."""
    rng = random.Random(f"{seed}-{number}")
    kind = rng.choice(list(KINDS))
    batch_size, num_workers = rng.randint(1, 5), rng.choice([0] * 8 + [1, 2])
    ranks = [rng.randint(1, 4) for _ in range(2)]
    alike = rng.random() < 0.5
    found = Draw(
        kind=kind,
        num_samples=rng.randint(6, 40),
        batch_size=batch_size,
        drop_last=rng.random() < 0.3,
        structure=rng.choice(list(STRUCTURES)),
        num_workers=num_workers,
        persistent=num_workers > 0 and rng.random() < 0.5,
        accumulate=rng.choice([1, 1, 2, 3]),
        limit=rng.choice([None, None, None, rng.randint(2, 6)]) if alike else None,
        stop=rng.choice(STOPS),
        stop_after=rng.randint(1, 12),
        num_ranks=min(ranks[0], most_ranks),
        later_batch_size=batch_size if alike or rng.random() < 0.6 else rng.randint(1, 5),
        later_num_workers=num_workers if alike else rng.choice([num_workers, num_workers, num_workers, 0, 1, 2]),
        later_num_ranks=min(ranks[0] if alike else ranks[1], most_ranks),
    )
    if kind == "stream with state_dict":
        # It begins an epoch where a limit has ended the one before: for one of several ranks that may be at its end.
        found = replace(found, limit=None)
    if kind in IN_ONE_PROCESS:
        found = replace(found, num_ranks=1, later_num_ranks=1)
    if kind in COMBINED:
        # Of some modes, what an epoch has depends on the size of a batch; and workers ask a sampler for its order
        # before the next loader is there, so that an order of two loaders depends on whether there are any.
        found = replace(found, later_batch_size=batch_size, later_num_workers=num_workers)
    return found


class _Data(LightningDataModule):
    """Makes the loader where the engine asks for it, when the ranks are known."""

    def __init__(self, what: Draw) -> None:
        super().__init__()
        self.what = what

    def train_dataloader(self) -> Any:
        return load(self.what, _rank(), _num_ranks())


class _Ends(Callback):
    """Ends the run after some batches."""

    def __init__(self, after: int, *, raises: bool) -> None:
        self.left, self.raises = after, raises

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.left -= 1
        if self.left == 0 and self.raises:
            raise KeyError("the run's own")
        trainer.should_stop = trainer.should_stop or self.left == 0


class _Batches(Callback):
    """Notes all (epoch, index); a rank without a sample for a batch takes no training step."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append((trainer.current_epoch, batch_idx))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _num_ranks() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _train(what: Draw, checkpoint: Path | None = None, **flags: Any) -> tuple[list[Any], Any]:
    """This rank's (epoch, index, samples), and the engine."""
    seed_everything(_SEED if checkpoint is None else _SEED + 1, verbose=False)
    ranks = {"strategy": "ddp", "devices": _num_ranks()} if _num_ranks() > 1 else {}
    given = {"accumulate_grad_batches": what.accumulate, "limit_train_batches": what.limit, **ranks, **flags}
    module, trainer = Trains(), engine(**given)
    try:
        trainer.fit(module, datamodule=_Data(what), ckpt_path=checkpoint)
    except KeyError:  # `_Ends`
        pass
    except REFUSED as error:
        if module.seen:
            raise RuntimeError("refused after the first step") from error
        raise
    return [(epoch, index, ids_of(batch)) for epoch, index, batch in module.seen], trainer


def begin(what: Draw, path: Path) -> dict[str, Any]:
    """Runs the whole of it, and a second one that stops; the checkpoint of that is at `path`.

    Returns:
        Of this rank, `whole`: all batches, `done`: those that a run that goes on does not do again; `refused`, if so.
    """
    most = 1 + what.stop_after // 2 + LATER_EPOCHS
    try:
        counts = _Batches()
        whole, _ = _train(what, max_epochs=most, callbacks=[counts])
    except REFUSED as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    batches = counts.found
    epochs = [epoch for epoch, _ in batches]
    at = min(what.stop_after, len(batches) - 1)
    at = min(at, sum(epoch <= most - LATER_EPOCHS - 1 for epoch in epochs))
    window = what.accumulate
    if what.stop == "max_steps":
        # The step that the batch `at` is of ends there, or with the epoch.
        while at < len(batches) and (epochs[at - 1] == epochs[at] and (batches[at - 1][1] + 1) % window):
            at += 1
    flags: dict[str, Any] = {"max_epochs": epochs[at - 1] + 1 + LATER_EPOCHS}
    if what.stop == "max_steps":
        steps = sum(
            i + 1 == len(batches) or epochs[i] != epochs[i + 1] or not (batches[i][1] + 1) % window for i in range(at)
        )
        stopped, trainer = _train(what, max_steps=steps, **flags)
    elif what.stop == "should_stop":
        stopped, trainer = _train(what, callbacks=[_Ends(at, raises=False)], **flags)
    else:
        callbacks: list[Any] = [SavesIn("on_train_batch_end", at, path)]
        if what.stop == "exception":
            callbacks.append(_Ends(at, raises=True))
        stopped, trainer = _train(what, callbacks=callbacks, **flags)
    if what.stop in ("max_steps", "should_stop"):
        trainer.save_checkpoint(path)
    if epochs[at - 1] == epochs[at]:
        at -= (batches[at - 1][1] + 1) % window  # an unfinished window is done again
    last = flags["max_epochs"]
    return {
        "whole": [item for item in whole if item[0] < last],
        "stopped": stopped,
        "done": sum((epoch, index) in batches[:at] for epoch, index, _ in whole),
        "max_epochs": last,
    }


def go_on(what: Draw, path: Path, max_epochs: int) -> dict[str, Any]:
    """What this rank is trained on when the stopped run goes on."""
    later = replace(what, batch_size=what.later_batch_size, num_workers=what.later_num_workers)
    later = replace(later, persistent=what.persistent and later.num_workers > 0)
    try:
        return {"rest": _train(later, path, max_epochs=max_epochs)[0]}
    except REFUSED as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def plain(what: Draw, num_epochs: int, num_ranks: int = 1) -> list[list[list[Any]]]:
    """What a plain loop trains on: by epoch, its batches of sample numbers; of all ranks where they have their own."""
    found: list[list[list[Any]]] = [[] for _ in range(num_epochs)]
    for rank in range(num_ranks):
        seed_everything(_SEED, verbose=False)
        loader = load(what, rank, num_ranks)
        for epoch in range(num_epochs):
            for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
                if callable(set_epoch := getattr(part, "set_epoch", None)):
                    set_epoch(epoch)
            # Lightning asks a loader whose length it knows for no more than that: torch's RandomSampler, with a
            # generator of the user's, would draw once more when it is asked for the end.
            has_length = isinstance(loader, DataLoader) and what.kind not in STREAMS
            most = min(what.limit or len(loader), len(loader)) if has_length else what.limit
            batches = itertools.islice(_first_of(loader), most)
            found[epoch] += [ids_of(batch) for batch in batches]
    return found


def _first_of(loader: Any) -> Iterator[Any]:
    for item in loader:
        yield item[0] if type(loader).__name__ == "CombinedLoader" else item


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
    elif said := _wrong_epochs(what, _together(begun, "whole"), expected, range(num_epochs), what.batch_size):
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
    if what.kind == "weighted" and what.persistent:
        # torch draws a seed for the new workers: later orders are others, with replacement of other samples.
        return None
    done = [item for found in begun for item in found["whole"][: found["done"]]]
    return _wrong_epochs(
        what,
        done + _together(gone_on, "rest"),
        expected,
        range(num_epochs),
        max(what.batch_size, what.later_batch_size),
        most_ranks=max(what.num_ranks, what.later_num_ranks),
    )


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
    for epoch in epochs:
        # Without `drop_last` and `limit`: the plain loop of one process leaves out other samples than several.
        batches = plain(replace(what, drop_last=False, limit=None), len(expected), _own(what))[epoch]
        order = Counter(str(i) for batch in batches for i in batch)
        found = Counter(str(i) for number, _, ids in seen if number == epoch for i in ids)
        longest = max(map(len, batches), default=1) if what.kind in BATCHED else 1
        room = max(batch_size, longest) * num_ranks
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


def in_one_process(seed: int, numbers: list[int], folder: Path) -> dict[int, str]:
    """What is wrong, by draw."""
    found = {}
    for number in numbers:
        what, path = draw(seed, number), folder / f"{number}.ckpt"
        begun = _noted(begin, what, path)
        gone_on = _noted(go_on, what, path, begun["max_epochs"]) if path.exists() else {}
        if said := _verdict(what, [begun], [gone_on]):
            found[number] = said
    return found


def _noted(function: Any, *arguments: Any) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of few workers
        try:
            return function(*arguments)
        except Exception:
            return {"failed": traceback.format_exc(limit=-4)}


def _verdict(what: Draw, begun: list[dict[str, Any]], gone_on: list[dict[str, Any]]) -> str | None:
    failed = [found["failed"] for found in begun + gone_on if "failed" in found]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's, of torch
        return failed[0] if failed else wrong(what, begun, gone_on)


def _on_rank(rank: int, what: Draw, path: Path, max_epochs: int | None) -> None:
    as_rank(rank)
    arguments = (begin, what, path) if max_epochs is None else (go_on, what, path, max_epochs)
    path.with_name(f"{rank}.json").write_text(json.dumps(_noted(*arguments)))


def on_ranks(seed: int, numbers: list[int], most_ranks: int, folder: Path, timeout_s: float = 120) -> dict[int, str]:
    """What is wrong, by draw; each run has processes of its own, since a run that is refused ends its group."""
    found: dict[int, str] = {}
    for number in numbers:
        if said := wrong_on_ranks(draw(seed, number, most_ranks), folder / str(number), timeout_s):
            found[number] = said
    return found


def wrong_on_ranks(what: Draw, folder: Path, timeout_s: float = 120) -> str | None:
    """What is wrong of a draw, in processes of its own; None if nothing is."""
    folder.mkdir()
    path = folder / "saved"
    try:
        begun = _by_ranks(what, path, None, what.num_ranks, timeout_s)
        gone_on = []
        if path.exists():
            gone_on = _by_ranks(what, path, begun[0]["max_epochs"], what.later_num_ranks, timeout_s)
        return _verdict(what, begun, gone_on)
    except Exception as error:  # a rank that hangs, or is killed
        return f"{type(error).__name__}: {str(error)[-1500:]}"


def _by_ranks(what: Draw, path: Path, max_epochs: int | None, num_ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    run_ranks(_on_rank, num_ranks, what, path, max_epochs, timeout_s=timeout_s, start_method="fork")
    return [json.loads(path.with_name(f"{rank}.json").read_text()) for rank in range(num_ranks)]


def main() -> int:
    """Makes the draws; 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--draw", type=int, help="this one alone")
    parser.add_argument("--ranks", type=int, default=4, help="at most")
    given = parser.parse_args()
    numbers = [given.draw] if given.draw is not None else list(range(given.first, given.first + given.draws))
    if given.draw is not None:
        print(json.dumps(asdict(draw(given.seed, given.draw, given.ranks)), indent=1))
    failed = 0
    for part in range(0, len(numbers), 10):
        # A run that fails writes its report to the working directory.
        with tempfile.TemporaryDirectory() as temporary:
            os.chdir(temporary)
            found = on_ranks(given.seed, numbers[part : part + 10], given.ranks, Path(temporary))
            os.chdir("/")
        failed += len(found)
        for number, said in sorted(found.items()):
            print(f"--seed {given.seed} --draw {number} --ranks {given.ranks}: {said}", flush=True)
        print(f"{min(part + 10, len(numbers))} of {len(numbers)} draws made, {failed} wrong", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
