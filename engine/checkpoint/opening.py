"""Opens a checkpoint directory: checks it for damage and reads the parts that one rank needs."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..foreign import NotAPlainFileError
from .checked_io import Files
from .content import check_state
from .dcp_storage import Index, check_index, read_index, read_into
from .errors import CheckpointError, damage
from .manifest import RANKS, REST, TENSORS, Manifest, read_manifest
from .publish import check_files
from .single_file import HEAD, OURS
from .state_tree import is_mark, join, like, marks, structure_of, tensor_keys
from .whole import NotPlainError, load_archive

__all__ = ["Wants", "check_content", "check_written", "load_file", "open_directory", "weights_of", "wrong_files"]


class Wants(NamedTuple):
    """The parts of a checkpoint that a rank reads; the fields are the arguments of `AsyncCheckpointer.load`."""

    template: Callable[[str], Tensor | None] = lambda key: None
    leave_out: tuple[str, ...] = ()
    rank: int = 0
    layout: dict[str, int] | None = None
    own: tuple[str, ...] = ()
    weights_only: bool | None = None


def wrong_files(path: str, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Lists damaged files in this rank's share, and required files that the manifest does not list."""
    missing = [f"{name} is missing in the manifest" for name in manifest.missing_files()] if share[0] == 0 else []
    return missing + check_files(path, manifest, share)


def open_directory(path: str, manifest: Manifest, num_ranks: int, wants: Wants) -> dict[str, Any]:
    """Opens a checkpoint whose files match their checksums. Their content may still be invalid, and is validated."""
    files = Files(path)
    with _as_damage(path, wants.weights_only):
        index = read_index(files, manifest)
        rest, ranks = _states(files, manifest, index, wants.weights_only)
        for key in wants.leave_out:
            rest.pop(key, None)
        if manifest.world_size == num_ranks and manifest.layout == wants.layout:
            of_ranks = tensor_keys(ranks[wants.rank])
        else:
            # Other ranks or another layout: the tensors of all ranks are needed to redistribute them.
            of_ranks = tensor_keys([{key: state[key] for key in state.keys() - wants.own} for state in ranks])
        shared = tensor_keys(rest)
    # The tensors in a rank's own state are not sharded, so they have no template.
    templates = {key: wants.template(key) for key in shared} | dict.fromkeys(of_ranks)
    elsewhere = {key: template for key, template in templates.items() if template is not None and template.is_meta}
    with _as_damage(path, wants.weights_only):
        tensors = {
            key: like(template, torch.Size(index[key].size), index[key].dtype)
            for key, template in templates.items()
            if key not in elsewhere
        }
        read_into(tensors, files, index)
        tensors.update(elsewhere)
        checkpoint = join(rest, tensors)
        checkpoint.setdefault(OURS, {})["ranks"] = join(ranks, tensors)
    return checkpoint


def weights_of(
    path: str, weights_only: bool | None, choose: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, tuple[Tensor, Callable[[], Tensor]]]]:
    """Checks a checkpoint directory and opens its weights, without reading any.

    Args:
        path: the checkpoint.
        weights_only: as for `torch.load`.
        choose: returns the state of the module that is meant, of the checkpoint's content.

    Returns:
        The checkpoint's content with a mark for each tensor; and by name in the module's state, a tensor on the meta
        device and the function that reads it whole.
    """
    manifest = read_manifest(path)
    if wrong := wrong_files(path, manifest):
        raise damage(path, "; ".join(wrong))
    files = Files(path)
    with _as_damage(path, weights_only):
        index = read_index(files, manifest)
        rest, _ = _states(files, manifest, index, weights_only)

    def reading(key: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            tensor = torch.empty(index[key].size, dtype=index[key].dtype)
            with _as_damage(path, weights_only):
                read_into({key: tensor}, files, {key: index[key]})
            return tensor

        return read

    weights = {}
    for name, value in choose(rest).items():
        for key in tensor_keys([value] if isinstance(value, dict) and is_mark(value) else []):
            weights[name] = torch.empty(index[key].size, dtype=index[key].dtype, device="meta"), reading(key)
    return rest, weights


def _states(
    files: Files, manifest: Manifest, index: Index, weights_only: bool | None
) -> tuple[dict[str, Any], list[Any]]:
    """Reads the unsharded state and each rank's own state; checks them, and that they agree with the other files."""
    ranks, rest = load_file(files, RANKS, weights_only), load_file(files, REST, weights_only)
    _check_states(rest, ranks, manifest, index)
    return rest, ranks


def _check_states(rest: Any, ranks: Any, manifest: Manifest, index: Index) -> None:
    if type(rest) is not dict or type(ranks) is not list or any(type(state) is not dict for state in ranks):
        raise CheckpointError(f"{REST} or {RANKS} has content of the wrong type")
    if len(ranks) != manifest.world_size:
        raise CheckpointError(f"{RANKS} has the state of {len(ranks)} ranks, but {manifest.world_size} saved it")
    for key, expected in (("global_step", manifest.step), ("epoch", manifest.epoch)):
        if rest.get(key, expected) != expected:
            raise CheckpointError(f"its {key} is {expected} in the manifest, but another in {REST}")
    _check_marks(rest, ranks, index)
    check_state(rest, ranks, manifest)
    for name, content in ((REST, rest), (RANKS, ranks)):
        if manifest.structures.get(name) != structure_of(content):
            raise CheckpointError(f"{name} has other entries, or entries of other types, than were saved")


def _check_marks(rest: dict[str, Any], ranks: list[Any], index: Index) -> None:
    """Checks that each mark stands for a tensor, at the place of this tensor, and that none was left out."""
    of_rest = [*marks(rest)]
    of_all = [*of_rest, *marks(ranks)]
    if {type(key) for _, key in of_all} - {str}:
        raise CheckpointError("it refers to a tensor by a key that is not text")
    if absent := [key for _, key in of_all if key not in index]:
        raise CheckpointError(f"it has no tensors {', '.join(absent)}")
    for path, key in of_rest:
        if key.rstrip("'") != path.rstrip("'"):
            raise CheckpointError(f"it has the tensor {key} in the place of {path}")
    # In the state of callbacks, another rank than rank 0 may have had tensors of its own.
    weights = {key for key in index if key.startswith(("state_dict.", "optimizer_states."))}
    if unused := sorted(weights - {key for _, key in of_all}):
        raise CheckpointError(f"nothing refers to its tensors {', '.join(unused)}")


@contextmanager
def _as_damage(path: str, weights_only: bool | None = None) -> Iterator[None]:
    """Turns any error in the block into a `CheckpointError` that names the checkpoint."""
    try:
        yield
    except CheckpointError as error:
        if error.is_damage or isinstance(error, NotPlainError):
            raise
        raise damage(path, str(error)) from error
    except Exception as error:
        if weights_only is False and not isinstance(error, OSError):
            raise  # may come from the user's own classes
        reason = str(error).splitlines()[0][:300] if str(error) else ""
        if isinstance(error, OSError):  # of the disk: it may be readable another time
            raise CheckpointError(f"The checkpoint {path} can't be read: {error}") from error
        raise damage(path, f"{type(error).__name__}: {reason}") from error


def check_content(path: str, manifest: Manifest) -> tuple[list[str], list[str]]:
    """Looks for faults in a checkpoint whose files match their checksums; reads no tensor and executes nothing.

    Args:
        path: the directory.
        manifest: the directory's manifest.

    Returns:
        One text for each fault, and one for objects in the rest that could run code when the checkpoint is opened:
        they may be the run's own, of which a save has warned.
    """
    files = Files(path)
    try:
        with _as_damage(path):
            index = read_index(files, manifest)
            _states(files, manifest, index, True)
    except NotPlainError as refused:
        return ([], [str(refused)]) if refused.file == REST else ([str(refused)], [])
    except CheckpointError as error:
        return [str(error).removeprefix(f"The checkpoint {path} is damaged: ").rstrip(".")], []
    return [], []


def check_written(path: str, manifest: Manifest, index: Index, rest: bytes, ranks: bytes) -> list[str]:
    """Does the work of `check_content` for a checkpoint that this process has just written, from what it wrote.

    Only the checksums of its small files are read back. To parse the files again takes longer than to write them, and
    the training needs the interpreter meanwhile.

    Args:
        path: the directory.
        manifest: the directory's manifest.
        index: the index of its tensors.
        rest: content of `REST`. Its types and those of `ranks` must be known to be plain: nothing is refused here.
        ranks: content of `RANKS`.

    Returns:
        One text for each fault.
    """
    files = Files(path)
    damaged = [files.check(name, *manifest.files[name]) for name in (TENSORS, REST, RANKS)]
    try:
        with _as_damage(path):
            check_index(index, manifest.files)
            # Written by this process: pickle's own unpickler, which is in C, runs nothing foreign.
            own_rest = torch.load(io.BytesIO(rest), map_location="cpu", weights_only=False)
            own_ranks = torch.load(io.BytesIO(ranks), map_location="cpu", weights_only=False)
            _check_states(own_rest, own_ranks, manifest, index)
    except CheckpointError as error:
        return [str(error)]
    return [*filter(None, damaged)]


def load_file(files: Files, name: str, weights_only: bool | None) -> Any:
    """Reads `REST` or `RANKS`; a mark with its key stands for each tensor that `split` has taken out.

    Raises:
        CheckpointError: the file has objects that `weights_only` does not allow.
    """
    try:
        with files.reading(name) as stream:
            if stream.read(len(HEAD)) != HEAD:
                raise CheckpointError(f"{name} is no file of torch.save")
            return load_archive(stream, files.url, weights_only is not False)
    except NotPlainError as refused:
        refused.file = name
        raise
    except NotAPlainFileError as error:
        raise CheckpointError(str(error)) from None
