"""The `polyphase` command: torch is imported only to run a model, after its flags were checked."""

import argparse
import importlib
import itertools
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..compression.registry import ROWS as HOOKS
from ..flags import choose
from ..precision import PRECISIONS
from ..strategies.registry import STRATEGIES
from ..version import __version__
from . import classes
from .check import COMMANDS as RUNS
from .check import GROUPS, FlagRow, exit_with, flags_of

__all__ = ["COMMANDS", "import_classes", "main", "print_completion"]


def _command(path: str) -> Callable[[Sequence[str]], int]:
    """Returns a function that imports and calls the function ``"package.module:name"``."""

    def run(words: Sequence[str]) -> int:
        module, _, name = path.partition(":")
        return getattr(importlib.import_module(module, __package__), name)(words)

    return run


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "strategies": _command(".strategies:main"),
    "init": _command(".init:main"),
    "launch": _command("..launch.command:main"),
    "ckpt": _command("..checkpoint.commands:main"),
    "doctor": _command("polyphase.doctor.command:main"),
    "stacks": _command("..reliability.stacks:main"),
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
  polyphase strategies            strategies, precisions and compressions, a line each
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
    """Runs commands that need no torch at once, and passes all others to LightningCLI."""
    if "-h" in words or "--help" in words:
        _print_help(command, words)
        return
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that a user's own modules can be imported
    from .check import UsageError, check

    if "--help-all" in words:
        words = ["--help"]
    else:
        try:
            check(command, words)
        except UsageError as error:
            exit_with(str(error))

    import_classes(words)
    from .lightning_cli import run

    run([command, *words])


# --- prints the help of a command that runs a model: its main flags in groups; needs no torch


_WIDTH = 100
_INDENT = 35
_EXAMPLES = {
    "verify": "--model ByteGPT --data PythonSource --strategy fsdp --devices 2 --steps 5",
    "bench-comm": "--strategy ddp --devices 2",
    "fit": "--model my_file.MyModel --data my_file.MyData --strategy ddp --devices 2",
}


def _print_help(command: str, words: Sequence[str]) -> None:
    """Prints the help of a command; with ``--model X`` among `words`, also the arguments of that class."""
    for line in _help_lines(command):
        print(line)
    for kind in ("model", "data"):
        for name in _values_of(f"--{kind}", words):
            print("\n".join(_arguments(kind, name)))


def _help_lines(command: str) -> Iterator[str]:
    """Yields the lines of ``polyphase COMMAND --help``."""
    yield f"usage: polyphase {command} --model CLASS [--data CLASS] [flags]"
    yield f"{command}: {RUNS[command]}."
    yield ""
    default = "--model my_file.MyModel --data my_file.MyData --ckpt_path last.ckpt"
    yield f"  polyphase {command} {_EXAMPLES.get(command, default)}"
    yield ""
    yield "Each flag has an example of its value, its meaning, and [its default]. Values are written as in"
    yield "YAML: true, null, [0,1]. A flag overrides a --config file in front of it."
    flags = flags_of(command)
    for group in GROUPS:
        rows = [flag for flag in flags if flag.group == group]
        if rows:
            yield ""
            yield f"{group}:"
            for row in rows:
                yield from _lines(row)
    yield ""
    hidden = sum(not flag.group for flag in flags)
    yield f"polyphase {command} --help-all: {hidden} more flags, mostly Lightning's, with their types (takes 10 s)."
    yield f"polyphase {command} --model CLASS --help: the arguments of a class as well."
    yield "Each argument of the engine may also be written --trainer.NAME."


def _lines(row: FlagRow) -> list[str]:
    left = f"  --{row.name} {row.example}".rstrip()
    default = f" [{row.default}]" if row.default else ""
    indent = " " * _INDENT
    lines = textwrap.wrap(
        row.meaning + default, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
    if len(left) + 1 > _INDENT:
        return [left, *lines]
    return [left.ljust(_INDENT) + lines[0].lstrip(), *lines[1:]]


def _arguments(kind: str, name: str) -> list[str]:
    """Lists the arguments of a class's constructor, as far as its source file allows."""
    module, _, class_name = name.rpartition(".")
    path = classes.find_module(module) if module else classes.models_file()
    source = classes.read(path) if path else None
    arguments = classes.class_arguments(class_name, source) if source else None
    if arguments is None:
        return ["", f"The arguments of {name}: polyphase fit --{kind}.help {name}"]
    return ["", f"Arguments of {name}:", *(f"  --{kind}.{key}: {text}".rstrip() for key, text in arguments.items())]


# --- shell completion: a script that shtab generates from the table of flags


_SHELLS = ("bash", "zsh")  # not tcsh: there shtab omits the flags of commands
_CKPT = ("list", "inspect", "verify", "export", "prune")


def print_completion(words: Sequence[str], others: Iterable[str]) -> None:
    """Prints the script for ``--print_shtab bash`` (also ``--print_shtab=bash`` and ``--print_shtab-bash``).

    Args:
        words: the command line.
        others: the commands that run no model.
    """
    shell = re.split(r"--print_shtab[-= ]?", " ".join(words))[-1].strip()
    try:
        import shtab

        print(shtab.complete(_parser(others), choose("shell of --print_shtab", shell, _SHELLS)))
    except ModuleNotFoundError:
        exit_with("--print_shtab needs shtab: pip install shtab")
    except ValueError as error:
        exit_with(str(error))


def _parser(others: Iterable[str]) -> argparse.ArgumentParser:
    """Returns an argparse parser with all commands and flags, for completion only."""
    top = argparse.ArgumentParser(prog="polyphase")
    top.add_argument("--version", action="store_true")
    commands = top.add_subparsers(dest="command")
    for command, description in RUNS.items():
        sub = commands.add_parser(command, help=description)
        sub.add_argument("--help-all", action="store_true", help="all flags, Lightning's too")
        for row in flags_of(command):
            if not row.name.endswith(".NAME"):
                sub.add_argument(f"--{row.name}", help=row.meaning.replace("%", "%%"), **_values(row))
    for name in others:
        sub = commands.add_parser(name, help=name)
        if name == "strategies":
            sub.add_argument("name", nargs="?", choices=[*STRATEGIES, *PRECISIONS, *HOOKS])
            sub.add_argument("--explain", choices=classes.models_of("model"), help="a model")
        elif name == "ckpt":
            sub.add_argument("what", choices=_CKPT)
    return top


def _values(row: FlagRow) -> dict[str, Any]:
    completions = {
        "model": classes.models_of("model"),
        "data": classes.models_of("data"),
        "strategy": ("auto", *STRATEGIES),
        "precision": tuple(PRECISIONS),
        "compression": ("none", *HOOKS),
        "bool": ("true", "false"),
    }
    if row.kind == "bare":
        return {"action": "store_true"}
    choices = row.choices or completions.get(row.kind)
    return {"choices": choices} if choices else {}


# --- imports the user's own modules, and shows errors in them without the frames of the command


def import_classes(words: Sequence[str]) -> None:
    """Imports the modules named by ``--model`` and ``--data``; ends the process with 1 if one of them fails.

    jsonargparse would show only the message, without the traceback.
    """
    for flag in ("--model", "--data"):
        for name in _values_of(flag, words):
            if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) and not os.path.exists(name):
                _import(flag, name.rpartition(".")[0])


def _values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Returns the values of a flag in a command line: those of ``--flag value``, then those of ``--flag=value``."""
    values = [after for word, after in itertools.pairwise(words) if word == flag]
    return values + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def _import(flag: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        sys.stderr.write("".join(_own_frames(error)))
        print(f"polyphase: error: {flag}: importing {module} failed, see above.", file=sys.stderr)
        sys.exit(1)


def _own_frames(error: BaseException) -> list[str]:
    """Returns the lines of a traceback in the user's files, and its message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return [
        "Traceback (most recent call last):\n" if frames else "",
        *traceback.format_list(frames),
        *traceback.format_exception_only(error),
    ]


def _is_own(path: str) -> bool:
    if path.startswith("<"):
        return False  # frames of the import system
    real = os.path.realpath(path)
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    library = os.path.dirname(os.path.realpath(os.__file__))
    return not (real.startswith((package + os.sep, library + os.sep)) or "site-packages" in real)
