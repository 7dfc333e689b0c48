"""The identity of a run: its id, the run that it continues, and the checkpoints from which it can continue.

Rank 0 reads all of it from the folder of snapshots, once, at the start of a run.
"""

import os
import re
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from ..checkpoint import AsyncCheckpointer
from ..checkpoint.checked_io import resolve
from ..checkpoint.errors import CheckpointError
from ..checkpoint.folder_index import FolderIndex
from ..checkpoint.manifest import Manifest, path_status, read_manifest
from ..checkpoint.publish import set_aside
from ..checkpoint.retention import Entry, list_entries
from ..checkpoint.run_record import RunRecord, read_record, write_record
from ..foreign import MOST, for_terminal

__all__ = ["AUTO", "FRESH", "RunHistory", "Seen", "check_may_start_afresh", "forget_others", "others_of"]

AUTO = "auto"
"""Value in place of a path: the newest checkpoint of the newest run."""
FRESH = "fresh"
"""Value in place of a path: no checkpoint; restarts of the same job still continue the run."""
_START_AFRESH = f"To start afresh nevertheless, pass resume={FRESH!r}: nothing is deleted."


class Seen(NamedTuple):
    """The content of the folder of snapshots."""

    candidates: list[str]
    """Paths of the checkpoints that a run can continue from, the newest first."""
    problems: list[str]
    """A message for each checkpoint that can't be opened."""
    newer: str | None
    """A message, if a newer version has written a checkpoint that is newer than all that can be opened."""
    record: RunRecord | None
    """The record of the last run in this folder."""


class RunHistory:
    """The current run of a trainer, and the runs that it continues.

    Args:
        trainer: the trainer of the run.
        saver: its `agree` gives all ranks the results of rank 0.
    """

    def __init__(self, trainer: Any, saver: AsyncCheckpointer) -> None:
        self._trainer, self._saver = trainer, saver
        self.run = _RunId("", ())
        self._suffix = ""
        self._sequence: int | None = None
        """The number of the last save in the folder, on rank 0; None before a run begins."""
        self._entries: list[Entry] = []
        self._folder: str | None = None
        self._record: RunRecord | None = None
        self._index: FolderIndex | None = None

    # --- before the run

    def look(self, *, opens_all: bool = False) -> Seen:
        """Returns the content of the folder of snapshots, as rank 0 reads it; called by all ranks.

        Args:
            opens_all: open all manifests, where the folder's index would say of old checkpoints what is in theirs.
        """
        self._saver.on_published, self._saver.on_removed = self._published, self._removed
        folder = self._trainer.snapshots_path
        self._folder = None if folder is None else folder.rstrip("/")
        return self._saver.agree(lambda: self._look(opens_all))

    def _look(self, opens_all: bool) -> Seen:
        self._entries, self._index = [], None
        if self._folder is None:
            return Seen([], [], None, None)
        fs, root = resolve(self._folder)
        self._index = FolderIndex(self._folder)
        if fs.isdir(root):
            self._entries = list_entries(self._folder, None if opens_all else self._index)
        newest = max((entry.manifest.sequence for entry in self._entries if entry.manifest is not None), default=0)
        unreadable = ("damaged", "unfinished") if os.path.isdir(root) else ("damaged",)
        return Seen(
            [entry.path for entry in self._entries if entry.manifest is not None and entry.manifest.kind != "weights"],
            [for_terminal(f"{entry.path} {entry.problem}") for entry in self._entries if entry.kind in unreadable],
            next((f"{entry.path} {entry.problem}" for entry in self._entries if _is_newer(entry, newest)), None),
            read_record(self._folder, self._trainer.default_root_dir),
        )

    def manifest_of(self, path: str) -> Manifest | None:
        """Returns, on rank 0, the manifest of a checkpoint that `look` has seen; complete if it is a candidate's."""
        return next((entry.manifest for entry in self._entries if entry.path == path), None)

    def newest_is_own(self) -> bool | None:
        """Whether this run has saved the newest checkpoint in its folder; None without any. Called by all ranks."""
        candidates = self.look().candidates
        if not candidates:
            return None
        return self._saver.agree(lambda: getattr(self.manifest_of(candidates[0]), "run", None) == self.run.id)

    def begin(self, continues: dict[str, Any] | None, *, is_same: bool) -> None:
        """Gives the run its id, and a suffix for the names of its snapshots; called by all ranks.

        Args:
            continues: the entry ``run`` of the checkpoint that was opened; None without a checkpoint.
            is_same: the run is the one that saved the checkpoint, started again.
        """
        self.run, self._suffix = self._saver.agree(lambda: self._begin(continues, is_same))

    def _begin(self, continues: dict[str, Any] | None, is_same: bool) -> "tuple[_RunId, str]":
        if continues is None and self.run.id and self._trainer.global_step:
            run = self.run  # `fit` is called a second time, and continues where the first has ended
        else:
            run = _begin_run(continues, is_same=is_same)
        self._sequence = _newest_number(self._entries)
        return run, _free_suffix(run, self._entries)

    def record(self, batches: dict[str, Any], loggers: list[dict[str, Any]]) -> None:
        """Writes the record of the run into the folder; called by all ranks, and done by rank 0.

        Args:
            batches: the values that determine the global batch.
            loggers: the state of each logger.
        """
        if self._index is None or self._folder is None:
            return
        steps = [entry.manifest.step for entry in self._entries if entry.manifest is not None]
        newest = steps[0] if steps else 0
        config = self._trainer.config.as_plain
        self._record = RunRecord(self.run.id, self.run.lineage, bool(steps), newest, batches, tuple(loggers), config)
        write_record(self._folder, self._trainer.default_root_dir, self._record)
        self._write_index()

    def _write_index(self) -> None:
        assert self._index is not None
        self._index.write([(entry.path, entry.manifest) for entry in self._entries if entry.manifest is not None])

    def take_over(self) -> None:
        """Reads as the new rank 0, after the loss of the former one, what that one knew of the run's folder."""
        if self._folder is not None and self._index is None and self._trainer.is_global_zero:
            self._record = self._look(opens_all=False).record
            self._sequence = _newest_number(self._entries)
            self._write_index()

    def set_aside(self, paths: list[str]) -> None:
        """Renames damaged checkpoints, which then count no longer; called by all ranks, before `begin`."""
        if not self._trainer.is_global_zero:
            return
        for path in paths:
            if (note := set_aside(path)) is not None:
                self._entries = [entry for entry in self._entries if entry.path != path]
                rank_zero_warn(note)

    # --- while it saves

    def about(self) -> dict[str, Any]:
        """Returns the fields of a manifest about the run; rank 0's sequence number is the valid one."""
        if self._sequence is not None:
            self._sequence += 1
        return {"run": self.run.id, "lineage": self.run.lineage, "sequence": self._sequence or 0}

    def snapshot_path(self, folder: str, step: int) -> str:
        """Returns the path of the snapshot of a step; called by all ranks.

        It is not the path of another run's snapshot, nor of anything that is not ours.
        """
        return self._saver.agree(lambda: self._snapshot_path(os.path.join(folder, f"step={step}"), self._suffix))

    def _snapshot_path(self, plain: str, suffix: str) -> str:
        path, status, number = f"{plain}{suffix}", path_status(f"{plain}{suffix}"), 0
        is_anothers = status.kind == "ours" and self._own_manifest(path) is None
        if status.kind != "foreign" and not is_anothers:
            return path
        while path_status(f"{plain}-v{(number := number + 1)}").kind != "free":
            pass
        about = "another run's" if is_anothers else status.about
        rank_zero_info(for_terminal(f"{path} is {about}: the snapshot is called {plain}-v{number}."))
        return f"{plain}-v{number}"

    def _own_manifest(self, path: str) -> Manifest | None:
        """Reads the manifest of a checkpoint; None if it is damaged, or another run's."""
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            return None
        return manifest if manifest.run in self.run.lineage else None

    def snapshots(self) -> "list[_Snapshot]":
        """Returns, on rank 0, the snapshots that this run may remove, the newest first; see `may_remove`."""
        own = [
            _Snapshot(f"{self._folder}/{line['name']}", line["name"], line["step"], line["sequence"])
            for line in ([] if self._index is None else self._index.lines())
            if line["kind"] == "snapshot" and line["run"] in self.run.lineage
        ]
        return sorted(own, key=lambda snapshot: (snapshot.sequence, snapshot.step), reverse=True)

    def may_remove(self, snapshot: "_Snapshot") -> bool:
        """Whether a snapshot's own manifest says what the index of the folder says of it; called on rank 0."""
        manifest, path = self._own_manifest(snapshot.path), snapshot.path
        if manifest is not None and (manifest.step, manifest.sequence) == (snapshot.step, snapshot.sequence):
            return manifest.kind == "snapshot"
        self._removed(path)  # as far as the run knows: it is never removed, or when its own numbers are due
        if manifest is not None and self._index is not None:
            self._index.add(path, manifest)
        return False

    def _published(self, path: str, manifest: Manifest) -> None:
        if self._index is None or self._folder is None or os.path.dirname(path) != self._folder:
            return
        self._index.add(path, manifest)
        if self._record is not None and not self._record.has_saved:
            self._record = self._record._replace(has_saved=True, step=manifest.step)
            write_record(self._folder, self._trainer.default_root_dir, self._record)

    def _removed(self, path: str) -> None:
        if self._index is not None and os.path.dirname(path) == self._folder:
            self._index.remove(path)


def _is_newer(entry: Entry, newest: int) -> bool:
    sequence = entry.newer_sequence
    return entry.kind == "newer" and (sequence is None or sequence >= newest)


def check_may_start_afresh(folder: str | None, seen: Seen, failures: list[str]) -> None:
    """Refuses to start a run from step 0, if its folder has checkpoints that can't be opened, or had some.

    Args:
        folder: folder of the snapshots.
        seen: its content.
        failures: a message for each candidate that could not be opened.

    Raises:
        CheckpointError: names the checkpoints that are there.
    """
    if seen.newer is not None:
        raise CheckpointError(f"resume={AUTO!r}: {seen.newer} {_START_AFRESH}")
    problems = [*failures, *seen.problems]
    if problems:
        listed = "".join(f"\n- {problem}" for problem in problems)
        message = f"resume={AUTO!r}: no checkpoint in {folder} can be opened:{listed}\n{_START_AFRESH}"
        raise CheckpointError(message, has_lines=True)
    record = seen.record
    if record is not None and record.has_saved:
        raise CheckpointError(
            f"resume={AUTO!r}: {folder} has no checkpoint, but run {record.run} had one there, of step {record.step} or"
            f" later. Is a disk not mounted, or was the folder moved? {_START_AFRESH}"
        )
    rank_zero_info(f"resume={AUTO!r}: no checkpoint in {folder} yet, so training starts afresh")


# --- ids of runs
# Run ids and lineage: which run saved a checkpoint, which runs it continues, and which snapshots it may remove.
#
# A run that ``resume="auto"`` continues keeps its id. A run that starts from another run's checkpoint gets a new id;
# its lineage lists the ids of the earlier runs. This holds for checkpoints that are files and for directories.


_MOST_SAVES = 1 << 32
"""The number of saves for which a run needs numbers: one in each second of a century."""


class _RunId(NamedTuple):
    """The id of a run, and the ids of the runs it continues."""

    id: str
    lineage: tuple[str, ...]
    """Ids of the runs that this run continues, oldest first, then its own id."""

    def as_dict(self) -> dict[str, Any]:
        """Returns the ids as plain values, for a checkpoint."""
        return {"id": self.id, "lineage": list(self.lineage)}


def _begin_run(continues: Mapping[str, Any] | None = None, *, is_same: bool = False) -> _RunId:
    """Returns the id of a run that begins now.

    Args:
        continues: the run id in the opened checkpoint, as `_RunId.as_dict` returns it; None without a checkpoint.
        is_same: the run is a restart of the saved run, and keeps its id.
    """
    before = tuple(continues.get("lineage", ())) if continues else ()
    if is_same and continues and continues.get("id"):
        return _RunId(continues["id"], before)
    fresh = uuid.uuid4().hex[:12]
    return _RunId(fresh, (*before, fresh))


class _Snapshot(NamedTuple):
    """A checkpoint for resuming, saved by this run or by a run that it continues."""

    path: str
    name: str
    step: int
    sequence: int


def _newest_number(entries: Sequence[Entry]) -> int:
    """Returns the number of the newest save among the entries of a folder.

    Raises:
        CheckpointError: it is so large that checkpoints with those of later saves could not be opened.
    """
    numbers = [entry.newer_sequence or 0 if entry.manifest is None else entry.manifest.sequence for entry in entries]
    newest = max(numbers, default=0)
    if newest > MOST - _MOST_SAVES:
        raise CheckpointError(
            f"{entries[numbers.index(newest)].path} claims to be save number {newest} in its folder, which leaves no"
            " numbers for this run: no run has saved it so. Move it to another folder."
        )
    return newest


def _free_suffix(run: _RunId, entries: Sequence[Entry]) -> str:
    """Returns a suffix for the names of a run's snapshots that no other run's snapshots have."""
    others = [
        os.path.basename(entry.path)
        for entry in entries
        if entry.kind == "newer" or (entry.manifest is not None and entry.manifest.run not in run.lineage)
    ]
    used = {match[1] or "" for name in others if (match := re.fullmatch(r"step=\d+(-v\d+)?", name))}
    return next(suffix for suffix in ("", *(f"-v{number}" for number in range(1, len(used) + 2))) if suffix not in used)


# --- the checkpoints that a restored `ModelCheckpoint` may remove


def others_of(callback: ModelCheckpoint, lineage: Sequence[str]) -> dict[str, str]:
    """Returns the paths in a callback's restored state that a run must not remove, each with the reason.

    Args:
        callback: in its state are paths that a checkpoint names.
        lineage: the ids of the run and of those that it continues.
    """
    paths = {callback.best_model_path, callback.kth_best_model_path, callback.last_model_path, *callback.best_k_models}
    folder = str(callback.dirpath)
    return {path: reason for path in sorted(paths - {""}) if (reason := _not_its_own(path, folder, lineage))}


def _not_its_own(path: str, folder: str, lineage: Sequence[str]) -> str:
    """Returns the reason why a run must not remove the checkpoint `path` from `folder`; "" if it may."""
    fs, fs_path = resolve(path)
    if isinstance(fs, LocalFileSystem):
        if Path(folder).absolute() not in Path(path).absolute().parents:
            return ""  # Lightning: ModelCheckpoint._should_remove_checkpoint; it does not resolve ".." and links
        is_inside = Path(folder).resolve() in Path(fs_path).resolve().parents
    else:
        is_inside = path.startswith(f"{folder.rstrip('/')}/") and ".." not in path.split("/")
    if not is_inside:
        return f"is not in its folder {folder}"
    try:
        run = read_manifest(path).run
    except CheckpointError:  # Lightning's, or damaged
        return ""
    return "" if run in lineage else f"was saved by another run ({run})"


def forget_others(callback: ModelCheckpoint, others: dict[str, str]) -> None:
    """Removes these paths from the callback's state, with a warning that has the reason."""
    for path, reason in others.items():
        about = f"The checkpoint names {path} for ModelCheckpoint, but it {reason}: it is never removed."
        rank_zero_warn(for_terminal(about))
        callback.best_k_models.pop(path, None)
    for name in ("best_model_path", "kth_best_model_path", "last_model_path"):
        if getattr(callback, name) in others:
            setattr(callback, name, "")
