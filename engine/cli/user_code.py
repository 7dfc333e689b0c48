"""Imports the user's own modules, and shows errors in them without the frames of the command."""

import importlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Sequence

__all__ = ["import_classes", "values_of"]


def import_classes(words: Sequence[str]) -> None:
    """Imports the modules named by ``--model`` and ``--data``; ends the process with 1 if one of them fails.

    jsonargparse would show only the message, without the traceback.
    """
    for flag in ("--model", "--data"):
        for name in values_of(flag, words):
            if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) and not os.path.exists(name):
                _import(flag, name.rpartition(".")[0])


def values_of(flag: str, words: Sequence[str]) -> list[str]:
    """Returns the values of a flag in a command line: those of ``--flag value``, then those of ``--flag=value``."""
    values = [after for word, after in itertools.pairwise(words) if word == flag]
    return values + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def _import(flag: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        sys.stderr.write("".join(_own_frames(error)))
        print(f"polyphase: error: {flag}: importing {module} failed, see above.", file=sys.stderr)
        sys.exit(1)


def _own_frames(error: BaseException) -> list[str]:
    """Returns the lines of a traceback in the user's files, and its message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return [
        "Traceback (most recent call last):\n" if frames else "",
        *traceback.format_list(frames),
        *traceback.format_exception_only(error),
    ]


def _is_own(path: str) -> bool:
    if path.startswith("<"):
        return False  # frames of the import system
    real = os.path.realpath(path)
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    library = os.path.dirname(os.path.realpath(os.__file__))
    return not (real.startswith((package + os.sep, library + os.sep)) or "site-packages" in real)
