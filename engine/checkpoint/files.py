"""The files of a checkpoint, on any filesystem: synced, and with their sizes and checksums."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

__all__ = ["Files", "resolve", "sync"]

_CHUNK_BYTES = 1 << 22


class Files:
    """The files of one directory, on any filesystem, with the size and checksum of each that is written through it.

    Args:
        path: of the directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.fs, self.path = resolve(path)
        self.url = os.fspath(path)
        """As it was given: with the protocol, which `path` does not have."""
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self.written: dict[str, tuple[int, int]] = {}

    def join(self, name: str) -> str:
        """The full path of a file."""
        return f"{self.path}/{name}"

    @contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A new file to write to, in order; synced to the disk when it is closed."""
        with self.fs.open(self.join(name), "wb") as stream:
            checked = _Checked(stream)
            yield checked
            if checked.error is not None:
                raise checked.error
            if self.is_local:
                stream.flush()
                os.fsync(stream.fileno())
        self.written[name] = (checked.num_bytes, checked.crc)

    def read(self, name: str) -> bytes:
        """All of a file."""
        return self.fs.cat_file(self.join(name))

    def check(self, name: str, size: int, crc: int) -> str | None:
        """What is wrong with a file; None if nothing is."""
        path = self.join(name)
        if not self.fs.exists(path):
            return f"{name} is missing"
        found = self.fs.size(path)
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
        seen = 0
        with self.fs.open(path, "rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                seen = zlib.crc32(chunk, seen)
        return None if seen == crc else f"the content of {name} was changed (its checksum differs)"


class _Checked:
    """A stream that knows its size and checksum; of what a stream can do only what writers of tensors need.

    An error is kept, and nothing more is written: of one that is raised here torch.save says only that the position is
    unexpected.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.num_bytes = 0
        self.crc = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
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
        """Left to whoever opened it."""


def resolve(path: str | os.PathLike[str]) -> tuple[AbstractFileSystem, str]:
    """The filesystem of a path, and its absolute form there."""
    return url_to_fs(os.fspath(path))


def sync(path: str) -> None:
    """Waits until a local file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
