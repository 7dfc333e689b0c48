"""`polyphase launch`: torchrun, with defaults for a job that survives the loss of a process."""

import argparse
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from ..flags import check_count, choose

__all__ = ["main", "torchrun_arguments"]

HELP = """\
usage: polyphase launch [--nproc N] [--nnodes N|MIN:MAX] [--max-restarts K] [torchrun options] -- script.py [arguments]
       polyphase launch [...] -- -m package.module [arguments]
       polyphase launch [...] -- polyphase fit [options]

Start N processes on this machine under torchrun (torch.distributed.run), and start them again, up to K times, when one
of them dies. With Engine(resume="auto") they continue from the newest snapshot. With Engine(on_rank_loss="continue"),
the others go on when a signal has ended one, and none is started again.

  --nproc N         processes on this machine, or auto, gpu, cpu (default: auto)
  --nnodes N        machines; MIN:MAX: the job continues with fewer, and admits more (default: 1)
  --max-restarts K  how often the processes are started again (default: 3)
  --last-call S     with MIN:MAX, how many seconds the first machines wait for more (default: 10; torchrun: 30)

All other options in front of -- are torchrun's: see `torchrun --help`. What is left out is taken from torchrun's
variables (PET_NNODES, PET_NPROC_PER_NODE, PET_RDZV_ENDPOINT, ...), which Kubeflow's TrainJob sets. What differs from
torchrun without options: jobs on one machine use a free port of it, the processes are checked every second,
OMP_NUM_THREADS is the machine's share of cores per process, unless it is set, and a machine of several may leave and
come back.

  polyphase launch --nproc 2 -- train.py --epochs 5
  polyphase launch --nproc 2 --max-restarts 10 -- polyphase fit --model ByteGPT --data PythonSource --strategy fsdp \\
      --accelerator cpu --resume auto
  polyphase launch --nproc 8 --nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint head:29400 -- train.py
"""


def main(words: Sequence[str]) -> int:
    """Runs ``polyphase launch`` with its arguments; returns the exit code, unless the process became torchrun's."""
    options = itertools.takewhile(lambda word: word != "--", words)
    if not words or not {"-h", "--help"}.isdisjoint(options):
        print(HELP)
        return 0
    try:
        arguments, num_processes = torchrun_arguments(words)
    except ValueError as error:
        print(f"polyphase: error: {error}", file=sys.stderr)
        return 2
    from ..distributed.environment import allow_late_nodes, share_job_secret, share_threads

    share_threads(num_processes)
    if "--nnodes=1" in arguments:
        share_job_secret()
    else:  # on several machines the user must give it
        allow_late_nodes()
    # This process becomes torchrun's, so that signals reach torchrun directly.
    return os.execv(sys.executable, [sys.executable, "-m", "polyphase.engine.launch.agent", *arguments])


def torchrun_arguments(words: Sequence[str]) -> tuple[list[str], int]:
    """The arguments of torchrun from those of `polyphase launch`, and the number of processes on this machine.

    Raises:
        ValueError: there is nothing to start, an invalid number, or no such script.
    """
    words = list(words)
    if "--" not in words:
        raise ValueError(
            "launch needs -- in front of what it starts: polyphase launch --nproc 2 -- train.py --epochs 5"
        )
    split = words.index("--")
    options, theirs = _parsed(words[:split])
    command = _command(words[split + 1 :])
    if re.fullmatch(r"\d+", options.nproc):
        check_count("--nproc", int(options.nproc))
    else:
        choose("--nproc", options.nproc, ("auto", "cpu", "gpu"))
    if not options.max_restarts.isdecimal():
        raise ValueError(f"--max-restarts must be a whole number of at least 0, but got {options.max_restarts!r}.")
    sizes = re.fullmatch(r"([1-9]\d*)(?::([1-9]\d*))?", options.nnodes)
    if sizes is None or int(sizes[1]) > int(sizes[2] or sizes[1]):
        raise ValueError(f"--nnodes must be a number of machines or MIN:MAX, but got {options.nnodes!r}.")
    if not options.last_call.isdecimal() or int(options.last_call) == 0:
        raise ValueError(f"--last-call must be a whole number of seconds above 0, but got {options.last_call!r}.")
    last_call, conf = options.last_call, options.rdzv_conf
    del options.last_call, options.rdzv_conf
    if sizes[2] is not None and "last_call_timeout" not in conf:
        conf = ",".join(filter(None, [conf, f"last_call_timeout={last_call}"]))
    theirs = [f"--rdzv-conf={conf}", *theirs] if conf else theirs
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items()]
    meeting = [*theirs, *(name.lower().replace("pet_", "--") for name in os.environ if name.startswith("PET_"))]
    meets_elsewhere = any(re.match("--(rdzv|master|node|standalone)", option) for option in meeting)
    if options.nnodes == "1" and not meets_elsewhere:
        arguments += ["--standalone", "--local-addr=127.0.0.1"]
    arguments[0] = f"--nproc-per-node={options.nproc}"
    from torch.distributed.run import determine_local_world_size

    return [*arguments, *theirs, *command], determine_local_world_size(options.nproc)


def _parsed(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of `polyphase launch` or with other defaults here, and the remaining options of torchrun."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    nproc = os.environ.get("PET_NPROC_PER_NODE", "auto")
    parser.add_argument("--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc", default=nproc)
    defaults = {"nnodes": "1", "max_restarts": "3", "monitor_interval": "1", "last_call": "10", "rdzv_conf": ""}
    for name, default in defaults.items():
        default = os.environ.get(f"PET_{name.upper()}", default)  # torchrun's own variable
        parser.add_argument(*dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]), dest=name, default=default)
    try:
        return parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}. See polyphase launch --help.") from None


def _command(words: list[str]) -> list[str]:
    """Returns the arguments of torchrun that name the program."""
    if not words:
        raise ValueError("launch has nothing to start: name a script, or -m and a module, behind --.")
    if words[0] == "polyphase":
        words = ["-m", "polyphase.engine", *words[1:]]
    if words[0] != "-m":
        return _script(words)
    if len(words) == 1:
        raise ValueError("-m needs the name of a module behind it.")
    package = words[1].partition(".")[0]
    # Python's -m looks in the working directory as well.
    if importlib.util.find_spec(package) is None and PathFinder.find_spec(package, [os.getcwd()]) is None:
        raise ValueError(f"there is no module {words[1]!r}: neither here nor among what is installed.")
    return words


def _script(words: list[str]) -> list[str]:
    path = Path(words[0])
    if not path.is_file():
        scripts = sorted(script.name for script in path.parent.glob("*.py"))
        listing = f"; there are {', '.join(scripts[:8])}" if scripts else ""
        raise ValueError(f"there is no script {words[0]!r}{listing}.")
    return words
