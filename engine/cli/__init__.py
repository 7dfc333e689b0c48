"""The `polyphase` command: torch is imported only to run a model, after the names of its flags were checked."""

import sys
from collections.abc import Callable, Sequence

from ..flags import choose
from ..registration import Reference
from ..version import __version__
from .runs import RUNS, check_names, exit_with, print_completion, print_help

__all__ = ["COMMANDS", "main"]


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "strategies": Reference(".strategies:main", __name__),
    "init": Reference(".init:main", __name__),
    "launch": Reference("..launch.command:main", __name__),
    "ckpt": Reference("..checkpoint.commands:main", __name__),
    "doctor": Reference("polyphase.doctor.command:main"),
    "stacks": Reference("..reliability.stacks:main", __name__),
}
"""Commands that run no model: each takes its arguments and returns the exit code."""


HELP = """\
usage: polyphase {fit,validate,test,predict,verify,bench-comm} [flags]
       polyphase strategies [NAME] [--explain MODEL]
       polyphase init DIR
       polyphase launch [--nproc N] [--max-restarts K] -- script.py
       polyphase ckpt {list,inspect,verify,export,prune}
       polyphase doctor {RUN_DIR,fit,host}
       polyphase stacks RUN_DIR

Train a LightningModule on any number of devices: one flag per strategy, the same result under each
(except local_sgd, diloco and ps with staleness, which compute something else by design).

  polyphase fit --model DigitsClassifier --data Digits --strategy ddp --devices 2 \\
      --accelerator cpu --max_epochs 5
  polyphase fit --model ByteGPT --model.size 10M --data PythonSource --strategy fsdp \\
      --precision bf16-mixed
  polyphase fit --model my_package.MyModule --data my_package.MyData --config run.yaml
  polyphase verify --model ByteGPT --data PythonSource --strategy fsdp --devices 2 --steps 5
                   checks that the flags give the result of one process, or names the first tensor
                   that differs
  polyphase bench-comm --strategy ddp --devices 2 [--model ByteGPT --data PythonSource]
                   measures the network between the ranks, forecasts a step under each
                   --compression, recommends one

  polyphase init DIR              a small project to start from: module, data, config, test
  polyphase strategies            strategies, precisions, compressions, ways to fine-tune
  polyphase strategies fsdp       everything about one of them
  polyphase strategies --explain ByteGPT
                   the units of a model, and the layers that tensor parallelism splits
  polyphase launch --help         torchrun, for jobs that survive the loss of a process
  polyphase ckpt --help           list, inspect, verify and prune checkpoints; export one as a file
  polyphase doctor RUN_DIR        where the time of a run with --callbacks+=Doctor went, which rank
                                  costs it, and which flag mends that
  polyphase doctor --compare A B  which of two runs is faster, in which phases, and what was set up
                                  differently
  polyphase doctor fit ...        the same for some steps of a command; with --try, what remedies
                                  gain
  polyphase stacks RUN_DIR        stacks of the ranks of a running job, without stopping it
  polyphase doctor host           whether this host is fit to train on: memory, CPUs, disk, ...
  polyphase fit --help            the flags of fit, and so for each command; --help-all: all flags
  polyphase fit ... --print_config > run.yaml

Shell completion for bash (or zsh), with the package shtab:
  polyphase --print_shtab bash > ~/.local/share/bash-completion/completions/polyphase
"""


def main() -> None:
    """Runs the command with the arguments of the process."""
    words = sys.argv[1:]
    if words[:1] == ["bench_comm"]:  # the name of the engine's method
        words[0] = "bench-comm"
    if not words or words[0] in ("-h", "--help"):
        print(HELP, end="")
    elif words[0] == "--version":
        print(f"polyphase {__version__}")
    elif any(word.startswith("--print_shtab") for word in words):
        print_completion(words, COMMANDS)
    elif words[0] in COMMANDS:
        sys.exit(COMMANDS[words[0]](words[1:]))
    elif words[0] in RUNS:
        _run(words[0], words[1:])
    else:
        try:
            choose("command", words[0], [*RUNS, *COMMANDS])
        except ValueError as error:
            exit_with(f"{error}\nSee polyphase --help.")


def _run(command: str, words: list[str]) -> None:
    """Prints the help of a command, or runs it with LightningCLI once the names of its flags are right."""
    asks_for_help = "-h" in words or "--help" in words
    if asks_for_help:
        print_help(command)
    elif "--help-all" not in words:
        try:
            check_names(command, words)
        except ValueError as error:
            exit_with(str(error))
    if asks_for_help and not any(word.startswith(("--model", "--data")) for word in words):
        return
    from .lightning_cli import print_arguments, run

    if asks_for_help:
        print_arguments(words)
    else:
        run([command, *("--help" if word == "--help-all" else word for word in words)])
