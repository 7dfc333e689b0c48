"""`polyphase strategies`: lists the values of strategy, precision, compression and finetune, without torch."""

import ast
import dataclasses
import importlib
import inspect
import os
import sys
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..compression.registry import ROWS as HOOKS
from ..config import field_docs
from ..finetune_options import FINETUNES, LoRAOptions
from ..flags import LAUNCHERS, choose
from ..precision import ALIASES, OF_BLOCKS, PRECISIONS
from ..registration import COMM_HOOK_GROUP, STRATEGY_GROUP, load_plugin, plugin_names
from ..strategies.registry import STRATEGIES, StrategySpec, find_strategy
from .runs import exit_with

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

__all__ = ["explained", "main"]

WIDTH = 100

HELP = """\
usage: polyphase strategies [NAME] [--explain MODEL]

  polyphase strategies                    strategies, precisions, compressions and ways to fine-tune, a
                                          line each
  polyphase strategies fsdp               everything about one of them
  polyphase strategies --explain ByteGPT  what of a model is sharded as one, and what tensor
                                          parallelism splits; MODEL as behind --model
"""


def main(words: Sequence[str]) -> int:
    """Runs ``polyphase strategies`` with its arguments; returns the exit code."""
    try:
        if not words:
            print("\n".join(_overview()))
        elif words[0] in ("-h", "--help"):
            print(HELP, end="")
        elif words[0] == "--explain" and len(words) == 2:
            print(explained(words[1]))
        elif len(words) == 1 and not words[0].startswith("-"):
            print("\n".join(_about(words[0])))
        else:
            exit_with(
                f"strategies takes one NAME, but got {' '.join(words)}. (--explain takes one: a MODEL.)\n"
                "See polyphase strategies --help."
            )
    except ValueError as error:
        exit_with(str(error))
    return 0


# --- the overview


def _overview() -> Iterator[str]:
    for group, names in ((STRATEGY_GROUP, STRATEGIES), (COMM_HOOK_GROUP, HOOKS)):
        for name in set(plugin_names(group)) - set(names):
            load_plugin(group, name)
    yield "--strategy NAME[:option=value,...]"
    yield from _table({name: row.description for name, row in STRATEGIES.items()})
    yield "  auto         single on one device, else ddp (the default)"
    suffixes = ", ".join(f"_{suffix}" for suffix in LAUNCHERS if suffix)
    yield from _wrapped(
        f"Without a suffix the script is started once per device; {suffixes} start workers instead (fsdp_spawn). Under"
        " torchrun and SLURM the processes are there already."
    )
    yield ""
    yield "--precision NAME"
    yield from _table(PRECISIONS)
    yield ""
    yield "--compression NAME[:value,option=value,...][+fp16|+bf16]"
    yield from _table({"none": "gradients as they are"} | {name: row.description for name, row in HOOKS.items()})
    yield ""
    yield "--finetune NAME[:rank,option=value,...]"
    yield from _table(FINETUNES)
    yield ""
    yield "polyphase strategies NAME tells everything about one: options, what it sends, when to choose it."


def _table(rows: Mapping[str, str]) -> Iterator[str]:
    width = max(12, *map(len, rows))
    for name, description in rows.items():
        short = description.partition(": ")[0] if len(description) > WIDTH - width - 3 else description
        yield f"  {name:<{width}} {textwrap.shorten(short, WIDTH - width - 3, placeholder=' ...')}"


def _wrapped(text: str, indent: str = "  ", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


# --- one value


def _about(flag: str) -> Iterator[str]:
    name = flag.partition(":")[0]
    row = find_strategy(name)
    if row is not None:
        return _about_strategy(name, row)
    if name not in HOOKS:
        load_plugin(COMM_HOOK_GROUP, name)
    if name in HOOKS:
        return _about_compression(name)
    if name == "lora":
        return _about_lora()
    full = ALIASES.get(name, name)
    if full not in PRECISIONS:
        choose("strategy, precision, compression or finetune", name, [*STRATEGIES, *PRECISIONS, *HOOKS, "lora"])
    return _about_precision(full)


def _field(title: str, text: str) -> list[str]:
    return _wrapped(text, " " * 16, f"{title + ':':<16}")


def _about_strategy(name: str, row: StrategySpec) -> Iterator[str]:
    yield f"--strategy {name}"
    yield from _field("what it is", row.description)
    if row.choose_when:
        yield from _field("choose it when", row.choose_when)
    yield from _field("what it sends", row.traffic)
    yield from _field("compression", _can(["none", *row.compressions], ["none", *HOOKS], row.why_not))
    yield from _field("precision", _can(row.precisions, PRECISIONS, row.why_not_precision))
    if row.note:
        yield from _field("note", row.note)
    launchers = [f"{name}_{suffix}" for suffix in LAUNCHERS if suffix] if row.make is not None else []
    if launchers:
        yield from _field("launchers", f"{', '.join(launchers)} start workers instead of the script again")
    yield from _options(row.options)
    yield ""
    yield f"  polyphase fit --model MyModel --data MyData --strategy {_example(name, row.options)}" + (
        " --devices 2" if row.make is not None else ""
    )


def _can(names: Sequence[str], all_names: typing.Iterable[str], why_not: str) -> str:
    lacking = [name for name in all_names if name not in names]
    if not lacking:
        return f"all: {', '.join(names)}"
    return f"{', '.join(names)}; not {', '.join(lacking)}" + (f": {why_not}" if why_not else "")


def _about_compression(name: str) -> Iterator[str]:
    row = HOOKS[name]
    yield f"--compression {name}"
    yield from _field("what it is", row.description)
    can = [strategy for strategy, spec in STRATEGIES.items() if name in spec.compressions]
    yield from _field("strategies", ", ".join(can))
    if row.takes_dtype:
        yield from _field("16 bit", f"{name}+fp16 and {name}+bf16 send its numbers in 16 bit")
    yield from _options(row.options)
    yield ""
    flag = f"{name}:{dataclasses.fields(row.options)[0].default}" if dataclasses.fields(row.options) else name
    flag = name if "start" in dataclasses.asdict(row.options()) and name == "sign" else flag
    yield f"  polyphase fit --model MyModel --data MyData --strategy ddp --devices 2 --compression {flag}"


def _about_precision(name: str) -> Iterator[str]:
    yield f"--precision {name}"
    yield from _field("what it is", PRECISIONS[name])
    short = [alias for alias, full in ALIASES.items() if full == name]
    if short:
        yield from _field("short", ", ".join(short))
    can = [strategy for strategy, row in STRATEGIES.items() if name in row.precisions]
    cannot = [strategy for strategy in STRATEGIES if strategy not in can]
    yield from _field("strategies", f"all but {', '.join(cannot)}" if cannot else "all")


def _about_lora() -> Iterator[str]:
    yield "--finetune lora"
    yield from _field("what it is", FINETUNES["lora"])
    yield from _field("strategies", "all")
    can = [name for name in PRECISIONS if name not in OF_BLOCKS]
    yield from _field("precision", _can(can, PRECISIONS, "not tried"))
    yield from _field("needs", "peft: pip install 'polyphase[lora]'")
    yield from _options(LoRAOptions)
    yield ""
    yield "  polyphase fit --model MyModel --data MyData --finetune lora:rank=8"


# --- options


def _options(options: type) -> Iterator[str]:
    fields = dataclasses.fields(options)
    if not fields:
        return
    yield ""
    yield "options, as name:option=value,option=value"
    types, texts = typing.get_type_hints(options), field_docs(options)
    for field in fields:
        text = texts.get(field.name, "")
        left = f"  {field.name}={default_of(field.default, types[field.name], text)}"
        words = f"{text} ({_type_name(types[field.name])})".strip()
        yield from _wrapped(words, " " * 35, f"{left:<34} ")


def default_of(default: object, type_: typing.Any, doc: str) -> str:
    """Returns the default of an option in words. None of a bool is false, unless the option's docstring says more."""
    if default is None:
        return "false" if type_ == bool | None and "default:" not in doc.lower() else "derived"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _type_name(type_: typing.Any) -> str:
    words = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    if typing.get_origin(type_) is typing.Literal:
        return " | ".join(typing.get_args(type_))
    choices = [words.get(arg, str(arg)) for arg in typing.get_args(type_) if arg is not type(None)]
    return " or ".join(choices) or words.get(type_, getattr(type_, "__name__", str(type_)))


def _example(name: str, options: type) -> str:
    """Returns an example of the flag, with a size if the strategy has an option for one."""
    sizes = {"pipeline_size": 2, "tp": 2, "cp": 2, "replicate": 2, "sync_every": 16, "staleness": 4}
    names = [field.name for field in dataclasses.fields(options)]
    size = next((f"{key}={value}" for key, value in sizes.items() if key in names), None)
    return f"{name}:{size}" if size else name


_MOST_RANKS = 64


def explained(name: str) -> str:
    """The units and the tensor-parallel plan of a model that is built without arguments and without memory.

    Args:
        name: name of a class of `polyphase.models`, or an import path such as ``package.Class``.

    Raises:
        ValueError: there is no such class, it can't be built, or no part of it can be split.
    """
    # These import torch, which the other uses of the command do not need.
    from ..strategies import describe_units, make_plan

    model = _build(name)
    lines = [describe_units(model), ""]
    sizes = []
    refused: ValueError | None = None
    for size in range(2, _MOST_RANKS + 1):
        try:
            make_plan(model, size)
            sizes.append(size)
        except ValueError as error:
            refused = refused or error
    calls = [
        f"No pipeline: the model is called in {hook} ({where}); call it in a step, such as validation_step."
        for hook, where in _calls_of_the_model(type(model))
    ]
    if not sizes:
        assert refused is not None
        return "\n".join([*lines, f"No tensor parallelism: {refused}", *calls])
    fits = f"tp can be {', '.join(map(str, sizes))} (of up to {_MOST_RANKS})."
    return "\n".join([*lines, str(make_plan(model, sizes[0])), "", fits, *calls])


def _calls_of_the_model(cls: type) -> Iterator[tuple[str, str]]:
    """Yields the hooks outside of steps in which a class calls itself as a model, with file and line of the call."""
    for name in dir(cls):
        method = getattr(cls, name)
        if not name.startswith("on_") or not inspect.isfunction(method) or method.__module__.startswith("lightning."):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
        except (OSError, TypeError, SyntaxError):
            continue  # created at run time, or in an interactive session
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("self", "self.forward"):
                code = method.__code__
                yield name, f"{os.path.basename(code.co_filename)}:{code.co_firstlineno + node.lineno - 1}"
                break


def _build(name: str) -> "LightningModule":
    import torch
    from lightning.pytorch import LightningModule

    sys.path.insert(0, os.getcwd())  # as in the other commands
    package, _, class_name = name.rpartition(".")
    try:
        module = importlib.import_module(package or "polyphase.models")
    except ImportError as error:
        raise ValueError(f"can't import {package!r}, where {class_name!r} should be: {error}.") from None
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, LightningModule)
    }
    model_class = classes[choose("model", class_name, classes)]
    try:
        with torch.device("meta"):
            model = model_class()
            model.configure_model()
    except Exception as error:
        raise ValueError(f"{name} can't be built without arguments, so it can't be described: {error}") from error
    return model
