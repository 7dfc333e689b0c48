"""The command that runs a model: LightningCLI with the engine as its trainer and short flags. It imports torch."""

import importlib
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..compression import make_comm_hook
from ..engine import Engine
from ..errors import RefusedError, check_checkpoint
from ..flags import check_count
from ..loop import quiet
from .console import exit_with as _exit
from .errors import in_a_line
from .flag_table import ENGINE_FLAGS

__all__ = ["SHORT", "expand", "run"]

SHORT = tuple(flag.name for flag in ENGINE_FLAGS)
"""Flags of the engine that may be written without ``trainer.``."""

_SHORT = re.compile(rf"^--(?=(?:{'|'.join(SHORT)})(?:$|[=+.]))")

NAMES_MODEL = re.compile(r"-[ch].*|--(model|config|help)([=.-].*)?")
"""Words of a command line that name a model, or a file that does, or ask for help."""


class _CLI(LightningCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns Lightning's subcommands, `verify` and `bench_comm`."""
        own = {"model", "train_dataloaders", "datamodule"}
        return {**LightningCLI.subcommands(), "verify": own, "bench_comm": own}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds a line about the short names of the engine's flags to the full help."""
        parser.epilog = "Each --trainer.NAME may be written --NAME."

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the engine; a refused flag ends the command with its message and without a traceback."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            _exit(str(error))

    def before_fit(self) -> None:
        """Checks for errors that Lightning reports at length, or only after the processes have started."""
        command = str(self.subcommand)
        hook = "val_dataloader" if command == "validate" else f"{'train' if command == 'fit' else command}_dataloader"
        if self.datamodule is None and not is_overridden(hook, self.model):
            _exit(f"{command} needs data: --data NAME or --data package.Class.")
        check_checkpoint(self.config[command]["ckpt_path"], self.trainer.strategy.checkpoint_io)

    before_validate = before_test = before_predict = before_fit

    def before_verify(self) -> None:
        """Checks the requirements of `verify`."""
        try:
            check_count("steps", self.config["verify"]["steps"])
        except ValueError as error:
            _exit(str(error))
        if self.datamodule is None:
            _exit("verify needs data to take its steps on: --data NAME or --data package.Class.")

    def before_bench_comm(self) -> None:
        """Checks the requirements of `bench-comm`."""
        try:
            for flag in self.config["bench_comm"]["compressions"] or []:
                make_comm_hook(flag)
        except ValueError as error:
            _exit(str(error))
        if self.trainer.world_size == 1:
            _exit("bench-comm measures the network between ranks: set --devices 2 or more, or start it with torchrun.")
        if self.datamodule is None:
            _exit("bench-comm needs data to take its steps on: --data NAME or --data package.Class.")

    def after_verify(self) -> None:
        """Exits with 1 if the run did not give the result of one process."""
        if not self.trainer.certificate.equal:  # type: ignore[attr-defined]
            sys.exit(1)


@quiet()
def run(words: Sequence[str]) -> None:
    """Runs `words`, a command and its arguments, with LightningCLI."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.import_module("polyphase.models")  # registers its classes by their short names
    importlib.import_module("polyphase.callbacks")  # likewise
    words = expand(words)
    if words[0] == "bench-comm" and not any(NAMES_MODEL.fullmatch(word) for word in words):
        words += ["--model", "ByteGPT", "--data", "PythonSource"]
    try:
        LightningArgumentParser()
    except ModuleNotFoundError:
        _exit('this command needs jsonargparse: pip install "polyphase[cli]"')
    # LightningCLI calls the method of the subcommand's name, and Python's names have no hyphens.
    command = words[0].replace("-", "_")
    sys.argv = [
        sys.argv[0],
        command,
        *words[1:],
    ]  # LightningCLI reads this, and the launcher starts the other processes with it
    try:
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
    except ArgumentError as error:  # instead of printing the whole usage
        _exit(in_a_line(words[0], str(error)))


def expand(words: Sequence[str]) -> list[str]:
    """``--strategy ddp`` -> ``--trainer.strategy ddp``, for the names in `SHORT`; other words are unchanged.

    ``--callbacks+=X``, ``--callbacks.key value`` and ``--strategy=ddp`` are expanded as well.
    """
    return [_SHORT.sub("--trainer.", word) for word in words]
