"""The engine's `CheckpointIO`: saves, opens and removes by the interface that Lightning's strategies call."""

from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from ..distributed.object_group import num_ranks
from .checked_io import resolve
from .errors import missing
from .manifest import is_checkpoint, is_directory, is_torch_file, path_status, read_manifest
from .saver import AsyncCheckpointer, load_checkpoint
from .single_file import MANIFEST_KEY, OURS
from .whole import check_file_state, read_file, refusal_of, write_file

__all__ = ["EngineIO"]


class EngineIO(TorchCheckpointIO):
    """Writes Lightning's files atomically; opens and removes these and the engine's directories."""

    def __init__(self, saver: AsyncCheckpointer) -> None:
        super().__init__()
        self._saver = saver
        self._has_checked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes one file.

        Raises:
            TypeError: `storage_options` were given, as for Lightning's `TorchCheckpointIO`.
            CheckpointError: the file can't be opened again.
        """
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # raises Lightning's own error
            return
        is_empty = write_file(checkpoint, str(path)) == 0  # tests replace `torch.save` to count its calls
        if MANIFEST_KEY in checkpoint.get(OURS, ()) and not is_empty:
            read_manifest(path)  # before an older one is removed
        if not self._has_checked:
            self._has_checked = True
            if (refusal := refusal_of(checkpoint)) is not None:
                rank_zero_warn(refusal)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens a file or a directory, whole, on the CPU."""
        self._saver.finish()
        if is_directory(path):
            return load_checkpoint(path, weights_only=weights_only)
        fs, fs_path = resolve(path)
        if not fs.exists(fs_path):
            raise missing(path)
        is_lazy = num_ranks() > 1 and is_checkpoint(path)  # each rank reads only its part
        checkpoint = read_file(path, weights_only, lazily=is_lazy, map_location=map_location or "cpu")
        check_file_state(checkpoint, path, takes_edits=True)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Removes a file or a directory; the engine's own checkpoints only when the save in flight has succeeded."""
        # Lightning: its launchers hand the weights to the first process in a file that is not a whole checkpoint.
        if is_torch_file(path) and path_status(path).kind != "ours":
            super().remove_checkpoint(path)
        else:
            self._saver.remove(str(path))
