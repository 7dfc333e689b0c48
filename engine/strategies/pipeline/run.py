"""Runs steps of a module through the stages of a pipeline, and brings what the last stage found to all of them.

Random numbers: the ranks of a pipeline have a common stream, and each batch takes one number of it, from which each
micro-batch has a stream of its own. What a step draws before its units, such as the noise that its loss needs again, is
the same on all stages; what the units of a stage draw (dropout) is that stage's own.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from ...checkpoint.rng import get_random_state, seed_all, set_random_state
from ...compression import Wire
from ...host_group import HostGroup
from ...loop.undo import Undo
from .absent import CutError
from .batches import batch_size_of, merged, split_batch
from .failures import described
from .loans import lend, loans_between, loans_text, return_gradients
from .log import StepLog, idle_text, share_metrics, unshare_metrics
from .losses import Losses
from .micro_batches import batch_norm_text, buffers_text, loss_text
from .part import Cut, Job, Part
from .schedules import Clock, Stage, make_schedule, num_micro_batches
from .shapes import Shapes
from .share import Sharing, take_apart

__all__ = ["Runner"]

_MOST_SHAPES = 8
"""Kinds of batches whose schedules, which hold on to memory, are kept."""


class Runner:
    """The stages of this rank.

    Args:
        module: whose steps are run.
        cut: the same module, with units that know of stages.
        parts: those of this rank.
        group: the ranks of this pipeline.
        hosts: a gloo group of the same ranks.
        schedule: name of the flag.
        num_micro_batches: that a batch is cut into, if it divides.
    """

    def __init__(
        self,
        module: LightningModule,
        cut: Cut,
        parts: Sequence[Part],
        *,
        group: Any,
        hosts: Any,
        schedule: str,
        num_micro_batches: int,
    ) -> None:
        self._module, self._cut, self._parts = module, cut, parts
        self._group, self._hosts = group, hosts
        self._schedule, self._num_micro_batches = schedule, num_micro_batches
        self._size = dist.get_world_size(group)
        self._is_last = any(part.is_last for part in parts)
        self._sharing = Sharing(group, hosts, self._size - 1, cut.device)
        self._ready: OrderedDict[Any, tuple[Any, Shapes]] = OrderedDict()
        self._noted: set[tuple[str, bool]] = set()
        """Steps, in training or not, of which it is known what they write."""
        self._first: dict[tuple[str, bool], Shapes] = {}
        """The shapes that the first batch of each step has shown. In that batch the last stage had a trial run, too."""
        self.clock = Clock(cut.device)
        self.wire = Wire(group)
        """Counts what stages hand over."""
        self.tries_loss = True
        """Whether the last stage may run by itself for once."""
        self._num_full = 0
        """Micro-batches of a full batch: the most that one was cut into."""
        self._full_size = 0
        share_metrics(module, self._sharing, self._is_last, lambda: cut.job is not None)

    def run(
        self,
        name: str,
        context: Callable[[], AbstractContextManager[Any]],
        arguments: tuple[Any, ...],
        weigh: Callable[[Any], Tensor] | None = None,
    ) -> Any:
        """Runs a step of the module, and logs what it logged.

        Args:
            name: of the step.
            context: entered around it.
            arguments: of the step, the batch first.
            weigh: of `Losses`, to run backward too; None for forward alone.

        Returns:
            What the step returned for the whole batch; or with `weigh` the batch's mean loss, and the weight that the
            step gave it, or None. On all ranks.
        """
        batch, *others = arguments
        size = batch_size_of(batch)
        number = num_micro_batches(size, self._num_micro_batches)
        batches = split_batch(batch, number)
        step, log = getattr(self._module, name), StepLog(self._module)
        outputs: dict[int, Any] = {}
        losses = None if weigh is None else Losses(weigh, number)
        seed = int(torch.randint(2**62, ()))

        def begin(index: int, stage: int) -> None:
            log.begin_micro_batch(stage == self._cut.plan.num_stages - 1)
            seed_all(seed, index)

        def finish(index: int, output: Any) -> Tensor:
            if losses is not None:
                return losses.add(output)
            outputs[index] = output
            return torch.zeros((), device=self._cut.device)

        job = Job(
            step=lambda index: step(batches[index], *others),
            begin=begin,
            resume=lambda index, stage: seed_all(seed, index, 1 + stage),
            finish=finish,
            context=context,
            shapes=Shapes(),
            micro_batch=f"a micro-batch of {size // number} of the batch's {size} samples",
        )
        kind = name, self._module.training
        is_new = kind not in self._noted and self._cut.plan.num_stages > 1
        self._noted.add(kind)
        self._cut.written = {} if is_new else None
        with self._running(job, log):
            schedule = self._schedule_for(name, job, batches[0], number, weigh is not None)
            loans = loans_between(self._module, self._cut.plan, job.shapes.borrowed, self._size)
            lend(loans, self._cut.borrowed, self.wire, self._cut.device)
            warning = None
            if is_new and weigh is not None:
                if text := batch_norm_text(self._module, number, size):
                    rank_zero_warn(text)
                if self._is_last and self.tries_loss:
                    warning = loss_text(self._parts[-1], lambda samples: step(samples, *others), batch, number)
            log.take()  # what a trial run has logged
            if weigh is not None:
                self._full_size = max(self._full_size, size)
            for part in self._parts:
                part.borrowed = torch.nn.ParameterList(self._cut.borrowed)
            self._step(schedule, number, weigh is not None)
            if weigh is not None:
                return_gradients(loans, self._cut.borrowed, self.wire, self._cut.device)
        result: Any = None
        if self._is_last:
            result = merged([outputs[index] for index in range(number)]) if losses is None else losses.mean()
        last = self._cut.plan.num_stages - 1
        written = self._cut.written.get(last) if self._cut.written else None
        self._cut.written = None
        said = (result, log.take(), written, warning) if self._is_last else None
        result, calls, written, warning = self._sharing.of(said)
        if warning is not None:
            rank_zero_warn(warning)
        if written is not None:
            self._cut.readers.learn(name, last, written, last + 1)
            self._cut.buffer_stages.update(self._cut.readers.buffer_stages())
            text = None if weigh is None else buffers_text(self._module, self._cut.readers.written, number)
            if text is not None:
                rank_zero_warn(text)
        log.replay(calls)
        return result

    @contextmanager
    def _running(self, job: Job, log: StepLog) -> Any:
        random = get_random_state()
        self._cut.job, self._cut.failure = job, None
        try:
            with log.attached():
                yield
        except RuntimeError:
            if self._cut.failure is None:
                raise
            raise self._cut.failure from None  # torch's schedules hide it behind one of their own
        finally:
            self._cut.job = self._cut.failure = None
            self._cut.filled.clear()
            self._cut.borrowed.clear()
            for part in self._parts:
                part.borrowed = None
            set_random_state(random)

    def _step(self, schedule: Any, number: int, trains: bool) -> None:
        numbers = torch.arange(number)
        target = {"target": numbers} if trains and self._is_last else {}
        if trains and number > self._num_full:
            self._num_full = number
            self.clock.forget()  # of shorter batches
        is_full = trains and number == self._num_full
        self.clock.step(lambda: schedule.step(index=numbers, return_outputs=False, **target), counts=is_full)

    def _schedule_for(self, name: str, job: Job, batch: Any, number: int, trains: bool) -> Any:
        """The schedule of batches like this one; the first of its kind makes a trial run."""
        kinds = tuple((tensor.shape, tensor.dtype) for tensor in take_apart(batch)[1])
        modes = trains, self._module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        key = name, number, modes, kinds
        if key in self._ready:
            self._ready.move_to_end(key)
            schedule, job.shapes = self._ready[key]
            return schedule
        self._try(name, job)
        num_stages = self._cut.plan.num_stages
        stages = [
            Stage(
                part,
                part.stage,
                num_stages,
                self._cut.device,
                input_args=job.shapes.sent(part.stage - 1) if part.stage else (),
                output_args=torch.empty((), device="meta") if part.is_last else job.shapes.sent(part.stage),
                group=self._group,
                clock=self.clock,
                wire=self.wire,
            )
            for part in self._parts
        ]
        schedule = make_schedule(self._schedule, stages, number, trains=trains)
        self._ready[key] = schedule, job.shapes
        if len(self._ready) > _MOST_SHAPES:
            self._ready.popitem(last=False)
        return schedule

    def _try(self, name: str, job: Job) -> None:
        """Runs a micro-batch through one stage after the other, for the shapes of what they hand over.

        Under FSDP2 parameters that it has gathered stay so for the batch itself: the ranks that share them may know
        their batches' shapes already, and gather them but once.
        """
        if self._cut.plan.num_stages == 1:
            return
        kind, last = (name, self._module.training), self._cut.plan.num_stages - 1
        if (first := self._first.get(kind)) is not None:
            job.tries_last = False
            job.shapes.used[last] = dict(first.used.get(last, {}))
            job.shapes.borrowed[last] = list(first.borrowed.get(last, []))
        parts = {part.stage: part for part in self._parts}
        undo = Undo(self._module, random=False)
        try:
            for stage in range(self._cut.plan.num_stages):
                failure: Exception | None = None
                if stage in parts:
                    try:
                        parts[stage].try_out()
                    except Exception as error:
                        failure = error
                self._tell(name, stage, job, failure)
        finally:
            undo.undo()
        job.shapes.carry()
        if first is None:
            self._first[kind] = job.shapes
            if (text := loans_text(self._module, self._cut.plan, job.shapes.borrowed)) is not None:
                rank_zero_info(text)

    def _tell(self, name: str, stage: int, job: Job, failure: Exception | None) -> None:
        """Tells all ranks what a stage has found out."""
        rank, shapes = stage % self._size, job.shapes
        said: list[Any] = [None]
        if dist.get_rank(self._group) == rank:
            offered = [t if t is None else (t.shape, t.dtype, t.requires_grad) for t in shapes.offered.get(stage, [])]
            problem = failure and described(failure, stage, job.micro_batch)
            written = self._cut.written.get(stage) if self._cut.written else None
            found = [
                known.get(stage) for known in (shapes.needed, shapes.starts, shapes.made, shapes.used, shapes.borrowed)
            ]
            said = [(shapes.units, offered, found, written, problem)]
        dist.broadcast_object_list(said, dist.get_global_rank(self._group, rank), group=self._hosts)
        if failure is not None:
            raise failure
        units, offered, (needed, start, made, used, borrowed), written, problem = said[0]
        if problem is not None:
            raise CutError(problem)
        if written is not None:
            self._cut.readers.learn(name, stage, written, self._cut.plan.num_stages)
        shapes.units.update(units)
        shapes.starts[stage], shapes.made[stage] = start, made
        shapes.used[stage], shapes.borrowed[stage] = used or {}, borrowed or []
        shapes.offered[stage] = [
            form if form is None else torch.empty(form[0], dtype=form[1], device="meta").requires_grad_(form[2])
            for form in offered
        ]
        if stage:
            before = len(shapes.offered[stage - 1])
            if needed is None or any(index >= before for index in needed):
                unit = self._cut.name_of(self._cut.plan.stages[stage][0])
                raise CutError(
                    f"the step calls {unit!r} with other arguments on pipeline stage {stage}, which runs it, than on"
                    f" stage {stage - 1}: have it not depend on values or modules of one stage how that is called, or"
                    " choose another strategy, such as 'fsdp'."
                )
            shapes.needed[stage] = needed

    def close(self) -> None:
        """Takes away what was attached to the module."""
        self._cut.readers.close()
        unshare_metrics(self._module)

    def report(self, hosts: HostGroup) -> None:
        """Logs the share of a full batch's time in which the ranks were idle; all of the pipeline call it together."""
        times = hosts.gathered(self.clock.seconds())
        total = sum(seconds for _, seconds in times)
        if total:
            idle = 1 - sum(busy for busy, _ in times) / total
            chunks = self._cut.plan.num_stages // self._size
            rank_zero_info(idle_text(self._schedule, self._size, self._num_full, self._full_size, chunks, idle))
