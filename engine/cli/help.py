"""Prints the help of a command that runs a model: its main flags in groups; needs no torch."""

import textwrap
from collections.abc import Iterator, Sequence

from . import classes
from .flag_table import COMMANDS, GROUPS, FlagRow, flags_of
from .user_code import values_of

__all__ = ["print_help"]

WIDTH = 100
_INDENT = 35
_EXAMPLES = {
    "verify": "--model ByteGPT --data PythonSource --strategy fsdp --devices 2 --steps 5",
    "bench-comm": "--strategy ddp --devices 2",
    "fit": "--model my_file.MyModel --data my_file.MyData --strategy ddp --devices 2",
}


def print_help(command: str, words: Sequence[str]) -> None:
    """Prints the help of a command; with ``--model X`` among `words`, also the arguments of that class."""
    for line in _help_lines(command):
        print(line)
    for kind in ("model", "data"):
        for name in values_of(f"--{kind}", words):
            print("\n".join(_arguments(kind, name)))


def _help_lines(command: str) -> Iterator[str]:
    """Yields the lines of ``polyphase COMMAND --help``."""
    yield f"usage: polyphase {command} --model CLASS [--data CLASS] [flags]"
    yield f"{command}: {COMMANDS[command]}."
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
        row.meaning + default, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
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
