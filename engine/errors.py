"""Refuses a run before any process starts: one kind of error, which the command shows as one line."""

import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .checkpoint.publish import LEFTOVERS
from .environment import has_rendezvous
from .flags import did_you_mean

__all__ = [
    "MissingCheckpointError",
    "NoModuleError",
    "RefusedError",
    "check_checkpoint",
    "check_nodes",
    "check_writable",
    "refusing",
]

_LOOKED_UP = ("auto", "fresh", "best", "hpc", "last")
"""Words that stand for a checkpoint without being the path of one."""


class RefusedError(ValueError, MisconfigurationException):
    """The run that was asked for is impossible; both ours and Lightning's kind of error."""


class MissingCheckpointError(RefusedError, FileNotFoundError):
    """There is nothing where a checkpoint should be."""


class NoModuleError(RefusedError, TypeError):
    """The object to be run is no `LightningModule`; Lightning has it as a TypeError."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turns errors that the engine's own code raises in here into a `RefusedError`; the user's stay as they are."""
    try:
        yield
    except (ValueError, MisconfigurationException) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, RefusedError) or not frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
            raise
        raise RefusedError(str(error)).with_traceback(error.__traceback__) from None


def check_nodes(num_nodes: int, cluster_environment: Any) -> None:
    """Checks that processes of several nodes can find each other, rather than wait for ever.

    Raises:
        RefusedError: nobody has said where they meet.
    """
    if num_nodes > 1 and not has_rendezvous(cluster_environment):
        raise RefusedError(
            f"num_nodes={num_nodes}, but nothing says where the nodes meet: start the script on each by torchrun,"
            f" `polyphase launch --nnodes {num_nodes}`, SLURM or MPI; or set MASTER_ADDR, MASTER_PORT and NODE_RANK."
        )


def check_checkpoint(path: Any, checkpoint_io: Any) -> None:
    """Checks that there is something at a local path; other addresses, and names such as "last", are looked up later.

    Args:
        path: as the user gave it.
        checkpoint_io: the strategy's; one of the user's own may keep checkpoints elsewhere.

    Raises:
        MissingCheckpointError: there is nothing; the message has the closest name in that folder.
    """
    if not isinstance(path, (str, os.PathLike)) or path in _LOOKED_UP:
        return
    if not isinstance(checkpoint_io, TorchCheckpointIO):
        return
    given = os.fspath(path)
    if "://" in given or given.startswith("registry:") or os.path.exists(given):  # Lightning: a registry of models
        return
    given = given.rstrip("/")
    folder, name = os.path.split(os.path.abspath(given))
    there = os.listdir(folder) if os.path.isdir(folder) else []
    if any(entry.startswith(LEFTOVERS) for entry in there):
        return  # what a save that was killed has left may get this name, once the folder is repaired
    beside = {entry: os.path.join(os.path.dirname(given), entry) for entry in there}
    known = beside | {name: name for name in _LOOKED_UP}
    hint = did_you_mean(name, known, lambda near: repr(known[near]))
    # Begins as Lightning's does, with the path as it was given.
    where = "" if os.path.isabs(given) else f" There is nothing at {os.path.join(folder, name)}."
    raise MissingCheckpointError(f"Checkpoint file not found: {given}.{where}{hint}")


def check_writable(folders: Mapping[str, str]) -> None:
    """Checks that a run can write where it is to; addresses that are no local paths are looked up later.

    Args:
        folders: each with the argument that names it; what is missing will be created.

    Raises:
        RefusedError: one can't be written to.
    """
    for folder, argument in folders.items():
        if "://" in folder:
            continue
        there = os.path.abspath(folder)
        while not os.path.lexists(there):
            there = os.path.dirname(there)
        try:
            tempfile.TemporaryFile(dir=there).close()
        except OSError as error:
            where = "" if there == os.path.abspath(folder) else f" {there}:"
            raise RefusedError(
                f"{argument} can't be written to:{where} {error.strerror}. Give a folder that can, or logger=False and"
                " enable_checkpointing=False to write nothing."
            ) from None
