"""`ThroughputMonitor`: how fast the run is, counted over all ranks."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from ._interval import IntervalCallback

__all__ = ["ThroughputMonitor", "count_tokens"]


class ThroughputMonitor(IntervalCallback):
    """Logs samples/s, tokens/s where the batches have them, the time of a step and the share of it spent on data.

    Names: `throughput/samples_per_s`, `throughput/tokens_per_s` (over all ranks, true counts also of ragged batches),
    `throughput/step_time_ms` (of an optimizer step, the slowest rank's interval), `throughput/data_wait_share` (mean
    over ranks of the time between the end of a batch and the start of the next one that is not validation; the loader,
    the copy to the device and other callbacks are in it). Validation time is left out of all four. Between two logging
    steps nothing is synchronised or sent; at a logging step there is one wait for the device and one all-reduce.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.
        num_samples: from a batch to its number of samples; None for the length of its first tensor.
        num_tokens: from a batch to its number of tokens, an int or a 0-d tensor, or None; see `count_tokens`.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        num_samples: Callable[[Any], int] | None = None,
        num_tokens: Callable[[Any], int | Tensor | None] | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        self._num_samples = num_samples or extract_batch_size
        self._num_tokens = num_tokens or count_tokens

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        super().on_train_start(trainer, pl_module)
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._samples = 0
        self._tokens: int | Tensor | None = None
        self._first_step = trainer.global_step
        self._waited_s = self._paused_s = 0.0
        self._started = self._batch_ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Counts the batch, without reading from the device."""
        self._waited_s += time.perf_counter() - self._batch_ended
        self._samples += self._num_samples(batch)
        tokens = self._num_tokens(batch)
        if tokens is not None:
            self._tokens = tokens + (0 if self._tokens is None else self._tokens)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Ends the interval where it is due."""
        self._batch_ended = time.perf_counter()
        self.log_if_due(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._validation_began = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lets the clock go on."""
        if not trainer.sanity_checking:
            now = time.perf_counter()
            self._paused_s += now - self._validation_began
            self._batch_ended += now - self._validation_began

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """One all-reduce of five numbers."""
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # what was launched counts when it is done
        elapsed_s = time.perf_counter() - self._started - self._paused_s
        has_tokens = self._tokens is not None
        mine = [self._samples, float(self._tokens or 0), float(has_tokens), elapsed_s, self._waited_s]
        total: Tensor = trainer.strategy.reduce(torch.tensor(mine, dtype=torch.float64, device=device), reduce_op="sum")
        samples, tokens, ranks_with_tokens, all_elapsed_s, waited_s = total.tolist()
        mean_s = all_elapsed_s / trainer.world_size
        figures = {
            "throughput/samples_per_s": samples / mean_s,
            "throughput/step_time_ms": 1e3 * mean_s / max(1, trainer.global_step - self._first_step),
            "throughput/data_wait_share": waited_s / all_elapsed_s,
        }
        if ranks_with_tokens:
            figures["throughput/tokens_per_s"] = tokens / mean_s
        self._begin(trainer)
        return figures


def count_tokens(batch: Any) -> int | Tensor | None:
    """Tokens of a batch: the sum of an ``attention_mask``, else the size of its first integer tensor of 2 dims or more.

    None where there is neither.
    """
    if isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor):
        return batch["attention_mask"].sum()
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else [batch]
    integer = (torch.int64, torch.int32, torch.int16, torch.uint8)
    found = (v for v in values if isinstance(v, Tensor) and v.dtype in integer and v.dim() >= 2)
    return next((v.numel() for v in found), None)
