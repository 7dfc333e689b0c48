"""The tensors of a checkpoint: torch.distributed.checkpoint, written and read through `Files`.

Differs from torch's filesystem storage: sizes and checksums are taken while writing, paths may be fsspec URLs, no path
of the machine is recorded, and `.metadata`, which torch unpickles freely, may name nothing but torch's own metadata
classes.
"""

import contextlib
import io
import os
import pickle
from collections.abc import Generator
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, SavePlan, SavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemBase
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .files import Files
from .store import CheckpointError

__all__ = ["Reader", "Writer", "tensors_in"]

_METADATA = ".metadata"

_CLASSES = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
}


class _Storage(FileSystemBase):
    """What torch's writer and reader ask of a filesystem."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.error: OSError | None = None
        """The first one while writing."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        if mode != "wb":
            with self.files.fs.open(path, mode) as stream:
                yield stream
            return
        try:
            with self.files.writing(_name(path)) as stream:
                yield stream
        except OSError as error:  # for `check`: torch loses what is raised on a thread of its own
            self.error = self.error or error

    def check(self) -> None:
        """Raises what went wrong while writing."""
        if self.error is not None:
            raise self.error

    def concat_path(self, path: Any, suffix: str) -> str:
        return f"{path}/{suffix}"

    def init_path(self, path: Any) -> str:
        return os.fspath(path)

    def rename(self, path: Any, new_path: Any) -> None:
        self.check()
        self.files.fs.mv(path, new_path)
        self.files.written[_name(new_path)] = self.files.written.pop(_name(path))

    def mkdir(self, path: Any) -> None:
        self.files.fs.makedirs(path, exist_ok=True)

    def exists(self, path: Any) -> bool:
        return self.files.fs.exists(path)

    def rm_file(self, path: Any) -> None:
        self.files.fs.rm_file(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class Writer(FileSystemWriter):
    """Writes this rank's shards into `files`."""

    def __init__(self, files: Files) -> None:
        # By two threads: one writes while the other takes the checksum, or waits for the disk. `Files` syncs.
        super().__init__(files.path, thread_count=2, sync_files=False)
        self.fs: Any = _Storage(files)
        self.path: Any = files.path

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raises OSError, of whichever thread's file."""
        written = super().write_data(plan, planner)
        self.fs.check()
        return written

    def storage_meta(self) -> StorageMeta:
        """Without the path."""
        return StorageMeta(save_id=self.save_id)


class Reader(FileSystemReader):
    """Reads shards from `files`."""

    def __init__(self, files: Files) -> None:
        super().__init__(files.path)
        self.fs: Any = _Storage(files)
        self.path: Any = files.path

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What is stored where.

        Raises:
            CheckpointError: the file names anything else than torch's metadata classes.
        """
        return _Unpickler(io.BytesIO(self.fs.files.read(_METADATA))).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES:
            raise CheckpointError(
                f"{_METADATA} of the checkpoint names {module}.{name}, which no checkpoint needs: it is not opened."
            )
        return super().find_class(module, name)


def tensors_in(files: Files) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of each tensor in a checkpoint, by its key."""
    stored = Reader(files).read_metadata().state_dict_metadata
    return {key: about for key, about in stored.items() if isinstance(about, TensorStorageMetadata)}


def _name(path: Any) -> str:
    return os.path.basename(os.fspath(path))
