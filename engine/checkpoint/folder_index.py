"""The index of a local folder of checkpoints: what a run must know of each old one, in one file beside them.

The run that saves there appends a line for each checkpoint, so that a later run opens only the checkpoints that have no
line, or another size or time than in their line. Without a valid index all of them are opened.

Anybody who can write to the folder can write lines. So they are believed only of checkpoints that are older, by number
and by time, than one that was opened and from which a run can continue. Whatever is removed, replaced or continued is
opened before.
"""

import json
import logging
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Any

from fsspec.implementations.local import LocalFileSystem
from typing_extensions import TypedDict

from ..foreign import MOST, Count, NotAPlainFileError, Range, problem
from .checked_io import Files, resolve
from .errors import CheckpointError
from .manifest import MANIFEST, CheckpointName, Kind, Manifest, read_manifest
from .run_record import replace_file

__all__ = ["FolderIndex"]

_NAME = ".index.jsonl"
_MOST_BYTES = 1 << 25
"""The lines of some 200,000 checkpoints, which are read in seconds."""
_SPARE_LINES = 64
"""The lines of removed checkpoints that stay until the file is written anew, beside as many as there are others."""

log = logging.getLogger("polyphase.engine")


class _Line(TypedDict):
    name: CheckpointName
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
        folder: local or an fsspec URL, at which nothing is read or written.
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
            if problem(line, _Line, "it") is None:
                self._lines[line["name"]] = line
            self._num_written += 1

    def _read(self) -> bytes:
        if self._root is None:
            return b""
        try:
            return Files(self._root).read(_NAME, most_bytes=_MOST_BYTES)
        except (OSError, NotAPlainFileError):
            return b""

    def manifests(self, paths: Iterable[str]) -> dict[str, Manifest]:
        """Returns the manifests of those of `paths` that have a line of their size and time.

        The newest are opened; the manifests of those that need not be have no files, layout, versions and loggers.
        """
        stamps = [] if self._root is None else [(_stamp(path), path) for path in paths]
        lines = [(stamp, self._lines.get(os.path.basename(path)), path) for stamp, path in stamps]
        fitting = [(line, path) for stamp, line, path in lines if line and stamp == (line["size"], line["mtime_ns"])]
        manifests: dict[str, Manifest] = {}
        opened_at, least = None, MOST
        for line, path in sorted(fitting, key=lambda entry: entry[0]["mtime_ns"], reverse=True):
            if opened_at is not None and line["mtime_ns"] < opened_at and line["sequence"] < least:
                fields: dict[str, Any] = {key: value for key, value in line.items() if key not in ("size", "mtime_ns")}
                manifests[path] = Manifest(epoch=0, layout={}, world_size=1, versions={}, files={}, **fields)
                least = line["sequence"]
                continue
            with suppress(CheckpointError):  # it is opened again by who asks, who says what is wrong with it
                opened = manifests[path] = read_manifest(path)
                least = min(least, opened.sequence)
                if opened_at is None and opened.kind != "weights":
                    opened_at = line["mtime_ns"]
        return manifests

    def write(self, checkpoints: Iterable[tuple[str, Manifest]]) -> None:
        """Writes the index anew, as a new file, with these checkpoints of the folder."""
        lines = [line for path, manifest in checkpoints if (line := self._line(path, manifest)) is not None]
        self._lines = {line["name"]: line for line in lines}
        self._rewrite()

    def add(self, path: str, manifest: Manifest) -> None:
        """Adds a checkpoint of the folder that was just published."""
        line = self._line(path, manifest)
        if line is None:
            return
        self._lines[line["name"]] = line
        if self._root is None:
            return
        if self._num_written > 2 * len(self._lines) + _SPARE_LINES:
            self._rewrite()
            return
        self._num_written += 1
        # The file is this run's, but may have been replaced since: a pipe is not waited for, a link not followed.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with open(os.open(f"{self._root}/{_NAME}", flags, 0o666), "ab") as stream:
                stream.write(_text(line))
        except OSError as error:
            log.debug("the index of %s is not written: %r", self._root, error)

    def lines(self) -> list[_Line]:
        """Returns the lines of all checkpoints; another thread may add one meanwhile."""
        return list(self._lines.values())

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

    def _line(self, path: str, manifest: Manifest) -> _Line | None:
        stamp = (0, 0) if self._root is None else _stamp(path)
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
