"""Errors and warnings for checkpoints that could run code when they are opened."""

import pickle
import re

from .manifest import CheckpointError

__all__ = ["NotPlainError", "not_plain"]


class NotPlainError(CheckpointError, pickle.UnpicklingError):
    """A checkpoint is undamaged, but opening it could run code. It derives from our error type and from torch's."""

    @classmethod
    def for_path(cls, path: object, refused: Exception) -> "NotPlainError":
        """Returns the error for the checkpoint `path` that torch refused to open."""
        return cls(
            f"The checkpoint {path} holds objects that are no plain values: {_first_line(refused)} If you trust it,"
            " pass weights_only=False, or name the classes: torch.serialization.add_safe_globals([...])."
        )


def not_plain(refused: Exception) -> str:
    """Returns the warning for a saved checkpoint that torch will refuse to open."""
    return (
        "The checkpoint holds objects that are no plain values, so it will open with weights_only=False only, or after"
        f" torch.serialization.add_safe_globals([...]): {_first_line(refused)}"
    )


def _first_line(error: Exception) -> str:
    """Returns the line of torch's message that names the refused object, without torch's advice."""
    refusal = re.search(
        r"(Unsupported|Trying to load unsupported|Can only create) [^\n]*?(?= was not|\n|$)", str(error)
    )
    return f"{(refusal[0] if refusal else str(error).splitlines()[0]).rstrip('.')}."
