"""The flags of the command, and the check of a command line: names, texts and numbers, without torch.

It only refuses flags that would fail later, and accepts everything that it can't check. So a mistake is reported at
once, in one line, and the check costs a run only some milliseconds.
"""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ..compression.registry import parse_compression
from ..flags import choose, did_you_mean
from ..precision import ALIASES, PRECISIONS, TRANSFORMER_ENGINE
from ..strategies.registry import check_strategy
from . import classes
from .classes import check_argument, check_class_name

__all__ = [
    "COMMANDS",
    "ENGINE_FLAGS",
    "GROUPS",
    "KINDS",
    "RUN_FLAGS",
    "FlagRow",
    "UsageError",
    "check",
    "check_value",
    "exit_with",
    "flags_of",
    "split",
]


def exit_with(message: str) -> NoReturn:
    """Prints an error and ends with exit code 2, which means that the command line is wrong."""
    print(f"polyphase: error: {message}", file=sys.stderr)
    sys.exit(2)


# The flags of the command, readable without torch: name, kind of value, meaning, default and an example of each.
#
# The flags of the engine are the arguments of `Engine`: the arguments of Lightning's `Trainer` and some more. A test
# compares them. Flags without a group are shown by ``--help-all`` only.

COMMANDS = {
    "fit": "trains a model",
    "validate": "runs the validation loop of a model",
    "test": "runs its test loop",
    "predict": "runs its prediction loop",
    "verify": "checks that flags give the result of one process, or names the first tensor that differs",
    "bench-comm": "measures the network between the ranks, and forecasts a step under each compression",
}
"""Commands that run a model, with their descriptions."""

GROUPS = (
    "What to run",
    "How to run it",
    "How long",
    "Batches",
    "Optimization",
    "Checkpoints and resuming",
    "What is shown and logged",
)
"""Headings of the help, in order."""


@dataclasses.dataclass(frozen=True)
class FlagRow:
    """One flag of the command."""

    name: str
    """The name after ``--``."""
    kind: str
    """The kind of the value: a key of `check.KINDS`."""
    meaning: str
    default: str
    """The default as shown in the help; ``""`` for none."""
    example: str
    group: str = ""
    """One of `GROUPS`, or empty."""
    choices: tuple[str, ...] = ()
    """All possible values, if there are few."""
    commands: tuple[str, ...] = tuple(COMMANDS)
    """The commands that have this flag."""


_WHAT, _HOW, _LONG, _BATCHES, _STEP, _SAVING, _SHOWN = GROUPS
_STAGES = ("fit", "validate", "test", "predict")

RUN_FLAGS = (
    FlagRow("model", "model", "class of the model: package.Class, or one of polyphase.models", "", "MyModel", _WHAT),
    FlagRow("model.NAME", "any", "argument of its constructor; --model.help CLASS lists them", "", "", _WHAT),
    FlagRow("data", "data", "class of the data module, if the model has no loaders itself", "none", "Digits", _WHAT),
    FlagRow("data.NAME", "any", "argument of its constructor; --data.help CLASS lists them", "", "", _WHAT),
    FlagRow(
        "config", "config", "YAML file with any of these flags; later flags override it", "none", "run.yaml", _WHAT
    ),
    FlagRow("print_config", "bare", "print the whole configuration as such a file, and exit", "", "", _WHAT),
    FlagRow("seed_everything", "seed", "seed of all random numbers; true: any, false: none", "0", "1", _WHAT),
    FlagRow("optimizer", "any", "class of an optimizer, if the model configures none", "the model's", "Adam"),
    FlagRow("lr_scheduler", "any", "class of a learning-rate schedule, with --optimizer", "the model's", "StepLR"),
    FlagRow("ckpt_path", "any", "checkpoint to start from", "none", "snapshots/last", _SAVING, commands=_STAGES),
    FlagRow("weights_only", "bool", "unpickle only its tensors and plain values", "none", "true", commands=_STAGES),
    FlagRow("verbose", "bool", "print the results", "true", "false", commands=("validate", "test")),
    FlagRow("return_predictions", "bool", "keep the predictions in memory", "true", "false", commands=("predict",)),
    FlagRow("steps", "int", "optimizer steps that are compared", "5", "5", _WHAT, commands=("verify",)),
    FlagRow("tolerance", "number", "largest difference of a weight", "1e-05", "1e-4", _WHAT, commands=("verify",)),
    FlagRow(
        "compressions", "any", "the compressions to compare", "all", "[none,bf16]", _WHAT, commands=("bench-comm",)
    ),
)
"""Flags that are not arguments of the engine."""

_BAR = "show a progress bar"
_LIMIT = "batches of each epoch at most: a number, or a share such as 0.1"

ENGINE_FLAGS = (
    FlagRow("strategy", "strategy", "how work is split over devices: see polyphase strategies", "auto", "ddp", _HOW),
    FlagRow("devices", "devices", "devices on each node: a number, -1 for all, or a list [0,1]", "auto", "2", _HOW),
    FlagRow(
        "accelerator",
        "accelerator",
        "kind of device: cpu, gpu, cuda, mps or tpu",
        "auto",
        "cpu",
        _HOW,
        choices=("auto", "cpu", "gpu", "cuda", "mps", "tpu"),
    ),
    FlagRow("num_nodes", "int", "machines", "1", "2", _HOW),
    FlagRow(
        "precision", "precision", "number format: 32-true, bf16-mixed, 16-mixed, ...", "32-true", "bf16-mixed", _HOW
    ),
    FlagRow("compression", "compression", "how gradients are sent: see polyphase strategies", "none", "bf16", _HOW),
    FlagRow(
        "compile",
        "choice_or_bool",
        "run the steps through torch.compile",
        "false",
        "true",
        _HOW,
        choices=("default", "reduce-overhead", "max-autotune"),
    ),
    FlagRow(
        "activation_checkpointing",
        "choice",
        "activations that backward recomputes: none, full or selective",
        "none",
        "full",
        _HOW,
        choices=("none", "full", "selective"),
    ),
    FlagRow(
        "offload", "any", "what host memory keeps: activations, parameters, or a list", "none", "activations", _HOW
    ),
    FlagRow("max_epochs", "int", "epochs; -1 for no end", "1000", "5", _LONG),
    FlagRow("max_steps", "int", "optimizer steps; -1 for no end", "-1", "1000", _LONG),
    FlagRow("max_time", "any", "time: days:hours:minutes:seconds", "none", "00:08:00:00", _LONG),
    FlagRow("limit_train_batches", "number", _LIMIT, "1.0", "10", _LONG),
    FlagRow("limit_val_batches", "number", "as limit_train_batches, in validation", "1.0", "10", _LONG),
    FlagRow("fast_dev_run", "int_or_bool", "run this many batches of each loop, save nothing", "false", "true", _LONG),
    FlagRow("global_batch_size", "int", "samples of each optimizer step, over all ranks", "none", "256", _BATCHES),
    FlagRow("micro_batch_size", "int_or_auto", "samples of a rank's micro-batch, at most", "none", "8", _BATCHES),
    FlagRow("accumulate_grad_batches", "int", "micro-batches of each optimizer step", "1", "4", _BATCHES),
    FlagRow(
        "uneven",
        "choice",
        "if ranks have different numbers of batches: pad or drop",
        "pad",
        "drop",
        _BATCHES,
        choices=("pad", "drop"),
    ),
    FlagRow("seed_samples", "bool", "augment a sample alike on any rank and worker", "false", "true", _BATCHES),
    FlagRow("gradient_clip_val", "number", "largest norm of all gradients", "none", "1.0", _STEP),
    FlagRow(
        "gradient_clip_algorithm",
        "choice",
        "clip by norm or by value",
        "norm",
        "value",
        _STEP,
        choices=("norm", "value"),
    ),
    FlagRow(
        "nonfinite",
        "choice",
        "if a loss is NaN or infinite: warn, error, skip or ignore",
        "warn",
        "error",
        _STEP,
        choices=("warn", "error", "ignore"),
    ),
    FlagRow("check_first_steps", "any", "compare the first steps with one process", "auto", "false", _STEP),
    FlagRow("sync_batchnorm", "bool", "compute BatchNorm's statistics over all ranks", "false", "true", _STEP),
    FlagRow("deterministic", "bool_or_warn", "use only algorithms that repeat bit for bit", "false", "true", _STEP),
    FlagRow("resume", "any", "checkpoint to resume from; auto: the newest of this run", "none", "auto", _SAVING),
    FlagRow("default_root_dir", "any", "folder of logs and checkpoints", ".", "runs", _SAVING),
    FlagRow("enable_checkpointing", "bool", "save a checkpoint at the end of each epoch", "true", "false", _SAVING),
    FlagRow(
        "checkpoint_format",
        "choice",
        "file or directory; auto: by the strategy",
        "auto",
        "file",
        _SAVING,
        choices=("auto", "file", "directory"),
    ),
    FlagRow("hang_timeout_s", "number", "seconds without progress before the run ends", "600", "60", _SAVING),
    FlagRow("name", "any", "folder of the logs, instead of version_0", "none", "my-run", _SHOWN),
    FlagRow("logger", "any", "class of a logger, or false", "TensorBoard", "CSVLogger", _SHOWN),
    FlagRow("log_every_n_steps", "int", "optimizer steps between two rows of the log", "50", "10", _SHOWN),
    FlagRow("callbacks", "any", "class of a callback; += adds another", "none", "MemoryMonitor", _SHOWN),
    FlagRow("check_val_every_n_epoch", "int", "epochs between validations", "1", "5", _SHOWN),
    FlagRow("val_check_interval", "any", "training batches between validations, or a share", "1.0", "0.25", _SHOWN),
    FlagRow("enable_progress_bar", "bool", _BAR, "true", "false", _SHOWN),
    FlagRow("profiler", "any", "where time goes: simple, advanced or pytorch", "none", "simple", _SHOWN),
    FlagRow("min_epochs", "int", "epochs at least", "none", "1"),
    FlagRow("min_steps", "int", "optimizer steps at least", "none", "100"),
    FlagRow("limit_test_batches", "number", "as limit_train_batches, in testing", "1.0", "10"),
    FlagRow("limit_predict_batches", "number", "as limit_train_batches, in prediction", "1.0", "10"),
    FlagRow("overfit_batches", "number", "train and validate on these few batches alone", "0.0", "2"),
    FlagRow("num_sanity_val_steps", "int", "validation batches before training", "2", "0"),
    FlagRow("enable_run_summary", "bool", "print what the run is, and where its results are", "true", "false"),
    FlagRow("enable_model_summary", "bool", "print the layers before training", "true", "false"),
    FlagRow("benchmark", "bool", "let cuDNN search for the fastest algorithms", "none", "true"),
    FlagRow("inference_mode", "bool", "evaluate under torch.inference_mode, else no_grad", "true", "false"),
    FlagRow("use_distributed_sampler", "bool", "deal the samples to the ranks", "true", "false"),
    FlagRow("detect_anomaly", "bool", "find the origin of NaN in backward, by torch", "false", "true"),
    FlagRow("barebones", "bool", "run the bare loop, to measure it", "false", "true"),
    FlagRow("plugins", "any", "classes of Lightning plugins", "none", "MyPlugin"),
    FlagRow("reload_dataloaders_every_n_epochs", "int", "epochs between new loaders", "0", "1"),
    FlagRow("enable_autolog_hparams", "bool", "log hyperparameters", "true", "false"),
    FlagRow("model_registry", "any", "name of the model for Lightning's registry", "none", "my-model"),
)
"""The arguments of the engine. Each may also be written ``--trainer.NAME``."""


def flags_of(command: str) -> tuple[FlagRow, ...]:
    """Returns all flags of a command."""
    return tuple(flag for flag in (*RUN_FLAGS, *ENGINE_FLAGS) if command in flag.commands)


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
