"""`CommunicationMonitor`: measures the traffic of a step, its time, and the part that overlaps with backward."""

from collections import Counter
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from polyphase.engine.compression import TrafficKey, busy_s, seconds_between
from polyphase.engine.devices import wait_for
from polyphase.engine.strategies import adapt

from ._interval import IntervalCallback

__all__ = ["CommunicationMonitor"]


class CommunicationMonitor(IntervalCallback):
    """Logs the traffic of rank 0 for gradients, and for parameters if they are sharded.

    These are counted at every step, without reading from the device, and averaged over an interval of optimizer steps:

    - `communication/sent_mb`: bytes sent in a step, in MB (10^6).
    - `communication/sent_mb/<collective>`, `communication/sent_mb/bucket_<i>`: its parts by collective and by bucket
      of gradients (under sharded strategies: by unit of the module).
    - `communication/compression_ratio`: size of the uncompressed gradients divided by the bytes sent for them.

    These are measured in the logged step, which waits for the device:

    - `communication/time_ms`: time with at least one collective in flight, including waits for other ranks.
    - `communication/bandwidth_mb_per_s`: bytes sent in this step divided by that time.
    - `communication/sync_latency_ms`: time from the first ready bucket of gradients to the last averaged bucket;
      if backward waits for each bucket, without the backward in between.
    - `communication/exposed_share`: part, 0 to 1, of that latency in which backward waits or has ended; the rest is
      hidden. The last two need gradients averaged in buckets: under ddp, and under hsdp with a compression.

    Lightning's own communication (metrics, barriers, BatchNorm's buffers) is not included.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.

    Raises:
        MisconfigurationException: at the start of `fit`, if the strategy's traffic can't be counted.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._times = False  # whether times are measured in this step

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Makes the strategy count its traffic."""
        strategy = adapt(trainer.strategy)
        if stage != "fit" or trainer.world_size == 1:
            return
        why_not = strategy.capabilities.unsupported_counting
        if why_not is not None:
            raise MisconfigurationException(
                f"CommunicationMonitor can't count what strategy {strategy!r} sends, since it {why_not}: choose 'ddp',"
                " 'fsdp' or 'hsdp', or leave the callback out."
            )
        strategy.counts_traffic = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the strategy."""
        if stage == "fit":
            adapt(trainer.strategy).counts_traffic = False

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
        """Starts the time measurement if this step will be logged."""
        if self._times or not self.is_due(trainer, trainer.global_step + 1):
            return
        hook = _hook(trainer)
        if hook is not None and hook.bucket_times is not None:
            return  # compression="auto" measures times itself
        self._times = True
        self._sent_in_step = sum(_sent(trainer).values())
        for wire in _wires(trainer):
            wire.collective_times = []
        if hook is not None:
            hook.bucket_times = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Measures if the interval ends here."""
        self.log_if_due(trainer)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Returns this rank's figures, without communication."""
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
        spans = [span for wire in _wires(trainer) for span in wire.collective_times or ()]
        time_s = busy_s(spans)
        num_bytes = sum(_sent(trainer).values()) - self._sent_in_step
        figures = {"communication/time_ms": 1e3 * time_s}
        if time_s:
            figures["communication/bandwidth_mb_per_s"] = num_bytes / time_s / 1e6
        for wire in _wires(trainer):
            wire.collective_times = None
        hook = _hook(trainer)
        if hook is not None and hook.bucket_times:
            (_, first_ready, _), (_, last_ready, last_done) = hook.bucket_times[0], hook.bucket_times[-1]
            latency_s = exposed_s = sum(seconds_between(ready, done) for _, ready, done in hook.bucket_times)
            if hook.overlaps:
                latency_s, exposed_s = seconds_between(first_ready, last_done), seconds_between(last_ready, last_done)
            figures["communication/sync_latency_ms"] = 1e3 * latency_s
            figures["communication/exposed_share"] = exposed_s / max(latency_s, 1e-9)
        if hook is not None:
            hook.bucket_times = None
        return figures


def _hook(trainer: Trainer) -> Any:
    return adapt(trainer.strategy).active_hook


def _wires(trainer: Trainer) -> Any:
    return adapt(trainer.strategy).wires


def _sent(trainer: Trainer) -> Counter[TrafficKey]:
    total: Counter[TrafficKey] = Counter()
    for wire in _wires(trainer):
        total.update(wire.sent)
    return total


def _gradients(trainer: Trainer) -> tuple[int, int]:
    """Returns the uncompressed size of the gradients so far, and the bytes sent for them."""
    hook = _hook(trainer)
    return (0, 0) if hook is None else (hook.num_plain_bytes, hook.num_bytes)
