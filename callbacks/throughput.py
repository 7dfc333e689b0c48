"""`ThroughputMonitor`: logs the speed of the run over all ranks."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from polyphase.engine.data.samples import num_samples as samples_of
from polyphase.engine.devices import wait_for

from ._counts import count_tokens
from ._interval import IntervalCallback, sum_over_ranks

__all__ = ["ThroughputMonitor"]


class ThroughputMonitor(IntervalCallback):
    """Logs samples/s, tokens/s if batches have tokens, the time of a step, and the share of time spent on data.

    - `throughput/samples_per_s`, `throughput/tokens_per_s`: over all ranks, with the true counts of ragged batches;
      samples shared by several ranks (tensor parallelism) count once.
    - `throughput/step_time_ms`: time of one optimizer step with all its micro-batches; mean over ranks.
    - `throughput/data_wait_share`: part of the time, 0 to 1, that the host spends between the end of a batch and the
      start of the next one: the loader, the copy to the device, other callbacks in between; mean over ranks.

    The clock pauses in validation and in `trainer.save_checkpoint`, with a wait for the device before and after. Other
    steps have no synchronisation or communication; a logging step has one wait for the device and one all-reduce of
    five numbers.

    Args:
        every_n_steps: optimizer steps between two measurements; None for the trainer's `log_every_n_steps`.
        num_samples: function from a batch to its number of samples; None for the rows of its first tensor, or the
            items of its lists.
        num_tokens: function from a batch to its number of tokens, an int or a 0-d tensor, or None if it has none; by
            default the sum of its ``attention_mask``, else the size of its first integer tensor of 2 dims or more.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        num_samples: Callable[[Any], int] | None = None,
        num_tokens: Callable[[Any], int | Tensor | None] | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        self.count_samples: Callable[[Any], int | None] = num_samples or samples_of
        self._num_tokens = num_tokens or count_tokens
        self._pauses = 0  # number of nested pauses: a checkpoint may be saved during validation
        self._paused_s = self._batch_ended = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock."""
        super().on_train_start(trainer, pl_module)
        self._pauses = 0
        self._watch_saves(trainer)
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._samples = 0
        self._tokens: int | Tensor | None = None
        self._first_step = trainer.global_step
        self._waited_s = self._paused_s = 0.0
        self._started = self._batch_ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Ends the wait for the batch."""
        self._waited_s += time.perf_counter() - self._batch_ended

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts the batch without reading from the device, and measures if the interval ends here."""
        if batch is not None:  # Lightning skips a batch that is None
            if (size := self.count_samples(batch)) is None:
                raise ValueError(
                    f"The number of samples of a batch of type {type(batch).__name__} is not known."
                    " Pass ThroughputMonitor(num_samples=...), a function from a batch to an int."
                )
            self._samples += size
            tokens = self._num_tokens(batch)
            if tokens is not None:
                self._tokens = tokens if self._tokens is None else self._tokens + tokens
        self._batch_ended = time.perf_counter()
        self.log_if_due(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops the clock."""
        self._pause(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continues the clock."""
        self._resume(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restores the trainer."""
        vars(trainer).pop("save_checkpoint", None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the trainer."""
        vars(trainer).pop("save_checkpoint", None)

    def measure(self, trainer: Trainer) -> dict[str, float]:
        """Returns the figures over all ranks; needs one all-reduce of five numbers."""
        wait_for(trainer.strategy.root_device)  # launched work counts only when it is finished
        elapsed_s = time.perf_counter() - self._started - self._paused_s
        tokens = 0.0 if self._tokens is None else float(self._tokens)
        own_figures = [self._samples, tokens, self._tokens is not None, elapsed_s, self._waited_s]
        samples, tokens, ranks_with_tokens, all_elapsed_s, waited_s = sum_over_ranks(trainer, own_figures)
        # Ranks that share batches are one replica of the data; the strategy reports the number of replicas here.
        num_replicas = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", trainer.world_size)
        per_s = num_replicas / all_elapsed_s  # sum / (world_size / num_replicas) / (all_elapsed_s / world_size)
        figures = {
            "throughput/samples_per_s": samples * per_s,
            "throughput/step_time_ms": 1e3
            * all_elapsed_s
            / trainer.world_size
            / (trainer.global_step - self._first_step),
            "throughput/data_wait_share": waited_s / all_elapsed_s,
        }
        if ranks_with_tokens:
            figures["throughput/tokens_per_s"] = tokens * per_s
        self._begin(trainer)
        return figures

    def _watch_saves(self, trainer: Trainer) -> None:
        """Pauses the clock in every `trainer.save_checkpoint` call, until the end of training.

        Lightning's hook `on_save_checkpoint` is not enough: it is not called at the end of a save, or for weights only.
        """
        vars(trainer).pop("save_checkpoint", None)
        save = trainer.save_checkpoint

        @wraps(save)
        def paused_save(*args: Any, **kwargs: Any) -> None:
            self._pause(trainer)
            try:
                save(*args, **kwargs)
            finally:
                self._resume(trainer)

        trainer.save_checkpoint = paused_save  # type: ignore[method-assign]

    def _pause(self, trainer: Trainer) -> None:
        if self._pauses == 0:
            wait_for(trainer.strategy.root_device)
            self._pause_began = time.perf_counter()
        self._pauses += 1

    def _resume(self, trainer: Trainer) -> None:
        self._pauses -= 1
        if self._pauses == 0:
            wait_for(trainer.strategy.root_device)
            pause_s = time.perf_counter() - self._pause_began
            self._paused_s += pause_s
            self._batch_ended += pause_s  # the pause is not a wait for data either
