"""Errors that refuse a run before any process starts; the command shows them as one line."""

import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from .checkpoint.publish import LEFTOVERS
from .distributed.environment import has_rendezvous
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
    """The requested run is impossible; a subclass of the error that Lightning raises in this case."""


class MissingCheckpointError(RefusedError, FileNotFoundError):
    """There is no checkpoint at the given path."""


class NoModuleError(RefusedError, TypeError):
    """The object to be run is no `LightningModule`; a `TypeError` too, as in Lightning."""


@contextmanager
def refusing() -> Iterator[None]:
    """In this context, errors of the engine's own code become a `RefusedError`; those of the user's code do not."""
    try:
        yield
    except (ValueError, MisconfigurationException) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if isinstance(error, RefusedError) or not frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
            raise
        raise RefusedError(str(error)).with_traceback(error.__traceback__) from None


def check_nodes(num_nodes: int, cluster_environment: Any) -> None:
    """Checks that processes of several nodes can find each other; otherwise they would wait for ever.

    Raises:
        RefusedError: no address of the rendezvous is set.
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
        checkpoint_io: the strategy's; the user's own class may keep checkpoints elsewhere.

    Raises:
        MissingCheckpointError: there is nothing; the message has the closest name in that folder.
    """
    if not isinstance(path, (str, os.PathLike)) or path in _LOOKED_UP:
        return
    if not isinstance(checkpoint_io, TorchCheckpointIO):
        return
    path_text = os.fspath(path)
    if (
        "://" in path_text or path_text.startswith("registry:") or os.path.exists(path_text)
    ):  # Lightning: a registry of models
        return
    path_text = path_text.rstrip("/")
    folder, name = os.path.split(os.path.abspath(path_text))
    entries = os.listdir(folder) if os.path.isdir(folder) else []
    if any(entry.startswith(LEFTOVERS) for entry in entries):
        return  # repairing the folder may rename the remains of a killed save to this name
    beside = {entry: os.path.join(os.path.dirname(path_text), entry) for entry in entries}
    names = beside | {name: name for name in _LOOKED_UP}
    hint = did_you_mean(name, names, lambda near: repr(names[near]))
    # Begins like Lightning's message, with the path as the user wrote it.
    where = "" if os.path.isabs(path_text) else f" There is nothing at {os.path.join(folder, name)}."
    raise MissingCheckpointError(f"Checkpoint file not found: {path_text}.{where}{hint}")


def check_writable(folders: Mapping[str, str]) -> None:
    """Checks that a run can write to its folders; addresses that are no local paths are checked later.

    Args:
        folders: the argument that names each folder, by path; missing folders will be created.

    Raises:
        RefusedError: one can't be written to.
    """
    for folder, argument in folders.items():
        if "://" in folder:
            continue
        existing = os.path.abspath(folder)
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        try:
            tempfile.TemporaryFile(dir=existing).close()
        except OSError as error:
            where = "" if existing == os.path.abspath(folder) else f" {existing}:"
            raise RefusedError(
                f"{argument} can't be written to:{where} {error.strerror}. Give a folder that can, or logger=False and"
                " enable_checkpointing=False to write nothing."
            ) from None
