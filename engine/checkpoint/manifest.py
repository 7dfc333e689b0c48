"""`MANIFEST.json`: what a checkpoint is, which run saved it, and the size and checksum of every file.

One that is a single file has the same text within, and checksums of its own: see `single_file`.

It is read with suspicion, for it may come from a stranger, or be what a broken disk has left: every field has one type
and a range, and a name is a name, never a path. A checksum finds damage. It proves nothing about who wrote a file.
"""

import dataclasses
import json
import math
import os
import re
import zlib
from typing import Any, Literal, get_args

from ..flags import did_you_mean
from .files import Files, NotAPlainFileError, is_plain_name, resolve
from .single_file import is_archive, manifest_text, size_of

__all__ = [
    "FORMAT",
    "KINDS",
    "MANIFEST",
    "METADATA",
    "RANKS",
    "README",
    "REST",
    "TENSORS",
    "CheckpointError",
    "Manifest",
    "NewerFormatError",
    "is_checkpoint",
    "is_directory",
    "is_file_of_ours",
    "manifest_bytes",
    "parse_manifest",
    "read_manifest",
]

MANIFEST = "MANIFEST.json"
README = "README.md"
REST = "rest.pt"
"""The file of the state that is not sharded: Lightning's own, by `torch.save`."""
RANKS = "ranks.pt"
"""The file of each rank's own state, in rank order."""
TENSORS = "tensors.json"
"""The index of the tensors: the file and position of each; since format 2."""
METADATA = ".metadata"
"""The same in format 1: a pickle of `torch.distributed.checkpoint`."""

FORMAT = 2
"""Version of the directory's format; a larger one is refused. 1 had pickles in place of `TENSORS`."""

_FILES = re.compile(r"(rest|ranks)\.pt|tensors\.json|shard-\d+-\d+\.safetensors|__\d+_\d+\.distcp|\.metadata(\.tmp)?")
_RESERVED = re.compile(r"\.(lock|run\.json|polyphase|(saving|replaced)-.*)", re.DOTALL)
"""Names that mean something else in a folder of checkpoints: those of `locks`, `run_record` and `store`."""
_MOST_BYTES = 1 << 26
_CRC_MOST = (1 << 32) - 1
_COUNT_MOST = (1 << 62) - 1

Kind = Literal["snapshot", "checkpoint", "weights"]
KINDS: tuple[str, ...] = get_args(Kind)


class CheckpointError(ValueError):
    """A checkpoint can't be opened: it is none, or damaged, or does not fit; the message says which."""


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a newer version, which has to be installed to open it."""

    sequence: int | None = None
    """The number of the save, as in `Manifest`; None if the checkpoint does not say."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `MANIFEST.json`."""

    name: str
    """Name under which the directory was published."""
    step: int
    """Optimizer steps done."""
    epoch: int
    time: float
    """Seconds since the epoch of UNIX."""
    layout: dict[str, int]
    """Sizes of the mesh axes larger than one."""
    world_size: int
    versions: dict[str, str]
    files: dict[str, tuple[int, int]]
    """Size in bytes and CRC-32 of each file, by its name."""
    run: str = ""
    """Id of the run that saved it; empty in format 1."""
    lineage: tuple[str, ...] = ()
    """Ids of the runs which that run continues, the oldest first, and its own."""
    sequence: int = 0
    """Counts the saves into a folder, over all runs: the largest is the newest, whatever the clocks say."""
    kind: Kind = "checkpoint"
    """``"snapshot"``: `Snapshot` may remove it. ``"weights"``: a run can't go on from it."""
    loggers: tuple[dict[str, Any], ...] = ()
    """The positions of the logs of the run: see `loop.log_continuation`."""
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """The size of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def order(self) -> tuple[int, int, float]:
        """The key to sort checkpoints by; the larger one is newer."""
        return self.sequence, self.step, self.time

    def missing_files(self) -> list[str]:
        """The files that every directory has, but this manifest does not list."""
        return [name for name in (REST, RANKS, TENSORS if self.format > 1 else METADATA) if name not in self.files]


def is_file_of_ours(name: str) -> bool:
    """Whether a save gives this name to a file, other than the manifest."""
    return name == README or _FILES.fullmatch(name) is not None


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a checkpoint of ours: a directory that was published, or a file."""
    return is_directory(path) or manifest_text(path) is not None


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a directory that was published."""
    fs, folder = resolve(path)
    return fs.exists(f"{folder}/{MANIFEST}")


def manifest_bytes(manifest: Manifest) -> bytes:
    """The content of the file."""
    content = dataclasses.asdict(manifest)
    content["crc32"] = _crc_of(content)
    return json.dumps(content, indent=1).encode()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a checkpoint; its files are not looked at, see `check_files`.

    Raises:
        CheckpointError: there is none, it is damaged, or it was written by a newer version.
    """
    fs, folder = resolve(path)
    if not fs.exists(folder):
        raise CheckpointError(f"There is no checkpoint at {path}.{_nearest(fs.unstrip_protocol(folder))}")
    if fs.isfile(folder):
        return _of_file(path, folder.rsplit("/", 1)[-1])
    if not fs.exists(f"{folder}/{MANIFEST}"):
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {MANIFEST}, so it was never finished or is something else."
        )
    try:
        content = Files(path).read(MANIFEST, most_bytes=_MOST_BYTES)
    except (OSError, NotAPlainFileError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"The checkpoint {path} is damaged: {MANIFEST} can't be read ({reason}).") from None
    return parse_manifest(content, path)


def _of_file(path: str | os.PathLike[str], name: str) -> Manifest:
    text = manifest_text(path)
    if text is not None:
        return dataclasses.replace(parse_manifest(text, path), files={name: (size_of(path), 0)})
    if not is_archive(path):
        raise CheckpointError(f"{path} is no checkpoint: it is no file of torch.save.")
    raise CheckpointError(f"{path} is no checkpoint of Polyphase's, or damaged: it has no manifest.")


def parse_manifest(content: bytes, path: str | os.PathLike[str]) -> Manifest:
    """Checks the bytes of a manifest and returns their content.

    Args:
        content: of the file.
        path: of the checkpoint, for messages.

    Raises:
        CheckpointError: they are damaged, or from a newer version.
    """
    try:
        said = json.loads(content, parse_constant=_refuse_constant)
        crc = said.pop("crc32")
        if crc != _crc_of(said):
            raise ValueError("its checksum differs")
        if _count(said, "format") > FORMAT:
            newer = said["versions"].get("polyphase") if isinstance(said.get("versions"), dict) else None
            refusal = NewerFormatError(
                f"The checkpoint {path} has format {said['format']}, this version of Polyphase opens formats up to"
                f" {FORMAT}: install Polyphase {newer if isinstance(newer, str) else 'of a newer version'} or newer."
            )
            refusal.sequence = said["sequence"] if type(said.get("sequence")) is int else None
            raise refusal
        return _manifest(said)
    except CheckpointError:
        raise
    except RecursionError:
        damage: Any = "it is nested too deep"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        damage = error
    raise CheckpointError(f"The checkpoint {path} is damaged: {MANIFEST} can't be trusted ({damage}).")


def _manifest(said: dict[str, Any]) -> Manifest:
    files = _field(said, "files", dict)
    for name, entry in files.items():
        if not is_plain_name(name):
            raise ValueError(f"a file is called {name!r}, which is no name within the folder")
        if type(entry) is not list or len(entry) != 2:
            raise ValueError(f"{name} has no size and checksum")
        if not all(type(n) is int and 0 <= n <= most for n, most in zip(entry, (_COUNT_MOST, _CRC_MOST), strict=True)):
            raise ValueError(f"{name} has an impossible size or checksum")
    if not is_plain_name(_field(said, "name", str)) or _RESERVED.fullmatch(said["name"]):
        raise ValueError(f"its name is {said['name']!r}, which is no name within a folder")
    if not math.isfinite(said["time"] if type(said["time"]) is int else _field(said, "time", float)):
        raise ValueError("its time is not finite")
    for field in ("step", "epoch"):
        _count(said, field)
    if _count(said, "world_size") < 1:
        raise ValueError("world_size is 0")
    if not all(type(size) is int and 0 < size <= _COUNT_MOST for size in _field(said, "layout", dict).values()):
        raise ValueError("layout has a size that is no number above 0")
    if not all(type(version) is str for version in _field(said, "versions", dict).values()):
        raise ValueError("versions has one that is no text")
    if said["format"] > 1:
        _count(said, "sequence")
        _field(said, "run", str)
        if not all(type(run) is str for run in _field(said, "lineage", list)):
            raise ValueError("lineage has an id that is no text")
        if said["kind"] not in KINDS:
            raise ValueError(f"kind is {said['kind']!r}")
        said["lineage"] = tuple(said["lineage"])
        if not all(type(logger) is dict for logger in _field({"loggers": [], **said}, "loggers", list)):
            raise ValueError("loggers has one that is no dictionary")
        said["loggers"] = tuple(said.get("loggers", ()))
    said["files"] = {name: (size, crc) for name, (size, crc) in files.items()}
    return Manifest(**said)


def _field(said: dict[str, Any], name: str, expected: type) -> Any:
    if type(said[name]) is not expected:
        raise ValueError(f"{name} is {type(said[name]).__name__} in place of {expected.__name__}")
    return said[name]


def _count(said: dict[str, Any], name: str) -> int:
    if not 0 <= _field(said, name, int) <= _COUNT_MOST:
        raise ValueError(f"{name} is {said[name]}")
    return said[name]


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _crc_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _nearest(path: str) -> str:
    """Names the checkpoint beside a path that does not exist which is called most like it, and the newest one."""
    from .store import find  # which needs this module

    parent, name = os.path.split(path)
    beside = [os.path.basename(found) for found, _ in find(parent)]
    if not beside:
        return ""
    folder = parent.removeprefix("file://")
    return f"{did_you_mean(name, beside, str)} The newest one in {folder} is {beside[0]}."
