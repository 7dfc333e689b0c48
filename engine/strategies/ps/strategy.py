"""`ps`: an asynchronous parameter server.

Each rank trains a full copy of the module. The first N ranks (all of them, unless `servers` says fewer) also serve a
share of its parameters each, in threads beside the training thread. A step pushes gradients to the servers, which have
the optimizer, and pulls parameters from them; a rank waits for others only where the staleness bound says so. With
``staleness=0`` this is synchronous training, equal to `ddp`. `server.py` describes when gradients are applied, and the
papers behind it; `_Worker` the messages; `rpc.py` the transport.

Communication per optimizer step and rank: the gradients of the parameters that other ranks serve, and these parameters
back: 2 P (N-1)/N times 4 bytes in fp32 for P parameters. Metrics and other plain values are gathered by remote calls
(`object_gather.py`), which do not wait for a rank that was lost. The end of a rank that serves nothing does not end the
run.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from ...compression import CommHook
from ...contract import Capabilities
from ...distributed.environment import bind_interface
from ...distributed.fillers import is_here, rows_of_samples
from ...flags import Layout
from ...initialization import check_shapes
from ...launch.process_launchers import end_group_at_exit
from ...reliability.failure import print_rank
from ..averages import values_of_averages
from ..layout import DistributedStrategy
from ..optimizer_trial import habits_of
from ..options import PSOptions
from ..parameter_hooks import ParameterHooks
from ..step_guard import flag_of_rank
from .object_gather import PendingGathers, SurvivingRanks, open_gathers
from .rpc import Connection, interface_of
from .server import (
    Packing,
    Server,
    Shard,
    exchange,
    install_server,
    partition,
    pull,
    push,
    refresh,
    release_early,
    settings_of,
    state,
)

__all__ = ["PS"]


class PS(DistributedStrategy, DDPStrategy):
    """A parameter server on the ranks that train."""

    data_ranks: SurvivingRanks
    saving_ranks: SurvivingRanks
    connects_devices = False

    def __init__(self, options: PSOptions, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        super().__init__(timeout=timedelta(seconds=options.timeout_s))
        self.options = options
        self.launcher_suffix = launcher
        self._interface = None if options.address is None else interface_of(options.address)
        self.data_ranks = SurvivingRanks("main")
        self.saving_ranks = SurvivingRanks("saver")
        self._connection: Connection | None = None
        self._pending_gathers: PendingGathers | None = None
        self._worker: _Worker | None = None
        self._server: Server | None = None
        self._has_begun = self._is_training = False
        self._clipping: _Clipping | None = None
        self._logged: dict[int, int] = {}

    # --- processes

    def derive_layout(self, world_size: int) -> Layout:
        """Returns a layout with a full copy of the module on each rank."""
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
        with bind_interface(self._interface):
            self._connect_ranks()
            super().setup_environment()
            end_group_at_exit()
            if self.is_global_zero:
                self._pending_gathers = open_gathers(self.world_size)
            self._connection = Connection(self.options.timeout_s)
        self.data_ranks.connect(self._connection)
        self.saving_ranks.connect(self._connection)

    def _get_process_group_backend(self) -> str:  # Lightning: DDPStrategy._get_process_group_backend
        # All collectives run on the host. The device's backend is named, not connected, for a strategy that runs in
        # this process later.
        backend, device = super()._get_process_group_backend(), self.root_device.type
        return backend if device == "cpu" or ":" in backend else f"cpu:gloo,{device}:{backend}"

    def configure_ddp(self) -> None:  # Lightning: DDPStrategy.setup calls it where the module is to be trained
        """Broadcasts rank 0's parameters and buffers through host memory; the module is not wrapped."""
        assert self.model is not None
        ignored = getattr(self.model, "_ddp_params_and_buffers_to_ignore", ())  # DistributedDataParallel's
        tensors = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        with torch.no_grad():
            for name, tensor in tensors.items():
                if name not in ignored:
                    value = tensor.detach().cpu()
                    dist.broadcast(value, 0)
                    tensor.copy_(value)

    def setup(self, trainer: Trainer) -> None:
        """Sets the module up, and makes its torchmetrics objects gather over the surviving ranks."""
        check_shapes(trainer.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING and self.before_split is not None:
            self.before_split(self.model)
        super().setup(trainer)
        self._connect_metrics()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers.

        Raises:
            ValueError: one of them needs all parameters at once, or its state where the module is.
        """
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            if reason := habits_of(optimizer).of_others_or_state:
                raise ValueError(
                    f"{reason}, but under 'ps' each server has some of the parameters, and their state: choose another"
                    " optimizer, or another strategy, such as 'ddp' or 'fsdp'."
                )
        if self.options.staleness == 0:
            # A worker has its own gradients only; the servers clip their mean.
            self.precision_plugin.clipper = self._clip_at_servers  # type: ignore[attr-defined]
            if (scaler := getattr(self.precision_plugin, "scaler", None)) is not None:
                scaler.agree = self._largest_of_ranks

    def _largest_of_ranks(self, value: Tensor) -> Tensor:
        return torch.tensor(float(any(self.data_ranks.all_gather_bools(bool(value)))), device=value.device)

    def agree(self, flag: Tensor) -> Tensor:
        """See `EngineStrategy`: with staleness, each rank pushes by itself, and leaves out its own gradients."""
        if self.options.staleness > 0:
            return flag_of_rank(flag, self)
        return torch.tensor(max(self.data_ranks.all_gather_object(flag.item())), device=flag.device)

    def _clip_at_servers(self, algorithm: str, limit: float) -> None:
        before, self._clipping = self._clipping, _Clipping(algorithm, limit)
        is_several = len(self.optimizers) > 1 and self.lightning_module.automatic_optimization  # type: ignore[union-attr]
        if is_several and (algorithm == "norm" or before not in (None, self._clipping)):
            raise ValueError(
                "the servers of 'ps' clip the gradients of one optimizer after the other, so those of several that step"
                " together can't be clipped by one norm: leave gradient_clip_val out, set"
                " gradient_clip_algorithm='value', or choose another strategy, such as 'ddp' or 'fsdp'."
            )

    def teardown(self) -> None:
        """Closes the connection, when no other rank needs this one any more."""
        self._is_training = False
        connection, self._worker = self._connection, None
        install_server(None)
        if connection is not None and not connection.is_ended:
            connection.close()
        super().teardown()

    # --- training

    def _make_parameter_hooks(self) -> ParameterHooks | None:
        # With staleness, each rank's gradients are pushed by themselves, and hooks get those.
        module: Any = self.lightning_module
        return ParameterHooks(module, self, self._averaged) if self.options.staleness == 0 else None

    def _averaged(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """Returns the means of gradients over the ranks; pushing the mean on each rank changes no mean at a server."""
        of_ranks = self.data_ranks.all_gather_object([None if g is None else g.cpu() for g in gradients])
        means: list[Tensor | None] = []
        for own, parts in zip(gradients, zip(*of_ranks, strict=True), strict=True):
            used = [part for part in parts if part is not None]
            mean = torch.stack(used).sum(0) / len(parts) if used else None
            means.append(mean if own is None or mean is None else mean.to(own.device))
        return means

    def on_train_start(self) -> None:
        """Copies parameters and optimizer state, which may be those of a checkpoint, to the servers."""
        super().on_train_start()
        assert self._connection is not None
        self._worker = _Worker(self._connection, self.optimizers, self._num_servers, self.options.patience)
        self._server = self._worker.make_server(self.options.staleness)
        install_server(self._server)
        if self._server is not None:
            self._server.lose(sorted(self._connection.lost))  # ranks that were lost before it was made
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
        """Runs forward and backward on this rank; the servers do the step."""
        assert self._worker is not None
        plugin: Any = self.precision_plugin
        model = model or self.lightning_module
        output = closure()
        has_gradients = output is not None or not model.automatic_optimization
        scaler: Any = getattr(plugin, "scaler", None) if has_gradients else None
        for member in plugin.together or () if scaler is not None else ():
            scaler.unscale_(member)  # before the hooks of all
        overflowed = scaler is not None and scaler.has_overflowed(optimizer)
        plugin._after_closure(model, optimizer)  # Lightning: as the closure that is given to an optimizer does
        if overflowed or (self.step_guard is not None and self.step_guard.leaves_out(optimizer)):
            optimizer.zero_grad()  # a push without gradients counts as a step, and changes nothing
        norm = self._worker.step(optimizer, self._clipping)
        if scaler is not None:
            scaler.update()
        if norm is not None:
            plugin.grad_norm = norm
        if not model.automatic_optimization or optimizer is self.optimizers[-1]:
            self._clipping = None
        optimizer._opt_called = True  # type: ignore[attr-defined]  # torch: schedulers check it for a step
        self._log_staleness()
        return output

    def sync_weights(self) -> None:
        """Gives all ranks the same parameters and buffers; all call it after the same step."""
        if not self._is_training or self._connection is None or not self._connection.is_open:
            return
        assert self._worker is not None
        if self.options.staleness > 0:
            self.barrier()  # all ranks have pushed
            self._worker.refresh()
            self.barrier()  # no rank pushes before all have the parameters
        assert self.lightning_module is not None
        own = list(self.lightning_module.buffers())
        if self.options.staleness > 0:  # averages are of the weights that each rank has pulled
            own += values_of_averages(self.lightning_module.trainer)
        if own:
            values = self.broadcast([tensor.detach().cpu() for tensor in own])
            for tensor, value in zip(own, values, strict=True):
                tensor.detach().copy_(value)

    @contextmanager
    def consolidated_weights(self) -> Generator[None, None, None]:
        """See `DistributedStrategy`."""
        self.sync_weights()
        yield

    def on_validation_start(self) -> None:
        """Gives all ranks the same weights, so that they evaluate one module."""
        self.sync_weights()

    def on_train_end(self) -> None:
        """Brings the optimizers' state back to rank 0; from now on the parameters are those of this process."""
        super().on_train_end()
        for optimizer in self.optimizers:
            optimizer.load_state_dict(self.optimizer_state(optimizer))
        self._is_training = False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Returns an optimizer's state on rank 0, which saves it; all ranks call it."""
        state = super().optimizer_state(optimizer)
        if self._worker is None:
            return state
        states = self._worker.states_of(optimizer) if self.is_global_zero else {}
        self.barrier()  # no rank trains before it is read
        return {**state, "state": states}

    @property
    def staleness(self) -> dict[int, int]:
        """Maps a staleness, in steps, to the number of pulls at this rank's server that had it."""
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
        counts = self.staleness
        new = {staleness: count - self._logged.get(staleness, 0) for staleness, count in counts.items()}
        self._logged = counts
        values = torch.tensor([staleness for staleness, count in new.items() for _ in range(count)], dtype=torch.float)
        if len(values) == 0:
            return
        metrics = {"ps/staleness_mean": values.mean().item(), "ps/staleness_max": values.max().item()}
        trainer._logger_connector.log_metrics(metrics)
        for logger in trainer.loggers:
            add_histogram = getattr(logger.experiment, "add_histogram", None)  # TensorBoard's
            if add_histogram is not None:
                add_histogram("ps/staleness", values, trainer.global_step)

    # --- ranks that were lost

    @property
    def lost_ranks(self) -> frozenset[int]:
        """Ranks whose processes have ended, and without which the run continues."""
        return frozenset() if self._connection is None else self._connection.lost

    def can_lose(self, rank: int) -> bool:
        """Whether the run can continue without a rank: it can if the rank serves nothing."""
        return rank >= self._num_servers

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """See `EngineStrategy`; by the options, and the number of ranks."""
        return dataclasses.replace(
            DistributedStrategy.capabilities,
            can_offload=frozenset({"activations"}),
            keeps_step=self.options.staleness == 0 and not any(map(self.can_lose, range(self.layout.world_size))),
            unsupported_counting="pushes and pulls by remote calls",
            unsupported_repeat="PS",
            unsupported_rank_loss="goes on without a worker by itself, in its own way",
        )

    @property
    def expects_parity(self) -> bool:
        """See `EngineStrategy`."""
        return self.options.staleness == 0

    @property
    def can_exit_alone(self) -> bool:
        """Whether the other ranks continue if this one fails now."""
        return self._worker is not None and self.can_lose(self.global_rank)

    def go_on_without(self, ranks: list[int]) -> bool:
        """Continues without ranks whose processes have ended, if it can; called by the watchdog's thread."""
        if not self._has_begun or self._connection is None or not all(map(self.can_lose, ranks)):
            return False  # until training begins all ranks are needed
        self._connection.lost |= set(ranks)
        if self._server is not None:
            self._server.lose(ranks)
        if self.is_global_zero:
            print_rank(0, self._lost_data_text(ranks))
            assert self._pending_gathers is not None
            self._pending_gathers.lose(ranks)
        return True

    def _lost_data_text(self, ranks: list[int]) -> str:
        assert self._connection is not None
        trainer: Any = self.lightning_module.trainer  # type: ignore[union-attr]
        num_done, num_batches = trainer.fit_loop.epoch_loop.batch_progress.current.ready, trainer.fit_loop.max_batches
        share = len(ranks) / self.world_size
        this_epoch = ""
        if isinstance(num_batches, int) and num_batches > 0:
            this_epoch = f"{share * (num_batches - num_done) / num_batches:.0%} of this epoch's samples, and "
        num_surviving = len(self._connection.surviving)
        return (
            f"rank(s) {', '.join(map(str, ranks))} have ended; the other {num_surviving} go on. Nobody"
            f" trains on their samples: {this_epoch}{share:.0%} of those of each later epoch, until the run is resumed"
            " with as many processes as are left."
        )

    # --- collectives of the surviving ranks

    def _connect_metrics(self) -> None:
        """Makes the module's torchmetrics objects gather over the surviving ranks."""
        assert self.lightning_module is not None
        for module in self.lightning_module.modules():
            if isinstance(module, Metric) and module.dist_sync_fn is None:
                module.dist_sync_fn = self._gather_tensors

    def _gather_tensors(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return [gathered.to(tensor.device) for gathered in self.data_ranks.all_gather_object(tensor.cpu())]

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all surviving ranks."""
        self.data_ranks.all_gather_object(None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Returns the value of rank `src`, which can't be a rank that may be lost."""
        values = self.data_ranks.all_gather_object(obj if self.global_rank == src else None)
        if len(values) == 1:
            return obj
        assert self._connection is not None
        return values[self._connection.surviving.index(src)]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over all surviving ranks, unless another group is named."""
        if not _is_world(group) or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        stacked = torch.stack(self.data_ranks.all_gather_object(tensor.detach().cpu()))
        return _REDUCTIONS[str(reduce_op).lower().rpartition(".")[2]](stacked).to(tensor)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether the decision of all, or of any, of the surviving ranks is true."""
        votes = self.data_ranks.all_gather_bools(decision)
        return False not in votes if all else True in votes

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers the tensors of all surviving ranks, stacked: [ranks, ...]; gradients don't flow back."""
        if not _is_world(group):
            return super().all_gather(tensor, group, sync_grads)
        if sync_grads:
            raise ValueError("`all_gather(..., sync_grads=True)` would have ranks wait in backward: not under `ps`.")
        by_rank = self.data_ranks.all_gather_object((tensor.detach().cpu(), is_here()))
        gathered = torch.stack([value for value, _ in by_rank]).to(tensor.device)
        return rows_of_samples(gathered, [is_filler for _, is_filler in by_rank])

    def begin_sum(self, make: Callable[[], Tensor], *, needs_device: bool) -> Callable[[], Tensor]:
        """Sums over the ranks. With staleness > 0 no rank waits: the sum is this rank's value times their number."""
        summand = make()
        total = summand * self.data_size if self.options.staleness > 0 else self.reduce(summand, reduce_op="sum")
        return lambda: total


def _is_world(group: Any) -> bool:
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


# A worker of `ps`: pushes its gradients to the servers, and pulls parameters from them.
#
# Communication per step, where the servers of other ranks have Q bytes of the parameters:
# 1. push: the Q bytes of gradients, one message per server;
# 2. pull: the Q bytes of parameters, in the answer (blocks until the staleness bound lets this worker continue). The
#    server waits for the step that has this worker's gradient; when the worker's patience ends, it sends an empty
#    message that ends this wait.
# To clip by the norm of the mean gradient, 1 and 2 are separate messages, and 1 blocks until all workers have pushed.

_NEW_SHARE = 0.1
"""The weight of the newest time in the running mean of compute times."""


class _Clipping(NamedTuple):
    """How the mean gradient is clipped."""

    algorithm: str
    """``"norm"`` or ``"value"``."""
    limit: float
    """The largest norm, or the largest absolute value of an element."""


class _Share(NamedTuple):
    """The parameters of one optimizer that one server holds."""

    server: int
    """The rank of the server."""
    indices: list[int]
    """Indices of the parameters within the optimizer."""
    parameters: list[Tensor]
    packing: Packing


class _Worker:
    """Makes the servers do the steps of this rank's optimizers.

    Args:
        connection: to the other ranks.
        optimizers: optimizers of the module: their parameters, settings and state.
        num_servers: ranks 0 to ``num_servers - 1`` serve the parameters.
        patience: how long to wait for the step that has the pushed gradient, as a share of the time that the gradient
            took to compute; after that, older parameters are taken.
    """

    def __init__(
        self, connection: Connection, optimizers: list[Optimizer], num_servers: int, patience: float = 0.0
    ) -> None:
        self._connection = connection
        self._patience = patience
        self._num_pushes: Counter[int] = Counter()
        self._compute_s = 0.0
        self._began = time.monotonic()
        self._optimizers = optimizers
        self._parameters = [[p for group in o.param_groups for p in group["params"]] for o in optimizers]
        sizes = [[p.numel() * p.element_size() for p in parameters] for parameters in self._parameters]
        self._shares: list[list[_Share]] = [[] for _ in optimizers]
        for server, share in enumerate(partition(sizes, num_servers)):
            for optimizer_index, indices in enumerate(share):
                parameters = [self._parameters[optimizer_index][index] for index in indices]
                if parameters:
                    self._shares[optimizer_index].append(_Share(server, indices, parameters, Packing(parameters)))

    def make_server(self, staleness: int) -> Server | None:
        """Returns the server of this rank; None if this rank serves no parameters."""
        own_shares = [next((s for s in shares if s.server == self._connection.rank), None) for shares in self._shares]
        if not any(own_shares):
            return None
        shards = [
            None if share is None else Shard(optimizer, share.parameters)
            for share, optimizer in zip(own_shares, self._optimizers, strict=True)
        ]
        return Server(shards, self._connection.surviving, staleness)

    def step(self, optimizer: Optimizer, clipping: _Clipping | None) -> Tensor | None:
        """Pushes the gradients, and waits for the parameters of the next forward pass.

        Returns:
            The norm of the mean gradient before it was clipped; None unless it was clipped by its norm.

        Raises:
            RuntimeError: a server can't be reached, or the optimizer has other parameters than at the start.
        """
        self._note_time()
        optimizer_index = self._optimizers.index(optimizer)
        if sum(len(group["params"]) for group in optimizer.param_groups) != len(self._parameters[optimizer_index]):
            raise RuntimeError(
                "the optimizer has got other parameters while training, which under `ps` have no server: give it all of"
                " them at the start, those to be trained later with requires_grad=False."
            )
        connection, shares = self._connection, self._shares[optimizer_index]
        settings = settings_of(optimizer)
        by_norm = clipping is not None and clipping.algorithm == "norm"
        clip_value = clipping.limit if clipping is not None and not by_norm else None
        calls = {}
        for share in shares:  # phase 1
            present = [p.grad is not None for p in share.parameters]
            gradients = share.packing.pack([p.grad for p in share.parameters])
            function = push if by_norm else exchange
            arguments = (optimizer_index, connection.rank, gradients, present, settings, clip_value)
            self._num_pushes[share.server] += 1
            calls[share.server] = connection.call(share.server, function, *arguments)
        norm = None
        if by_norm:
            assert clipping is not None
            squares = connection.wait(calls, "for the norm of its share of the mean gradient")
            total_norm = sum(squares.values()) ** 0.5
            norm = torch.tensor(total_norm)
            # As torch.nn.utils.clip_grad_norm_ computes it.
            scale = min(1.0, clipping.limit / (total_norm + 1e-6))
            calls = {s.server: connection.call(s.server, pull, optimizer_index, connection.rank, scale) for s in shares}
        for server in connection.late_ranks(calls, self._patience * self._compute_s):
            connection.call(server, release_early, connection.rank, self._num_pushes[server])
        self._update_parameters(optimizer_index, connection.wait(calls, "for its share of the parameters"))  # phase 2
        self._began = time.monotonic()
        return norm

    def _note_time(self) -> None:
        took_s = time.monotonic() - self._began
        self._compute_s += (took_s - self._compute_s) * (_NEW_SHARE if self._compute_s else 1.0)

    def refresh(self) -> None:
        """Pulls the current parameters; all ranks call it when none pushes."""
        for index, shares in enumerate(self._shares):
            calls = {share.server: self._connection.call(share.server, refresh, index) for share in shares}
            self._update_parameters(index, self._connection.wait(calls, "for its share of the parameters"))

    def states_of(self, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """Gets an optimizer's state from the servers, by the index of the parameter."""
        optimizer_index = self._optimizers.index(optimizer)
        shares = self._shares[optimizer_index]
        calls = {share.server: self._connection.call(share.server, state, optimizer_index) for share in shares}
        answers = self._connection.wait(calls, "for its share of the optimizer's state")
        states = {i: values for s in shares for i, values in zip(s.indices, answers[s.server], strict=True) if values}
        return dict(sorted(states.items()))

    @torch.no_grad()
    def _update_parameters(self, optimizer_index: int, buffers: dict[int, list[Tensor]]) -> None:
        for share in self._shares[optimizer_index]:
            # One copy to the accelerator for each buffer, rather than one for each parameter.
            on_device = [buffer.to(share.parameters[0].device) for buffer in buffers[share.server]]
            torch._foreach_copy_(share.parameters, share.packing.unpack(on_device))
