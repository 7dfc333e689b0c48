"""The base of all multi-process strategies: their layout, the samples of each rank, and the process groups."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from ..checkpoint import get_random_state, host_state, set_random_state
from ..contract import Capabilities, EngineStrategy
from ..devices import module_of
from ..distributed.environment import is_elastic, listen_on_loopback, listen_towards, place_on_one_machine
from ..distributed.fillers import leave_out_fillers
from ..distributed.object_group import WORLD, ObjectGroup
from ..distributed.side_sum import SideSum
from ..flags import Layout
from ..launch.process_launchers import make_launcher
from ..reliability.rendezvous import connect, name_of_start, open_store, wait_for_all
from .parameter_hooks import ParameterHooks
from .rank_buffers import BufferAverage
from .reentrant import allow_reentrant, avoid_reentrant

__all__ = ["DistributedStrategy", "share_random_state"]


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

    capabilities = Capabilities(engine_checkpoints=True, replicas_stay_equal=True)
    launcher_suffix: str = ""
    data_group: Any = None
    """Process group of the ranks with different samples that includes this rank; None: all ranks."""
    _side_sum: SideSum | None = None
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
            self._buffer_average = BufferAverage(self.lightning_module.trainer, self.data_group)  # type: ignore[attr-defined]

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
        allow_reentrant()
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
            self._side_sum = SideSum(self.data_group, device, self._timeout)  # type: ignore[attr-defined]
        return self._side_sum.begin(make, needs_device=needs_device)

    _buffer_average: BufferAverage | None = None

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
        avoid_reentrant()
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
        dist.init_process_group(
            strategy._get_process_group_backend(),  # Lightning: DDPStrategy and ModelParallelStrategy have it
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=strategy.root_device if self.connects_devices and strategy.root_device.type != "cpu" else None,
        )

    def _job_store(self, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
        strategy: Any = self
        environment = strategy.cluster_environment
        address, port = environment.main_address, environment.main_port
        if is_elastic():
            store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
            return dist.PrefixStore(name_of_start(store, rank, world_size, timeout), store)
        meeting_address = place_on_one_machine(environment) if strategy.num_nodes == 1 else None
        return open_store(meeting_address or address, port, rank, timeout, is_local=meeting_address is not None)

    def derive_layout(self, world_size: int) -> Layout:
        """Returns the layout of `world_size` processes.

        Raises:
            ValueError: the flag's sizes don't multiply to `world_size`.
        """
        raise NotImplementedError

    def _configure_launcher(self) -> None:  # Lightning: Strategy._configure_launcher, called by its constructor
        num_processes, num_nodes = self.num_processes, self.num_nodes  # type: ignore[attr-defined]
        self.layout = self.derive_layout(num_processes * num_nodes)
        environment = self.cluster_environment
        self._launcher: Any = make_launcher(self, self.launcher_suffix, environment, num_processes, num_nodes)
