"""Finds the step and the rank at which a loss, or the norm of the gradients, was first not finite.

A step only keeps a reference to its scalar. The values are read together, at logging intervals and at the end of an
epoch, so that no step waits for the device. `strategies/step_guard.py` leaves out the steps meanwhile, under the
policies ``"skip"`` and ``"error"``.
"""

import contextlib
import logging
import math
import time
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from ..distributed.job_store import CausedByRank
from ..flags import NonFinitePolicy
from .rendezvous import current_job

__all__ = ["MOST_IN_A_ROW", "SPIKE", "NonFiniteError", "NonFiniteWatch"]

MOST_IN_A_ROW = 20
"""The steps in a row that are left out before the run ends: more than the 16 by which `16-mixed` may come down from its
first scale, 65536, to 1."""

SPIKE = 0.25
"""The flag of a step whose gradients are finite, and too large; see `StepGuard` for the other flags."""

_INTERVAL_STEPS = 50
"""The steps between two reads if `log_every_n_steps=0`."""

log = logging.getLogger("polyphase.engine")


class NonFiniteError(CausedByRank, RuntimeError):
    """A loss or gradient was infinite or NaN, first on `rank`: once with `nonfinite="error"`, often with `"skip"`."""


class NonFiniteWatch:
    """Watches scalars for infinities and NaN.

    Args:
        policy: ``"warn"`` once for each scalar and epoch, raise an ``"error"``, ``"skip"`` such steps, or ``"ignore"``.
        largest_norm: skip a step if the norm of its gradients is larger than that many times the mean; None: don't.

    Raises:
        ValueError: `policy` does not go with `largest_norm`.
    """

    def __init__(self, policy: NonFinitePolicy, largest_norm: float | None = None) -> None:
        self.policy = policy
        if largest_norm is not None and (policy != "skip" or not largest_norm > 1):
            raise ValueError(
                f"skip_spikes={largest_norm} leaves out steps with more than that many times the usual norm: give a"
                " number larger than 1, and nonfinite='skip'."
            )
        self.largest_norm = largest_norm
        self._unread: list[tuple[str, int, Tensor]] = []
        self._due = 0  # the optimizer step from which on the values are read
        self._names: dict[str, int] = {}  # in the order in which a step has them
        self._reported: set[str] = set()  # names of the scalars that were reported in this epoch
        self._failure: NonFiniteError | None = None
        self._flags: list[tuple[_Step, Tensor]] = []
        self._num_in_a_row = 0
        self._evidence = ""
        self.num_skipped = 0
        """The steps of this run that were left out, as far as they were read."""

    @property
    def guards_steps(self) -> bool:
        """Whether steps are left out, rather than only reported."""
        return self.policy in ("error", "skip")

    def observe(self, trainer: Trainer, name: str, value: Tensor | None, step: int) -> None:
        """Keeps a scalar of optimizer step `step`, a 0-d tensor; reads all that are kept once a logging interval."""
        if self.policy == "ignore" or value is None:
            return
        if step >= self._due:
            self._read_now(trainer, step)
        if self.policy == "skip":
            return  # the flags of the steps have it
        if name not in self._names:
            self._names[name] = len(self._names)
        self._unread.append((name, step, value))

    def judge(self, trainer: Trainer, flag: float | Tensor, step: int, batch_idx: int) -> None:
        """Takes the flag of an optimizer step, as `StepGuard` computes it; a tensor is read with the next scalars.

        Raises:
            NonFiniteError: the run must end.
        """
        judged = _Step(step, batch_idx)
        if isinstance(flag, Tensor):
            if step >= self._due:
                self._read_now(trainer, step)
            self._flags.append((judged, flag))
        else:
            self._act(trainer, judged, flag)

    def _read_now(self, trainer: Any, step: int) -> None:
        self.read(trainer)
        self._due = step + (trainer.log_every_n_steps or _INTERVAL_STEPS)

    def _act(self, trainer: Any, judged: "_Step", flag: float) -> None:
        is_scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        rank = round(trainer.world_size - flag) if flag >= 1 else None
        if self.policy == "error":
            if flag >= 1 or (flag > 0 and not is_scaled):  # a scale that is too large is no fault
                evidence = trainer.fit_loop.epoch_loop.automatic_optimization.evidence
                self._evidence = "" if evidence is None else evidence.write(judged.step)
                self._read_scalars(trainer)
                self._raise(trainer, _GRADIENT, judged.step, _LAST)
            return
        if flag == 0:
            self._num_in_a_row = 0
            return
        self._num_in_a_row += 1
        self.num_skipped += 1
        is_spike = flag % 1 == SPIKE
        if trainer.global_rank == (rank or 0) and (is_spike or not (is_scaled and rank is None)):
            what = "a loss or gradient of batch {} was not finite"
            if is_spike:
                what = f"the gradients of batch {{}} had a norm of more than {self.largest_norm} times the mean"
            on_rank = "" if rank is None else f" on rank {rank}"
            log.warning(
                f"{what.format(judged.batch_idx)} at step {judged.step} (epoch {trainer.current_epoch}){on_rank}: the"
                f" step is left out, on all ranks. So were {self.num_skipped - 1} before it in this run."
                f"{_samples(trainer, judged, is_alone=rank is not None)}"
            )
        if self._num_in_a_row >= MOST_IN_A_ROW:
            why = "were spikes" if is_spike else "were not finite"
            self._failure = NonFiniteError(
                f"{MOST_IN_A_ROW} steps in a row {why} and left out, the last one at step {judged.step}: it"
                f" is no single batch. {_CAUSES}",
                rank or 0,
            )
            raise self._failure

    def begin_run(self) -> None:
        """Resets the failure and the counts; called when a run begins."""
        self._failure, self._num_in_a_row, self.num_skipped, self._evidence = None, 0, 0, ""

    def read_before_save(self, trainer: Trainer) -> NonFiniteError | None:
        """Reads the scalars that are kept; returns the error for which the state must not be saved, None without one.

        Under the policy ``"warn"`` there is none: the run continues, and its state is saved.
        """
        with contextlib.suppress(NonFiniteError):  # kept in `_failure`
            self.read(trainer)
        return self._failure

    def begin_epoch(self, trainer: Trainer) -> None:
        """Drops the scalars of an epoch that was interrupted, and the names that were reported."""
        self._unread, self._flags = [], []
        self._due = trainer.global_step + (trainer.log_every_n_steps or _INTERVAL_STEPS)  # type: ignore[attr-defined]
        self._reported.clear()

    def end_epoch(self, trainer: Trainer) -> None:
        """Reads the scalars since the last logging interval."""
        self.read(trainer)

    def read(self, trainer: Trainer) -> None:
        """Reads all that is kept.

        Raises:
            NonFiniteError: the run must end.
        """
        flags, self._flags = self._flags, []
        values = _read_all([flag for _, flag in flags], trainer.strategy.root_device)
        for (judged, _), value in zip(flags, values, strict=True):
            self._act(trainer, judged, value)
        self._read_scalars(trainer)

    def _read_scalars(self, trainer: Trainer) -> None:
        unread, self._unread = self._unread, []
        values = _read_all([value for _, _, value in unread], trainer.strategy.root_device)
        bad = [(name, step) for (name, step, _), value in zip(unread, values, strict=True) if not math.isfinite(value)]
        for name in dict.fromkeys(name for name, _ in bad if name not in self._reported):
            self._reported.add(name)
            self._report(trainer, name, next(step for other, step in bad if other == name))

    def _report(self, trainer: Trainer, name: str, step: int) -> None:
        if self.policy == "error":
            self._raise(trainer, name, step, self._names[name])
        message = _message(trainer, name, step, trainer.global_rank)
        log.warning("%s Training continues; set nonfinite='error' to stop there.", message)

    def _raise(self, trainer: Trainer, name: str, step: int, order: int) -> NoReturn:
        first = _earliest({"rank": trainer.global_rank, "step": step, "name": name, "order": order})
        message = _message(trainer, first["name"], first["step"], first["rank"])
        self._failure = NonFiniteError(f"{message}{self._evidence}", first["rank"])
        raise self._failure


class _Step(NamedTuple):
    """An optimizer step, and the batch that it ends with."""

    step: int
    batch_idx: int


def _samples(trainer: Any, judged: _Step, *, is_alone: bool) -> str:
    """Names the samples of a step, those of this rank or of all, by their indices in the data set, if these are known.

    Args:
        trainer: in the epoch of the step.
        judged: the step.
        is_alone: whether it is this rank's samples.
    """
    is_one = not trainer.lightning_module.automatic_optimization
    num_batches = 1 if is_one else judged.batch_idx % trainer.accumulate_grad_batches + 1
    first = judged.batch_idx + 1 - num_batches
    rank = trainer.data_rank if is_alone else None
    indices = trainer._data_connector.data_position.indices_of(first, num_batches, rank)
    if indices is None:
        return ""
    named = ", ".join(map(str, indices[:_MOST_NAMED]))
    more = f", and {len(indices) - _MOST_NAMED} more" if len(indices) > _MOST_NAMED else ""
    return f" Its samples{' there' if is_alone and trainer.world_size > 1 else ''}: {named}{more}."


_MOST_NAMED = 64
"""The samples that a message names: a line, not a page."""

_GRADIENT = "gradient norm"
_LAST = 1_000_000
"""The order of what a rank knows from other ranks: theirs comes first."""
_CAUSES = "Often a learning rate that is too high, a logarithm or division of zero, or float16 that overflowed."


def _message(trainer: Trainer, name: str, step: int, rank: int) -> str:
    return f"the {name} was not finite at step {step} (epoch {trainer.current_epoch}) on rank {rank}. {_CAUSES}"


def _read_all(values: list[Tensor], device: torch.device) -> list[float]:
    """Reads scalars; those on accelerators in one copy from `device`.

    Scalars in host memory, such as the norm of offloaded gradients, are read one by one, which is faster there.
    """
    elsewhere = [_as_scalar(value.detach()).to(device, torch.float32) for value in values if not value.is_cpu]
    copied = iter(torch.stack(elsewhere).tolist() if elsewhere else ())
    return [_as_scalar(value).item() if value.is_cpu else next(copied) for value in values]


def _as_scalar(value: Tensor) -> Tensor:
    return value if value.dim() == 0 else value.detach().sum()


# --- the rank with the first value that is not finite
# Finds the rank on which a fault, such as a NaN, has begun, before it has spread to the other ranks.
#
# 1. Each rank that has a fault writes its step and name into the job's store.
# 2. It waits until all ranks have done so, or 3 s have passed. The ranks check at the same step, with no collective in
#    between, so they write at about the same time.
# 3. The earliest fault is returned; of several, that of the lowest rank.


_PATIENCE_S = 3.0
_TICK_S = 0.02
_FIELDS = {"rank": int, "step": int, "name": str, "order": int}


def _earliest(own_fault: dict[str, Any]) -> dict[str, Any]:
    """Returns the first fault of all ranks: the one with the smallest step, order and rank.

    Args:
        own_fault: of this rank: ``rank``, ``step``, ``name``, and ``order``, its order within a step.
    """
    job = current_job()
    if job is None or job.num_ranks == 1:
        return own_fault
    keys = [f"polyphase/nonfinite/{rank}" for rank in range(job.num_ranks)]
    faults = [own_fault]
    with suppress(RuntimeError):  # the store's process has ended
        job.write(keys[own_fault["rank"]], own_fault)
        deadline = time.monotonic() + _PATIENCE_S
        while len(faults) < len(keys) and time.monotonic() < deadline:
            time.sleep(_TICK_S)
            faults = list(job.read_all(keys, _FIELDS).values()) or faults
    return min(faults, key=lambda fault: (fault["step"], fault["order"], fault["rank"]))
