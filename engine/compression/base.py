"""Base of compressions: straight-line code that averages a bucket over the ranks and sends less for it.

Phases of each bucket, all of them beside backward: 1. note which gradients are not finite (local); 2. `average`, the
method's own collectives; 3. note whether the average is finite (local). On the CPU they run in a thread, bucket after
bucket, on a GPU on two streams in turn, so that a bucket is compressed while the one before is sent: in both the
collectives of several buckets come in the same order on every rank, however many a method has. (Torch's PowerSGD starts
its second all-reduce where the first one ends, which under gloo may be in another order on each rank.)
"""

import math
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .background import Background
from .bucket import Bucket, Member, wide
from .memory import Memory
from .wire import Wire, mark

__all__ = ["CommHook", "NonFiniteGradientError"]


class NonFiniteGradientError(RuntimeError):
    """A gradient was infinite or not a number; compression would carry it on in what it remembers."""


class CommHook(ABC):
    """Turns buckets of local gradients into their average over all ranks.

    A method implements `average`, and `memories` if it remembers anything.

    Attributes:
        flag: by which it was made.
        num_calls: buckets averaged so far.
        num_plain_bytes: bytes this rank would have sent so far of the gradients as they are.
        overlaps: whether backward goes on while buckets are averaged.
        step: optimizer steps done.
        wire: what it sends through; None before training.
        moments: of each bucket since the list was last cleared: its index, when its gradients were ready, when they
            were averaged (seconds or CUDA events); None: not kept.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    reduces_shards: ClassVar[bool] = False
    """Whether it has a `reduce_scatter`, and so works where no rank ever sees the average of all gradients."""
    takes_dtype: ClassVar[bool] = False
    """Whether what it sends may be sent in 16 bit: ``powersgd+fp16``."""

    def __init__(self) -> None:
        self.flag = self.name
        self.num_calls = 0
        self.num_plain_bytes = 0
        self.step = 0
        self.wire: Wire | None = None
        self.moments: list[tuple[int, Any, Any]] | None = None
        self.send_dtype: torch.dtype | None = None
        self.of = "gradient"
        """The kind of values that are averaged: ``"gradient"``, or ``"change"`` of weights."""
        self.is_checked = False
        """Whether `check` has seen the module that is trained."""
        self._scaler: torch.amp.GradScaler | None = None
        self._is_on_gpu = False
        self._names: dict[Tensor, str] = {}
        self._buckets: dict[int, tuple[list[Tensor], tuple[Member, ...]]] = {}
        self._background: Background | None = None
        self._greatest_norms: dict[int, _Norms] = {}
        self._greatest_sums: dict[int, Tensor] = {}
        self.may_repeat = False
        """Whether a step may be done again whose buckets have been averaged already; before training."""
        self.finds_unused = False
        """Whether DDP leaves gradients alone that no rank has computed, whatever their average."""
        self.sees_shards_only = False
        """Whether each rank knows a part of the averages only, as `reduce_scatter` has it."""

    # --- what a method says

    @abstractmethod
    def average(self, bucket: Bucket, wire: Wire) -> None:
        """Replaces ``bucket.gradients`` by their average over the ranks of `wire`; may call its collectives."""

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: Wire) -> None:
        """Writes this rank's part [n] of the average of `whole` [W n] over the ranks of `wire` to `shard`."""
        raise NotImplementedError(f"{self.name} has no reduce-scatter")

    def memories(self) -> dict[str, Memory]:
        """Returns its memories by name. ``"residuals"`` is what each rank has not sent yet; all else is the same on
        all ranks."""
        return {}

    def check(self, module: nn.Module) -> None:
        """Checks that the gradients of `module` can be compressed, before any is.

        Raises:
            ValueError: gradients that will be complex or sparse.
        """
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not parameter.dtype.is_floating_point:
                raise ValueError(
                    f"compression {self.flag!r} can't send the gradient of {name!r}, which is {parameter.dtype}: it"
                    " works on real floating-point gradients. Keep real and imaginary parts as two parameters, or set"
                    " compression='none'."
                )
        for name, part in module.named_modules():
            if getattr(part, "sparse", False) is True and isinstance(part, (nn.Embedding, nn.EmbeddingBag)):
                raise ValueError(
                    f"compression {self.flag!r} can't send the sparse gradient of {name!r}: set sparse=False there, or"
                    " compression='none'."
                )

    # --- how a strategy uses it

    def begin(self, module: nn.Module, wire: Wire, scaler: torch.amp.GradScaler | None = None) -> None:
        """Called before a run, with the parameters that will have gradients and the loss scale, if any."""
        if not self.is_checked:
            self.check(module)
        self.step = 0
        for forgotten in (self._buckets, self._greatest_norms, self._greatest_sums):
            forgotten.clear()
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self.wire = wire
        self._is_on_gpu = any(parameter.is_cuda for parameter in self._names)
        self._scaler = scaler
        for memory in self.memories().values():
            # With a loss scale a step may overflow, which is known only when all buckets are averaged.
            memory.in_two_phases = scaler is not None or self.may_repeat
            memory.load_state_dict({})

    @property
    def overlaps(self) -> bool:
        """See the class."""
        return self._background is not None or self._is_on_gpu

    def attach(
        self,
        model: DistributedDataParallel,
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Registers the hook on `model`, whatever its device; `timeout` is that of its collectives."""
        if self._background is None:
            device = next(model.parameters()).device
            self._background = Background(device)
            # The thread's collectives and those of the other threads have no common order: it has a group of its own.
            wire = Wire(dist.new_group(timeout=timeout) if device.type == "cpu" else None)
        else:
            assert self.wire is not None
            wire = self.wire
        self.finds_unused = model.find_unused_parameters
        self.begin(model.module, wire, scaler)
        model.register_comm_hook(state=None, hook=self._on_bucket)

    def run(self, bucket: Bucket, ready: Any = None) -> Tensor:
        """Averages `bucket` at once."""
        assert self.wire is not None
        self.num_calls += 1
        self.wire.bucket = bucket.index
        self.num_plain_bytes += round(bucket.gradients.nbytes * 2 * (self.wire.size - 1) / self.wire.size)
        if self.moments is not None and ready is None:
            ready = mark(bucket.gradients.device)
        # Phase 1. Under a loss scale infinities are in order, and the step is left out.
        if self._scaler is None:
            self._note_bad(bucket.index, bucket.members, bucket.gradients.split(bucket.numels))
        # Phase 2.
        self.average(bucket, self.wire)
        # Phase 3. The same on all ranks, so that all can act on it.
        if self._scaler is None:
            self._note_average(bucket.index, bucket.gradients)
        if self.moments is not None:
            self.moments.append((bucket.index, ready, mark(bucket.gradients.device)))
        return bucket.gradients

    def run_reduce_scatter(self, shard: Tensor, whole: Tensor, unit: int, members: tuple[Member, ...]) -> None:
        """Writes this rank's part [n], made of `members`, of the average of `whole` [W n] to `shard`, at once."""
        assert self.wire is not None
        self.num_calls += 1
        self.wire.bucket = unit
        self.num_plain_bytes += round(whole.nbytes * self.wire.reduce_scatter_share)
        self.sees_shards_only = True
        if self._scaler is None and sum(member.numel for member in members) == shard.numel():  # else some have none
            parts = whole.view(self.wire.size, -1).split([member.numel for member in members], dim=1)
            self._note_bad(unit, members, parts)
        self.reduce_scatter(shard, whole, self.wire)
        if self._scaler is None:
            self._note_average(unit, shard)

    def raise_if_bad(self) -> None:
        """Reads from the device whether all averages were finite so far.

        Raises:
            NonFiniteGradientError: on every rank, if one was not; names the rank and parameter that had it first.
        """
        if not self._greatest_sums:
            return
        assert self.wire is not None
        bad = (~torch.stack(list(self._greatest_sums.values())).isfinite()).any().int()
        self._greatest_sums.clear()
        if self.sees_shards_only:
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=self.wire.group)
        if not bad:
            return
        found: list[Any] = [None] * self.wire.size
        dist.all_gather_object(found, (dist.get_rank(), self._worst()), group=self.wire.group)
        culprits = [(*worst, rank) for rank, worst in found if worst is not None]
        if not culprits:
            raise NonFiniteGradientError(
                f"compression {self.flag!r}: an average of {self.of}s overflowed at step {self.step}, though each"
                f" rank's own {self.of}s were finite. float16 ends at 65504: choose bf16, or a smaller loss."
            )
        step, name, rank = min(culprits, key=lambda culprit: culprit[0])
        num_others = sum(other[0] == step for other in culprits) - 1
        others = f" (and of {num_others} more rank(s))" if num_others else ""
        raise NonFiniteGradientError(
            f"the {self.of} of {name!r} on rank {rank} was infinite or NaN at step {step}{others}. Training stops,"
            f" since compression {self.flag!r} averages it into all ranks' weights and memory. Often a learning rate"
            " that is too high, a logarithm or division of zero, or a sample that is not finite."
        )

    def finish(self) -> None:
        """Waits for what was begun beside backward."""
        if self._background is not None:
            self._background.wait()

    def settle(self, *, skipped: bool = False) -> None:
        """The optimizer has stepped, or skipped the step since its gradients had overflowed."""
        for memory in self.memories().values():
            memory.settle(keep=not skipped)
        if not skipped:
            self.step += 1

    @property
    def num_bytes(self) -> int:
        """Bytes this rank has sent so far."""
        return 0 if self.wire is None else sum(self.wire.sent.values())

    def state_dict(self) -> dict[str, Any]:
        """All that the method goes on with: the memories by the names of parameters.

        Raises:
            NonFiniteGradientError: they would carry on what was not finite.
        """
        self.raise_if_bad()
        memories = {name: memory.state_dict() for name, memory in self.memories().items()}
        return {"flag": self.flag, "step": self.step, "of": self.of, **memories}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with a `state_dict`, also of another method; ``"residuals"`` are this rank's."""
        self.step = state["step"]
        if state.get("residuals") and "residuals" not in self.memories():
            rank_zero_warn(
                f"The checkpoint was saved under another `compression`: {self.flag!r} keeps nothing for later, so what"
                " the hook had not sent yet is lost."
            )
        for name, memory in self.memories().items():
            memory.load_state_dict(state.get(name, {}))

    # ---

    def _on_bucket(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        assert self._background is not None
        index, gradients = bucket.index(), bucket.buffer()
        ours = Bucket(index, gradients, self._members_of(index, bucket.parameters()))
        ready = mark(gradients.device) if self.moments is not None else None
        return self._background.submit(lambda: self.run(ours, ready), index)

    def _members_of(self, index: int, parameters: list[Tensor]) -> tuple[Member, ...]:
        """The members of a bucket, by the names that the module gave them."""
        known, members = self._buckets.get(index, ([], ()))
        if len(known) != len(parameters) or any(a is not b for a, b in zip(known, parameters, strict=True)):
            members = tuple(Member(self._names[p], tuple(p.shape)) for p in parameters)
            self._buckets[index] = (parameters, members)
        return members

    # Greatest values, since NaN stays the greatest: few kernels, which backward's thread launches for every bucket.

    def _note_bad(self, index: int, members: tuple[Member, ...], gradients: tuple[Tensor, ...]) -> None:
        """Keeps the step at which each member was first not finite, without reading it from the device."""
        norms = torch.stack(torch._foreach_norm(gradients, dtype=wide(gradients[0].dtype)))
        known = self._greatest_norms.get(index)
        if known is None or known.members != members:
            known = _Norms(members, torch.zeros_like(norms), torch.zeros_like(norms, dtype=torch.int64))
            self._greatest_norms[index] = known
        known.steps.masked_fill_(known.greatest < torch.inf, self.step)
        torch.maximum(known.greatest, norms, out=known.greatest)

    def _note_average(self, index: int, average: Tensor) -> None:
        total = average.sum(dtype=wide(average.dtype)).abs_()
        known = self._greatest_sums.setdefault(index, total)
        if known is not total:
            torch.maximum(known, total, out=known)

    def _worst(self) -> tuple[int, str] | None:
        """Step and name of the gradient of this rank that was first not finite."""
        steps = [
            (step, member.name)
            for known in self._greatest_norms.values()
            for member, step, norm in zip(known.members, known.steps.tolist(), known.greatest.tolist(), strict=True)
            if not math.isfinite(norm)
        ]
        return min(steps, default=None)


class _Norms(NamedTuple):
    members: tuple[Member, ...]
    greatest: Tensor
    """The greatest norm of each member so far."""
    steps: Tensor
    """The step at which it was first not finite; of those that have always been, the last one."""
