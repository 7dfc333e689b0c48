"""Checks a command line without torch: names of flags and classes, and values that are texts or numbers.

It only refuses flags that would fail later, and accepts everything that it can't check. So a mistake is reported at
once, in one line, and the check costs a run only some milliseconds.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..compression.registry import parse_compression
from ..flags import choose, did_you_mean
from ..precision.names import ALIASES, PRECISIONS, TRANSFORMER_ENGINE
from ..strategies.registry import check_strategy
from . import classes
from .classes import check_argument, check_class_name
from .flag_table import COMMANDS, ENGINE_FLAGS, FlagRow, flags_of

__all__ = ["KINDS", "UsageError", "check", "check_value", "split"]

_NOTHING = {"null", "none", "~", ""}
_SWITCHES = {"true", "false", "yes", "no", "on", "off", "y", "n"}
_OPEN = ("model", "data", "trainer", "optimizer", "lr_scheduler")
"""Flags whose class defines further flags after a dot."""

_CLASS = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
_REGISTERS = re.compile(r"register_strategy|register_comm_hook|StrategyRegistry|AcceleratorRegistry")


class UsageError(ValueError):
    """The command line is invalid; the message has at most three lines and names the flag."""


class _Word(NamedTuple):
    """A flag with its value."""

    name: str
    """The flag's name, without ``--`` and without ``trainer.``."""
    value: str | None
    written: str
    """The flag as it was written, with its dashes."""


def check(command: str, words: Sequence[str]) -> None:
    """Checks the flags of ``polyphase COMMAND words...``.

    Raises:
        UsageError: a flag or value is invalid.
    """
    flags = {flag.name: flag for flag in flags_of(command)}
    parsed = list(split(command, words))
    has_config = any(word.name == "config" for word in parsed)
    has_model = False
    chosen: dict[str, str] = {}
    for word in parsed:
        row = flags.get(word.name)
        if row is not None and row.kind == "config":
            has_model |= _check_config(command, word.value or "")
        elif row is None:
            if word.name.startswith("data.") and not (has_config or "data" in chosen or word.name == "data.help"):
                raise UsageError(f"{word.written} needs --data CLASS in front of it.")
            _check_argument(word, chosen)
        else:
            if row.kind in ("model", "data"):
                chosen[row.name] = word.value or ""
            has_model |= row.name == "model"
            if row.kind != "bare":
                check_value(row, _needed(row, word), word.written)
    if not (has_model or has_config or command == "bench-comm"):
        raise UsageError(f"{command} needs a model: {_models_there()}")


def split(command: str, words: Sequence[str]) -> Iterator[_Word]:
    """Splits a command line into flags and values.

    Raises:
        UsageError: the command does not have a flag, or a word belongs to no flag.
    """
    flags = {flag.name: flag for flag in flags_of(command)}
    rest = [*reversed(words)]
    while rest:
        word = rest.pop()
        if not word.startswith("--") and word not in ("-c", "-h"):
            raise UsageError(
                f"{command}: {word!r} belongs to no flag. Write a value after its flag, in quotation marks if it has"
                f" spaces.\nAll flags: polyphase {command} --help"
            )
        written, equals, value = word.partition("=")
        name = {"-c": "config", "-h": "help"}.get(written, written.removeprefix("--").removesuffix("+"))
        name = name.removeprefix("trainer.")
        _check_name(command, name, written, flags)
        is_alone = name in ("print_config", "help") or name.endswith(".help")
        if not equals and rest and not _is_flag(rest[-1]) and name not in ("print_config", "help"):
            value, equals = rest.pop(), "="
        if not equals and not is_alone:
            row = flags.get(name)
            example = row.example if row is not None else ""
            raise UsageError(f"{written} needs a value{f', such as {written} {example}' if example else ''}.")
        yield _Word(name, value if equals else None, written)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word in ("-c", "-h")


def _check_name(command: str, name: str, written: str, flags: dict[str, FlagRow]) -> None:
    head, dot, _ = name.partition(".")
    if head in flags or head in ("help", "help-all") or (head in _OPEN and (dot or head == "trainer")):
        return
    shown = {flag: f"--{flag}" for flag in [*flags, "help"] if "." not in flag}
    shown |= {f"trainer.{row.name}": f"--trainer.{row.name}" for row in ENGINE_FLAGS} if "trainer." in written else {}
    spelled = written.removeprefix("--").removesuffix("+")
    first, _, behind = spelled.partition(".")
    hint = did_you_mean(first, _OPEN, lambda near: f"--{near}.{behind}") if dot else ""  # --modle.lr
    hint = hint or did_you_mean(spelled, shown, shown.__getitem__, kind="flag")
    raise UsageError(f"{command} has no flag {written}.{hint}\nAll flags: polyphase {command} --help-all")


def _check_argument(word: _Word, chosen: dict[str, str]) -> None:
    """Checks ``--model.lr 0.1``, whose class was given by ``--model`` before."""
    head, _, key = word.name.partition(".")
    if re.fullmatch(_CLASS, chosen.get(head, "")):
        try:
            check_argument(chosen[head], key, word.value)
        except ValueError as error:
            raise UsageError(f"{word.written}: {error}") from None


def _needed(row: FlagRow, word: _Word) -> str:
    assert word.value is not None or row.kind == "bare", word
    return word.value or ""


def _models_there() -> str:
    own = [*classes.own_classes("model")]
    names = [*own[:4], *classes.models_of("model")]
    return f"--model NAME or --model package.Class. There are {', '.join(names)}."


# --- values


def check_value(row: FlagRow, value: str, written: str) -> None:
    """Checks the text of one value.

    Args:
        row: the flag of the value.
        value: the text of the value.
        written: name of the flag in messages, such as ``--max_epochs`` or ``run.yaml: trainer.max_epochs``.

    Raises:
        UsageError: the value is invalid.
    """
    try:
        KINDS[row.kind](row, value)
    except UsageError as error:
        raise UsageError(f"{written}: {error}") from None
    except ValueError as error:
        if row.kind in ("strategy", "compression", "accelerator") and _registers_there():
            return  # the user's own code may register this name
        raise UsageError(f"{written}: {error}") from None


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _whole(row: FlagRow, value: str, *, also: Iterable[str] = (), instead: str = "") -> None:
    if value.lower() in {*_NOTHING, *also} or (_is_number(value) and float(value) % 1 == 0):
        return
    if re.fullmatch(r"0[xob]\w+|[+-]?[\d_]+", value):
        return
    hint = did_you_mean(value.lower(), also)
    raise UsageError(f"{value!r} is not a whole number{instead}, such as {row.example}.{hint}")


def _number(row: FlagRow, value: str) -> None:
    if value.lower() not in _NOTHING and not _is_number(value) and not re.fullmatch(r"[+-]?\.(inf|nan)", value.lower()):
        raise UsageError(f"{value!r} is not a number, such as {row.example}.")


def _switch(row: FlagRow, value: str, *, also: Iterable[str] = ()) -> None:
    if value.lower() not in {*_NOTHING, *_SWITCHES, *also, "0", "1"}:
        raise UsageError(f"{value!r} is neither true nor false.{did_you_mean(value.lower(), ['true', 'false', *also])}")


def _choice(row: FlagRow, value: str) -> None:
    if value.lower() not in {*_NOTHING, *row.choices}:  # Lightning accepts some of them in upper case
        choose(f"value of {row.name}", value, row.choices)


def _devices(row: FlagRow, value: str) -> None:
    if value != "auto" and not re.fullmatch(r"\[?[\s\d,+-]*\]?|null", value):
        hint = did_you_mean(value, ["auto"])
        raise UsageError(f"{value!r} is neither a number, 'auto' nor a list of indices such as 0,1.{hint}")


def _precision(row: FlagRow, value: str) -> None:
    if value.lower() not in _NOTHING and value not in TRANSFORMER_ENGINE:
        choose("precision", value, [*PRECISIONS, *ALIASES])


def _class(kind: str) -> Callable[[FlagRow, str], None]:
    def check_class(row: FlagRow, value: str) -> None:
        if re.fullmatch(_CLASS, value) and not Path(value).exists():
            check_class_name(kind, value)

    return check_class


KINDS: dict[str, Callable[[FlagRow, str], object]] = {
    "any": lambda row, value: None,
    "bare": lambda row, value: None,
    "config": lambda row, value: None,
    "model": _class("model"),
    "data": _class("data"),
    "seed": lambda row, value: _whole(row, value, also=("true", "false")),
    "int": _whole,
    "int_or_auto": lambda row, value: _whole(row, value, also=("auto",), instead=" or 'auto'"),
    "int_or_bool": lambda row, value: _whole(row, value, also=_SWITCHES, instead=", true or false"),
    "number": _number,
    "bool": _switch,
    "bool_or_warn": lambda row, value: _switch(row, value, also=("warn",)),
    "choice": _choice,
    "choice_or_bool": lambda row, value: (
        None if value.lower() in {*_SWITCHES, *_NOTHING} else choose(f"value of {row.name}", value, row.choices)
    ),
    "accelerator": lambda row, value: choose("accelerator", value, row.choices),
    "strategy": lambda row, value: check_strategy(value),
    "precision": _precision,
    "compression": lambda row, value: parse_compression(value),
    "devices": _devices,
}
"""Maps each kind of value to the function that checks it."""


def _registers_there() -> bool:
    """Whether a file in the working directory registers strategies or comm hooks."""
    for path in [*Path().glob("*.py"), *Path().glob("*/*.py")][:200]:
        try:
            if _REGISTERS.search(path.read_text(encoding="utf-8", errors="ignore")):
                return True
        except OSError:
            continue
    return False


# --- configuration files
# Checks a configuration file without torch: that it exists and is YAML, and its keys and plain values.


_SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "config")


def _check_config(command: str, path: str) -> bool:
    """Checks the file that ``--config`` names; returns whether the file names a model.

    Raises:
        UsageError: the file is missing, is not YAML, or has an invalid key or value; the message has its path.
    """
    if "://" in path or path.lstrip().startswith("{"):
        return True  # jsonargparse opens it
    file = Path(path).expanduser()
    if not file.is_file():
        beside = [name for name in _beside(file) if name.endswith((".yaml", ".yml", ".json"))]
        hint = did_you_mean(file.name, beside, lambda near: str(file.parent / near)) or (
            f" There are {', '.join(beside[:6])}." if beside else ""
        )
        raise UsageError(f"--config: File does not exist: {path}.{hint}")
    content = _read(file, path)
    for key, value in content.items():
        _check_key(command, path, str(key))
        if key == "trainer" and isinstance(value, dict):
            _check_trainer(path, value)
        elif key in ("model", "data") and value is not None:
            _check_class(path, str(key), value)
        else:
            _check_plain(next((row for row in flags_of(command) if row.name == key), None), value, f"{path}: {key}")
    return "model" in content


def _beside(file: Path) -> list[str]:
    try:
        return sorted(os.listdir(file.parent))
    except OSError:
        return []


def _read(file: Path, path: str) -> dict[Any, Any]:
    import yaml

    try:
        content = yaml.load(file.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise UsageError(f"--config: {path}{where} is no YAML: {' '.join(str(problem).split())}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config: can't read {path}: {error}.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(f"--config: {path} must have keys such as model, data and trainer, but is {content!r:.60}.")
    return content


def _check_key(command: str, path: str, key: str) -> None:
    allowed = {row.name for name in COMMANDS for row in flags_of(name)} - {row.name for row in ENGINE_FLAGS}
    allowed = {name for name in allowed if "." not in name and name != "print_config"} | {*_SECTIONS, command}
    if key in allowed:
        return
    if any(key == row.name for row in ENGINE_FLAGS):
        raise UsageError(f"{path}: {key} belongs under trainer: write trainer: and, indented below it, {key}: ...")
    hint = did_you_mean(key, allowed, kind="argument")
    raise UsageError(f"{path}: unknown key {key!r}.{hint} Allowed: {', '.join(sorted(allowed))}.")


def _check_trainer(path: str, flags: dict[Any, Any]) -> None:
    rows = {row.name: row for row in ENGINE_FLAGS}
    for key, value in flags.items():
        if key not in rows:
            hint = did_you_mean(str(key), rows, lambda near: f"trainer.{near}", kind="argument")
            raise UsageError(f"{path}: unknown key 'trainer.{key}'.{hint}\nAll keys: polyphase fit --help-all")
        _check_plain(rows[key], value, f"{path}: trainer.{key}")


def _check_plain(row: FlagRow | None, value: Any, written: str) -> None:
    if row is not None and isinstance(value, (str, int, float)):
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if isinstance(value, bool) and row.kind in ("int", "number", "int_or_auto"):
            raise UsageError(f"{written}: {text} is not a number, such as {row.example}.")
        check_value(row, text, written)


def _check_class(path: str, key: str, value: Any) -> None:
    name = value.get("class_path") if isinstance(value, dict) else value
    if isinstance(name, str):
        row = next(row for row in flags_of("fit") if row.name == key)
        check_value(row, name, f"{path}: {key}" if isinstance(value, str) else f"{path}: {key}.class_path")
        arguments = value.get("init_args") if isinstance(value, dict) else None
        for argument, item in (arguments or {}).items():
            try:
                check_argument(name, str(argument), item if isinstance(item, str) else None)
            except ValueError as error:
                raise UsageError(f"{path}: {key}.init_args.{argument}: {error}") from None
