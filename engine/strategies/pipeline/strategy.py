"""`pp`, `pp+ddp`, `pp+fsdp`: the module's blocks form pipeline stages, which work on several micro-batches at once.

Uses `torch.distributed.pipelining` (https://docs.pytorch.org/docs/stable/distributed.pipelining.html) to send, receive
and run backward. The module is not traced: each stage runs the module's own step, see `stage_module.py`. With p stages
and m micro-batches of equal cost a rank is idle for (p - 1) / (m + p - 1) of the time.

Communication per batch and rank, for stages that send A bytes of activations a batch:
1. forward: A to the next stage, in m parts;
2. backward: A to the previous stage, in m parts;
3. loss, logged values and outputs, broadcast from the last stage: see `shapes.py`;
4. per optimizer step: gradients of parameters that stages share, and the average of `pp+ddp`: see `gradients.py`.
   `pp+fsdp`: an all-gather of the stage's parameters and a reduce-scatter of its gradients per batch.
Once for each new shape of a batch: a trial forward pass, in which all stages learn what they will receive.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from ...checkpoint.rng import get_random_state, set_random_state
from ...compression import AllReduceHook, CommHook, CountingGroup
from ...distributed.buckets import give_value, tell_device
from ...distributed.object_group import ObjectGroup
from ...flags import Axis, Layout
from ...initialization import check_shapes, materialize, read_stored
from ..averages import split_as_module
from ..callers import CutError, users_line
from ..collectives import NoSumsOfGradients
from ..fsdp.comm import CountedAllGather, CountedReduceScatter, attach_to_gathered, fsdp_units, reshard
from ..fsdp.shard_checks import check_pruning
from ..fsdp.written_parameters import forget_data, give_back_numbers, keep_data, keep_writes, read_whole_numbers
from ..layout import STATE_IS_LOST, MeshStrategy, never_flatten
from ..optimizer_trial import habits_of
from ..options import PPDDPOptions, PPFSDPOptions, PPOptions
from ..replaced_parameters import Replacements
from ..units import CompiledBlock, named_blocks, shard_units
from .gradients import StageGradients
from .parameter_writes import between_passes_text, note_writes
from .partitioned_module import PartitionedModule, StepJob
from .plan import RemoteTensor, StagePlan, plan_stages, replace_absent
from .remote_state import show_state_of_all
from .stage_checks import check_batch_size, check_flags, check_optimization, check_plan, check_schedule
from .stage_module import StageModule

__all__ = ["Pipeline", "buffer_stages", "gather_state"]


class Pipeline(MeshStrategy):
    """Stages on a mesh with the axes `pp` and, where there are several pipelines, `replicate` or `shard`.

    Args:
        options: options of the flag; their class says which of the three strategies it is.
        launcher: suffix of the flag, see `flags.LAUNCHERS`.
        comm_hook: how `pp+ddp` averages gradients over the pipelines.
    """

    capabilities = dataclasses.replace(
        MeshStrategy.capabilities,
        optimizer_state_partitioned=True,
        runs_own_schedule=True,
        has_between_passes=True,
        state_is_sharded=True,
        gathers_state=False,
        recomputes_blocks=True,  # within each stage
        unsupported_repeat="a pipeline",
    )
    returns_to_snapshot = STATE_IS_LOST
    needs_same_training = True
    compiles_units = True
    """True: whole steps are never compiled, since a stage leaves the step in the middle."""

    def __init__(self, options: PPOptions, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        super().__init__(save_distributed_checkpoint=False, timeout=timedelta(seconds=options.timeout_s))
        # Imported here, since it takes a second; not later, when all processes would wait for it.
        from . import run

        self._runner_class = run.Runner
        self.options = options
        if isinstance(options, PPFSDPOptions):
            self.capabilities = dataclasses.replace(self.capabilities, evaluates_in_inference_mode=False)
        self.launcher_suffix = launcher
        self.comm_hook = comm_hook
        self._counting_hook: AllReduceHook | None = None
        self._shard_group: CountingGroup | None = None
        self._runner: Any = None
        self._while_training = ExitStack()
        self._tied: dict[tuple[int, ...], CountingGroup] = {}
        self._partitioned: PartitionedModule | None = None
        self._parts: list[StageModule] = []
        self._holders: dict[str, tuple[int, ...]] = {}
        self._buffer_owners: dict[str, int] = {}
        self._written_between: list[str] = []
        """The parameters that hooks have written which one process calls between forward and backward."""
        self._hide_state: Callable[[], None] = lambda: None
        self._has_run = False
        """Whether a batch was trained, so that it is known which parameters its step uses."""

    # --- the ranks

    @property
    def _second_axis(self) -> Literal["replicate", "shard"] | None:
        if isinstance(self.options, PPDDPOptions):
            return "replicate"
        return "shard" if isinstance(self.options, PPFSDPOptions) else None

    def derive_layout(self, world_size: int) -> Layout:
        """Returns the layout: the axis `pp` outermost; sizes that the options leave out are derived."""
        options, axis = self.options, self._second_axis
        if axis is None:
            layout = Layout.derive(world_size, rest="pp", pp=options.pipeline_size)
        else:
            size = getattr(options, axis)
            stages = min(2, world_size) if size is None and options.pipeline_size is None else options.pipeline_size
            rest: Axis = "pp" if stages is None else axis
            layout = Layout.derive(world_size, rest=rest, **{"pp": stages, axis: size})
        check_schedule(options, layout.pp)
        return layout

    def __repr__(self) -> str:
        name = {None: "pp", "replicate": "pp+ddp", "shard": "pp+fsdp"}[self._second_axis]
        return repr(name + (f"_{self.launcher_suffix}" if self.launcher_suffix else ""))

    @property
    def _stage_rank(self) -> int:
        """The number of this rank within its pipeline."""
        return self.global_rank // self.data_size

    @property
    def num_stages(self) -> int:
        """Number of stages of a pipeline."""
        return self.layout.pp * self.options.stages_per_rank

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """See `MeshStrategy`."""
        return ("pp",) if self._second_axis is None else ("pp", self._second_axis)

    def setup_environment(self) -> None:
        """Starts the process groups, including those of the pipelines."""
        super().setup_environment()
        assert self._device_mesh is not None
        self._group = self._device_mesh["pp"].get_group()
        self._hosts = self._group
        if dist.get_backend(self._group) != "gloo":
            pipelines = [list(range(first, self.world_size, self.data_size)) for first in range(self.data_size)]
            self._hosts, _ = dist.new_subgroups_by_enumeration(pipelines, timeout=self._timeout, backend="gloo")
        self._stage_ranks = ObjectGroup(self._hosts)

    # --- checks before processes start

    def check_module(self, module: nn.Module) -> None:
        """Checks that `module` can be trained in stages.

        Raises:
            ValueError: it optimizes manually, or can't be cut into stages.
        """
        check_optimization(module)
        if not is_overridden("configure_model", module):  # which may add blocks
            check_shapes(module)
            check_plan(module, plan_stages(module, self.num_stages), self.options)

    def check_run(self, *, compiles: bool, callbacks: Sequence[Callback]) -> None:
        """Checks the flags against the strategy.

        Raises:
            ValueError: a flag can't be honoured in stages.
        """
        super().check_run(compiles=compiles, callbacks=callbacks)
        check_pruning(callbacks, repr(self))
        check_flags(
            self.options,
            self.precision_plugin,
            callbacks,
            syncs_batchnorm=self._layer_sync is not None,
            compiles=compiles,
        )

    def check_loader(self, dataloader: Any) -> None:
        """See `DistributedStrategy`."""
        check_batch_size(dataloader, self.options.microbatches)

    # --- the module

    def setup(self, trainer: Trainer) -> None:
        """Partitions the module, unless an earlier `fit` has, and creates the optimizers."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._partitioned is None or self._partitioned.module is not self.model:
            self.note_module(self.model)
            check_shapes(self.model)
            if fitting and self.before_split is not None:
                self.before_split(self.model)
            self.model = self.precision_plugin.convert_module(self.model)
            self._partition(self.model)
        tell_device(self.model, self.root_device)  # Lightning moves metrics that were logged to the CPU after a run
        self.barrier()
        if fitting:
            # All stages of a pipeline draw the same numbers, except in their units (dropout).
            set_random_state(self._stage_ranks.all_gather_object(get_random_state())[0])
            split_as_module(trainer)
            self.setup_optimizers(trainer)
            for optimizer in self.optimizers:
                if reason := habits_of(optimizer).of_others:
                    raise ValueError(
                        f"{reason}, but a pipeline stage has only its own: switch that off, if it is an option (and set"
                        " gradient_clip_val of the Engine for clipping), choose another optimizer, or another strategy,"
                        " such as 'ddp' or 'fsdp'."
                    )
        self.setup_precision_plugin()
        self._call_hooks_on_whole(trainer)
        if fitting:
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            self._hide_state = show_state_of_all(trainer, self.optimizers, schedulers)
        if isinstance(self.options, PPFSDPOptions):
            read_whole_numbers(None)
            keep_data(None, repr(self))
        self.hand_out_data_group(self.model)
        self._start_runner()
        if fitting:
            self._start_gradients()

    def _partition(self, model: nn.Module) -> None:
        """Partitions the module: each rank gets rank 0's values of what it holds, and shapes for the rest."""
        replacements = Replacements(model, repr(self))
        materialize(model, replace=replacements.replace)
        plan = plan_stages(model, self.num_stages)
        check_plan(model, plan, self.options)
        size, rank = self.layout.pp, self._stage_rank
        on_rank = {p: tuple(sorted({stage % size for stage in stages})) for p, stages in plan.holders.items()}
        # Tied parameters under each of their names, as in a state dict.
        names = model.named_parameters(remove_duplicate=False)
        self._holders = {name: on_rank[parameter] for name, parameter in names}
        self._buffer_owners = {name: stage % size for name, stage in buffer_stages(model, plan).items()}
        absent: set[nn.Parameter] = set()
        for tensor in (*model.parameters(), *model.buffers()):
            if is_absent := isinstance(tensor, nn.Parameter) and rank not in on_rank[tensor]:
                absent.add(tensor)
            if tensor.is_meta:  # `read_stored` reads it from a file
                continue
            value = tensor.data.to(self.root_device).contiguous()
            dist.broadcast(value, src=0)
            if not is_absent:
                give_value(tensor, value)
        read_stored(model, self.root_device, leave=absent)
        replace_absent(model, plan, absent, replacements.note, self.root_device)
        own_stages = range(rank, self.num_stages, size)
        own_units = [unit for stage in own_stages for unit in plan.stages[stage]]
        if self.recompute is not None:
            own_parts = {submodule for unit in own_units for submodule in unit.modules()}
            for block in named_blocks(model):
                if block in own_parts:
                    self.recompute(block)
        if self.compile is not None:
            for unit in own_units:
                CompiledBlock(unit, self.compile)
        lends = not isinstance(self.options, PPFSDPOptions)  # under FSDP2 the holder has no whole parameters to lend
        watches = lends and self.compile is None
        self._partitioned = PartitionedModule(
            model, plan, self.root_device, own_stages, lends=lends, watches_writes=watches
        )
        self._parts = [StageModule(self._partitioned, stage) for stage in own_stages]
        if isinstance(self.options, PPFSDPOptions):
            never_flatten(model)
            units = set(shard_units(model))
            for submodule in self._parts:
                with replacements.within(submodule):
                    self._shard(submodule, units)
                attach_to_gathered(submodule)
                watches_data = self.compile is None
                keep_writes(
                    submodule, repr(self), None, None, watches_data=watches_data, name_of=self._partitioned.name_of
                )
        replacements.update_references()

    def _shard(self, stage: StageModule, units: set[nn.Module]) -> None:
        mesh = self.device_mesh["shard"]
        ignored = {parameter for parameter in stage.parameters() if parameter.is_meta}
        for unit in [unit for unit in stage.modules() if unit in units]:  # in the same order on all ranks
            fully_shard(unit, mesh=mesh, reshard_after_forward=False)
        # torch: the stage reduces gradients and frees the whole parameters when the last micro-batch is done.
        fully_shard(stage, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)

    def _start_runner(self) -> None:
        assert self._partitioned is not None
        assert self.lightning_module is not None
        plan = self._partitioned.plan
        self._runner = self._runner_class(
            self.lightning_module,
            self._partitioned,
            self._parts,
            group=self._group,
            hosts=self._hosts,
            schedule=self.options.schedule,
            # With one stage no rank waits for another: cutting the batch would gain nothing.
            num_micro_batches=self.options.microbatches or (2 * self.layout.pp if plan.num_stages > 1 else 1),
        )
        # The check of the loss is off where it would gather parameters, or compile for another batch size.
        if (scaler := self.loss_scaler) is not None:
            self._runner.scale = scaler.scale
            # Stages have gradients of different parameters.
            scaler.agree = self._largest_of_stages  # type: ignore[attr-defined]  # ours: `precision/loss_scaling.py`
        self._runner.checks_loss = not isinstance(self.options, PPFSDPOptions) and self.compile is None

    def _largest_of_stages(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, dist.ReduceOp.MAX, self._group)
        return value

    def _start_gradients(self) -> None:
        model, size = self.model, self.data_size
        assert model is not None
        self._tied = {}
        for holders in sorted({ranks for ranks in self._holders.values() if len(ranks) > 1}):
            by_pipeline = [[rank * size + pipeline for rank in holders] for pipeline in range(size)]
            # All ranks create all groups, in the same order.
            groups = [dist.new_group(ranks, timeout=self._timeout) for ranks in by_pipeline]
            if self._stage_rank in holders:
                self._tied[holders] = CountingGroup(groups[self.data_rank])
        parameters = dict(model.named_parameters())
        RemoteTensor.beside = [parameter for parameter in parameters.values() if not parameter.is_meta]
        RemoteTensor.without_gradient = set()
        self._gradients = StageGradients(
            parameters, self._holders, self._group, self._stage_ranks, self._tied, self.root_device
        )
        self.precision_plugin.norm_of = self._gradients.norm  # type: ignore[attr-defined]
        if isinstance(self.options, PPDDPOptions) and size > 1:
            self._counting_hook = AllReduceHook() if self.comm_hook is None else None
            hook = self.active_hook
            assert hook is not None
            self._replicas = self._device_mesh["replicate"].get_group()  # type: ignore[index]
            hook.begin(model, CountingGroup(self._replicas), self.loss_scaler)
        if isinstance(self.options, PPFSDPOptions) and self.counts_traffic:
            self._shard_group = CountingGroup(self._device_mesh["shard"].get_group())  # type: ignore[index]
            for index, (unit, _) in enumerate(unit for stage in self._parts for unit in fsdp_units(stage, size)):
                unit.set_custom_all_gather(CountedAllGather(self._shard_group, index))
                unit.set_custom_reduce_scatter(CountedReduceScatter(self._shard_group, index))

    @property
    def wires(self) -> list[CountingGroup]:
        """The groups that count gradients, activations between stages, and FSDP2's collectives if they are counted."""
        if self._runner is None:
            return []
        return [
            *super().wires,
            self._runner.wire,
            *self._tied.values(),
            *([self._shard_group] if self._shard_group else []),
        ]

    @property
    def active_hook(self) -> CommHook | None:
        """The comm hook that averages gradients over the pipelines; None with one pipeline, or if they are sharded."""
        # A run that goes on with fewer ranks may have one pipeline where it had several.
        return (self.comm_hook or self._counting_hook) if self.data_size > 1 else None

    # --- steps

    @contextmanager
    def between_passes(self) -> Iterator[None]:
        """Context of hooks that one process calls between forward and backward: refuses what they write into weights.

        Raises:
            CutError: they write into a parameter that the step uses; in the first batch the schedule raises it.
        """
        assert self.model is not None
        with note_writes(self.model, self._written_between):
            yield
        if self._has_run:
            self._check_written_between()

    def _check_written_between(self) -> None:
        written, self._written_between = self._written_between, []
        partitioned, parameters = self._partitioned, dict(self.model.named_parameters()) if written else {}  # type: ignore[union-attr]
        used = partitioned.parameter_writes.used  # type: ignore[union-attr]
        for name in written:
            if parameters[name] in used or parameters[name].requires_grad:
                raise CutError(between_passes_text(name))

    def run_schedule(
        self, arguments: tuple[Any, ...], weigh: Callable[[Any], Tensor], synchronises: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Runs forward and backward of a batch.

        Args:
            arguments: arguments of `training_step`.
            weigh: see `Losses`.
            synchronises: whether this batch ends its accumulation window, so that gradients are summed and averaged.

        Returns:
            The mean loss; and its weight, or None if `training_step` returned none. With a weight, the gradients are
            those of the loss times the weight. On all ranks.
        """
        hooks = nullcontext() if self._parameter_hooks is None else self._parameter_hooks.around_backward()
        with self._partitioned.collectives, hooks:  # type: ignore[union-attr]
            losses = self._runner.run("training_step", self.precision_plugin.train_step_context, arguments, weigh)
            self._has_run = True
            self._check_written_between()
            if synchronises or self.synchronises_always:
                self._gradients.synchronise(self.active_hook, self.data_ranks)
        return losses

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's step, forward only."""
        return self._evaluate("training_step", self.precision_plugin.train_step_context, args)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output of the module's step for the whole batch, on all ranks."""
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return self._evaluate("test_step", self.precision_plugin.test_step_context, args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """As `validation_step`."""
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, args)

    def _evaluate(self, name: str, context: Any, arguments: tuple[Any, ...]) -> Any:
        with self._partitioned.collectives:  # type: ignore[union-attr]
            return self._runner.run(name, context, arguments)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over the ranks with different samples; in a step, these must have cut it into as many micro-batches.

        In a trial run, which other ranks may not make, a rank has its own values in the places of the others'.

        Raises:
            ValueError: the ranks call it different numbers of times.
        """
        partitioned = self._partitioned
        is_usual = group in (None, dist.group.WORLD, self.data_group) and not tensor.is_meta
        if partitioned is None or partitioned.active is None or not is_usual:
            return super().all_gather(tensor, group, sync_grads)
        job = partitioned.job
        assert job is not None
        if job.is_trial:
            return tensor.unsqueeze(0).repeat(self.data_size, *[1] * tensor.dim())
        with partitioned.collectives.paused():
            if not job.is_agreed:
                self._agree_on_micro_batches(job)
            return super().all_gather(tensor, group, sync_grads)

    def _agree_on_micro_batches(self, job: StepJob) -> None:
        numbers = self.data_ranks.all_gather_ints(job.num_micro_batches)
        if len(set(numbers)) > 1:
            raise ValueError(
                f"{users_line()} gathers from ranks that have cut their batches into {numbers} micro-batches, and would"
                " wait for each other: give all ranks batches of one size (drop_last=True in the DataLoader), set"
                " microbatches=1 with schedule=gpipe, or gather in a hook, such as"
                " on_train_batch_end."
            )
        job.is_agreed = True

    def on_train_start(self) -> None:
        """Called when everything is restored."""
        super().on_train_start()
        self._partitioned.note_buffers()  # type: ignore[union-attr]
        of_stage = [self.global_rank] if self.data_group is None else dist.get_process_group_ranks(self.data_group)
        self._while_training.enter_context(NoSumsOfGradients(of_stage))

    def on_train_end(self) -> None:
        """Logs how long the ranks were idle, and warns of buffers that late steps have written."""
        super().on_train_end()
        self._while_training.close()
        self._find_writers()
        self._runner.report(self._stage_ranks)

    def _find_writers(self) -> None:
        """Finds the ranks whose values of buffers count, where the first batches did not show it."""
        written = self._partitioned.find_writers(self._stage_ranks)  # type: ignore[union-attr]
        self._runner.warn_of_buffers(written)

    def end_evaluation(self) -> None:
        """Frees gathered parameters, as under `fsdp`."""
        for stage in self._parts:
            reshard(stage)

    def teardown(self) -> None:
        """Removes from the module what was attached to it."""
        self._hide_state()
        RemoteTensor.beside = ()
        self._while_training.close()
        if self._runner is not None:
            self._runner.close()
        if self.loss_scaler is not None:
            self.loss_scaler.agree = None  # type: ignore[attr-defined]
        if isinstance(self.options, PPFSDPOptions):
            give_back_numbers()
            forget_data()
        super().teardown()

    def make_whole(self) -> None:
        """See `EngineStrategy`."""
        super().make_whole()
        self._partitioned, self._parts, self._has_run = None, [], False

    # --- checkpoints

    def keeps_state_of(self, parameter: Tensor) -> bool:
        """Whether a parameter is one of this rank's stages."""
        return not parameter.is_meta

    def saved_state(self, module: nn.Module) -> dict[str, Any]:
        """Returns a state dict of the module, with shapes in place of buffers that another stage writes."""
        if self._partitioned is None:  # the process that has started the ranks, which returned their state to it
            return module.state_dict()
        self._find_writers()
        state = self._partitioned.state_dict(self._stage_ranks, self.layout.pp)
        owners = self._partitioned.owners(self._buffer_owners, self.layout.pp)
        others = {name for name, rank in owners.items() if rank != self._stage_rank}
        return {name: value.to("meta") if name in others else value for name, value in state.items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns this rank's part of an optimizer's state.

        Raises:
            ValueError: there is a `CheckpointIO` of the user, which would get rank 0's part only.
        """
        if not self.hands_out_shards:
            raise ValueError(
                f"strategy {self!r} can't save through a CheckpointIO of your own: rank 0 has the optimizer state of"
                " its own stages only. Leave it out, and `save_checkpoint` writes what all ranks have."
            )
        return optimizer.state_dict()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns all weights on rank 0, in host memory; all ranks call it."""
        assert self.lightning_module is not None
        owners = {name: ranks[0] for name, ranks in self._holders.items()}
        self._find_writers()
        owners |= self._partitioned.owners(self._buffer_owners, self.layout.pp)  # type: ignore[union-attr]
        state = self._partitioned.state_dict(self._stage_ranks, self.layout.pp)  # type: ignore[union-attr]
        return gather_state(state, owners, self._group, sends=self.data_rank == 0, device=self.root_device)


# --- the state of the module, gathered from the stages


def buffer_stages(module: nn.Module, plan: StagePlan) -> dict[str, int]:
    """Maps the name of each buffer to the stage whose values are saved: all stages have the buffer."""
    stages = {}
    for name, submodule in module.named_modules(remove_duplicate=False):
        # Metrics are updated on the last stage.
        stage = plan.num_stages - 1 if isinstance(submodule, Metric) else plan.modules[submodule][0]
        for key, _ in submodule.named_buffers(recurse=False):
            stages[f"{name}.{key}" if name else key] = stage
    return stages


def gather_state(
    state: dict[str, Any], owners: dict[str, int], group: Any, *, sends: bool, device: torch.device
) -> dict[str, Any]:
    """Gathers the tensors of all stages, whole and in host memory, on the first rank of a pipeline; all ranks call it.

    Args:
        state: a state dict of the module, as this rank has it.
        owners: for each name the rank of the pipeline that has the values; missing names belong to the first rank.
        group: the ranks of this pipeline.
        sends: whether this pipeline gathers its tensors: one of several pipelines does.
        device: the device on which tensors are sent.
    """
    rank, whole = dist.get_rank(group), {}
    for name, value in state.items():
        tensor = value.full_tensor() if isinstance(value, DTensor) else value  # a collective of all ranks
        owner = owners.get(name, 0)
        if sends and owner > 0 and rank == owner:
            dist.send(tensor.contiguous(), dist.get_global_rank(group, 0), group=group)
        if sends and owner > 0 and rank == 0:
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.recv(tensor, dist.get_global_rank(group, owner), group=group)
        if sends and rank == 0:
            whole[name] = tensor.cpu() if isinstance(tensor, Tensor) else tensor
    return whole
