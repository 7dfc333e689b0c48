"""The index of a local folder of checkpoints: what a run must know of each old one, in one file beside them.

The run that saves there appends a line for each checkpoint, so that a later run opens only the checkpoints that have no
line, or another size or time than in their line. Without a valid index all of them are opened. The index says which
checkpoint is the newest; the one that a run continues from is opened and checked like any other.
"""

import json
import logging
import os
import stat
from collections.abc import Iterable
from typing import Annotated, Any

from fsspec.implementations.local import LocalFileSystem
from typing_extensions import TypedDict

from ..foreign import Count, Range, problem
from .checked_io import Files, NotAPlainFileError, is_plain_name, resolve
from .manifest import MANIFEST, Kind, Manifest
from .run_record import replace_file

__all__ = ["FolderIndex"]

_NAME = ".index.jsonl"
_MOST_BYTES = 1 << 28
_SPARE_LINES = 64
"""The lines of removed checkpoints that stay until the file is written anew, beside as many as there are others."""

log = logging.getLogger("polyphase.engine")


class _Line(TypedDict):
    name: str
    size: Count
    mtime_ns: Annotated[int, Range(0)]
    step: Count
    time: Annotated[int | float, Range(0)]
    sequence: Count
    run: str
    kind: Kind


class FolderIndex:
    """The index of one folder; only rank 0 has one.

    Args:
        folder: local or an fsspec URL, for which nothing is read or written.
    """

    def __init__(self, folder: str) -> None:
        fs, root = resolve(folder)
        self._root = root if isinstance(fs, LocalFileSystem) else None
        self._lines: dict[str, _Line] = {}
        self._num_written = 0
        for text in self._read().splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue  # its writer was killed
            if problem(line, _Line, "it") is None and is_plain_name(line["name"]):
                self._lines[line["name"]] = line
            self._num_written += 1

    def _read(self) -> bytes:
        if self._root is None:
            return b""
        try:
            return Files(self._root).read(_NAME, most_bytes=_MOST_BYTES)
        except (OSError, NotAPlainFileError):
            return b""

    def manifest(self, path: str) -> Manifest | None:
        """Returns a checkpoint's manifest without its files, layout and versions; None if it must be opened."""
        line = self._lines.get(os.path.basename(path))
        if line is None or self._root is None or _stamp(path) != (line["size"], line["mtime_ns"]):
            return None
        fields: dict[str, Any] = {name: value for name, value in line.items() if name not in ("size", "mtime_ns")}
        return Manifest(epoch=0, layout={}, world_size=1, versions={}, files={}, **fields)

    def write(self, checkpoints: Iterable[tuple[str, Manifest]]) -> None:
        """Writes the index anew, with these checkpoints of the folder, unless it has just their lines."""
        lines = [line for path, manifest in checkpoints if (line := _line(path, manifest)) is not None]
        by_name = {line["name"]: line for line in lines}
        if by_name != self._lines or self._num_written > len(by_name):
            self._lines = by_name
            self._rewrite()

    def add(self, path: str, manifest: Manifest) -> None:
        """Adds a checkpoint of the folder that was just published."""
        line = None if self._root is None else _line(path, manifest)
        if line is None:
            return
        self._lines[line["name"]] = line
        if self._num_written > 2 * len(self._lines) + _SPARE_LINES:
            self._rewrite()
            return
        self._num_written += 1
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        try:
            with open(os.open(f"{self._root}/{_NAME}", flags, 0o666), "ab") as stream:
                stream.write(_text(line))
        except OSError as error:
            log.debug("the index of %s is not written: %r", self._root, error)

    def remove(self, path: str) -> None:
        """Forgets a removed checkpoint; its line stays until the file is written anew."""
        self._lines.pop(os.path.basename(path), None)

    def _rewrite(self) -> None:
        if self._root is None:
            return
        self._num_written = len(self._lines)
        try:
            replace_file(f"{self._root}/{_NAME}", b"".join(map(_text, self._lines.values())))
        except OSError as error:
            log.debug("the index of %s is not written: %r", self._root, error)


def _line(path: str, manifest: Manifest) -> _Line | None:
    stamp = _stamp(path)
    if stamp is None:
        return None
    return {
        "name": os.path.basename(path),
        "size": stamp[0],
        "mtime_ns": stamp[1],
        "step": manifest.step,
        "time": manifest.time,
        "sequence": manifest.sequence,
        "run": manifest.run,
        "kind": manifest.kind,
    }


def _text(line: _Line) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _stamp(path: str) -> tuple[int, int] | None:
    """Returns size and time of change of a file, or of a directory's manifest; None if there is neither."""
    for place in (f"{path}/{MANIFEST}", path):
        try:
            status = os.lstat(place)
        except OSError:
            continue
        if stat.S_ISREG(status.st_mode):
            return status.st_size, status.st_mtime_ns
    return None
