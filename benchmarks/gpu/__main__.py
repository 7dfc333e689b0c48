"""Checks and figures for the day that a GPU is there: `make gpu`."""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # torch: counts devices and leaves CUDA to the forks

from benchmarks.report import about

from . import device
from .child import ROOT, Process, elsewhere
from .goals import goals
from .runner import Results, run
from .suite import ITEMS, PARTS

EXAMPLES = """\
examples:
  python -m benchmarks.gpu                              all four parts, of seven minutes each at most
  python -m benchmarks.gpu --part 1                     the first part; a later one adds to its report
  python -m benchmarks.gpu --only waits "124M fsdp"     these, in the report's place
  python -m benchmarks.gpu --accelerator sim --smoke --output out    on the tests' simulated device: does it run?
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--part", type=int, choices=PARTS, help="run this part (default: all)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[i.name for i in ITEMS], help="run these")
    parser.add_argument("--accelerator", default="cuda", help="as torch names it (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes; times mean nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results", help="folder of the report")
    return parser.parse_args(arguments)


def _commit() -> str:
    def git(*arguments: str) -> str:
        if shutil.which("git") is None:
            return ""
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "engine", "callbacks", "models", "benchmarks/gpu")
    return (git("rev-parse", "--short", "HEAD") or "no commit") + (" + changes" if changed else "")


def main() -> int:
    """Runs what was asked for; 1 if any of it failed."""
    options = parse()
    device.choose(options.accelerator, smoke=options.smoke)
    import benchmarks.gpu.everything  # noqa: F401  # once, for all forks

    found = elsewhere("benchmarks.gpu.device:about", limit_s=120)
    if found.status != "ok":  # imports that have used the device can't be forked: each check imports anew
        Process.forks = False
        found = elsewhere("benchmarks.gpu.device:about", limit_s=120)
    if found.status != "ok":
        print(f"nothing to check: {found.reason}\n{found.output}", file=sys.stderr)
        return 2
    command = "python -m benchmarks.gpu" + (f" --accelerator {options.accelerator}" * (options.accelerator != "cuda"))
    results = Results(options.output, found.value, about(command + " --smoke" * options.smoke), ITEMS)
    commit = _commit()
    if options.only:
        chosen = [item for item in ITEMS if item.name in options.only]
    else:
        chosen = [item for item in ITEMS if not results.is_known(item, commit)]
        print(f"{len(ITEMS) - len(chosen)} of {len(ITEMS)} are known at {commit}; --only runs one of them again")
    for part in PARTS:
        if options.part in (None, part):
            run([item for item in chosen if item.part == part], results, commit)
    bad = [name for name in results.bad if name in {item.name for item in chosen}]
    for row in goals(results.records):
        print(f"{row['verdict']:8} {row['goal']}: {row['seen'] or 'not measured'}, wanted {row['wanted']}")
    print(f"\n{results.path}\n" + (f"failed: {', '.join(bad)}" if bad else "nothing failed"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
