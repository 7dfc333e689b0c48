"""`ps`: an asynchronous parameter server.

Each rank trains a full copy of the module; the first N ranks (all of them, unless `servers` says fewer) also serve a
share of its parameters each, by threads beside the training one. A step pushes gradients to the servers, where the
optimizer is, and gets parameters from them; no rank waits for another but by the staleness bound. With
``staleness=0`` that is synchronous training, equal to `ddp`'s. See `server.py` for what is applied when, and by whom
it was thought out; `worker.py` for what is sent; `rpc.py` for how, and to whom.

Per optimizer step and rank: the gradients of what other ranks serve, and their parameters back: 2 P (N-1)/N times 4
bytes in fp32. Metrics and other plain values go over meetings (`meeting.py`), which a rank that was lost does not
keep waiting. The end of a rank that serves nothing does not end the run.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

# Lightning: by which it gives all ranks the same module where there is no DistributedDataParallel.
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torchmetrics import Metric

from ...compression import CommHook
from ...environment import listening_on
from ...flags import Layout
from ..failure import say
from ..launch import end_group_at_exit
from ..layout import LayoutStrategy
from ..options import PSOptions
from .meeting import LivingRanks, Meetings, hold_meetings
from .rpc import Connection, interface_of
from .server import Server, install
from .worker import Clipping, Worker

__all__ = ["PS"]


class PS(LayoutStrategy, DDPStrategy):
    """A parameter server on the ranks that train."""

    data_ranks: LivingRanks
    saving_ranks: LivingRanks
    why_not_counted = "pushes and pulls by remote calls"
    why_no_join = "where a rank takes part in a step by its forward pass"

    def __init__(self, options: PSOptions, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        super().__init__(timeout=timedelta(seconds=options.timeout_s))
        self.options = options
        self.launcher_suffix = launcher
        self._interface = None if options.address is None else interface_of(options.address)
        self.data_ranks = LivingRanks("main")
        self.saving_ranks = LivingRanks("saver")
        self._connection: Connection | None = None
        self._meetings: Meetings | None = None
        self._worker: Worker | None = None
        self._server: Server | None = None
        self._has_begun = self._is_training = False
        self._clipping: Clipping | None = None
        self._logged: dict[int, int] = {}

    # --- processes

    def derive_layout(self, world_size: int) -> Layout:
        """A full copy per process."""
        servers = self.options.servers
        if servers is not None and servers > world_size:
            raise ValueError(f"ps:servers={servers} is more than the {world_size} process(es) there are to serve.")
        if self.num_nodes > 1 and self._interface is None:
            raise ValueError(
                f"ps listens on the loopback interface only, which {self.num_nodes} nodes can't meet on: name the"
                " network that is theirs alone, e.g. 'ps:address=10.0.0.0/24', or the interface, 'ps:address=eth0'."
            )
        if self.options.staleness > 0 and self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True has each forward wait for all ranks, which ps:staleness > 0 is to avoid: leave one"
                " of the two out."
            )
        return Layout.derive(world_size, rest="replicate")

    @property
    def _num_servers(self) -> int:
        return self.options.servers or self.layout.world_size

    def setup_environment(self) -> None:
        """Starts the process group, and the connections of the parameter server beside it."""
        if self.lost_ranks:
            raise RuntimeError(
                f"rank(s) {sorted(self.lost_ranks)} were lost, so these processes can't run once more: start them"
                " all anew."
            )
        with listening_on(self._interface):
            self.meet()
            super().setup_environment()
            end_group_at_exit()
            if self.is_global_zero:
                self._meetings = hold_meetings(self.world_size)
            self._connection = Connection(self.options.timeout_s)
        self.data_ranks.connect(self._connection)
        self.saving_ranks.connect(self._connection)

    def configure_ddp(self) -> None:  # Lightning: DDPStrategy.setup calls it where the module is to be trained
        """Gives all ranks rank 0's values; there is no wrapper."""
        assert self.model is not None
        _sync_module_states(self.model)

    def setup(self, trainer: Trainer) -> None:
        """Makes the module ready to run."""
        super().setup(trainer)
        self._connect_metrics()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers.

        Raises:
            ValueError: one that evaluates the loss by itself.
        """
        super().setup_optimizers(trainer)
        if any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers):
            raise ValueError("LBFGS evaluates the loss within its step, which `ps` does at a server: choose 'ddp'.")
        if self.options.staleness == 0:
            # A worker has its own gradients only; the servers clip their mean.
            self.precision_plugin.clipper = self._clip_at_servers  # type: ignore[attr-defined]

    def _clip_at_servers(self, by: str, most: float) -> None:
        self._clipping = Clipping(by, most)

    def teardown(self) -> None:
        """Waits until nobody needs this rank any more."""
        self._is_training = False
        connection, self._worker = self._connection, None
        install(None)
        if connection is not None and not connection.is_ended:
            connection.close()
        super().teardown()

    # --- training

    def on_train_start(self) -> None:
        """Hands parameters and optimizer state, restored from a checkpoint or not, over to the servers."""
        super().on_train_start()
        assert self._connection is not None
        self._worker = Worker(self._connection, self.optimizers, self._num_servers, self.options.patience)
        self._server = self._worker.serve(self.options.staleness)
        install(self._server)
        if self._server is not None:
            self._server.lose(sorted(self._connection.lost))  # by now
        self._logged = {}
        for optimizer in self.optimizers:
            optimizer.state.clear()
        self._has_begun = self._is_training = True
        self.barrier()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward here, the step at the servers."""
        assert self._worker is not None
        plugin: Any = self.precision_plugin
        # Lightning: what Precision.optimizer_step would have the optimizer call.
        output = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        norm = self._worker.step(optimizer, self._clipping)
        if norm is not None:
            plugin.grad_norm = norm
        self._clipping = None
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch: by which a scheduler knows of a step
        self._log_staleness()
        return output

    def settle(self) -> None:
        """Gives all ranks the same parameters and buffers; all call it after the same step."""
        if not self._is_training or self._connection is None or not self._connection.is_open:
            return
        assert self._worker is not None
        if self.options.staleness > 0:
            self.barrier()  # all have pushed
            self._worker.refresh()
            self.barrier()  # none pushes before all have got theirs
        assert self.lightning_module is not None
        buffers = list(self.lightning_module.buffers())
        if buffers:
            values = self.broadcast([buffer.cpu() for buffer in buffers])
            for buffer, value in zip(buffers, values, strict=True):
                buffer.copy_(value)

    @contextmanager
    def as_one(self) -> Generator[None, None, None]:
        """See `LayoutStrategy`."""
        self.settle()
        yield

    def on_validation_start(self) -> None:
        """All ranks evaluate the same module."""
        self.settle()

    def on_train_end(self) -> None:
        """Takes the optimizers' state back to rank 0; from now on parameters are those of this process."""
        super().on_train_end()
        for optimizer in self.optimizers:
            optimizer.load_state_dict(self.optimizer_state(optimizer))
        self._is_training = False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state, on rank 0, which saves it; all ranks call it."""
        own = super().optimizer_state(optimizer)
        if self._worker is None:
            return own
        states = self._worker.state_of(optimizer) if self.is_global_zero else {}
        self.barrier()  # none goes on before it is read
        return {**own, "state": states}

    @property
    def staleness(self) -> dict[int, int]:
        """Number of times a worker got parameters, by the steps the slowest was behind it; of rank 0's server."""
        return {} if self._server is None else self._server.staleness()

    @property
    def held_bytes(self) -> int:
        """The bytes of parameters and optimizer state that this rank's server holds."""
        return 0 if self._server is None else self._server.held_bytes

    def _log_staleness(self) -> None:
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        every = trainer.log_every_n_steps
        if not trainer.is_global_zero or not every or (trainer.global_step + 1) % every or not trainer.loggers:
            return
        seen = self.staleness
        new = {behind: number - self._logged.get(behind, 0) for behind, number in seen.items()}
        self._logged = seen
        values = torch.tensor([behind for behind, number in new.items() for _ in range(number)], dtype=torch.float)
        if len(values) == 0:
            return
        found = {"ps/staleness_mean": values.mean().item(), "ps/staleness_max": values.max().item()}
        trainer._logger_connector.log_metrics(found)
        for logger in trainer.loggers:
            add_histogram = getattr(logger.experiment, "add_histogram", None)  # TensorBoard's
            if add_histogram is not None:
                add_histogram("ps/staleness", values, trainer.global_step)

    # --- ranks that were lost

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Those without which the run goes on."""
        return frozenset() if self._connection is None else self._connection.lost

    def can_lose(self, rank: int) -> bool:
        """Whether the run can go on without a rank: if it serves nothing."""
        return rank >= self._num_servers

    @property
    def keeps_step(self) -> bool:  # type: ignore[override]
        """See `LayoutStrategy`."""
        return self.options.staleness == 0 and not any(map(self.can_lose, range(self.layout.world_size)))

    @property
    def may_leave(self) -> bool:
        """Whether the others go on if this rank fails now."""
        return self._worker is not None and self.can_lose(self.global_rank)

    def go_on_without(self, ranks: list[int]) -> bool:
        """Called by the thread that has seen that these ranks' processes have ended."""
        if not self._has_begun or self._connection is None or not all(map(self.can_lose, ranks)):
            return False  # until training begins all ranks are needed
        self._connection.lost |= set(ranks)
        if self._server is not None:
            self._server.lose(ranks)
        if self.is_global_zero:
            say(0, self._loss_of(ranks))
            assert self._meetings is not None
            self._meetings.lose(ranks)
        return True

    def _loss_of(self, ranks: list[int]) -> str:
        assert self._connection is not None
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        done, of = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.fit_loop.max_batches
        part = len(ranks) / self.world_size
        this = f"{part * (of - done) / of:.0%} of this epoch's samples, and " if isinstance(of, int) and of > 0 else ""
        return (
            f"rank(s) {', '.join(map(str, ranks))} have ended; the other {len(self._connection.living)} go on. Nobody"
            f" trains on what is theirs: {this}{part:.0%} of those of each later epoch, until the run is resumed with"
            " as many processes as are left."
        )

    # --- what collectives do elsewhere

    def _connect_metrics(self) -> None:
        """Has torchmetrics' objects meet as everything else does."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric) and module.dist_sync_fn is None:
                module.dist_sync_fn = self._of_all

    def _of_all(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [each.to(tensor.device) for each in self.data_ranks.gathered(tensor.cpu())]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all living ranks."""
        self.data_ranks.gathered(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns what rank `src` has, which can't be a rank that may be lost."""
        everyones = self.data_ranks.gathered(obj if self.global_rank == src else None)
        if len(everyones) == 1:
            return obj
        assert self._connection is not None
        return everyones[self._connection.living.index(src)]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Over all living ranks, unless another group is named."""
        if not _is_everyone(group) or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        everyones = torch.stack(self.data_ranks.gathered(tensor.detach().cpu()))
        return _REDUCTIONS[str(reduce_op).lower().rpartition(".")[2]](everyones).to(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all, or any, of the living ranks say so."""
        everyones = self.data_ranks.flags(decision)
        return False not in everyones if all else True in everyones

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers the tensors of all living ranks, stacked; gradients don't flow back."""
        if not _is_everyone(group):
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            raise ValueError("`all_gather(..., sync_grads=True)` would have ranks wait in backward: not under `ps`.")
        return torch.stack(self.data_ranks.gathered(tensor.detach().cpu())).to(tensor.device)

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """The sum over the ranks; of ranks that don't wait for each other, as if all had as much as this one."""
        mine = make()
        total = mine * self.data_size if self.options.staleness > 0 else self.reduce(mine, reduce_op="sum")
        return lambda: total


def _is_everyone(group: Any) -> bool:
    # Lightning: a module's all_gather names the default group.
    return group is None or group is dist.group.WORLD


_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda stacked: stacked.float().mean(0),
    "avg": lambda stacked: stacked.float().mean(0),
    "sum": lambda stacked: stacked.sum(0),
    "max": lambda stacked: stacked.amax(0),
    "min": lambda stacked: stacked.amin(0),
    "product": lambda stacked: stacked.prod(0),
}
