"""Checks a configuration file without torch: that it exists and is YAML, and its keys and plain values."""

import os
from pathlib import Path
from typing import Any

from ..flags import did_you_mean
from .check import UsageError, check_value
from .class_names import check_argument
from .flag_table import COMMANDS, ENGINE_FLAGS, FlagRow, flags_of

__all__ = ["check_config"]

_SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler", "config")


def check_config(command: str, path: str) -> bool:
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
    raise UsageError(f"{path}: unknown key {key!r}.{did_you_mean(key, allowed)} Allowed: {', '.join(sorted(allowed))}.")


def _check_trainer(path: str, flags: dict[Any, Any]) -> None:
    rows = {row.name: row for row in ENGINE_FLAGS}
    for key, value in flags.items():
        if key not in rows:
            hint = did_you_mean(str(key), rows, lambda near: f"trainer.{near}")
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
