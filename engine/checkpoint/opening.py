"""Opens a checkpoint that is a directory: what of it is damaged, and what of it one rank needs."""

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import Files, NotAPlainFileError
from .manifest import RANKS, REST, CheckpointError, Manifest
from .not_plain import NotPlainError
from .pieces import reading_plan
from .shards import Reader, read_index
from .single_file import OURS
from .store import check_files
from .tensor_index import Index
from .tree import join, like, marks

__all__ = ["Wants", "check_content", "load_file", "open_directory", "wrong_files"]


class Wants(NamedTuple):
    """The parts of a checkpoint that a rank reads; the fields are the arguments of `Saver.load`."""

    template: Callable[[str], Tensor | None] = lambda key: None
    leave_out: tuple[str, ...] = ()
    rank: int = 0
    layout: dict[str, int] | None = None
    own: tuple[str, ...] = ()
    weights_only: bool | None = None


def wrong_files(path: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Lists the files in this rank's share that are not as the manifest says, and those that the manifest lacks."""
    missing = [f"{name} is missing in the manifest" for name in manifest.missing_files()] if share[0] == 0 else []
    return missing + check_files(path, manifest, share)


def open_directory(path: str, manifest: Manifest, num_ranks: int, wants: Wants) -> dict[str, Any]:
    """Opens a checkpoint whose files are as the manifest says; they may make no sense all the same."""
    files = Files(path)
    with _making_sense(path, wants.weights_only):
        index = read_index(files, manifest)
        rest, ranks = _states(files, manifest, wants.weights_only)
        for key in wants.leave_out:
            rest.pop(key, None)
        if manifest.world_size == num_ranks and manifest.layout == wants.layout:
            of_ranks = marks(ranks[wants.rank])
        else:
            # Each rank's are to be dealt anew.
            of_ranks = marks([{key: each[key] for key in each.keys() - wants.own} for each in ranks])
        shared = marks(rest)
        _check_present([*shared, *of_ranks], index)
    templates = {key: wants.template(key) for key in shared} | dict.fromkeys(of_ranks)  # a rank's own are whole
    elsewhere = {key: given for key, given in templates.items() if given is not None and given.is_meta}
    with _making_sense(path, wants.weights_only):
        tensors = {
            key: like(given, torch.Size(index[key].size), index[key].dtype)
            for key, given in templates.items()
            if key not in elsewhere
        }
        reader = Reader(files, index, is_packed=manifest.format < 2)
        planner, plan = reading_plan(tensors, reader.read_metadata())
        reader.read_data(plan, planner)
        tensors.update(elsewhere)
        checkpoint = join(rest, tensors)
        checkpoint.setdefault(OURS, {})["ranks"] = join(ranks, tensors)
    return checkpoint


def _states(files: Files, manifest: Manifest, weights_only: bool | None) -> tuple[dict[str, Any], list[Any]]:
    """The rest, and what each rank said; they agree with the manifest."""
    rest, ranks = load_file(files, REST, weights_only), load_file(files, RANKS, weights_only)
    if type(rest) is not dict or type(ranks) is not list or any(type(each) is not dict for each in ranks):
        raise CheckpointError(f"{REST} or {RANKS} holds something else")
    if len(ranks) != manifest.world_size:
        raise CheckpointError(f"{RANKS} is of {len(ranks)} ranks, {manifest.world_size} have saved it")
    for key, said in (("global_step", manifest.step), ("epoch", manifest.epoch)):
        if rest.get(key, said) != said:
            raise CheckpointError(f"its {key} is {said} in the manifest, and {str(rest[key])[:50]} in {REST}")
    return rest, ranks


def _check_present(keys: list[str], index: Index) -> None:
    if any(type(key) is not str for key in keys):
        raise CheckpointError("it marks a tensor by what is no name")
    if absent := [key for key in keys if key not in index]:
        raise CheckpointError(f"it has no tensors {', '.join(absent)}")


@contextmanager
def _making_sense(path: str, weights_only: bool | None = None) -> Iterator[None]:
    """Turns any error within into one of the checkpoint, which it names."""
    try:
        yield
    except NotPlainError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"The checkpoint {path} is damaged: {str(error).rstrip('.')}.") from error
    except Exception as error:
        if weights_only is False and not isinstance(error, OSError):
            raise  # of the user's own classes, say
        reason = str(error).splitlines()[0][:300] if str(error) else ""
        raise CheckpointError(f"The checkpoint {path} is damaged: {type(error).__name__}: {reason}") from error


def check_content(path: str, manifest: Manifest, *, is_to_open: bool = True) -> list[str]:
    """Looks for faults in a checkpoint whose files are as the manifest says, without reading its tensors.

    Args:
        path: the directory.
        manifest: that it has.
        is_to_open: count it as a fault that something in it would have to be executed to open it.

    Returns:
        The faults, a text for each. Nothing of the checkpoint is executed.
    """
    files = Files(path)
    try:
        with _making_sense(path):
            index = read_index(files, manifest)
            rest, ranks = _states(files, manifest, True)
            _check_present([*marks(rest), *marks(ranks)], index)
    except NotPlainError as refused:
        return [str(refused)] if is_to_open else []
    except CheckpointError as error:
        return [str(error).removeprefix(f"The checkpoint {path} is damaged: ").rstrip(".")]
    return []


def load_file(files: Files, name: str, weights_only: bool | None) -> Any:
    """Opens `REST` or `RANKS`, with marks in place of the tensors that are sharded.

    Raises:
        CheckpointError: there are objects in it that `weights_only` does not allow.
    """
    try:
        stream = io.BytesIO(files.read(name))
    except NotAPlainFileError as error:
        raise CheckpointError(str(error)) from None
    try:
        return torch.load(stream, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as refused:
        raise NotPlainError.of(files.url, refused) from None
