"""`polyphase doctor`: shows the verdict on a run in the terminal, as JSON or as one HTML page."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from polyphase.engine.flags import choose
from polyphase.engine.foreign import for_terminal, written_beside

from .compare import compare_command
from .page import page
from .records import Run, newest, read_run
from .trial import main as fit_command
from .verdict import judge, show

__all__ = ["main"]

HELP = """\
usage: polyphase doctor RUN_DIR [--json] [--html FILE]
       polyphase doctor --compare RUN_DIR RUN_DIR [--json]
       polyphase doctor fit [--steps N] [--try] [--json] FLAGS
       polyphase doctor host [DIR] [--json]

Says where the time of a run went, which rank costs it, and which flag mends that, from what its
ranks have noted with callbacks=[Doctor()], or --callbacks+=Doctor.

  RUN_DIR      the run's folder of logs, such as lightning_logs/version_3; or a folder of runs, for
               the newest of them
  --json       the verdict as JSON, for programs
  --html FILE  writes one page with plots, which needs no network

  --compare    what was set up differently in two runs, which one is faster, and in which phases;
               by the sample where their batches differ
  fit          runs some steps of `polyphase fit FLAGS`, and says where their time goes; --try
               tries each remedy that is a flag (see polyphase doctor fit --help)

  host         checks this host before a run: versions, devices, CPUs and their quota, other load,
               memory, /dev/shm, open files, its own name, MASTER_PORT, and the disk of DIR
               (default: .), where 64 MB are written and removed; exit code 1 where something
               fails. In all processes of a job (torchrun ... -m polyphase.engine doctor host) it
               checks all hosts, whether they meet, their clocks, and the rate between them
"""


def main(words: Sequence[str]) -> int:
    """Runs ``polyphase doctor`` with its arguments; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0
    if words[0] == "host":
        from .host import main as host_command  # it imports torch, which a look at a run's records has no use for

        return host_command(words[1:])
    if "--compare" in words:
        rest = [word for word in words if word != "--compare"]
        return compare_command(rest, lambda folder: read_run(newest(folder)))
    if words[0] == "fit":
        return fit_command(words[1:])
    parser = argparse.ArgumentParser(prog="polyphase doctor", add_help=False, allow_abbrev=False)
    parser.add_argument("run_dir")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--html")
    try:
        arguments = parser.parse_args(_checked(words))
        run = read_run(newest(arguments.run_dir))
        if arguments.html is not None:
            _write(arguments.html, run)
            print(f"wrote {arguments.html}", file=sys.stderr if arguments.json else None)
    except (OSError, ValueError) as error:
        print(for_terminal(f"polyphase: error: {error}", has_lines=True), file=sys.stderr)
        return 2
    verdict = judge(run)
    if arguments.json:
        print(json.dumps(verdict.plain(), indent=2))
    else:
        show(verdict, Console())
    return 0


def _checked(words: Sequence[str]) -> Sequence[str]:
    for word in words:
        if word.startswith("-"):
            choose("flag of doctor", word.partition("=")[0], ("--json", "--html", "--compare"))
    return words


def _write(path: str, run: Run) -> None:
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path!r} is no file, so no page is written there.")
    with written_beside(path) as beside:
        Path(beside).write_text(page(run, judge(run)), encoding="utf-8")
