"""`ddp`: a full copy of the module in each process, gradients averaged while backward runs.

Follows https://docs.pytorch.org/docs/stable/notes/ddp.html. Per optimizer step: one all-reduce per bucket, 4 bytes a
parameter in fp32; none on the inner micro-batches of an accumulation window. Muon's matrices are dealt to the ranks,
see `whole_steps.py`. Differs from Lightning's strategy: comm
hooks run on every device (Lightning ignores them outside CUDA), gradients live in the buckets, and an unused parameter
is named at the first step.
"""

import dataclasses
import re
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from ..compression import AllReduceHook, CommHook
from ..flags import Layout
from ..initialization import check_shapes
from ..launch.process_launchers import end_group_at_exit
from .compressing import CommHookMixin
from .layout import DistributedStrategy, check_dense_gradients
from .options import DDPOptions
from .whole_steps import dealing_matrices

__all__ = ["DDP"]

_REQUIRES_GRAD = attrgetter("requires_grad")
_NOT_OF_DDP = ("timeout_s", "average_buffers")
"""The options that are no arguments of `DistributedDataParallel`."""
_TABLES_OF_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class DDP(DistributedStrategy, CommHookMixin, DDPStrategy):
    """`DistributedDataParallel` with better defaults of its options, and any comm hook on any device."""

    capabilities = dataclasses.replace(
        DistributedStrategy.capabilities,
        can_offload=frozenset({"activations"}),
        averages_whole_gradients=True,
        unsupported_counting=None,
        unsupported_repeat=None,
    )

    def __init__(self, options: DDPOptions, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        super().__init__(timeout=timedelta(seconds=options.timeout_s), **_ddp_arguments(options))
        self.options = options
        self.launcher_suffix = launcher
        self.comm_hook = comm_hook
        if options.static_graph:
            why_not = "ddp:static_graph=true"
            self.capabilities = dataclasses.replace(
                self.capabilities, unsupported_repeat=why_not, unsupported_rank_loss="has static_graph=true"
            )
        self._counted: AllReduceHook | None = None
        self._checks_unused = self._has_run_backward = self._backward_is_checked = False
        self._finds_unused = options.find_unused_parameters
        self._bucket_order: _BucketOrder | None = None
        self._order_to_begin_with: list[str] | None = None
        self._wrapper: DistributedDataParallel | None = None
        # Lightning: of all steps; `training_step` below calls it itself with automatic optimization.
        self._forward_redirection = _run_as_forward  # type: ignore[assignment]

    def derive_layout(self, world_size: int) -> Layout:
        """Returns the layout: one replica per process."""
        return Layout.derive(world_size, rest="replicate")

    def setup_environment(self) -> None:
        """Starts the process group."""
        self._connect_ranks()
        super().setup_environment()
        end_group_at_exit()

    def connect(self, model: LightningModule) -> None:
        """Called at the start of each run."""
        super().connect(model)
        self._finds_unused = self.options.find_unused_parameters

    def setup(self, trainer: Trainer) -> None:
        """Wraps the module, and creates the optimizers."""
        self.note_module(trainer.lightning_module)
        check_shapes(trainer.lightning_module)
        if trainer.state.fn == TrainerFn.FITTING and self.before_split is not None:
            self.before_split(self.model)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """Wraps the module again in each run, so that a run's first backward is the wrapper's first."""
        self._checks_unused = not (self._finds_unused or self.options.static_graph)
        self._has_run_backward = self._backward_is_checked = False
        assert self.lightning_module is not None
        if dist.get_backend() == "nccl" and not self.capabilities.steps_alone:
            check_dense_gradients(self.lightning_module, f"{self!r} over NCCL")
        self._parameters = list(self.lightning_module.parameters())
        self._requires_grad = list(map(_REQUIRES_GRAD, self._parameters))
        super().configure_ddp()

    # Lightning: DDPStrategy._setup_model, which wraps on another stream than the one of the steps, and only on CUDA.
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        options = {"gradient_as_bucket_view": DDPOptions.gradient_as_bucket_view, **self._ddp_kwargs}
        options["device_ids"] = self.determine_ddp_device_ids()
        if self.comm_hook is not None and self.root_device.type != "cpu" and "bucket_cap_mb" not in options:
            options["bucket_cap_mb"] = self.comm_hook.bucket_mb
        if self._finds_unused:
            options["find_unused_parameters"] = True
        if self._wrapper is None:
            wrapped = DistributedDataParallel(model, **options)
        else:
            wrapped = self._wrapper
            _find_trained_again(wrapped, options)
        if not self.capabilities.steps_alone:
            if self._bucket_order is not None:
                self._bucket_order.close()
            self._bucket_order = _BucketOrder(wrapped, dict(self._trained_parameters()))
            if self._order_to_begin_with is not None:
                self._bucket_order.begin_with(self._order_to_begin_with)
        return wrapped

    def shared_state(self) -> dict[str, Any]:
        """Returns the order of the buckets."""
        names = None if self._bucket_order is None else self._bucket_order.names
        return {} if names is None else {"bucket_order": names}

    def load_state(self, shared: dict[str, Any], of_rank: dict[str, Any]) -> None:
        """Begins with the buckets that the saved run had."""
        if "bucket_order" in shared and isinstance(self.model, DistributedDataParallel):
            self._order_to_begin_with = list(shared["bucket_order"])
            try:
                self._wrap_again()
            finally:
                self._order_to_begin_with = None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; wraps the module again if parameters were frozen or unfrozen since the last one."""
        module, model = self.lightning_module, self.model
        is_wrapped = isinstance(model, DistributedDataParallel)
        assert module is not None
        is_automatic = module.automatic_optimization
        # DistributedDataParallel averages the gradients of the parameters that were trainable when it was created.
        # With manual optimization, `pre_backward` compares: a step itself may freeze and unfreeze parameters.
        compares = is_automatic or self.options.static_graph
        if is_wrapped and compares and self._requires_grad != list(map(_REQUIRES_GRAD, self._parameters)):
            self._wrap_again()
            model = self.model
        try:
            if not is_wrapped or not is_automatic:
                return super().training_step(*args, **kwargs)
            # Lightning: Strategy.training_step
            with self.precision_plugin.train_step_context():
                return _run_as_forward(model, module, "training_step", *args, **kwargs)
        except RuntimeError as error:
            self._name_unused(error)
            raise

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Prepares the reduction of a backward by hand, without parameters that are frozen now.

        `toggle_optimizer` freezes the parameters of the other optimizers within a step. So the wrapper gets all
        parameters that were ever trainable, and searches the graph of the loss for those that take part.
        """
        model, module = self.model, self.lightning_module
        assert module is not None
        if isinstance(model, DistributedDataParallel) and not (module.automatic_optimization or model.static_graph):
            trained = list(map(_REQUIRES_GRAD, self._parameters))
            if trained != self._requires_grad:
                ever = [now or before for now, before in zip(trained, self._requires_grad, strict=True)]
                if not self._finds_unused or ever != self._requires_grad:
                    self._finds_unused = True
                    self._set_trained(ever)
                    self._wrap_again()
                    self._set_trained(trained)
        super().pre_backward(closure_loss)

    @property
    def needs_same_training(self) -> bool:  # type: ignore[override]
        """See `EngineStrategy`."""
        return not self.capabilities.steps_alone

    def frozen_since_forward(self) -> list[Tensor]:
        """See `EngineStrategy`: `DistributedDataParallel` gives them gradients of zeros, and torch gives none."""
        is_trained = list(map(_REQUIRES_GRAD, self._parameters))
        if is_trained == self._requires_grad:
            return []
        changed = zip(self._parameters, is_trained, self._requires_grad, strict=True)
        return [p for p, is_trained, was_trained in changed if was_trained and not is_trained and p.grad is None]

    def _set_trained(self, flags: list[bool]) -> None:
        for parameter, is_trained in zip(self._parameters, flags, strict=True):
            parameter.requires_grad_(is_trained)

    def _name_unused(self, error: RuntimeError) -> None:
        """Adds the names of the parameters to torch's message, which has only their numbers."""
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        if "finished reduction in the prior iteration" in str(error) and numbers:
            assert self.lightning_module is not None
            # `toggle_optimizer` may have frozen some parameters temporarily.
            trained = [p for p, is_trained in zip(self._parameters, self._requires_grad, strict=True) if is_trained]
            names = {id(p): name for name, p in self.lightning_module.named_parameters()}
            unused = [names[id(trained[int(number)])] for number in numbers[1].split()]
            error.args = (self._unused_message(unused),)

    def _wrap_again(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        hook = self.active_hook
        state = hook.state_dict() if hook is not None else {}
        users = list(self.model._comm_hooks) if hook is None else []  # torch: the hooks and their states
        self._wrapper, self.model = self.model, self.lightning_module
        try:
            self.configure_ddp()
        except RuntimeError:  # another rank was lost, and the others begin again
            self.model = self._wrapper
            raise
        finally:
            self._wrapper = None
        if hook is not None and hook is self.active_hook:
            hook.load_state_dict(state)
        for users_hook, users_state in users:
            self.model.register_comm_hook(users_state, users_hook)  # type: ignore[union-attr, operator]

    def _register_ddp_hooks(self) -> None:  # Lightning: DDPStrategy._register_ddp_hooks does so on CUDA only
        self._counted = AllReduceHook() if self.comm_hook is None and self.counts_traffic else None
        hook = self.active_hook
        if hook is not None:
            assert isinstance(self.model, DistributedDataParallel)
            hook.attach(self.model, self.loss_scaler, self._timeout)  # Lightning: DDPStrategy._timeout

    @property
    def active_hook(self) -> CommHook | None:
        """The comm hook; the hook of plain all-reduces if bytes are counted."""
        return self.comm_hook or self._counted

    def post_backward(self, closure_loss: Tensor) -> None:
        """Names unused parameters after the first synchronised backward, not only when the second step fails."""
        if self._backward_is_checked and self.comm_hook is None:
            return  # later backwards of the same wrapper need no check
        super().post_backward(closure_loss)
        self._has_run_backward = True
        if self._bucket_order is not None:
            self._bucket_order.end_backward()
        model = self.model
        if not self._checks_unused or not isinstance(model, DistributedDataParallel):
            return
        assert self.lightning_module is not None
        if not model.require_backward_grad_sync:
            return
        if not self.lightning_module.automatic_optimization:
            self.check_reduction()  # before the next step
        else:
            self._checks_unused = False
            # An optimizer that steps within backward, by a hook, has dropped the gradient already.
            were_frozen = {id(p) for p, was in zip(self._parameters, self._requires_grad, strict=True) if not was}
            trained = [(n, p) for n, p in self._trained_parameters() if id(p) not in were_frozen]
            unused = [n for n, p in trained if p.grad is None and not p._post_accumulate_grad_hooks]
            if unused:
                raise RuntimeError(self._unused_message(unused))
            self._backward_is_checked = True

    def _deals_matrices(self, optimizer: Any) -> bool:
        # A rank that is lost between the exchanges of a step would leave others with a part of it.
        is_alike = not (self.capabilities.optimizer_state_partitioned or self.survives_losses)
        return is_alike and self.world_size > 1 and type(optimizer) is torch.optim.Muon

    @property
    def passes_step_on(self) -> bool:
        """See `EngineStrategy`."""
        return super().passes_step_on and not any(map(self._deals_matrices, self.optimizers))

    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Steps; of Muon, each rank computes some of the matrices for all."""
        if not self._deals_matrices(optimizer):
            return super().optimizer_step(optimizer, *args, **kwargs)
        with dealing_matrices(dist.group.WORLD):
            return super().optimizer_step(optimizer, *args, **kwargs)

    def on_train_end(self) -> None:
        """Checks the last backward of a run: no later forward would report parameters without a gradient."""
        super().on_train_end()
        if self._bucket_order is not None:
            self._bucket_order.close()
        if self._has_run_backward:
            self.check_reduction()

    def check_reduction(self) -> None:
        """Names the parameters that had no part in the last backward, if there are any."""
        if not isinstance(self.model, DistributedDataParallel):
            return
        try:
            # torch: the next forward begins with this call.
            self.model.reducer._rebuild_buckets()
        except RuntimeError as error:
            self._name_unused(error)
            raise

    def finish_micro_batch(self, step: Callable[[Callable[..., Any]], Tensor], synchronises: bool) -> None:
        """Sends zero gradients for all buckets that remain; the module itself has no collectives."""
        module, model = self.lightning_module, self.model
        assert module is not None
        assert isinstance(model, DistributedDataParallel)
        with torch.no_grad(), self.precision_plugin.train_step_context():
            step(module.training_step)
        # DistributedDataParallel sets this at the end of a forward: whether the next forward sends buffers.
        model.require_forward_param_sync = synchronises
        if synchronises or self.synchronises_always:
            self._mute_what_was_sent()
            self._forget_backward()
            model.reducer.prepare_for_backward([])
            nothing = torch.stack([p.sum() * 0 for _, p in self._trained_parameters()]).sum()
            with nullcontext() if self._parameter_hooks is None else self._parameter_hooks.around_backward():
                nothing.backward()
            self.post_backward(nothing)

    def begin_again(self) -> None:
        """Makes the ranks agree on the order of the buckets again."""
        super().begin_again()
        self._forget_backward()

    def _forget_backward(self) -> None:
        # torch: DistributedDataParallel._update_process_group does this to continue after a backward that failed.
        assert isinstance(self.model, DistributedDataParallel)
        self.model._has_rebuilt_buckets = False
        self.model.reducer._reset_state()

    def leave_groups(self) -> None:
        """See `EngineStrategy`; the wrapper waits for `regroup` without its reducer, which refers to the group."""
        if not isinstance(self.model, DistributedDataParallel):  # the run was torn down
            super().leave_groups()
            return
        assert self.lightning_module is not None
        self._order_to_begin_with = self.shared_state().get("bucket_order", self._order_to_begin_with)
        groups = [vars(self.model).get("process_group")]
        self.lightning_module.zero_grad(set_to_none=True)  # they may lie in the reducer's buckets
        for name in ("logger", "reducer", "process_group"):
            vars(self.model).pop(name, None)
        super().leave_groups()
        del groups

    def regroup(self, devices: Sequence[Any], rank: int, store: dist.Store) -> None:
        """See `EngineStrategy`; the buckets keep their order."""
        super().regroup(devices, rank, store)
        if isinstance(self.model, DistributedDataParallel):
            self._wrap_again()
            self._order_to_begin_with = None

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Context of an inner micro-batch: nothing is sent."""
        if self.synchronises_always or (self.options.static_graph and not self._has_run_backward):
            yield  # torch learns the graph from the first backward, which must be synchronised
        else:
            with super().block_backward_sync():
                yield

    def _unused_message(self, names: list[str]) -> str:
        flag = repr(self).strip("'")
        return (
            f"under {flag!r} these parameters had no part in the loss: {', '.join(names)}. Their gradients can't be"
            f" averaged. If that is meant, add an option: strategy='{flag}:find_unused_parameters=true'; if they are"
            " never trained, set `requires_grad = False` on them."
        )

    def _trained_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Returns the parameters in the order in which `DistributedDataParallel` numbers them."""
        assert self.lightning_module is not None
        return [(name, p) for name, p in self.lightning_module.named_parameters() if p.requires_grad]


def _find_trained_again(wrapped: DistributedDataParallel, options: dict[str, Any]) -> None:
    """Has a wrapper find out again which parameters are trained.

    The wrapper stays the same object: whoever holds it, such as the context `no_sync` of a micro-batch, which sets its
    attribute and restores it at its end, would otherwise act on one that is no longer used.
    """
    synchronises, trains = wrapped.require_backward_grad_sync, wrapped.training
    # A broadcast of weights would write to them, and backward through a forward that was before it would fail.
    DistributedDataParallel.__init__(wrapped, wrapped.module, **options, init_sync=False)
    wrapped.require_backward_grad_sync, wrapped.training = synchronises, trains


def _run_as_forward(wrapped: Any, module: LightningModule, name: str, *args: Any, **kwargs: Any) -> Any:
    """Runs a step of `module` through the wrapper around it, in place of `forward`.

    The wrapper calls the module, and a step calls it again: hooks on the module itself are for the latter alone.
    """
    # Lightning: _ForwardRedirection.__call__, which assigns through the module's slow `__setattr__`.
    own = vars(module)
    before = own.get("forward")
    hooks = {table: own[table] for table in _TABLES_OF_HOOKS if own[table]}
    none: dict[str, Any] = {table: OrderedDict() for table in hooks}
    # With manual optimization `manual_backward` prepares the reduction.
    is_by_hand = isinstance(wrapped, DistributedDataParallel) and not module.automatic_optimization

    def forward(*args: Any, **kwargs: Any) -> Any:
        # A step may call the module's `forward`.
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
        own.update(hooks)
        output = getattr(module, name)(*args, **kwargs)
        own.update(none)
        if is_by_hand:
            wrapped.require_backward_grad_sync = False
        return output

    own["forward"] = forward
    own.update(none)
    try:
        output = wrapped(*args, **kwargs)
    finally:
        own.update(hooks)
    if is_by_hand:
        wrapped.require_backward_grad_sync = True
    return output


def _ddp_arguments(options: DDPOptions) -> dict[str, Any]:
    """The arguments of `DistributedDataParallel` from the flag; Lightning keeps them in the strategy."""
    arguments = {
        field.name: value
        for field in dataclasses.fields(DDPOptions)
        if (value := getattr(options, field.name)) != field.default and field.name not in _NOT_OF_DDP
    }
    if "broadcast_buffers" in arguments:
        arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers")  # torch warns about the old name
    return arguments


# Keeps the order in which `DistributedDataParallel` puts gradients into its buckets, also in a resumed run.
#
# torch uses one bucket in the first step. From the second step on, it uses buckets in the order in which the first
# backward computed the gradients. The last digit of a sum over more than two ranks depends on the position in a bucket.
# So a resumed run starts with the buckets of the saved run. The checkpoint has the order of the gradients, and a
# backward of zeros in this order creates the buckets. This costs one all-reduce of all gradients.


class _BucketOrder:
    """The order in which the first synchronised backward computes the gradients.

    Args:
        model: the wrapper, before its first backward.
        parameters: the parameters whose gradients it averages, by name.
    """

    def __init__(self, model: DistributedDataParallel, parameters: dict[str, Tensor]) -> None:
        self._model, self._parameters = model, parameters
        self._seen: dict[str, None] = {}
        self._hooks: list[RemovableHandle] = []
        self._is_fixed = _never_rebuilds(model)
        if not self._is_fixed:
            self._hooks = [p.register_post_accumulate_grad_hook(self._noting(name)) for name, p in parameters.items()]

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            if self._model.require_backward_grad_sync:
                self._seen.setdefault(name)

        return note

    def end_backward(self) -> None:
        """Called after each backward."""
        if self._hooks and self._seen:
            self.close()

    def close(self) -> None:
        """Removes the hooks of the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def names(self) -> list[str] | None:
        """The names of the parameters in the order of their gradients; None until it is known."""
        return list(self._seen) if len(self._seen) == len(self._parameters) and not self._hooks else None

    def begin_with(self, names: Sequence[str]) -> None:
        """Creates the buckets in the order `names` of an earlier run; all ranks call it before a comm hook is set."""
        if self._is_fixed or {*names} != self._parameters.keys():
            return
        reducer = self._model.reducer
        reducer.prepare_for_backward([])
        # Autograd's backward visits the most recent operation first.
        total = torch.zeros((), device=next(iter(self._parameters.values())).device)
        for name in reversed(names):
            total = total + _of_zero(self._parameters[name])
        total.backward()
        # torch: a forward begins with this call.
        reducer._rebuild_buckets()
        self._model._has_rebuilt_buckets = True
        for parameter in self._parameters.values():
            parameter.grad = None
        self._seen = dict.fromkeys(names)
        self.close()


def _of_zero(parameter: Tensor) -> Tensor:
    values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum().float() * 0


def _never_rebuilds(model: DistributedDataParallel) -> bool:
    """Whether torch never rebuilds the buckets, or a backward of zeros can't make torch rebuild them."""
    has_sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return model.find_unused_parameters or model.static_graph or has_sparse
