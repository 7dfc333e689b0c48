"""The base of all multi-process strategies: their layout, the samples of each rank, and the process groups."""

import dataclasses
import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint as torchs
from torch.utils.hooks import RemovableHandle

from .._compat.torch import _NormBase
from ..checkpoint import get_random_state, host_state, set_random_state
from ..contract import Capabilities, EngineStrategy
from ..devices import module_of
from ..distributed.buckets import copy, flatten, in_buckets, unflatten
from ..distributed.connections import MEETING_AGAIN, cut_connections, noting_connections
from ..distributed.environment import (
    is_elastic,
    listen_on_loopback,
    listen_towards,
    place_on_one_machine,
    set_local_rank,
)
from ..distributed.fillers import leave_out_fillers
from ..distributed.object_group import WORLD, ObjectGroup
from ..flags import LAUNCHERS, Layout
from ..launch.process_launchers import ScriptLauncher, end_group_at_exit
from ..launch.worker_launcher import WorkerLauncher
from ..reliability.rendezvous import connect, name_of_start, open_store, reach, wait_for_all
from .compressing import CommHookMixin
from .hook_code import check_types
from .module_before import ModuleBefore
from .parameter_hooks import ParameterHooks
from .whole_steps import as_whole, whole_in_hooks

__all__ = [
    "STATE_IS_LOST",
    "DistributedStrategy",
    "MeshStrategy",
    "check_dense_gradients",
    "never_flatten",
    "own_buffers",
    "share_random_state",
    "updated_buffers",
]

STATE_IS_LOST = "no other rank has the state of a lost one"
"""Why strategies that divide a run's state return to a snapshot when a rank is lost."""

# Sums of a few numbers over the ranks, while an accelerator computes something else.
#
# An all-reduce on the computing stream would make it wait for the slowest rank, and for all earlier collectives of the
# group. These sums have a stream and a process group of their own.
#
# Communication: one all-reduce for each call, of the bytes of the tensor.


class _SideSum:
    """Sums over a group of ranks.

    Args:
        group: all of its ranks create this object at the same time; None for all ranks.
        device: an accelerator with streams.
        timeout: timeout of the process group of the sums.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, timeout: timedelta | None) -> None:
        self._device, self._module = device, module_of(device)
        self._stream = self._module.Stream(device=device)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        self._group = dist.new_group(ranks, timeout=timeout, use_local_synchronization=True)

    def begin(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Begins a sum.

        Args:
            make: returns this rank's summand, a tensor that nothing else uses.
            needs_device: whether the summand depends on work that the device has not finished.

        Returns:
            A function that returns the sum, to be called on the stream that uses it.
        """
        if needs_device:
            total = make()
            self._stream.wait_stream(self._current())
            total.record_stream(self._stream)
        with self._module.stream(self._stream):
            if not needs_device:
                total = make()
            dist.all_reduce(total, group=self._group)

        def end() -> Tensor:
            self._current().wait_stream(self._stream)
            total.record_stream(self._current())
            return total

        return end

    def _current(self) -> Any:
        return self._module.current_stream(self._device)


# Buffers that a module updates by the samples of its own rank: running means, codebooks, counts.
#
# Every rank has its own values then, and rank 0's are the ones that are evaluated and saved. `loop/own_state.py` finds
# them. The option `average_buffers` of `ddp`, `zero1` and `fsdp` averages those of floating-point numbers after each
# step of an optimizer: an all-reduce of 4 bytes per value in fp32, which blocks. A rank counts by its samples of the
# batch, so one that runs a filler counts for nothing.
#
# Statistics of torch's norms are left out: `sync_batchnorm=True` has them computed over all ranks.

_BUCKET_MB = 25.0
"""As DDP's buckets."""


def updated_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the floating-point buffers that a module may update by its rank's samples, by name."""
    return {name: buffer for name, buffer in own_buffers(module).items() if buffer.is_floating_point()}


def own_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a module that no norm layer of torch's updates, by name."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, part in module.named_modules()
        if not isinstance(part, _NormBase)
        for name, buffer in part.named_buffers(recurse=False)
        if not (buffer.is_meta or buffer.is_complex() or buffer.is_sparse or isinstance(buffer, DTensor))
    }


class _BufferAverage:
    """Averages buffers over the ranks after each step of an optimizer.

    Args:
        trainer: the trainer of the module.
        group: the process group of the ranks with different samples; None: all ranks.
    """

    def __init__(self, trainer: Trainer, group: Any) -> None:
        self._trainer: Any = trainer
        self._group = group
        # Of several optimizers that step together the last one ends the step.
        ends = trainer.optimizers[-1:] if trainer.lightning_module.automatic_optimization else trainer.optimizers
        self._handles: list[RemovableHandle] = [optimizer.register_step_post_hook(self._average) for optimizer in ends]

    def close(self) -> None:
        """Removes the hooks of the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _share(self) -> float:
        """Returns this rank's share of the samples of the current batch."""
        samples = self._trainer._data_connector.sizes.samples(self._trainer.fit_loop.epoch_loop.batch_idx)
        return float(samples.local / samples.total)

    @torch.no_grad()
    def _average(self, *_: Any) -> None:
        share = self._share()
        buffers = list(updated_buffers(self._trainer.lightning_module).values())
        for bucket in in_buckets(buffers, _BUCKET_MB) if buffers else ():
            flat = flatten(bucket)
            flat = flat.mul_(share) if share else torch.zeros_like(flat)  # a filler's values may be infinite
            dist.all_reduce(flat, group=self._group)
            copy(unflatten(flat, bucket), bucket)


def share_random_state() -> None:
    """Gives all ranks the random state of rank 0, except that of accelerators."""
    state = get_random_state()
    set_random_state({**state, **WORLD.broadcast_object(host_state())})


class _Gather(torch.autograd.Function):
    """An all-gather whose backward gives each rank the sum of the gradients of its rows.

    The function that Lightning calls uses a rank's index in the group as its index in the job, in backward; torch's
    functional collectives return a tensor of a class of their own, which a module may keep and save.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = tensor.new_empty((dist.get_world_size(group), *tensor.shape))
        dist.all_gather_single(gathered.view(-1), tensor.reshape(-1), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(gradient.shape[1:])
        dist.reduce_scatter_single(own.view(-1), gradient.reshape(-1), group=ctx.group)
        return own, None


class DistributedStrategy(EngineStrategy):
    """Mixin of a Lightning `ParallelStrategy` that has a `Layout` and is started by the launcher of its flag's suffix.

    The layout is derived when Lightning has set the strategy's devices, in the engine's constructor: sizes that don't
    fit are an error before any process starts.
    """

    capabilities = Capabilities(
        engine_checkpoints=True,
        replicas_stay_equal=True,
        unsupported_rank_loss=None,
    )
    launcher_suffix: str = ""
    data_group: Any = None
    """Process group of the ranks with different samples that includes this rank; None: all ranks."""
    _side_sum: _SideSum | None = None
    random_state_at_launch: dict[str, Any] | None = None
    """The random state of the process that started this worker."""
    _parameter_hooks: ParameterHooks | None = None
    connects_devices = True
    """Whether the ranks' devices communicate."""
    options: Any
    """The options of the flag."""

    def __repr__(self) -> str:  # the flag, for Lightning's messages
        suffix = f"_{self.launcher_suffix}" if self.launcher_suffix else ""
        return repr(f"{type(self).__name__.lower()}{suffix}")

    @property
    def data_size(self) -> int:
        """Number of ranks with different samples: ranks that differ only in `pp`, `tp` or `cp` share their samples."""
        return self.layout.replicate * self.layout.shard

    @property
    def data_rank(self) -> int:
        """The index of this rank's samples: see `EngineStrategy`."""
        return self.global_rank // self.layout.num_sharing % self.data_size  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments of a distributed sampler."""
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    def on_train_start(self) -> None:
        """Called when everything is restored, after the hooks of that name of callbacks and module."""
        super().on_train_start()  # type: ignore[misc]
        self._parameter_hooks = self._make_parameter_hooks()
        if self.averages_buffers and self.data_size > 1:
            self._buffer_average = _BufferAverage(self.lightning_module.trainer, self.data_group)  # type: ignore[attr-defined]

    def _make_parameter_hooks(self) -> ParameterHooks | None:
        """Has hooks of parameters get the gradients of one process; returns None for one process."""
        module: Any = self.lightning_module  # type: ignore[attr-defined]
        return ParameterHooks(module, self) if self.layout.world_size > 1 else None

    @property
    def synchronises_always(self) -> bool:
        """Whether gradients of inner micro-batches are averaged, too: see `ParameterHooks`."""
        return self._parameter_hooks is not None and self._parameter_hooks.synchronises_always

    def teardown(self) -> None:
        """Gives hooks of parameters back to torch, and restores its settings."""
        if self._parameter_hooks is not None:
            self._parameter_hooks.end()
            self._parameter_hooks = None
        if self._buffer_average is not None:
            self._buffer_average.close()
            self._buffer_average = None
        _allow_reentrant()
        super().teardown()  # type: ignore[misc]  # Lightning's strategy, which this is mixed into

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """See `EngineStrategy`."""
        device: torch.device = self.root_device
        if not hasattr(module_of(device), "Stream"):
            summand = make()
            work = dist.all_reduce(summand, group=self.data_group, async_op=True)

            def end() -> Tensor:
                work.wait()
                return summand

            return end
        if self._side_sum is None:
            self._side_sum = _SideSum(self.data_group, device, self._timeout)  # type: ignore[attr-defined]
        return self._side_sum.begin(make, needs_device=needs_device)

    _buffer_average: _BufferAverage | None = None
    _module_before: ModuleBefore | None = None

    @property
    def averages_buffers(self) -> bool:  # type: ignore[override]
        """See `EngineStrategy`."""
        return getattr(self.options, "average_buffers", False)

    @property
    def option_to_average_buffers(self) -> str | None:  # type: ignore[override]
        """See `EngineStrategy`."""
        return f"strategy={repr(self)[:-1]}:average_buffers=true'" if hasattr(self.options, "average_buffers") else None

    def start_data_group(self) -> None:
        """Creates the group of the ranks with different samples; called on all ranks, when they are connected."""
        if self.data_size == self.layout.world_size:
            return
        per_stage, num_sharing = self.data_size * self.layout.num_sharing, self.layout.num_sharing
        places = [
            list(range(stage * per_stage + place, (stage + 1) * per_stage, num_sharing))
            for stage in range(self.layout.pp)
            for place in range(num_sharing)
        ]
        timeout = self._timeout  # type: ignore[attr-defined]  # Lightning: its strategies of several processes have it
        self.data_group, _ = dist.new_subgroups_by_enumeration(places, timeout=timeout)
        hosts = self.data_group
        if dist.get_backend(hosts) != "gloo":
            hosts, _ = dist.new_subgroups_by_enumeration(places, timeout=timeout, backend="gloo")
        self.data_ranks = ObjectGroup(hosts)

    def hand_out_data_group(self, module: torch.nn.Module) -> None:
        """Makes torchmetrics objects and synchronised batch norms of `module` count each sample once."""
        for submodule in module.modules():
            if self.data_group is not None and getattr(submodule, "process_group", self) is None:
                submodule.process_group = self.data_group

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a value over the ranks with different samples, unless another group is passed."""
        self._check_repeatable("`self.log(..., sync_dist=True, on_step=True)`, or another reduction,")
        return super().reduce(tensor, self.data_group if group is None else group, reduce_op)  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over the ranks with different samples, unless another group is passed; returns [ranks, ...].

        In a batch that some rank has no sample of, it has the rows of the other ranks: see `fillers.py`.
        """
        self._check_repeatable("`self.all_gather`")
        if group is None or group is dist.group.WORLD:  # Lightning: a module's all_gather names the latter
            group = self.data_group
        if tensor.is_meta:  # of another pipeline stage
            return torch.empty((dist.get_world_size(group), *tensor.shape), dtype=tensor.dtype, device="meta")
        if group is not None and group is self.data_group and sync_grads:
            return leave_out_fillers(_Gather.apply(tensor, group), group)
        with warnings.catch_warnings():  # Lightning 2.6 calls a function that torch 2.13 deprecates
            warnings.filterwarnings("ignore", r"torch.distributed.nn.functional.all_gather is deprecated")
            gathered = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return leave_out_fillers(gathered, group)

    def _check_repeatable(self, collective: str) -> None:
        """Checks that a step that may run out of memory on one rank has no collective of the user's.

        Raises:
            ValueError: this is one: a rank without memory can't take part in it with values of the right shape.
        """
        module: Any = self.lightning_module  # type: ignore[attr-defined]
        # Lightning: the hook that runs.
        if self.may_repeat_steps and module is not None and module._current_fx_name == "training_step":
            raise ValueError(
                f"micro_batch_size='auto' can't repeat a `training_step` that has {collective} in it: a rank that runs"
                " out of memory takes part in the others' collectives with a batch of one sample. Give a number as"
                " micro_batch_size, or communicate after the step."
            )

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all ranks."""
        if WORLD.is_otherwise:
            WORLD.all_gather_object(None)
        else:
            super().barrier(*args, **kwargs)  # type: ignore[misc]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the value of one rank on every rank."""
        return WORLD.all_gather_object(obj)[src] if WORLD.is_otherwise else super().broadcast(obj, src)  # type: ignore[misc]

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Returns whether all ranks, or any rank, have True; ranks that share samples take part, too."""
        votes = sum(WORLD.all_gather_bools(decision))
        return votes == WORLD.size if all else votes > 0

    # Lightning: DDPStrategy.setup_distributed and ModelParallelStrategy._setup_distributed, which reseed each rank.
    def setup_distributed(self) -> None:
        """Completes the set-up that `_connect_ranks` began."""
        self._with_rank_0s_numbers(super().setup_distributed)  # type: ignore[misc]

    def _setup_distributed(self) -> None:
        self._with_rank_0s_numbers(super()._setup_distributed)  # type: ignore[misc]

    def _with_rank_0s_numbers(self, connect: Callable[[], None]) -> None:
        """Gives rank 0 the random state of a run in one process, and the other ranks rank 0's state."""
        state = self.random_state_at_launch or get_random_state()
        connect()
        if self.global_rank == 0:  # type: ignore[attr-defined]
            set_random_state(state)
        share_random_state()

    def _connect_ranks(self) -> None:
        """Connects the ranks: opens the job's store, and starts the process group, which uses this store."""
        _avoid_reentrant()
        strategy: Any = self
        if strategy.num_nodes == 1:  # this applies to groups that are created later as well
            listen_on_loopback()
        else:
            listen_towards(strategy.cluster_environment.main_address)
        if dist.is_initialized():
            return
        strategy.accelerator.setup_device(strategy.root_device)
        strategy.set_world_ranks()
        rank, world_size, timeout = strategy.global_rank, strategy.world_size, strategy._timeout or default_pg_timeout
        store = self._job_store(rank, world_size, timeout)
        job = connect(store, rank, world_size)
        if rank == 0:  # this error can say which ranks are missing
            wait_for_all(job, timeout)
        on_device = self.connects_devices and strategy.root_device.type != "cpu"
        with noting_connections():
            dist.init_process_group(
                strategy._get_process_group_backend(),  # Lightning: DDPStrategy and ModelParallelStrategy have it
                store=store,
                rank=rank,
                world_size=world_size,
                timeout=timeout,
                device_id=strategy.root_device if on_device else None,
            )

    def _job_store(self, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
        strategy: Any = self
        environment = strategy.cluster_environment
        address, port = environment.main_address, environment.main_port
        if is_elastic():
            store = reach(address, port, timeout)
            return dist.PrefixStore(name_of_start(store, rank, world_size, timeout), store)
        meeting_address = place_on_one_machine(environment) if strategy.num_nodes == 1 else None
        hosts = rank == 0 and not self.survives_losses  # then the launcher's process does
        return open_store(meeting_address or address, port, timeout, hosts=hosts, is_local=meeting_address is not None)

    def most_ranks(self, num_ranks: int) -> int:
        """See `EngineStrategy`."""
        for size in range(num_ranks, 0, -1):
            with suppress(ValueError):
                self.derive_layout(size)
                return size
        return 0

    def note_module(self, model: nn.Module) -> None:
        """Notes what `make_whole` restores; called before `setup` changes the module."""
        if self.survives_losses and self.returns_to_snapshot is not None:
            self._module_before = ModuleBefore(model, repr(self))

    def make_whole(self) -> None:
        """See `EngineStrategy`."""
        if self._module_before is not None:
            self._module_before.restore()
            self._module_before = None

    def leave_groups(self) -> None:
        """See `EngineStrategy`."""
        if dist.is_initialized():
            # torch: who drops the last reference ends the group, and waits for its threads; only Python's own way
            # of doing so releases Python's lock meanwhile, for which such a thread may wait.
            groups = list(dist.distributed_c10d._world.pg_map)
            cut_connections()
            if self.active_hook is not None:
                self.active_hook.leave_ranks()
            dist.destroy_process_group()
            del groups
            gc.collect()

    def regroup(self, devices: Sequence[Any], rank: int, store: dist.Store) -> None:
        """See `EngineStrategy`."""
        strategy: Any = self
        strategy.parallel_devices = list(devices)
        strategy.num_nodes = 1  # no node need have as many ranks as another
        self.layout = self.derive_layout(len(devices))
        set_local_rank(rank, len(devices))
        strategy.set_world_ranks()
        connect(store, rank, len(devices))
        with noting_connections():
            dist.init_process_group(
                strategy._get_process_group_backend(),  # Lightning: see `_connect_ranks`
                store=store,
                rank=rank,
                world_size=len(devices),
                timeout=MEETING_AGAIN,
            )
        dist.group.WORLD.set_timeout(strategy._timeout or default_pg_timeout)  # type: ignore[union-attr]

    def derive_layout(self, world_size: int) -> Layout:
        """Returns the layout of `world_size` processes.

        Raises:
            ValueError: the flag's sizes don't multiply to `world_size`.
        """
        raise NotImplementedError

    def _configure_launcher(self) -> None:  # Lightning: Strategy._configure_launcher, called by its constructor
        num_processes, num_nodes = self.num_processes, self.num_nodes  # type: ignore[attr-defined]
        self.layout = self.derive_layout(num_processes * num_nodes)
        environment, start_method = self.cluster_environment, LAUNCHERS[self.launcher_suffix]
        strategy: Any = self
        # Under torchrun or SLURM the processes exist already: they run the same script with the same suffix.
        if start_method == "popen" or environment.creates_processes_externally:
            self._launcher: Any = ScriptLauncher(strategy, environment, num_processes, num_nodes)
        elif start_method in mp.get_all_start_methods():
            self._launcher = WorkerLauncher(strategy, start_method=start_method)
        else:
            raise ValueError(
                f"strategy {self!r}: process forking is not supported on this platform; choose the suffix _spawn, or"
                " none."
            )


def check_dense_gradients(model: nn.Module, flag: str) -> None:
    """Checks that the gradients of all parameters are dense.

    Args:
        model: the module.
        flag: the strategy or compression that can't average sparse gradients, the subject of the message.

    Raises:
        ValueError: a parameter has sparse gradients.
    """
    for name, submodule in model.named_modules():
        for key, parameter in submodule.named_parameters(recurse=False):
            if parameter.requires_grad and getattr(submodule, "sparse", False) is True:
                raise ValueError(
                    f"{flag} can't average the sparse gradient of {f'{name}.{key}'.lstrip('.')}: build"
                    f" {type(submodule).__name__} with sparse=False."
                )


# `torch.utils.checkpoint.checkpoint(..., use_reentrant=True)` in the user's code, under several ranks.
#
# A re-entrant checkpoint runs a backward inside of the backward. With two checkpoints of one block in a step, DDP
# finds a parameter ready twice, and FSDP2 averages gradients before the second backward has added to them. While a
# strategy of several ranks runs, such a checkpoint is computed without re-entrant autograd: the same numbers, in one
# backward.

_Reentrant = torchs.CheckpointFunction


class _OneBackward:
    """Takes the place of torch's function, which `checkpoint` looks up at each call."""

    @staticmethod
    def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        """Runs `function`, and again in backward."""
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            return torchs.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        # Without an input that requires a gradient, a re-entrant checkpoint has none for its parameters either.
        return _Reentrant.apply(function, preserve_rng_state, *args)


def _avoid_reentrant() -> None:
    """Computes checkpoints without re-entrant autograd, until `_allow_reentrant`."""
    torchs.CheckpointFunction = _OneBackward  # type: ignore[assignment, misc]


def _allow_reentrant() -> None:
    """Restores torch's function."""
    torchs.CheckpointFunction = _Reentrant  # type: ignore[misc]


class MeshStrategy(DistributedStrategy, CommHookMixin, ModelParallelStrategy):
    """Ranks on a mesh with some of the layout's axes."""

    capabilities = dataclasses.replace(
        DistributedStrategy.capabilities, splits_module=True, unsupported_counting=None, unsupported_repeat=None
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._undo_hooks: Callable[[], None] | None = None

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the axes, outermost first, including those of size 1."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        """Starts the process groups, and creates the mesh from them."""
        # Lightning: the setup_environment of ModelParallelStrategy's base, without its own mesh.
        self.accelerator.setup_device(self.root_device)  # type: ignore[union-attr]
        self._connect_ranks()
        self._setup_distributed()
        end_group_at_exit()
        sizes = tuple(self.layout.axes[axis] for axis in self.mesh_axes)
        with noting_connections():
            self._device_mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=self.mesh_axes)
        for axis in self.mesh_axes:  # torch: some of a mesh's groups have another default, of 10 or 30 minutes
            self._device_mesh.get_group(axis).set_timeout(self._timeout or default_pg_timeout)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh  # Lightning: LightningModule.device_mesh reads it
        self.start_data_group()

    def leave_groups(self) -> None:
        """See `EngineStrategy`."""
        self._device_mesh = self.data_group = None
        self.data_ranks = WORLD
        if self.lightning_module is not None:
            self.lightning_module._device_mesh = None
        super().leave_groups()

    def _call_hooks_on_whole(self, trainer: Trainer) -> None:
        """Has hooks compute with split parameters as if these were whole, until `teardown`."""
        assert self.model is not None
        self._restore_hooks()
        if any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            check_types((trainer.lightning_module, *trainer.callbacks), repr(self))  # type: ignore[attr-defined]
            self._undo_hooks = whole_in_hooks(trainer)

    def _restore_hooks(self) -> None:
        if self._undo_hooks is not None:
            self._undo_hooks()
            self._undo_hooks = None

    _replicas: dist.ProcessGroup | None = None
    """The ranks that have the same plain parameters, and step them alike; None: the plain ones are the rank's own."""

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        """Steps as if parameters were whole; see `as_whole`."""
        mode, closure = as_whole(optimizer, closure, self._replicas)
        with mode:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Returns all weights on rank 0, in host memory, and nothing on the others; all ranks call it."""
        # torch: `get_model_state_dict` looks each key up as an attribute, but a module's hooks may have renamed it.
        assert self.model is not None
        state: dict[str, Any] = {}
        for name, value in self.model.state_dict().items():
            if isinstance(value, DTensor):
                on_device: Any = value.to(self.root_device)
                value = on_device.full_tensor()
            if self.global_rank == 0:
                state[name] = value.cpu() if isinstance(value, Tensor) else value
        return state

    def teardown(self) -> None:
        """Restores hooks and recurrent layers."""
        self._restore_hooks()
        if self.model is not None:
            _flatten_again(self.model)
        super().teardown()


def never_flatten(model: nn.Module) -> None:
    """Makes recurrent layers leave their weights in the memory into which they were gathered, until `_flatten_again`.

    On CUDA an `nn.LSTM` moves weights that it has not seen before into one piece of memory. FSDP2 would gather the next
    step's weights into the former memory, and the layer would continue with the old weights.
    """
    for layer in _recurrent(model):
        layer.flatten_parameters = _nothing  # type: ignore[method-assign]


def _flatten_again(model: nn.Module) -> None:
    """Ends `never_flatten`."""
    for layer in _recurrent(model):
        vars(layer).pop("flatten_parameters", None)


def _recurrent(model: nn.Module) -> list[nn.RNNBase]:
    return [part for part in model.modules() if isinstance(part, nn.RNNBase)]


def _nothing() -> None:
    pass
