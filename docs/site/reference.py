"""The pages of the reference that are tables of the code: the arguments of `Engine`, and the options of strategies."""

import dataclasses
import inspect
import typing
from collections.abc import Iterator

from lightning.pytorch import Trainer

from polyphase.engine import Engine
from polyphase.engine.cli.strategies import default_of
from polyphase.engine.compression.registry import ROWS as HOOKS
from polyphase.engine.config import EngineConfig, field_docs
from polyphase.engine.finetune_options import LoRAOptions
from polyphase.engine.flags import ARGUMENTS, VALUES
from polyphase.engine.strategies.registry import STRATEGIES

_MADE = "<!-- Made from the code by `make pictures`. -->\n\n"

_OTHERS = f"""## Names of other tools

{_MADE}A name on the right is an error in `Engine(...)`, in the command and in its YAML files, which says what to write.

"""
_FLAGS = f"""# Flags

{_MADE}Each flag is an argument of `Engine` and of `fit`, and an option of the command: `global_batch_size=256` in
Python, `--global_batch_size 256` in a shell. A variable such as `PL_TRAINER_STRATEGY=fsdp` in the environment sets an
argument that the script leaves out. A wrong name, a wrong value or a combination that can't be honoured is an error
before any process starts; it says what is wrong, what is allowed, and the closest match.

"""
_OPTIONS = f"""# Options of strategies and compressions

{_MADE}Options follow the colon of a flag: `strategy="hsdp:replicate=2,shard=4"`, `compression="powersgd:4,start=100"`.
`polyphase strategies NAME` prints all of one. Each option is told once, where it first comes; a kind of value, such as
"whole number", stands in place of a default that is derived. More about them in [All strategies](../strategies.md),
[Pipelines](../pipeline.md) and [Compression](../compression.md).

"""


def pages() -> dict[str, str]:
    """Texts by the name of the file under ``docs/reference``."""
    return {"flags.md": _FLAGS + "\n".join(_flags()) + "\n", "options.md": _OPTIONS + "\n".join(_all_options())}


# --- names of other tools


def with_names_of_other_tools(page: str) -> str:
    """The page "coming from", whose last section is made from the table of synonyms."""
    return page.partition(_OTHERS)[0] + _OTHERS + "\n".join(_names_of_other_tools())


def _names_of_other_tools() -> Iterator[str]:
    arguments = {word: target for words in ARGUMENTS.values() for word, target in words.items()}
    for title, words in ("", arguments), *((f"`{kind}=`", values) for kind, values in VALUES.items()):
        yield f"| {title or 'here'} | elsewhere |\n|---|---|"
        for target in dict.fromkeys(words.values()):
            yield f"| `{target}` | {', '.join(f'`{word}`' for word in words if words[word] == target)} |"
        yield ""


# --- flags


def _flags() -> Iterator[str]:
    texts, stock = field_docs(EngineConfig), inspect.signature(Trainer).parameters
    parameters = inspect.signature(Engine).parameters
    own = [
        name for name in parameters if name not in stock or name in ("strategy", "precision", "devices", "accelerator")
    ]
    yield "## Of the engine, or with more values than in Lightning\n"
    yield "| flag | meaning | default |\n|---|---|---|"
    for name in own:
        yield f"| `{name}` | {_cell(texts[name])} | {_default(parameters[name].default)} |"
    yield "\n## Of Lightning, with the same meaning\n"
    where = "https://lightning.ai/docs/pytorch/stable/common/trainer.html#trainer-flags"
    yield f"`polyphase fit --help-all` prints them with their types; [Lightning's documentation]({where}) has more.\n"
    yield ", ".join(f"`{name}`" for name in parameters if name not in own) + "."


def _default(value: object) -> str:
    return "" if value is None else f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def _cell(text: str) -> str:
    text = text.replace("``", "`").replace("|", "\\|")
    return text[:1].upper() + text[1:]


# --- options


def _all_options() -> Iterator[str]:
    for title, kinds in (
        ("Strategies", {name: row.options for name, row in STRATEGIES.items()}),
        ("Compressions", {name: hook.options for name, hook in HOOKS.items()}),
        ("Fine-tuning", {"lora": LoRAOptions}),
    ):
        yield f"## {title}"
        told: dict[str, list[_Row]] = {}
        for name, options in kinds.items():
            if rows := list(_rows(options)):
                yield f"\n### `{name}`\n"
                yield from _section(rows, told)
                told[name] = rows
        yield ""


_Row = tuple[str, str, str]


def _section(rows: list[_Row], told: dict[str, list[_Row]]) -> Iterator[str]:
    """Names the options that a section above tells, in the same words, and has a table of the others."""
    within = [name for name, above in told.items() if set(above) <= set(rows)]
    if within:
        whole = max(within, key=lambda name: len(told[name]))
        rows = [row for row in rows if row not in told[whole]]
        yield f"All options of [`{whole}`](#{whole.replace('+', '')})."
    elsewhere = {row: name for name, above in reversed(told.items()) for row in above if row in rows}
    for where in dict.fromkeys(elsewhere.values()):
        names = ", ".join(row[0] for row in rows if elsewhere.get(row) == where)
        yield f"As under [`{where}`](#{where.replace('+', '')}): {names}."
    if new := [row for row in rows if row not in elsewhere]:
        yield "\n| option | meaning | default |\n|---|---|---|"
        yield from (f"| {' | '.join(row)} |" for row in new)


def _rows(options: type) -> Iterator[_Row]:
    texts, types = field_docs(options), typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        text, type_ = texts.get(field.name, ""), types[field.name]
        default = default_of(field.default, type_, text)
        yield (
            f"`{field.name}`",
            _cell(text),
            _values(type_) if default == "derived" else f"`{default}`{_others(type_, default)}",
        )


def _others(kind: typing.Any, default: str) -> str:
    """The other values of an option that has some by name."""
    values = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()
    return "".join(f", `{value}`" for value in values if value != default)


def _values(kind: typing.Any) -> str:
    """The kind of value of an option whose default is derived."""
    words = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}
    kinds = [one for one in typing.get_args(kind) or (kind,) if one is not type(None)]
    return " or ".join(words.get(one, str(one)) for one in kinds)
