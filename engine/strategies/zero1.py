"""`zero1`: `ddp` with the optimizer's state divided among the ranks, parameter by parameter.

Stage 1 of ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): of AdamW's two moments, 8 bytes a parameter in fp32, each
of W ranks keeps 1/W. torch's `ZeroRedundancyOptimizer` builds the optimizer itself; here the optimizers that
`configure_optimizers` returns are kept, with their groups and schedulers, and no rank has to gather all state for a
checkpoint. An optimizer that needs the gradients or the state of all parameters at once, as `optimizer_trial.py` finds
out, or whose state a hook reads, is not divided: each rank takes its whole step, as under `ddp`.

Phases of an optimizer step: 1. all-reduces of the gradients beside backward, as under `ddp`, compressed or not;
2. clipping, by whole gradients; then each rank steps its own parameters, with the updates of `ddp` bit for bit, while
the gradients of all other parameters are hidden from the optimizer (local); 3. the owners broadcast their parameters,
bucket by bucket: on average 4 n (W-1)/W bytes a rank. Blocks at the end of phase 3.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..checkpoint.state_tree import mapped, merged
from ..compression import CommHook, CountingGroup
from ..distributed.buckets import copy, flatten, in_buckets, unflatten
from ..distributed.object_group import WORLD
from .ddp import DDP
from .hook_code import reader_of_state
from .layout import STATE_IS_LOST
from .optimizer_trial import habits_of
from .options import DEFAULT_BUCKET_MB, DDPOptions
from .parameter_hooks import call_before_use

__all__ = ["Zero1"]

_NUM_IN_FLIGHT = 2
"""The number of concurrent broadcasts: one is sent while the next one is packed."""


class _Owners:
    """Maps each parameter to the rank that steps it; equal on all ranks.

    Args:
        num_ranks: W.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_values = [0] * num_ranks
        self._owners: dict[Tensor, int] = {}

    def assign(self, parameters: list[Tensor]) -> None:
        """Assigns each parameter without an owner, the largest first, to the rank with the fewest values so far.

        Frozen parameters come last, so that those that are trained are evenly divided.
        """
        new = dict.fromkeys(parameter for parameter in parameters if parameter not in self._owners)
        for parameter in sorted(new, key=lambda parameter: (not parameter.requires_grad, -parameter.numel())):
            owner = self._num_values.index(min(self._num_values))
            self._num_values[owner] += parameter.numel()
            self._owners[parameter] = owner

    def give(self, parameter: Tensor, owner: int) -> None:
        """Makes a rank the owner of a parameter, which takes the place of another one."""
        self._owners[parameter] = owner

    def __getitem__(self, parameter: Tensor) -> int:
        return self._owners[parameter]

    def __contains__(self, parameter: Tensor) -> bool:
        return parameter in self._owners


class _Bucket(NamedTuple):
    """Parameters of one owner that are sent together."""

    owner: int
    parameters: list[Tensor]


class Zero1(DDP):
    """`ddp` in which each rank has the optimizer's state of its own share of the parameters."""

    capabilities = dataclasses.replace(
        DDP.capabilities,
        optimizer_state_partitioned=True,
    )
    returns_to_snapshot = STATE_IS_LOST

    def __init__(self, options: DDPOptions, launcher: str = "", comm_hook: CommHook | None = None) -> None:
        super().__init__(options, launcher, comm_hook)
        self._owners: _Owners | None = None
        self._owned: dict[str, Tensor] = {}
        self._updates: CountingGroup | None = None
        self._hooks: list[RemovableHandle] = []
        self._hidden_by: dict[Optimizer, int] = {}
        """The key of the hook before the steps of each optimizer that is divided."""
        self._undivided: list[Optimizer] = []
        self._stepped: list[Tensor] = []
        self._aside: list[tuple[Tensor, Tensor | None]] = []

    def connect(self, model: LightningModule) -> None:
        """Called at the start of each run."""
        super().connect(model)
        self._owners, self._updates = None, None

    @property
    def owners(self) -> _Owners:
        """The owners of the module's parameters, drawn once in a run: a checkpoint is read before there are optimizers.

        Parameters that are added later get an owner when an optimizer first steps them.
        """
        if self._owners is None:
            assert self.lightning_module is not None
            self._owners = _Owners(self.layout.world_size)
            self._owned = dict(self.lightning_module.named_parameters())
            self._owners.assign(list(self._owned.values()))
        return self._owners

    def keeps_state_of(self, parameter: Tensor) -> bool:
        """See `DistributedStrategy`."""
        return parameter not in self.owners or self.owners[parameter] == self.global_rank

    @property
    def wires(self) -> list[CountingGroup]:
        """The groups that count the gradients and the parameters."""
        return [*super().wires, *([] if self._updates is None else [self._updates])]

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Creates the optimizers, and adds hooks before and after the steps of those that can be divided."""
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        owners = self.owners
        for name, parameter in self.lightning_module.named_parameters():
            if name in self._owned:  # the move to the device may have replaced it
                owners.give(parameter, owners[self._owned[name]])
        self._updates = CountingGroup()
        self._undivided = []
        readers = self.lightning_module, *trainer.callbacks, *(c.scheduler for c in self.lr_scheduler_configs)  # type: ignore[attr-defined]
        line = reader_of_state(readers, self.optimizers)
        for optimizer in self.optimizers:
            reason = habits_of(optimizer).of_others_or_state
            if line and not reason:
                reason = (
                    f"{line} reads the state of an optimizer, of which a rank would have a part (code that is content"
                    " with a part asks `trainer.engine_strategy.keeps_state_of(p)`)"
                )
            if reason:
                self._undivided.append(optimizer)
                rank_zero_warn(
                    f"strategy {self!r}: {reason}. So each rank takes its whole step and has all of its state, as under"
                    " 'ddp', and no memory is saved: switch that off, if it is an option, or choose 'fsdp'."
                )
                continue
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._hidden_by[optimizer] = self._hooks[-1].id
            self._hooks.append(optimizer.register_step_post_hook(self._after_step))
            # torch: first of all, so that hooks of the user see all parameters as they are after the step.
            optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[-1].id, last=False)  # type: ignore[attr-defined]

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Steps; hooks before the step that the user has added since see all gradients."""
        if optimizer in self._hidden_by:  # torch: the order of the hooks
            optimizer._optimizer_step_pre_hooks.move_to_end(self._hidden_by[optimizer])  # type: ignore[attr-defined]
        return super().optimizer_step(optimizer, *args, **kwargs)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns an optimizer's state of this rank's own parameters, of which a checkpoint is put together."""
        state: Any = super().optimizer_state(optimizer)
        others = {number for number, p in enumerate(_all_of(optimizer)) if not self.keeps_state_of(p)}
        return {**state, "state": {key: value for key, value in state["state"].items() if key not in others}}

    def load_state(self, shared: dict[str, Any], of_rank: dict[str, Any]) -> None:
        """Also gives all ranks the whole state of optimizers that are not divided: each has read its own share."""
        super().load_state(shared, of_rank)
        for optimizer in self._undivided:
            states = WORLD.all_gather_object(mapped(Tensor.cpu, optimizer.state_dict()))
            optimizer.load_state_dict(merged(states))

    def teardown(self) -> None:
        """Removes the hooks of the optimizers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._hidden_by.clear()
        super().teardown()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Called by torch before `optimizer.step`; gradients come with the closure, if there is one."""
        self._stepped = []
        return call_before_use(self._set_aside, optimizer, args, kwargs)

    def _set_aside(self, optimizer: Optimizer) -> None:
        """Hides the gradients of other ranks' parameters: torch's optimizers skip parameters without a gradient."""
        # Those that are frozen since backward are stepped as well.
        self._stepped = [p for p in _all_of(optimizer) if p.requires_grad or p.grad is not None]
        self.owners.assign(self._stepped)
        theirs = [p for p in self._stepped if self.owners[p] != self.global_rank]
        self._aside = [(p, p.grad) for p in theirs]
        for p in theirs:
            p.grad = None
            optimizer.state.pop(p, None)  # some optimizers create it before the first step, others load all of it

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Called by torch after `optimizer.step`: phase 3, and restores all gradients."""
        if not self._stepped:  # an optimizer that does not call its closure has stepped other ranks' parameters, too
            self._set_aside(optimizer)
        for p, gradient in self._aside:
            p.grad = gradient
        self._aside.clear()
        pending: deque[Callable[[], None]] = deque()
        for index, bucket in enumerate(self._buckets()):
            if len(pending) == _NUM_IN_FLIGHT:
                pending.popleft()()
            pending.append(self._start(index, bucket))
        for finish in pending:
            finish()

    def _buckets(self) -> Iterator[_Bucket]:
        shares: dict[int, list[Tensor]] = {}
        for p in self._stepped:
            shares.setdefault(self.owners[p], []).append(p)
        for owner, parameters in sorted(shares.items()):
            in_parts = in_buckets(parameters, self.options.bucket_cap_mb or DEFAULT_BUCKET_MB)
            yield from (_Bucket(owner, bucket) for bucket in in_parts)

    def _start(self, index: int, bucket: _Bucket) -> Callable[[], None]:
        """Begins to send or to receive a bucket; returns the function that finishes it."""
        assert self._updates is not None
        owner, parameters = bucket
        is_mine = owner == self.global_rank
        room = sum(p.numel() for p in parameters)
        flat = flatten(parameters) if is_mine else parameters[0].new_empty(room)
        self._updates.bucket = index
        wait = self._updates.start_broadcast(flat, owner)

        def finish() -> None:
            values = unflatten(wait(), parameters)
            if not is_mine:
                copy(values, parameters)

        return finish


def _all_of(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
