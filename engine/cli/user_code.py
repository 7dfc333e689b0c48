"""Importing the user's own modules: what fails there is shown as theirs, without the frames of the command."""

import importlib
import itertools
import os
import re
import sys
import traceback
from collections.abc import Sequence

__all__ = ["import_classes", "own_frames"]


def import_classes(words: Sequence[str]) -> None:
    """Imports the modules named behind ``--model`` and ``--data``; ends the process with 1 if one of them fails.

    jsonargparse would say no more of it than the message.
    """
    for flag in ("--model", "--data"):
        given = [after for word, after in itertools.pairwise(words) if word == flag]
        given += [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]
        for name in given:
            if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name) and not os.path.exists(name):
                _import(flag, name.rpartition(".")[0])


def _import(flag: str, module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        sys.stderr.write("".join(own_frames(error)))
        print(f"polyphase: error: {flag}: importing {module} failed, see above.", file=sys.stderr)
        sys.exit(1)


def own_frames(error: BaseException) -> list[str]:
    """The lines of a traceback that are of files of the user's, and its message."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    return [
        "Traceback (most recent call last):\n" if frames else "",
        *traceback.format_list(frames),
        *traceback.format_exception_only(error),
    ]


def _is_own(path: str) -> bool:
    if path.startswith("<"):
        return False  # the machinery of import
    real = os.path.realpath(path)
    package = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    library = os.path.dirname(os.path.realpath(os.__file__))
    return not (real.startswith((package + os.sep, library + os.sep)) or "site-packages" in real)
