"""Run ids and lineage: which run saved a checkpoint, which runs it continues, and which snapshots it may remove.

A run that ``resume="auto"`` continues keeps its id. A run that starts from another run's checkpoint gets a new id; its
lineage lists the ids of the earlier runs. This holds for checkpoints that are files and for directories.
"""

import os
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..typed import MOST
from .manifest import CheckpointError, Manifest
from .retention import Entry

__all__ = ["Ledger", "RunId", "Snapshot", "begin_run", "free_suffix"]

_MOST_SAVES = 1 << 32
"""The number of saves for which a run needs numbers: one in each second of a century."""


class RunId(NamedTuple):
    """The id of a run, and the ids of the runs it continues."""

    id: str
    lineage: tuple[str, ...]
    """Ids of the runs that this run continues, oldest first, then its own id."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the ids as plain values, for a checkpoint."""
        return {"id": self.id, "lineage": list(self.lineage)}


def begin_run(continues: Mapping[str, Any] | None = None, *, is_same: bool = False) -> RunId:
    """Returns the id of a run that begins now.

    Args:
        continues: the run id in the opened checkpoint, as `RunId.as_dict` returns it; None without a checkpoint.
        is_same: the run is a restart of the saved run, and keeps its id.
    """
    before = tuple(continues.get("lineage", ())) if continues else ()
    if is_same and continues and continues.get("id"):
        return RunId(continues["id"], before)
    fresh = uuid.uuid4().hex[:12]
    return RunId(fresh, (*before, fresh))


class Snapshot(NamedTuple):
    """A checkpoint for resuming, saved by this run or by a run that it continues."""

    path: str
    name: str
    step: int
    sequence: int


class Ledger:
    """Tracks a run's snapshots and the number of its next save, so that manifests are read only once.

    Only rank 0 has a ledger. The thread that saves adds to it.

    Args:
        run: the run that saves into the folder.
        entries: the entries of the folder.

    Raises:
        CheckpointError: the number of an entry is so large that those of later saves could not be opened.
    """

    def __init__(self, run: RunId, entries: Sequence[Entry]) -> None:
        self._run = run
        self._lock = threading.Lock()
        manifests = [(entry.path, entry.manifest) for entry in entries if entry.manifest is not None]
        sequences = {entry.path: entry.newer_sequence or 0 for entry in entries}
        sequences.update((path, manifest.sequence) for path, manifest in manifests)
        self._sequence = max(sequences.values(), default=0)
        if self._sequence > MOST - _MOST_SAVES:
            newest = max(sequences, key=lambda path: sequences[path])
            raise CheckpointError(
                f"{newest} claims to be save number {self._sequence} in its folder, which leaves no numbers for this"
                " run: no run has saved it so. Move it to another folder."
            )
        self._snapshots: dict[str, Snapshot] = {}
        for path, manifest in manifests:
            self.note_published(path, manifest)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def next_sequence(self) -> int:
        """Returns the number of the next save."""
        with self._lock:
            self._sequence += 1
            return self._sequence

    def note_published(self, path: str, manifest: Manifest) -> None:
        """Adds a published checkpoint, if it is a snapshot of this run's lineage."""
        if manifest.kind == "snapshot" and manifest.run in self._run.lineage:
            with self._lock:
                self._snapshots[path] = Snapshot(path, manifest.name, manifest.step, manifest.sequence)

    def note_removed(self, path: str) -> None:
        """Forgets a removed checkpoint."""
        with self._lock:
            self._snapshots.pop(path, None)

    def snapshots(self) -> list[Snapshot]:
        """Returns the snapshots that this run may remove, newest first."""
        with self._lock:
            return sorted(
                self._snapshots.values(), key=lambda snapshot: (snapshot.sequence, snapshot.step), reverse=True
            )


def free_suffix(run: RunId, entries: Sequence[Entry]) -> str:
    """Returns a suffix for the names of a run's snapshots that no other run's snapshots have."""
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
