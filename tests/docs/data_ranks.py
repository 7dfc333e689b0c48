"""The tables of benchmarks/results/data-cpu.md about several ranks: kinds of training data, and launchers and stops.

They take some minutes; `data_matrix.py` writes them into the page, `test_data_matrix.py` looks at a few of them.
"""

import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from tests import warm
from tests.distributed import ROOT, in_a_fork, run_command, torchrun
from tests.engine.data.runs import Trains
from tests.engine.tiny import SavesIn, engine

from . import stopped
from .stopped import KINDS as STOPPED_KINDS

RANKS, STOP, EPOCHS = 2, 2, 4
RANK_COLUMNS = ["each sample once", "evaluated once", "resumed", "resumed in one process"]
LAUNCHERS = {"`ddp_fork`": "ddp_fork", "`ddp`": "ddp", "torchrun": "ddp", "`ddp_spawn`": "ddp_spawn"}
STOPS = ["SIGTERM", "max_steps", "kill -9"]
STOPPED = [(kind, name) for kind in STOPPED_KINDS for name in LAUNCHERS]
"""Kinds of training data and launchers that are stopped."""
_PATIENCE_S = 900
"""Of a run. Under `ddp_spawn` loader workers are spawned, too: 2 of 2 ranks in 4 epochs are 16 cold interpreters."""
REFUSED = ("ValueError", "TypeError", "MisconfigurationException")


class _Notes(Trains):
    """Leaves behind, by rank, what it was trained on and what it was evaluated on."""

    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        super().__init__()
        self.folder, self.evaluated = folder, []
        # Called when the ranks are known.
        self.train_dataloader = self.val_dataloader = make

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated += batch.tolist()

    def _write(self, name: str, what: Any) -> None:
        (self.folder / f"{name}{self.trainer.global_rank}").write_text(json.dumps(what))

    def on_train_end(self) -> None:
        self._write("trained", self.seen)

    def on_validation_end(self) -> None:
        self._write("evaluated", self.evaluated)


def _run(make: Callable[[], Any], folder: Path, ranks: int, checkpoint: Path | None = None, **flags: Any) -> list[Any]:
    strategy = {"strategy": "ddp_fork", "devices": ranks} if ranks > 1 else {}
    for old in folder.glob("trained*"):
        old.unlink()
    seed_everything(7 if checkpoint is None else 8, verbose=False)
    trainer = engine(max_epochs=EPOCHS, limit_val_batches=0, default_root_dir=folder, **strategy, **flags)
    trainer.fit(_Notes(folder, make), ckpt_path=checkpoint)
    return [json.loads((folder / f"trained{rank}").read_text()) for rank in range(ranks)]


def _evaluate(make: Callable[[], Any], folder: Path) -> Counter[int]:
    trainer = engine(strategy="ddp_fork", devices=RANKS, default_root_dir=folder)
    trainer.validate(_Notes(folder, make), verbose=False)
    return Counter(i for rank in range(RANKS) for i in json.loads((folder / f"evaluated{rank}").read_text()))


def _verdict(check: Callable[[], bool]) -> str:
    try:
        if check():
            return "yes"
    except Exception as error:  # that of a rank is another class's, with its text
        if not any(name in f"{type(error).__name__}: {error}" for name in REFUSED):
            raise
        return "refused"
    return "SILENTLY WRONG"


def rank_row(make: Callable[[int], Any], batch_size: int, each: Counter[int], folder: Path) -> list[str]:
    """The cells of a kind of training data."""
    load, saved = partial(make, batch_size), folder / "saved"
    folder.mkdir()
    found: dict[str, list[Any]] = {}

    def is_once(seen: list[Any]) -> bool:
        epochs = [Counter(i for epoch, _, ids in seen if epoch == n for i in ids) for n in range(EPOCHS)]
        return epochs == [each] * EPOCHS

    def once() -> bool:
        found["whole"] = _run(load, folder, RANKS, callbacks=[SavesIn("on_train_batch_end", STOP, saved)])
        return is_once([item for rank in found["whole"] for item in rank])

    cells = [_verdict(once), _verdict(lambda: _evaluate(load, folder) == each)]
    if not found:
        return [*cells, "-", "-"]
    whole, done = found["whole"], [item for rank in found["whole"] for item in rank[:STOP]]
    cells.append(_verdict(lambda: _run(load, folder, RANKS, saved) == [rank[STOP:] for rank in whole]))
    cells.append(_verdict(lambda: is_once(done + _run(load, folder, 1, saved)[0])))
    return cells


def _noted(folder: Path) -> dict[Any, Any]:
    """By rank, epoch and batch: the samples; the last time counts where a step that was not saved is done again."""
    lines = [
        (rank, json.loads(line)) for rank in range(2) for line in (folder / f"rank{rank}").read_text().splitlines()
    ]
    return {(rank, epoch, index): ids for rank, (epoch, index, ids) in lines}


def _start(launcher: str, how: str, where: Path, kind: str) -> int:
    """The exit code of a run."""
    where.mkdir(exist_ok=True, parents=True)
    strategy = LAUNCHERS[launcher]
    if strategy != "ddp":  # the script itself need not be started anew: an interpreter takes seconds
        with suppress(EOFError), warm.spawning():
            return in_a_fork(_exit_code, strategy, how, where, kind, timeout_s=_PATIENCE_S)
        return 1
    arguments = stopped.__file__, strategy, how, str(where), kind
    if launcher == "torchrun":
        return torchrun(*arguments, cwd=ROOT, timeout_s=_PATIENCE_S).returncode
    return run_command([sys.executable, *arguments], cwd=ROOT, timeout_s=_PATIENCE_S).returncode


def _exit_code(*arguments: Any) -> int:
    warnings.simplefilter("default")  # as in a script: torchdata's warnings would be errors within pytest
    try:
        stopped.train(*arguments)
    except BaseException:  # SIGTERMException is a SystemExit
        traceback.print_exc()
        return 1
    return 0


def stop_cell(launcher: str, stop: str, folder: Path, kind: str) -> str:
    """Whether a run of that launcher that is stopped and started again is the one that was not stopped.

    That one is of the first launcher: all of them are to train alike.
    """
    folder = folder / str(list(STOPPED_KINDS).index(kind))
    whole, again = folder / "whole", folder / f"{launcher} {stop}".replace("`", "")
    if not whole.exists() and _start(next(iter(LAUNCHERS)), "none", whole, kind) != 0:
        return "does not run"
    code = _start(launcher, stop, again, kind)
    if (code == 0) != (stop == "max_steps"):
        return f"SILENTLY WRONG: exit code {code}"
    if any(epoch for _, epoch, _ in _noted(again)) or len(_noted(again)) >= stopped.SIZE // stopped.BATCH:
        return "SILENTLY WRONG: not stopped in mid-epoch"
    if (code := _start(launcher, "none", again, kind)) != 0:
        return f"refused, exit code {code}"
    return "yes" if _noted(again) == _noted(whole) else "SILENTLY WRONG"


def rank_table(kinds: dict[str, Any], batch_size: int, each: Counter[int], folder: Path) -> list[list[str]]:
    """A row for each kind."""
    rows = [["", *RANK_COLUMNS], ["---"] * (1 + len(RANK_COLUMNS))]
    return rows + [
        [kind, *rank_row(make, batch_size, each, folder / f"ranks{number}")]
        for number, (kind, make) in enumerate(kinds.items())
    ]


def stop_row(launcher: str, folder: Path, kind: str) -> list[str]:
    """The cells of a kind of training data under a launcher."""
    return [stop_cell(launcher, stop, folder, kind) for stop in STOPS]


def stop_table(folder: Path) -> list[list[str]]:
    """A row for each kind of training data, a column for each launcher: yes, or what each stop came to."""
    rows = [["", *LAUNCHERS], ["---"] * (1 + len(LAUNCHERS))]
    for kind in STOPPED_KINDS:
        found = [stop_row(name, folder, kind) for name in LAUNCHERS]
        rows.append([kind, *("yes" if {*cells} == {"yes"} else "; ".join(cells) for cells in found)])
    return rows
