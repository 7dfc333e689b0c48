"""Files that others may have written: opens regular ones only, creates ours beside them, and shows their text as text.

A folder that several people write to may have a pipe, a link or a text with commands for the terminal in any place.
"""

import errno
import html
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

__all__ = ["NotAPlainFileError", "for_html", "for_terminal", "open_new", "open_plain", "written_beside"]

_NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Controls of terminals, marks that change the direction of the text, and bytes of file names that are no UTF-8."""


class NotAPlainFileError(ValueError):
    """A file is not opened, since it is a link, a folder, a device or a pipe, or larger than allowed."""


def open_plain(path: str, flags: int = 0) -> IO[bytes]:
    """Opens a local file for reading, with the further `flags` of `os.open`, unless it is a folder, device or pipe.

    Raises:
        NotAPlainFileError: it is one of these, or a link under the flag `os.O_NOFOLLOW`.
    """
    try:  # opening a pipe without O_NONBLOCK would wait for who writes into it
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotAPlainFileError(f"{os.path.basename(path)} is no plain file") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NotAPlainFileError(f"{os.path.basename(path)} is no plain file")
    return os.fdopen(handle, "rb")


def open_new(path: str) -> IO[str]:
    """Opens a new local text file of ours for writing, in the place of one that a killed process has left.

    A link at `path` is removed as well, and never followed.
    """
    if os.path.lexists(path):
        os.remove(path)
    return open(path, "x", encoding="utf-8")


@contextmanager
def written_beside(path: str) -> Iterator[str]:
    """Has somebody else's function write a local file of ours, by the yielded path, in a folder that only we can use.

    At the end the file gets the name `path`, in place of a file or a link there, which is never followed.
    """
    folder, name = os.path.split(path)
    with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as own:
        yield os.path.join(own, name)
        os.replace(os.path.join(own, name), path)


def for_terminal(text: str) -> str:
    """Returns a text without commands for a terminal: each control is written as Python writes it in a string."""
    return _NOT_SHOWN.sub(lambda control: control[0].encode("unicode_escape").decode(), text)


def for_html(text: object) -> str:
    """Returns a text for a page, in which it is neither markup nor a command for a terminal that shows the page."""
    return html.escape(for_terminal(str(text)))
