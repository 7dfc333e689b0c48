"""Random training data, stops and numbers of ranks; a run of each is compared with a plain loop's list of samples.

``python -m tests.engine.data.draws`` makes 1,000 draws on up to 4 ranks; `test_draws.py` makes a few. To see one again:
``--seed S --draw K``, with its log. A draw passes if all its runs were trained on the samples of the plain loop, or
were refused by an error before the first step.
"""

import argparse
import gc
import json
import os
import tempfile
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.distributed import run_ranks
from tests.engine.tiny import as_rank

from .draw_checks import wrong
from .draw_runs import begin, go_on
from .draw_spec import Draw, draw

_PATIENCE_S = 600.0
"""Of the runs of a draw. Four ranks with two workers each take 18 CPU seconds, which may be minutes."""
_AT_ONCE = 3
"""Parts of the draws, on two cores: a draw computes for 3 seconds and waits as long for workers and ranks to end."""


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


def on_ranks(
    seed: int, numbers: list[int], most_ranks: int, folder: Path, timeout_s: float = _PATIENCE_S
) -> dict[int, str]:
    """What is wrong, by draw; each run has processes of its own, since a run that is refused ends its group."""
    found: dict[int, str] = {}
    for number in numbers:
        if said := wrong_on_ranks(draw(seed, number, most_ranks), folder / str(number), timeout_s):
            found[number] = said
    return found


def wrong_on_ranks(what: Draw, folder: Path, timeout_s: float = _PATIENCE_S) -> str | None:
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


def _in_a_folder(seed: int, numbers: list[int], most_ranks: int) -> dict[int, str]:
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)  # where a run that fails writes its report
        try:
            return on_ranks(seed, numbers, most_ranks, Path(temporary))
        finally:
            os.chdir("/")


def _drop_stderr() -> None:
    """Drops what this process and its ranks log: what fails is in the verdicts, which are printed."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


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
    with tempfile.TemporaryDirectory() as temporary:
        # A run that saves and goes on imports what each rank of each draw, a fork of this process, would import anew.
        in_one_process(given.seed, [0], Path(temporary))
    gc.freeze()  # else each rank's collections copy the pages of all that this process has imported
    made = failed = 0
    make = partial(_in_a_folder, given.seed, most_ranks=given.ranks)
    parts = [numbers[first : first + 10] for first in range(0, len(numbers), 10)]
    is_quiet = len(numbers) > 1
    with ProcessPoolExecutor(_AT_ONCE, get_context("fork"), _drop_stderr if is_quiet else None) as makers:
        for part, found in zip(parts, makers.map(make, parts), strict=True):
            made, failed = made + len(part), failed + len(found)
            for number, said in sorted(found.items()):
                print(f"--seed {given.seed} --draw {number} --ranks {given.ranks}: {said}", flush=True)
            print(f"{made} of {len(numbers)} draws made, {failed} wrong", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
