"""Messages about checkpoints that would run code if they were opened."""

import pickle
import re

from .manifest import CheckpointError

__all__ = ["NotPlainError", "not_plain"]


class NotPlainError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint is in order, but would run code if it was opened; both our kind of error and torch's."""

    @classmethod
    def of(cls, path: object, refused: Exception) -> "NotPlainError":
        """Returns the error about the checkpoint `path`, which torch has refused to open."""
        return cls(
            f"The checkpoint {path} holds objects that are no plain values: {_first_line(refused)} If you trust it,"
            " pass weights_only=False, or name the classes: torch.serialization.add_safe_globals([...])."
        )


def not_plain(refused: Exception) -> str:
    """Returns the warning for a checkpoint that is saved, but that torch will refuse to open."""
    return (
        "The checkpoint holds objects that are no plain values, so it will open with weights_only=False only, or after"
        f" torch.serialization.add_safe_globals([...]): {_first_line(refused)}"
    )


def _first_line(error: Exception) -> str:
    """Returns the line that says what torch refused, without its advice."""
    found = re.search(r"(Unsupported|Trying to load unsupported|Can only create) [^\n]*?(?= was not|\n|$)", str(error))
    return f"{(found[0] if found else str(error).splitlines()[0]).rstrip('.')}."
