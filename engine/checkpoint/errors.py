"""The errors of checkpoints that can't be opened."""

from ..foreign import for_terminal

__all__ = ["CheckpointError", "NewerFormatError", "damage", "missing"]


class CheckpointError(ValueError):
    """A checkpoint can't be opened: it is missing, damaged, or does not fit; the message says which."""

    def __init__(self, message: str = "", *, has_lines: bool = False) -> None:
        # It names files, keys and versions as the checkpoint has them.
        super().__init__(for_terminal(message, has_lines=has_lines))
        self.is_damage = False
        """Whether the content of the checkpoint is damaged: no run and no version can open it."""


def damage(path: object, what: str) -> CheckpointError:
    """Returns the error for a damaged checkpoint."""
    error = CheckpointError(f"The checkpoint {path} is damaged: {what.rstrip('.')}.")
    error.is_damage = True
    return error


def missing(path: object, where: str = "") -> FileNotFoundError:
    """Returns the error for a path at which there is nothing; it begins as Lightning's does."""
    return FileNotFoundError(f"Checkpoint file not found{where}: {path}")


class NewerFormatError(CheckpointError):
    """A checkpoint was written by a newer version of Polyphase, which is needed to open it."""

    sequence: int | None = None
    """The number of the save, as in `Manifest`; None if the checkpoint does not say."""
