"""Saves checkpoints in the background, one at a time, and opens them.

Phases of a save:
1. On the trainer's thread, the tensors are copied (`Staging`) and everything else is serialised. The next step waits
   only for this phase. A save in the foreground copies no tensors of host memory.
2. On a separate thread, over a separate gloo group, the copies go to host memory and each rank writes its shards.
   Rank 0 gathers the checksums and each rank's own state (random state, position in the data), writes the other files
   and publishes the directory.
A save that fails leaves no files; all ranks get the error, and training continues.
"""

import io
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ..distributed.connections import noting_connections
from ..distributed.object_group import SELF, WORLD, ObjectGroup, num_ranks
from ..distributed.waits import waiting
from .checked_io import Files, resolve
from .dcp_storage import Index, Writer, write_whole
from .errors import CheckpointError, damage, missing
from .manifest import RANKS, REST, Manifest, read_manifest
from .opening import Wants, check_content, check_written, open_directory, wrong_files
from .publish import begin, discard, publish, remove, update_link
from .single_file import wrong_in
from .staging import Staging
from .state_tree import NAMES, is_plain, mapped, merged, split, structure_of, to_lightning
from .strided_shards import SavePlanner
from .whole import PICKLE, names_in, not_plain, whole_checkpoint

__all__ = ["AsyncCheckpointer", "load_checkpoint"]

log = logging.getLogger("polyphase.engine")


class _Job(NamedTuple):
    """The content of one save."""

    path: str
    tensors: Callable[[], dict[str, Tensor]]
    """Returns this rank's tensors, in host memory."""
    rest: bytes
    """Everything but tensors, serialised; empty on all ranks but rank 0."""
    of_rank: bytes
    """A list of the state that only this rank has, serialised."""
    structures: tuple[int, int]
    """`structure_of` the rest and of that list; of no use on other ranks than rank 0."""
    about: dict[str, Any]
    """Fields of the manifest."""
    link: str | None


class AsyncCheckpointer:
    """Writes and opens the checkpoints of one rank; all ranks call the same methods in the same order.

    A pickled copy, as a spawned worker gets, has no thread, group or staging memory.
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
        self._opened: Any = None
        """Structures of the newest checkpoint whose content was opened: of such types, the next one opens, too."""
        self.ranks: ObjectGroup | None = None
        """The group of the ranks that save; None: a separate gloo group. Without a process group, rank 0 writes all."""
        self.connect_timeout: timedelta | None = None
        """The longest time to connect the group, when another rank may end meanwhile; None: torch's."""
        self.newest: str | None = None
        """The path of the last checkpoint that was published; None before the first."""
        self.has_failed = False
        """Whether the last save has failed, so that nothing is removed in its favour."""
        self.on_published: Callable[[str, Manifest], None] | None = None
        """Called on rank 0 with path and manifest, by the thread that has published a checkpoint."""
        self.on_removed: Callable[[str], None] | None = None
        """Called with the path of a checkpoint that was removed."""

    def __getstate__(self) -> dict[str, Any]:
        # Threads, groups and staging memory can't leave this process.
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
            checkpoint: nested dict; values that are not sharded are taken from rank 0.
            path: final name, local or URL.
            about: step, epoch, layout and versions, for the manifest.
            of_rank: state that only this rank has; saved under ``checkpoint["polyphase"]["ranks"]``.
            link: name of a symbolic link beside `path` that is set to point to it.
            in_background: return as soon as the state is copied; otherwise, when it is on the disk.
            spread: top-level keys under which ranks have different entries, all of which are saved. This rank's tensors
                on the meta device are not saved: another rank has them.

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
            # These tensors are small, but may be views of a bucket of gradients, which would be written as a whole.
            of_rank = mapped(lambda small: small.detach().cpu().clone(), of_rank)
        content = b"" if group.rank else self._serialised(rest)
        own_tensors = {**tensors, **of_rank_tensors}
        # Nothing changes tensors while this thread itself saves them. On a device they are staged all the same, which
        # is faster; but to export weights, the host has them one by one, since all may not fit.
        needs_copies = in_background or (
            about.get("kind") != "weights" and any(tensor.device.type != "cpu" for tensor in own_tensors.values())
        )
        staged = self._staging.begin(own_tensors) if needs_copies else lambda: own_tensors
        structures = structure_of(rest), structure_of([of_rank])
        job = _Job(path, staged, content, _packed([of_rank]), structures, about, link)
        if not in_background:
            self._write(job, group)
            self.has_failed = False
            self._warn_of_notes()
            return
        self._path = path
        self._thread = threading.Thread(target=self._run, args=(job, group), name="polyphase-save")
        self._thread.start()

    def finish(self, timeout_s: float | None = None) -> None:
        """Waits for the save in flight, at most `timeout_s` seconds; warns if it failed."""
        if self._thread is not None:
            with waiting("the save in flight"):
                self._thread.join(timeout_s)
            self.report()

    def leave_groups(self) -> None:
        """Forgets the group of the saves, of which a rank has ended; a save in flight fails, and is reported later."""
        self._group, self._group_of = SELF, None

    def report(self) -> None:
        """Warns if a save has failed since the last call; does not wait for the save in flight."""
        if self._thread is None or self._thread.is_alive():
            return
        self._thread = None
        self._warn_of_notes()
        error, self._error = self._error, None
        self.has_failed = error is not None
        removals, self._removals = self._removals, []
        if error is None:
            for path in removals:
                if path != self._path:
                    self._remove(path)
            return
        newest = f"The newest checkpoint is {self.newest}" if self.newest else "There is no checkpoint yet"
        rank_zero_warn(
            f"The checkpoint {self._path} could not be saved: {error}. {newest}; training continues.",
            category=RuntimeWarning,
        )

    def _warn_of_notes(self) -> None:
        """Warns on the trainer's thread, when the save is over: under ``-W error`` a warning must not undo a save."""
        notes, self._notes = self._notes, []
        for note in notes:
            rank_zero_warn(note)

    def remove(self, path: str) -> None:
        """Removes a checkpoint once the save in flight has succeeded; if that save fails, the checkpoint stays."""
        if self._thread is not None:
            self._removals.append(path)
        elif not self.has_failed:
            self._remove(path)

    def _remove(self, path: str) -> None:
        try:
            remove(path)
        except OSError as error:  # of NFS, say, which keeps files that another machine has opened
            rank_zero_warn(f"{path} could not be removed: {error}")
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
        """Opens the checkpoint `path`, after checking all of its files.

        Args:
            path: path of the directory.
            template: function from a tensor's key to the tensor to load into; the loaded tensor has the same sharding.
                If it returns None, the whole tensor is loaded on the CPU. If it returns a tensor on the meta device,
                nothing is read, and the result has that tensor.
            leave_out: top-level keys that are not loaded.
            weights_only: as for `torch.load`; None for True.
            layout: layout of this run. If the checkpoint has the same layout, each rank loads only its own rank state.
            own: keys of a rank's state that only the same rank of the same layout needs.
            alone: this rank opens the checkpoint without the others, rather than all ranks together.

        Returns:
            The nested dict that was saved; ``checkpoint["polyphase"]["ranks"]`` is the list of all ranks' states.

        Raises:
            CheckpointError: it is no checkpoint, damaged, or from a newer version.
        """
        self.finish()
        group = SELF if alone else self._ranks()
        manifest = group.call_on_first(lambda: read_manifest(path))
        share = (group.rank, group.size)
        wrong = sorted(chain.from_iterable(group.all_gather_object(wrong_files(path, manifest, share))))
        if wrong:
            raise damage(path, "; ".join(wrong))
        wants = Wants(template, leave_out, share[0], layout, own, weights_only)
        checkpoint, error = None, None
        try:
            checkpoint = open_directory(path, manifest, share[1], wants)
        except CheckpointError as raised:
            error = raised
        # If one rank can't read the checkpoint, all ranks raise, so that all of them try the same next checkpoint.
        errors = [raised for raised in group.all_gather_object(error) if raised is not None]
        if errors:
            raise error or errors[0]
        assert checkpoint is not None
        return checkpoint

    def check_file(self, path: str) -> None:
        """Checks a checkpoint that is one file, before anything is restored from it; each rank reads a part of it.

        Raises:
            FileNotFoundError: a rank does not see it.
            CheckpointError: it is damaged.
        """
        self.finish()
        group = self._ranks()
        fs, fs_path = resolve(path)
        own = wrong_in(path, (group.rank, group.size)) if fs.exists(fs_path) else None
        by_rank = group.all_gather_object(own)
        if None in by_rank:
            ranks = [str(rank) for rank, wrong in enumerate(by_rank) if wrong is None]
            where = "" if len(ranks) == group.size else f" on ranks {', '.join(ranks)}"
            raise missing(path, where)
        if wrong := sorted({*chain.from_iterable(by_rank)}):
            raise damage(path, "; ".join(wrong))

    def note_file(self, path: str, manifest: Manifest) -> None:
        """Records that a checkpoint was written as one file; called by all ranks."""
        self.newest, self.has_failed = path, False
        if self.on_published is not None and self._ranks().rank == 0:
            self.on_published(path, manifest)

    def collect(self, value: Any) -> list[Any]:
        """Gathers `value` of all ranks on rank 0, with tensors in host memory; other ranks must not use the result."""
        group = self._ranks()
        if group.size == 1:
            return [value]
        values = group.gather_object(_with_bytes(value))
        return [_with_tensors(content) for content in values] if group.rank == 0 else values

    def gather(self, value: Any) -> list[Any]:
        """Gathers `value` of all ranks; returns the list, in rank order, on each of them."""
        return self._ranks().all_gather_object(value)

    def agree(self, function: Callable[[], Any]) -> Any:
        """Calls `function` on rank 0 and returns its result on each rank; if it raises, all ranks raise that error."""
        return self._ranks().call_on_first(function)

    def _ranks(self) -> ObjectGroup:
        """Returns `ranks`, or a separate gloo group, whose collectives can't mix with those of training.

        Waits for the save in flight, which uses the same connections.
        """
        if num_ranks() == 1:
            return SELF
        self.finish()
        if WORLD.is_otherwise:
            return WORLD
        if self.ranks is not None:
            return self.ranks
        if self._group_of is not dist.group.WORLD:
            self._group_of = dist.group.WORLD
            with noting_connections():
                group = dist.new_group(backend="gloo", timeout=self.connect_timeout)
            if self.connect_timeout is not None:
                group.set_timeout(default_pg_timeout)
            self._group = ObjectGroup(group)
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
        except BaseException as error:  # `report` warns of it on the trainer's thread
            self._error = error

    def _write(self, job: _Job, group: ObjectGroup) -> None:
        started = time.monotonic()
        tensors = _call_on_all(group, job.tensors)
        staging = group.call_on_first(lambda: begin(job.path))
        files = Files(staging)
        try:
            index: Index = {}  # full on rank 0
            if _writes_shards(group):
                index = _write_shards(tensors, files, group)
            else:
                group.call_on_first(lambda: index.update(_write_shards(tensors, files, SELF)))
            of_ranks = group.gather_object((files.written, job.of_rank))
            group.call_on_first(lambda: self._publish(job, files, index, of_ranks))
        except BaseException:
            if group.rank == 0:
                discard(staging)
            raise
        self.newest = job.path
        log.debug("saved %s in %.2f s", job.path, time.monotonic() - started)

    def _publish(self, job: _Job, files: Files, index: Index, of_ranks: list[tuple[Any, bytes]]) -> None:
        """Writes the other files and publishes the checkpoint; called on rank 0, when all shards are written.

        Args:
            job: job of rank 0.
            files: files of the new directory.
            index: index of its tensors.
            of_ranks: for each rank, the files it has written and its serialised state.
        """
        with files.writing(REST) as stream:
            stream.write(job.rest)
        ranks, structure = job.of_rank, job.structures[1]
        if job.about["world_size"] > 1:
            ranks, structure = _of_all(of_ranks, job.about["world_size"])
        with files.writing(RANKS) as stream:
            stream.write(ranks)
        for written, _ in of_ranks:
            files.written.update(written)
        manifest = Manifest(
            name=job.path.rstrip("/").rsplit("/", 1)[-1],
            time=time.time(),
            files=dict(files.written),
            structures={REST: job.structures[0], RANKS: structure},
            **job.about,
        )
        notes = [publish(files.url, job.path, manifest)]
        # Opened before an older one is removed.
        published = read_manifest(job.path)
        refused: list[str] = []
        if published.structures == self._opened:
            wrong = check_written(job.path, published, index, job.rest, ranks)
        else:
            wrong, refused = check_content(job.path, published)
        if wrong:
            raise CheckpointError(f"{job.path} can't be opened again: {'; '.join(wrong)}")
        if not refused:
            self._opened = published.structures
        if self.on_published is not None:
            self.on_published(job.path, manifest)
        if job.link is not None:
            notes.append(update_link(job.path, job.link))
        self._notes += [note for note in notes if note is not None]


def load_checkpoint(path: Any, *, weights_only: bool | None = None) -> dict[str, Any]:
    """Opens a whole checkpoint in this process alone, on the CPU, as a dict like that of Lightning's files.

    Raises:
        CheckpointError: it is no checkpoint, damaged, or from a newer version.
    """
    fs, fs_path = resolve(path)
    if fs.isfile(fs_path):
        checkpoint = whole_checkpoint(os.fspath(path), weights_only)
        # A file of Lightning's has numbers in place of names, as it is to be.
        return {**checkpoint, NAMES: []} if names_in(checkpoint) is None else to_lightning(checkpoint)
    return to_lightning(AsyncCheckpointer().load(os.fspath(path), weights_only=weights_only, alone=True))


def _packed(value: Any) -> bytes:
    """Serialises a value at once, since training may change it while the save is written."""
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=PICKLE)
    return stream.getvalue()


def _of_all(of_ranks: list[tuple[Any, bytes]], world_size: int) -> tuple[bytes, int]:
    """Joins the serialised lists of the ranks' states to one; returns it, and its `structure_of`."""
    # On the CPU, since rank 0 may lack the devices of the other ranks.
    lists = [torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True) for _, packed in of_ranks]
    states = list(chain.from_iterable(lists))
    # Lost ranks get rank 0's state: the positions in the data are the same on all ranks.
    states += states[:1] * (world_size - len(states))
    return _packed(states), structure_of(states)


def _call_on_all(group: ObjectGroup, function: Callable[[], Any]) -> Any:
    """Calls `function` on each rank; if it raises on one rank, all ranks raise a CheckpointError."""
    result, error = None, None
    try:
        result = function()
    except Exception as raised:
        error = raised
    for rank, message in enumerate(group.all_gather_object(None if error is None else repr(error))):
        if message is not None:
            raise CheckpointError(f"rank {rank} could not copy its tensors: {message}") from error
    return result


# --- sending of states
# Packs nested values to send them from one rank to another; tensors are packed as bytes, which pickle copies once.
#
# Otherwise pickle would write each tensor with `torch.save` inside the pickle.


class _Packed(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: Any


def _with_bytes(value: Any) -> Any:
    """Returns a nested value with its tensors as bytes; `_with_tensors` restores it."""
    return mapped(_pack, value)


def _pack(tensor: Tensor) -> Any:
    tensor = tensor.detach().cpu()
    if not is_plain(tensor):
        return tensor
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return _Packed(tensor.dtype, tuple(tensor.shape), plain.reshape(-1).view(torch.uint8).numpy())


def _with_tensors(value: Any) -> Any:
    """Restores a value from `_with_bytes`."""
    return mapped(_unpack, value, _Packed)


def _unpack(tensor: _Packed) -> Tensor:
    content = np.require(tensor.content, requirements="W")
    return torch.from_numpy(content).view(tensor.dtype).reshape(tensor.shape)


# --- writing of shards
# Writes the tensors of a checkpoint: each rank its own shards, by `torch.distributed.checkpoint`, or rank 0 all.


def _writes_shards(group: ObjectGroup) -> bool:
    """Whether each rank writes its own shards; otherwise rank 0 has all tensors whole and writes them."""
    return group.size == 1 or group.process_group is not None


def _write_shards(tensors: dict[str, Tensor], files: Files, group: ObjectGroup) -> Index:
    """Writes this rank's tensors to the files of a new checkpoint; all ranks of `group` call it.

    Returns:
        The index of the tensors of all ranks, on rank 0.

    Raises:
        CheckpointError: on all ranks, if one of them could not write.
    """
    if group.process_group is None:
        try:
            return write_whole(files, tensors)
        except OSError as error:
            raise CheckpointError(f"rank 0 could not write: {type(error).__name__}: {error}") from error
    writer = Writer(files)
    planner = SavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group.process_group)
    except dcp.api.CheckpointException as failed:  # a BaseException with a traceback in its text
        reasons = [
            f"rank {rank} could not write: {type(error).__name__}: {error}"
            for rank, (error, _) in sorted(failed.failures.items())
        ]
        raise CheckpointError("; ".join(reasons)) from failed
    return writer.index
