"""The command that runs a model: LightningCLI with the engine as its trainer and short flags. It imports torch."""

import importlib
import inspect
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
from ..flags import check_count, did_you_mean
from ..loop.runs import quiet
from .check import ENGINE_FLAGS, flags_of
from .check import exit_with as _exit
from .classes import missing_module, no_argument

__all__ = ["SHORT", "EngineCLI", "expand", "in_a_line", "run"]

SHORT = tuple(flag.name for flag in ENGINE_FLAGS)
"""Flags of the engine that may be written without ``trainer.``."""

_SHORT = re.compile(rf"^--(?=(?:{'|'.join(SHORT)})(?:$|[=+.]))")

NAMES_MODEL = re.compile(r"-[ch].*|--(model|config|help)([=.-].*)?")
"""Words of a command line that name a model, or a file that does, or ask for help."""


class EngineCLI(LightningCLI):
    """A `LightningCLI` that builds an `Engine`, and tells a wrong flag in a line with the closest match.

    Stock `LightningCLI(..., trainer_class=Engine)` runs the same; it prints its usage where a flag is wrong.
    """

    def __init__(self, *args: Any, parser_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        parsing = {"exit_on_error": False, **(parser_kwargs or {})}
        try:
            super().__init__(*args, **{"trainer_class": Engine, **kwargs, "parser_kwargs": parsing})
        except ArgumentError as error:
            program = os.path.basename(sys.argv[0])
            command = next((word for word in sys.argv[1:] if word in self.subcommands()), "fit")
            text = in_a_line(command, str(error)).replace("--help-all", "--help")
            print(f"{program}: error: {text.replace('All flags: polyphase', f'All flags: {program}')}", file=sys.stderr)
            sys.exit(2)


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
    for package in map(importlib.import_module, ("polyphase.models", "polyphase.callbacks")):
        for name in package.__all__:  # the parser knows the short names of classes that exist
            getattr(package, name)
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


# --- jsonargparse's errors, in a line
# Shortens jsonargparse's errors to the flag, its problem, and a suggestion.
#
# jsonargparse describes its whole search, in ten lines or more. The relevant parts are extracted here. Of messages
# that are not known here, the informative lines are kept.


_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "null"}
_BASES = {
    "trainer.callbacks": "lightning.pytorch.callbacks:Callback",
    "trainer.logger": "lightning.pytorch.loggers:Logger",
    "optimizer": "torch.optim:Optimizer",
    "lr_scheduler": "torch.optim.lr_scheduler:LRScheduler",
}
_NOISE = re.compile(
    r"Does not validate against|Subtypes:|Errors:|Given value type:|Expected a <class 'NoneType'>|Expected a path but|"
    r"Parser key|Subclass types expect|^- a (class path|dict)"
)


def in_a_line(command: str, message: str) -> str:
    """Returns a readable message for an error of jsonargparse, in at most three lines."""
    keys = re.findall(r'[Pp]arser key "([^"]+)"', message)
    flag = _flag(keys)
    for tell in (_unknown_flag, _unknown_key, _missing, _no_argument, _no_class, _wrong_type):
        text = tell(command, message, flag)
        if text:
            return text
    lines = [line.strip(" -") for line in message.splitlines()]
    kept = list(dict.fromkeys(line for line in lines if line and not _NOISE.search(line)))
    summary = "; ".join(kept) or message.splitlines()[0]
    return f"{f'{flag}: ' if flag else ''}{summary[:600]}\nAll flags: polyphase {command} --help"


def _flag(keys: list[str]) -> str:
    """Returns ``--model.lr`` for the nested keys model and lr."""
    path = ".".join(dict.fromkeys(keys)).removeprefix("trainer.")
    return f"--{path}" if path else ""


def _unknown_flag(command: str, message: str, flag: str) -> str:
    match = re.search(r"unrecognized arguments: --(trainer\.)?([^\s=]+)", message)
    if match is None:
        return ""
    before = match[1] or ""
    names = SHORT if before else [row.name for row in flags_of(command)]
    hint = did_you_mean(match[2], names, lambda near: f"--{near}", kind="flag").replace("--", f"--{before}", 1)
    return f"{command} has no flag --{before}{match[2]}.{hint}\nAll flags: polyphase {command} --help-all"


def _unknown_key(command: str, message: str, flag: str) -> str:
    match = re.search(r"does not accept (?:option|nested key) '([^']+)'", message)
    if match is None:
        return ""
    names = {row.name: row.name for row in flags_of(command)} | {f"trainer.{r.name}": r.name for r in ENGINE_FLAGS}
    hint = did_you_mean(match[1], names, kind="argument")
    return f"unknown key {match[1]!r}.{hint}\nAll keys: polyphase {command} --help-all"


def _missing(command: str, message: str, flag: str) -> str:
    match = re.search(r"arguments are required: (.+)", message) or re.search(
        r"[Kk]ey \"?([\w.]+)\"? is required", message
    )
    if match is None:
        return ""
    class_path = _class_path(message)
    names = [name.strip().removeprefix(f"{command}.") for name in match[1].split(",")]
    if class_path is None:
        return f"{command} needs {', '.join(f'--{name}' for name in names)}.\nAll flags: polyphase {command} --help"
    required = ", ".join(f"{flag}.{name}" for name in names)
    return f"{required}: needed by {class_path.rpartition('.')[2]}, whose constructor has no default for it."


def _class_path(message: str) -> str | None:
    match = re.findall(r"Problem with given class_path '([\w.]+)'", message)
    return match[-1] if match else None


def _no_argument(command: str, message: str, flag: str) -> str:
    match = re.search(r"(?:Option|Key) '([\w.]+)' is not accepted", message)
    class_path = _class_path(message)
    if match is None or class_path is None:
        return ""
    module, _, name = class_path.rpartition(".")
    if name in ("LightningModule", "LightningDataModule"):
        return f"{flag}.{match[1]} needs {flag} CLASS in front of it."
    cls = getattr(importlib.import_module(module), name)
    return f"{flag}.{match[1]}: {no_argument(name, match[1], list(inspect.signature(cls.__init__).parameters)[1:])}"


def _no_class(command: str, message: str, flag: str) -> str:
    module = re.search(r"No module named '([\w.]+)'", message)
    if module is not None:
        return f"{flag}: {missing_module(module[1], '')}"
    attribute = re.search(r"module '([\w.]+)' has no attribute '(\w+)'", message)
    if attribute is not None:
        names = [n for n, v in vars(importlib.import_module(attribute[1])).items() if isinstance(v, type)]
        return f"{flag}: module {attribute[1]} has no {attribute[2]}.{did_you_mean(attribute[2], names, str)}"
    kind = re.search(r"Import path does not correspond to a subclass of (\w+)", message)
    if kind is not None:
        path = re.search(r"Given value: ([\w.]+)", message)
        return f"{flag}: {path[1] if path else 'it'} is no subclass of {kind[1]}."
    short = re.search(r"Expected a dot import path string: (\w+)", message)
    if short is None:
        return ""
    subclasses = _subclasses(flag)
    return (
        f"{flag}: unknown class {short[1]!r}.{did_you_mean(short[1], subclasses)} Name your own class by its import"
        f" path: {flag} package.Class."
    )


def _subclasses(flag: str) -> list[str]:
    """Returns the names of the imported classes that a flag accepts."""
    key = flag.removeprefix("--")
    module, _, name = (_BASES.get(key) or _BASES.get(f"trainer.{key}") or ":").partition(":")
    if not module:
        return []
    pending: list[type] = [getattr(importlib.import_module(module), name)]
    subclasses = set()
    while pending:
        cls = pending.pop()
        pending += cls.__subclasses__()
        subclasses.add(cls.__name__)
    return sorted(name for name in subclasses if not name.startswith("_"))


def _wrong_type(command: str, message: str, flag: str) -> str:
    literal = re.search(r"Expected a typing\.Literal\[(.*?)\]\. Got value: (.*)", message)
    if literal is not None:
        choices = re.findall(r"'([^']*)'", literal[1])
        return f"{flag}: {literal[2]!r} is not one of {literal[1]}.{did_you_mean(literal[2], choices)}"
    plain = re.search(r"Expected a <class '(\w+)'>\. Got value: (.*)", message)
    if plain is not None:
        return f"{flag}: {plain[2]!r} is not {_TYPES.get(plain[1], f'of type {plain[1]}')}."
    unions, value = re.findall(r"Subtypes: \[([^\n]*)\]", message), re.search(r"Given value: (.*)", message)
    if not unions or value is None or "NestedArg" in value[1]:
        return ""
    types = [_TYPES[name] for name in re.findall(r"<class '(\w+)'>", unions[-1]) if name in _TYPES]
    return f"{flag}: {value[1]!r} is not {' or '.join(types)}." if types else ""
