"""Comparison of the first steps of a run on several ranks, between the ranks, and with the same steps in one process.

Phases, which all ranks enter together:
1. Before the module is split or wrapped, rank 0 copies it. If it can't, it broadcasts the reason.
2. Before the first step, and the hooks before it, rank 0 gathers the weights.
3. In the first steps, each rank with different samples keeps its batches, random states, losses, and what hooks and
   callbacks change of the data that the module keeps. The hooks of callbacks are not repeated: where one writes into
   weights or gradients, it is named in place of a comparison (`callback_writes.py`). Of each step all ranks keep the
   digests of the gradients (`unsplit.py`), and compute their norm (an all-reduce of one number, as for
   clipping).
4. Rank 0 runs its first two batches with the copy, whole and in parts (`split_batch.py`), and broadcasts the
   differences. That is all that is done under strategies that split nothing, such as ddp, by default.
5. After these steps, rank 0 gathers what the ranks have kept, and the digests of their weights: what several ranks have
   must be equal. It gathers the weights again and repeats the steps with its copy (`unsplit.py`), while the other ranks
   wait, and broadcasts the differences.
Then everything is detached. At the end of a run, under ddp too, the digests of the ranks' weights are compared once.
Weights and random numbers of the run are bit for bit those of a run without the check.
"""

import logging
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._compat.torch import _ConvNd
from ..checkpoint import get_random_state
from ..distributed.digests import Digests, digests, unequal_replicas, whole
from ..distributed.object_group import WORLD
from ..precision.clipping import norm_of
from ..strategies import adapt
from ..strategies.pipeline.reachable_state import snapshot_outside
from .callback_writes import CallbackWrites, may_change_training
from .module_copy import Memory, SampledBlock, copy_whole, fill_copy
from .split_batch import Comparison, compare_parts, kept_values, put_values, state_of, values_of
from .unsplit import (
    SETTINGS,
    Call,
    MicroBatch,
    NeedsOtherRanks,
    Replay,
    Step,
    UnfitError,
    loss_of,
)

__all__ = ["FirstSteps", "FirstStepsError", "between_ranks"]

_NUM_STEPS = 2
"""Two steps: a wrong state after the first one (a moving average, an attribute) shows in the second. If there are more
ranks than half of `_MAX_RANKS`, only one step is compared."""
_MAX_RANKS = 8
"""The most ranks with samples of their own that "auto" does the work of in one process."""
_MAX_BYTES = 2**30
"""The largest size of a module's parameters that "auto" copies; with Adam, rank 0 needs four times as much memory."""
_MAX_PARTS = 1000
"""The most parts of a module that "auto" copies: where they are small, their calls take the time, not their bytes."""

log = logging.getLogger("polyphase.engine")


class FirstStepsError(RuntimeError):
    """The first steps of a run differ from the same steps in one process, or its ranks from each other."""


class FirstSteps:
    """The check of a trainer's runs.

    A difference is a warning under ``"auto"``: code with a random generator of its own, or a callback that changes
    weights, makes a difference that is no error, and by default a correct run must not end. With True it is an error.

    Args:
        trainer: the trainer whose runs are checked.
        policy: ``"auto"``: check if it costs little; True: check also if it costs more; False: never check.
    """

    duration_s = 0.0
    """The seconds that this rank has spent on the check so far, including its wait for rank 0."""

    def __init__(self, trainer: Any, policy: bool | Literal["auto"]) -> None:
        self._trainer, self._policy = trainer, policy
        self._reset()
        can = adapt(trainer.strategy).capabilities
        self._divides = can.splits_module or can.optimizer_state_partitioned
        if policy is False:
            trainer.strategy.before_split = self._warn_unchecked
        elif not can.steps_alone:
            trainer.strategy.before_split = self.copy_module

    def _reset(self) -> None:
        self._copy: LightningModule | None = None
        self._sample: SampledBlock | None = None
        self._repeats = self._splits = False
        """Whether the steps of the run, and those on parts of a batch, are compared with those of one process."""
        self.is_due = False
        """Whether the present step is to be checked, or one of the next ones."""
        self._step: Step | None = None
        self._steps: list[Step] = []
        self._weights_before: dict[str, Tensor] = {}
        self._problem: str | None = None
        self._begin_again: Any = None
        """Gives the copy, and what the code of module and copy reaches outside of them, what they had before the first
        step: a comparison begins with it."""
        self._handles: list[Any] = []
        self._callback_writes: CallbackWrites | None = None

    # --- before

    def _warn_unchecked(self, module: LightningModule) -> None:
        """Warns where sequences are split: there a wrong gradient can't be seen from the loss."""
        if self._trainer.strategy.layout.cp > 1 and not self._trainer.is_trial:
            rank_zero_warn(
                f"check_first_steps=False: under {adapt(self._trainer.strategy)!r} code of {type(module).__name__} that"
                " reads its own part of a sequence has a loss that looks right and wrong gradients, and nothing"
                " compares them with those of one process. Leave that flag out, or run `polyphase verify` once."
            )

    def copy_module(self, module: LightningModule) -> None:
        """Phase 1: copies the module on rank 0; called on all ranks before the module is split or wrapped."""
        self._reset()
        start_s = perf_counter()
        # What is compared: nothing; parts of a batch; the steps of the run, with one block of a module that is large.
        nothing, large, many = self._reason_to_skip(), self._too_large(module), self._too_many_ranks()
        why_not_repeated, size = nothing or self._reason_not_to_repeat(), large or many
        self._splits = nothing is None and large is None and self._trainer.data_size > 1
        self._repeats = why_not_repeated is None and size is None
        if why_not_repeated is None and size is not None:
            why_not_repeated = self._take_sample(module, size)
        if self._repeats or self._splits:
            problem = self._agree_on_copy(module)
            if problem is not None:
                self._repeats = self._splits = False
                why_not_repeated = why_not_repeated or problem
        self.is_due = self._repeats or self._splits or self._sample is not None
        if why_not_repeated is not None and (self._divides or self._policy is True):
            self._report_skipped(why_not_repeated)
        self.duration_s = perf_counter() - start_s

    def _agree_on_copy(self, module: LightningModule) -> str | None:
        """Copies the module on rank 0; returns on all ranks why it can't."""
        problem = None
        if self._trainer.global_rank == 0:
            try:
                self._copy = copy_whole(module, self._trainer, self._trainer.datamodule)
            except Exception as error:
                problem = f"{type(module).__name__} can't be copied ({type(error).__name__}: {error})"
        return WORLD.broadcast_object(problem)

    def _take_sample(self, module: LightningModule, size: str) -> str | None:
        """Takes one block as a sample of a module that is too large; returns a reason if it can't."""
        layout = self._trainer.strategy.layout
        problem = (
            None
            if layout.shard > 1 and layout.num_sharing == layout.pp == 1
            else "only fsdp and hsdp compare one block"
        )
        try:
            sample = None if problem else SampledBlock(module, self._trainer)
        except Exception as error:
            problem = f"no block of {type(module).__name__} can be compared ({error})"
        problem = next((problem for problem in WORLD.all_gather_object(problem) if problem is not None), None)
        if problem is not None:
            return f"{size}, and {problem}"
        self._sample = sample
        log.info("%s: of the first step, one block is compared with one process.", size)
        return None

    def _too_large(self, module: LightningModule) -> str | None:
        """Returns why the default does not copy the whole module; None if it does."""
        if self._policy is True:
            return None
        num_bytes = sum(parameter.nbytes for parameter in module.parameters())
        num_parts = sum(1 for _ in module.modules())
        if num_bytes > _MAX_BYTES:
            return f"the parameters have {num_bytes / 2**20:,.0f} MiB, more than {_MAX_BYTES / 2**20:,.0f}"
        if num_parts > _MAX_PARTS:
            return f"{type(module).__name__} has {num_parts:,} parts, more than {_MAX_PARTS:,}"
        return None

    def _too_many_ranks(self) -> str | None:
        data_size = self._trainer.data_size
        if self._policy is not True and data_size > _MAX_RANKS:
            return f"one process would do the work of {data_size} ranks, more than {_MAX_RANKS}"
        return None

    def _reason_not_to_repeat(self) -> str | None:
        """Returns why the steps of the run are not compared with those of one process, whatever the module's size."""
        strategy = adapt(self._trainer.strategy)
        if not self._divides and not (self._policy is True and strategy.capabilities.averages_whole_gradients):
            return f"{strategy!r} splits nothing"
        return None if strategy.comm_hook is None else "a compression changes the gradients"

    def _reason_to_skip(self) -> str | None:
        trainer, strategy = self._trainer, adapt(self._trainer.strategy)
        if trainer.world_size == 1:
            return "there is one rank"
        may_lose = trainer.fit_loop.epoch_loop.rank_loss is not None
        if may_lose or not strategy.capabilities.keeps_step:
            return "a rank may leave the run"
        if trainer.fit_loop.epoch_loop.automatic_optimization.out_of_memory is not None:
            return "micro_batch_size='auto' may do a step again"
        return None

    def _report_skipped(self, reason: str) -> None:
        text = f"the first steps are not compared with those of one process: {reason}."
        if self._policy is True:
            rank_zero_warn(text)
        elif self._trainer.is_global_zero:
            log.info(text)

    @property
    def _keeps_replicas(self) -> bool:
        """Whether what several ranks have must be equal after each step."""
        trainer, strategy = self._trainer, adapt(self._trainer.strategy)
        can = strategy.capabilities
        if self._policy is False or trainer.world_size == 1 or not can.replicas_stay_equal or can.steps_alone:
            return False
        return strategy.expects_parity and not any(map(strategy.can_lose, range(trainer.world_size)))

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Context manager around an epoch of training, entered when everything is restored."""
        if not self.is_due:
            yield
            return
        try:
            self._begin()
            yield
            self._compare()
        finally:
            self._end()

    def _begin(self) -> None:
        trainer: Any = self._trainer
        strategy = trainer.strategy
        is_torchs = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in strategy.optimizers)
        if trainer.global_step or not is_torchs:
            self.is_due = False
            if self._repeats or self._sample is not None:
                self._report_skipped("the run is resumed" if is_torchs else "its optimizers are not torch's")
            return
        self._reports_batches = self._repeats and trainer.global_rank % strategy.layout.num_sharing == 0
        self._reports_batches &= trainer.global_rank < strategy.data_size * strategy.layout.num_sharing
        self._keeps_batches = self._reports_batches or (self._splits and trainer.global_rank == 0)
        self._names = {parameter: name for name, parameter in trainer.lightning_module.named_parameters()}
        keeps = self._repeats or self._splits
        if keeps and strategy.capabilities.runs_own_schedule:
            strategy.run_schedule = self._recorded(strategy.run_schedule, is_schedule=True)
        elif keeps:
            strategy.training_step = self._recorded(strategy.training_step, is_schedule=False)
        if keeps:
            state = strategy.lightning_module_state_dict()
            if self._copy is not None:
                self._attempt(lambda: self._fill_copy(state))
            self._attempt(self._remember)
        if self._sample is not None:
            self._sample.begin()
        if not self._repeats and self._sample is None:
            return
        self._callback_writes = CallbackWrites(trainer.lightning_module, trainer.callbacks)
        self._settings: dict[Any, list[dict[str, Any]]]
        self._settings = {optimizer: _settings(optimizer) for optimizer in strategy.optimizers}
        self._handles = [optimizer.register_step_post_hook(self._record_step) for optimizer in strategy.optimizers]

    # --- in the steps

    def _recorded(self, run: Any, is_schedule: bool) -> Any:
        def run_recorded(*args: Any, **kwargs: Any) -> Any:
            kept = self._record_batch(*(args[0] if is_schedule else args))
            output = run(*args, **kwargs)
            loss = output[0] if is_schedule else loss_of(output)
            kept.loss = None if loss is None else loss.detach().clone()
            self._attempt(self._remember)
            return output

        return run_recorded

    def _remember(self) -> None:
        """Keeps what a step has left in the module: what differs before the next one is of hooks and callbacks."""
        self._memory = Memory(self._trainer.lightning_module)

    def _record_batch(self, batch: Any, batch_idx: int | None = None, *_: Any) -> MicroBatch:
        """Phase 3: keeps a batch."""
        start_s, trainer = perf_counter(), self._trainer
        step = self._present_step()
        if batch_idx is None:
            batch_idx = trainer.fit_loop.epoch_loop.batch_idx
        samples = trainer._data_connector.sizes.samples(batch_idx).local
        kept = MicroBatch(trainer.global_rank, None, batch_idx, samples, get_random_state())
        if self._keeps_batches:
            self._attempt(lambda: setattr(kept, "batch", _host_copy(batch)))
            self._attempt(lambda: setattr(kept, "changes", _host_copy(self._memory.changes(trainer.lightning_module))))
        step.micro_batches.append(kept)
        self.duration_s += perf_counter() - start_s
        return kept

    def _present_step(self) -> Step:
        if self._step is None:
            scaler = getattr(self._trainer.precision_plugin, "scaler", None)
            scale = 1.0 if scaler is None else scaler.get_scale()
            self._step = Step(self._trainer.global_step, self._trainer.current_epoch, scale)
            self._steps.append(self._step)
        return self._step

    def _fill_copy(self, state: dict[str, Any]) -> None:
        own, trainer = self._copy, self._trainer
        assert own is not None
        fill_copy(own, trainer.lightning_module, state, shares_buffers=trainer.strategy.layout.pp == 1)
        trainer.precision_plugin.convert_module(own)
        values, put_outside = values_of(own), snapshot_outside(trainer.lightning_module)
        put_state, copies = state_of(own), {id(tensor): value for tensor, value, _ in values}
        self._weights_before = {name: copies[id(tensor)] for name, tensor in _tensors(own) if id(tensor) in copies}

        def begin_again() -> None:
            put_outside()
            put_state()
            put_values(values)

        self._begin_again = begin_again

    def _attempt(self, function: Any) -> None:
        """Calls `function`; keeps its error until phase 4, so that all ranks stay in step."""
        try:
            function()
        except Exception as error:
            self._problem = self._problem or f"{type(error).__name__}: {error}"

    def _record_step(self, optimizer: Any, *_: Any) -> None:
        if self._repeats and self._step is None:
            return
        start_s, step = perf_counter(), self._present_step()
        if self._repeats:
            self._attempt(self._remember)
        # What schedulers and callbacks have changed is changed in the copy; its own settings are its program's.
        before = self._settings[optimizer]
        before += [{}] * (len(optimizer.param_groups) - len(before))  # groups that were added meanwhile
        settings = [
            {key: value for key, value in now.items() if key not in then or then[key] != value}
            for now, then in zip(_settings(optimizer), before, strict=True)
        ]
        norm_here = getattr(self._trainer.precision_plugin, "norm_of", None) or norm_of
        own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = norm_here([p for p in own if not p.grad.is_sparse])
        if self._sample is not None:
            self._sample.keep_gradients()
        figures = digests((self._names[p], p.grad) for p in own if p in self._names)
        step.calls.append(Call(list(self._settings).index(optimizer), settings, norm, figures))
        self.duration_s += perf_counter() - start_s

    # --- after

    def end_step(self) -> None:
        """Ends a step; after the last one that is checked, compares them."""
        if self._step is not None:
            self._step = None
            if self._sample is not None:
                self._sample.end()
            is_short = not self._repeats or self._trainer.data_size <= _MAX_RANKS // 2
            if len(self._steps) == (_NUM_STEPS if is_short else 1):
                self._compare()
                self._end()

    def end_run(self) -> None:
        """Called when a run has done all its steps: compares the weights of the ranks once more.

        Ranks that differ from some later step on, such as the one in which parameters were unfrozen, are seen here.
        So is code that changes weights on one rank, under `ddp` too, whose steps are not repeated by default.
        """
        if not self._keeps_replicas:
            return
        unequal = WORLD.broadcast_object(unequal_replicas(WORLD.gather_object(self._weights())))
        if unequal:
            name, text = unequal[0]
            module = type(self._trainer.lightning_module).__name__
            self._tell(
                f"the ranks have ended the run with different weights of {module}: {name!r} and {len(unequal) - 1} more"
                f" differ ({text}). A gradient was not averaged, or code has changed weights on one rank."
                " `ReplicaGuard` names the step.",
                is_over=True,
            )

    def _weights(self) -> Digests:
        return digests(self._trainer.lightning_module.named_parameters()).on_host()

    def _compare(self) -> None:
        """Phases 4 and 5, for the steps that were recorded: an epoch may have fewer steps than are planned."""
        if not self.is_due or not self._steps:
            return
        start_s = perf_counter()
        for step in self._steps:
            for micro_batch in step.micro_batches:
                micro_batch.loss = None if micro_batch.loss is None else micro_batch.loss.cpu()
        if self._splits:  # first, since it names what the ranks remember, by which their steps differ, too
            self._compare_parts()
        if self._repeats or self._sample is not None:
            self._compare_with_run()
        self.duration_s += perf_counter() - start_s

    def _compare_with_run(self) -> None:
        trainer = self._trainer
        if any(step.scale != 1 and not step.calls for step in self._steps):
            self._problem = self._problem or "the loss scaler has left a step out"
        for step in self._steps:
            step.calls.sort(key=lambda call: call.optimizer)
            for call in step.calls:
                call.norm, call.gradients = float(call.norm), call.gradients.on_host()
        state = trainer.strategy.lightning_module_state_dict() if self._repeats else {}
        problem, in_sample = (None, []) if self._sample is None else self._sample.compare()
        self._problem = self._problem or problem
        gradients = [call.gradients for step in self._steps for call in step.calls]
        settings = [(call.optimizer, call.settings) for step in self._steps for call in step.calls]
        if self._callback_writes is not None and (names := self._callback_writes.names):
            self._problem = self._problem or (
                f"{', '.join(dict.fromkeys(names))} changes weights or gradients, and callbacks take no part in the"
                " repeated steps"
            )
        kept = self._problem, self._steps if self._reports_batches else None, (gradients, settings), self._weights()
        reports = WORLD.gather_object(kept)
        verdict: tuple[str | None, str | None] = None, None
        if trainer.global_rank == 0:
            verdict = self._judge(reports, state, in_sample)
        reason, difference = WORLD.broadcast_object(verdict)
        if reason is not None:
            self._report_skipped(reason)
        elif difference is None and trainer.is_global_zero:
            log.info("the first %d steps are those of one process.", len(self._steps))
        self._tell(difference)

    def _compare_parts(self) -> None:
        """Phase 4: compares steps on parts of a batch with steps on the whole, on rank 0."""
        trainer, kept = self._trainer, {}
        try:
            kept = kept_values(trainer.lightning_module, trainer)
            told = trainer.fit_loop.epoch_loop.own_state.told
            kept = {text: value for text, value in kept.items() if not told & set(text.split("'"))}
        except Exception as error:
            self._problem = self._problem or f"{type(error).__name__}: {error}"
        of_ranks = WORLD.gather_object((self._problem, kept))
        verdict: tuple[str | None, Comparison | None] = None, None
        if self._copy is not None:
            verdict = self._judge_parts(of_ranks)
        reason, comparison = WORLD.broadcast_object(verdict)
        if reason is not None and trainer.is_global_zero:
            log.info("a step on parts of a batch is not compared with one on the whole: %s.", reason)
        module = type(trainer.lightning_module).__name__
        if comparison is not None and comparison.memories:
            self._tell(
                f"under strategy {trainer.strategy!r} the ranks train {module} by different values of"
                f" {', '.join(comparison.memories)}: what is kept there is of the samples of the rank, so the result is"
                " not that of one process. Reduce what it is made of over the ranks"
                " (`self.trainer.strategy.reduce(value)`; for metrics `self.log(..., sync_dist=True)`)."
            )
        elif comparison is not None and comparison.of_parts:
            self._tell(
                f"a step of {module} on a batch is not the mean of steps on its parts, which the {trainer.data_size}"
                f" ranks compute under strategy {trainer.strategy!r}: with a batch in two parts,"
                f" {'; '.join(comparison.of_parts)}. The result is not that of one process. Where samples are compared"
                " with each other, gather them (`self.all_gather(values, sync_grads=True)`); where the loss is a mean"
                ' over a count, return `{"loss": mean, "weight": count}`; make sums means; reduce over ranks what is'
                " remembered of samples; and don't clip gradients of activations, which are those of the rank's own"
                " mean. Where that is meant, `check_first_steps=False` leaves this out."
            )

    def _judge_parts(self, of_ranks: Any) -> tuple[str | None, Comparison | None]:
        trainer, copy = self._trainer, self._copy
        reason = next((problem for problem, _ in of_ranks if problem is not None), None)
        if reason is not None or copy is None:
            return reason, None
        undo = snapshot_outside(copy, trainer.lightning_module)
        micro_batches = [micro_batch for step in self._steps for micro_batch in step.micro_batches]
        kept = [of_rank for _, of_rank in of_ranks]
        try:
            self._begin_again()
            return None, compare_parts(copy, trainer, trainer.strategy.root_device, micro_batches, kept)
        except (UnfitError, NeedsOtherRanks) as unfit:
            return str(unfit) or "its step reaches other ranks", None
        except Exception as error:
            return f"it does not run in one process ({type(error).__name__}: {error})", None
        finally:
            undo()

    def _tell(self, difference: str | None, is_over: bool = False) -> None:
        if difference is None:
            return
        if self._policy is True:
            raise FirstStepsError(difference)
        goes_on = "" if is_over else " Training continues; `check_first_steps=True` ends it there."
        rank_zero_warn(f"{difference}{goes_on}")

    def _judge(self, reports: list[Any], state: dict[str, Any], in_sample: list[str]) -> tuple[str | None, str | None]:
        """Compares all that the ranks have kept.

        Args:
            reports: what each rank has kept.
            state: the weights after the steps.
            in_sample: the differences of the block that was compared in place of the whole module.

        Returns:
            The reason why the steps are not compared with those of one process, and a description of all differences;
            each may be None.
        """
        reason = next((problem for problem, *_ in reports if problem is not None), None)
        by_rank = [gradients for _, _, (gradients, _), _ in reports]
        if len({len(calls) for calls in by_rank}) > 1:
            return "the optimizers of the ranks were called another number of times", None
        gradients = list(zip(*by_rank, strict=True))
        differences = in_sample
        if self._trainer.strategy.layout.pp == 1:  # stages have other groups
            differences += _unequal_settings([settings for _, _, (_, settings), _ in reports])
        if self._keeps_replicas:
            differences += between_ranks(gradients, [weights for *_, weights in reports])
        if self._copy is not None and reason is None:
            try:
                replay = self._repeat([steps for _, steps, _, _ in reports if steps is not None])
                after = {name: tensor.detach() for name, tensor in _tensors(self._copy)}
                weights = _Weights(self._weights_before, after, state)
                differences += _from_one_process(replay, gradients, weights, self._has_low_precision)
            except UnfitError as unfit:
                reason = str(unfit)
            except Exception as error:
                reason = f"it does not run in one process ({type(error).__name__}: {error})"
        return reason, self._describe(differences) if differences else None

    def _end(self) -> None:
        """Removes the hooks and the replaced methods, and drops all that was recorded."""
        vars(self._trainer.strategy).pop("run_schedule", None)
        vars(self._trainer.strategy).pop("training_step", None)
        for handle in self._handles:
            handle.remove()
        if self._callback_writes is not None:
            self._callback_writes.close()
        self._reset()

    def _repeat(self, ranks: list[list[Step]]) -> Replay:
        """Repeats the ranks' first steps with the copy.

        Raises:
            UnfitError: the steps can't be compared.
        """
        trainer = self._trainer
        strategy, module = trainer.strategy, self._copy
        assert module is not None
        # Under fsdp a rank draws the same numbers for its samples as one process with the same random state.
        draws_same_numbers = strategy.layout.num_sharing == strategy.layout.pp == 1
        shares_statistics = strategy._layer_sync is not None or strategy.averages_buffers
        joins_batches = not module.automatic_optimization or shares_statistics
        steps = list(zip(*ranks, strict=True))
        # The copy shares what is outside of it with the run, such as a count on a class: it begins as the run has, and
        # leaves it as the run has left it; so does what hooks of the run alone reach, which are newer than the copy.
        undo = snapshot_outside(module, trainer.lightning_module)

        def repeat(joins_batches: bool) -> Replay:
            self._begin_again()
            replay = Replay(module, trainer, strategy.root_device, joins_batches, draws_same_numbers)
            replay.run(steps)
            return replay

        try:
            return repeat(joins_batches)
        except NeedsOtherRanks:  # for example by `self.all_gather`
            return repeat(True)
        finally:
            undo()

    def _describe(self, differences: list[str]) -> str:
        trainer = self._trainer
        callbacks = [type(c).__name__ for c in trainer.callbacks if may_change_training(c)]
        also = f" (Callbacks take no part in that: {', '.join(callbacks)}.)" if callbacks else ""
        return (
            f"the first {len(self._steps)} step(s) of {type(trainer.lightning_module).__name__} under strategy"
            f" {trainer.strategy!r} are not those of one process: {'; '.join(differences)}.{also} `polyphase verify`,"
            " with the same model, data and strategy, compares all tensors after each step. Where the module is known"
            " to differ, `check_first_steps=False` leaves this out."
        )

    @property
    def _has_low_precision(self) -> bool:
        """Whether products are computed with fewer bits than float32 has."""
        if self._trainer.strategy.root_device.type == "cuda":
            backends, kinds = torch.backends, (_ConvNd, nn.RNNBase)
            uses_cudnn = any(isinstance(part, kinds) for part in self._trainer.lightning_module.modules())
            if backends.cuda.matmul.allow_tf32 or (uses_cudnn and backends.cudnn.allow_tf32):
                return True
        return str(self._trainer.precision) not in ("32-true", "64-true")


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a state dict: modules may add a state of another kind."""
    for name, value in module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            yield name, value


def _host_copy(batch: Any) -> Any:
    """Returns a copy in host memory, which the step can't change; views are copied without their base."""
    own = apply_to_collection(batch, Tensor, lambda t: t.detach().to("cpu", copy=True).requires_grad_(t.requires_grad))
    pickle.dumps(own)  # raises an error here, not later when the other ranks wait
    return own


def _unequal_settings(by_rank: Sequence[list[tuple[int, list[dict[str, Any]]]]]) -> list[str]:
    """Describes the first setting of an optimizer that was changed otherwise on another rank than on rank 0."""
    for rank, calls in enumerate(by_rank):
        for (number, groups), (_, first) in zip(calls, by_rank[0], strict=False):
            for own, of_first in zip(groups, first, strict=False):
                for key in own.keys() | of_first.keys():
                    if own.get(key) != of_first.get(key):
                        where = f"{key!r} of optimizer {number} is {of_first.get(key)} on rank 0"
                        return [f"{where}, and {own.get(key)} on rank {rank}"]
    return []


def _settings(optimizer: Any) -> list[dict[str, Any]]:
    return [{key: _as_number(group[key]) for key in SETTINGS if key in group} for group in optimizer.param_groups]


def _as_number(setting: Any) -> Any:
    if isinstance(setting, DTensor):
        setting = setting.full_tensor()
    return float(setting) if isinstance(setting, Tensor) else setting


# --- differences, and their tolerances
# Differences between the first steps of a run and the same steps in one process, in words, and their tolerances.


_LOSS_TOLERANCE, _NORM_TOLERANCE = 1e-4, 1e-3
"""The largest relative differences in float32; a different order of summation changes 1e-6 or less."""
_ROUNDED_TOLERANCE = 3e-2
"""The largest relative difference of loss and norm if the precision, or TF32, rounds to 10 bits or less."""
_GRADIENT_TOLERANCE, _GRADIENT_FLOOR = 1e-2, 1e-5
"""The largest difference of the norm of a parameter's gradient, relative to it, and to the norm of all gradients: where
the true gradient is zero, its norm is that of rounding errors of the others."""
_REPLICA_TOLERANCE = 1e-5
"""The largest relative difference of a gradient that ranks have got from the same reduction."""
_WEIGHTS_TOLERANCE, _BUFFER_TOLERANCE = 3e-2, 1e-3
"""The largest difference of a weight, relative to the largest change in its tensor, since Adam magnifies rounding
errors; and of a buffer, which no optimizer has moved."""


class _Weights(NamedTuple):
    """Weights and buffers, by name."""

    before: dict[str, Tensor]
    """Those that both began with."""
    expected: dict[str, Tensor]
    """Those after the steps in one process."""
    actual: dict[str, Tensor]
    """Those after the steps of the run."""


def between_ranks(gradients: Sequence[Sequence[Digests]], weights: Sequence[Digests]) -> list[str]:
    """Describes in what the ranks differ that must be the same on several of them.

    Args:
        gradients: for each call of an optimizer, the digests of all ranks.
        weights: the digests of all ranks, after the steps.
    """
    differences = []
    for call, of_ranks in enumerate(gradients, start=1):
        if unequal := unequal_replicas(of_ranks, _REPLICA_TOLERANCE):
            name, text = unequal[0]
            where = f"the gradient of {name!r} in optimizer step {call}"
            differences.append(f"{where} is not the same on all ranks ({text})")
    if unequal := unequal_replicas(weights):
        name, text = unequal[0]
        differences.append(f"{name!r} is not the same on all ranks ({text})")
    return differences[:2]


def _from_one_process(
    replay: Replay, gradients: Sequence[Sequence[Digests]], weights: _Weights, is_rounded: bool
) -> list[str]:
    """Describes in what the steps of a run differ from those in one process.

    Args:
        replay: has repeated the steps.
        gradients: for each call of an optimizer, the digests of all ranks.
        weights: the weights.
        is_rounded: whether products are computed with fewer bits than float32 has.
    """
    differences = []
    for numbers, tolerance in ((replay.losses, _LOSS_TOLERANCE), (replay.norms, _NORM_TOLERANCE)):
        for quantity, actual, reference in numbers:
            if actual is None or reference is None:
                continue
            a, b = float(actual), float(reference)
            if abs(a - b) > (_ROUNDED_TOLERANCE if is_rounded else tolerance) * max(abs(a), abs(b)) + 1e-6:
                differences.append(f"the {quantity} is {a:.7g}, not {b:.7g}")
    if is_rounded:
        return differences[:3]
    return differences[:3] + _of_gradients(replay, gradients)[:1] + _of_weights(replay, weights)


def _of_gradients(replay: Replay, gradients: Sequence[Sequence[Digests]]) -> list[str]:
    differences = []
    for index, (step, expected) in sorted(replay.gradients.items()):
        actual = whole(gradients[index])
        floor = _GRADIENT_FLOOR * sum(norm**2 for _, norm in expected.values()) ** 0.5
        for name in dict.fromkeys([*expected, *actual]):
            (total, norm), (its_total, its_norm) = actual.get(name, (0.0, 0.0)), expected.get(name, (0.0, 0.0))
            allowed = _GRADIENT_TOLERANCE * max(norm, its_norm) + floor
            if abs(norm - its_norm) > allowed:
                differences.append(f"the gradient of {name!r} in {step} has the norm {norm:.7g}, not {its_norm:.7g}")
            elif abs(total - its_total) > allowed * replay.numels[name] ** 0.5:
                differences.append(f"the gradient of {name!r} in {step} has the sum {total:.7g}, not {its_total:.7g}")
    return differences


def _of_weights(replay: Replay, weights: _Weights) -> list[str]:
    worst = (0.0, "")
    for name, value in weights.expected.items():
        if name not in weights.actual or name not in weights.before:
            continue
        difference, moved = _difference(
            weights.actual[name], value, weights.before[name], replay.above_rounding.get(name)
        )
        if difference > (_WEIGHTS_TOLERANCE if name in replay.numels else _BUFFER_TOLERANCE) * moved:
            text = f"{name!r} has moved by {moved:.2e} there, and differs by {difference:.2e}"
            worst = max(worst, (difference / moved if moved else torch.inf, text))
    return [worst[1]] if worst[1] else []


def _difference(actual: Tensor, expected: Tensor, before: Tensor, above_rounding: Tensor | None) -> tuple[float, float]:
    """Returns the largest difference of comparable elements, above rounding, and the largest change of an element."""
    if actual.shape != expected.shape:
        return torch.inf, 0.0
    if before.shape != expected.shape:  # a buffer that grows
        before = torch.zeros_like(expected)
    if expected.is_complex():
        actual, expected, before = (torch.view_as_real(tensor) for tensor in (actual, expected, before))
        above_rounding = None if above_rounding is None else above_rounding.unsqueeze(-1).expand(expected.shape)
    actual, expected, before = (tensor.to("cpu", torch.float64) for tensor in (actual, expected, before))
    differs, moved = (actual - expected).abs(), (expected - before).abs()
    if above_rounding is not None:
        differs, moved = differs[above_rounding.cpu()], moved[above_rounding.cpu()]
    if not differs.numel() or not bool(expected.isfinite().all()):
        return 0.0, 0.0
    rounding = 1e-5 * float(expected.abs().max()) + 1e-7
    return max(0.0, float(differs.nan_to_num(torch.inf).max()) - rounding), float(moved.max())
