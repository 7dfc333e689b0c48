"""A small record of the run that saves into a folder, written before its first checkpoint.

It is stored in the folder, and beside the failure reports in the run's directory, so that a missing folder (unmounted
disk) is detected. It also preserves the global batch of a run that has not saved yet.
"""

import json
import logging
import os
import uuid
import zlib
from contextlib import suppress
from typing import Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem
from typing_extensions import NotRequired, TypedDict

from ..foreign import Count, Few, problem
from .checked_io import Files, absolute, resolve

__all__ = ["RunRecord", "read_record", "replace_file", "write_record"]

_IN_FOLDER = ".run.json"
_OUTSIDE = ".polyphase"
# The record is read whole before it is checked; a larger one is written without loggers and configuration.
_MOST_BYTES = 1 << 22

log = logging.getLogger("polyphase.engine")


class RunRecord(NamedTuple):
    """The record of the last run that saved into a folder."""

    run: str
    lineage: tuple[str, ...]
    has_saved: bool
    """Whether the folder had a checkpoint."""
    step: int
    """The optimizer step of the newest checkpoint in the folder."""
    batches: dict[str, Any]
    """Ranks, layout and accumulation, which determine the global batch."""
    loggers: tuple[dict[str, Any], ...] = ()
    """The run's loggers, with the positions in their logs at its start."""
    config: dict[str, Any] | None = None
    """The engine's arguments that differ from their defaults, for information only; None if unknown."""


class _Batches(TypedDict):
    accumulate_grad_batches: Few
    accumulation_asked: Few
    world_size: Few
    layout: dict[str, Few]


class _Stored(TypedDict):
    run: str
    lineage: list[str]
    has_saved: bool
    step: Count
    batches: _Batches
    loggers: NotRequired[list[dict[str, Any]]]
    config: NotRequired[dict[str, Any] | None]


def read_record(folder: str, root: str) -> RunRecord | None:
    """Reads the record of a folder of checkpoints; None if no valid record exists.

    Args:
        folder: folder of checkpoints, local or a URL.
        root: the run's directory.
    """
    for path in _paths(folder, root):
        try:
            values = json.loads(Files(os.path.dirname(path)).read(os.path.basename(path), most_bytes=_MOST_BYTES))
            if wrong := problem(values, _Stored, "it"):
                raise ValueError(wrong)
            record = RunRecord(**{name: values[name] for name in RunRecord._fields if name in values})
            return record._replace(lineage=tuple(record.lineage), loggers=tuple(record.loggers))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.debug("the record %s is not read: %r", path, error)
    return None


def write_record(folder: str, root: str, record: RunRecord) -> None:
    """Replaces the record of a folder. A failed write is only logged, since training does not need the record."""
    content = _content_of(record)
    if len(content) > _MOST_BYTES:  # it could not be read again
        content = _content_of(record._replace(loggers=(), config=None))
    for path in _paths(folder, root):
        try:
            replace_file(path, content)
        except OSError as error:
            log.debug("the record %s is not written: %r", path, error)


def _content_of(record: RunRecord) -> bytes:
    return json.dumps(record._asdict(), indent=1).encode()


def _paths(folder: str, root: str) -> tuple[str, str]:
    name = f"{zlib.crc32(absolute(folder).encode()):08x}.json"
    return f"{folder.rstrip('/')}/{_IN_FOLDER}", f"{absolute(root).rstrip('/')}/{_OUTSIDE}/{name}"


def replace_file(path: str, content: bytes) -> None:
    """Writes a small file, local or at a URL, in place of the one that has its name; a link is not followed."""
    fs, fs_path = resolve(path)
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(fs_path, content)
        return
    os.makedirs(os.path.dirname(fs_path), exist_ok=True)
    fresh = f"{fs_path}.{uuid.uuid4().hex[:12]}"
    try:
        with open(fresh, "xb") as stream:
            stream.write(content)
        os.replace(fresh, fs_path)
    except OSError:  # the disk is full
        with suppress(OSError):
            os.remove(fresh)
        raise
