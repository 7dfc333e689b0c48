"""`CommunicationMonitor`: what a step sends, how long that takes, and how much of it backward hides."""

from collections import Counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from polyphase.engine.compression import Sent, busy_s, seconds_between
from polyphase.engine.devices import wait_for

from ._interval import IntervalCallback

__all__ = ["CommunicationMonitor"]


class CommunicationMonitor(IntervalCallback):
    """Logs what rank 0 sends of gradients, and of parameters where they are sharded.

    Counted at every step, without reading from the device; means over an interval of optimizer steps:

    - `communication/sent_mb`: bytes sent in a step, in MB (10^6).
    - `communication/sent_mb/<collective>`, `communication/sent_mb/bucket_<i>`: its parts, by collective and by bucket
      of gradients (under sharded strategies: by unit of the module).
    - `communication/compression_ratio`: bytes that gradients would take as they are, divided by those they took.

    Measured in the step that is logged, which waits for the device:

    - `communication/time_ms`: in which at least one collective was under way, waiting for other ranks included.
    - `communication/bandwidth_mb_per_s`: what was sent in this step by that time.
    - `communication/sync_latency_ms`: from the first bucket of gradients that is ready to the last that is averaged;
      without the backward in between where that waits for each.
    - `communication/exposed_share`: the part, 0 to 1, of that latency in which backward waits or has ended; the rest is
      hidden. Both are given where gradients are averaged in buckets: under ddp, and under hsdp with a compression.

    What Lightning itself sends (metrics, barriers, BatchNorm's buffers) is not in it.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.

    Raises:
        MisconfigurationException: at the start of `fit`, under a strategy that can't be counted.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._times = False  # whether this step's times are taken

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes the strategy count."""
        strategy: Any = trainer.strategy
        if stage != "fit" or trainer.world_size == 1:
            return
        name, why_not = repr(type(strategy).__name__), "is not the engine's own"
        if hasattr(strategy, "why_not_counted"):
            name, why_not = repr(strategy), strategy.why_not_counted
        if why_not is not None:
            raise MisconfigurationException(
                f"CommunicationMonitor can't count what strategy {name} sends, since it {why_not}: choose 'ddp',"
                " 'fsdp' or 'hsdp', or leave the callback out."
            )
        strategy.counts_traffic = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leaves the strategy as it was."""
        if stage == "fit" and hasattr(trainer.strategy, "counts_traffic"):
            trainer.strategy.counts_traffic = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first interval."""
        super().on_train_start(trainer, pl_module)
        self._times = False
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._first_step = trainer.global_step
        self._sent_before = _sent(trainer)
        self._gradients_before = _gradients(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Begins to take times where the step will be logged."""
        every = self.every_n_steps or trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._times or every == 0 or (trainer.global_step + 1) // every == self._logged_step // every:
            return
        hook = _hook(trainer)
        if hook is not None and hook.moments is not None:
            return  # compression="auto" takes times of its own
        self._times = True
        self._sent_in_step = sum(_sent(trainer).values())
        for wire in _wires(trainer):
            wire.spans = []
        if hook is not None:
            hook.moments = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Measures where it is due."""
        self.log_if_due(trainer)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Returns this rank's figures; no collectives."""
        num_steps = trainer.global_step - self._first_step
        sent = _sent(trainer)
        sent.subtract(self._sent_before)
        figures = {"communication/sent_mb": sum(sent.values()) / num_steps / 1e6}
        for (collective, bucket), num_bytes in sorted(sent.items()):
            for part in (collective, f"bucket_{bucket}"):
                name = f"communication/sent_mb/{part}"
                figures[name] = figures.get(name, 0.0) + num_bytes / num_steps / 1e6
        plain_bytes, averaged_bytes = (
            after - before for after, before in zip(_gradients(trainer), self._gradients_before, strict=True)
        )
        if averaged_bytes:
            figures["communication/compression_ratio"] = plain_bytes / averaged_bytes
        if self._times:
            figures |= self._timed(trainer)
        self._begin(trainer)
        return figures

    def _timed(self, trainer: Trainer) -> dict[str, float]:
        self._times = False
        wait_for(trainer.strategy.root_device)
        spans = [span for wire in _wires(trainer) for span in wire.spans or ()]
        time_s = busy_s(spans)
        num_bytes = sum(_sent(trainer).values()) - self._sent_in_step
        figures = {"communication/time_ms": 1e3 * time_s}
        if time_s:
            figures["communication/bandwidth_mb_per_s"] = num_bytes / time_s / 1e6
        for wire in _wires(trainer):
            wire.spans = None
        hook = _hook(trainer)
        if hook is not None and hook.moments:
            (_, first_ready, _), (_, last_ready, last_done) = hook.moments[0], hook.moments[-1]
            latency_s = exposed_s = sum(seconds_between(ready, done) for _, ready, done in hook.moments)
            if hook.overlaps:
                latency_s, exposed_s = seconds_between(first_ready, last_done), seconds_between(last_ready, last_done)
            figures["communication/sync_latency_ms"] = 1e3 * latency_s
            figures["communication/exposed_share"] = exposed_s / max(latency_s, 1e-9)
        if hook is not None:
            hook.moments = None
        return figures


def _hook(trainer: Trainer) -> Any:
    return getattr(trainer.strategy, "averaging", None)


def _wires(trainer: Trainer) -> Any:
    return getattr(trainer.strategy, "wires", [])


def _sent(trainer: Trainer) -> Counter[Sent]:
    total: Counter[Sent] = Counter()
    for wire in _wires(trainer):
        total.update(wire.sent)
    return total


def _gradients(trainer: Trainer) -> tuple[int, int]:
    """Bytes that the gradients so far would have taken as they are, and those they took."""
    hook = _hook(trainer)
    return (0, 0) if hook is None else (hook.num_plain_bytes, hook.num_bytes)
