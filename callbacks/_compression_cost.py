"""Times one step of each interval: the time to compress gradients, and the time to send them."""

from typing import Any

from polyphase.engine.compression import busy_s
from polyphase.engine.strategies import adapt

from .communication import CommunicationMonitor

__all__ = ["CompressionWatch"]


class CompressionWatch:
    """Makes a strategy's hook record the times of a step; they are read an interval later, so nothing waits for them.

    It is off without a compression, with a `CommunicationMonitor`, and with a method that measures itself.
    """

    def __init__(self, trainer: Any) -> None:
        others = any(isinstance(callback, CommunicationMonitor) for callback in trainer.callbacks)
        is_off = trainer.world_size == 1 or others or trainer.flags.get("compression") in (None, "none")
        self._hook: Any = None if is_off else adapt(trainer.strategy).active_hook
        self._wires = [] if self._hook is None else list(adapt(trainer.strategy).wires)
        self._is_timed = False
        self._done: dict[str, Any] | None = None

    @property
    def is_on(self) -> bool:
        """Whether it records times."""
        return self._hook is not None

    def begin_step(self) -> None:
        """Called before each batch of a timed step."""
        if self._is_timed or self._hook.bucket_times is not None:
            return
        self._is_timed = True
        self._hook.bucket_times = []
        for wire in self._wires:
            wire.collective_times = []
        self._before = self._bytes()

    def end_step(self) -> None:
        """Called after that step."""
        if not self._is_timed:
            return
        spans = [span for wire in self._wires for span in wire.collective_times or ()]
        plain, sent = (now - before for now, before in zip(self._bytes(), self._before, strict=True))
        buckets = [(ready, done) for _, ready, done in self._hook.bucket_times or ()]
        self._done = {"buckets": buckets, "spans": spans, "plain": plain, "sent": sent}
        self.close()

    def take(self) -> dict[str, float]:
        """Returns the numbers of the step that was timed before the last call; empty if there is none."""
        done, self._done = self._done, None
        if done is None or not done["buckets"] or not done["sent"]:
            return {}
        wire_s = busy_s(done["spans"])
        return {
            "wire_s": wire_s,
            "compress_s": max(0.0, busy_s(done["buckets"]) - wire_s),
            "sent_mb": done["sent"] / 1e6,
            "plain_mb": done["plain"] / 1e6,
            "num_looks": 1.0,
        }

    def close(self) -> None:
        """Restores the hook and the wires."""
        if self._is_timed:
            self._is_timed = False
            self._hook.bucket_times = None
            for wire in self._wires:
                wire.collective_times = None

    def _bytes(self) -> tuple[int, int]:
        return self._hook.num_plain_bytes, self._hook.num_bytes
