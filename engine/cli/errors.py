"""Shortens jsonargparse's errors to the flag, its problem, and a suggestion.

jsonargparse describes its whole search, in ten lines or more. This module extracts the relevant parts. Of messages that
it does not know, it keeps the informative lines.
"""

import importlib
import inspect
import re

from ..flags import did_you_mean
from .class_names import missing_module, no_argument
from .flag_table import ENGINE_FLAGS, flags_of

__all__ = ["in_a_line"]

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
    match = re.search(r"unrecognized arguments: --(?:trainer\.)?(\S+)", message)
    if match is None:
        return ""
    names = [row.name for row in flags_of(command)]
    hint = did_you_mean(match[1], names, lambda near: f"--{near}")
    return f"{command} has no flag --{match[1]}.{hint}\nAll flags: polyphase {command} --help-all"


def _unknown_key(command: str, message: str, flag: str) -> str:
    match = re.search(r"does not accept (?:option|nested key) '([^']+)'", message)
    if match is None:
        return ""
    names = {row.name: row.name for row in flags_of(command)} | {f"trainer.{r.name}": r.name for r in ENGINE_FLAGS}
    return f"unknown key {match[1]!r}.{did_you_mean(match[1], names)}\nAll keys: polyphase {command} --help-all"


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
