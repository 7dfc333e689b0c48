"""Reads and writes the files of a checkpoint on any filesystem; syncs them and records sizes and checksums."""

import errno
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from ..foreign import NotAPlainFileError, is_plain_name, open_plain

__all__ = ["CHUNK_BYTES", "Files", "absolute", "naming", "resolve", "sync"]

CHUNK_BYTES = 1 << 22
"""The bytes that are read and summed at once: a file may be larger than the memory."""
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(::|://)")


class Files:
    """The files of one directory, on any filesystem, with the size and checksum of each that is written through it.

    Args:
        path: path of the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fs, self.path = resolve(path)
        self.url = os.fspath(path)
        """The path as it was given: with the protocol, which `path` does not have."""
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.written: dict[str, tuple[int, int]] = {}

    def join(self, name: str) -> str:
        """The full path of a file."""
        return f"{self.path}/{name}"

    @contextmanager
    def writing(self, name: str, *, notes_sum: bool = True, names: str | None = None) -> Iterator[Any]:
        """Opens a new file for sequential writes; syncs it to the disk on exit. A link of its name is not followed.

        Args:
            name: name of the file.
            notes_sum: record the size and checksum of the file in `written`. The checksum takes a third of a save's
                time, so a file that contains its own checksums does without it.
            names: the path that errors name, if the file will have another one.
        """
        path = self.join(name)
        with (
            naming(path if names is None else names),
            open(path, "xb") if self.is_local else self.fs.open(path, "wb") as stream,
        ):
            checked = _Checked(stream, sums=notes_sum)
            yield checked
            if checked.error is not None:
                raise checked.error
            if self.is_local:
                stream.flush()
                os.fsync(stream.fileno())
        if notes_sum:
            self.written[name] = (checked.num_bytes, checked.crc)

    def reading(self, name: str) -> IO[bytes]:
        """Opens a plain file of this directory for reading.

        Raises:
            NotAPlainFileError: it is a link, a folder, a device or a pipe, or `name` leads elsewhere.
        """
        path = self.join(name)
        if not is_plain_name(name):
            raise NotAPlainFileError(f"{name!r} is not a file name")
        return open_plain(path, os.O_NOFOLLOW) if self.is_local else self.fs.open(path, "rb")

    def read(self, name: str, most_bytes: int | None = None) -> bytes:
        """Reads a whole file.

        Raises:
            NotAPlainFileError: it is a link, a folder, a device or a pipe, or larger than `most_bytes`.
        """
        with self.reading(name) as stream:
            if most_bytes is None:
                return stream.read()
            content = stream.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise NotAPlainFileError(f"{name} has more than {most_bytes} bytes")
        return content

    def check(self, name: str, size: int, crc: int) -> str | None:
        """Checks the size and the checksum of a file; returns a description of the fault, or None."""
        try:
            return self._check(name, size, crc)
        except FileNotFoundError:
            return f"{name} is missing"
        except NotAPlainFileError as error:
            return str(error)
        except OSError as error:
            return f"{name} can't be read: {error.strerror or error}"

    def _check(self, name: str, size: int, crc: int) -> str | None:
        if not self.is_local and not self.fs.exists(self.join(name)):
            return f"{name} is missing"
        with self.reading(name) as stream:
            num_bytes = os.fstat(stream.fileno()).st_size if self.is_local else self.fs.size(self.join(name))
            if num_bytes != size:
                return f"{name} has {num_bytes} bytes instead of {size}"
            seen, left = 0, size
            while chunk := stream.read(min(CHUNK_BYTES, left)):
                seen = zlib.crc32(chunk, seen)
                left -= len(chunk)
        return None if seen == crc else f"the content of {name} was changed (its checksum differs)"


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Adds the path to an `OSError` of the block that has none, such as that of a write to a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, f"{error.strerror}{_REMEDIES.get(error.errno, '')}", path) from error


_REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), " (make room there, or save elsewhere)")


class _Checked:
    """A write-only stream that tracks its size and checksum; it has only the methods that writers of tensors need.

    A write error is stored and later writes are ignored. If it was raised here, torch.save would hide it behind an
    "unexpected position" error.
    """

    def __init__(self, stream: IO[bytes], *, sums: bool) -> None:
        self._stream = stream
        self._sums = sums
        self.num_bytes = 0
        self.crc = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        if self._sums:
            self.crc = zlib.crc32(data, self.crc)
        size = memoryview(data).nbytes
        self.num_bytes += size
        if self.error is None:
            try:
                self._stream.write(data)
            except OSError as error:
                self.error = error
        return size

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        """Does nothing: the code that opened the stream closes it."""


def resolve(path: str | os.PathLike[str]) -> tuple[AbstractFileSystem, str]:
    """Returns the filesystem of a path, and the absolute path in it.

    A local path does not go through fsspec, which would split it at ``::``.
    """
    text = os.fspath(path)
    if text.startswith("file://"):
        text = text.removeprefix("file://")
    elif _PROTOCOL.match(text) and "://" in text:
        return url_to_fs(text)
    return _LOCAL, os.path.abspath(os.path.expanduser(text))


_LOCAL = LocalFileSystem()
"""Has no state; to look up fsspec's own instance takes ten calls, and a path is resolved twenty times in a save."""


def absolute(path: str | os.PathLike[str]) -> str:
    """Returns the absolute form of a local path; URLs stay as they are."""
    fs, fs_path = resolve(path)
    return fs_path if isinstance(fs, LocalFileSystem) else os.fspath(path)


def sync(path: str) -> None:
    """Flushes a local file or folder to the disk with fsync."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
