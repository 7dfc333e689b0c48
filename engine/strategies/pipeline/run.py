"""Runs steps of a module through the stages of a pipeline, and broadcasts the last stage's results to all of them.

Random numbers: the ranks of a pipeline have a common stream. Its state and the number of the batch seed a stream for
each micro-batch. A step draws nothing from the common stream, since samplers draw the order of later epochs from it.
Numbers that a step draws before its units, such as noise that its loss needs again, are equal on all stages. The units
of a stage (dropout) draw from the stage's own stream.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from ...checkpoint.rng import derive_seed, get_random_state, seed_all, set_random_state
from ...compression import CountingGroup
from ...distributed.object_group import ObjectGroup
from ..callers import CutError
from .attribute_writes import Key
from .log import StepLog, idle_text, share_metrics, unshare_metrics
from .micro_batches import (
    batch_norm_warning,
    batch_size_of,
    buffers_warning,
    loss_warning,
    merge_outputs,
    split_batch,
    state_problem,
)
from .parameter_writes import KeptValues, new_parameter_text
from .partitioned_module import PartitionedModule, StepJob
from .reachable_state import ReachableState, Touched
from .received_values import lend, loans_between, loans_text, return_gradients
from .schedules import Clock, Stage, make_schedule, num_micro_batches
from .shapes import Shapes, TreeBroadcast, flatten_tree
from .stage_checks import check_hooks
from .stage_module import StageModule, describe_failure

__all__ = ["Losses", "Runner"]

_MAX_SCHEDULES = 8
"""The number of kinds of batches whose schedules are kept; a schedule keeps memory."""


class _Work:
    """The micro-batches of one batch: runs the step on them, and collects outputs or losses on the last stage.

    Args:
        runner: the runner that runs it.
        name: name of the step.
        context: entered around the step.
        arguments: arguments of the step, the batch first.
        weigh: `Losses.weigh`; None for forward only.
    """

    def __init__(
        self,
        runner: "Runner",
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        arguments: tuple[Any, ...],
        weigh: Callable[[Any], Tensor] | None,
    ) -> None:
        self.name, self.trains = name, weigh is not None
        self.batch, *self._others = arguments
        self.size = batch_size_of(self.batch)
        self.num_micro_batches = num_micro_batches(self.size, runner.most_micro_batches)
        self.micro_batches = split_batch(self.batch, self.num_micro_batches)
        self.log = StepLog(runner.module)
        self._step = getattr(runner.module, name)
        self._outputs: dict[int, Any] = {}
        self.left: list[dict[Key, Any]] | None = None
        """If not None, what each micro-batch finds in the attributes of the module: what the one before has left."""
        self._module = runner.module
        self._losses = None if weigh is None else Losses(weigh, self.num_micro_batches, runner.scale)
        self._last_stage, self._device = runner.partitioned.plan.num_stages - 1, runner.partitioned.device
        self._seed = runner.seed_of_batch(trains=self.trains)
        self.job = StepJob(
            step=lambda index: self.step(self.micro_batches[index]),
            begin=self._begin,
            resume=lambda index, stage: seed_all(self._seed, index, 1 + stage),
            finish=self._finish,
            context=context,
            shapes=Shapes(),
            num_micro_batches=self.num_micro_batches,
            micro_batch=f"a micro-batch of {self.size // self.num_micro_batches} of the batch's {self.size} samples",
        )

    def step(self, samples: Any) -> Any:
        """Runs the step on some samples of the batch."""
        return self._step(samples, *self._others)

    def note_left(self) -> None:
        """Notes the attributes of the module and its parts, unless there is no need to."""
        if self.left is not None:
            parts = self._module.named_modules()
            self.left.append({(name, key): value for name, part in parts for key, value in vars(part).items()})

    def _begin(self, index: int, stage: int) -> None:
        self.note_left()
        self.log.begin_micro_batch(stage == self._last_stage)
        seed_all(self._seed, index)

    def _finish(self, index: int, output: Any) -> Tensor:
        if self._losses is not None:
            return self._losses.add(output)
        self._outputs[index] = output
        return torch.zeros((), device=self._device)

    def result(self) -> Any:
        """Returns the merged outputs, or in training the batch's mean loss and its weight; for the last stage."""
        if self._losses is not None:
            return self._losses.mean()
        return merge_outputs([self._outputs[index] for index in range(self.num_micro_batches)])


class Runner:
    """Runs the steps of a module on the stages of this rank.

    Args:
        module: the module whose steps are run.
        partitioned: the same module, partitioned into stages.
        stages: stages of this rank.
        group: the ranks of this pipeline.
        hosts: a gloo group of the same ranks.
        schedule: name of the flag.
        num_micro_batches: number of micro-batches of a batch, if this divides its size.
    """

    def __init__(
        self,
        module: LightningModule,
        partitioned: PartitionedModule,
        stages: Sequence[StageModule],
        *,
        group: Any,
        hosts: Any,
        schedule: str,
        num_micro_batches: int,
    ) -> None:
        self.module, self.partitioned, self._stages = module, partitioned, stages
        self._group, self._hosts = group, hosts
        self._schedule, self.most_micro_batches = schedule, num_micro_batches
        self._num_ranks = dist.get_world_size(group)
        self._is_last = any(stage.is_last for stage in stages)
        self._sharing = TreeBroadcast(group, hosts, self._num_ranks - 1, partitioned.device)
        self._schedules: OrderedDict[Any, tuple[Any, Shapes]] = OrderedDict()
        self._recorded: set[tuple[str, bool]] = set()
        """The steps, each in training mode or not, whose writes are recorded."""
        self._checked: set[tuple[str, bool]] = set()
        """The steps, each in training mode or not, whose micro-batches are known not to depend on each other."""
        self._first: dict[tuple[str, bool], Shapes] = {}
        """The shapes of the first batch of each step. In that batch the last stage had a trial run, too."""
        self.clock = Clock(partitioned.device)
        self.wire = CountingGroup(group)
        """Counts the bytes that stages send each other."""
        self.checks_loss = True
        """Whether `loss_warning` may run the last stage by itself."""
        self.scale: Callable[[Tensor], Tensor] = lambda loss: loss
        """Multiplies the loss of a backward by the loss scale, if there is one."""
        self._touched = Touched(module)
        self._num_touching = 0
        """The number of batches of training that have written attributes."""
        self._told: set[Key] = set()
        self._num_full = 0
        """The number of micro-batches of a full batch: the most that a batch was cut into."""
        self._full_size = 0
        share_metrics(module, self._sharing, self._is_last, lambda: partitioned.job is not None)

    def run(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        arguments: tuple[Any, ...],
        weigh: Callable[[Any], Tensor] | None = None,
    ) -> Any:
        """Runs a step of the module, and logs its values.

        Args:
            name: name of the step.
            context: entered around it.
            arguments: arguments of the step, the batch first.
            weigh: `Losses.weigh`, to run backward too; None for forward only.

        Returns:
            The step's merged output for the whole batch; or with `weigh` the batch's mean loss, and the weight that the
            step gave it, or None. On all ranks.
        """
        work = _Work(self, name, context, arguments, weigh)
        is_new = work.job.is_first = self._record_writes(name)
        if is_new:
            check_hooks(self.module, self.partitioned.plan)
        watches = is_new or work.num_micro_batches > 1
        with (
            self._running(work.job, work.log),
            self.partitioned.parameter_writes.counted() if watches else nullcontext(),
        ):
            schedule = self._schedule_for(work)
            loans = loans_between(self.module, self.partitioned.plan, work.job.shapes.borrowed, self._num_ranks)
            lend(loans, self.partitioned.borrowed, self.wire, self.partitioned.device)
            self._check_state(work)
            warning = self._first_batch_warning(work) if is_new and work.trains else None
            work.log.take()  # discards the values of the trial run
            for stage in self._stages:
                stage.borrowed = torch.nn.ParameterList(self.partitioned.borrowed)
            self._touched.begin()
            work.left = [] if is_new and work.num_micro_batches > 1 else None
            self._run_schedule(schedule, work)
            work.note_left()
            left, work.left = work.left, None
            self._check_late_state(work)
            if work.trains:
                return_gradients(loans, self.partitioned.borrowed, self.wire, self.partitioned.device)
        result = self._share(work, warning)
        if left:
            self.partitioned.guard.compare(name, left[1:])
        self.partitioned.guard.end_batch()
        return result

    def seed_of_batch(self, *, trains: bool) -> int:
        """Returns a seed for the random numbers of this batch; the common stream of the stages does not change.

        Args:
            trains: whether it is a training batch. Its seed does not depend on the number of evaluated batches.
        """
        trainer = self.module.trainer
        loops: list[Any] = [epoch := trainer.fit_loop.epoch_loop]
        if not trains:
            loops += [epoch.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop]
        num_batches = [loop.batch_progress.total.ready for loop in loops]
        peeked = torch.randint(2**62, (), generator=torch.default_generator.clone_state())
        return derive_seed(int(peeked), trains, *num_batches)

    def _record_writes(self, name: str) -> bool:
        """Begins to record the attributes that a step writes, unless they are known; returns whether it does."""
        kind = name, self.module.training
        is_new = kind not in self._recorded
        self._recorded.add(kind)
        self.partitioned.written = {} if is_new else None
        return is_new

    def _check_state(self, work: _Work) -> None:
        """Checks what micro-batches leave behind; all ranks do so together.

        Raises:
            CutError: the next one uses it, so that state advances once a micro-batch; or other stages lack it.
        """
        kind = work.name, self.module.training
        if kind in self._checked or not (work.job.is_first or work.num_micro_batches > 1):
            return
        if work.num_micro_batches > 1:
            self._checked.add(kind)
        problems = [state_problem(stage, work.num_micro_batches) for stage in self._stages]
        gathered: list[Any] = [None] * self._num_ranks
        dist.all_gather_object(gathered, next(filter(None, problems), None), group=self._hosts)
        if (problem := next(filter(None, gathered), None)) is not None:
            raise CutError(problem)

    def _check_late_state(self, work: _Work) -> None:
        """Checks this rank's stages again where a batch of training has written attributes.

        A step may use what an earlier one has left from some batch on: that is looked at after the first batch that has
        written another attribute, and after the 2nd, 4th, 8th and so on that has written any.

        Raises:
            CutError: micro-batches have used what others have left; before the optimizer's step.
        """
        touched = self._touched.end() if work.trains and work.num_micro_batches > 1 else set()
        if not touched or not self.partitioned.borrowed.allowed:  # under FSDP2 the ranks with shards would have to come
            return
        self._num_touching += 1
        is_new = not touched <= self._touched.seen and not work.job.is_first
        self._touched.seen |= touched
        if is_new or (self._num_touching > 1 and self._num_touching.bit_count() == 1):
            with work.log.muted():
                problems = [state_problem(stage, work.num_micro_batches) for stage in self._stages]
            if (problem := next(filter(None, problems), None)) is not None:
                raise CutError(problem)

    def _first_batch_warning(self, work: _Work) -> str | None:
        """Warns of BatchNorm; returns the last stage's warning about the loss, which is broadcast to all ranks."""
        if text := batch_norm_warning(self.module, work.num_micro_batches, work.size):
            rank_zero_warn(text)
        if not (self._is_last and self.checks_loss):
            return None
        return loss_warning(self._stages[-1], work.step, work.batch, work.num_micro_batches)

    def _share(self, work: _Work, warning: str | None) -> Any:
        """Broadcasts from the last stage: the result, the logged values, a warning, and the attributes it has written.

        Args:
            work: the work that is done.
            warning: warning of the last stage, shown on rank 0.

        Returns:
            The result, on all ranks.
        """
        partitioned, last = self.partitioned, self.partitioned.plan.num_stages - 1
        written = partitioned.written.get(last) if partitioned.written else None
        partitioned.written = None
        value = (work.result(), work.log.take(), written, warning) if self._is_last else None
        result, calls, written, warning = self._sharing.broadcast(value)
        if warning is not None:
            rank_zero_warn(warning)
        if written is not None:
            partitioned.guard.learn(work.name, last, written, last + 1)
            partitioned.buffer_stages.update(partitioned.guard.buffer_stages())
            if work.trains and (
                text := buffers_warning(self.module, partitioned.guard.written, work.num_micro_batches)
            ):
                rank_zero_warn(text)
        work.log.replay(calls)
        return result

    def warn_of_buffers(self, written: Sequence[Key]) -> None:
        """Warns once of each buffer that steps of training have written, and the recorded ones have not."""
        new = [key for key in written if key not in self._told]
        self._told.update(new)
        plan, parts = self.partitioned.plan, dict(self.module.named_modules())
        names = [".".join(filter(None, key)) for key in new if len(plan.modules[parts[key[0]]]) > 1]
        if names:
            rank_zero_warn(
                f"the step writes into the buffer {names[0]!r} on one stage of a pipeline only, and not in the first"
                " batch, which shows what stages write: other stages that read it have had its earlier value. Write it"
                " in each batch, as with `torch.where`, or in a hook, such as on_train_batch_end."
            )
        if text := buffers_warning(self.module, new, self._num_full):
            rank_zero_warn(text)

    @contextmanager
    def _running(self, job: StepJob, log: StepLog) -> Any:
        random_state = get_random_state()
        self.partitioned.job, self.partitioned.failure = job, None
        try:
            with log.attached():
                yield
        except RuntimeError as error:
            failure = self.partitioned.failure or error.__cause__
            if not isinstance(failure, Exception):
                raise
            raise failure from None  # torch's schedules wrap it, and what backward raises
        finally:
            self.partitioned.job = self.partitioned.failure = None
            self.partitioned.filled.clear()
            self.partitioned.borrowed.clear()
            for stage in self._stages:
                stage.borrowed = None
            set_random_state(random_state)

    def _run_schedule(self, schedule: Any, work: _Work) -> None:
        number = work.num_micro_batches
        # torch's schedules need a target per micro-batch; it is not used, since the stage computes the losses itself.
        target = {"target": torch.arange(number)} if work.trains and self._is_last else {}
        if work.trains:
            self._full_size = max(self._full_size, work.size)
            if number > self._num_full:
                self._num_full = number
                self.clock.forget()  # the times of shorter batches
        is_full = work.trains and number == self._num_full
        self.clock.step(lambda: schedule.step(return_outputs=False, **target), counts=is_full)

    def _schedule_for(self, work: _Work) -> Any:
        """Returns the schedule for batches of these shapes; the first such batch makes a trial run."""
        shapes = tuple((tensor.shape, tensor.dtype) for tensor in flatten_tree(work.micro_batches[0])[1])
        modes = work.trains, self.module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = work.name, work.num_micro_batches, modes, shapes
        if key in self._schedules:
            self._schedules.move_to_end(key)
            schedule, work.job.shapes = self._schedules[key]
            return schedule
        self._trial_run(work.name, work.job)
        stages = [self._torch_stage(stage, work.job.shapes) for stage in self._stages]
        schedule = make_schedule(self._schedule, stages, work.num_micro_batches, trains=work.trains)
        self._schedules[key] = schedule, work.job.shapes
        if len(self._schedules) > _MAX_SCHEDULES:
            self._schedules.popitem(last=False)
        return schedule

    def _torch_stage(self, stage: StageModule, shapes: Shapes) -> Stage:
        return Stage(
            stage,
            stage.stage,
            self.partitioned.plan.num_stages,
            self.partitioned.device,
            input_args=shapes.sent(stage.stage - 1) if stage.stage else (),
            output_args=torch.empty((), device="meta") if stage.is_last else shapes.sent(stage.stage),
            group=self._group,
            clock=self.clock,
            wire=self.wire,
        )

    def _trial_run(self, name: str, job: StepJob) -> None:
        """Runs a micro-batch through one stage after the other, to learn the shapes that they send each other.

        Under FSDP2 the parameters that the trial run has gathered stay gathered for the batch itself. Ranks with shards
        of the same parameters may know their batches' shapes already: these make no trial run, and gather only once.
        """
        if self.partitioned.plan.num_stages == 1:
            return
        kind, last = (name, self.module.training), self.partitioned.plan.num_stages - 1
        if (first := self._first.get(kind)) is not None:
            job.trial_has_last_stage = False
            job.shapes.used[last] = dict(first.used.get(last, {}))
            job.shapes.borrowed[last] = list(first.borrowed.get(last, []))
        own_stages = {stage.stage: stage for stage in self._stages}
        undo = ReachableState(self.module).snapshot()
        kept = KeptValues(self.partitioned.own_parameters, self.partitioned.parameter_writes.used)
        try:
            for stage in range(self.partitioned.plan.num_stages):
                failure: Exception | None = None
                if stage in own_stages:
                    try:
                        with kept:
                            own_stages[stage].try_out()
                    except Exception as error:
                        failure = error
                self._broadcast_findings(name, stage, job, failure)
        finally:
            undo()
            kept.undo()
        if self.partitioned.borrowed.allowed:
            for parameter_name, parameter in self.module.named_parameters():
                if parameter not in self.partitioned.plan.holders:
                    raise CutError(new_parameter_text("the step", parameter_name))
        job.shapes.carry()
        if first is None:
            self._first[kind] = job.shapes
            if (text := loans_text(self.module, self.partitioned.plan, job.shapes.borrowed)) is not None:
                rank_zero_info(text)

    def _broadcast_findings(self, name: str, stage: int, job: StepJob, failure: Exception | None) -> None:
        """Broadcasts what the trial run of a stage has found, its failure included, and adds it to the job's shapes."""
        rank, shapes = stage % self._num_ranks, job.shapes
        message: list[Any] = [None]
        if dist.get_rank(self._group) == rank:
            offered = [t if t is None else (t.shape, t.dtype, t.requires_grad) for t in shapes.offered.get(stage, [])]
            problem = failure and describe_failure(failure, stage, job.micro_batch)
            written = self.partitioned.written.get(stage) if self.partitioned.written else None
            tables = (shapes.needed, shapes.starts, shapes.made, shapes.used, shapes.borrowed)
            message = [(shapes.units, offered, [table.get(stage) for table in tables], written, problem)]
        dist.broadcast_object_list(message, dist.get_global_rank(self._group, rank), group=self._hosts)
        if failure is not None:
            raise failure
        units, offered, (needed, start, produced, used, borrowed), written, problem = message[0]
        if problem is not None:
            raise CutError(problem)
        if written is not None:
            self.partitioned.guard.learn(name, stage, written, self.partitioned.plan.num_stages)
        shapes.units.update(units)
        shapes.starts[stage], shapes.made[stage] = start, produced
        shapes.used[stage], shapes.borrowed[stage] = used or {}, borrowed or []
        shapes.offered[stage] = [
            form if form is None else torch.empty(form[0], dtype=form[1], device="meta").requires_grad_(form[2])
            for form in offered
        ]
        if stage:
            num_offered = len(shapes.offered[stage - 1])
            if needed is None or any(index >= num_offered for index in needed):
                unit = self.partitioned.names[self.partitioned.plan.stages[stage][0]]
                raise CutError(
                    f"the step calls {unit!r} with other arguments on pipeline stage {stage}, which runs it, than on"
                    f" stage {stage - 1}: have it not depend on values or modules of one stage how that is called, or"
                    " choose another strategy, such as 'fsdp'."
                )
            shapes.needed[stage] = needed

    def close(self) -> None:
        """Removes from the module what was attached to it."""
        self.partitioned.guard.close()
        unshare_metrics(self.module)

    def report(self, hosts: ObjectGroup) -> None:
        """Logs the share of a full batch's time in which the ranks were idle; all ranks of the pipeline call it."""
        times = hosts.all_gather_object(self.clock.seconds())
        total = sum(seconds for _, seconds in times)
        if total:
            idle = 1 - sum(busy for busy, _ in times) / total
            per_rank = self.partitioned.plan.num_stages // self._num_ranks
            rank_zero_info(idle_text(self._schedule, self._num_ranks, self._num_full, self._full_size, per_rank, idle))


# --- the losses and weights of a batch's micro-batches, on the last stage
# The loss of a batch is the mean over its micro-batches; or, where `training_step` returns ``{"loss": mean, "weight":
# count}``, the mean weighted by these counts. The sum of the weights is known after the last forward, when most
# backward passes are over: so the gradients are those of the sum of losses times weights, which the loop divides.


class Losses:
    """The losses and weights of the micro-batches of one batch.

    Args:
        weigh: maps a micro-batch's weight to the factor on its loss; None maps to the factor on the batch's mean loss.
        number: number of micro-batches.
        scale: multiplies the loss of a backward by the loss scale, if there is one.
    """

    def __init__(self, weigh: Callable[[Any], Tensor], number: int, scale: Callable[[Tensor], Tensor]) -> None:
        self._weigh, self._number, self._scale_loss = weigh, number, scale
        self._means: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, output: Any) -> Tensor:
        """Adds a micro-batch; returns the scalar to run backward on.

        Args:
            output: output of `training_step`.

        Raises:
            ValueError: it has no loss; or some micro-batches have a weight, and others have none.
        """
        loss, weight = _loss(output), output.get("weight") if isinstance(output, Mapping) else None
        if self._means and (weight is None) == bool(self._weights):
            raise ValueError(
                "`training_step` returned a weight for some micro-batches of a batch and none for others: return one"
                " for all of them (zero is allowed), or for none."
            )
        counts = self._weigh(weight)
        if weight is None:
            self._means.append(loss.detach())
            return self._scale_loss(loss * (counts / self._number))
        loss = loss.masked_fill(counts == 0, 0.0)  # the mean over zero samples is NaN
        self._means.append(loss.detach())
        self._weights.append(counts)
        return self._scale_loss(loss * counts)

    def mean(self) -> tuple[Tensor, Tensor | None]:
        """Returns the batch's mean loss, and its weight, or None if `training_step` returned no weights."""
        means = torch.stack(self._means)
        if not self._weights:
            return means.mean(), None
        weights = torch.stack(self._weights)
        total = weights.sum()
        return (means * weights).sum() / torch.where(total > 0, total, 1.0), total


def _loss(output: Any) -> Tensor:
    """Returns the loss in an output of `training_step`."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`training_step` must return a loss in a pipeline, a tensor or a dict with one under 'loss', but it"
            f" returned {type(output).__name__}: a step can't be skipped by one stage alone."
        )
    return loss
