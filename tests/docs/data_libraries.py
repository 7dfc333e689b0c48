"""The table of `data-cpu.md` about public libraries: their data on two ranks, and when a run goes on.

`data_matrix.py` writes it into the page, with the rows of the libraries that are installed; those of others stay.
"""

import importlib.metadata
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tests.distributed import ROOT, Finished, run_command, torchrun

from . import package_run
from .package_run import KINDS, SIZE, STOP, Kind

EPOCHS = 4
COLUMNS = ["two ranks", "resumed with 2", "with 1", "with 3"]
_DISTRIBUTIONS = {"streaming": "mosaicml-streaming"}
_EACH = Counter(range(SIZE))
_PATIENCE_S = 300


def is_installed(kind: Kind) -> bool:
    """Whether the library of a kind of training data is there."""
    return importlib.util.find_spec(kind.package) is not None


def label(name: str) -> str:
    """The first cell of a row."""
    if "{version}" not in name:
        return name
    library = KINDS[name].package
    return name.format(version=importlib.metadata.version(_DISTRIBUTIONS.get(library, library)))


def _start(name: str, folder: Path, ranks: int = 0, checkpoint: Path | None = None) -> Finished:
    given = [] if checkpoint is None else [str(checkpoint)]
    arguments = [name, str(folder), str(ranks), str(EPOCHS), *given]
    folder.mkdir(exist_ok=True)
    if KINDS[name].launcher == "torchrun" and ranks > 1:
        return torchrun(Path(package_run.__file__), *arguments, nproc=ranks, cwd=ROOT, timeout_s=_PATIENCE_S)
    return run_command([sys.executable, package_run.__file__, *arguments], cwd=ROOT, timeout_s=_PATIENCE_S)


def _seen(folder: Path, ranks: int) -> list[list[Any]]:
    """The epoch, index and samples of each batch, by rank."""
    files = [folder / f"rank{rank}" for rank in range(ranks)]
    return [json.loads(file.read_text()) if file.exists() else [] for file in files]


def _is_once(seen: list[Any]) -> bool:
    epochs = [Counter(i for epoch, _, ids in seen if epoch == n for i in ids) for n in range(EPOCHS)]
    return epochs == [_EACH] * EPOCHS


def _refusal(finished: Finished, folder: Path, library: str) -> str | None:
    """The cell of a run that was refused; None if it ran to its end.

    Raises:
        RuntimeError: it ended otherwise.
    """
    if finished.returncode == 0:
        return None
    traceback, is_refusal, _ = finished.output.partition("\nValueError: ")
    if not is_refusal:
        traceback, is_refusal, _ = finished.output.partition("RefusedError: ")
    if not is_refusal or list(folder.glob("rank*")):
        raise RuntimeError(finished.output)
    raised_in = re.findall(r'File "([^"]+)"', traceback)[-1:]  # none: of what the engine refuses it may show no frames
    return f"refused by {library}" if f"/{library}/" in "".join(raised_in) else "refused"


def row(name: str, folder: Path) -> list[str]:
    """The cells of a kind of training data; `folder` is empty."""
    library = KINDS[name].package
    written = _start(name, folder)
    assert written.returncode == 0, written.output
    first, saved = folder / "first", folder / "first" / "saved.ckpt"
    begun = _start(name, first, 2)
    whole = _seen(first, 2)
    if (refusal := _refusal(begun, first, library)) is not None:
        return [refusal, "-", "-", "-"]
    cells = ["once" if _is_once(whole[0] + whole[1]) else "SILENTLY WRONG"]
    done = [item for rank in whole for item in rank[:STOP]]
    for ranks in (2, 1, 3):
        again = folder / f"{ranks}"
        finished = _start(name, again, ranks, saved)
        rest = _seen(again, ranks)
        refusal = _refusal(finished, again, library)
        if refusal is None and ranks == 2:
            is_same = rest == [rank[STOP:] for rank in whole]
            cells.append("same batches" if is_same else "SILENTLY WRONG")
        else:
            is_once = _is_once(done + [item for rank in rest for item in rank])
            cells.append(refusal or ("once" if is_once else "SILENTLY WRONG"))
    return cells


def library_table(folder: Path, page: str) -> list[list[str]]:
    """A row for each kind of training data; those of libraries that are not installed are as in `page`."""
    rows = [["", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    former = former_rows(page)
    for number, (name, kind) in enumerate(KINDS.items()):
        if is_installed(kind):
            there = folder / f"library{number}"
            there.mkdir()
            rows.append([label(name), *row(name, there)])
        else:
            rows.append(former[number])
    return rows


def former_rows(page: str) -> list[list[str]]:
    """The rows of the table that the page has."""
    _, _, after = page.partition("## Public libraries")
    lines = [line for line in after.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
