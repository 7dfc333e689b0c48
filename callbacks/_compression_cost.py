"""Times one step of each interval: how long gradients are compressed, and how long they are on the wire."""

from typing import Any

from polyphase.engine.compression import busy_s
from polyphase.engine.strategies import adapt

from .communication import CommunicationMonitor

__all__ = ["CompressionWatch"]


class CompressionWatch:
    """Has a strategy's hook note the times of a step; they are read an interval later, and nothing waits for them.

    It rests without a compression, and beside a `CommunicationMonitor` or a method that measures by itself.
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
        """Whether there is something to time."""
        return self._hook is not None

    def begin_step(self) -> None:
        """Called before each batch of a step that is to be timed."""
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
        """Returns the numbers of the step that was timed before the last call; nothing if there is none."""
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
        """Leaves hook and wires as they were."""
        if self._is_timed:
            self._is_timed = False
            self._hook.bucket_times = None
            for wire in self._wires:
                wire.collective_times = None

    def _bytes(self) -> tuple[int, int]:
        return self._hook.num_plain_bytes, self._hook.num_bytes
