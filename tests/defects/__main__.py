"""Takes out what prevents each defect, and writes its results: ``python -m tests.defects``."""

import argparse
import logging
import platform
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path

from .defects import DEFECTS
from .mends import MENDS
from .run import Found, run

_PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "defects-cpu.md"
_HEAD = """# Does the check of the first steps find what it is for?

Each line takes out one thing by which a strategy computes what one process does, or refuses what it can't. Without it
3 steps on 2 CPU processes end, without a word, with weights that differ from those of a plain PyTorch loop by the
number shown. In the last column is the first thing that `check_first_steps` then finds different, and how many more:
{found} of {number} are reported. It can't see what begins after the first two steps, nor
[some other things](../../docs/guarantees.md#the-first-steps-are-checked). `python -m tests.defects` writes
this page; {versions}.

| what goes wrong | strategy | weights differ by | said |
|---|---|---|---|
"""


def main() -> int:
    """Runs all of them, or those that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.defects", description=__doc__)
    parser.add_argument("--only", default="", help="run those whose names have this in it, and write nothing")
    parser.add_argument("--output", type=Path, default=_PAGE)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found: dict[str, Found] = {}
    defects = {**DEFECTS, **MENDS}
    for name, defect in defects.items():
        if asked.only in name:
            found[name] = run(defect)
            print(name, *found[name], sep="\n    ", flush=True)
    reported = sum(bool(each.report) for each in found.values())
    print(f"{reported} of {len(found)} are reported")
    if not asked.only:
        said = ", ".join(
            [f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in ("torch", "lightning"))]
        )
        lines = [
            f"| {name} | `{defects[name].strategy}` | {each.difference} | {_first(each.report)} |"
            for name, each in found.items()
        ]
        head = _HEAD.format(found=reported, number=len(found), versions=said)
        asked.output.write_text(head + "\n".join(lines) + "\n")
    return 0


def _first(report: str) -> str:
    """What the first difference of a report is in, and the number of the others."""
    first, *others = report.removeprefix("the ").split("; ")
    kind = re.split(r" (?:of|is|in|has) ", first)[0].replace("gradient norm", "norm of all gradients")
    return f"{kind}{f' + {len(others)}' * bool(others)}" or "**nothing**"


if __name__ == "__main__":
    sys.exit(main())
