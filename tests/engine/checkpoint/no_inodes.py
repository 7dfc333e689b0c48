"""Saves where there is room for the first checkpoint's files, and for no second one's."""

import ctypes
import os
import subprocess
import warnings
from pathlib import Path
from typing import NamedTuple

from polyphase.engine.checkpoint import AsyncCheckpointer, CheckpointError

from .sample_checkpoints import about, content, is_whole, rank_state, save

_OWN_USERS, _OWN_MOUNTS = 0x10000000, 0x00020000
"""Linux's CLONE_NEWUSER and CLONE_NEWNS; `os.unshare` is Python 3.12's."""


class Said(NamedTuple):
    """By the save in the background, and by the one in the foreground; and what is left."""

    warned: list[str]
    raised: str
    left: bool
    whole: bool


def save_without_inodes(folder: Path) -> Said:
    """Mounts a file system with few inodes there, for this process alone."""
    users = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    if ctypes.CDLL(None, use_errno=True).unshare(_OWN_USERS | _OWN_MOUNTS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    for name, number in users.items():
        Path("/proc/self", name).write_text(f"0 {number} 1")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=32", "none", folder], check=True)
    saver = AsyncCheckpointer()
    save(folder / "1", 1, saver)
    left = sorted(os.listdir(folder))
    while True:
        try:
            (folder / f"filler{len(os.listdir(folder))}").touch()
        except OSError:
            break
    (folder / "filler1").unlink()  # for the directory, but for no file in it
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saver.save(content(2), str(folder / "2"), about=about(2), of_rank=rank_state(2))
        saver.finish()
    raised = ""
    try:
        save(folder / "2", 2, saver)
    except (CheckpointError, OSError) as error:
        raised = str(error)
    return Said(
        warned=[str(warning.message) for warning in caught],
        raised=raised,
        left=[name for name in sorted(os.listdir(folder)) if not name.startswith("filler")] == left,
        whole=is_whole(str(folder / "1"), 1),
    )
