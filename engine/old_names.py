"""The old names of commands, methods and options, which work for one more release and warn; read without torch."""

import functools

from .flags import renamed_options

__all__ = ["current_spelling", "warn_of_old_name"]


def current_spelling(kind: str, text: str, options: type) -> str:
    """The flag `text` with the current names of renamed options; the rest is unchanged.

    Warns of each old name.

    Args:
        kind: kind of flag, for the warning.
        text: the flag as the user wrote it.
        options: class of its options, see `renamed`.
    """
    new_names = renamed_options(options)
    name, colon, arguments = text.partition(":")
    current = []
    for argument in arguments.split(","):
        key, equals, word = argument.partition("=")
        new = new_names.get(key.strip()) if equals else None
        if new is not None:
            warn_of_old_name(f"the option {key.strip()!r} of {kind}", repr(new))
        current.append(argument if new is None else f"{new}={word}")
    return name + colon + ",".join(current)


@functools.cache
def warn_of_old_name(old: str, new: str) -> None:
    """Warns, once and on rank 0, that something has a new name.

    Args:
        old: what it was called, as a noun with its old name.
        new: what it is called now.
    """
    # Imported here, because only an old name needs it: the command reads its flags without torch.
    from lightning.fabric.utilities.rank_zero import rank_zero_warn

    message = f"{old} is now called {new}. The old name works until polyphase 0.3: use the new one."
    rank_zero_warn(message, category=FutureWarning)
