"""The `polyphase ckpt` command: lists, inspects, verifies, exports and prunes checkpoints.

Modules that open tensors are imported inside functions, so that `list`, `verify` and `prune` do not import torch.
"""

import argparse
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.table import Table

from ..flags import choose, did_you_mean
from ..foreign import for_terminal
from .checked_io import Files, resolve
from .errors import CheckpointError, damage
from .manifest import RANKS, REST, TENSORS, Manifest, is_checkpoint, is_directory, read_manifest
from .retention import list_entries, prune
from .single_file import SUFFIXES, wrong_in

__all__ = ["main"]

HELP = """\
usage: polyphase ckpt {list,inspect,verify,export,prune} ...

A checkpoint is a file that stock Lightning opens. Snapshots, and checkpoints with sharded state, are directories with
sharded tensors, Lightning's state, and MANIFEST.json with the checksum of every file.
Paths are local ones or URLs (s3://...); FOLDER/last is the newest checkpoint of a run.

  polyphase ckpt list snapshots                 the checkpoints of a folder, the newest first
  polyphase ckpt inspect snapshots/last         what is in one; --tensors names each tensor
  polyphase ckpt verify snapshots               reads every file of one or more, or of a folder of them
  polyphase ckpt export snapshots/last --to model.ckpt
                                                one file, for stock Lightning or (.safetensors) for anybody
  polyphase ckpt prune snapshots --keep-last 3  removes the others; --dry-run only names them

  polyphase ckpt COMMAND --help                 all options of a command

exit status: 0 all is well, 1 a checkpoint is damaged or can't be opened, 2 the command line is wrong
"""


def main(words: Sequence[str]) -> int:
    """Runs `polyphase ckpt` with the arguments `words`; returns the exit status."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    try:
        name = choose("ckpt command", words[0], COMMANDS)
        arguments = vars(_parser(name).parse_args(words[1:]))
        return COMMANDS[name].run(**arguments)
    except (CheckpointError, OSError) as error:
        return _complain(error, 1)
    except ValueError as error:
        return _complain(error, 2)


# --- the commands


def _list(folder: str) -> int:
    _check_exists(folder)
    if is_checkpoint(folder):
        raise ValueError(f"{folder} is one checkpoint: polyphase ckpt inspect {folder}, or list {_parent(folder)}")
    entries = list_entries(folder)
    table = Table("name", "step", "epoch", "age", "size", "layout", "versions")
    for entry in entries:
        if entry.manifest is not None:
            _add_row(table, entry.name, *_row(entry.manifest))
    console = _console()
    console.print(table if table.rows else f"There is no checkpoint in '{folder}'.")
    for entry in entries:
        if entry.manifest is None:
            console.print(for_terminal(f"{entry.name} {entry.problem}"))
    return 0


def _inspect(path: str, tensors: bool) -> int:
    from .dcp_storage import tensors_in
    from .opening import check_content

    _check_exists(path)
    if is_checkpoint(path) and not is_directory(path):
        return _inspect_file(path, tensors)
    manifest, files = read_manifest(path), Files(path)
    small = [name for name in (TENSORS, REST, RANKS) if name in manifest.files]
    wrong = [f"{name} is missing in the manifest" for name in manifest.missing_files()]
    wrong += [problem for name in small if (problem := files.check(name, *manifest.files[name]))]
    wrong = wrong or check_content(path, manifest)[0]
    if wrong:
        raise damage(path, "; ".join(wrong))
    stored = {key: (tensor.size, tensor.properties.dtype) for key, tensor in tensors_in(files, manifest).items()}
    _print({**_about(path, manifest, len(stored)), **_progress(files)}, stored if tensors else {})
    return 0


def _inspect_file(path: str, tensors: bool) -> int:
    from .whole import whole_tensors

    manifest = read_manifest(path)
    try:
        rest, ranks, stored = whole_tensors(path)
        lines = _describe_state(rest, ranks)
    except CheckpointError as refused:
        if wrong_in(path):
            raise
        stored, lines = {}, {"the rest": str(refused)}
    shapes = {key: (tensor.shape, tensor.dtype) for key, tensor in stored.items()}
    _print({**_about(path, manifest, len(stored)), **lines}, shapes if tensors else {})
    return 0


def _print(about: dict[str, str], tensors: Mapping[str, tuple[Any, Any]]) -> None:
    console = _console()
    table = Table("what", "value", show_header=False)
    for name, value in about.items():
        _add_row(table, name, value)
    console.print(table)
    if tensors:
        table = Table("tensor", "shape", "dtype", "bytes")
        for key, (size, dtype) in sorted(tensors.items()):
            shape = "x".join(map(str, size)) or "scalar"
            _add_row(table, key, shape, str(dtype).removeprefix("torch."), f"{size.numel() * dtype.itemsize:,}")
        console.print(table)


def _verify(paths: list[str]) -> int:
    checkpoints: list[tuple[str, str]] = []
    for path in paths:
        _check_exists(path)
        if is_checkpoint(path):
            checkpoints.append((path, ""))
            continue
        inside = [
            (entry.path, entry.problem)
            for entry in list_entries(path)
            if entry.kind in ("checkpoint", "damaged", "newer")
        ]
        if not inside:
            raise ValueError(f"{path} is not a checkpoint, and contains none.")
        checkpoints += inside
    status = 0
    for path, problem in checkpoints:
        problems = [problem] if problem else _problems(path)
        status = 1 if problems else status
        _say(f"{path}: {'; '.join(problems) or 'whole'}")
    return status


def _export(
    path: str,
    to: str,
    overwrite: bool,
    trust: bool,
    huggingface: str | None,
    adapters: str | None,
    weights: str | None,
) -> int:
    from .export import export

    _check_exists(path)
    if adapters is not None and huggingface is not None:
        raise ValueError("--adapters and --huggingface write different folders: give one of them.")
    peft = None if adapters is None else (adapters, None)
    left_out = export(
        path, to, overwrite=overwrite, weights_only=not trust, huggingface=huggingface, peft=peft, weights=weights
    )
    if left_out:
        _say(f"left out, because they are not tensors: {', '.join(left_out)}")
    _say(f"wrote {to}")
    return 0


def _prune(folder: str, keep_last: int, keep_every: int | None, dry_run: bool) -> int:
    _check_exists(folder)
    pruned = prune(folder, keep_last=keep_last, keep_every=keep_every, dry_run=dry_run)
    would = "would be " if dry_run else ""
    for path in pruned.renamed:
        _say(f"{would}restored, because it was complete but not yet renamed: {path}")
    for path in pruned.removed:
        _say(f"{would}removed: {path}")
    for path in pruned.kept:
        _say(f"kept: {path}")
    for note in pruned.notes:
        _say(f"note: {note}")
    return 0


# --- output of the commands


def _row(manifest: Manifest) -> tuple[str, ...]:
    versions = " ".join(f"{name} {version}" for name, version in manifest.versions.items())
    size, age = _size(manifest.num_bytes), _age(time.time() - manifest.time)
    return str(manifest.step), str(manifest.epoch), age, size, _layout(manifest), versions


def _layout(manifest: Manifest) -> str:
    return " ".join(f"{axis}={size}" for axis, size in manifest.layout.items()) or "one process"


def _about(path: str, manifest: Manifest, num_tensors: int) -> dict[str, str]:
    step, epoch, age, size, layout, versions = _row(manifest)
    return {
        "path": path,
        "step": step,
        "epoch": epoch,
        "saved": f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(manifest.time))} ({age} ago)",
        "layout": f"{layout}, world size {manifest.world_size}",
        "versions": versions,
        "files": f"{len(manifest.files)}, {size}",
        "tensors": f"{num_tensors}",
    }


def _progress(files: Files) -> dict[str, str]:
    """Reads the progress of training from the checkpoint's state; returns one line of text per heading."""
    from .opening import load_file

    try:
        return _describe_state(load_file(files, REST, True), load_file(files, RANKS, True))
    except CheckpointError as refused:
        return {"the rest": str(refused)}


def _describe_state(rest: dict[str, Any], ranks: list[Any]) -> dict[str, str]:
    engine_state = rest.get("polyphase", {})
    lines = {"keys": ", ".join(rest), "callbacks": ", ".join(rest.get("callbacks", {})) or "none"}
    if "optimizers" in engine_state:
        position = (
            "between epochs"
            if engine_state["between_epochs"]
            else f"{engine_state['batches']} batch(es) of its epoch done"
        )
        lines["optimizers"] = ", ".join(engine_state["optimizers"]) or "none"
        lines["place"] = position + (", in validation" if engine_state["in_validation"] else "")
        lines["accumulation"] = str(engine_state["accumulate_grad_batches"])
        lines.update(_trained_on(ranks))
    return lines


def _trained_on(ranks: list[Any]) -> dict[str, str]:
    """Describes for each training loader which part of its epoch was trained on, and by how many ranks."""
    lines = {}
    for number, loader in enumerate(ranks[0].get("data", {}).get("loaders", [])):
        if "ledger" in loader:
            spans = [f"{s['from']} to {s['to']} by {s['world_size']}" for s in loader["ledger"] if s["to"] > s["from"]]
            ranges = f" ({', '.join(spans)} rank(s))" if spans else ""
            done = f"{loader['position']} of {loader['length']} {loader['unit']} of epoch {loader['epoch']}{ranges}"
            lines[f"trained on, loader {number}" if number else "trained on"] = done
    return lines


def _problems(path: str) -> list[str]:
    from .opening import check_content, wrong_files

    try:
        manifest = read_manifest(path)
        if not is_directory(path):
            return wrong_in(path) or _unopenable(path)
        if wrong := wrong_files(path, manifest):
            return wrong
        wrong, refused = check_content(path, manifest)
        return wrong + refused
    except CheckpointError as error:
        return [str(error)]


def _unopenable(path: str) -> list[str]:
    """Lists the reasons why a file can't be opened. A file that would run code is reported; its code is not run."""
    from .whole import whole_tensors

    try:
        whole_tensors(path)
    except CheckpointError as refused:
        return [str(refused)]
    return []


def _size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _say(text: str) -> None:
    print(for_terminal(text))


def _add_row(table: Table, *cells: str) -> None:
    table.add_row(*map(for_terminal, cells))


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False, highlight=False)


# --- the command line


def _parent(path: str) -> str:
    return os.path.dirname(path.rstrip("/")) or "."


def _check_exists(path: str) -> None:
    fs, fs_path = resolve(path)
    if fs.exists(fs_path):
        return
    folder, name = os.path.split(fs_path)
    beside = [os.path.basename(entry) for entry in fs.ls(folder, detail=False)] if fs.isdir(folder) else []
    raise ValueError(f"There is nothing at {path}.{did_you_mean(name, beside, for_terminal)}")


def _complain(error: Exception, status: int) -> int:
    print(for_terminal(f"polyphase: error: {error}", has_lines=True), file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises an error that suggests the closest flag, instead of printing the usage."""
        unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        hint = did_you_mean(unknown[1], self._option_string_actions, str) if unknown else ""
        raise ValueError(f"{message}.{hint}\nAll options: {self.prog} --help")


class _Command(NamedTuple):
    run: Callable[..., int]
    description: str
    arguments: dict[str, dict[str, Any]]


_FOLDER = {"metavar": "FOLDER", "help": "folder of checkpoints, local or a URL"}
_PATH = {"metavar": "PATH", "help": "a checkpoint, local or a URL; FOLDER/last is the newest of a run"}
_SWITCH = {"action": "store_true"}

COMMANDS = {
    "list": _Command(_list, "Lists the checkpoints of a folder, the newest first.", {"folder": _FOLDER}),
    "inspect": _Command(
        _inspect,
        "Shows what is in a checkpoint.",
        {"path": _PATH, "--tensors": {**_SWITCH, "help": "list all tensors with shape, dtype and size"}},
    ),
    "verify": _Command(
        _verify,
        "Reads every file of the checkpoints and compares its size and checksum with the manifest.",
        {"paths": {"nargs": "+", "metavar": "PATH", "help": "a checkpoint or a folder of checkpoints"}},
    ),
    "export": _Command(
        _export,
        "Verifies a checkpoint and writes it as one file: "
        + "; ".join(f"{suffix} is {description}" for suffix, description in SUFFIXES.items()),
        {
            "path": _PATH,
            "--to": {"required": True, "metavar": "FILE", "help": f"name of the file; ends in {' or '.join(SUFFIXES)}"},
            "--overwrite": {**_SWITCH, "help": "replace the file if it exists"},
            "--huggingface": {
                "metavar": "NAME",
                "help": "write a folder that `from_pretrained` reads: the weights of this sub-module of the"
                " LightningModule, in files of at most 5 GB. The model's config.json is yours to add",
            },
            "--adapters": {
                "metavar": "NAME",
                "help": "write a folder that peft reads: the adapters of a run with --finetune lora, for this"
                " sub-module of the LightningModule",
            },
            "--weights": {
                "metavar": "WHICH",
                "help": "of a run with EMAWeightAveraging or WeightAveraging: average (the default, if there is one) or"
                " current, the weights that training goes on from",
            },
            "--trust": {
                **_SWITCH,
                "help": "unpickle any object in it. This can run code: use it for your own files only",
            },
        },
    ),
    "prune": _Command(
        _prune,
        "Removes checkpoints, and unfinished ones. The newest undamaged checkpoint and the target of the link `last`"
        " are always kept. A folder that a run has locked is left alone.",
        {
            "folder": _FOLDER,
            "--keep-last": {"type": int, "required": True, "metavar": "N", "help": "keep the N newest"},
            "--keep-every": {
                "type": int,
                "metavar": "K",
                "help": "also keep those whose step is a multiple of K",
            },
            "--dry-run": {**_SWITCH, "help": "only print what would be removed"},
        },
    ),
}


def _parser(name: str) -> _Parser:
    command = COMMANDS[name]
    parser = _Parser(prog=f"polyphase ckpt {name}", description=command.description, allow_abbrev=False)
    for argument, options in command.arguments.items():
        parser.add_argument(argument, **options)
    return parser
