"""Repeats the first steps of a run in one process, with a whole copy of the module and the batches of all ranks.

The strategies and the loss weighting of this package take no part: forward, backward, clipping and the optimizer's step
are torch's. Only the forward's precision context is the run's own. The copy's trainer is a read-only substitute that
reaches no other rank; logs and prints of the copy are dropped.
"""

import contextlib
import dataclasses
import functools
import io
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule

# Lightning: reads the result of `configure_optimizers`.
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import Metric

from .._compat.lightning import _configure_optimizers
from ..attachments import has_hooks
from ..checkpoint import get_random_state, set_random_state
from ..checkpoint.rng import is_same_state
from ..data.samples import NoSamplesError, join_batches
from ..distributed.buckets import move_module
from ..distributed.digests import Digests, digests, whole
from ..precision.loss_scaling import Parameters
from ..strategies.collectives import NoneAtAll
from ..strategies.pipeline.reachable_state import snapshot_outside
from .module_copy import Memory, put

__all__ = [
    "SETTINGS",
    "Call",
    "ManualOptimizer",
    "MicroBatch",
    "NeedsOtherRanks",
    "Replay",
    "Step",
    "UnfitError",
    "loss_of",
    "norm",
]

_BETWEEN_PASSES = ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward")
"""The hooks that are called between the forward of a step and its backward."""
SETTINGS = ("lr", "momentum", "betas", "weight_decay")
"""The settings of an optimizer's groups that schedulers and callbacks may change."""


class UnfitError(Exception):
    """The steps can't be repeated in one process, or not in a comparable way; the message has the reason."""


class NeedsOtherRanks(Exception):  # noqa: N818
    """The step gathers values of other ranks, so their batches have to be joined."""


@dataclasses.dataclass
class MicroBatch:
    """A call of `training_step` on a rank."""

    rank: int
    batch: Any
    batch_idx: int
    samples: int
    """The number of its samples; 0 for a padding batch."""
    random: dict[str, Any]
    """Random state of the rank before the call."""
    changes: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """The data of the module that hooks and callbacks have changed since the step before."""
    loss: Any = None
    """The loss that the call returned, a 0-d tensor; None if it returned none."""


@dataclasses.dataclass
class Call:
    """A call of an optimizer."""

    optimizer: int
    """Index of the optimizer. Where each parameter has its own, they may be called in another order in one process."""
    settings: list[dict[str, Any]]
    """For each group, the settings that are no longer those that the run began with."""
    norm: Any
    """The norm of the gradients that it has used."""
    gradients: Digests
    """The digests of these gradients."""


@dataclasses.dataclass
class Step:
    """A window of micro-batches; under manual optimization, one batch."""

    global_step: int
    epoch: int
    scale: float = 1.0
    """The factor of a loss scaler."""
    micro_batches: list[MicroBatch] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    """The calls of optimizers, in the order of the optimizers."""


@dataclasses.dataclass
class Replay:
    """Repeats the steps of several ranks in one process.

    Args:
        module: an unsplit copy with the weights before the first step, which is trained.
        trainer: trainer of the run.
        device: device to compute on.
        joins_batches: whether the ranks' batches are joined, rather than run one after the other.
        draws_same_numbers: whether a rank draws the same random numbers as one process with the same random state.
    """

    module: LightningModule
    trainer: Any
    device: torch.device
    joins_batches: bool
    draws_same_numbers: bool

    def __post_init__(self) -> None:
        self.losses: list[tuple[str, Any, Any]] = []
        """The name of each loss, its value in the run, and its value here."""
        self.norms: list[tuple[str, float, float]] = []
        self.gradients: dict[int, tuple[str, dict[str, tuple[float, float]]]] = {}
        """For each call of an optimizer, the name of its step, and sum and norm of each gradient that it has used."""
        self._num_calls = 0
        self.numels = {name: parameter.numel() for name, parameter in self.module.named_parameters()}
        self.above_rounding: dict[str, Tensor] = {}
        """For each parameter, by name: where its gradients were larger than the rounding error of zero."""

    def run(self, steps: Sequence[Sequence[Step]]) -> None:
        """Trains the copy.

        Args:
            steps: for each step, the steps of all ranks with different samples.

        Raises:
            UnfitError: the steps can't be repeated here, or not in a comparable way.
        """
        try:
            with self.alone():
                self._memories = [Memory(self.module) for _ in range(len(steps[0]) if not self.joins_batches else 1)]
                for number, step in enumerate(steps, start=1):
                    self._stand_in.__dict__.update(global_step=step[0].global_step, current_epoch=step[0].epoch)
                    self._calls = dict(enumerate(step[0].calls, start=self._num_calls))
                    self._num_calls += len(step[0].calls)
                    self._step_label, self._scale = f"step {number}", step[0].scale
                    run = self._step if self.module.automatic_optimization else self._step_by_hand
                    run(step)
        except NeedsOtherRanks:
            if self.joins_batches:
                raise UnfitError("its step reaches other ranks") from None
            raise

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which the copy runs: no other ranks, prints or warnings; it leaves the random state as it was."""
        random = get_random_state()
        try:
            with (
                contextlib.ExitStack() as silence,
                warnings.catch_warnings(),
                NoneAtAll(NeedsOtherRanks),  # they wait for the end of the check
                torch.enable_grad(),
            ):
                for stream in (contextlib.redirect_stdout, contextlib.redirect_stderr):
                    silence.enter_context(stream(io.StringIO()))
                warnings.simplefilter("ignore")
                self._prepare()
                yield
        finally:
            set_random_state(random)

    def forward_context(self) -> Any:
        """Returns the context of a forward: the run's own."""
        return self.trainer.precision_plugin.forward_context()

    def _prepare(self) -> None:
        module: Any = self.module
        move_module(module, self.device)
        self._stand_in = _StandIn(self.trainer, self.device)
        module.trainer = self._stand_in
        self._stand_in.strategy.connect(module)
        for name in ("log", "log_dict", "print"):
            setattr(module, name, lambda *_, **__: None)
        module.all_gather = self._all_gather
        module.clip_gradients = _clip
        module.manual_backward = self._manual_backward
        for part in module.modules():
            if isinstance(part, Metric):
                part.distributed_available_fn = lambda: False
        self._optimizers, schedulers, _ = _configure_optimizers(module.configure_optimizers())
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self._optimizers):
            raise UnfitError("LBFGS runs a step several times")
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(self._load_settings)
            optimizer.register_step_post_hook(self._record_norm)
        by_hand = [ManualOptimizer(optimizer, self._stand_in.strategy, module) for optimizer in self._optimizers]
        self._stand_in.__dict__["optimizers"] = self._optimizers
        module.optimizers = lambda use_pl_optimizer=True: by_hand[0] if len(by_hand) == 1 else by_hand
        own = [config["scheduler"] if isinstance(config, dict) else config for config in schedulers]
        module.lr_schedulers = lambda: (own or [None])[0] if len(own) <= 1 else own
        self._has_idx = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        before = {p: p.grad for p in self.module.parameters() if p.grad is not None}
        if self._scale != 1:  # the gradients of earlier losses are no longer scaled
            self.module.zero_grad()
        self.module.on_before_backward(loss)
        self.module.backward(loss * self._scale, *args, **kwargs)
        if self._scale != 1:
            self._scale_gradients(1 / self._scale)
            for parameter, gradient in before.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.module.on_after_backward()

    def _scale_gradients(self, factor: Any) -> None:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if not self.joins_batches:
            raise NeedsOtherRanks
        return apply_to_collection(data, Tensor, lambda tensor: tensor.unsqueeze(0))

    def _step(self, step: Sequence[Step]) -> None:
        """Runs one step of automatic optimization: the mean over the samples of all ranks and micro-batches."""
        module: Any = self.module
        calls: list[list[Any]] = [[]]  # the windows of each call of the closure, of which some optimizers make several
        for window in zip(*(rank_step.micro_batches for rank_step in step), strict=True):
            if calls[-1] and window[0].batch_idx == calls[-1][-1][0].batch_idx:
                calls.append([])
            calls[-1].append(window)
        last = calls[0][-1][0].batch_idx
        ends: list[Any] = []

        def closure() -> Tensor:
            if not calls:
                raise UnfitError("its optimizer runs the step another number of times")
            windows = calls.pop(0)
            loss = self._forward_and_backward(windows, ends, begins=len(ends) <= 1)
            for optimizer in self._optimizers:
                module.on_before_optimizer_step(optimizer)
            value, algorithm = self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm
            clips_each = is_overridden("configure_gradient_clipping", module)
            for optimizer in self._optimizers if clips_each else [Parameters.of(self._optimizers)]:
                module.configure_gradient_clipping(
                    optimizer, gradient_clip_val=value, gradient_clip_algorithm=algorithm and str(algorithm.value)
                )
            return loss

        several = functools.cache(closure)
        for optimizer in self._optimizers:
            own = closure if len(self._optimizers) == 1 else several
            if is_overridden("optimizer_step", module):
                wrapped = ManualOptimizer(optimizer, self._stand_in.strategy, module, calls_hook=False)
                module.optimizer_step(step[0].epoch, last, wrapped, own)
            else:
                optimizer.step(own)
        if calls:
            raise UnfitError("its optimizer runs the step another number of times")
        for output, batch, batch_idx in ends:
            module.on_train_batch_end(output, batch, batch_idx)

    def _forward_and_backward(self, windows: Sequence[Any], ends: list[Any], begins: bool) -> Tensor:
        """Runs the windows of a call of the optimizer's closure; returns the mean of their losses.

        Args:
            windows: for each micro-batch, those of all ranks.
            ends: gets the arguments of `on_train_batch_end` for each micro-batch that is run for the first time.
            begins: whether gradients are zeroed before.
        """
        module: Any = self.module

        def zero() -> None:
            for optimizer in self._optimizers:
                module.on_before_zero_grad(optimizer)
                module.optimizer_zero_grad(self._stand_in.current_epoch, windows[0][0].batch_idx, optimizer)

        num_samples = sum(micro_batch.samples for window in windows for micro_batch in window)
        total, mean = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for window in windows:
            batch, batch_idx = self._on_device(window[0]), window[0].batch_idx
            is_first = all(batch_idx != before for _, _, before in ends)
            if is_first:
                module.on_train_batch_start(batch, batch_idx)
            begins_here = begins and window is windows[0]
            output = self._accumulate(window, num_samples, total, mean, zero if begins_here else lambda: None)
            module.on_after_backward()
            if is_first:
                ends.append((output, batch, batch_idx))
        self._scale_gradients(num_samples / total / self._scale)  # 1, without weights from the step or a loss scaler
        return mean / total

    def _accumulate(
        self, window: Sequence[MicroBatch], num_samples: int, total: Tensor, mean: Tensor, zero: Callable[[], None]
    ) -> dict[str, Any] | None:
        """Runs forward and backward of the ranks' micro-batches of one index in the window.

        Adds their weights to `total`, and their losses, weighted, to `mean`. Calls `zero` before the first backward.

        Returns:
            The first output, as hooks get it; None if no rank has a sample.
        """
        module: Any = self.module
        first = None
        # What hooks have changed since the last batch, as those between two passes or before the optimizer's step. A
        # run tells only of what hooks after that step change.
        changed = self._memories[0].changes(module)
        for memory in self._memories:
            memory.add(changed)
        # A forward may write parameters, too, such as those of an averaged teacher.
        kept = () if self.joins_batches else itertools.chain(module.buffers(), module.parameters())
        before = [(tensor, tensor.detach().clone()) for tensor in kept]
        # A hook on a parameter gets the gradient of the whole batch at once, as it does in one process; and hooks
        # between forward and backward, which may write into weights, are called between the two once.
        is_between = any(is_overridden(name, module) for name in _BETWEEN_PASSES)
        waits, losses = has_hooks(module.parameters()) or is_between, []
        if not waits:
            zero()
        # Each rank has classes and globals of its own, too.
        is_alone = self.joins_batches or len(window) == 1
        put_outside = (lambda: None) if is_alone else snapshot_outside(module)
        random: dict[str, Any] | None = None
        for rank, micro_batch in enumerate([self._joined(window)] if self.joins_batches else window):
            if micro_batch.samples == 0:
                continue
            # Each rank begins with the same values (for example the vectors of a spectral norm) ...
            of_first = [(tensor, tensor.detach().clone()) for tensor, _ in before] if rank else []
            for tensor, value in before:
                tensor.data.copy_(value)
            if rank:
                self._memories[rank].recall(module)
                put_outside()
            output = self._call(micro_batch)
            # Hooks after the step draw what they draw on rank 0.
            random = get_random_state() if random is None else random
            for tensor, value in of_first:  # ... and as in DDP, those of rank 0 count after the batch
                tensor.data.copy_(value)
            loss, weight = loss_of(output), output.get("weight") if isinstance(output, dict) else None
            if loss is None:
                raise UnfitError("a step without a loss is left out")
            where = f"loss of {self._step_label}" + ("" if is_alone else f", rank {rank}")
            self.losses.append((where, micro_batch.loss, loss.detach()))
            count = micro_batch.samples if weight is None else weight
            counts = torch.as_tensor(count, dtype=loss.dtype).to(self.device)
            total += counts
            extra = output if isinstance(output, dict) else {}
            first = {**extra, "loss": loss.detach()} if first is None else first
            losses.append(loss.masked_fill(counts == 0, 0.0) * (counts / num_samples))
            mean += losses[-1].detach() * num_samples
            if not waits:
                module.backward(losses.pop() * self._scale)
            self._memories[rank].keep(module)
        if random is not None:
            set_random_state(random)
        self._memories[0].recall(module)  # the hooks from here on are those of rank 0
        if waits:
            zero()
        if losses:
            whole_loss = torch.stack(losses).sum()
            module.on_before_backward(whole_loss)
            module.backward(whole_loss * self._scale)
        return first

    def _step_by_hand(self, step: Sequence[Step]) -> None:
        for window in zip(*(rank_step.micro_batches for rank_step in step), strict=True):
            micro_batch = self._joined(window)
            batch = self._on_device(micro_batch)
            self.module.on_train_batch_start(batch, micro_batch.batch_idx)
            output = self._call(micro_batch)
            self.losses.append((f"loss of {self._step_label}", micro_batch.loss, loss_of(output)))
            self.module.on_train_batch_end(output, batch, micro_batch.batch_idx)

    def _call(self, micro_batch: MicroBatch) -> Any:
        set_random_state(micro_batch.random)
        put(self.module, move_data_to_device(micro_batch.changes, self.device))
        self._stand_in.__dict__["global_rank"] = micro_batch.rank
        before = get_random_state()
        with self.forward_context():
            batch = self._on_device(micro_batch)
            output = self.module.training_step(*((batch, micro_batch.batch_idx) if self._has_idx else (batch,)))
        if not (self.draws_same_numbers and not self.joins_batches) and not is_same_state(before, get_random_state()):
            raise UnfitError("its step draws random numbers, which differ in a split module")
        return output

    def _on_device(self, micro_batch: MicroBatch) -> Any:
        return move_data_to_device(micro_batch.batch, self.device)  # the module's own hooks have transferred it before

    def _joined(self, window: Sequence[MicroBatch]) -> MicroBatch:
        window = [micro_batch for micro_batch in window if micro_batch.samples] or window[:1]
        if len(window) == 1:
            return window[0]
        samples = [micro_batch.samples for micro_batch in window]
        try:
            batch = join_batches([micro_batch.batch for micro_batch in window], samples)
        except NoSamplesError as error:
            raise UnfitError(f"the batches of the ranks can't be joined: they have {error}") from None
        losses = [micro_batch.loss for micro_batch in window]
        loss = None
        if losses[0] is not None:
            loss = sum(value * num for value, num in zip(losses, samples, strict=True)) / sum(samples)
        return dataclasses.replace(window[0], batch=batch, samples=sum(samples), loss=loss)

    def _load_settings(self, optimizer: Any, *_: Any) -> None:
        number = self._optimizers.index(optimizer)
        self._position = next((k for k, call in self._calls.items() if call.optimizer == number), -1)
        if self._position < 0:
            raise UnfitError("its optimizers were called another number of times")
        self._call_of_run = self._calls.pop(self._position)
        for group, changed in zip(optimizer.param_groups, self._call_of_run.settings, strict=True):
            group.update(changed)

    def _record_norm(self, optimizer: Any, *_: Any) -> None:
        gradients = {
            name: p.grad.detach().to_dense() if p.grad.is_sparse else p.grad.detach()
            for name, p in self.module.named_parameters()
            if p.grad is not None
        }
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        own = {id(p) for p in trained if not p.grad.is_sparse}
        names = {id(p): name for name, p in self.module.named_parameters()}
        own_norm = norm([gradients[name] for key, name in names.items() if key in own and name in gradients])
        self.norms.append((f"gradient norm of {self._step_label}", self._call_of_run.norm, own_norm))
        figures = digests((names[id(p)], p.grad) for p in trained if id(p) in names)
        self.gradients[self._position] = self._step_label, whole([figures])
        num = sum(gradient.numel() for gradient in gradients.values())
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        least = max(1e-3 * norm(list(gradients.values())) / max(num, 1) ** 0.5, 1e-6 * largest)
        for name, gradient in gradients.items():
            above = gradient.abs() > least
            self.above_rounding[name] = self.above_rounding[name] & above if name in self.above_rounding else above


class _StandIn:
    """The trainer of the copy: it has the attributes of the run's trainer, but none of its methods."""

    def __init__(self, trainer: Any, device: torch.device) -> None:
        strategy = SingleDeviceStrategy(device)
        self.__dict__.update(_trainer=trainer, strategy=strategy, callbacks=[], barebones=False)
        self.__dict__.update(logger=DummyLogger(), loggers=[DummyLogger()], should_stop=False)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._trainer, name)
        if callable(value):
            raise UnfitError(f"it calls the trainer's `{name}`")
        return value


class ManualOptimizer(LightningOptimizer):
    """The optimizer that Lightning gives to a module with manual optimization, or to its `optimizer_step`."""

    def __init__(self, optimizer: Any, strategy: Any, module: Any, calls_hook: bool = True) -> None:
        super().__init__(optimizer)
        self._strategy = strategy
        self._module = module
        self._calls_hook = calls_hook

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """See Lightning; calls the hook of the module before the step."""
        if not self._calls_hook:  # the closure does
            return self._optimizer.step(closure, **kwargs)
        loss = None if closure is None else closure()
        self._module.on_before_optimizer_step(self._optimizer)
        self._optimizer.step(**kwargs)
        return loss


def loss_of(output: Any) -> Tensor | None:
    """Returns the loss in the result of `training_step`; None without one."""
    return output if isinstance(output, Tensor) else output.get("loss") if isinstance(output, dict) else None


def _clip(optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if gradient_clip_val is None:
        return
    if str(gradient_clip_algorithm) == "value":
        nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        nn.utils.clip_grad_norm_(parameters, gradient_clip_val)


def norm(tensors: Iterable[Tensor]) -> float:
    """Returns the norm of all tensors together."""
    return float(sum(torch.linalg.vector_norm(t, dtype=None).double().square() for t in tensors)) ** 0.5
