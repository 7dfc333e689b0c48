"""Reads Linux's counts of swapped memory: of the host since the last call, and of this process."""

import os
from pathlib import Path

__all__ = ["SwapWatch"]


class SwapWatch:
    """Counts the memory that this host reads back from swap; each call reads two files of `/proc`.

    Args:
        proc: the folder of these files; on other systems than Linux it does not exist, and nothing is reported.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._vmstat, self._status = proc / "vmstat", proc / "self" / "status"
        self._num_pages = self._pages_read()

    def take(self) -> dict[str, float]:
        """Returns ``swap_read_mb`` of the host since the last call, and ``swapped_mb`` of this process, if above 0."""
        before, self._num_pages = self._num_pages, self._pages_read()
        read_mb = (self._num_pages - before) * os.sysconf("SC_PAGE_SIZE") / 1e6
        kilobytes = _number(self._status, "VmSwap:")
        amounts = {"swap_read_mb": read_mb, "swapped_mb": kilobytes * 1024 / 1e6}
        return {name: mb for name, mb in amounts.items() if mb > 0.0}

    def _pages_read(self) -> int:
        return _number(self._vmstat, "pswpin")


def _number(path: Path, name: str) -> int:
    """Returns the number in the line of a file that begins with `name`; 0 if there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name)), 0)
