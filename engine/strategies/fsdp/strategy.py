"""`fsdp` and `hsdp`: parameters, gradients and optimizer state cut into shards, one per process.

FSDP2 (https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html), applied for the user: the repeated
blocks of the module are the units that are gathered together. Under `hsdp` the shards of each replica group are
averaged over the groups as well (a 2-D mesh), so that only that all-reduce crosses slow links. A compression applies to
that all-reduce only, not to the communication within a group; under `fsdp` it applies to the reduce-scatter.

Communication per micro-batch and unit, S shards of P parameters: 1. forward: all-gather, 4 P (S-1)/S bytes, half of
that for what autocast rounds (`rounded_gather.py`); 2. backward: the same again, unless `reshard_after_forward=false`;
3. reduce-scatter of the gradients, 4 P (S-1)/S, and for hsdp an all-reduce of the 4 P/S bytes of a shard. Phase 3
happens once per accumulation window.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard
from torch.fx import GraphModule

from ...compression import AllReduceHook, CommHook, CountingGroup
from ...compression.int8 import Int8
from ...distributed.buckets import equalise, tell_device, unsharded_tensors
from ...flags import Layout
from ...initialization import check_shapes, materialize, read_stored
from ...precision.plugins import autocast_dtype
from ..averages import split_as_module
from ..layout import STATE_IS_LOST, MeshStrategy, check_dense_gradients, never_flatten, share_random_state
from ..options import FSDPOptions, HSDPOptions
from ..replaced_parameters import Replacements
from ..units import CompiledBlock, named_blocks, untied
from .comm import (
    CompressedReduceScatter,
    CountedAllGather,
    CountedReduceScatter,
    KeptWhole,
    ReplicaAverage,
    attach_to_gathered,
    fsdp_units,
    kept_whole,
    refuse_fused,
)
from .rounded_gather import check_uses, gather_rounded
from .shard_checks import check_loss, check_pruning, check_tensor_parallel, explained
from .unit_order import watch_units
from .unit_plan import Unit, plan_units
from .unit_steps import ByHand, UnitSteps, called_parts, hand_over_arguments, optimizes_by_hand
from .written_parameters import forget_data, give_back_numbers, keep_data, keep_writes, read_whole_numbers

__all__ = ["FSDP"]

_SMALL_UNITS_MB = 0.25
"""Units that have no more together are made equal by one exchange, which takes as long as the bytes of a larger one."""


class FSDP(UnitSteps):
    """`fully_shard` on a mesh with the axes `replicate` (hsdp only) and `shard`, for any `LightningModule`.

    Args:
        options: `FSDPOptions` shard over all processes, `HSDPOptions` over groups of them.
        launcher: suffix of the flag, see `flags.LAUNCHERS`.
        comm_hook: how gradients are sent: between the groups of `hsdp`, or in the reduce-scatter of `fsdp`.

    Raises:
        ValueError: the compression would keep the unsent residual of a whole model on each rank.
    """

    capabilities = dataclasses.replace(
        MeshStrategy.capabilities,
        state_is_sharded=True,
        can_offload=frozenset({"activations", "parameters"}),
        evaluates_in_inference_mode=False,  # FSDP2 reuses the tensors of its first gather
        has_between_passes=True,
    )
    returns_to_snapshot = STATE_IS_LOST

    def __init__(self, options: FSDPOptions, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        # Whole checkpoints, gathered on rank 0: every strategy opens them.
        super().__init__(save_distributed_checkpoint=False, timeout=timedelta(seconds=options.timeout_s))
        self.options = options
        self.launcher_suffix = launcher
        self.comm_hook = comm_hook
        self._second_backward: _SecondBackward | None = None
        self._counted: AllReduceHook | None = None
        self._wires: list[CountingGroup] = []
        self._replica_averages: list[ReplicaAverage] = []
        self._kept_whole: KeptWhole | None = None
        self._compiled: dict[nn.Module, CompiledBlock] = {}
        if isinstance(comm_hook, Int8) and comm_hook.feedback and not self._compresses_replicas:
            raise ValueError(
                "strategy 'fsdp' can't do int8:feedback=true: each rank would have to keep the unsent residual of"
                " the whole unsharded model. Leave it out, since int8 rounds without bias, or choose hsdp."
            )

    def __repr__(self) -> str:
        name = super().__repr__()
        return name.replace("fsdp", "hsdp") if isinstance(self.options, HSDPOptions) else name

    @property
    def active_hook(self) -> CommHook | None:
        """The comm hook; the hook of the plain average over replicas if bytes are counted."""
        return self.comm_hook or self._counted

    @property
    def _compresses_replicas(self) -> bool:
        return self.active_hook is not None and isinstance(self.options, HSDPOptions)

    @property
    def wires(self) -> list[CountingGroup]:
        """The groups that count bytes: the comm hook's, and those of FSDP2's collectives if they are counted."""
        return [*super().wires, *self._wires]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the state of an optimizer for a checkpoint."""
        return optimizer.state_dict() if self.hands_out_shards else super().optimizer_state(optimizer)

    def derive_layout(self, world_size: int) -> Layout:
        """Returns the layout: all processes on the axis `shard`; under hsdp, the sizes of the options."""
        if not isinstance(self.options, HSDPOptions):
            return Layout.derive(world_size, rest="shard")
        replicate, shard = self.options.replicate, self.options.shard
        if replicate is None and shard is None:
            replicate = self.num_nodes
        if replicate is None:
            return Layout.derive(world_size, rest="replicate", shard=shard)
        return Layout.derive(world_size, rest="shard", replicate=replicate, shard=shard)

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """See `MeshStrategy`."""
        return ("replicate", "shard") if isinstance(self.options, HSDPOptions) else ("shard",)

    # Lightning: ModelParallelStrategy._get_process_group_backend
    def _get_process_group_backend(self) -> str:
        backend, device = super()._get_process_group_backend(), self.root_device.type
        # Norms of offloaded gradients are summed over ranks on the CPU, where they are.
        return f"cpu:gloo,{device}:{backend}" if self._offloads and ":" not in backend else backend

    def check_module(self, module: nn.Module) -> None:
        """See `DistributedStrategy`."""
        keeps_gathered = isinstance(self.options, FSDPOptions) and not self.options.reshard_after_forward
        if keeps_gathered and optimizes_by_hand(module):
            raise ValueError(
                f"{type(module).__name__} optimizes by hand: its weights change within a step, so gathered weights"
                " can't be kept. Leave out reshard_after_forward=false."
            )
        if isinstance(self.options, FSDPOptions) and self.options.units == "module" and optimizes_by_hand(module):
            raise ValueError(
                f"{type(module).__name__} optimizes by hand: its weights change within a step, so each part is gathered"
                " when it is called. Leave out units=module, or choose strategy='ddp'."
            )

    def check_run(self, *, compiles: bool, callbacks: Sequence[Callback]) -> None:
        """See `DistributedStrategy`."""
        super().check_run(compiles=compiles, callbacks=callbacks)
        check_pruning(callbacks, repr(self))

    @property
    def _shards(self) -> bool:
        """Whether parameters are sharded over ranks with different samples."""
        return True

    def _shard_mesh(self) -> Any:
        """The mesh over which units are sharded; a comm hook averages over the replicas instead of FSDP2."""
        return self.device_mesh["shard"] if self._compresses_replicas else self.device_mesh

    def _is_laid_out(self, model: nn.Module) -> bool:
        """Whether an earlier `fit` has sharded the module."""
        return isinstance(model, FSDPModule)

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Context of `configure_model()`: with `meta_init` it allocates nothing; with `rank0_init`, only on rank 0."""
        with super().tensor_init_context(self.options.meta_init or self._receives_weights):
            yield

    @property
    def _receives_weights(self) -> bool:
        """Whether this rank gets its weights from rank 0."""
        return self.options.rank0_init and self.global_rank != 0

    def setup(self, trainer: Trainer) -> None:
        """Shards the module, unless an earlier `fit` has, and creates the optimizers on the shards."""
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            check_pruning(trainer.callbacks, repr(self))  # type: ignore[attr-defined]  # the module's own, too
        if not self._is_laid_out(self.model):
            self._lay_out(self.model, fitting=fitting)
        else:
            self.model = self.precision_plugin.convert_module(self.model)
        tell_device(self.model, self.root_device)  # Lightning moves logged metrics to the CPU after a run
        self.barrier()
        if fitting:
            split_as_module(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if isinstance(self.model, FSDPModule):
            self._set_up_units(self.model, trainer, fitting=fitting)
        read_whole_numbers(self._order)
        keep_data(self._order, repr(self))
        self._call_hooks_on_whole(trainer)

    def _lay_out(self, model: nn.Module, *, fitting: bool) -> None:
        """Shards the module, after all that has to see it whole."""
        self.note_module(model)
        check_shapes(model)
        if fitting:
            if self.before_split is not None:
                self.before_split(model)
            if self.counts_traffic and self.comm_hook is None and isinstance(self.options, HSDPOptions):
                self._counted = AllReduceHook()  # FSDP2's own all-reduce can't be replaced, only disabled
            if self._layer_sync is not None:
                model = self._layer_sync.apply(model)
        self.model = self.precision_plugin.convert_module(model)
        self._shard(self.model)

    def _set_up_units(self, model: nn.Module, trainer: Trainer, *, fitting: bool) -> None:
        """Replaces what FSDP2's units do around their collectives: what they gather, send, check and count."""
        by_hand = optimizes_by_hand(model)
        # A manual step with several optimizer steps continues to use the casts that autocast made before them, as in
        # one process: their memory must not be filled with later weights.
        is_rounded = self.layout.num_sharing == 1 and not by_hand
        gather_rounded(model, autocast_dtype(self.precision_plugin) if is_rounded else None, self._compiled)
        attach_to_gathered(model)
        if fitting:
            self._hook_units()
            if self._by_hand is not None:
                self._by_hand.end()
            self._by_hand = ByHand(model, self.optimizers) if by_hand else None
        meets_others = self.world_size > 1
        self._order = watch_units(model, repr(self), trainer, self.options.timeout_s) if meets_others else None
        keep_writes(model, repr(self), self._order, self.data_group, watches_data=self.compile is None)
        if fitting:
            self._second_backward = _SecondBackward(model)  # around the units' own reductions, as they check and count
            whole = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
            refuse_fused(self.optimizers, whole, repr(self))
            self._kept_whole = KeptWhole(whole, CountingGroup(self.data_group), self._order)
            self._wires += [self._kept_whole.wire] if self.counts_traffic and whole else []

    def teardown(self) -> None:
        """Restores torch's settings."""
        if self._kept_whole is not None:
            self._kept_whole.end()
        give_back_numbers()
        forget_data()
        super().teardown()

    def check_graph(self, graph: GraphModule) -> None:
        """See `EngineStrategy`."""
        if isinstance(self.model, FSDPModule):
            check_uses(graph, self.model)

    @property
    def place_in_units(self) -> dict[str, Any] | None:
        """The last collective of this rank, for its report: see `UnitOrder.place`."""
        return None if self._order is None else self._order.place

    @property
    def needs_same_training(self) -> bool:  # type: ignore[override]
        """See `EngineStrategy`; of units, `UnitOrder` compares them."""
        return not self._shards

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """See `Strategy`."""
        if self._by_hand is not None:
            check_loss(closure_loss, repr(self))
            self._by_hand.begin_backward(closure_loss)
        with explained(self.model, repr(self)):
            loss = super().backward(closure_loss, *args, **kwargs)
        if self._second_backward is not None:
            self._second_backward.release()
        if self._order is not None and self._by_hand is None:  # the step is over
            self._order.begin(None)
        return loss

    def _shard(self, model: nn.Module) -> None:
        """Creates, moves, equalises and shards `model` unit by unit.

        Only one whole unit is in a device's memory at a time, or several small ones.
        """
        by_hand = optimizes_by_hand(model)
        plan = self._planned(model, by_hand=by_hand)
        units, recomputed = {model, *(unit.module for unit in plan)}, set(named_blocks(model))
        blocks = {unit.module for unit in plan if unit.is_block}
        kept = set() if by_hand else {model, *(unit.module for unit in plan if unit.is_kept)}
        self.compiles_units = self.compile is not None and bool(plan)
        if by_hand:
            units |= set(untied(model, called_parts(model)))
        if self._shards:
            check_dense_gradients(model, repr(self))
            names = list(kept_whole(model, units))
            check_tensor_parallel(names, self.layout.num_sharing, repr(self))
            # By module and name, since parameters on the meta device will be replaced by other objects.
            self._whole.clear()
            for path, _, name in (name.rpartition(".") for name in names):
                self._whole.setdefault(id(model.get_submodule(path)), []).append(name)

        replacements = Replacements(model, repr(self))
        # A module with tensors on the meta device, perhaps on some ranks only, draws them part by part.
        has_meta = any(tensor.is_meta for tensor in unsharded_tensors([model]))
        is_whole = not self.reduce_boolean_decision(has_meta, all=False)
        due = [module for module in _children_first(model) if module in units]
        equal = set[nn.Module]()

        def shard(submodule: nn.Module) -> None:
            if submodule in units:
                if submodule not in equal:
                    together = _small_units(due, due.index(submodule)) if is_whole else [submodule]
                    equalise(together, self.root_device)
                    equal.update(together)
                for parameter in submodule.parameters():
                    if not isinstance(parameter, DTensor) and not parameter.is_contiguous():
                        parameter.data = parameter.data.contiguous()  # FSDP2 takes no view such as `weight.t()`
                with replacements.within(submodule):
                    self._split(submodule)
            if submodule in recomputed and self.recompute is not None:
                self.recompute(submodule)
            if submodule in blocks and self.compile is not None:
                self._compiled[submodule] = CompiledBlock(submodule, self.compile)
            if submodule in units:
                with replacements.within(submodule):
                    self._fully_shard(submodule, is_kept=submodule in kept)
                read_stored(submodule, "cpu" if self._shards and self._offloads else self.root_device)

        if self._shards:
            never_flatten(model)
        hooks_before = {*model._forward_pre_hooks, *model._forward_hooks}
        materialize(model, on_complete=shard, draws=not self._receives_weights, replace=replacements.replace)
        replacements.update_references()
        if self.options.rank0_init:
            share_random_state()  # the random state of a run in one process, which has drawn the weights
        if self._shards and self.options.extra_overlap:
            _overlap_more(model, [unit.module for unit in plan], self._timeout or default_pg_timeout)
        self._wrap_steps(model, hooks_before)

    def _planned(self, model: nn.Module, *, by_hand: bool) -> list[Unit]:
        """Returns the units of `model`. With manual optimization, or tensor parallelism, large layers are no units."""
        if self._shards and self.options.units == "module":
            return []
        takes_layers = self._shards and self.options.units == "layers" and self.layout.num_sharing == 1 and not by_hand
        return plan_units(model, takes_layers=takes_layers)

    def _split(self, submodule: nn.Module) -> None:
        """Splits layers of `submodule` over ranks that share their samples; here there are no such ranks."""

    def _fully_shard(self, submodule: nn.Module, is_kept: bool) -> None:
        assert self.model is not None
        fully_shard(
            submodule,
            mesh=self._shard_mesh(),
            # The unit that backward needs first would be gathered again at once, so freeing it would gain nothing.
            reshard_after_forward=self.options.reshard_after_forward and not is_kept,
            shard_placement_fn=self._placement,
            offload_policy=CPUOffloadPolicy() if self._offloads else OffloadPolicy(),
            ignored_params={
                part.get_parameter(name) for part in submodule.modules() for name in self._whole.get(id(part), ())
            },
        )
        hand_over_arguments(submodule, is_freed=submodule is not self.model)

    @property
    def _offloads(self) -> bool:
        """Whether shards are kept in host memory and copied to the device; on the CPU they are there already."""
        return self.offloads_parameters and self.root_device.type != "cpu"

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """Returns the dim along which a parameter is sharded; None: the first."""
        return None

    @property
    def _keeps_whole_gradients(self) -> bool:
        """Whether inner micro-batches keep whole gradients and send nothing: the option `no_sync`, or its default."""
        if self.options.no_sync is not None:
            return bool(self.options.no_sync)
        is_within_a_node = self.layout.shard * self.layout.num_sharing <= self.num_processes
        rounds = self.comm_hook is not None and not self._compresses_replicas  # else it would round in each micro-batch
        return self.root_device.type == "cpu" or not is_within_a_node or rounds

    def _hook_units(self) -> None:
        """Replaces the collectives of each unit by those that compress or count."""
        hook, model = self.active_hook, self.model
        assert model is not None
        mesh = self.device_mesh
        self._replica_averages = []
        self._wires = []
        if hook is None and not self.counts_traffic:
            return
        shards = CountingGroup(mesh["shard"].get_group())
        if hook is not None:
            over = mesh["replicate" if self._compresses_replicas else "shard"].get_group()
            hook.begin(model, hook.over(over), self.loss_scaler)
        if self.counts_traffic:
            self._wires.append(shards)
        for index, (unit, members) in enumerate(fsdp_units(model, shards.size)):
            if hook is not None and self._compresses_replicas and members:
                self._replica_averages.append(ReplicaAverage(hook, index, members))
                unit.set_all_reduce_hook(self._replica_averages[-1])
            if hook is not None and not self._compresses_replicas:
                unit.set_custom_reduce_scatter(CompressedReduceScatter(hook, index, members))
            elif self.counts_traffic:
                unit.set_custom_reduce_scatter(CountedReduceScatter(shards, index))
            if self.counts_traffic:
                unit.set_custom_all_gather(CountedAllGather(shards, index))

    def finish_micro_batch(self, step: Callable[[Callable[..., Any]], Tensor], synchronises: bool) -> None:
        """Runs the module on the smallest batch, for the remaining collectives of each unit."""
        assert isinstance(self.model, FSDPModule)
        self._mute_what_was_sent()
        self.model.reset_iter_state()
        if self._order is not None:
            self._order.repeat()
        self.backward(step(self.training_step), None)

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context of an inner micro-batch: gradients are not averaged."""
        if self.synchronises_always:
            yield
            return
        model = self.model
        assert isinstance(model, FSDPModule)
        # Gradients that are kept whole are not sent; those sharded at once skip only hsdp's all-reduce between groups.
        switch = model.set_requires_gradient_sync if self._keeps_whole_gradients else model.set_requires_all_reduce
        switch(False)
        self._synchronises = False
        averages = [*self._replica_averages, *([] if self._kept_whole is None else [self._kept_whole])]
        for average in averages:
            average.is_held = True
        try:
            yield
        finally:
            switch(True)
            self._synchronises = True
            for average in averages:
                average.is_held = False


# --- more overlap
# `extra_overlap=true`: for networks on which a unit takes longer to send than to compute.
#
# By default FSDP2 gathers the next unit early only if the host is ahead of the device, and its gathers and reductions
# share one connection.


# The gradients of one unit are sent while those of the next are computed.
_NUM_BUFFERS = 2


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _small_units(due: Sequence[nn.Module], first: int) -> list[nn.Module]:
    """Returns the module at a place among these, and those after it that are small with it together."""
    together: list[nn.Module] = []
    num_bytes = 0
    for module in map(due.__getitem__, range(first, len(due))):
        num_bytes += sum(tensor.nbytes for tensor in unsharded_tensors([module]))
        if together and num_bytes > _SMALL_UNITS_MB * 2**20:
            break
        together.append(module)
    return together


def _overlap_more(model: nn.Module, units: Sequence[nn.Module], timeout: timedelta) -> None:
    """Makes each unit gather the next one before it computes, and reductions use connections of their own.

    Args:
        model: sharded by `fully_shard`, as its units are; all ranks call it.
        units: in the order in which they run, without the rest of the model.
        timeout: timeout of collectives over these connections.
    """
    assert isinstance(model, FSDPModule)
    parts: list[Any] = [model, *units]
    for part, following in itertools.pairwise(parts):
        part.set_modules_to_forward_prefetch([following])
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(_NUM_BUFFERS)
    for part in parts:
        # torch: FSDPState._fsdp_param_groups, FSDPMeshInfo.reduce_scatter_process_group, which has a timeout of its own
        for group in part._get_fsdp_state()._fsdp_param_groups:
            group.mesh_info.reduce_scatter_process_group.set_timeout(timeout)


# Gradients of gradients under FSDP2, which frees gathered parameters after the first backward.
#
# FSDP2 reduces a unit's gradients when backward reaches the unit's inputs. In a second backward these inputs may have
# no gradient at all. Then autograd reaches them at once, on the host's thread, while an accelerator's thread still
# computes the unit's gradients. Gradients that are ready later would be lost, or mixed with those of the next step. So
# all reductions of such a step wait for the end of its backward.


class _SecondBackward:
    """Keeps units gathered from a backward with ``create_graph=True`` until the backward through its graph ends.

    Args:
        model: with units sharded by `fully_shard`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept: list[FSDPModule] = []
        self._is_over = False
        """Whether a backward has computed all gradients."""
        for unit in model.modules():
            if not isinstance(unit, FSDPModule):
                continue
            # torch: FSDPState._pre_backward is called when the gradient of an output of the unit is known, and
            # _root_post_backward_final_callback at the end of a backward. An earlier run may have replaced them.
            state: Any = unit._get_fsdp_state()
            if unit is not model:  # the root is gathered for the whole step
                pre_backward = functools.partial(type(state)._pre_backward, state)
                state._pre_backward = functools.partial(self._before, unit, pre_backward)
            end = functools.partial(type(state)._root_post_backward_final_callback, state)
            state._root_post_backward_final_callback = functools.partial(self._end, end)
            for group in state._fsdp_param_groups:  # torch: FSDPState._fsdp_param_groups, FSDPParamGroup.post_backward
                group.post_backward = _Deferred(self, group.post_backward)

    def _before(self, unit: FSDPModule, pre_backward: Callable[[Tensor], Tensor], gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled() and unit not in self._kept:  # autograd: enabled while a graph is created
            self._kept.append(unit)
            unit.set_reshard_after_backward(False, recurse=False)
        return pre_backward(gradient)

    def _end(self, end: Callable[[], None]) -> None:
        self._is_over = True
        try:
            end()  # reduces the gradients that were deferred
        finally:
            self._is_over = False

    @property
    def is_early(self) -> bool:
        """Whether backward may still have to compute some gradients of a unit."""
        return bool(self._kept) and not self._is_over

    def release(self) -> None:
        """Frees the units; called after the last backward of a step."""
        for unit in self._kept:
            unit.set_reshard_after_backward(True, recurse=False)
            unit.reshard()
        self._kept.clear()


class _Deferred:
    """The reduction of a unit's gradients; a call does nothing while `_SecondBackward.is_early`."""

    def __init__(self, owner: _SecondBackward, reduction: Any) -> None:
        self._owner = owner
        self.reduction: Callable[..., None] = getattr(reduction, "reduction", reduction)  # an earlier run's, unwrapped

    def __call__(self, *unused: Any) -> None:
        if not self._owner.is_early:
            self.reduction(*unused)
