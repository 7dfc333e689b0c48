"""Less work for the many forks of a large process: a fork copies an entry for each of its pages.

Linux copies one entry for a huge page, and 512 for as much memory in ordinary ones. What a fork writes on is copied as
before, in ordinary pages.
"""

import ctypes
import sys

_SIZE = 2 << 20
# Of <linux/mman.h>: the first lets a range have huge pages, the second moves what is there into such at once.
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def have_huge_pages() -> None:
    """Moves what this process has allocated into huge pages, where the kernel has any: all that is left as it was."""
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    for first, end in _allocated():
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), advice)


def _allocated() -> list[tuple[int, int]]:
    """The ranges of whole huge pages in private memory that is no file's."""
    ranges = []
    with open("/proc/self/maps") as lines:
        for line in lines:
            addresses, permissions, _, _, inode, *name = line.split()
            if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                first, end = (int(address, 16) for address in addresses.split("-"))
                ranges.append((-(-first // _SIZE) * _SIZE, end // _SIZE * _SIZE))
    return [(first, end) for first, end in ranges if first < end]
