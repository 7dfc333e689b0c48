"""Garbage collection in training on accelerators: at the same batches on all ranks, and without what set-up has made.

Python collects when a process has made some number of objects, so each rank at another moment, while the others wait;
now and then it looks through all objects, hundreds of thousands after `import torch`. Here automatic collection is off
while an epoch trains; each rank collects after its first batch, where it freezes what is there then (`gc.freeze`), and
after every 20th, which takes less than a millisecond. torchtitan does so every 50 steps
(https://github.com/pytorch/torchtitan, `GarbageCollection`).

A step that leaves tensors of the device in reference cycles would keep their memory for that long. So after a
collection that has freed such memory the next one follows after the next batch.
"""

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..devices import allocated_bytes

__all__ = ["GarbageCollection"]

_EVERY_N_BATCHES = 20
"""A collection took 0.2 to 0.8 ms with 12 blocks, below 0.2 % of 20 steps of 30 ms; the first one, of all objects, 0.75
s."""
_is_off = False
"""Whether automatic collection is off in this process because of a training epoch."""


class GarbageCollection:
    """The garbage collections of a trainer's runs."""

    due: float = math.inf
    """The number of batches trained on after which the next collection is due; infinity while Python collects."""
    _has_frozen = False

    @contextmanager
    def at_same_batches(self, device: torch.device) -> Iterator[None]:
        """Context of an epoch in which `collect` collects, and Python does not.

        Nothing changes on a CPU, whose memory for tensors can't be asked for, and where the user has turned automatic
        collection off.
        """
        was_enabled = gc.isenabled()
        if device.type == "cpu" or not (was_enabled or _is_off):
            yield
            return
        was_due, self.due, self._device = self.due, 0, device
        _turn(on=False)
        try:
            yield
        finally:
            self.due = was_due
            if was_enabled:
                _turn(on=True)

    def collect(self, num_batches: int) -> None:
        """Collects after a batch, unless the user has turned automatic collection on."""
        if gc.isenabled():
            self.due = math.inf
            return
        before = allocated_bytes(self._device)
        if gc.get_freeze_count() == 0:
            gc.collect()
            gc.freeze()
            self._has_frozen = True
        else:  # what a launcher or the user has frozen must stay so, and the rest may be much: only what is new
            gc.collect(2 if self._has_frozen else 1)
        has_freed = allocated_bytes(self._device) < before
        self.due = num_batches + 1 if has_freed else (num_batches // _EVERY_N_BATCHES + 1) * _EVERY_N_BATCHES

    @contextmanager
    def automatic(self) -> Iterator[None]:
        """Context of an evaluation amid an epoch: Python collects as usual."""
        if self.due == math.inf or gc.isenabled():
            yield
            return
        _turn(on=True)
        try:
            yield
        finally:
            _turn(on=False)

    def end_run(self) -> None:
        """Lets collections look through everything again."""
        if self._has_frozen:
            gc.unfreeze()
            self._has_frozen = False


def _turn(*, on: bool) -> None:
    global _is_off
    _is_off = not on
    (gc.enable if on else gc.disable)()


def _turn_on_in_child() -> None:
    if _is_off:  # a process that is forked amid an epoch, such as a loader's worker, has no such batches
        _turn(on=True)


os.register_at_fork(after_in_child=_turn_on_in_child)
