"""The flags of the commands that run a model: their help, the check of their names, completion. No torch is needed."""

import argparse
import dataclasses
import functools
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from ..compression.registry import ROWS as HOOKS
from ..config import GROUPS, EngineConfig, field_docs
from ..finetune_options import FINETUNES
from ..flags import choose, did_you_mean
from ..precision import PRECISIONS
from ..strategies.registry import STRATEGIES

__all__ = ["NAMES_MODEL", "RUNS", "check_names", "exit_with", "flags_of", "print_completion", "print_help"]


def exit_with(message: str) -> NoReturn:
    """Prints an error and ends with exit code 2, which means that the command line is wrong."""
    print(f"polyphase: error: {message}", file=sys.stderr)
    sys.exit(2)


RUNS = {
    "fit": "trains a model",
    "validate": "runs the validation loop of a model",
    "test": "runs its test loop",
    "predict": "runs its prediction loop",
    "verify": "checks that flags give the result of one process, or names the first tensor that differs",
    "bench-comm": "measures the network between the ranks, and forecasts a step under each compression",
}
"""Commands that run a model, with their descriptions."""

NAMES_MODEL = re.compile(r"-[ch].*|--(model|config|help)([=.-].*)?")
"""Words of a command line that name a model, or a file that does, or ask for help."""


class Flag(NamedTuple):
    """One flag of a command."""

    group: str
    """Its heading in the help; empty: only ``--help-all`` has it."""
    example: str
    meaning: str
    commands: tuple[str, ...] = tuple(RUNS)
    """The commands that have it."""


_WHAT, _SAVING, _STAGES = "What to run", "Checkpoints and resuming", ("fit", "validate", "test", "predict")

_RUN_FLAGS = {
    "model": Flag(_WHAT, "MyModel", "class of the model: package.Class, or one of polyphase.models"),
    "model.NAME": Flag(_WHAT, "", "argument of its constructor; --model.help CLASS lists them"),
    "data": Flag(_WHAT, "Digits", "class of the data module, if the model has no loaders itself"),
    "data.NAME": Flag(_WHAT, "", "argument of its constructor; --data.help CLASS lists them"),
    "config": Flag(_WHAT, "run.yaml", "YAML file with any of these flags; later flags override it"),
    "print_config": Flag(_WHAT, "", "print the whole configuration as such a file, and exit"),
    "seed_everything": Flag(_WHAT, "1", "seed of all random numbers; true: any, false: none [0]"),
    "optimizer": Flag("", "Adam", "class of an optimizer, if the model configures none"),
    "lr_scheduler": Flag("", "StepLR", "class of a learning-rate schedule, with --optimizer"),
    "ckpt_path": Flag(_SAVING, "snapshots/last", "checkpoint to start from", _STAGES),
    "weights_only": Flag("", "true", "unpickle only its tensors and plain values", _STAGES),
    "verbose": Flag("", "false", "print the results [true]", ("validate", "test")),
    "return_predictions": Flag("", "false", "keep the predictions in memory [true]", ("predict",)),
    "steps": Flag(_WHAT, "5", "optimizer steps that are compared [5]", ("verify",)),
    "tolerance": Flag(_WHAT, "1e-4", "largest difference of a weight [1e-05]", ("verify",)),
    "compressions": Flag(_WHAT, "[none,bf16]", "the compressions to compare [all]", ("bench-comm",)),
}
"""The flags that are no arguments of the engine, by name."""


@functools.cache
def flags_of(command: str) -> dict[str, Flag]:
    """Returns all flags of a command by name: its own, and the arguments of the engine."""
    flags = {name: flag for name, flag in _RUN_FLAGS.items() if command in flag.commands}
    texts = field_docs(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        meaning = texts[field.name].replace("``", "").replace("`", "").partition(". ")[0].removesuffix(".")
        default = "" if field.default is None else f" [{str(field.default).lower()}]"
        meaning = meaning[0].lower() + meaning[1:] + default
        flags[field.name] = Flag(field.metadata["group"], field.metadata["example"], meaning)
    return flags


_OPEN = ("model", "data", "trainer", "optimizer", "lr_scheduler")
"""Flags whose class defines further flags after a dot."""


def check_names(command: str, words: Sequence[str]) -> None:
    """Checks the names of the flags of ``polyphase COMMAND words...``, and that a model is named.

    Raises:
        ValueError: there is no such flag, or no model, or a flag in place of a value; with the closest flag.
    """
    takes_value = {f"--{name}" for name, flag in flags_of(command).items() if flag.example}
    for word, following in zip(words, (*words, "")[1:], strict=True):
        if word.startswith("--"):
            _check_name(command, word.partition("=")[0])
            if word in takes_value and following.startswith("--"):
                raise ValueError(f"argument {word}: expected one argument, but got the flag {following}")
    if command != "bench-comm" and not any(NAMES_MODEL.fullmatch(word) for word in words):
        raise ValueError(f"{command} needs a model: --model NAME of polyphase.models, or --model package.Class.")


def _check_name(command: str, written: str) -> None:
    flags = flags_of(command)
    spelled = written.removeprefix("--").removesuffix("+")
    head, dot, behind = spelled.removeprefix("trainer.").partition(".")
    if head in flags or head in ("help", "help-all") or (head in _OPEN and (dot or head == "trainer")):
        return
    shown = {name: f"--{name}" for name in [*flags, "help"] if "." not in name}
    if spelled.startswith("trainer."):
        shown = {f"trainer.{name}": f"--trainer.{name}" for name in EngineConfig.__dataclass_fields__}
    hint = did_you_mean(head, _OPEN, lambda near: f"--{near}.{behind}") if dot else ""  # --modle.lr
    hint = hint or did_you_mean(spelled, shown, shown.__getitem__, kind="flag")
    raise ValueError(f"{command} has no flag {written}.{hint}\nAll flags: polyphase {command} --help-all")


# --- the help of a command: its main flags in groups

_WIDTH = 100
_INDENT = 35
_EXAMPLES = {
    "verify": "--model ByteGPT --data PythonSource --strategy fsdp --devices 2 --steps 5",
    "bench-comm": "--strategy ddp --devices 2",
    "fit": "--model my_file.MyModel --data my_file.MyData --strategy ddp --devices 2",
}


def print_help(command: str) -> None:
    """Prints the help of ``polyphase COMMAND``."""
    default = "--model my_file.MyModel --data my_file.MyData --ckpt_path last.ckpt"
    print(f"""\
usage: polyphase {command} --model CLASS [--data CLASS] [flags]
{command}: {RUNS[command]}.

  polyphase {command} {_EXAMPLES.get(command, default)}

Each flag has an example of its value, its meaning, and [its default]. Values are written as in
YAML: true, null, [0,1]. A flag overrides a --config file in front of it.""")
    flags = flags_of(command)
    for group in (_WHAT, *GROUPS):
        print(f"\n{group}:")
        for name, flag in flags.items():
            if flag.group == group:
                print("\n".join(_lines(name, flag)))
    hidden = sum(not flag.group for flag in flags.values())
    print(f"""
polyphase {command} --help-all: {hidden} more flags, mostly Lightning's, with their types.
polyphase {command} --model CLASS --help: the arguments of a class as well.
Each argument of the engine may also be written --trainer.NAME.""")


def _lines(name: str, flag: Flag) -> Iterator[str]:
    left = f"  --{name} {flag.example}".rstrip()
    lines = textwrap.wrap(flag.meaning, _WIDTH - _INDENT, break_on_hyphens=False)
    if len(left) + 1 > _INDENT:
        yield left
    else:
        yield left.ljust(_INDENT) + lines.pop(0)
    yield from (" " * _INDENT + line for line in lines)


# --- shell completion: a script that shtab generates from the table of flags; jsonargparse's own lacks the short names

_SHELLS = ("bash", "zsh")  # not tcsh: there shtab omits the flags of commands


def print_completion(words: Sequence[str], others: Iterable[str]) -> None:
    """Prints the script for ``--print_shtab bash`` (also ``--print_shtab=bash`` and ``--print_shtab-bash``).

    Args:
        words: the command line.
        others: the commands that run no model.
    """
    shell = re.split(r"--print_shtab[-= ]?", " ".join(words))[-1].strip()
    try:
        import shtab

        choose("shell of --print_shtab", shell, _SHELLS)
    except ModuleNotFoundError:
        exit_with("--print_shtab needs shtab: pip install shtab")
    except ValueError as error:
        exit_with(str(error))
    top = argparse.ArgumentParser(prog="polyphase")
    top.add_argument("--version", action="store_true")
    commands = top.add_subparsers(dest="command")
    values: dict[str, Any] = {"strategy": ("auto", *STRATEGIES), "precision": PRECISIONS, "compression": HOOKS}
    values["finetune"] = FINETUNES
    for command, description in RUNS.items():
        sub = commands.add_parser(command, help=description)
        sub.add_argument("--help-all", action="store_true", help="all flags, Lightning's too")
        for name, flag in flags_of(command).items():
            if not name.endswith(".NAME"):
                sub.add_argument(f"--{name}", help=flag.meaning.replace("%", "%%"), choices=values.get(name))
    for name in others:
        sub = commands.add_parser(name, help=name)
        if name == "strategies":
            sub.add_argument("name", nargs="?", choices=[*STRATEGIES, *PRECISIONS, *HOOKS, *FINETUNES])
        elif name == "ckpt":
            sub.add_argument("what", choices=("list", "inspect", "verify", "export", "prune"))
    print(shtab.complete(top, shell))
