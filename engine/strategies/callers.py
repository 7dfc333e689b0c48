"""The code that makes a call: the user's, that of torch, Lightning or this package, or Python's own library."""

import os
import sys
import traceback
import types

import lightning
import lightning_utilities
import torch

from ..reliability.tracebacks import package_of

__all__ = [
    "LIBRARIES",
    "NOT_THE_USERS",
    "CutError",
    "is_between",
    "is_of_dtensor",
    "is_of_fsdp",
    "is_of_program",
    "is_outside",
    "is_users",
    "names_in",
    "users_line",
]

NOT_THE_USERS = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (
        torch.__file__,
        lightning.__file__,
        lightning_utilities.__file__,
        os.path.dirname(__file__),
    )
)
"""Folders of torch, Lightning and this package."""
_FSDP, _DTENSOR = (os.path.join(NOT_THE_USERS[0], "distributed", folder, "") for folder in ("fsdp", "tensor"))


LIBRARIES = {"torch", "lightning", "pytorch_lightning", "lightning_utilities", "torchmetrics", "numpy"}
LIBRARIES |= {__name__.split(".")[0], *sys.stdlib_module_names}
"""Packages whose code is none of the user's: a name of theirs stands for no state of a module."""


def names_in(code: types.CodeType) -> set[str]:
    """Returns the names of globals and attributes that code uses, that of inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(names_in, inner))


class CutError(RuntimeError):
    """The module can't be run in pipeline stages: a stage needs a value that another stage has."""


def is_users(frame: types.FrameType) -> bool:
    """Whether a frame runs the user's code, or code of a library other than torch, Lightning and this package."""
    return not frame.f_code.co_filename.startswith((*NOT_THE_USERS, "<"))


def is_of_program(frame: types.FrameType) -> bool:
    """As `is_users`, without Python's own library, such as `contextlib` between two functions of the engine."""
    return is_users(frame) and package_of(frame.f_code.co_filename) != "python"


def is_outside(frame: types.FrameType) -> bool:
    """As `is_users`, without the callbacks and the doctor of this package."""
    return is_users(frame) and package_of(frame.f_code.co_filename) != "polyphase"


def is_between(frame: types.FrameType) -> bool:
    """Whether a frame is one of torch, or of Python's own library, by which one piece of code calls another."""
    file = frame.f_code.co_filename
    return file.startswith((NOT_THE_USERS[0], "<")) or package_of(file) == "python"


def users_line() -> str:
    """Returns the line of the user's code that this call came from: ``file.py:12, "x = x + skip"``."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        if is_of_program(frame):
            [summary] = traceback.StackSummary.extract(iter([(frame, line)]), limit=1)
            return f'{summary.filename}:{line} in {summary.name}: "{summary.line}"'
    return "the module's step, or a callback,"


def is_of_fsdp(frame: types.FrameType | None) -> bool:
    """Whether FSDP2 makes a call: stages that skip the module do not make it."""
    return _is_within(frame, _FSDP)


def is_of_dtensor(frame: types.FrameType | None) -> bool:
    """Whether a call is made for an operation on a split tensor."""
    return _is_within(frame, _DTENSOR)


def _is_within(frame: types.FrameType | None, folder: str) -> bool:
    while frame is not None and not is_users(frame):
        if frame.f_code.co_filename.startswith(folder):
            return True
        frame = frame.f_back
    return False
