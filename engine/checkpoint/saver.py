"""Saves checkpoints while training goes on, one at a time, and opens them.

Phases of a save:
1. on the trainer's thread: the tensors are copied, on accelerators within their own memory (`staging.py`), and all the
   rest is serialised: that is all a step waits for (a save that is waited for needs no copies in host memory);
2. on a thread and over a gloo group of its own: the copies go to host memory, and each rank writes its shards; rank 0
   collects the checksums and what only the ranks know (random state, place in the data), writes the rest and publishes
   the directory.
A save that fails leaves nothing behind; all ranks learn of it, and training goes on.
"""

import io
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ..distributed.object_group import SELF, ObjectGroup, num_ranks
from ..distributed.waits import waiting
from .checked_io import Files, resolve
from .dcp_storage import Writer
from .manifest import RANKS, REST, CheckpointError, Manifest, parse_manifest, read_manifest
from .not_plain import not_plain
from .opening import Wants, open_directory, wrong_files
from .publish import begin, discard, publish, remove, update_link
from .sending import packed, unpacked
from .single_file import wrong_in
from .staging import Staging
from .state_tree import merged, split, to_lightning
from .strided_shards import SavePlanner
from .whole import whole_checkpoint

__all__ = ["AsyncCheckpointer", "load_checkpoint"]

log = logging.getLogger("polyphase.engine")


class _Job(NamedTuple):
    """The content of one save."""

    path: str
    tensors: Callable[[], dict[str, Tensor]]
    """Returns them in host memory."""
    rest: bytes
    of_rank: bytes
    about: dict[str, Any]
    link: str | None


class AsyncCheckpointer:
    """Writes the checkpoints of one process, which is one of several that all call the same methods in the same order.

    Of a spawned worker's engine, the saver starts afresh: it has no state that outlives a run.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._path = ""
        self._staging = Staging()
        self._group = SELF
        self._group_of: Any = None
        self._removals: list[str] = []
        self._notes: list[str] = []
        self._has_checked_rest = False
        self.ranks: ObjectGroup | None = None
        """The group in which ranks agree; None: their own gloo group. If it has no process group, rank 0 writes all."""
        self.newest: str | None = None
        """The last checkpoint that was published."""
        self.on_published: Callable[[str, Manifest], None] | None = None
        """Called on rank 0 by whichever thread has published one."""
        self.on_removed: Callable[[str], None] | None = None
        """Called when one was removed."""

    def __getstate__(self) -> dict[str, Any]:
        # Threads, groups and memory to copy to live in this process alone.
        stays = ("newest", "on_published", "on_removed")
        return {**vars(AsyncCheckpointer()), **{name: getattr(self, name) for name in stays}}

    def save(
        self,
        checkpoint: dict[str, Any],
        path: str,
        *,
        about: dict[str, Any],
        of_rank: dict[str, Any],
        link: str | None = None,
        in_background: bool = True,
        spread: frozenset[str] = frozenset(),
    ) -> None:
        """Saves `checkpoint` as the directory `path`.

        Args:
            checkpoint: nested dict; of what is not sharded, rank 0's counts.
            path: final name, local or URL.
            about: step, epoch, layout and versions, for the manifest.
            of_rank: what only this rank knows; goes into ``checkpoint["polyphase"]["ranks"]``.
            link: name of a link beside `path` that shall point at it.
            in_background: return when the state is copied; else when it is on the disk.
            spread: top-level keys under which ranks have different entries, all of which are saved. A tensor on the
                meta device is another rank's, too.

        Raises:
            OSError, CheckpointError: it could not be written, and `in_background` is False.
        """
        self.finish()  # one at a time
        group = self._ranks()
        tensors, rest = split(checkpoint)
        tensors = {key: tensor for key, tensor in tensors.items() if not tensor.is_meta}
        for key in sorted(rest.keys() & spread):  # in one order on all ranks
            rest[key] = merged(group.all_gather_object(rest[key]))
        of_rank_tensors: dict[str, Tensor] = {}
        if _writes_shards(group):
            of_rank_tensors, of_rank = split(of_rank, f"rank{group.rank}.")
            # What is left is small, but may be a view of a bucket of gradients, all of which would be written with it.
            of_rank = apply_to_collection(of_rank, Tensor, lambda small: small.detach().cpu().clone())
        content = b"" if group.rank else self._serialised(rest)
        mine = {**tensors, **of_rank_tensors}
        # In host memory, nobody writes into what this thread saves itself: it needs no copies.
        needs_copies = in_background or any(tensor.device.type != "cpu" for tensor in mine.values())
        staged = self._staging.begin(mine) if needs_copies else lambda: mine
        job = _Job(path, staged, content, _packed(of_rank), about, link)
        if not in_background:
            self._write(job, group)
            self._tell_notes()
            return
        self._path = path
        self._thread = threading.Thread(target=self._run, args=(job, group), name="polyphase-save")
        self._thread.start()

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight, at most `timeout_s`; warns if it failed."""
        if self._thread is not None:
            with waiting("the save in flight"):
                self._thread.join(timeout_s)
            self.report()

    def report(self) -> None:
        """Warns if a save has failed since the last time; waits for nothing."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        self._tell_notes()
        error, self._error = self._error, None
        removals, self._removals = self._removals, []
        if error is None:
            for path in removals:
                if path != self._path:
                    self._remove(path)
            return
        newest = f"The newest checkpoint is {self.newest}" if self.newest else "There is no checkpoint yet"
        rank_zero_warn(
            f"The checkpoint {self._path} could not be saved: {error}. {newest}; training goes on.",
            category=RuntimeWarning,
        )

    def _tell_notes(self) -> None:
        """Warns on the trainer's thread, where a warning that the user made an error does not undo a save."""
        notes, self._notes = self._notes, []
        for note in notes:
            rank_zero_warn(note)

    def remove(self, path: str) -> None:
        """Removes a checkpoint; not before the save in flight, which may be to replace it, has succeeded."""
        if self._thread is None:
            self._remove(path)
        else:
            self._removals.append(path)

    def _remove(self, path: str) -> None:
        remove(path)
        if self.on_removed is not None:
            self.on_removed(path)

    def load(
        self,
        path: str,
        template: Callable[[str], Tensor | None] = lambda key: None,
        *,
        leave_out: tuple[str, ...] = (),
        weights_only: bool | None = None,
        layout: dict[str, int] | None = None,
        own: tuple[str, ...] = (),
        alone: bool = False,
    ) -> dict[str, Any]:
        """Opens the checkpoint `path`, after all of its files were checked.

        Args:
            path: of the directory.
            template: gives for a tensor's key the tensor it is for, which says how it shall be sharded; None for whole,
                on the CPU. One on the meta device is not read, and stands in the tensor's place.
            leave_out: top-level keys that are not needed.
            weights_only: as for `torch.load`; None for True.
            layout: this run's; of a checkpoint with the same, each rank needs only what it said itself.
            own: keys of what each rank said that nobody but that rank of the same layout needs.
            alone: this rank opens it by itself, rather than all ranks together.

        Returns:
            The nested dict that was saved, the list of what each rank said under ``checkpoint["polyphase"]["ranks"]``.

        Raises:
            CheckpointError: it is no checkpoint, damaged, or from a newer version.
        """
        self.finish()
        group = SELF if alone else self._ranks()
        manifest = _on_rank_0(group, lambda: read_manifest(path))
        share = (group.rank, group.size)
        wrong = sorted(chain.from_iterable(group.all_gather_object(wrong_files(path, manifest, share))))
        if wrong:
            raise CheckpointError(f"The checkpoint {path} is damaged: {'; '.join(wrong)}.")
        wants = Wants(template, leave_out, share[0], layout, own, weights_only)
        checkpoint, error = None, None
        try:
            checkpoint = open_directory(path, manifest, share[1], wants)
        except CheckpointError as raised:
            error = raised
        # What one rank can't read, none may take: they all go on to the same next one.
        errors = [said for said in group.all_gather_object(None if error is None else str(error)) if said is not None]
        if errors:
            raise error or CheckpointError(errors[0])
        assert checkpoint is not None
        return checkpoint

    def check_file(self, path: str) -> None:
        """Reads all of a file, which the ranks share, before anything is restored from it.

        Raises:
            CheckpointError: it is damaged.
        """
        self.finish()
        group = self._ranks()
        wrong = sorted({*chain.from_iterable(group.all_gather_object(wrong_in(path, (group.rank, group.size))))})
        if wrong:
            raise CheckpointError(f"The checkpoint {path} is damaged: {'; '.join(wrong)}.")

    def note_file(self, path: str, text: str) -> None:
        """Notes a checkpoint that was written as one file, with the manifest `text`; called by all ranks."""
        self.newest = path
        if self.on_published is not None and self._ranks().rank == 0:
            self.on_published(path, parse_manifest(text.encode(), path))

    def collect(self, value: Any) -> list[Any]:
        """Gathers `value` of all ranks on rank 0, tensors in host memory; the lists of the others mean nothing."""
        group = self._ranks()
        if group.size == 1:
            return [value]
        values = group.gather_object(packed(value))
        return [unpacked(content) for content in values] if group.rank == 0 else values

    def gather(self, value: Any) -> list[Any]:
        """Gathers `value` of all ranks; returns the list, in rank order, on each of them."""
        return self._ranks().all_gather_object(value)

    def agree(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on rank 0 and returns its result on each rank; what it raises there, all raise."""
        return _on_rank_0(self._ranks(), function)

    def _ranks(self) -> ObjectGroup:
        """Returns `ranks`, or the savers' own group, so that they never meet a collective of training.

        Waits for the save in flight, whose ranks meet over the same connections.
        """
        if num_ranks() == 1:
            return SELF
        self.finish()
        if self.ranks is not None:
            return self.ranks
        if self._group_of is not dist.group.WORLD:
            self._group_of = dist.group.WORLD
            self._group = ObjectGroup(dist.new_group(backend="gloo"))
        return self._group

    def _serialised(self, rest: dict[str, Any]) -> bytes:
        content = _packed(rest)
        if not self._has_checked_rest:
            self._has_checked_rest = True
            try:
                torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as refused:
                rank_zero_warn(not_plain(refused))
        return content

    def _run(self, job: _Job, group: ObjectGroup) -> None:
        try:
            self._write(job, group)
        except BaseException as error:  # told by `report`, on the trainer's thread
            self._error = error

    def _write(self, job: _Job, group: ObjectGroup) -> None:
        started = time.monotonic()
        tensors = _on_all(group, job.tensors)
        staging = _on_rank_0(group, lambda: begin(job.path))
        files = Files(staging)
        try:
            if _writes_shards(group):
                _write_shards(tensors, files, group)
            else:
                _on_rank_0(group, lambda: _write_shards(tensors, files, SELF))
            known = group.gather_object((files.written, job.of_rank))
            _on_rank_0(group, lambda: self._publish(job, files, known))
        except BaseException:
            if group.rank == 0:
                discard(staging)
            raise
        self.newest = job.path
        log.debug("saved %s in %.2f s", job.path, time.monotonic() - started)

    def _publish(self, job: _Job, files: Files, known: list[Any]) -> None:
        """Writes the other files and publishes the checkpoint; on rank 0, when all shards are written."""
        with files.writing(REST) as stream:
            stream.write(job.rest)
        # Of ranks that were lost, what rank 0 says of itself: the places in the data are alike.
        known += known[:1] * (job.about["world_size"] - len(known))
        with files.writing(RANKS) as stream:
            # Rank 0 reads what the others have had on devices of theirs.
            parts = [torch.load(io.BytesIO(of_rank), map_location="cpu", weights_only=True) for _, of_rank in known]
            torch.save(parts, stream)
        for written, _ in known:
            files.written.update(written)
        manifest = Manifest(
            name=job.path.rstrip("/").rsplit("/", 1)[-1], time=time.time(), files=dict(files.written), **job.about
        )
        notes = [publish(files.url, job.path, manifest)]
        if self.on_published is not None:
            self.on_published(job.path, manifest)
        if job.link is not None:
            notes.append(update_link(job.path, job.link))
        self._notes += [note for note in notes if note is not None]


def load_checkpoint(path: Any, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Opens a checkpoint by one process, whole, on the CPU, in the form of Lightning's files.

    Raises:
        CheckpointError: it is no checkpoint, damaged, or from a newer version.
    """
    fs, place = resolve(path)
    if fs.isfile(place):
        return to_lightning(whole_checkpoint(os.fspath(path), weights_only))
    return to_lightning(AsyncCheckpointer().load(os.fspath(path), weights_only=weights_only, alone=True))


def _writes_shards(group: ObjectGroup) -> bool:
    """Whether each rank writes its part; else rank 0 has to have all of it, by its value."""
    return group.size == 1 or group.process_group is not None


def _write_shards(tensors: dict[str, Tensor], files: Files, group: ObjectGroup) -> None:
    writer, planner = Writer(files), SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    if group.process_group is None:  # what torch does for one rank, without its warning that there is one
        planner.set_up_planner(tensors, is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
        (plan,) = writer.prepare_global_plan(plans)
        try:
            writer.finish(metadata, [writer.write_data(planner.finish_plan(plan), planner).wait()])
        except OSError as error:
            raise CheckpointError(f"rank 0 could not write: {error!r}") from error
        return
    try:
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group.process_group)
    except dcp.api.CheckpointException as failed:  # a BaseException with a traceback in its text
        reasons = [f"rank {rank} could not write: {error!r}" for rank, (error, _) in sorted(failed.failures.items())]
        raise CheckpointError("; ".join(reasons)) from failed


def _packed(value: Any) -> bytes:
    """Serialises a value as it is now, whatever becomes of it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _on_all(group: ObjectGroup, function: Callable[[], Any]) -> Any:
    """Calls `function` on each rank; what it raises on one rank, no rank goes on after."""
    result, error = None, None
    try:
        result = function()
    except Exception as raised:
        error = raised
    for rank, said in enumerate(group.all_gather_object(None if error is None else repr(error))):
        if said is not None:
            raise CheckpointError(f"rank {rank} could not copy its tensors: {said}") from error
    return result


def _on_rank_0(group: ObjectGroup, function: Callable[[], Any]) -> Any:
    """Calls `function` on rank 0 and returns its result on all ranks; what it raises there is raised on all ranks."""
    result: Any = None
    error: Exception | None = None
    if group.rank == 0:
        try:
            result = function()
        except Exception as raised:
            error = raised
    result, error = group.broadcast_object((result, error))
    if error is not None:
        raise error
    return result
