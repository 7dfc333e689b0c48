"""Recovery from out-of-memory errors: all ranks repeat the step, in micro-batches half as large.

The global batch, and so the result, stays the same. If a rank runs out of memory in a micro-batch:

1. It frees its activations and gradients, and takes part in the other ranks' collectives of this step with batches of
   one sample, so that no rank hangs. The results are dropped.
2. Before the optimizer steps, the ranks exchange, host to host, whether one of them ran out of memory.
3. If so, all ranks restore what the step has changed (random state, BatchNorm's statistics, metrics, logged values,
   progress), split their samples of the step into twice as many micro-batches, and repeat the step.

Weights and optimizer state don't change before 2, so they need no copies.
"""

import gc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_info

# Lightning: recognises the out-of-memory errors of CUDA, cuDNN and the CPU.
from lightning.pytorch.utilities.memory import is_oom_error
from torch import Tensor, nn
from torch.optim import Optimizer

from .._compat.lightning import _DataLoaderIterDataFetcher
from ..devices import module_of, peak_bytes
from ..distributed.buckets import local_part
from ..distributed.object_group import WORLD
from .step_start import StepStart

__all__ = ["OutOfMemory", "RetryStep", "held_bytes", "model_state_bytes"]


class RetryStep(Exception):  # noqa: N818 - no error: it ends the optimizer's step on all ranks
    """A rank ran out of memory, so all ranks repeat the step."""


class OutOfMemory:
    """Repeats steps that run out of memory in smaller micro-batches, for `micro_batch_size="auto"`.

    Args:
        trainer: the trainer whose strategy can finish the collectives of a step that has failed on this rank.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        self.has_failed = False
        """Whether this rank ran out of memory in the current step."""
        self.next_size: int | None = None
        """The size of micro-batches that the user has set for the next step; None if it stays."""
        self._error: BaseException | None = None
        self._start: StepStart | None = None

    def check_may_repeat(self, fetcher: Any) -> None:
        """Checks that the steps of an epoch can be repeated.

        Raises:
            ValueError: the module, or a strategy that is not the engine's, reads or steps as it likes.
        """
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            reason = "manual optimization"
        elif isinstance(fetcher, _DataLoaderIterDataFetcher):
            reason = "a `dataloader_iter` argument"
        elif trainer.strategy.handles_gradient_accumulation:
            reason = f"{type(trainer.strategy).__name__}, which accumulates gradients itself"
        else:
            return
        raise ValueError(f"micro_batch_size='auto' can't repeat a step that is done with {reason}: give a number.")

    def begin_step(self, loop: Any) -> None:
        """Notes the state that a step changes."""
        self.has_failed = False
        self._start = StepStart(self._trainer, loop)
        if self.next_size is not None:
            self._start.divide(partial(self._resplit, self.next_size))
            self.next_size = None

    def begin_micro_batch(self) -> None:
        """Called before forward."""
        if self._trainer.world_size > 1:
            self._trainer.strategy.begin_micro_batch()

    def finish_micro_batch(
        self, error: BaseException, step: Callable[[Callable[..., Any]], Tensor], synchronises: bool
    ) -> None:
        """Finishes a micro-batch that has raised `error`: frees memory, and takes part in its collectives.

        Args:
            error: raised again if memory is not its cause.
            step: runs a `training_step` on the smallest batch, and returns the loss.
            synchronises: whether gradients are averaged in this micro-batch.

        Raises:
            RetryStep: there are no other ranks.
            torch.OutOfMemoryError: memory is not enough for the smallest batch either.
        """
        if not _is_out_of_memory(error):
            raise error
        if self.has_failed:
            raise torch.OutOfMemoryError(_message(self._trainer, [self._trainer.global_rank])) from error
        self.has_failed, self._error = True, error.with_traceback(None)  # its frames would keep the activations
        self._trainer.lightning_module.zero_grad(set_to_none=True)
        gc.collect()
        if hasattr(module := module_of(self._trainer.strategy.root_device), "empty_cache"):
            module.empty_cache()
        if self._trainer.world_size == 1:
            raise RetryStep
        try:
            self._trainer.strategy.finish_micro_batch(step, synchronises)
        except RuntimeError as again:
            if not _is_out_of_memory(again):
                raise
            raise torch.OutOfMemoryError(_message(self._trainer, [self._trainer.global_rank])) from again

    def raise_if_any_failed(self) -> None:
        """Exchanges whether a rank ran out of memory; called on all ranks when a step's gradients are complete.

        Raises:
            RetryStep: on all ranks, if one ran out of memory.
        """
        if any(WORLD.all_gather_bools(self.has_failed)):
            raise RetryStep

    def is_cause_of(self, error: BaseException) -> bool:
        """Whether a step has ended because a rank ran out of memory."""
        return isinstance(error, RetryStep)

    def recover(self, loop: Any, error: BaseException) -> bool:
        """Restores the state at the beginning of the step, with smaller micro-batches; returns False: none has made it.

        Raises:
            torch.OutOfMemoryError: on all ranks, if a micro-batch has one sample already.
        """
        trainer = self._trainer
        failed_ranks = [rank for rank, failed in enumerate(WORLD.all_gather_bools(self.has_failed)) if failed]
        module = trainer.lightning_module
        largest = trainer._data_connector.sizes.largest
        if largest == 1:
            raise torch.OutOfMemoryError(_message(trainer, failed_ranks)) from self._error
        module.zero_grad(set_to_none=True)
        if trainer.world_size > 1:
            trainer.strategy.begin_again()
        size = -(-largest // 2)
        rank_zero_info(
            f"Out of memory on rank(s) {', '.join(map(str, failed_ranks))} with micro-batches of {largest}: the step is"
            f" repeated with micro-batches of at most {size}. The global batch stays. To begin with them the next"
            f" time: micro_batch_size={size}."
        )
        self.has_failed, self._error = False, None
        assert self._start is not None
        self._start.return_to(partial(self._resplit, size))
        return False

    def _resplit(self, size: int, done: int) -> int:
        return self._trainer._data_connector.data_position.resplit(done, size)


def _is_out_of_memory(error: BaseException) -> bool:
    # cuBLAS allocates its workspace from CUDA directly, so its error is not torch's.
    is_cublas = isinstance(error, RuntimeError) and "CUBLAS_STATUS_ALLOC_FAILED" in str(error)
    return isinstance(error, torch.OutOfMemoryError) or is_cublas or is_oom_error(error)


def _message(trainer: Any, ranks: list[int]) -> str:
    held = model_state_bytes(trainer)
    table = "\n".join(f"  {name:16} {num_bytes / 1e6:10.1f} MB" for name, num_bytes in held.items())
    if (peak := peak_bytes(trainer.strategy.root_device)) is not None:
        table += f"\n  {'peak, in all':16} {peak / 1e6:10.1f} MB"
    return (
        f"out of memory on rank(s) {', '.join(map(str, ranks))} with a micro-batch of one sample, which can't be made"
        f" smaller. What rank {trainer.global_rank} holds beside activations:\n{table}\nTry strategy='fsdp' (with"
        " offload='parameters' if need be), activation_checkpointing='full', precision='bf16-mixed', or smaller"
        " samples."
    )


def model_state_bytes(trainer: Any) -> dict[str, int]:
    """Bytes of this rank's part of the trained state: by kind, see `held_bytes`, and of the strategy's own copies."""
    own_bytes = trainer.engine_strategy.held_bytes
    return {**held_bytes(trainer.lightning_module, trainer.optimizers), "strategy": own_bytes}


def held_bytes(module: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients, optimizer state and buffers.

    A sharded tensor counts with its shard, a tensor on the meta device not at all. A gradient that does not exist yet
    counts with the size of its parameter.
    """
    parameters = list(module.parameters())
    of_parameters = [state for optimizer in optimizers for state in optimizer.state.values()]
    return {
        "parameters": _bytes(parameters),
        "gradients": _bytes(p if p.grad is None else p.grad for p in parameters if p.requires_grad),
        "optimizer state": _bytes(value for state in of_parameters for value in state.values()),
        "buffers": _bytes(module.buffers()),
    }


def _bytes(values: Iterable[Any]) -> int:
    tensors = [value for value in values if isinstance(value, Tensor) and not value.is_meta]
    return sum(local.numel() * local.element_size() for local in map(local_part, tensors))
