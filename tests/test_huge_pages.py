"""Huge pages change nothing but how often the kernel has something to do."""

import mmap
import re
import sys
from pathlib import Path

import pytest

from tests.huge_pages import have_huge_pages


def _huge_kb() -> int:
    return int(re.findall(r"AnonHugePages: +(\d+)", Path("/proc/self/smaps_rollup").read_text())[0])


@pytest.mark.skipif(sys.platform != "linux", reason="there is no such call elsewhere")
def test_what_is_there_stays_and_is_in_huge_pages():
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        content = bytes(range(256)) * (len(memory) // 256)
        memory.write(content)
        before = _huge_kb()
        have_huge_pages()
        assert memory[:] == content
        assert _huge_kb() > before or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
