"""Shell completion: a script that shtab generates from the table of flags."""

import argparse
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..compression.registry import ROWS as HOOKS
from ..flags import choose
from ..precision.names import PRECISIONS
from ..strategies.registry import STRATEGIES
from . import classes
from .console import exit_with
from .flag_table import COMMANDS, FlagRow, flags_of

__all__ = ["print_completion"]

SHELLS = ("bash", "zsh")  # not tcsh: there shtab omits the flags of commands
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

        print(shtab.complete(_parser(others), choose("shell of --print_shtab", shell, SHELLS)))
    except ModuleNotFoundError:
        exit_with("--print_shtab needs shtab: pip install shtab")
    except ValueError as error:
        exit_with(str(error))


def _parser(others: Iterable[str]) -> argparse.ArgumentParser:
    """Returns an argparse parser with all commands and flags, for completion only."""
    top = argparse.ArgumentParser(prog="polyphase")
    top.add_argument("--version", action="store_true")
    commands = top.add_subparsers(dest="command")
    for command, description in COMMANDS.items():
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
