"""A single-file checkpoint: a file of `torch.save` that Lightning opens, with a manifest among its values.

The file is a zip archive with a checksum for each record. The manifest is a text inside the archive's pickle; it is
searched there, without unpickling and without torch.
"""

import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from .checked_io import resolve

__all__ = ["HEAD", "MANIFEST_KEY", "MOST_TEXT_BYTES", "OURS", "is_archive", "manifest_text", "size_of", "wrong_in"]

OURS = "polyphase"
"""The checkpoint key of Polyphase's own state, beside Lightning's keys."""
MANIFEST_KEY = "manifest"
"""The key of the manifest's text within `OURS`."""

HEAD = b"PK\x03\x04"
"""The first bytes of every non-empty zip archive."""

_SMALL_BYTES = 100
"""The largest size of records with metadata, such as the byte order."""
_BEGIN = b'{\n "name": '
MOST_TEXT_BYTES = 1 << 20
"""The largest size of the manifest's text."""
_PICKLE_MOST_BYTES = 1 << 30
_CHUNK_BYTES = 1 << 22
_DAMAGE = (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError, OSError)


def is_archive(path: str | os.PathLike[str]) -> bool:
    """Whether a plain file begins like a file of `torch.save`."""
    try:
        with _reading(path) as stream:
            return stream is not None and stream.read(len(HEAD)) == HEAD
    except OSError:
        return False


def size_of(path: str | os.PathLike[str]) -> int:
    """Returns the size of a file in bytes."""
    fs, fs_path = resolve(path)
    return int(fs.size(fs_path))


def manifest_text(path: str | os.PathLike[str]) -> bytes | None:
    """Returns the text of a file's manifest; None if the file is not our checkpoint, or that part is damaged."""
    try:
        with _reading(path) as stream:
            if stream is None or stream.read(len(HEAD)) != HEAD:
                return None
            with zipfile.ZipFile(stream) as archive:
                return _text_in(archive)
    except _DAMAGE:
        return None


def wrong_in(path: str | os.PathLike[str], share: tuple[int, int] = (0, 1)) -> list[str]:
    """Lists the faults of a file of `torch.save`; returns an empty list for files of another format.

    Args:
        path: local or a URL.
        share: (r, W) to check every W-th record from the r-th on, so that W ranks share the work.
    """
    try:
        with _reading(path) as stream:
            if stream is None or stream.read(len(HEAD)) != HEAD:
                return []
            return _wrong_records(stream, *share)
    except zipfile.BadZipFile:
        return ["it is truncated, or its list of records was changed"]
    except _DAMAGE as error:
        return [f"it can't be read: {getattr(error, 'strerror', None) or error}"]


def _wrong_records(stream: Any, rank: int, num_ranks: int) -> list[str]:
    wrong = []
    with zipfile.ZipFile(stream) as archive:
        records = archive.infolist()
        small = [info for info in records if info.file_size <= _SMALL_BYTES]
        if small and all(_is_damaged(archive, info) for info in small):
            return []  # written without checksums: torch.serialization.set_crc32_options(False)
        for info in records[rank::num_ranks]:
            if _is_damaged(archive, info):
                wrong.append(f"the content of {info.filename} was changed (its checksum differs)")
    return wrong


def _is_damaged(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bool:
    try:
        with archive.open(info) as record:
            while record.read(_CHUNK_BYTES):
                pass
    except _DAMAGE:
        return True
    return False


def _pickle_in(archive: zipfile.ZipFile) -> zipfile.ZipInfo | None:
    pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
    return pickles[0] if len(pickles) == 1 and pickles[0].file_size <= _PICKLE_MOST_BYTES else None


def _text_in(archive: zipfile.ZipFile) -> bytes | None:
    """Returns the last text that looks like a manifest, since the manifest is written last."""
    info = _pickle_in(archive)
    if info is None:
        return None
    content = archive.read(info)
    position = content.rfind(_BEGIN)
    while position >= 0:
        text = content[position : position + MOST_TEXT_BYTES].decode("latin-1")
        try:
            values, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            values, end = None, 0
        if isinstance(values, dict) and {"crc32", "format", "sequence"} <= values.keys():
            return text[:end].encode("latin-1")
        position = content.rfind(_BEGIN, 0, position)
    return None


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Opens a regular file; yields None for a folder, pipe or device."""
    fs, fs_path = resolve(path)
    is_file = os.path.isfile(fs_path) if isinstance(fs, LocalFileSystem) else fs.isfile(fs_path)
    if not is_file:
        yield None
        return
    with fs.open(fs_path, "rb") as stream:
        yield stream
