"""Base of all multi-process strategies: a layout, who has which samples, and what else the engine asks them."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

# torch: the gathering with a backward that its functions for users are about to be replaced by.
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.constants import default_pg_timeout

from ..checkpoint import get_random_state, of_host, set_random_state
from ..devices import module_of
from ..environment import is_started_again, listen_on_loopback, listen_towards, place_on_one_machine
from ..flags import Layout
from ..host_group import EVERYONE, HostGroup
from .launch import make_launcher
from .meeting import connect, name_of_start, open_store, wait_for_all
from .side_sum import SideSum

__all__ = ["LayoutStrategy", "share_random_state"]


def share_random_state() -> None:
    """Has all ranks draw the numbers that rank 0 is to draw, but for those of accelerators."""
    here = get_random_state()
    set_random_state({**here, **EVERYONE.told(of_host(here))})


class LayoutStrategy:
    """Mixin of a Lightning `ParallelStrategy` that has a `Layout` and is started by the launcher of its flag's suffix.

    The layout is derived when Lightning has told the strategy its devices, that is in the engine's constructor: sizes
    that don't fit are an error before any process starts.
    """

    layout: Layout
    launcher_suffix: str = ""
    data_group: Any = None
    """Process group of the ranks that have samples of their own, as this one sees them; None: all ranks have."""
    data_ranks: HostGroup = EVERYONE
    """The same ranks, for plain values."""
    _side_sum: SideSum | None = None
    random_state_at_launch: dict[str, Any] | None = None
    """The random state of the process that started this one as a worker."""
    schedules_itself = False
    """Whether `run_schedule` runs forward and backward of a batch, after the gradients are zeroed."""
    state_is_spread = False
    """Whether a rank's module or optimizers lack tensors that another rank has: see `keeps_state_of`."""
    state_is_sharded = False
    """Whether ranks hold parts of tensors, or of the module; what is not gathered is saved as a directory."""
    gathers_state = True
    """Whether rank 0 can be handed all of it."""
    evaluates_in_inference_mode = True
    """Whether a forward under `torch.inference_mode` leaves nothing behind that training would write to."""
    averages_gradients = True
    """Whether a step's gradients are the mean over all ranks; else each rank steps by its own."""
    keeps_step = True
    """Whether ranks wait for each other every few steps anyhow, and none of them may be lost."""
    steps_alone = False
    """Whether that is so in a part of the run at most: then a global batch is no single step's."""

    def __repr__(self) -> str:  # as a flag, in Lightning's messages
        suffix = f"_{self.launcher_suffix}" if self.launcher_suffix else ""
        return repr(f"{type(self).__name__.lower()}{suffix}")

    @property
    def data_size(self) -> int:
        """Number of ranks that have samples of their own: those that differ in `pp` or `tp` only share theirs."""
        return self.layout.replicate * self.layout.shard

    @property
    def data_rank(self) -> int:
        """This rank's place among them."""
        return self.global_rank // self.layout.tp % self.data_size  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The arguments by which a distributed sampler deals out samples."""
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    def check_module(self, module: torch.nn.Module) -> None:
        """Called before any process starts; raises ValueError if `module` can't be run in this way."""

    def check_run(self, *, compiles: bool, callbacks: Sequence[Callback]) -> None:
        """The same of how it is trained, compiled or not, and with which callbacks."""

    def check_loader(self, dataloader: Any) -> None:
        """The same of what it is trained on; called again with each loader of the module's or a data module's."""

    def saved_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns what this rank saves of a state dict of the module: what another one saves is on the meta device."""
        return state

    @property
    def held_bytes(self) -> int:
        """The bytes that it holds of the model, beside the module and its optimizers."""
        return 0

    def keeps_state_of(self, parameter: Tensor) -> bool:
        """Whether this rank's optimizers have the state of a parameter, or are to have it from a checkpoint."""
        return True

    def as_one(self) -> AbstractContextManager[None]:
        """Around a save, on all ranks: has the module be what the run would end with, where ranks have others now."""
        return nullcontext()

    def shared_state(self) -> dict[str, Any]:
        """Returns the state that the strategy resumes from beside weights and optimizers, the same on all ranks."""
        return {}

    def state_of_rank(self) -> dict[str, Any]:
        """Returns the state that only this rank resumes from; called within `as_one`."""
        return {}

    def load_state(self, shared: dict[str, Any], of_rank: dict[str, Any]) -> None:
        """Goes on with a checkpoint's `shared_state` and `state_of_rank`, after all else was restored.

        Args:
            shared: what the strategy that saved it shared, which may be of another kind.
            of_rank: empty if another layout did, too.
        """

    saving_ranks: HostGroup | None = None
    """The ranks that agree on a checkpoint of which rank 0 has all; None: a gloo group in which each has its part."""

    def settle(self) -> None:
        """Gives all ranks the same weights, where they may differ between steps; all call it after the same step."""

    def end_evaluation(self) -> None:
        """Called after the last batch of an evaluation, before the hooks at its end."""

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Begins to add up what the ranks have that have samples of their own; call what is returned for the sum.

        Args:
            make: returns what this rank has, a tensor that nobody else uses.
            needs_device: whether that is computed from what an accelerator is still computing.
        """
        device: torch.device = self.root_device  # type: ignore[attr-defined]
        if not hasattr(module_of(device), "Stream"):
            mine = make()
            work = dist.all_reduce(mine, group=self.data_group, async_op=True)

            def end() -> Tensor:
                work.wait()
                return mine

            return end
        if self._side_sum is None:
            self._side_sum = SideSum(self.data_group, device, self._timeout)  # type: ignore[attr-defined]
        return self._side_sum.begin(make, needs_device=needs_device)

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Ranks whose processes have ended, and without which the run goes on."""
        return frozenset()

    def can_lose(self, rank: int) -> bool:
        """Whether the run can go on without a rank."""
        return False

    @property
    def may_leave(self) -> bool:
        """Whether the others go on if this rank fails now."""
        return False

    def go_on_without(self, ranks: list[int]) -> bool:
        """Goes on without ranks whose processes have ended, if it can; called by the watchdog's thread."""
        return False

    def start_data_group(self) -> None:
        """Connects the ranks that have samples of their own; called on all ranks, when they are connected."""
        if self.data_size == self.layout.world_size:
            return
        per_stage, num_tp = self.data_size * self.layout.tp, self.layout.tp
        places = [
            list(range(stage * per_stage + tp, (stage + 1) * per_stage, num_tp))
            for stage in range(self.layout.pp)
            for tp in range(num_tp)
        ]
        timeout = self._timeout  # type: ignore[attr-defined]  # Lightning: its strategies of several processes have it
        self.data_group, _ = dist.new_subgroups_by_enumeration(places, timeout=timeout)
        hosts = self.data_group
        if dist.get_backend(hosts) != "gloo":
            hosts, _ = dist.new_subgroups_by_enumeration(places, timeout=timeout, backend="gloo")
        self.data_ranks = HostGroup(hosts)

    def hand_out_data_group(self, module: torch.nn.Module) -> None:
        """Has torchmetrics objects and synchronised batch norms of `module` count each sample once."""
        for part in module.modules():
            if self.data_group is not None and getattr(part, "process_group", self) is None:
                part.process_group = self.data_group

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces what the ranks have that have samples of their own, unless another group is named."""
        return super().reduce(tensor, self.data_group if group is None else group, reduce_op)  # type: ignore[misc]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over the ranks that have samples of their own, unless another group is named; [ranks, ...]."""
        if group is None or group is dist.group.WORLD:  # Lightning: a module's all_gather names the latter
            group = self.data_group
        if tensor.is_meta:  # of another pipeline stage
            return torch.empty((dist.get_world_size(group), *tensor.shape), dtype=tensor.dtype, device="meta")
        if group is not None and group is self.data_group and sync_grads:
            # What Lightning calls names ranks of the group in backward as if they were those of the job.
            return all_gather_single_autograd(tensor.contiguous().unsqueeze(0), 0, group)
        with warnings.catch_warnings():  # Lightning 2.6 calls what torch 2.13 deprecates; nothing a user could change
            warnings.filterwarnings("ignore", r"torch.distributed.nn.functional.all_gather is deprecated")
            gathered: Tensor = super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]
        return gathered

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks decide so, or any, those that share samples included."""
        votes = sum(EVERYONE.flags(decision))
        return votes == EVERYONE.size if all else votes > 0

    # Lightning: DDPStrategy.setup_distributed and ModelParallelStrategy._setup_distributed, which seed each rank anew.
    def setup_distributed(self) -> None:
        """Ends what `meet` began."""
        self._with_rank_0s_numbers(super().setup_distributed)  # type: ignore[misc]

    def _setup_distributed(self) -> None:
        self._with_rank_0s_numbers(super()._setup_distributed)  # type: ignore[misc]

    def _with_rank_0s_numbers(self, connect: Callable[[], None]) -> None:
        """Rank 0 draws the random numbers of a run in one process, and the others begin where it does."""
        state = self.random_state_at_launch or get_random_state()
        connect()
        if self.global_rank == 0:  # type: ignore[attr-defined]
            set_random_state(state)
        share_random_state()

    def meet(self) -> None:
        """Connects the ranks: opens the job's store, and starts the process group in it."""
        strategy: Any = self
        if strategy.num_nodes == 1:  # this holds for groups that are made later as well
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
        if rank == 0:  # the one that can say who is missing
            wait_for_all(job, timeout)
        dist.init_process_group(
            strategy._get_process_group_backend(),  # Lightning: DDPStrategy and ModelParallelStrategy have it
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=strategy.root_device if strategy.root_device.type != "cpu" else None,
        )

    def _job_store(self, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
        strategy: Any = self
        environment = strategy.cluster_environment
        address, port = environment.main_address, environment.main_port
        if is_started_again():
            store = dist.TCPStore(address, port, is_master=False, timeout=timeout)
            return dist.PrefixStore(name_of_start(store, rank, world_size, timeout), store)
        place = place_on_one_machine(environment) if strategy.num_nodes == 1 else None
        return open_store(place or address, port, rank, timeout, is_local=place is not None)

    def derive_layout(self, world_size: int) -> Layout:
        """The layout of `world_size` processes.

        Raises:
            ValueError: the flag's sizes don't multiply to `world_size`.
        """
        raise NotImplementedError

    def _configure_launcher(self) -> None:  # Lightning: Strategy._configure_launcher, called by its constructor
        num_processes, num_nodes = self.num_processes, self.num_nodes  # type: ignore[attr-defined]
        self.layout = self.derive_layout(num_processes * num_nodes)
        environment = self.cluster_environment  # type: ignore[attr-defined]
        self._launcher: Any = make_launcher(self, self.launcher_suffix, environment, num_processes, num_nodes)
