"""The `polyphase` command: LightningCLI with the engine as its trainer, short flags, and a table of all flags."""

import dataclasses
import importlib
import itertools
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from .compression import COMM_HOOKS
from .engine import Engine
from .flags import LAUNCHERS, choose
from .strategies import PRECISIONS, STRATEGIES

__all__ = ["main"]

try:
    from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
except ImportError as error:  # jsonargparse is an extra
    raise SystemExit('polyphase: error: the command needs jsonargparse: pip install "polyphase[cli]"') from error

RUNS = ("fit", "validate", "test", "predict", "verify")

SHORT = (
    "accelerator",
    "accumulate_grad_batches",
    "callbacks",
    "compression",
    "default_root_dir",
    "devices",
    "gradient_clip_val",
    "max_epochs",
    "max_steps",
    "num_nodes",
    "precision",
    "strategy",
)
"""Flags of the engine that need no ``trainer.`` before them."""

HELP = """\
usage: polyphase {fit,validate,test,predict,verify} [options]
       polyphase strategies

Train a LightningModule on any number of devices: one flag per strategy, the same result under each.

  polyphase fit --model DigitsClassifier --data Digits --strategy ddp --devices 2 --accelerator cpu --max_epochs 5
  polyphase fit --model ByteGPT --model.size 10M --data PythonSource --strategy fsdp --precision bf16-mixed
  polyphase fit --model my_package.MyModule --data my_package.MyData --config run.yaml
  polyphase verify --model ByteGPT --data PythonSource --strategy fsdp --devices 2 --steps 5
                   shows that the flags compute what one process does, or names the first tensor that differs

  polyphase strategies            the table of strategies, precisions and compressions
  polyphase fit --help            all options; also of the others
  polyphase fit ... --print_config > run.yaml
"""


class _CLI(LightningCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, and `verify`."""
        return {**LightningCLI.subcommands(), "verify": {"model", "train_dataloaders", "datamodule"}}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Says in each ``--help`` that the engine's main flags have short names."""
        parser.epilog = f"Short for --trainer.NAME: {', '.join(f'--{name}' for name in SHORT)}."

    def instantiate_classes(self) -> None:
        """Builds the engine; a flag it refuses is the user's to mend, and needs no traceback."""
        try:
            super().instantiate_classes()
        except ValueError as error:
            _exit(str(error.__cause__ or error))

    def after_verify(self) -> None:
        """Exits with 1 where the certificate was not given."""
        if not self.trainer.certificate.equal:  # type: ignore[attr-defined]
            sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command with `arguments`, by default those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return
    try:
        command = choose("command", words[0], [*RUNS, "strategies"])
    except ValueError as error:
        _exit(str(error))
    if command == "strategies":
        print_strategies()
        return
    sys.path.insert(0, os.getcwd())  # so that a user's own module is found by its import path
    models = importlib.import_module("polyphase.models")  # its classes go by their short names from then on
    words = expand(words)
    try:
        check_names(words, models)
    except ValueError as error:
        _exit(str(error))
    if arguments is None:
        sys.argv[1:] = words  # what the launcher starts the other processes with

    _CLI(
        trainer_class=Engine,
        subclass_mode_model=True,
        subclass_mode_data=True,
        # Every strategy starts from the same weights and sees the same samples.
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        args=None if arguments is None else words,
    )


def expand(words: Sequence[str]) -> list[str]:
    """``--strategy ddp`` -> ``--trainer.strategy ddp``, for the names in `SHORT`; everything else as it is."""

    def long(word: str) -> str:
        name, equals, value = word.partition("=")
        return f"--trainer.{name[2:]}{equals}{value}" if name.startswith("--") and name[2:] in SHORT else word

    return [long(word) for word in words]


def check_names(words: Sequence[str], models: ModuleType) -> None:
    """Checks the short names behind ``--model`` and ``--data``; import paths and files are jsonargparse's to check.

    Raises:
        ValueError: no class of `models` has that name; the message has the closest one.
    """
    for flag, base in (("--model", LightningModule), ("--data", LightningDataModule)):
        known = [
            name for name in models.__all__ if isinstance(c := getattr(models, name), type) and issubclass(c, base)
        ]
        given = [after for word, after in itertools.pairwise(words) if word == flag]
        given += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
        for name in filter(str.isidentifier, given):
            try:
                choose(f"{flag[2:]} class", name, known)
            except ValueError as error:
                raise ValueError(
                    f"{error} A class of your own goes by its import path: {flag} package.Class."
                ) from None


def print_strategies() -> None:
    """Prints what each flag can be."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    strategies = Table("strategy", "what it is", "options", "compression", title="--strategy name:option=value,...")
    for name, row in STRATEGIES.items():
        options = "\n".join(f"{f.name}={_text(f.default)}" for f in dataclasses.fields(row.options))
        strategies.add_row(name, row.description, options, ", ".join(("none", *row.compressions)))
    console.print(strategies)
    suffixes = ", ".join(f"_{suffix}" for suffix in LAUNCHERS if suffix)
    console.print(
        f"Without a suffix the script is started once per device; {suffixes} start workers instead (fsdp_spawn)."
        " Under torchrun and SLURM the processes are there already. auto: single on one device, else ddp.\n"
    )
    for title, rows in (
        ("--precision", PRECISIONS.items()),
        ("--compression", [("none", "gradients as they are"), *((n, h.description) for n, h in COMM_HOOKS.items())]),
    ):
        table = Table("name", "what it is", title=title)
        for row_name, description in rows:
            table.add_row(row_name, description)
        console.print(table)


def _text(default: Any) -> str:
    return str(default).lower() if isinstance(default, bool) else "derived" if default is None else str(default)


def _exit(message: str) -> Any:
    print(f"polyphase: error: {message}", file=sys.stderr)
    sys.exit(2)
