"""The command that runs a model: LightningCLI with the engine as its trainer and short flags. It imports torch."""

import importlib.util
import inspect
import json
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..checks import check_arguments
from ..compression import make_comm_hook
from ..config import EngineConfig
from ..engine import Engine
from ..errors import RefusedError, check_checkpoint
from ..flags import check_count, did_you_mean
from ..loop.runs import quiet
from ..select import check_strategy
from .runs import NAMES_MODEL, exit_with, flags_of

__all__ = ["EngineCLI", "expand", "print_arguments", "run"]

SHORT = tuple(EngineConfig.__dataclass_fields__)
"""Flags of the engine that may be written without ``trainer.``."""

_SHORT = re.compile(rf"^--(?=(?:{'|'.join(SHORT)})(?:$|[=+.]))")


class EngineCLI(LightningCLI):
    """A `LightningCLI` that builds an `Engine`, and tells a wrong flag in a line with the closest match.

    Stock `LightningCLI(..., trainer_class=Engine)` runs the same; it prints its usage where a flag is wrong.
    """

    def __init__(self, *args: Any, parser_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        parsing = {"prog": os.path.basename(sys.argv[0]), "exit_on_error": False, **(parser_kwargs or {})}
        try:
            super().__init__(*args, **{"trainer_class": Engine, **kwargs, "parser_kwargs": parsing})
        except ArgumentError as error:
            program = parsing["prog"]
            named = next((word for word in sys.argv[1:] if word in self.subcommands()), "")
            command = named.replace("_", "-")
            text = _in_a_line(command, [word for word in sys.argv[1:] if word != named], error)
            print(f"{program}: error: {text}\nAll flags: {program} {command} --help", file=sys.stderr)
            sys.exit(2)


class _CLI(EngineCLI):
    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Returns the command alone that is run: the parsers of all six would take seconds to build."""
        own = {"model", "train_dataloaders", "datamodule"}
        every = {**LightningCLI.subcommands(), "verify": own, "bench_comm": own}
        return {sys.argv[1]: every[sys.argv[1]]}

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Adds a line about the short names of the engine's flags to the full help."""
        parser.epilog = "Each --trainer.NAME may be written --NAME."

    def before_instantiate_classes(self) -> None:
        """Checks the flags of the engine, before a model is built that may be large."""
        flags = vars(self.config[self.subcommand].trainer)
        described = type(self.config)  # an object by its class and arguments, not built yet
        plain = {n: flags[n] for n in SHORT if n not in _CLASSES and not isinstance(flags[n], described)}
        try:
            check_arguments(EngineConfig(**plain).changed)
            if isinstance(flags["strategy"], str):
                check_strategy(flags["strategy"])
            make_comm_hook(flags["compression"])
        except ValueError as error:
            exit_with(str(error))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Builds the engine; a refused flag ends the command with its message and without a traceback."""
        try:
            return super().instantiate_trainer(**kwargs)
        except (ValueError, TypeError, MisconfigurationException) as error:
            exit_with(str(error))

    def before_fit(self) -> None:
        """Checks for errors that Lightning reports at length, or only after the processes have started."""
        command = str(self.subcommand)
        hook = "val_dataloader" if command == "validate" else f"{'train' if command == 'fit' else command}_dataloader"
        if self.datamodule is None and not is_overridden(hook, self.model):
            exit_with(f"{command} needs data: --data NAME or --data package.Class.")
        check_checkpoint(self.config[command]["ckpt_path"], self.trainer.strategy.checkpoint_io)

    before_validate = before_test = before_predict = before_fit

    def before_verify(self) -> None:
        """Checks the requirements of `verify`."""
        try:
            check_count("steps", self.config["verify"]["steps"])
        except ValueError as error:
            exit_with(str(error))
        if self.datamodule is None:
            exit_with("verify needs data to take its steps on: --data NAME or --data package.Class.")

    def before_bench_comm(self) -> None:
        """Checks the requirements of `bench-comm`."""
        try:
            for flag in self.config["bench_comm"]["compressions"] or []:
                make_comm_hook(flag)
        except ValueError as error:
            exit_with(str(error))
        if self.trainer.world_size == 1:
            exit_with("bench-comm measures the network between ranks: set --devices 2 or more, or use torchrun.")
        if self.datamodule is None:
            exit_with("bench-comm needs data to take its steps on: --data NAME or --data package.Class.")

    def after_verify(self) -> None:
        """Exits with 1 if the run did not give the result of one process."""
        if not self.trainer.certificate.equal:  # type: ignore[attr-defined]
            sys.exit(1)


@quiet()
def run(words: Sequence[str]) -> None:
    """Runs `words`, a command and its arguments, with LightningCLI."""
    _import_classes(words)
    words = expand(words)
    if words[0] == "bench-comm" and not any(NAMES_MODEL.fullmatch(word) for word in words):
        words += ["--model", "ByteGPT", "--data", "PythonSource"]
    try:
        LightningArgumentParser()
    except ModuleNotFoundError:
        exit_with('this command needs jsonargparse: pip install "polyphase[cli]"')
    # LightningCLI reads sys.argv and calls the method of the subcommand's name, and Python's names have no hyphens. The
    # launcher starts the other processes with it.
    sys.argv = [sys.argv[0], words[0].replace("-", "_"), *words[1:]]
    try:
        _CLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Every strategy starts from the same weights and sees the same samples.
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"prog": "polyphase"},
        )
    except RefusedError as error:
        exit_with(str(error))


def expand(words: Sequence[str]) -> list[str]:
    """``--strategy ddp`` -> ``--trainer.strategy ddp``, for the names in `SHORT`; other words are unchanged.

    ``--callbacks+=X``, ``--callbacks.key value`` and ``--strategy=ddp`` are expanded as well.
    """
    return [_SHORT.sub("--trainer.", word) for word in words]


# --- the classes that --model and --data name

_KINDS: dict[str, type] = {"model": LightningModule, "data": LightningDataModule}


def _values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the flags of a command line, without their dashes, with their values."""
    for word, behind in zip(words, [*words[1:], ""], strict=True):
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            yield flag.removeprefix("--").removesuffix("+"), value if equals else behind


def _import_classes(words: Sequence[str]) -> None:
    """Imports the classes that a command line names; an error in a user's own module keeps its traceback.

    jsonargparse would show only the message. It knows the short names of classes that have been imported.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # so that a user's own modules can be imported
    for package in map(importlib.import_module, ("polyphase.models", "polyphase.callbacks")):
        for name in package.__all__:
            getattr(package, name)
    for kind, name in _values(words):
        if kind in _KINDS and re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) and not os.path.exists(name):
            _class_of(kind, name)


def _class_of(kind: str, name: str) -> type:
    module, _, short = name.rpartition(".")
    if not module:
        classes = _subclasses(_KINDS[kind])
        if short not in classes:
            exit_with(
                f"--{kind}: unknown {kind} class {name!r}.{did_you_mean(name, classes)} Name your own class by its"
                f" import path: --{kind} package.Class."
            )
        return classes[short]
    try:
        classes = vars(importlib.import_module(module))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # something that the user's module imports
        near = [entry.removesuffix(".py") for entry in os.listdir()]
        exit_with(f"--{kind}: {error} in {os.getcwd()} or among what is installed.{did_you_mean(module, near)}")
    if not isinstance(classes.get(short), type):
        own = [key for key, value in classes.items() if isinstance(value, type) and value.__module__ == module]
        if "__path__" in classes and importlib.util.find_spec(name):
            exit_with(f"--{kind}: {name} is a module; name a class in it, as in --{kind} {name}.MyClass.")
        exit_with(f"--{kind}: module {module} has no {short}.{did_you_mean(short, own)} It has {', '.join(own)}.")
    return classes[short]


def _subclasses(base: type) -> dict[str, type]:
    """Returns the public classes derived from `base` that have been imported, by their short names."""
    classes: dict[str, type] = {}
    derived: list[type] = base.__subclasses__()
    for cls in derived:
        classes |= _subclasses(cls) | {cls.__name__: cls}
    return {name: cls for name, cls in classes.items() if not name.startswith("_")}


def print_arguments(words: Sequence[str]) -> None:
    """Prints the arguments of the classes that a command line names by ``--model`` and ``--data``."""
    _import_classes(words)
    for kind, name in _values(words):
        if kind in _KINDS:
            print(f"\nArguments of {name}:")
            for parameter in inspect.signature(_class_of(kind, name)).parameters.values():
                print(f"  --{kind}.{parameter}")


# --- jsonargparse's errors, in a line

_CLASSES = ("callbacks", "logger", "plugins", "profiler")
"""Arguments whose values are classes with arguments of their own, as LightningCLI describes them."""


def _in_a_line(command: str, words: Sequence[str], error: ArgumentError) -> str:
    """Returns an error of jsonargparse with the closest match of what is wrong.

    Its message tells all that was tried; that of the innermost cause tells why.
    """
    if (wrong_flag := _wrong_flag(command, words)) is not None:
        return wrong_flag
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    text, where = " ".join(str(cause).split()).rstrip("."), str(error).partition("\n")[0].rstrip(": ")
    files = [word for content in _files(words) for word in _words(content)]
    if misplaced := [word for word in files if word in SHORT and f"'{word}'" in text]:
        return f"{misplaced[0]} belongs under trainer: write trainer: and, indented below it, {misplaced[0]}: ..."
    # The word of the message that the user wrote is the wrong one.
    written = {part for word in [*words, *files] for part in [*re.split(r"[=,\[\]]", word), *re.split(r"[=.]", word)]}
    names = _names(command, [*words, *files])
    said = [*re.findall(r"[\w.-]+", text), *re.findall(r"[\w-]+", text)]
    entries = os.listdir()
    right = {"trainer", *names, *entries, *(entry.partition(".")[0] for entry in entries)}
    wrong = next((word for word in said if word in written and word not in right), "")
    meant = entries if "." in wrong else [*names, *re.findall(r"'(\w+)'", text.replace(f"'{wrong}'", ""))]
    hint = did_you_mean(wrong, meant, kind="argument")
    return f"{where if text in where else f'{where}: {text}'}.{hint}"


def _wrong_flag(command: str, words: Sequence[str]) -> str | None:
    """Returns what is wrong with the first wrong flag of a command line, as the engine's own checks say it."""
    for name, value in _values(words):
        argument, _, behind = name.removeprefix("trainer.").partition(".")
        if name.startswith("trainer.") and argument not in SHORT:
            hint = did_you_mean(argument, SHORT, lambda near: f"--{near}", kind="flag").replace("--", "--trainer.", 1)
            return f"{command} has no flag --{name}.{hint}"
        if name.startswith("trainer.") and argument not in _CLASSES and not behind:
            try:
                check_arguments({argument: _plain(value)})
            except ValueError as refusal:
                return f"--{argument}: {refusal}"
        if name.startswith("data.") and not re.search(r"(^| )(--data[ =]|--config|-c)", " ".join(words)):
            return f"--{name} needs --data CLASS in front of it."
    return None


def _plain(text: str) -> Any:
    try:
        return json.loads(text)  # unlike YAML, it takes 1e3 for a number
    except ValueError:
        return yaml.safe_load(text)


def _files(words: Sequence[str]) -> Iterator[Any]:
    """Yields the contents of the YAML files that a command line names, as far as they can be read."""
    for name, path in _values(words):
        try:
            if name == "config":
                with open(path, encoding="utf-8") as file:
                    yield yaml.safe_load(file)
        except (OSError, ValueError, yaml.YAMLError):
            continue  # the error that is told


def _words(content: Any) -> Iterator[str]:
    """Yields the keys and texts of a YAML file."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield str(key)
            yield from _words(value)
    elif isinstance(content, str):
        yield content


def _names(command: str, words: Sequence[str]) -> list[str]:
    """Returns what a user may have meant: flags, files, classes, and the arguments of those that are named."""
    bases = (Callback, Logger, LightningModule, LightningDataModule, torch.optim.Optimizer)
    classes = {name: cls for base in bases for name, cls in _subclasses(base).items()}
    schedules = _subclasses(torch.optim.lr_scheduler.LRScheduler)
    named = [cls for part in words for name, cls in classes.items() if part.rpartition(".")[2] == name]
    arguments = [name for cls in named for name in inspect.signature(cls).parameters]
    return [*arguments, *flags_of(command), *SHORT, *classes, *schedules]
