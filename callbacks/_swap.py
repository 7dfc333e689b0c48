"""Reads what Linux says of swapped memory: of the host since the last look, and of this process."""

import os
from pathlib import Path

__all__ = ["SwapWatch"]


class SwapWatch:
    """Counts what this host reads back from swap; two files of `/proc` are read at each look.

    Args:
        proc: the folder of these files; on systems other than Linux there is none, and nothing is known.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._vmstat, self._status = proc / "vmstat", proc / "self" / "status"
        self._num_pages = self._pages_read()

    def take(self) -> dict[str, float]:
        """Returns ``swap_read_mb``, of the host since the last look, and ``swapped_mb``, of this process; no zeros."""
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
