"""The most memory that a process has had within a block."""

import ctypes
import threading
from typing import Any

import psutil

_MMAP_THRESHOLD = -3
# Otherwise glibc raises the threshold with each large block that is freed, and keeps later ones as its own: a tensor
# that is gone would still count, and one that takes its place would not.
ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 20)


class Peak:
    """The most memory of this process, beyond what it had at the beginning, that is in no file."""

    def __enter__(self) -> "Peak":
        self.before, self.bytes, self._ended = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.bytes = max(self.bytes, self._now() - self.before)

    def _now(self) -> int:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared
