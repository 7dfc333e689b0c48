"""`MANIFEST.json`: describes a checkpoint, the run that saved it, and the size and checksum of every file.

A single-file checkpoint contains the same text, and its own checksums: see `single_file`.

A manifest is not trusted, because it may come from a stranger or a broken disk: each field has one type and a range,
and file names must not be paths. A checksum detects damage. It does not prove who wrote a file.
"""

import dataclasses
import json
import os
import re
import zipfile
import zlib
from typing import Annotated, Any, Literal, NamedTuple

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import TypedDict

from ..flags import did_you_mean
from ..foreign import Count, NotAPlainFileError, PlainName, Positive, Range, Unlike, open_plain, problem
from .checked_io import Files, resolve
from .errors import CheckpointError, NewerFormatError, damage
from .single_file import is_archive, manifest_text, pickle_in, size_of

__all__ = [
    "FORMAT",
    "MANIFEST",
    "RANKS",
    "README",
    "REST",
    "TENSORS",
    "CheckpointName",
    "Kind",
    "Manifest",
    "PathStatus",
    "check_may_replace",
    "find",
    "is_checkpoint",
    "is_directory",
    "is_file_of_ours",
    "is_reserved",
    "is_set_aside",
    "is_torch_file",
    "manifest_bytes",
    "parse_manifest",
    "path_status",
    "read_manifest",
]

MANIFEST = "MANIFEST.json"
README = "README.md"
REST = "rest.pt"
"""The file of the state that is not sharded (Lightning's dictionary), written by `torch.save`."""
RANKS = "ranks.pt"
"""The file of each rank's own state, in rank order."""
TENSORS = "tensors.json"
"""The index of the tensors, with the file and position of each."""

FORMAT = 2
"""Version of the directory format; other versions are refused."""

_FILES = re.compile(r"(rest|ranks)\.pt|tensors\.json|shard-\d+-\d+\.safetensors")
_RESERVED = re.compile(r"\.(lock|run\.json.*|index\.jsonl.*|polyphase|(saving|replaced|link)-.*|nfs.*)", re.DOTALL)
"""Names that `locks`, `run_record`, `folder_index`, `publish` and NFS use in a folder of checkpoints."""
_SET_ASIDE = re.compile(r"\.damaged-[0-9a-f]{12}$")
"""The end of the names that `publish` gives to damaged checkpoints."""
# A manifest is read whole before anything of it can be trusted; two files of each rank are named.
_MOST_BYTES = 1 << 24
_MOST_TIME_S = 253402300799
"""The end of the year 9999, the last that all systems can print."""

Kind = Literal["snapshot", "checkpoint", "weights"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `MANIFEST.json`."""

    name: str
    """Name of the published directory."""
    step: int
    """Number of optimizer steps done."""
    epoch: int
    time: float
    """Time of the save, in seconds since the Unix epoch."""
    layout: dict[str, int]
    """Sizes of the mesh axes that are larger than one."""
    world_size: int
    versions: dict[str, str]
    files: dict[str, tuple[int, int]]
    """Size in bytes and CRC-32 of each file, by its name."""
    structures: dict[str, int] = dataclasses.field(default_factory=dict)
    """`state_tree.structure_of` `REST` and `RANKS`, or the entries of a single file: callbacks rely on theirs."""
    run: str = ""
    """Id of the run that saved the checkpoint."""
    lineage: tuple[str, ...] = ()
    """Ids of the runs that this run continues, oldest first, then its own id."""
    sequence: int = 0
    """Number of the save, counted over all runs in a folder. The largest is the newest, independent of clocks."""
    kind: Kind = "checkpoint"
    """``"snapshot"``: `Snapshot` may remove it. ``"weights"``: a run can't resume from it."""
    loggers: tuple[dict[str, Any], ...] = ()
    """The positions in the run's logs: see `loggers.continuation`."""
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        """The total size of all files."""
        return sum(size for size, _ in self.files.values())

    @property
    def order(self) -> tuple[int, int, float]:
        """The sort key of checkpoints; a larger key is newer."""
        return self.sequence, self.step, self.time

    def missing_files(self) -> list[str]:
        """Returns the required files of a directory that this manifest does not list."""
        return [name for name in (REST, RANKS, TENSORS) if name not in self.files]


def is_file_of_ours(name: str) -> bool:
    """Whether a save uses this file name; False for the manifest."""
    return name == README or _FILES.fullmatch(name) is not None


def is_reserved(name: str) -> bool:
    """Whether an entry of a folder of checkpoints is no checkpoint, by its name alone: it is not looked into."""
    return _RESERVED.fullmatch(name) is not None


def is_set_aside(name: str) -> bool:
    """Whether a name is that of a damaged checkpoint which was moved aside: no run opens, counts or removes it."""
    return _SET_ASIDE.search(name) is not None


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is one of our checkpoints: a published directory, or a file."""
    return is_directory(path) or manifest_text(path) is not None


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a published directory."""
    fs, folder = resolve(path)
    return fs.exists(f"{folder}/{MANIFEST}")


def manifest_bytes(manifest: Manifest, most_bytes: int = _MOST_BYTES) -> bytes:
    """Returns the content of `MANIFEST.json`, which `parse_manifest` has accepted.

    Raises:
        CheckpointError: it has a name or a number that could not be opened again, or more than `most_bytes`.
    """
    fields: dict[str, Any] = {**vars(manifest)}
    fields["crc32"] = _crc_of(fields)
    # An indentation of each part would be written by json's encoder in Python.
    lines = ",\n ".join([f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()])
    content = f"{{\n {lines}\n}}".encode()
    try:
        if len(content) > most_bytes:
            raise CheckpointError(f"{MANIFEST} would have {len(content)} bytes, more than {most_bytes}")
        parse_manifest(content, manifest.name)
    except CheckpointError as refused:
        raise CheckpointError(f"{manifest.name} is not saved, since it could not be opened again: {refused}") from None
    return content


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Reads the manifest of a checkpoint, but not the other files; `check_files` verifies those.

    Raises:
        CheckpointError: the manifest is missing or damaged, or a newer version wrote it.
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


def find(folder: str | os.PathLike[str]) -> list[tuple[str, Manifest]]:
    """Returns the checkpoints in a folder that have a valid manifest, newest first; reads no other files."""
    fs, root = resolve(folder)
    if not fs.isdir(root):
        return []
    fs.invalidate_cache(root)
    checkpoints = []
    for entry in fs.ls(root, detail=False):
        name = os.path.basename(entry.rstrip("/"))
        if is_reserved(name) or is_set_aside(name) or (isinstance(fs, LocalFileSystem) and os.path.islink(entry)):
            continue  # the link `last` points at a checkpoint that is listed itself
        path = entry if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(entry)
        try:
            checkpoints.append((path, read_manifest(path)))
        except CheckpointError:
            continue
    return sorted(checkpoints, key=lambda checkpoint: checkpoint[1].order, reverse=True)


def parse_manifest(content: bytes, path: str | os.PathLike[str]) -> Manifest:
    """Validates the bytes of a manifest and parses them.

    Args:
        content: the bytes of the file.
        path: the checkpoint, for error messages.

    Raises:
        CheckpointError: the content is damaged, or a newer version wrote it.
    """
    try:
        fields = json.loads(content, parse_constant=_refuse_constant)
        crc = fields.pop("crc32")
        if crc != _crc_of(fields):
            raise ValueError("its checksum differs")
        if type(fields["format"]) is int and fields["format"] > FORMAT:
            newer = fields["versions"].get("polyphase") if isinstance(fields.get("versions"), dict) else None
            refusal = NewerFormatError(
                f"The checkpoint {path} has format {fields['format']}, this version of Polyphase opens formats up to"
                f" {FORMAT}: install Polyphase {newer if isinstance(newer, str) else 'of a newer version'} or newer."
            )
            refusal.sequence = fields["sequence"] if type(fields.get("sequence")) is int else None
            raise refusal
        return _manifest(fields)
    except CheckpointError:
        raise
    except RecursionError:
        wrong: Any = "it is nested too deeply"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wrong = error
    raise damage(path, f"{MANIFEST} can't be trusted ({wrong})")


def _manifest(fields: dict[str, Any]) -> Manifest:
    if fields["format"] != FORMAT:
        raise ValueError(f"its format is {fields['format']}, which no release has written")
    if wrong := problem(fields, _Fields, "it"):
        raise ValueError(wrong)
    fields["lineage"], fields["loggers"] = tuple(fields["lineage"]), tuple(fields["loggers"])
    fields["files"] = {name: (size, crc) for name, (size, crc) in fields["files"].items()}
    return Manifest(**fields)


CheckpointName = Annotated[PlainName, Unlike(_RESERVED, "a name that checkpoints don't have")]
"""The type of a published checkpoint's name, which is not that of a save's leftover."""


class _Fields(TypedDict):
    name: CheckpointName
    step: Count
    epoch: Count
    time: Annotated[int | float, Range(0, _MOST_TIME_S)]
    layout: dict[str, Positive]
    world_size: Positive
    versions: dict[str, str]
    files: dict[PlainName, list[Count]]
    structures: dict[str, Count]
    run: str
    lineage: list[str]
    sequence: Count
    kind: Kind
    loggers: list[dict[str, Any]]
    format: int


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _crc_of(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _nearest(path: str) -> str:
    """Suggests the checkpoint with the most similar name beside a missing path, and the newest one."""
    parent, name = os.path.split(path)
    beside = [os.path.basename(checkpoint) for checkpoint, _ in find(parent)]
    if not beside:
        return ""
    folder = parent.removeprefix("file://")
    return f"{did_you_mean(name, beside, str)} The newest one in {folder} is {beside[0]}."


# Decides whether a path is certainly one of our checkpoints: nothing else is ever replaced or removed.
#
# A file is ours if it is a checkpoint in Lightning's format. A directory is ours if its manifest is valid and it
# contains only files that the manifest lists.

_LIGHTNING = b"pytorch-lightning_version"
"""A key of every Lightning checkpoint; the pickle contains it as plain text."""
_MOST_NAMED = 3
"""The largest number of foreign files that a message names."""


class PathStatus(NamedTuple):
    """The kind of the file or directory at a path, and whether it is ours."""

    kind: Literal["free", "ours", "damaged", "foreign"]
    """Damaged: a directory with only our files, but no valid manifest; a save of that name moves it aside."""
    about: str = ""
    """A description, if it is foreign."""
    extras: tuple[str, ...] = ()
    """Names of foreign entries in a directory."""


def path_status(path: str | os.PathLike[str]) -> PathStatus:
    """Returns whether `path` (local or a URL) is free, ours or foreign; unpickles and changes nothing."""
    try:
        return _status(path)
    except PermissionError as error:
        return PathStatus("foreign", f"not readable ({error.strerror})")


def _status(path: str | os.PathLike[str]) -> PathStatus:
    fs, fs_path = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        return _of_folder(fs, fs_path, path) if fs.isdir(fs_path) else _of_remote_file(fs, fs_path)
    if os.path.islink(fs_path):
        target = os.path.realpath(fs_path)
        status = path_status(target)
        if status.kind == "foreign":
            return PathStatus("foreign", f"a link to {target}, which is {status.about}")
        return PathStatus("ours")
    if os.path.isdir(fs_path):
        return _of_folder(fs, fs_path, path)
    if not os.path.lexists(fs_path):
        return PathStatus("free")
    if os.path.isfile(fs_path) and not os.path.getsize(fs_path):
        return PathStatus("free")  # an empty file has nothing to lose
    return PathStatus("ours") if _is_checkpoint_file(fs_path) else PathStatus("foreign", "a file that is no checkpoint")


def check_may_replace(path: str | os.PathLike[str]) -> PathStatus:
    """Raises an error if saving as `path` would replace something that is not certainly one of our checkpoints.

    Returns:
        The status of `path`, which is not foreign.

    Raises:
        CheckpointError: describes the file or directory at `path`.
    """
    status = path_status(path)
    if status.kind == "foreign":
        raise CheckpointError(
            f"{path} is {status.about}: nothing is saved there, because that would delete it. Choose another name, or"
            " move it away."
        )
    return status


def _of_folder(fs: AbstractFileSystem, fs_path: str, path: str | os.PathLike[str]) -> PathStatus:
    fs.invalidate_cache(fs_path)
    entries = fs.ls(fs_path, detail=True)
    kinds = {os.path.basename(entry["name"].rstrip("/")): _kind_of(entry) for entry in entries}
    if not kinds:
        return PathStatus("free")
    odd = [name for name, kind in kinds.items() if kind != "file"]
    try:
        # A manifest that lists other people's files does not make them ours.
        listed = {MANIFEST, README, *filter(is_file_of_ours, read_manifest(path).files)}
        extras = tuple(sorted({name for name in kinds if name not in listed} | {*odd}))
        kind: Literal["ours", "damaged"] = "ours"
    except CheckpointError:
        extras = tuple(sorted({name for name in kinds if name != MANIFEST and not is_file_of_ours(name)}))
        kind = "damaged"
    if not extras:
        return PathStatus(kind)
    num_more = len(extras) - _MOST_NAMED
    names = ", ".join(extras[:_MOST_NAMED]) + (f" and {num_more} more" if num_more > 0 else "")
    noun = "a checkpoint" if kind == "ours" else "a folder"
    return PathStatus("foreign", f"{noun} that holds {names}, which no checkpoint has", extras)


def _kind_of(entry: dict[str, str]) -> str:
    return "link" if entry.get("islink") else entry["type"]


def _of_remote_file(fs: AbstractFileSystem, fs_path: str) -> PathStatus:
    if not fs.exists(fs_path):
        return PathStatus("free")
    with fs.open(fs_path, "rb") as stream:
        is_ours = _has_lightnings_key(stream)
    return PathStatus("ours") if is_ours else PathStatus("foreign", "a file that is no checkpoint")


def _is_checkpoint_file(fs_path: str) -> bool:
    if not os.path.isfile(fs_path):
        return False
    with open_plain(fs_path) as stream:
        return _has_lightnings_key(stream)


def is_torch_file(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is a local file of `torch.save`, with any content."""
    if not os.path.isfile(path) or os.path.islink(path):
        return False
    with open_plain(os.fspath(path)) as stream:
        return _holds(stream, b"")


def _has_lightnings_key(stream: object) -> bool:
    return _holds(stream, _LIGHTNING)


def _holds(stream: object, text: bytes) -> bool:
    """Whether a stream is a file of `torch.save` whose pickle contains `text`; the pickle is not loaded."""
    try:
        return text in pickle_in(stream)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError):
        return False
