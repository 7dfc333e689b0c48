"""Writes, opens and removes checkpoints that are files, by the interface that Lightning's strategies call."""

from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_warn

from ..checkpoint import AsyncCheckpointer, is_checkpoint, is_directory, load_checkpoint
from ..checkpoint.ownership import is_torch_file, path_status
from ..checkpoint.whole import read_file, refusal_of, write_file
from ..distributed.object_group import num_ranks

__all__ = ["EngineIO"]


class EngineIO(TorchCheckpointIO):
    """Lightning's files, written so that they are whole or not there, and our directories where there are some."""

    def __init__(self, saver: AsyncCheckpointer) -> None:
        super().__init__()
        self._saver = saver
        self._has_checked = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes one file.

        Raises:
            TypeError: for `storage_options`, as of Lightning's.
        """
        if storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)  # says what it is for
            return
        write_file(checkpoint, str(path))
        if not self._has_checked:
            self._has_checked = True
            if (refusal := refusal_of(str(path))) is not None:
                rank_zero_warn(refusal)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Opens either kind, whole, on the CPU."""
        self._saver.finish()
        if is_directory(path):
            return load_checkpoint(path, weights_only=weights_only)
        if is_checkpoint(path):
            return read_file(path, weights_only, lazily=num_ranks() > 1)  # of which each takes a part
        return super().load_checkpoint(path, map_location or (lambda storage, _: storage), weights_only)

    def remove_checkpoint(self, path: Any) -> None:
        """Removes either kind; a checkpoint not before its successor is there."""
        # Lightning: its launchers leave the weights for the first process in a file that is no whole checkpoint.
        if is_torch_file(path) and path_status(path).kind != "ours":
            super().remove_checkpoint(path)
        else:
            self._saver.remove(str(path))
