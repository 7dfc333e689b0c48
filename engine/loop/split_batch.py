"""Steps on parts of a batch beside a step on the whole batch, tried out with a copy of the module.

Ranks share a batch: each computes a loss and its gradients from its own samples alone, and the gradients are averaged.
That is the step of one process only where the loss is a mean over samples. It is not for sums, for losses that compare
the samples of a batch with each other, for means over a count that a batch has more or less of, for gradients of
activations that are clamped or normalised in backward (those of W parts are W times larger), and for what is remembered
of the samples and used in the next step.

Phases, on one rank, with the first batches that it has had; no optimizer steps:
1. For one batch, what another rank has in attributes, globals, callbacks and metrics takes the place of what this rank
   has there: if losses or gradients change, the ranks train by different memories.
2. Each batch is cut into two parts. Each part is run as by a rank of its own: with weights and buffers as at the start
   of the step, and with what this rank has left in attributes and globals before.
3. The batches are run whole; losses and gradients must be the same.

Random numbers are replaced by constants, and BatchNorm uses its running statistics, since ranks draw their own numbers,
and normalise by their own batches.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from .._compat.torch import TorchDispatchMode, _BatchNorm, tree_leaves
from ..attachments import has_hooks
from ..checkpoint import get_random_state, set_random_state
from ..data.samples import NoSamplesError, join_batches, num_samples, take_samples
from ..precision.plugins import autocast_dtype
from ..strategies.pipeline.reachable_state import (
    NOT_THE_USERS_ATTRIBUTES,
    ReachableState,
    is_of_a_users_class,
    named_tables,
    snapshot_outside,
)
from .module_copy import are_equal, is_data, put
from .unsplit import ManualOptimizer, MicroBatch, Replay, UnfitError, loss_of, norm

__all__ = ["Comparison", "compare_parts", "kept_values", "put_values", "state_of", "values_of"]

_NUM_BATCHES = 2
"""Two batches: what is remembered of the first one shows in the second."""
_LOSS_TOLERANCE, _GRADIENT_TOLERANCE, _GRADIENT_FLOOR = 1e-4, 1e-3, 1e-5
"""Relative to the loss; to the norm of a parameter's gradient; and to the norm of all gradients, since where the true
gradient is zero, it has the rounding errors of the others. Sums in another order differ by 1e-6."""
_MAX_BYTES = 2**20
"""The largest value that ranks exchange: larger ones are data, not what a step remembers."""
_MAX_PLACES = 16
"""The most places that are looked at one by one."""
_METRICS = ("callback_metrics", "logged_metrics")


class Comparison(NamedTuple):
    """The differences that were found."""

    memories: list[str]
    """The places in which ranks have other values, which matter for losses or gradients."""
    of_parts: list[str]
    """In what a step on two parts of a batch differs from a step on the batch."""


class _Ran(NamedTuple):
    loss: float
    gradients: dict[str, Tensor]


def compare_parts(
    module: LightningModule,
    trainer: Any,
    device: torch.device,
    micro_batches: Sequence[MicroBatch],
    kept: Sequence[dict[str, Any]],
) -> Comparison:
    """Tries out whether a step on a batch is the mean of steps on its parts, and the same on each rank.

    Args:
        module: a copy of the whole module as it was before its first step. It is changed.
        trainer: the trainer of the run.
        device: the device to compute on.
        micro_batches: those of this rank, in order.
        kept: what `kept_values` has returned on each rank, this one first.

    Raises:
        UnfitError: the batch can't be cut, the step depends on more than its batch, or computes in fewer than 32 bits.
    """
    # This runs without autocast.
    is_exact = autocast_dtype(trainer.precision_plugin) is not None or trainer.precision in ("32-true", "64-true")
    if not is_exact or any(p.is_floating_point() and p.itemsize < 4 for p in module.parameters()):
        raise UnfitError("the step computes in fewer than 32 bits")
    has_batches = getattr(trainer._data_connector.sizes.loader, "batch_size", None) is not None
    batches = [_counted(micro_batch, has_batches) for micro_batch in micro_batches if micro_batch.samples]
    batches = [micro_batch for micro_batch in batches if micro_batch.samples > 1][:_NUM_BATCHES]
    if not batches:
        raise UnfitError("there is no batch of several samples")
    replay = _Parts(module, trainer, device, joins_batches=False, draws_same_numbers=False)
    with replay.alone(), _running_statistics(module):
        put_state, values = state_of(module), values_of(module)

        def run(windows: Sequence[Sequence[MicroBatch]], change: Callable[[], Any] = lambda: None) -> list[_Ran]:
            put_state()
            put_values(values)
            change()
            return replay.of_windows(windows)

        last = dataclasses.replace(batches[-1], changes={})
        put(module, batches[-1].changes)  # attributes that hooks and callbacks have added are places, too
        memories = _memories(replay, kept, lambda change: run([[last]], change))
        if memories:
            return Comparison(memories, [])
        batches[1:] = [_mixed(batches[0], micro_batch) for micro_batch in batches[1:]]
        # By hand, a part of the backwards may be torch's, which no number of samples weighs: the parts have equal ones.
        is_even = not module.automatic_optimization
        if is_even and any(micro_batch.samples % 2 for micro_batch in batches):
            raise UnfitError("a batch has an odd number of samples")
        windows = [_cut(batch, alternates=is_even or not number) for number, batch in enumerate(batches)]
        return Comparison([], _differences(run(windows), run([[micro_batch] for micro_batch in batches])))


@contextlib.contextmanager
def _running_statistics(module: nn.Module) -> Iterator[None]:
    """Context in which BatchNorm uses its running statistics."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.track_running_stats]
    modes = [part.training for part in norms]
    for part in norms:
        part.eval()
    try:
        yield
    finally:
        for part, mode in zip(norms, modes, strict=True):
            part.train(mode)
        module.zero_grad()


class _Parts(Replay):
    """Runs forward and backward of the parts of batches."""

    _latest: dict[str, Tensor]
    """The gradients after the latest backward by hand, which no optimizer has used."""

    def forward_context(self) -> Any:
        # Rounding to 8 or 11 bits would hide differences, or be one.
        is_mixed = autocast_dtype(self.trainer.precision_plugin) is not None
        return contextlib.nullcontext() if is_mixed else super().forward_context()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with super().alone(), _Constants():
            self._scale = 1.0
            own = {name: dict(getattr(self.trainer, name)) for name in _METRICS}
            self.trainer_data = self._stand_in.__dict__
            self.trainer_data.update(own, callbacks=self.trainer.callbacks)
            yield

    def of_windows(self, windows: Sequence[Sequence[MicroBatch]]) -> list[_Ran]:
        """Runs batches one after the other, each as one process for each of its parts."""
        self._stand_in.__dict__.update(global_step=0, current_epoch=0)  # the run itself has gone on
        states = [state_of(self.module)] * len(windows[0])
        return [self._of_window(window, states) for window in windows]

    def _prepare(self) -> None:
        super()._prepare()
        module: Any = self.module
        if not module.automatic_optimization:
            by_hand = [_Still(optimizer, self._stand_in.strategy, module) for optimizer in self._optimizers]
            for optimizer in by_hand:
                optimizer.replay = self
            module.optimizers = lambda use_pl_optimizer=True: by_hand[0] if len(by_hand) == 1 else by_hand
            module.clip_gradients = lambda *_, **__: None

    def _of_window(self, window: Sequence[MicroBatch], states: list[Any]) -> _Ran:
        module: Any = self.module
        module.zero_grad()
        before = after = values_of(module)
        self._updates: list[dict[str, Tensor]] = []
        self._estimate: Any = sum(micro_batch.samples for micro_batch in window)  # of the total weight
        # A rank begins backward with the mean of its own samples. But a hook on a parameter gets the whole gradient.
        is_hooked, losses = has_hooks(module.parameters()), []
        if is_hooked and not module.automatic_optimization:
            raise UnfitError("hooks of parameters wait for the backward of all ranks")
        self._factor = 1 if is_hooked else len(window)
        total, mean = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        for rank, micro_batch in enumerate(window):
            states[rank]()
            put_values(before)
            batch = self._on_device(micro_batch)
            module.on_train_batch_start(batch, micro_batch.batch_idx)
            self._count = torch.as_tensor(micro_batch.samples).to(self.device)
            self._position, self._latest = 0, {}
            output = self._call(micro_batch)
            loss = loss_of(output)
            if module.automatic_optimization:
                if loss is None:
                    raise UnfitError("a step without a loss is left out")
                if isinstance(output, dict) and output.get("weight") is not None:
                    self._count = torch.as_tensor(output["weight"]).to(self.device)
                    self._estimate = self._estimate if rank else self._count.clamp(min=1) * len(window)
                module.on_before_backward(loss)
                losses.append(self._weighted(loss))
                if not is_hooked:
                    module.backward(losses.pop())
            total = total + self._count
            if loss is not None:  # the loss of nothing may be NaN
                mean = mean + loss.detach().masked_fill(self._count == 0, 0.0) * self._count
            module.on_train_batch_end(output, batch, micro_batch.batch_idx)
            after = after if rank else values_of(module)
            states[rank] = state_of(module)
        if is_hooked != has_hooks(module.parameters()):
            raise UnfitError("a step registers hooks of parameters")
        if losses:
            module.backward(torch.stack(losses).sum())
        put_values(after)  # the first rank's buffers are sent to the others
        gradients = self._gradients() if module.automatic_optimization else {}
        for number, of_update in enumerate(self._updates, start=1):
            gradients |= {f"{name} (update {number})": gradient for name, gradient in of_update.items()}
        factor = self._estimate / (self._factor * total)
        return _Ran(float(mean / total), {name: gradient * factor for name, gradient in gradients.items()})

    def _weighted(self, loss: Tensor) -> Tensor:
        factor = self._count * self._factor / self._estimate
        return loss.masked_fill(factor == 0, 0.0) * factor

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach().clone()
            for name, p in self.module.named_parameters()
            if p.grad is not None
        }

    def _manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super()._manual_backward(self._weighted(loss), *args, **kwargs)
        self._latest = self._gradients()

    def keep_gradients(self, optimizer: Any) -> None:
        """Keeps the gradients that an optimizer would use, as they were before the step has clipped them, say."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        # Of those of a backward, each is used once: after it a step may put in gradients by hand.
        present, parameters = self._gradients(), dict(self.module.named_parameters())
        latest = {
            name: self._latest.pop(name, gradient) for name, gradient in present.items() if id(parameters[name]) in own
        }
        if self._position == len(self._updates):
            self._updates.append({})
        sums = self._updates[self._position]
        self._position += 1
        for name, gradient in latest.items():
            sums[name] = sums[name] + gradient if name in sums else gradient


class _Still(ManualOptimizer):
    """Changes no weight: steps by hand on parts can't be averaged, but the gradients that they would use."""

    replay: _Parts

    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        loss = None if closure is None else closure()
        self.replay.keep_gradients(self.optimizer)
        return loss


# --- what a step may remember


def kept_values(module: LightningModule, trainer: Any) -> dict[str, Any]:
    """Returns a copy of what is kept where a step may read it, by the words for its place; without buffers."""
    metrics = {name: dict(getattr(trainer, name)) for name in _METRICS}
    places = _places(module, trainer.callbacks, metrics)
    return {
        text: apply_to_collection(table[key], Tensor, lambda t: t.detach().cpu().clone())
        for text, (table, key) in places.items()
    }


def _places(module: LightningModule, callbacks: Sequence[Any], metrics: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns for each place the table and the key of its value: numbers, tensors, or containers of these."""
    places: dict[str, tuple[Any, Any]] = {}
    named: dict[str, tuple[Any, Any]] = {
        place.text(module): (table, place.name) for place, table in named_tables(module).items()
    }
    named |= {
        f"the attribute {f'{path}.{name}'.lstrip('.')!r}": (vars(part), name)
        for path, part in module.named_modules()
        if not isinstance(part, Metric)
        for name in vars(part).keys() - NOT_THE_USERS_ATTRIBUTES
    }
    named |= {f"the callback {type(callback).__name__}": ({"": callback}, "") for callback in callbacks}
    named |= {f"`self.trainer.{name}`": (metrics, name) for name in _METRICS}
    for text, (table, name) in named.items():
        value = table.get(name)
        if is_of_a_users_class(value):
            attributes = getattr(value, "__dict__", {})
            places |= {f"the attribute {key!r} of {text}": (attributes, key) for key in attributes}
        elif name in table:
            places[text] = table, name
    return {text: (table, key) for text, (table, key) in places.items() if _is_kept(table[key])}


def _is_kept(value: Any) -> bool:
    if not is_data(value):
        return False
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    if any(isinstance(tensor, DTensor) for tensor in tensors):  # one rank alone can't compare them
        return False
    return sum(tensor.nbytes for tensor in tensors) <= _MAX_BYTES and all(tensor.is_leaf for tensor in tensors)


def _memories(replay: _Parts, kept: Sequence[dict[str, Any]], run: Callable[[Any], list[_Ran]]) -> list[str]:
    """Returns the places in which ranks have other values, by which a step goes."""
    own, *others = kept
    theirs: dict[str, Any] = {}
    for of_rank in others:
        for text, value in of_rank.items():
            if text in own and text not in theirs and not are_equal(value, own[text]):
                theirs[text] = value
    if not theirs:
        return []
    places = _places(replay.module, replay.trainer.callbacks, replay.trainer_data)

    def with_values(values: dict[str, Any]) -> list[_Ran]:
        entries = {text: (*places[text], value) for text, value in values.items() if text in places}
        before = [(table, key, table[key]) for table, key, _ in entries.values()]
        try:
            return run(lambda: [table.__setitem__(key, value) for table, key, value in entries.values()])
        finally:
            for table, key, value in before:
                table[key] = value

    of_own = {text: own[text] for text in theirs}
    expected = with_values(of_own)
    if not _differences(with_values(theirs), expected):
        return []
    singly = list(theirs)[:_MAX_PLACES]
    return [t for t in singly if _differences(with_values({**of_own, t: theirs[t]}), expected)] or singly


# --- states, parts of batches, differences


def state_of(module: nn.Module) -> Callable[[], None]:
    """Returns a function that puts back attributes, and what the module's code reaches outside of it."""
    of_module, outside = ReachableState(module).snapshot(), snapshot_outside(module)

    def put_back() -> None:
        of_module()
        outside()

    return put_back


def values_of(module: nn.Module) -> list[tuple[Tensor, Tensor, bool]]:
    """Returns the parameters and buffers of a module, each with a copy, and with whether it is trained."""
    return [(t, t.detach().clone(), t.requires_grad) for t in chain(module.parameters(), module.buffers())]


def put_values(values: list[tuple[Tensor, Tensor, bool]]) -> None:
    """Puts back what `values_of` has returned."""
    for tensor, value, is_trained in values:
        if tensor.shape == value.shape:  # `.data`: a graph that has saved the tensor is still to run backward
            tensor.data.copy_(value)
        if tensor.is_leaf and tensor.requires_grad != is_trained:  # a hook has frozen or unfrozen it
            tensor.requires_grad_(is_trained)


def _counted(micro_batch: MicroBatch, has_batches: bool) -> MicroBatch:
    """Returns a batch of a stream with the number of its samples, which is not known from the order of samples."""
    is_known = micro_batch.samples > 1 or not has_batches
    size = None if is_known else num_samples(micro_batch.batch)
    return micro_batch if size is None else dataclasses.replace(micro_batch, samples=size)


def _cut(micro_batch: MicroBatch, *, alternates: bool) -> list[MicroBatch]:
    """Returns two parts of a batch: every second sample, as of two ranks; or the first third, and the rest.

    By chance halves may have equal counts of what a loss is a mean over.
    """
    num = micro_batch.samples
    end = max(num // 3, min(num // 2, 2))
    parts = [slice(0, None, 2), slice(1, None, 2)] if alternates else [slice(end), slice(end, None)]

    return [_taken(micro_batch, part) for part in parts]


def _taken(micro_batch: MicroBatch, part: slice) -> MicroBatch:
    try:
        batch = take_samples(micro_batch.batch, micro_batch.samples, part)
    except NoSamplesError as error:
        raise UnfitError(f"a batch can't be cut into samples: it has {error}") from None
    return dataclasses.replace(micro_batch, batch=batch, samples=len(range(micro_batch.samples)[part]))


def _mixed(first: MicroBatch, second: MicroBatch) -> MicroBatch:
    """Returns a batch with samples of both, which differ more than those of one; the second if they don't fit."""
    half = second.samples // 2
    if first.samples != second.samples:
        return second
    parts = [_taken(first, slice(half)), _taken(second, slice(half, None))]
    try:
        batch = join_batches([part.batch for part in parts], [part.samples for part in parts])
    except (NoSamplesError, RuntimeError):  # tensors of other shapes or dtypes
        return second
    return dataclasses.replace(second, batch=batch)


def _differences(parts: Sequence[_Ran], whole: Sequence[_Ran]) -> list[str]:
    for step, (actual, expected) in enumerate(zip(parts, whole, strict=True), start=1):
        a, b = actual.loss, expected.loss
        if abs(a - b) > _LOSS_TOLERANCE * max(abs(a), abs(b)) + 1e-6 or (a != a) != (b != b):
            return [f"the loss of step {step} is {a:.7g}, not {b:.7g}"]
        floor = _GRADIENT_FLOOR * norm(expected.gradients.values())
        for name in dict.fromkeys([*expected.gradients, *actual.gradients]):
            zero = torch.zeros((), device=next(iter(expected.gradients.values())).device)
            own, its = actual.gradients.get(name, zero), expected.gradients.get(name, zero)
            largest, difference = max(norm([own]), norm([its])), norm([own - its])
            if difference > _GRADIENT_TOLERANCE * largest + floor:
                return [f"the gradient of {name!r} in step {step} differs by {difference / largest:.0e} of its norm"]
    return []


class _Constants(TorchDispatchMode):
    """Gives constants in place of random numbers, so that a sample gets the same ones in each batch; nothing drops."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name, schema = func.overloadpacket.__name__, func._schema.arguments
        bound = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
        bound |= dict(zip((argument.name for argument in schema), args, strict=False)) | kwargs
        if name == "native_dropout":
            return bound["input"].clone(), torch.ones_like(bound["input"], dtype=torch.bool)
        if "dropout_p" in bound:
            return func(**{**bound, "dropout_p": 0.0})
        if "generator" in bound:
            bound["generator"] = None
        random = get_random_state()
        target = bound["self"] if name.endswith("_") else func(**bound)
        set_random_state(random)
        if name == "randperm":
            return target.copy_(torch.arange(len(target)))
        return target.copy_(torch.as_tensor(_constant(name, bound), dtype=target.dtype, device=target.device))


def _constant(name: str, bound: dict[str, Any]) -> Any:
    if name.startswith("bernoulli"):
        return 1
    if name.startswith(("randint", "random")):
        return bound.get("low", bound.get("from", 0)) or 0
    if name.startswith(("randn", "normal")):
        return bound.get("mean", 0.0) + 0.5 * bound.get("std", 1.0)
    if name.startswith(("rand", "uniform")):
        low = bound.get("from", 0.0)
        return low + 0.5 * (bound.get("to", 1.0) - low)
    raise UnfitError(f"its step draws by `{name}`")
