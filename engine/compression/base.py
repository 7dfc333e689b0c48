"""Base class of compression methods, which average a bucket of gradients over the ranks with less traffic.

Phases of each bucket, all during backward: 1. note which gradients are not finite (local); 2. `average`, with the
method's own collectives; 3. note whether the average is finite (local). On the CPU they run in a thread, bucket after
bucket; on a GPU on two alternating streams, so that one bucket is compressed while another is sent. In both cases
the collectives of all buckets have the same order on every rank. (Torch's PowerSGD starts its second all-reduce when
the first one ends, and under gloo that order may differ between ranks.)
"""

import atexit
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..devices import module_of
from ..distributed.connections import noting_connections
from ..reliability.hard_exit import hard_exit
from .counting_group import Bucket, CountingGroup, ParamSlice, accumulation_dtype, timestamp

__all__ = ["CommHook", "NonFiniteGradientError", "ParameterState"]


# --- values that a method keeps for each parameter between steps, such as residuals
# The values are stored as one flat tensor per bucket. Because DDP rebuilds its buckets after the first step of each
# run, and checkpoints identify parameters by name, values move by name when the members of a bucket change.


class ParameterState:
    """One flat tensor for each bucket, with a part for each member.

    A method reads `values_of(bucket)` and writes to `stage(bucket)`. With `in_two_phases`, `stage` returns a second
    tensor, which replaces the first one when the step is committed; otherwise both are the same tensor.

    Args:
        sizes: returns the number of values for each member of a bucket, in storage order.
        initial: returns the initial values of a part, flat; None for zeros.
    """

    def __init__(
        self,
        sizes: Callable[[Bucket], dict[ParamSlice, int]],
        initial: Callable[[ParamSlice, int], Tensor] | None = None,
    ) -> None:
        self.in_two_phases = False
        self._sizes = sizes
        self._initial = initial
        self._tensors: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor] = {}
        self._written: set[int] = set()
        self._parts: dict[int, dict[ParamSlice, int]] = {}
        self._members: dict[int, tuple[ParamSlice, ...]] = {}
        self._waiting: dict[str, Tensor] = {}  # parts of parameters whose bucket was not seen yet

    def values_of(self, bucket: Bucket) -> Tensor:
        """Returns the kept values of the members of `bucket`, as one flat tensor."""
        index = bucket.index
        if index in self._written:
            self._keep(index)  # a second backward before the step: the first backward's values count
        if self._members.get(index) != bucket.members:
            self._fill(bucket)
        return self._tensors[index]

    def stage(self, bucket: Bucket) -> Tensor:
        """Returns the tensor to which to write the next values of `bucket`; call `values_of` first."""
        index = bucket.index
        if not self.in_two_phases:
            return self._tensors[index]
        if index not in self._staged:
            self._staged[index] = torch.empty_like(self._tensors[index])
        self._written.add(index)
        return self._staged[index]

    def commit(self, *, skipped: bool | Tensor) -> None:
        """Ends a step: keeps the staged values unless it was skipped, as a 0-d tensor or the host says."""
        for index in list(self._written):
            if isinstance(skipped, Tensor):
                staged = self._staged[index]
                torch.where(skipped, self._tensors[index], staged, out=staged)
            if skipped is not True:
                self._keep(index)
        self._written.clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns each member's part, by name, as views."""
        state = dict(self._waiting)
        for index, tensor in self._tensors.items():
            parts = self._parts[index]
            values = tensor.split(list(parts.values()))
            state |= {member.name: value for member, value in zip(parts, values, strict=True)}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Loads parts by parameter name; each moves into its bucket when that bucket is first seen."""
        self._waiting = dict(state)
        for kept in (self._tensors, self._staged, self._parts, self._members):
            kept.clear()
        self._written.clear()

    def _keep(self, index: int) -> None:
        self._tensors[index], self._staged[index] = self._staged[index], self._tensors[index]
        self._written.discard(index)

    def _fill(self, bucket: Bucket) -> None:
        if bucket.index in self._members:  # buckets were rebuilt: any parameter may be in another bucket now
            self.load_state_dict(self.state_dict())
        flat = bucket.gradients
        parts = self._sizes(bucket)
        tensors = [self._part(member, size, flat) for member, size in parts.items()]
        self._tensors[bucket.index] = torch.cat([flat.new_empty(0), *tensors])
        self._parts[bucket.index], self._members[bucket.index] = parts, bucket.members

    def _part(self, member: ParamSlice, size: int, like: Tensor) -> Tensor:
        saved = self._waiting.pop(member.name, None)
        if saved is not None and saved.numel() == size:
            if saved.device.type != "cpu":
                # The part's memory may belong to another bucket's stream, and must not be reused there too early.
                saved.record_stream(torch.accelerator.current_stream(saved.device))
            return saved.flatten().to(like)
        return like.new_zeros(size) if self._initial is None else self._initial(member, size).to(like)


class NonFiniteGradientError(RuntimeError):
    """A gradient was infinite or NaN; compression would keep it in its residuals and affect all later steps."""


class CommHook(ABC):
    """Replaces buckets of local gradients by their average over all ranks.

    A method implements `average`, and `memories` if it keeps state.

    Attributes:
        flag: the flag from which the hook was made.
        num_calls: number of buckets averaged so far.
        num_plain_bytes: bytes that this rank would have sent so far without compression.
        overlaps: whether backward continues while buckets are averaged.
        step: number of optimizer steps done.
        wire: the group through which the hook communicates; None before training.
        bucket_times: for each bucket since the list was last cleared: its index, when its gradients were ready, when
            they were averaged (seconds or CUDA events); None: times are not recorded.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    reduces_shards: ClassVar[bool] = False
    """Whether the method has a `reduce_scatter`, so that it works if no rank holds the average of all gradients."""
    bucket_mb: ClassVar[float] = 200.0
    """Size of DDP's buckets on a GPU, in MiB: kernels of a small bucket take less time than their launches."""
    takes_dtype: ClassVar[bool] = False
    """Whether the method's messages may be sent in 16 bit: ``powersgd+fp16``."""

    def __init__(self) -> None:
        self.flag = self.name
        self.num_calls = 0
        self.num_plain_bytes = 0
        self.step = 0
        self.wire: CountingGroup | None = None
        self.bucket_times: list[tuple[int, Any, Any]] | None = None
        self.send_dtype: torch.dtype | None = None
        self.quantity = "gradient"
        """The kind of values that are averaged: ``"gradient"``, or ``"change"`` of weights."""
        self.is_checked = False
        """Whether `check` was called for the module that is trained."""
        self._scaler: torch.amp.GradScaler | None = None
        self._is_on_gpu = False
        self._device = torch.device("cpu")
        self._names: dict[Tensor, str] = {}
        self._buckets: dict[int, tuple[list[Tensor], tuple[ParamSlice, ...]]] = {}
        self._background: _CommWorker | None = None
        self._has_joined = False
        """Whether `wire` is over the ranks that there are."""
        self._greatest_norms: dict[int, _Norms] = {}
        self._greatest_sums: dict[int, Tensor] = {}
        self.may_repeat = False
        """Whether a step may be repeated after its buckets were averaged; set before training."""
        self.may_leave_out = False
        """Whether a step is left out if its gradients are not finite; set before training.

        A method's average is not finite on any rank if a gradient of one rank is not."""
        self.finds_unused = False
        """Whether DDP ignores the average of gradients that no rank has computed."""
        self.sees_shards_only = False
        """Whether each rank has only a part of the averages, as with `reduce_scatter`."""

    # --- for a method to implement

    @abstractmethod
    def average(self, bucket: Bucket, wire: CountingGroup) -> None:
        """Replaces ``bucket.gradients`` by their average over the ranks of `wire`, with the collectives of `wire`."""

    def reduce_scatter(self, shard: Tensor, whole: Tensor, wire: CountingGroup) -> None:
        """Writes this rank's part [n] of the average of `whole` [W n] over the ranks of `wire` to `shard`."""
        raise NotImplementedError(f"{self.name} has no reduce-scatter")

    def prepare(self, like: Tensor, num_ranks: int) -> None:  # noqa: B027 (most methods have nothing to compile)
        """Compiles what the method computes, for gradients with the dtype and device of `like`; called before training,
        since ranks that compile in a step take different times."""

    def memories(self) -> dict[str, ParameterState]:
        """Returns the method's state by name. ``"residuals"`` has the values that each rank has not sent yet; all other
        state is the same on all ranks."""
        return {}

    def check(self, module: nn.Module) -> None:
        """Checks before training that the gradients of `module` can be compressed.

        Raises:
            ValueError: gradients will be complex or sparse.
        """
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and not parameter.dtype.is_floating_point:
                raise ValueError(
                    f"compression {self.flag!r} can't send the gradient of {name!r}, which is {parameter.dtype}: it"
                    " works on real floating-point gradients. Keep real and imaginary parts as two parameters, or set"
                    " compression='none'."
                )
        for name, submodule in module.named_modules():
            if getattr(submodule, "sparse", False) is True and isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)):
                raise ValueError(
                    f"compression {self.flag!r} can't send the sparse gradient of {name!r}: set sparse=False there, or"
                    " compression='none'."
                )

    # --- for strategies to call

    def begin(self, module: nn.Module, wire: CountingGroup, scaler: torch.amp.GradScaler | None = None) -> None:
        """Prepares for a run that trains `module`; `scaler` is the loss scaler, if there is one."""
        if not self.is_checked:
            self.check(module)
        self.step = 0
        for forgotten in (self._buckets, self._greatest_norms, self._greatest_sums):
            forgotten.clear()
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        self.wire = wire
        self._is_on_gpu = any(parameter.is_cuda for parameter in self._names)
        self._device = next(iter(self._names)).device if self._names else torch.device("cpu")
        self._scaler = scaler
        trained = next((parameter for parameter in self._names if parameter.requires_grad), None)
        if trained is not None:
            self.prepare(trained, wire.size)
        for memory in self.memories().values():
            # With a loss scale a step may overflow, and this is known only after all buckets are averaged.
            memory.in_two_phases = scaler is not None or self.may_repeat or self.may_leave_out
            memory.load_state_dict({})

    @property
    def overlaps(self) -> bool:
        """Whether backward continues while buckets are averaged."""
        return self._background is not None or self._is_on_gpu

    def attach(
        self,
        model: DistributedDataParallel,
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """Registers the hook on `model` on any device; `timeout` is for the hook's collectives."""
        self.finds_unused = model.find_unused_parameters
        self.begin_beside(model.module, scaler, timeout)
        model.register_comm_hook(state=None, hook=self._on_bucket)

    def begin_beside(
        self, module: nn.Module, scaler: torch.amp.GradScaler | None = None, timeout: timedelta | None = None
    ) -> None:
        """As `begin`, with collectives that run beside the computing; all ranks call it."""
        if self._background is None:
            self._background = _CommWorker(next(module.parameters()).device)
        if not self._has_joined:
            self.join_ranks(timeout)
        assert self.wire is not None
        self.begin(module, self.wire, scaler)

    def join_ranks(self, timeout: timedelta | None = None) -> None:
        """Communicates with all ranks there are: at the beginning, and when some are lost; all of them call it."""
        group = None
        if self._background is not None and self._background.device.type == "cpu":
            # The worker thread needs its own group: its collectives have no fixed order to those of other threads.
            with noting_connections():
                group = dist.new_group(timeout=timeout)
        self.wire, self._has_joined = self.over(group), True

    def over(self, group: dist.ProcessGroup | None) -> CountingGroup:
        """Returns the wire, from now on over the ranks of `group`; None for all ranks."""
        if self.wire is None:
            return CountingGroup(group)
        self.wire.join(group)
        return self.wire

    def leave_ranks(self) -> None:
        """Forgets the group, whose connections are cut, once all that ran beside the computing has failed."""
        self.finish()
        self._has_joined = False
        if self.wire is not None:
            self.wire.group = None

    def factor_of(self, own: Any, of_all: Any) -> Any:
        """Returns W w / T for this rank's weight w: values times that have the weighted mean as their average.

        Args:
            own: w, a number or a 0-d tensor.
            of_all: T, the sum over the W ranks, all of which have it; None: it is summed, by an all-reduce of 8 bytes.
        """
        assert self.wire is not None
        if of_all is not None:
            return own * self.wire.size / of_all if of_all else 1.0
        own = torch.as_tensor(own, dtype=torch.float64, device=self._device)
        total = self.wire.all_reduce(own.clone())
        return torch.where(total > 0, own * self.wire.size / total, 1.0)

    def run_beside(self, buckets: list[Bucket], own: Any = 0, of_all: Any = 0) -> Callable[[], list[Tensor]]:
        """Begins to run buckets beside the computing, after `begin_beside`; the returned function waits for them.

        Args:
            buckets: their weighted means are taken.
            own: see `factor_of`.
            of_all: likewise.
        """
        assert self._background is not None

        def run() -> Any:
            factor = self.factor_of(own, of_all)
            for bucket in buckets:
                bucket.gradients.mul_(factor)
            averages = [self.run(bucket) for bucket in buckets]
            self.on_step_end()
            return averages

        return self._background.submit(run).wait  # type: ignore[return-value]

    def run(self, bucket: Bucket, ready: Any = None) -> Tensor:
        """Runs the three phases for `bucket`, and returns the averaged gradients."""
        assert self.wire is not None
        self.num_calls += 1
        self.wire.bucket = bucket.index
        self.num_plain_bytes += round(bucket.gradients.nbytes * 2 * (self.wire.size - 1) / self.wire.size)
        if self.bucket_times is not None and ready is None:
            ready = timestamp(bucket.gradients.device)
        # Phase 1. With a loss scale, infinities are expected; the step is then skipped, as it is if it may be left out.
        if self._scaler is None and not self.may_leave_out:
            self._note_bad(bucket.index, bucket.members, bucket.gradients.split(bucket.numels))
        # Phase 2.
        self.average(bucket, self.wire)
        # Phase 3. The result is the same on all ranks, so all can act on it.
        if self._scaler is None and not self.may_leave_out:
            self._note_average(bucket.index, bucket.gradients)
        if self.bucket_times is not None:
            self.bucket_times.append((bucket.index, ready, timestamp(bucket.gradients.device)))
        return bucket.gradients

    def run_reduce_scatter(self, shard: Tensor, whole: Tensor, unit: int, members: tuple[ParamSlice, ...]) -> None:
        """Writes this rank's part [n] of the average of `whole` [W n] to `shard`, which consists of `members`."""
        assert self.wire is not None
        self.num_calls += 1
        self.wire.bucket = unit
        self.num_plain_bytes += round(whole.nbytes * self.wire.reduce_scatter_share)
        self.sees_shards_only = True
        # If the sizes differ, some members have no gradients.
        watches = self._scaler is None and not self.may_leave_out
        if watches and sum(member.numel for member in members) == shard.numel():
            parts = whole.view(self.wire.size, -1).split([member.numel for member in members], dim=1)
            self._note_bad(unit, members, parts)
        self.reduce_scatter(shard, whole, self.wire)
        if watches:
            self._note_average(unit, shard)

    def raise_if_bad(self) -> None:
        """Reads from the device whether all averages so far were finite.

        Raises:
            NonFiniteGradientError: on every rank, if one was not; names the first such parameter and its rank.
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
        worst_by_rank: list[Any] = [None] * self.wire.size
        dist.all_gather_object(worst_by_rank, (dist.get_rank(), self._worst()), group=self.wire.group)
        culprits = [(*worst, rank) for rank, worst in worst_by_rank if worst is not None]
        if not culprits:
            raise NonFiniteGradientError(
                f"compression {self.flag!r}: an average of {self.quantity}s overflowed at step {self.step}, though each"
                f" rank's own {self.quantity}s were finite. float16 ends at 65504: choose bf16, or a smaller loss."
            )
        step, name, rank = min(culprits, key=lambda culprit: culprit[0])
        num_others = sum(other[0] == step for other in culprits) - 1
        others = f" (and of {num_others} more rank(s))" if num_others else ""
        raise NonFiniteGradientError(
            f"the {self.quantity} of {name!r} on rank {rank} was infinite or NaN at step {step}{others}. Training"
            f" stops, since compression {self.flag!r} averages it into all ranks' weights and state. Frequent causes: a"
            " learning rate that is too high, a logarithm of zero, a division by zero, or a sample that is not finite."
            " nonfinite='skip' leaves such steps out."
        )

    def finish(self) -> None:
        """Waits until all buckets are averaged: this may take longer than backward, with which it overlaps."""
        if self._background is not None:
            self._background.wait()

    def on_step_end(self, *, skipped: bool | Tensor = False) -> None:
        """Called after the optimizer's step, or when the step was skipped because gradients were not finite.

        Args:
            skipped: a 0-d tensor if only the device knows; the step is counted then.
        """
        for memory in self.memories().values():
            memory.commit(skipped=skipped)
        if skipped is not True:
            self.step += 1

    @property
    def num_bytes(self) -> int:
        """Number of bytes that this rank has sent so far."""
        return 0 if self.wire is None else sum(self.wire.sent.values())

    def state_dict(self) -> dict[str, Any]:
        """Returns the method's state: the memories by parameter name.

        Raises:
            NonFiniteGradientError: the memories contain values that are not finite.
        """
        self.raise_if_bad()
        memories = {name: memory.state_dict() for name, memory in self.memories().items()}
        return {"flag": self.flag, "step": self.step, "of": self.quantity, **memories}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a `state_dict`, also of another method; ``"residuals"`` are those of this rank."""
        self.step = state["step"]
        if state.get("residuals") and "residuals" not in self.memories():
            rank_zero_warn(
                f"The checkpoint was saved with another `compression`: {self.flag!r} keeps no residuals, so gradients"
                " that the saved hook had not sent yet are lost."
            )
        for name, memory in self.memories().items():
            memory.load_state_dict(state.get(name, {}))

    # ---

    def _on_bucket(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        assert self._background is not None
        index, gradients = bucket.index(), bucket.buffer()
        local = Bucket(index, gradients, self._members_of(index, bucket.parameters()))
        ready = timestamp(gradients.device) if self.bucket_times is not None else None
        return self._background.submit(lambda: self.run(local, ready), index)

    def _members_of(self, index: int, parameters: list[Tensor]) -> tuple[ParamSlice, ...]:
        """Returns the members of a bucket with their parameter names."""
        cached, members = self._buckets.get(index, ([], ()))
        if len(cached) != len(parameters) or any(a is not b for a, b in zip(cached, parameters, strict=True)):
            members = tuple(ParamSlice(self._names[p], tuple(p.shape)) for p in parameters)
            self._buckets[index] = (parameters, members)
        return members

    # The maximum keeps NaN, and needs few kernels, which backward's thread launches for every bucket.

    def _note_bad(self, index: int, members: tuple[ParamSlice, ...], gradients: tuple[Tensor, ...]) -> None:
        """Records the step at which each member was first not finite, without reading from the device."""
        norms = torch.stack(torch._foreach_norm(gradients, dtype=accumulation_dtype(gradients[0].dtype)))
        record = self._greatest_norms.get(index)
        if record is None or record.members != members:
            record = _Norms(members, torch.zeros_like(norms), torch.zeros_like(norms, dtype=torch.int64))
            self._greatest_norms[index] = record
        record.steps.masked_fill_(record.greatest < torch.inf, self.step)
        torch.maximum(record.greatest, norms, out=record.greatest)

    def _note_average(self, index: int, average: Tensor) -> None:
        total = average.sum(dtype=accumulation_dtype(average.dtype)).abs_()
        greatest = self._greatest_sums.setdefault(index, total)
        if greatest is not total:
            torch.maximum(greatest, total, out=greatest)

    def _worst(self) -> tuple[int, str] | None:
        """Returns step and name of this rank's first gradient that was not finite."""
        steps = [
            (step, member.name)
            for norms in self._greatest_norms.values()
            for member, step, norm in zip(norms.members, norms.steps.tolist(), norms.greatest.tolist(), strict=True)
            if not math.isfinite(norm)
        ]
        return min(steps, default=None)


class _Norms(NamedTuple):
    members: tuple[ParamSlice, ...]
    greatest: Tensor
    """The largest norm of each member so far."""
    steps: Tensor
    """The step at which the norm was first not finite; the last step if it was always finite."""


# --- the thread that communicates
# Runs functions in the background during backward, in the order in which they were submitted.


_PATIENCE_S = 2.0
"""Seconds that an exiting process waits for the thread."""


_NUM_STREAMS = 2
"""Number of streams, so that one bucket is compressed while the collectives of another are in flight."""


class _CommWorker:
    """Uses a thread on the CPU, where collectives block, and streams on a GPU, where they do not.

    Functions with even and odd places use separate streams. One thread launches them, so that their collectives have
    the same order on all ranks; the computations of two successive functions may overlap.

    Args:
        device: the device of the functions' tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = module_of(device)
        num_streams = _NUM_STREAMS if hasattr(self._module, "Stream") else 0
        self._streams = [self._module.Stream(device=device) for _ in range(num_streams)]
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Tensor], Future[Any]] | None] = queue.SimpleQueue()
        self.device = device
        if not self._streams:
            # A daemon, since at exit it may still wait in a collective that other ranks never join.
            self._thread = threading.Thread(target=self._work, name="polyphase-compression", daemon=True)
            self._thread.start()
            _with_thread.append(self)

    def submit(self, function: Callable[[], Tensor], place: int = 0) -> Future[Tensor]:
        """Returns the future of `function`'s result; an error of the function is raised by waiting for the future.

        Args:
            function: called here, or in the thread.
            place: index of the data that it works on; earlier functions with this index finish first.
        """
        if not self._streams:
            done: Future[Any] = Future()
            self._tasks.put((function, done))
            return done.then(_result)
        stream = self._streams[place % len(self._streams)]
        stream.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(stream), torch.no_grad():
            future: Future[Tensor] = Future(devices=[self.device])
            future.set_result(function())  # the future records the pending work of the stream
        return future

    def wait(self) -> None:
        """Waits for all submitted functions; on an accelerator, the current stream waits instead of the host."""
        if not self._streams:
            self.submit(lambda: torch.empty(0)).wait()
        # Waits for streams, not futures: if a function raised after launching work, no future covers that work.
        for stream in self._streams:
            self._module.current_stream(self.device).wait_stream(stream)

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        while (task := self._tasks.get()) is not None:
            function, done = task
            outcome: Any
            try:
                outcome = function()
            except BaseException as error:
                outcome = error
            done.set_result(outcome)
            del task, function, done, outcome  # frees their memory before the next task

    def end(self) -> None:
        """Ends the thread; ends the process at once if the thread waits for ranks that have failed."""
        self._tasks.put(None)
        self._thread.join(_PATIENCE_S)
        if self._thread.is_alive():
            hard_exit()


_with_thread: list[_CommWorker] = []


@atexit.register
def _end_threads() -> None:
    # Torch aborts the process (SIGABRT) if a collective ends during interpreter shutdown.
    for background in _with_thread:
        background.end()


def _result(done: Future[Any]) -> Tensor:
    outcome = done.value()
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome
