"""The `polyphase` command: LightningCLI with the engine as its trainer, short flags, and a table of all flags."""

import dataclasses
import importlib
import itertools
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from . import launch
from .checkpoint import commands
from .compression import COMM_HOOKS, make_comm_hook
from .engine import Engine
from .explain import explained
from .flags import LAUNCHERS, check_count, choose, did_you_mean
from .loop import quiet
from .refusal import RefusedError, check_checkpoint
from .strategies import PRECISIONS, STRATEGIES
from .version import __version__

__all__ = ["main"]

RUNS = ("fit", "validate", "test", "predict", "verify", "wire")

COMMANDS = {"ckpt": commands.main, "launch": launch.main}
"""Commands that train nothing themselves: each takes the words behind it and returns the exit code."""

SHORT = (
    "accelerator",
    "accumulate_grad_batches",
    "global_batch_size",
    "micro_batch_size",
    "uneven",
    "callbacks",
    "compile",
    "compression",
    "default_root_dir",
    "devices",
    "gradient_clip_val",
    "max_epochs",
    "max_steps",
    "name",
    "num_nodes",
    "precision",
    "resume",
    "strategy",
)
"""Flags of the engine that need no ``trainer.`` before them."""

_SHORT = re.compile(rf"^--(?=(?:{'|'.join(SHORT)})(?:$|[=+.]))")

HELP = """\
usage: polyphase {fit,validate,test,predict,verify,wire} [options]
       polyphase launch [--nproc N] [--max-restarts K] -- script.py
       polyphase strategies [--explain MODEL]
       polyphase ckpt {list,inspect,verify,export,prune}

Train a LightningModule on any number of devices: one flag per strategy, the same result under each
(but for local_sgd, diloco and ps with staleness, which are made to compute something else).

  polyphase fit --model DigitsClassifier --data Digits --strategy ddp --devices 2 --accelerator cpu --max_epochs 5
  polyphase fit --model ByteGPT --model.size 10M --data PythonSource --strategy fsdp --precision bf16-mixed
  polyphase fit --model my_package.MyModule --data my_package.MyData --config run.yaml
  polyphase verify --model ByteGPT --data PythonSource --strategy fsdp --devices 2 --steps 5
                   shows that the flags compute what one process does, or names the first tensor that differs
  polyphase wire --strategy ddp --devices 2 [--model ByteGPT --data PythonSource]
                   measures the wire between the ranks, forecasts a step under each --compression, recommends one

  polyphase strategies            the table of strategies, precisions and compressions
  polyphase strategies --explain ByteGPT
                   what of a model is sharded as one, and what tensor parallelism splits
  polyphase launch --help         torchrun, for jobs that survive the loss of a process
  polyphase ckpt --help           what is in checkpoints, whether they are whole, and one file out of them
  polyphase fit --help            all options; also of the others
  polyphase fit ... --print_config > run.yaml
"""


class _CLI(LightningCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Lightning's, `verify` and `wire`."""
        own = {"model", "train_dataloaders", "datamodule"}
        return {**LightningCLI.subcommands(), "verify": own, "wire": own}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Says in each ``--help`` that the engine's main flags have short names."""
        parser.epilog = f"Short for --trainer.NAME: {', '.join(f'--{name}' for name in SHORT)}."

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the engine; a flag it refuses is the user's to mend, and needs no traceback."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            _exit(str(error))

    def before_fit(self) -> None:
        """Checks what Lightning would say in many lines, or not before the processes have started."""
        command = str(self.subcommand)
        hook = "val_dataloader" if command == "validate" else f"{'train' if command == 'fit' else command}_dataloader"
        if self.datamodule is None and not is_overridden(hook, self.model):
            _exit(f"{command} needs data: --data NAME or --data package.Class.")
        check_checkpoint(self.config[command]["ckpt_path"], self.trainer.strategy.checkpoint_io)

    before_validate = before_test = before_predict = before_fit

    def before_verify(self) -> None:
        """Checks what `verify` alone needs."""
        try:
            check_count("steps", self.config["verify"]["steps"])
        except ValueError as error:
            _exit(str(error))
        if self.datamodule is None:
            _exit("verify needs data to take its steps on: --data NAME or --data package.Class.")

    def before_wire(self) -> None:
        """Checks what `wire` alone needs."""
        try:
            for flag in self.config["wire"]["compressions"] or []:
                make_comm_hook(flag)
        except ValueError as error:
            _exit(str(error))
        if self.trainer.world_size == 1:
            _exit("wire measures what is between ranks: set --devices 2 or more, or start it with torchrun.")
        if self.datamodule is None:
            _exit("wire needs data to take its steps on: --data NAME or --data package.Class.")

    def after_verify(self) -> None:
        """Exits with 1 where the certificate was not given."""
        if not self.trainer.certificate.equal:  # type: ignore[attr-defined]
            sys.exit(1)


def main() -> None:
    """Runs the command with the arguments of the process."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
    elif words[0] == "--version":
        print(f"polyphase {__version__}")
    elif words == ["strategies"]:
        print_strategies()
    elif words[:2] == ["strategies", "--explain"] and len(words) == 3:
        try:
            print(explained(words[2]))
        except ValueError as error:
            _exit(str(error))
    elif words[0] in COMMANDS:
        sys.exit(COMMANDS[words[0]](words[1:]))
    else:
        try:
            choose("command", words[0], [*RUNS, *COMMANDS, "strategies"])
        except ValueError as error:
            _exit(str(error))
        if words[0] == "strategies":
            _exit(f"strategies takes no arguments, but got {' '.join(words[1:])}. (--explain takes one: a MODEL.)")
        run(words)


@quiet()
def run(words: Sequence[str]) -> None:
    """Hands `words`, a command and its arguments, to LightningCLI."""
    sys.path.insert(0, os.getcwd())  # so that a user's own module is found by its import path
    models = importlib.import_module("polyphase.models")  # its classes go by their short names from then on
    importlib.import_module("polyphase.callbacks")  # and so do these
    words = expand(words)
    if words[0] == "wire" and not any(re.match("--?(model|config|help|h)", word) for word in words):
        words += ["--model", "ByteGPT", "--data", "PythonSource"]
    try:
        LightningArgumentParser()
    except ModuleNotFoundError:
        _exit('this command needs jsonargparse: pip install "polyphase[cli]"')
    sys.argv = [sys.argv[0], *words]  # what LightningCLI reads, and what the launcher starts the other processes with
    try:
        check_names(words, models)
        _CLI(
            trainer_class=Engine,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Every strategy starts from the same weights and sees the same samples.
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "polyphase", "exit_on_error": False},
        )
    except RefusedError as error:
        _exit(str(error))
    except ArgumentError as error:  # in place of a page of usage
        message = str(error).replace(f"required: {words[0]}.", "required: --")
        _exit(f"{message}{_nearest_flag(message)}\nAll options: polyphase {words[0]} --help")


def expand(words: Sequence[str]) -> list[str]:
    """``--strategy ddp`` -> ``--trainer.strategy ddp``, for the names in `SHORT`; everything else as it is.

    ``--callbacks+=X``, ``--callbacks.key value`` and ``--strategy=ddp`` count as well.
    """
    return [_SHORT.sub("--trainer.", word) for word in words]


def check_names(words: Sequence[str], models: ModuleType) -> None:
    """Checks the short names behind ``--model`` and ``--data``; import paths and files are jsonargparse's to check.

    Raises:
        ArgumentError: no class of `models` has that name; the message has the closest one.
    """
    for flag, base in (("--model", LightningModule), ("--data", LightningDataModule)):
        known = [
            name for name in models.__all__ if isinstance(c := getattr(models, name), type) and issubclass(c, base)
        ]
        given = [after for word, after in itertools.pairwise(words) if word == flag]
        given += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
        for name in filter(str.isidentifier, set(given) - set(known)):
            raise ArgumentError(
                None,
                f"unknown {flag[2:]} class {name!r}.{did_you_mean(name, known)}"
                f" Allowed: {', '.join(known)}. A class of your own goes by its import path: {flag} package.Class.",
            )


def print_strategies() -> None:
    """Prints what each flag can be."""
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    options_column = Column("options", no_wrap=True)
    columns = ("strategy", "what it is", "what it sends", options_column, "compression", "precision")
    strategies = Table(*columns, title="--strategy name:option=value,...")
    for name, row in STRATEGIES.items():
        options = "\n".join(f"{f.name}={_text(f.default)}" for f in dataclasses.fields(row.options))
        lacking = [name for name in PRECISIONS if name not in row.precisions]
        precisions = f"all but {', '.join(lacking)}" if lacking else "all"
        compressions = ", ".join(("none", *row.compressions))
        strategies.add_row(name, row.description, row.traffic, options, compressions, precisions)
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


def _nearest_flag(message: str) -> str:
    found = re.search(r"unrecognized arguments: --(?:trainer\.)?(\w+)", message)
    if found is None:
        return ""
    names = LightningArgumentParser().add_lightning_class_args(Engine, "trainer", subclass_mode=False)
    flags = {name.removeprefix("trainer."): name for name in names}
    hint = did_you_mean(found[1], flags, lambda near: f"--{near if near in SHORT else flags[near]}")
    return hint.replace(" ", "\n", 1)  # on a line of its own


def _exit(message: str) -> NoReturn:
    print(f"polyphase: error: {message}", file=sys.stderr)
    sys.exit(2)
