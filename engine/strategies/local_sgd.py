"""`local_sgd` and `diloco`: each rank trains by itself for H optimizer steps, then the ranks' weights are averaged.

Post-local SGD (Lin et al. 2018, arXiv:1808.07217) and DiLoCo (Douillard et al. 2023, arXiv:2311.08105) differ only in
their parameters. Let a be the anchor, the weights of all ranks after the last exchange, and x_i the current weights of
rank i. Phases of an exchange, after every H-th step: 1. each rank computes a - x_i, bucket by bucket (local); 2. the
mean d of these over the ranks: an all-reduce of 4 n bytes in fp32, fewer under `compression`; 3. an outer SGD uses d as
the gradient of a, and all x_i become a (local): with a learning rate of 1 and no momentum, as in `local_sgd`, a is then
the mean of the weights; 4. the mean of the floating-point buffers (BatchNorm's statistics): an all-reduce. Phases 2 and
4 block. The H - 1 steps between send nothing, so on average a step sends 1/H of the bytes of a `ddp` step.

In d a rank counts by the samples that it has trained on since the last exchange: by their number, which the loader
knows of all ranks, or by their weights if `training_step` returns them; the sum of these takes one more all-reduce, of
8 bytes. So a rank without data, which moves by its optimizer's momentum only, leaves the others as they are. All other
means count each rank once.

With `fragments=P` (Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512) each of P parts of the parameters has its
exchange every H steps, H/P steps after that of the part before; phase 4 follows the last part. With
`overlap_steps=T` phase 2 runs beside training, and phase 3 follows T steps later: x_i becomes the new anchor plus what
rank i has moved in these T steps. Every move is so exchanged once, where that paper mixes the anchor with x_i. Phase 3
then blocks only if phase 2 takes longer than T steps; until then the copy of x_i and the mean are kept.

In a local step the loss is the mean over the rank's own samples. Clipping, loss scale and optimizer state are the
rank's own, too. For the first `warmup` steps the ranks train as under `ddp`.

Within H steps the module has different weights on each rank. Evaluation, saves and the end of training use their mean,
which takes an all-reduce; then each rank continues with its own weights. A checkpoint has these too, and the optimizer
state of each rank: a run of the same layout continues bit for bit, a run of another layout continues from the mean,
with rank 0's optimizer state. Averages of weights (`averages.py`) are of each rank's weights, and become their mean on
all ranks: it is the average of the mean, whichever of them each rank goes on from.

If ranks may be lost (`loop/rank_loss.py`), phases 1 and 2 end before phase 3 begins, so that they can be repeated by
the ranks that are left, and an exchange takes as much memory as the weights once more. One that runs beside training is
dropped instead: what the ranks that are left have moved is a part of their next changes.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ..compression import AllReduceHook, Bucket, CommHook, CountingGroup, ParamSlice
from ..distributed.buckets import copy, flatten, in_buckets, unflatten
from ..distributed.connections import MEETING_AGAIN, cut_connections
from .averages import values_of_averages
from .compressing import CommHookMixin
from .ddp import DDP
from .options import DDPOptions, DiLoCoOptions, LocalSGDOptions
from .step_guard import flag_of_rank

__all__ = ["LocalSGD"]


class LocalSGD(DDP):
    """`ddp` during the warm-up; then ranks that train alone, and average their weights every H steps.

    Args:
        options: `DiLoCoOptions` for an outer SGD with momentum, `LocalSGDOptions` for the mean.
        launcher: suffix of the flag, see `flags.LAUNCHERS`.
        comm_hook: how changes of weights are sent in an exchange; the warm-up sends gradients uncompressed.
    """

    capabilities = dataclasses.replace(
        DDP.capabilities,
        # A checkpoint has rank 0's optimizer state in the usual place; that of the other ranks is in `state_of_rank`.
        optimizer_state_partitioned=True,
        steps_alone=True,
    )

    def __init__(self, options: LocalSGDOptions, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        common = ("find_unused_parameters", "bucket_cap_mb", "timeout_s")
        super().__init__(DDPOptions(**{name: getattr(options, name) for name in common}), launcher, comm_hook)
        self.local = options
        self._forget()

    def __repr__(self) -> str:
        name = "diloco" if isinstance(self.local, DiLoCoOptions) else "local_sgd"
        return repr(f"{name}_{self.launcher_suffix}" if self.launcher_suffix else name)

    def _forget(self) -> None:
        self._hook: CommHook | None = None
        self._warmup: AllReduceHook | None = None
        self._means: CountingGroup | None = None
        self._anchor: _OuterOptimizer | None = None
        self._under_way: deque[_Exchange] = deque()
        self._work: list[_Work] = []  # by fragment, since its change was last sent
        self._is_weighed = False
        self._is_apart = False
        self._own: list[Tensor] | None = None  # the rank's own weights, while the module has the mean
        self._loaded: tuple[dict[str, Any], dict[str, Any]] = {}, {}

    @property
    def averages_gradients(self) -> bool:  # type: ignore[override]
        """See `EngineStrategy`: in the warm-up only."""
        return isinstance(self.model, DistributedDataParallel)

    def agree(self, flag: Tensor) -> Tensor:
        """See `EngineStrategy`: a rank that trains alone leaves out its own steps."""
        if self.averages_gradients:
            return super().agree(flag)
        return flag_of_rank(flag, self)

    def may_leave_out(self) -> None:
        """See `EngineStrategy`: the comm hook sends changes of weights, which no step that is left out has made."""

    averages_buffers = True  # with the weights

    @property
    def active_hook(self) -> CommHook | None:
        """The comm hook that averages the changes of weights."""
        return self._hook

    @property
    def wires(self) -> list[CountingGroup]:
        """The groups that count the warm-up's gradients, the exchanges, and the means for evaluation and saves."""
        hooks = [hook.wire for hook in (self._warmup, self._hook) if hook is not None]
        return [wire for wire in (*hooks, self._means) if wire is not None]

    def _register_ddp_hooks(self) -> None:  # Lightning: DDPStrategy._register_ddp_hooks, called when DDP is there
        assert isinstance(self.model, DistributedDataParallel)
        self._forget()
        if self.counts_traffic and self.local.warmup:
            self._warmup = AllReduceHook()
            self._warmup.attach(self.model, self.loss_scaler, self._timeout)
        self._hook = self.comm_hook or AllReduceHook()
        self._hook.quantity = "change"
        # Weights have no loss scale.
        if self.local.overlap_steps:
            self._hook.begin_beside(self.model.module, timeout=self._timeout)
        else:
            self._hook.begin(self.model.module, self._hook.wire or CountingGroup())
        self._means = CountingGroup()

    # --- steps

    def on_train_start(self) -> None:
        """Called when everything is restored."""
        super().on_train_start()
        if self._num_steps >= self.local.warmup:
            self._begin_local_phase()
        else:
            self._loaded = {}, {}  # saved by a run with a shorter warm-up

    @property
    def _num_steps(self) -> int:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.global_step

    def _begin_local_phase(self) -> None:
        """Begins the phase in which each rank trains alone."""
        module = self.lightning_module
        assert module is not None
        assert self._hook is not None
        assert self._means is not None
        means = self._means
        self._change(self._buffers(), lambda flat: means.start_broadcast(flat, 0)())
        self.model = module  # without DistributedDataParallel, which would broadcast rank 0's buffers
        trained = dict(self._trained_parameters())
        self._anchor = _OuterOptimizer(
            trained,
            self._hook,
            fragments=self.local.fragments,
            largest_mb=self.local.bucket_cap_mb,
            outer=self.local.outer,
        )
        self._work = [_Work()] * self._anchor.num_fragments
        shared, own = self._loaded
        if "anchor" in shared:  # otherwise another strategy has saved it
            self._anchor.load_state_dict(shared)
        if own:
            for optimizer, state in zip(self.optimizers, own["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self.precision_plugin.load_state_dict(own["precision"])
        if "weights" in own:
            copy(own["weights"], self._weights())
            self._is_apart = True
        if len(own.get("work", ())) == self._anchor.num_fragments:
            self._work = [_Work(*saved) for saved in own["work"]]
        for saved in own.get("under_way", ()):
            # With other parts than those of the saved run, what is under way is exchanged with the next change.
            if (exchange := self._anchor.loaded(saved)) is not None:
                self._under_way.append(exchange)

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | Any | None = None,
        **kwargs: Any,
    ) -> Any:
        """Steps the optimizer, and exchanges weights after every H-th step."""
        # Skips CommHookMixin's method, since the comm hook takes no part in a local step.
        step = self._num_steps + 1
        output = super(CommHookMixin, self).optimizer_step(optimizer, closure, model, **kwargs)
        if self.ends_step(optimizer):
            self._end_step(step)
        return output

    def _end_step(self, step: int) -> None:
        if self._anchor is not None:
            self._is_apart = True
            self._note_work()
            self._exchange(step)
        elif step == self.local.warmup:
            self._begin_local_phase()

    def _note_work(self) -> None:
        """Counts what the step was made of."""
        assert self.lightning_module is not None
        if self.weight_of_step is None or not self.lightning_module.automatic_optimization:
            return  # the ranks count alike
        own, of_all = self.weight_of_step()
        self._is_weighed |= of_all is None  # for good: a step without a loss has no weight, on one rank perhaps
        work = _Work(own, None if self._is_weighed else of_all)
        self._work = [before.plus(work) for before in self._work]

    def post_backward(self, closure_loss: Tensor) -> None:
        """Checks the reduction; while an exchange is under way, the comm hook is its thread's, and read at its end."""
        if not self._under_way:
            super().post_backward(closure_loss)

    def finish_micro_batch(self, step: Callable[[Callable[..., Any]], Tensor], synchronises: bool) -> None:
        """See `CommHookMixin`; does nothing while each rank trains alone."""
        if self.averages_gradients:
            super().finish_micro_batch(step, synchronises)

    def begin_again(self) -> None:
        """See `CommHookMixin`."""
        if self.averages_gradients:
            super().begin_again()

    def _exchange(self, step: int) -> None:
        """Ends the exchanges that are due after a step, and begins that of the part whose turn it is, if any."""
        anchor, every = self._anchor, self.local.sync_every
        assert anchor is not None
        turns = [every * (part + 1) // anchor.num_fragments % every for part in range(anchor.num_fragments)]
        turn = (step - self.local.warmup) % every
        fragment = turns.index(turn) if turn in turns else None
        # One of the same part is there only in a run that was resumed with other options.
        while self._under_way and (self._under_way[0].due_step <= step or self._under_way[-1].fragment == fragment):
            self._end_exchange()
        if fragment is None:
            return
        self._check_trained()
        if self.local.overlap_steps:
            self._under_way.append(anchor.begun(fragment, step + self.local.overlap_steps, self._work[fragment]))
        else:
            anchor.step(fragment, self._agreed(lambda: anchor.means(fragment, self._work[fragment])))
            assert self._hook is not None
            self._hook.on_step_end()
        self._work[fragment] = _Work()
        if turn == 0:
            self._average(self._buffers())
        self._is_apart = self.local.overlap_steps > 0 or anchor.num_fragments > 1
        if self.comm_hook is not None and not self.local.overlap_steps:
            self.comm_hook.raise_if_bad()

    def _end_exchange(self) -> None:
        """Takes the outer step with the means of the oldest exchange that is under way."""
        assert self._anchor is not None
        means = list(self._agreed(lambda: self._under_way[0].means() if self._under_way else ()))
        if not self._under_way:  # it was lost with a rank
            return
        exchange = self._under_way.popleft()
        # All ranks have the same means, and so come here together.
        if self.comm_hook is not None and not all(mean.isfinite().all() for mean in means):
            self.comm_hook.finish()  # of later exchanges, too: the ranks gather who has sent it
            self.comm_hook.raise_if_bad()
        self._anchor.step(exchange.fragment, means, exchange.sent)

    def _check_trained(self) -> None:
        """Refuses parameters that became trainable after the anchor was created: they would differ between ranks."""
        assert self._anchor is not None
        anchored = set(self._anchor.parameters)
        new = [name for name, parameter in self._trained_parameters() if parameter not in anchored]
        if new:
            raise ValueError(
                f"under {self!r}, these parameters began to be trained in mid-run: {', '.join(new)}. Set"
                " `requires_grad` before `fit`, or choose strategy 'ddp'."
            )

    # --- the mean of the ranks' weights

    def _buffers(self) -> list[Tensor]:
        assert self.lightning_module is not None
        return [buffer for buffer in self.lightning_module.buffers() if buffer.is_floating_point()]

    def _weights(self) -> list[Tensor]:
        assert self._anchor is not None
        return [*self._anchor.parameters, *self._buffers()]

    def _average(self, tensors: list[Tensor]) -> None:
        means = self._means
        assert means is not None
        self._change(tensors, lambda flat: means.all_reduce(flat.div_(means.size)))

    def _change(self, tensors: list[Tensor], collective: Callable[[Tensor], Tensor]) -> None:
        """Replaces tensors by what a collective makes of them, bucket by bucket."""
        means, buckets = self._means, list(in_buckets(tensors, self.local.bucket_cap_mb))
        assert means is not None
        if not buckets:
            return

        def results() -> Generator[Tensor, None, None]:
            for index, bucket in enumerate(buckets):
                means.bucket = index
                yield collective(flatten(bucket))

        for bucket, result in zip(buckets, self._agreed(results), strict=True):
            copy(unflatten(result, bucket), bucket)

    def _agreed(self, collect: Callable[[], Iterable[Tensor]]) -> Iterable[Tensor]:
        """Returns the results of collectives, one by one; if a rank may be lost, after the last one."""
        return collect() if self.repeats is None else self.repeats(lambda: list(collect()))

    def _load_average(self) -> None:
        """Puts the mean of the ranks' weights into the module."""
        # A rank that saves because it failed has no other ranks to average with.
        if self._anchor is None or self._own is not None or not dist.is_initialized():
            return
        assert self.lightning_module is not None
        values = values_of_averages(self.lightning_module.trainer)
        of_averages = [value for value in values if value.is_floating_point()]
        self._average(of_averages)
        if self._is_apart or of_averages:
            weights = self._weights()
            self._own = [weight.detach().clone() for weight in weights]
            self._average(weights)

    def _restore_own_weights(self) -> None:
        """Restores the rank's own weights."""
        if self._own is not None:
            copy(self._own, self._weights())
            self._own = None

    @contextmanager
    def consolidated_weights(self) -> Generator[None, None, None]:
        """See `DistributedStrategy`."""
        for exchange in self._under_way if dist.is_initialized() else ():  # as in `_load_average`
            exchange.means()  # the comm hook has state, too, which is saved within this context
        if self._own is not None:
            yield
            return
        self._load_average()
        try:
            yield
        finally:
            self._restore_own_weights()

    def on_validation_start(self) -> None:
        """Called before each validation."""
        super().on_validation_start()
        self._load_average()

    def on_validation_end(self) -> None:
        """Called after each validation."""
        super().on_validation_end()
        self._restore_own_weights()

    def on_train_end(self) -> None:
        """Gives all ranks the mean of their weights."""
        while self._under_way:
            self._end_exchange()
        super().on_train_end()
        self._load_average()
        self._own, self._is_apart = None, False

    @property
    def held_bytes(self) -> int:
        """The bytes of the anchor and its momentum, and of what is under way."""
        of_anchor = 0 if self._anchor is None else self._anchor.held_bytes
        return of_anchor + sum(2 * tensor.nbytes for exchange in self._under_way for tensor in exchange.sent)

    # --- a lost rank

    @property
    def steps_apart(self) -> bool:  # type: ignore[override]
        """See `EngineStrategy`: without a collective, the ranks of the local phase wait for each other in exchanges."""
        return self._anchor is not None

    def loss_in_words(self, num_steps: int) -> str:
        """See `EngineStrategy`."""
        if self._anchor is None:
            return ""
        exchange = num_steps - (num_steps - self.local.warmup) % self.local.sync_every
        at = f"exchange after step {exchange}" if self._anchor.num_fragments == 1 else "last exchange of each fragment"
        return (
            f" Lost with it are its optimizer's moments, and the changes of its weights since the {at}, or since the"
            " one before if it was lost in that."
        )

    def end_step_of_others(self) -> None:
        """See `EngineStrategy`."""
        self._end_step(self._num_steps + 1)

    def leave_groups(self) -> None:
        """See `EngineStrategy`; a mean in which the lost rank may have had a part is dropped.

        What the ranks that are left have sent in exchanges under way is a part of their next changes.
        """
        self._restore_own_weights()
        for exchange in self._under_way:
            self._work[exchange.fragment] = self._work[exchange.fragment].plus(exchange.work)
        self._work = [_Work(work.own, None) for work in self._work]  # without the lost rank's
        self._under_way.clear()
        cut_connections()
        for hook in (self._hook, self._warmup):
            if hook is not None:
                hook.leave_ranks()
        if self.averages_gradients:
            super().leave_groups()
        else:
            super(DDP, self).leave_groups()

    def regroup(self, devices: Sequence[Any], rank: int, store: dist.Store) -> None:
        """See `EngineStrategy`."""
        if self.averages_gradients:
            super().regroup(devices, rank, store)
            return
        super(DDP, self).regroup(devices, rank, store)
        assert self._hook is not None
        assert self._means is not None
        self._hook.join_ranks(MEETING_AGAIN)
        if (group := self._hook.wire.group) is not None:  # type: ignore[union-attr]
            group.set_timeout(self._timeout or default_pg_timeout)
        self._means.join(None)

    # --- checkpoints

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """See `optimizer_state_partitioned`."""
        state = super().optimizer_state(optimizer)
        return state if self._anchor is None or self.is_global_zero else {**state, "state": {}}

    def shared_state(self) -> dict[str, Any]:
        """See `DistributedStrategy`."""
        return {} if self._anchor is None else self._anchor.state_dict()

    def state_of_rank(self) -> dict[str, Any]:
        """See `DistributedStrategy`; called within `consolidated_weights`."""
        if self._anchor is None:
            return {}
        states = [super(LocalSGD, self).optimizer_state(optimizer) for optimizer in self.optimizers]
        state: dict[str, Any] = {"optimizers": states, "precision": self.precision_plugin.state_dict()}
        state["work"] = [work.state() for work in self._work]
        if self._under_way and dist.is_initialized():  # as in `_load_average`
            state["under_way"] = [self._anchor.state_of(exchange) for exchange in self._under_way]
        return state if self._own is None else {**state, "weights": self._own}

    def load_state(self, shared: dict[str, Any], of_rank: dict[str, Any]) -> None:
        """See `DistributedStrategy`; takes effect when training starts."""
        self._loaded = shared, of_rank


# --- the outer step
# The anchor, and the outer step that updates it: the mathematics of `local_sgd.py`.


class _Work(NamedTuple):
    """The work that a change of weights is of: a number of samples, or the sum of their weights."""

    own: Any = 0
    of_all: Any = 0
    """The work of all ranks together; None if only a sum over them says it."""

    def plus(self, other: "_Work") -> "_Work":
        is_known = self.of_all is not None and other.of_all is not None
        return _Work(self.own + other.own, self.of_all + other.of_all if is_known else None)

    def state(self) -> list[float | None]:
        """The arguments that make it again."""
        return [float(self.own), self.of_all]


class _Exchange(NamedTuple):
    """An exchange that runs beside training."""

    fragment: int
    due_step: int
    """The step after which its result is used."""
    work: "_Work"
    sent: list[Tensor]
    """The rank's weights as it began, bucket by bucket."""
    means: Callable[[], list[Tensor]]
    """Waits for the means of the ranks' changes, bucket by bucket."""


class _OuterOptimizer:
    """The anchor (the weights that all ranks had after the last exchange), and the outer SGD that updates it.

    Args:
        parameters: the trained parameters, by name.
        hook: comm hook that averages over the ranks; it has begun.
        fragments: number of parts with an exchange of their own.
        largest_mb: size of a bucket, in MiB.
        outer: arguments of `torch.optim.SGD`.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        hook: CommHook,
        *,
        fragments: int,
        largest_mb: float,
        outer: dict[str, Any],
    ) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._hook = hook
        self._buckets: list[list[Tensor]] = []
        self._places: list[range] = []
        """The indices of each fragment's buckets."""
        for part in _parts(list(parameters.values()), fragments):
            start = len(self._buckets)
            self._buckets += in_buckets(part, largest_mb)
            self._places.append(range(start, len(self._buckets)))
        self._flats = [flatten(bucket) for bucket in self._buckets]
        self._outer = SGD(self._flats, **outer)

    @property
    def num_fragments(self) -> int:
        """The number of parts, at most that of parameters."""
        return len(self._places)

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that the anchor has a copy of."""
        return list(self._names)

    @property
    def held_bytes(self) -> int:
        """The bytes of the anchor itself, and of its momentum."""
        momenta = [value for state in self._outer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self._flats, *momenta) if isinstance(tensor, Tensor))

    def means(self, fragment: int, work: _Work) -> Generator[Tensor, None, None]:
        """Phases 1 and 2, bucket by bucket: yields the means of the ranks' changes, weighted by their work."""
        factor = self._hook.factor_of(*work)
        for index in self._places[fragment]:
            change = self._change(index, flatten(self._buckets[index]))
            change.gradients.mul_(factor)
            yield self._hook.run(change)

    def begun(self, fragment: int, due_step: int, work: _Work) -> _Exchange:
        """Phase 1, and the beginning of phase 2."""
        sent = [flatten(self._buckets[index]) for index in self._places[fragment]]
        changes = [self._change(index, weights) for index, weights in zip(self._places[fragment], sent, strict=True)]
        return _Exchange(fragment, due_step, work, sent, self._hook.run_beside(changes, *work))

    def _change(self, index: int, weights: Tensor) -> Bucket:
        members = tuple(ParamSlice(self._names[p], tuple(p.shape)) for p in self._buckets[index])
        return Bucket(index, self._flats[index] - weights, members)

    def step(self, fragment: int, changes: Iterable[Tensor], sent: list[Tensor] | None = None) -> None:
        """Phase 3, with what `means` yields, or the means of an exchange and the weights that it has `sent`."""
        for place, (index, change) in enumerate(zip(self._places[fragment], changes, strict=True)):
            parameters, anchor = self._buckets[index], self._flats[index]
            moved = None if sent is None else flatten(parameters).sub_(sent[place])
            anchor.grad = change
            self._outer.step()
            anchor.grad = None
            copy(unflatten(anchor if moved is None else moved.add_(anchor), parameters), parameters)

    def state_of(self, exchange: _Exchange) -> dict[str, Any]:
        """The state of an exchange, by the names of parameters: views."""
        places = self._places[exchange.fragment]
        sent, means = (self._by_name(flats, places) for flats in (exchange.sent, exchange.means()))
        about = {"fragment": exchange.fragment, "due_step": exchange.due_step, "work": exchange.work.state()}
        return {**about, "sent": sent, "means": means}

    def loaded(self, state: dict[str, Any]) -> _Exchange | None:
        """The exchange that a `state_of` is of; None if its parameters are no fragment any more."""
        places = self._places[state["fragment"]] if state["fragment"] < self.num_fragments else range(0)
        sent, means = ([torch.empty_like(self._flats[index]) for index in places] for _ in range(2))
        for flats, saved in ((sent, state["sent"]), (means, state["means"])):
            views = self._by_name(flats, places)
            if views.keys() != saved.keys():
                return None
            for name, view in views.items():
                view.copy_(saved[name])
        work = _Work(*state.get("work", ()))
        return _Exchange(state["fragment"], state["due_step"], work, sent, lambda: means)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The anchor and the momentum of each parameter, by name: views."""
        momenta = [self._outer.state[flat].get("momentum_buffer") for flat in self._flats]
        every = range(len(self._flats))
        return {"anchor": self._by_name(self._flats, every), "momentum": self._by_name(momenta, every)}

    def load_state_dict(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Restores a `state_dict`, which may have had other buckets; values that it lacks are not changed."""
        momenta = [torch.zeros_like(flat) for flat in self._flats] if state["momentum"] else [None] * len(self._flats)
        for flats, saved in ((self._flats, state["anchor"]), (momenta, state["momentum"])):
            for name, view in self._by_name(flats, range(len(self._flats))).items():
                view.copy_(saved.get(name, view))
        for flat, momentum in zip(self._flats, momenta, strict=True):
            if momentum is not None:
                self._outer.state[flat]["momentum_buffer"] = momentum

    def _by_name(self, flats: Iterable[Tensor | None], places: range) -> dict[str, Tensor]:
        return {
            self._names[p]: view
            for flat, index in zip(flats, places, strict=True)
            if flat is not None
            for p, view in zip(self._buckets[index], unflatten(flat, self._buckets[index]), strict=True)
        }


def _parts(parameters: list[Tensor], num_parts: int) -> list[list[Tensor]]:
    """Returns parameters in parts of about as many values, in their order, without empty parts."""
    parts: list[list[Tensor]] = [[] for _ in range(num_parts)]
    total, start = max(1, sum(p.numel() for p in parameters)), 0
    for p in parameters:
        parts[num_parts * (2 * start + p.numel()) // (2 * total + 1)].append(p)  # by its middle
        start += p.numel()
    return [part for part in parts if part] or [[]]
