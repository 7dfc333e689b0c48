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

from ..foreign import NotAPlainFileError, open_plain
from .checked_io import CHUNK_BYTES, resolve

__all__ = [
    "HEAD",
    "MANIFEST_KEY",
    "MOST_TEXT_BYTES",
    "OURS",
    "SUFFIXES",
    "check_archive",
    "is_archive",
    "manifest_text",
    "pickle_in",
    "size_of",
    "wrong_in",
]

OURS = "polyphase"
"""The checkpoint key of Polyphase's own state, beside Lightning's keys."""
MANIFEST_KEY = "manifest"
"""The key of the manifest's text within `OURS`."""

HEAD = b"PK\x03\x04"
"""The first bytes of every non-empty zip archive."""

_SMALL_BYTES = 100
"""The largest size of records with metadata, such as the byte order."""
_BEGIN = b'{\n "name": '
_TEXT = b"X"
"""The pickle's instruction for a text: its length, 4 bytes, and its bytes follow."""
MOST_TEXT_BYTES = 1 << 20
"""The largest size of the manifest's text."""
# The pickle is read whole, to search the manifest in it; the tensors are other records of the archive.
_PICKLE_MOST_BYTES = 1 << 30
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
            return _text_in(pickle_in(stream))
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
    check_archive(stream)
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
            while record.read(CHUNK_BYTES):
                pass
    except _DAMAGE:
        return True
    return False


def check_archive(stream: Any) -> zipfile.ZipInfo:
    """Checks that the records of a file of `torch.save` are no larger than the file; returns the record of the pickle.

    Such files are not compressed. A compressed one could fill the memory from a few bytes.

    Raises:
        ValueError: says what is wrong.
        zipfile.BadZipFile: it is no such file.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    with zipfile.ZipFile(stream) as archive:
        records, start = archive.infolist(), archive.start_dir
    is_torchs = _is_torchs_list(stream, start)
    stream.seek(0)
    if not is_torchs:
        raise ValueError("it has two lists of records")
    if sum(info.file_size for info in records) > size:
        raise ValueError("its records are larger than the file")
    pickles = [info for info in records if info.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _PICKLE_MOST_BYTES:
        raise ValueError("it has not one pickle, of at most a gibibyte")
    return pickles[0]


def _is_torchs_list(stream: Any, start: int) -> bool:
    """Whether torch reads the same list of records as `zipfile`, which has found it at `start`.

    `zipfile` reads what lies before the end of the list, and torch goes where that end says.
    """
    stream.seek(start)
    content = stream.read()
    end = content.rfind(b"PK\x05\x06")
    place = content[end + 16 : end + 20]
    if content[end - 20 : end - 16] == b"PK\x06\x07":  # a second end, for large files: its position, and then it
        if int.from_bytes(content[end - 12 : end - 4], "little") != start + end - 76:
            return False
        place = content[end - 28 : end - 20]
    return int.from_bytes(place, "little") == start


def pickle_in(stream: Any) -> bytes:
    """Returns the pickle of a file of `torch.save`; raises the errors of `check_archive`."""
    info = check_archive(stream)
    del info.CRC  # it is checked elsewhere, and a file may have been written without
    with zipfile.ZipFile(stream) as archive:
        return archive.read(info)


def _text_in(content: bytes) -> bytes | None:
    """Returns the last text in a pickle that looks like a manifest, since the manifest is written last.

    Each text has its length before it, so none of its bytes is looked at twice.
    """
    end = len(content)
    while (position := content.rfind(_BEGIN, 0, end)) >= 0:
        size = int.from_bytes(content[max(0, position - 4) : position], "little")
        text = content[position : position + size]
        if content[position - 5 : position - 4] == _TEXT and size <= MOST_TEXT_BYTES and position + size <= end:
            try:
                values = json.loads(text)
            except (ValueError, RecursionError):
                values = None
            if isinstance(values, dict) and {"crc32", "format", "sequence"} <= values.keys():
                return text
        end = position
    return None


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Opens a regular file; yields None for a folder, pipe or device."""
    fs, fs_path = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        if not fs.isfile(fs_path):
            yield None
            return
        with fs.open(fs_path, "rb") as stream:
            yield stream
        return
    try:
        stream = open_plain(fs_path)
    except NotAPlainFileError:
        yield None
        return
    with stream:
        yield stream


SUFFIXES = {
    ".ckpt": "a Lightning checkpoint, for ckpt_path= and load_from_checkpoint",
    ".safetensors": "the weights alone",
    ".pt": "the weights alone, for torch.load",
}
"""Describes each format by its file extension."""
