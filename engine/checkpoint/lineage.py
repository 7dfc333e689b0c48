"""The run that saved a checkpoint, the runs it continues, and the checkpoints of a folder that are therefore its own.

A run keeps its id where ``resume="auto"`` goes on with it. Of a run that begins with a checkpoint of another's, the ids
of that one and of all before it are its lineage. All of it holds for files and for directories.
"""

import os
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .folder import Entry
from .manifest import Manifest

__all__ = ["Ledger", "RunId", "Snapshot", "begin_run", "free_suffix"]


class RunId(NamedTuple):
    """A run, and those it continues."""

    id: str
    lineage: tuple[str, ...]
    """Ids of the runs that it continues, the oldest first, and its own."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the ids as plain values, for a checkpoint."""
        return {"id": self.id, "lineage": list(self.lineage)}


def begin_run(continues: Mapping[str, Any] | None = None, *, is_same: bool = False) -> RunId:
    """A run that begins now.

    Args:
        continues: what the checkpoint that it begins with says of its run, as `RunId.as_dict` has it; None for none.
        is_same: it is that run, started again.
    """
    before = tuple(continues.get("lineage", ())) if continues else ()
    if is_same and continues and continues.get("id"):
        return RunId(continues["id"], before)
    fresh = uuid.uuid4().hex[:12]
    return RunId(fresh, (*before, fresh))


class Snapshot(NamedTuple):
    """A checkpoint that this run, or one that it continues, has saved to go on from."""

    path: str
    name: str
    step: int
    sequence: int


class Ledger:
    """The snapshots of a run, and the number of its next save, from one look at its folder: it reads no manifest again.

    Kept by rank 0. A save adds to it on a thread of its own.

    Args:
        run: whose folder it is.
        entries: what stands in the folder.
    """

    def __init__(self, run: RunId, entries: Sequence[Entry]) -> None:
        self._run = run
        self._lock = threading.Lock()
        manifests = [(entry.path, entry.manifest) for entry in entries if entry.manifest is not None]
        known = [manifest.sequence for _, manifest in manifests] + [entry.newer_sequence or 0 for entry in entries]
        self._sequence = max(known, default=0)
        self._snapshots: dict[str, Snapshot] = {}
        for path, manifest in manifests:
            self.note_published(path, manifest)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def next_sequence(self) -> int:
        """The number of the next save."""
        with self._lock:
            self._sequence += 1
            return self._sequence

    def note_published(self, path: str, manifest: Manifest) -> None:
        """A checkpoint is there."""
        if manifest.kind == "snapshot" and manifest.run in self._run.lineage:
            with self._lock:
                self._snapshots[path] = Snapshot(path, manifest.name, manifest.step, manifest.sequence)

    def note_removed(self, path: str) -> None:
        """A checkpoint is there no more."""
        with self._lock:
            self._snapshots.pop(path, None)

    def snapshots(self) -> list[Snapshot]:
        """The snapshots that are this run's to remove, the newest first."""
        with self._lock:
            return sorted(self._snapshots.values(), key=lambda found: (found.sequence, found.step), reverse=True)


def free_suffix(run: RunId, entries: Sequence[Entry]) -> str:
    """Returns a suffix for the names of a run's snapshots, so that none is called like one of another run's."""
    others = [
        os.path.basename(entry.path)
        for entry in entries
        if entry.kind == "newer" or (entry.manifest is not None and entry.manifest.run not in run.lineage)
    ]
    number = 0
    while True:
        suffix = f"-v{number}" if number else ""
        if not any(re.fullmatch(rf"step=\d+{suffix}", name) for name in others):
            return suffix
        number += 1
